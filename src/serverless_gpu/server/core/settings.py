"""Reads the server's settings from options, environment variables, `server.toml` and defaults.

    sgpu up --partition-grace 1h    >    SGPU_PARTITION_GRACE=1h    >    server.toml    >    default

    # $SERVERLESS_GPU_HOME/server.toml; each key is an option of `sgpu up`, with "_" for "-"
    database = "postgresql://sgpu@db.internal/sgpu"
    store = "s3://bucket/environments"
    host = "10.0.0.5"
    tls_cert = "/etc/ssl/gpu.internal.pem"
    tls_key = "/etc/ssl/gpu.internal.key"
    hosts = ["gpu.internal"]
    partition_grace = "15m"
    retention = "30d"
    engine = "ray"  # a Ray head of our own at `ray_port`; ray_address and ray_token_file name an existing cluster
    [queue]  # the settings whose names begin with "queue_"
    half_life = "7d"
    [oidc]  # the settings whose names begin with "oidc_"
    issuer = "https://login.example.com/realms/lab"
    client_id = "sgpu"

The server stores its files in `$SERVERLESS_GPU_HOME/server/`:

    server.db  key  token  node.token  port  server.log  logs/<run>/<fence>/<rank>.<stream>  store/  blobs/

Each field of `_Options` defines a `server.toml` key, an environment variable and a command-line option. Error messages
name the source of a wrong value. An empty environment variable counts as unset.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.engines.ray.start_arguments import PORT as RAY_PORT
from serverless_gpu.engines.ray.start_arguments import check_node_address, ports
from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.access_control import Role
from serverless_gpu.model.egress import destination
from serverless_gpu.model.scheduling.values import QueuePolicy
from serverless_gpu.model.usage_policy import MAX_RUN_S
from serverless_gpu.units import parse_duration_s
from serverless_gpu.wire.access import OnDisabled

PORT = 7878
PARTITION_GRACE_MIN_S = 60.0
DAY_S = 86_400.0
RETENTION_MIN_S = 3_600.0
"""Minimum retention in seconds, so that waiting clients still find a run after its end."""
RETENTION_MAX_S = 3_650 * DAY_S
STOP_WITHIN_MAX_S = 600.0
VARIABLES = "SGPU_"
"""Prefix of environment variables for settings, such as `SGPU_PORT` for the setting `port`."""
# Environment variables of ranks, callers, tests and benchmarks, which are not settings.
_NO_SETTINGS = (
    *("SGPU_RUN_ID", "SGPU_FENCE", "SGPU_GPU_UUIDS", "SGPU_STOP_FILE", "SGPU_STOP_REASON"),
    *("SGPU_CHECKPOINT_DIR", "SGPU_RESUME_DIR", "SGPU_RESUME_FENCE", "SGPU_SECRETS_DIR", "SGPU_FAULT"),
    "SGPU_POOL",
    "SGPU_POLICY",
    f"{VARIABLES}BENCH_",
)
CURRENCY = "USD"
_FILE = "server.toml"
_QUEUE = "queue"
_OIDC = "oidc"
_SECRETS = ("oidc_client_secret",)
"""Settings whose values `sgpu server config` hides."""
_NEVER = "never"
_USUAL = QueuePolicy()
_DEFAULT = "default"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Matches passwords and other secrets in URLs.
_SECRET = re.compile(r"(?<=://)([^/@:]*):[^/@]*@|\b(\w*(?:password|secret|token|sig)\w*)=[^&\s]+", re.IGNORECASE)


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ray settings for a pool that combines several machines.

    Attributes:
        port: first port of the range that Ray uses on this machine.
        node_address: address of this machine for other machines; "" to detect it.
        address: address of an existing cluster; "" for a cluster that this server starts.
        token_file: path of the file with the existing cluster's token.
    """

    port: int
    node_address: str = ""
    address: str = ""
    token_file: str = ""


class OidcSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an identity provider (OpenID Connect).

    Attributes:
        issuer: address of the provider, as in the provider's metadata.
        client_id: identifier of this server at the provider.
        client_secret: secret of this server at the provider; "" for a public client.
        name: name of the provider on the sign-in page.
        scopes: scopes to request.
        domains: e-mail domains that may sign in, with a verified address; empty for every account of the provider.
        name_claim: claim with the name of a new user.
        groups_claim: claim with the groups of a user. Dots separate nested names.
        teams: team of each mapped group.
        roles: role of each mapped group.
        role: role of a user without a mapped group; "" to refuse such users.
        create: True to create users for unknown accounts.
    """

    issuer: str
    client_id: str
    client_secret: str = ""
    name: str = ""
    scopes: tuple[str, ...] = ("openid", "profile", "email")
    domains: tuple[str, ...] = ()
    name_claim: str = "preferred_username"
    groups_claim: str = "groups"
    teams: Mapping[str, str] = {}
    roles: Mapping[str, Role] = {}
    role: Role | Literal[""] = "member"
    create: bool = False

    def __repr__(self) -> str:
        """Omit the secret."""
        return f"OidcSettings(issuer={self.issuer!r}, client_id={self.client_id!r})"


def _typed(seconds: float) -> str:
    """Return a duration in the command-line notation, such as "7d"."""
    if math.isinf(seconds):
        return _NEVER
    sizes = ((DAY_S, "d"), (3_600, "h"), (60, "m"))
    size, unit = next(((size, unit) for size, unit in sizes if seconds and not seconds % size), (1, "s"))
    return f"{seconds / size:.0f}{unit}"


class IndexProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the index proxy.

    Attributes:
        host: address of this machine on which the proxy listens.
        port: port of the proxy.
        url: URL of the proxy for clients, with a slash at its end.
        open: True if clients need no token.
    """

    host: str
    port: int
    url: str
    open: bool = False


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings before validation, with their defaults. The values "" and None select a default."""

    database: str = ""
    store: str = ""
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    hosts: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=255)], ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    behind_proxy: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], ...] = ()
    node: bool = True
    stop_within: str = "30s"
    partition_grace: str = "15m"
    retention: str = "30d"
    unsatisfiable_after: str = "24h"
    max_run: str = "7d"
    logs_gib: Annotated[float, msgspec.Meta(gt=0)] = 100.0
    nearby_gib: Annotated[float, msgspec.Meta(ge=0)] = 20.0
    runs_waiting: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    on_owner_disabled: OnDisabled = "finish"
    currency: Annotated[str, msgspec.Meta(pattern="^[A-Z]{3,8}$")] = CURRENCY
    engine: Literal["local", "ray"] = "local"
    ray_port: int = RAY_PORT
    node_address: str = ""
    ray_address: str = ""
    ray_token_file: str = ""
    tls_ca: str = ""
    key_lost: bool = False
    accept_rollback: bool = False
    mlflow: bool = False
    mlflow_store: str = ""
    mlflow_url: str = ""
    webhook: str = ""
    ui: bool = True
    path_prefix: Annotated[str, msgspec.Meta(max_length=200)] = ""
    oidc_issuer: Annotated[str, msgspec.Meta(max_length=512)] = ""
    oidc_client_id: str = ""
    oidc_client_secret: str = ""
    oidc_client_secret_file: str = ""
    oidc_name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    oidc_scopes: tuple[str, ...] = ("openid", "profile", "email")
    oidc_domains: tuple[str, ...] = ()
    oidc_name_claim: str = "preferred_username"
    oidc_groups_claim: str = "groups"
    oidc_teams: tuple[str, ...] = ()
    oidc_roles: tuple[str, ...] = ()
    oidc_role: Literal["admin", "operator", "member", "viewer", "none"] = "member"
    oidc_create: bool = False
    index_proxy: str = ""
    index_url: str = ""
    index_open: bool = False
    queue_half_life: str = _typed(_USUAL.half_life_s)
    queue_entry_penalty: str = _typed(_USUAL.entry_penalty_s)
    queue_reservations: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = _USUAL.reservations
    queue_nearly: Annotated[float, msgspec.Meta(gt=0, le=1)] = _USUAL.nearly
    queue_patience: str = _typed(_USUAL.patience_s)
    queue_guard: str = _typed(_USUAL.guard_s)
    queue_preempt_after: str = _typed(_USUAL.preempt_after_s)
    queue_preemptions: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = _USUAL.preemptions_max


class EffectiveSetting(msgspec.Struct, frozen=True, kw_only=True):
    """Effective value of a setting, for display.

    Attributes:
        name: name as in `server.toml`.
        value: value as in `server.toml`, without passwords in addresses.
        origin: source of the value: an option, a variable, the file, or "default".
    """

    name: str
    value: object
    origin: str

    @property
    def text(self) -> str:
        """Return the value as text for a table."""
        if isinstance(self.value, list):
            return ", ".join(map(str, self.value)) or "-"
        if isinstance(self.value, bool):
            return "true" if self.value else "false"
        return "-" if self.value in (None, "") else str(self.value)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Validated settings of a server. Durations are seconds.

    Attributes:
        home: the home directory, `$SERVERLESS_GPU_HOME`.
        database: database url, see `db/database.py`.
        store: url or path of the store of environments; "" for `server/store`.
        host: address on which the server listens.
        port: port of the server; 0 for any free port; None for 7878, or a free port if 7878 is taken.
        hosts: additional host names that the server accepts.
        tls_cert: file with the server's certificate and intermediate certificates; "" for plain HTTP.
        tls_key: file with the key of the certificate.
        tls_ca: file with the certificate authority for machines that join; "" if machines already trust the authority.
        behind_proxy: addresses or networks of TLS proxies. The server trusts the client address headers of these
            proxies. Except for loopback, the server answers only these proxies.
        node: True if the server's machine is also a node.
        partition_grace_s: time that an attempt continues without an answer of the server.
        partition_margin_s: additional wait of the server before it assumes that the grace has passed.
        soft_expiry_s: time without a report after which the server shows an attempt as unreachable.
        heartbeat_s: maximum interval between heartbeats of nodes and attempts.
        lease_written_s: minimum interval between two database writes of one renewed lease.
        upload_s: time in which this machine's node retries to upload outputs of an ended attempt.
        retention_s: age after which the server removes rows, output and results of ended runs.
        unsatisfiable_after_s: time after which the server ends a run that no joined node can execute; 0 for never.
        max_run_s: maximum runtime of an attempt without a time limit in its usage policy; None for no limit.
        logs_bytes_max: maximum output of all runs. Above this limit, the server removes the oldest output.
        nearby_bytes_max: maximum disk space for copies of environments in a bucket; 0 for no copies.
        runs_waiting_max: maximum number of waiting runs of one principal.
        on_owner_disabled: action for running runs of an owner who lost the right to start runs: finish, or stop.
        currency: currency of prices and charges.
        ray: settings of Ray for a pool of several machines; None for a pool of one machine.
        key_lost: True to start although the key of secrets or unfinished runs is lost.
        accept_rollback: True to start although the database lacks changes that this server had acknowledged.
        mlflow: True if an MLflow server runs beside this server.
        mlflow_store: url or path of the MLflow store; "" for the MLflow store in the home.
        mlflow_url: address of MLflow for clients and nodes; "" for its address on loopback.
        webhook: URL to which the server posts notices of budgets and alarms; "" for none.
        ui: True if the server serves web pages.
        path_prefix: path below which a proxy serves this server, such as "/gpu"; "" for the root.
        oidc: identity provider with which users sign in; None for none.
        stopping_s: time for running requests to finish when the server stops. A stopping server refuses new requests.
        index_proxy: settings of the proxy for package indexes; None for no proxy.
        queue: policy of the queue without the shares, which are in the database (`records/pools.py`).
        effective: settings before validation with their origins, for display.
    """

    home: Path
    database: str
    store: str = ""
    host: str = "127.0.0.1"
    port: int | None = None
    hosts: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    behind_proxy: tuple[str, ...] = ()
    node: bool = True
    partition_grace_s: float = 900.0
    partition_margin_s: float = 60.0
    soft_expiry_s: float = 60.0
    heartbeat_s: float = 5.0
    lease_written_s: float = 15.0
    upload_s: float = 3600.0
    retention_s: float = 30 * DAY_S
    unsatisfiable_after_s: float = DAY_S
    max_run_s: float | None = MAX_RUN_S
    logs_bytes_max: int = 100 << 30
    nearby_bytes_max: int = 20 << 30
    runs_waiting_max: int = 20_000
    on_owner_disabled: OnDisabled = "finish"
    currency: str = CURRENCY
    ray: RaySettings | None = None
    key_lost: bool = False
    accept_rollback: bool = False
    mlflow: bool = False
    mlflow_store: str = ""
    mlflow_url: str = ""
    webhook: str = ""
    ui: bool = True
    path_prefix: str = ""
    oidc: OidcSettings | None = None
    stopping_s: float = 30.0
    queue: QueuePolicy = _USUAL
    index_proxy: IndexProxySettings | None = None
    effective: tuple[EffectiveSetting, ...] = ()

    @property
    def directory(self) -> Path:
        """Return the server's state directory."""
        return self.home / "server"

    @property
    def store_place(self) -> str:
        """Return the configured environment store, or the path of the server's local store."""
        return self.store or str(self.directory / "store")


