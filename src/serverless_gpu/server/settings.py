"""What a server was told: options of `sgpu up`, over `server.toml` in its home, over what holds without both.

    # $SERVERLESS_GPU_HOME/server.toml; each key is an option of `sgpu up`, with "_" for "-"
    database = "postgresql://sgpu@db.internal/sgpu"
    store = "s3://bucket/environments"
    host = "10.0.0.5"
    plain_http = true
    hosts = ["gpu.internal"]
    partition_grace = "15m"
    retention = "30d"

Files of the server lie in `$SERVERLESS_GPU_HOME/server/`:

    server.db  key  token  node.token  port  server.log  logs/<run>/<fence>/<rank>.<stream>  store/  blobs/
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.units import parse_duration_s
from serverless_gpu.wire.principals import OnDisabled

PORT = 7878
PARTITION_GRACE_MIN_S = 60.0
DAY_S = 86_400.0
RETENTION_MIN_S = 3_600.0
"""Nobody who still asks for a run that ended is told that there was none."""
RETENTION_MAX_S = 3_650 * DAY_S
_FILE = "server.toml"


class _Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be said, as it is written; "" and None: what holds without it."""

    database: str = ""
    store: str = ""
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    hosts: tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=255)], ...] = ()
    plain_http: bool = False
    node: bool = True
    partition_grace: str = "15m"
    retention: str = "30d"
    logs_gib: Annotated[float, msgspec.Meta(gt=0)] = 100.0
    runs_waiting: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    on_owner_disabled: OnDisabled = "finish"
    key_lost: bool = False
    mlflow: bool = False
    mlflow_store: str = ""
    mlflow_url: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a server was told, and what follows from it. Durations are seconds.

    Attributes:
        home: the home directory, `$SERVERLESS_GPU_HOME`.
        database: url, see `server.database`.
        store: url or path of the store of environments; "" for `server/store`.
        host: address it listens on.
        port: it listens on; 0 for any that is free; None for 7878, or a free one when somebody else has that.
        hosts: further names it answers to.
        plain_http: whether it may listen beyond loopback although it speaks no TLS, because something in front does.
        node: whether the machine it is on is a node, too.
        partition_grace_s: how long an attempt goes on without an answer of the server.
        partition_margin_s: how much longer the server waits before it believes that.
        soft_expiry_s: silence after which an attempt is shown as unreachable.
        heartbeat_s: nodes and attempts are heard of at least this often.
        lease_written_s: how often a lease that is renewed is written down, at most.
        upload_s: how long this machine's node tries to send the outputs of an ended attempt while the server answers.
        retention_s: runs that ended longer ago lose their rows, output and results.
        logs_bytes_max: what the output of all runs may take; beyond, that of the oldest goes.
        runs_waiting_max: runs of one principal that may wait at once.
        on_owner_disabled: what becomes of the runs of somebody who may start none any more: finish, or stop.
        key_lost: whether to start although the key of runs that have not ended is another one than this server's.
        mlflow: whether an MLflow server runs beside this one.
        mlflow_store: url or path of its store; "" for the home's own.
        mlflow_url: where clients and nodes find it; "" for its address on loopback.
        stopping_s: how long requests may go on when the server is to stop.
    """

    home: Path
    database: str
    store: str = ""
    host: str = "127.0.0.1"
    port: int | None = None
    hosts: tuple[str, ...] = ()
    plain_http: bool = False
    node: bool = True
    partition_grace_s: float = 900.0
    partition_margin_s: float = 60.0
    soft_expiry_s: float = 60.0
    heartbeat_s: float = 5.0
    lease_written_s: float = 15.0
    upload_s: float = 3600.0
    retention_s: float = 30 * DAY_S
    logs_bytes_max: int = 100 << 30
    runs_waiting_max: int = 20_000
    on_owner_disabled: OnDisabled = "finish"
    key_lost: bool = False
    mlflow: bool = False
    mlflow_store: str = ""
    mlflow_url: str = ""
    stopping_s: float = 5.0

    @property
    def directory(self) -> Path:
        """Return the directory of the server's files."""
        return self.home / "server"

    @property
    def store_place(self) -> str:
        """Return where environments are: the url that was given, or the path of the server's own directory."""
        return self.store or str(self.directory / "store")


def read_settings(home: Path, options: Mapping[str, object] | None = None) -> Settings:
    """Return the settings of a server.

    Args:
        home: the home directory; `server.toml` in it is read when it is there.
        options: what was said on the command line, by the names of `server.toml`; None for what was not said.

    Raises:
        InvalidOption: there is no such setting, or a value is of the wrong type.
        InvalidValue: the file cannot be read, or a value is not possible; the message names the file or option.
    """
    said = _convert(_read(home / _FILE), str(home / _FILE))
    given = {name: value for name, value in (options or {}).items() if value is not None}
    merged = msgspec.structs.replace(said, **_named(_convert(given, "option"), given))
    return Settings(
        home=home,
        database=merged.database or f"sqlite:///{home / 'server' / 'server.db'}",
        store=merged.store,
        host=merged.host,
        port=merged.port,
        hosts=merged.hosts,
        plain_http=merged.plain_http,
        node=merged.node,
        partition_grace_s=_duration(
            "partition_grace", merged.partition_grace, least_s=PARTITION_GRACE_MIN_S, most_s=DAY_S
        ),
        retention_s=_duration("retention", merged.retention, least_s=RETENTION_MIN_S, most_s=RETENTION_MAX_S),
        logs_bytes_max=round(merged.logs_gib * 2**30),
        runs_waiting_max=merged.runs_waiting,
        on_owner_disabled=merged.on_owner_disabled,
        key_lost=merged.key_lost,
        mlflow=merged.mlflow,
        mlflow_store=_store(merged.mlflow_store),
        mlflow_url=_mlflow_url(merged.mlflow_url),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidValue(f"{path} cannot be read: {error}") from error


def _convert(given: Mapping[str, object], place: str) -> _Options:
    unknown = sorted(set(given) - set(_Options.__struct_fields__))
    if unknown:
        known = ", ".join(_Options.__struct_fields__)
        raise InvalidOption(f"{place}: there is no setting {unknown[0]!r}", hint=f"settings: {known}")
    try:
        return msgspec.convert(given, _Options)
    except msgspec.ValidationError as error:
        raise InvalidOption(f"{place}: {error}") from error


def _named(options: _Options, names: Mapping[str, object]) -> dict[str, object]:
    return {name: getattr(options, name) for name in names}


def _store(text: str) -> str:
    return str(Path(text).absolute()) if text and ":" not in text else text


def _mlflow_url(text: str) -> str:
    parts = urlsplit(text)
    if text and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None):
        raise InvalidValue(f"mlflow_url is {text!r}", hint="it is like https://mlflow.example.com")
    return text.rstrip("/")


def _duration(name: str, text: str, *, least_s: float, most_s: float) -> float:
    try:
        seconds = float(parse_duration_s(text))
    except ValueError as error:
        raise InvalidValue(f"{name}: {error}") from error
    if not least_s <= seconds <= most_s:
        raise InvalidValue(f"{name} is {text}", hint=f"it can be {least_s:.0f} s to {most_s:.0f} s")
    return seconds