def read_settings(
    home: Path, options: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None
) -> Settings:
    """Read and validate a server's settings.

    Args:
        home: the home directory. The function reads `server.toml` in this directory if the file exists.
        options: values from the command line, by the names of `server.toml`; None for options not given.
        environ: the environment variables to read; None for no variables.

    Raises:
        InvalidOption: a setting does not exist, or a value has the wrong type.
        InvalidValue: the file cannot be read, or a value is invalid. The message names the origin.
    """
    merged, origins = _merged(home, options or {}, environ or {})
    checked = _Checked(origins)
    grace_s, retention_s = checked.grace_s(merged), checked.retention_s(merged)
    store = merged.mlflow_store
    return Settings(
        home=home,
        database=merged.database or f"sqlite:///{home / 'server' / 'server.db'}",
        store=merged.store,
        host=merged.host,
        port=merged.port,
        hosts=merged.hosts,
        tls_cert=checked.tls(merged),
        tls_key=_path(merged.tls_key),
        tls_ca=_path(merged.tls_ca),
        behind_proxy=checked.proxies(merged),
        node=merged.node,
        partition_grace_s=grace_s,
        retention_s=retention_s,
        unsatisfiable_after_s=checked.unsatisfiable_after_s(merged),
        max_run_s=checked.max_run_s(merged),
        logs_bytes_max=round(merged.logs_gib * 2**30),
        nearby_bytes_max=round(merged.nearby_gib * 2**30),
        runs_waiting_max=merged.runs_waiting,
        on_owner_disabled=merged.on_owner_disabled,
        currency=merged.currency,
        ray=checked.ray(merged),
        key_lost=merged.key_lost,
        accept_rollback=merged.accept_rollback,
        mlflow=merged.mlflow,
        mlflow_store=str(Path(store).absolute()) if store and ":" not in store else store,
        mlflow_url=checked.mlflow_url(merged),
        webhook=checked.webhook(merged),
        ui=merged.ui,
        path_prefix=checked.path_prefix(merged),
        oidc=checked.oidc(merged),
        stopping_s=checked.stop_within_s(merged),
        queue=checked.queue(merged),
        index_proxy=checked.index_proxy(merged),
        effective=_effective(merged, origins),
    )


def effective_settings(
    home: Path, options: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None
) -> list[EffectiveSetting]:
    """Return every effective setting with its source. Call `read_settings` first for validation."""
    return list(_effective(*_merged(home, options or {}, environ or {})))


def _effective(merged: _Options, origins: Mapping[str, str]) -> tuple[EffectiveSetting, ...]:
    return tuple(
        EffectiveSetting(
            name=name,
            value="***" if name in _SECRETS and getattr(merged, name) else _shown(getattr(merged, name)),
            origin=origins.get(name, _DEFAULT),
        )
        for name in _Options.__struct_fields__
    )


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a message for each `SGPU_` environment variable that names no setting."""
    known = {f"{VARIABLES}{name.upper()}": name for name in _Options.__struct_fields__}
    as_options = {f"{VARIABLES}{option_of(name)[2:].replace('-', '_').upper()}": name for name in known.values()}
    found: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(VARIABLES) or variable in known or variable.startswith(_NO_SETTINGS):
            continue
        # Without the common prefix, which would make short names alike.
        names = {name.removeprefix(VARIABLES): field for name, field in {**known, **as_options}.items()}
        near = difflib.get_close_matches(variable.removeprefix(VARIABLES), names, n=1)
        meant = names[near[0]] if near else ""
        found.append(f"{variable} is not a setting" + (f": {VARIABLES}{meant.upper()} is" if meant else ""))
    return found


def option_of(name: str) -> str:
    """Return the `sgpu up` option for a setting."""
    return "--allow-host" if name == "hosts" else f"--{name.replace('_', '-')}"


def _merged(
    home: Path, options: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[_Options, Mapping[str, str]]:
    """Return the merged settings and each setting's source."""
    path = home / _FILE
    variables = {f"{VARIABLES}{name.upper()}": name for name in _Options.__struct_fields__}
    merged, origins = _Options(), {}

    def say(given: Mapping[str, object], origin: Callable[[str], str], *, strict: bool = True) -> None:
        nonlocal merged
        for name, value in given.items():
            converted = _converted(name, value, origin(name), strict=strict)
            merged = msgspec.structs.replace(merged, **{name: converted})
            origins[name] = origin(name)

    say(_read(path), lambda _name: str(path))
    spoken = {name: _spoken(name, environ[key], key) for key, name in variables.items() if environ.get(key)}
    say(spoken, lambda name: f"{VARIABLES}{name.upper()}", strict=False)
    say({name: value for name, value in options.items() if value is not None}, option_of)
    return merged, origins


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            said = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error
    for name, example in ((_QUEUE, "half_life = '7d'"), (_OIDC, "client_id = 'sgpu'")):
        table = said.pop(name, {})
        if not isinstance(table, dict):
            hint = f"write a section [{name}] with lines like {example}"
            raise InvalidOption(f"{path}: {name} is a table", hint=hint)
        said |= {f"{name}_{key}": value for key, value in table.items()}
    return said


def _converted(name: str, value: object, origin: str, *, strict: bool) -> object:
    if name not in _Options.__struct_fields__:
        known = ", ".join(_Options.__struct_fields__)
        raise InvalidOption(f"{origin}: there is no setting {name!r}", hint=f"settings: {known}")
    try:
        return getattr(from_builtins({name: value}, _Options, strict=strict), name)
    except msgspec.ValidationError as error:
        raise InvalidOption(f"{origin}: {error}") from error


def _spoken(name: str, text: str, variable: str) -> object:
    """Convert an environment variable's text to a list or boolean if the setting has this type."""
    if name in _LISTS:
        return [item.strip() for item in text.split(",") if item.strip()]
    if name in _SWITCHES:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise InvalidOption(f"{variable}: {text!r} is neither {_TRUE[1]} nor {_FALSE[1]}")
        return text.lower() in _TRUE
    return text


_SWITCHES = {field.name for field in msgspec.structs.fields(_Options) if field.type is bool}
_LISTS = {field.name for field in msgspec.structs.fields(_Options) if get_origin(field.type) is tuple}


def without_passwords(text: str) -> str:
    """Return an address without its passwords."""
    return _SECRET.sub(lambda found: f"{found[2]}=***" if found[2] else f"{found[1]}:***@", text)


def _shown(value: object) -> object:
    if isinstance(value, tuple):
        return [_shown(item) for item in value]
    return without_passwords(value) if isinstance(value, str) else value


class _Checked:
    """Validates settings. Each error message names the source of the wrong value."""

    def __init__(self, origins: Mapping[str, str]) -> None:
        self._origins = origins

    def grace_s(self, said: _Options) -> float:
        return self._duration("partition_grace", said.partition_grace, PARTITION_GRACE_MIN_S, DAY_S)

    def retention_s(self, said: _Options) -> float:
        return self._duration("retention", said.retention, RETENTION_MIN_S, RETENTION_MAX_S)

    def unsatisfiable_after_s(self, said: _Options) -> float:
        return self._duration("unsatisfiable_after", said.unsatisfiable_after, 0.0, RETENTION_MAX_S)

    def max_run_s(self, said: _Options) -> float | None:
        limit_s = self._duration_or_never("max_run", said.max_run, 1.0)
        return None if math.isinf(limit_s) else limit_s

    def path_prefix(self, said: _Options) -> str:
        prefix = said.path_prefix.rstrip("/")
        if prefix and not _PATH.fullmatch(prefix):
            origin = self._origins.get("path_prefix", _DEFAULT)
            raise InvalidOption(f"{origin}: {prefix!r} is not a path prefix", hint="write a path like /gpu")
        return prefix

    def oidc(self, said: _Options) -> OidcSettings | None:
        given = [name for name in self._origins if name.startswith(f"{_OIDC}_")]
        if not said.oidc_issuer:
            if given:
                hint = "set the address of the identity provider"
                raise self._impossible(given[0], f"{given[0]} comes without oidc_issuer", hint=hint)
            return None
        parts = urlsplit(said.oidc_issuer)
        is_safe = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        if not is_safe or not parts.hostname or parts.query or parts.fragment or parts.username is not None:
            hint = "use an address like https://login.example.com/realms/lab"
            raise self._impossible("oidc_issuer", f"oidc_issuer is {said.oidc_issuer!r}", hint=hint)
        if not said.oidc_client_id:
            hint = "register this server at the identity provider"
            raise self._impossible("oidc_issuer", "oidc_issuer comes without oidc_client_id", hint=hint)
        if "openid" not in said.oidc_scopes:
            raise self._impossible("oidc_scopes", "oidc_scopes lacks openid", hint="add the scope openid")
        roles = self._mapped("oidc_roles", said.oidc_roles)
        for role in roles.values():
            if role not in ("admin", "operator", "member", "viewer"):
                hint = "roles: admin, operator, member, viewer"
                raise self._impossible("oidc_roles", f"oidc_roles: there is no role {role!r}", hint=hint)
        return OidcSettings(
            issuer=said.oidc_issuer,
            client_id=said.oidc_client_id,
            client_secret=said.oidc_client_secret or self._secret("oidc_client_secret_file", said),
            name=said.oidc_name or parts.hostname,
            scopes=said.oidc_scopes,
            domains=tuple(domain.lower().lstrip("@") for domain in said.oidc_domains),
            name_claim=said.oidc_name_claim,
            groups_claim=said.oidc_groups_claim,
            teams=self._mapped("oidc_teams", said.oidc_teams),
            roles=roles,  # type: ignore[arg-type] # checked above
            role="" if said.oidc_role == "none" else said.oidc_role,
            create=said.oidc_create,
        )

    def _mapped(self, name: str, pairs: tuple[str, ...]) -> dict[str, str]:
        """Return a mapping that is written as items "GROUP=NAME"."""
        found = {}
        for pair in pairs:
            group, equals, mapped = pair.rpartition("=")
            if not (equals and group.strip() and mapped.strip()):
                raise self._impossible(name, f"{name}: {pair!r} is not a mapping", hint="write GROUP=NAME")
            found[group.strip()] = mapped.strip()
        return found

    def _secret(self, name: str, said: _Options) -> str:
        path = _path(getattr(said, name))
        if not path:
            return ""
        try:
            text = Path(path).read_text(encoding="utf-8").strip()
            is_open = Path(path).stat().st_mode & 0o077
        except (OSError, UnicodeDecodeError) as error:
            raise self._impossible(name, f"{path} cannot be read: {error}", hint="name a readable file") from None
        if is_open or not text:
            why = "is readable by other users" if is_open else "is empty"
            raise self._impossible(name, f"{path} {why}", hint=f"chmod 600 {path}" if is_open else "write the secret")
        return text

    def stop_within_s(self, said: _Options) -> float:
        return self._duration("stop_within", said.stop_within, 0.0, STOP_WITHIN_MAX_S)

    def queue(self, said: _Options) -> QueuePolicy:
        return QueuePolicy(
            half_life_s=self._duration("queue_half_life", said.queue_half_life, 60.0, RETENTION_MAX_S),
            entry_penalty_s=self._duration("queue_entry_penalty", said.queue_entry_penalty, 0.0, DAY_S),
            reservations=said.queue_reservations,
            nearly=said.queue_nearly,
            patience_s=self._duration_or_never("queue_patience", said.queue_patience, 0.0),
            guard_s=self._duration_or_never("queue_guard", said.queue_guard, 60.0),
            preempt_after_s=self._duration("queue_preempt_after", said.queue_preempt_after, 0.0, RETENTION_MAX_S),
            preemptions_max=said.queue_preemptions,
        )

    def ray(self, said: _Options) -> RaySettings | None:
        port, node_address = said.ray_port, said.node_address
        address, token_file = said.ray_address, _path(said.ray_token_file)
        if said.engine != "ray":
            for name, value in (
                ("ray_address", address),
                ("ray_token_file", token_file),
                ("node_address", node_address),
            ):
                if value:
                    raise self._impossible(
                        name, f"{name} needs engine = 'ray'", hint="start the server with `sgpu up --engine ray`"
                    )
            return None
        name = "ray_port"
        try:
            ports(port)
            name = "node_address"
            if node_address:
                check_node_address(node_address)
        except InvalidValue as error:
            raise self._impossible(name, f"{name}: {error.message}", hint=error.hint) from None
        if bool(address) != bool(token_file):
            there, lacks = ("ray_address", "ray_token_file") if address else ("ray_token_file", "ray_address")
            hint = "set both the address and the token file of the existing Ray cluster"
            raise self._impossible(there, f"{there} comes without {lacks}", hint=hint)
        host, _, number = address.rpartition(":")
        if address and not (host and number.isdigit() and 0 < int(number) < 65_536):
            hint = "use an address with a port, such as 10.0.0.5:6379"
            raise self._impossible("ray_address", f"ray_address is {address!r}", hint=hint)
        return RaySettings(port=port, node_address=node_address, address=address, token_file=token_file)

    def tls(self, said: _Options) -> str:
        if bool(said.tls_cert) != bool(said.tls_key):
            there, lacks = ("tls_cert", "tls_key") if said.tls_cert else ("tls_key", "tls_cert")
            raise self._impossible(
                there, f"{there} comes without {lacks}", hint="set both the certificate file and the key file"
            )
        if said.tls_cert and said.behind_proxy:
            hint = "remove `behind_proxy` or `tls_cert`, because only one of proxy and server can handle TLS"
            raise self._impossible("behind_proxy", "behind_proxy comes with tls_cert", hint=hint)
        return _path(said.tls_cert)

    def proxies(self, said: _Options) -> tuple[str, ...]:
        for text in said.behind_proxy:
            try:
                network = ipaddress.ip_network(text)
            except ValueError as error:
                hint = "use addresses or networks, such as 10.0.0.9 or 10.0.0.0/24"
                raise self._impossible("behind_proxy", f"behind_proxy: {error}", hint=hint) from None
            if network.prefixlen == 0:
                raise self._impossible(
                    "behind_proxy",
                    f"behind_proxy is {text}, which includes every address",
                    hint="name the proxy's address",
                )
        return said.behind_proxy

    def mlflow_url(self, said: _Options) -> str:
        text = said.mlflow_url
        parts = urlsplit(text)
        if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None):
            raise self._impossible(
                "mlflow_url", f"mlflow_url is {text!r}", hint="use an address like https://mlflow.example.com"
            )
        return text.rstrip("/")

    def webhook(self, said: _Options) -> str:
        text = said.webhook
        try:
            parts = urlsplit(text)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise self._impossible("webhook", f"webhook is {_shown(text)!r}: {error}") from error
        if text and (not host or not (parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK))):
            hint = (
                "use an address like https://hooks.example.com/…, because other machines could read unencrypted notices"
            )
            raise self._impossible("webhook", f"webhook is {_shown(text)!r}", hint=hint)
        return text

    def index_proxy(self, said: _Options) -> IndexProxySettings | None:
        if not said.index_proxy:
            for name in ("index_url", "index_open"):
                if getattr(said, name):
                    raise self._impossible(
                        name, f"{name} needs index_proxy", hint="set its address: --index-proxy ADDRESS:PORT"
                    )
            return None
        hint = "use an address of this machine and a port, such as 10.0.0.5:7880"
        try:
            where = destination(said.index_proxy)
        except InvalidValue as error:
            raise self._impossible("index_proxy", f"index_proxy: {error.message}", hint=hint) from None
        if not where.first or where.first != where.last:
            raise self._impossible("index_proxy", f"index_proxy is {said.index_proxy!r}", hint=hint)
        network = where.network
        if network is not None and (network.num_addresses > 1 or network.network_address.is_unspecified):
            raise self._impossible("index_proxy", f"index_proxy is {said.index_proxy!r}, not one address", hint=hint)
        host = where.host if network is None else str(network.network_address)
        url = said.index_url or f"{'https' if said.tls_cert else 'http'}://{where.text}/"
        try:
            parts = urlsplit(url)
            _ = parts.port
        except ValueError as error:
            raise self._impossible("index_url", f"index_url is {_shown(url)!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None or parts.query:
            hint = "use an address like https://packages.gpu.internal/"
            raise self._impossible("index_url", f"index_url is {_shown(url)!r}", hint=hint)
        return IndexProxySettings(host=host, port=where.first, url=f"{url.rstrip('/')}/", open=said.index_open)

    def _duration(self, name: str, text: str, least_s: float, most_s: float) -> float:
        try:
            seconds = float(parse_duration_s(text))
        except ValueError as error:
            raise self._impossible(name, f"{name}: {error}") from error
        if not least_s <= seconds <= most_s:
            raise self._impossible(name, f"{name} is {text}", hint=f"use {least_s:.0f} s to {most_s:.0f} s")
        return seconds

    def _duration_or_never(self, name: str, text: str, least_s: float) -> float:
        return math.inf if text == _NEVER else self._duration(name, text, least_s, RETENTION_MAX_S)

    def _impossible(self, name: str, message: str, *, hint: str = "") -> InvalidValue:
        return InvalidValue(f"{self._origins.get(name, _DEFAULT)}: {message}", hint=hint)


def _path(text: str) -> str:
    return str(Path(text).expanduser().absolute()) if text else ""
