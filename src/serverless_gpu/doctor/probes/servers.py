"""Probes the server for remote calls, the Ray cluster of this machine's pool, and MLflow servers.

The server probe reports an unusable profile, an unreachable server, a rejected token, and a role that may not list
nodes. A machine without a configured server is not a problem.

The pool probe returns empty facts if the home directory belongs to no pool. The probe cannot inspect processes of
another user. If Ray's processes exit during the probe, the probe returns the facts gathered so far. The pool probe does
not query Ray and reads only files of this package and /proc.

Each MLflow server has two seconds to answer. The MLflow probe imports no package and starts no server.
"""

from __future__ import annotations

import contextlib
import email.utils
import importlib.util
import ipaddress
import os
import re
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
import psutil

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.mlflow_context import SWITCH
from serverless_gpu.client.remote.profile import SERVER, ServerProfile, find_profile
from serverless_gpu.doctor.facts import ListeningPort, PoolFacts, ServerFacts, ServerNode, TrackingFacts, TrackingServer
from serverless_gpu.engines.ray import ray_machine, start_arguments
from serverless_gpu.engines.ray.ray_keeper import marked_pids
from serverless_gpu.errors import NotAllowed, NotAuthenticated, ServerlessGpuError, ServerNotConfigured
from serverless_gpu.json_codec import from_json
from serverless_gpu.lazy_import import load
from serverless_gpu.model.access_control import reach
from serverless_gpu.model.isolation import NONE
from serverless_gpu.node.base.home import find_home, ray_keepers
from serverless_gpu.node.base.private_files import readers
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.mlflow_server.server import MlflowServer, local_path, servers, without_password

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection

_FILE = "server.json"
_LOOK_S = 5.0
_DAY_NS = 86_400_000_000_000


def look_at_server(environ: Mapping[str, str]) -> ServerFacts:
    """Return the facts about the server for remote calls, without waiting for an unresponsive server.

    Raises StorageError without a home directory.
    """
    home = find_home(environ).root
    path = home / _FILE
    file = "" if environ.get(SERVER) else str(path)
    try:
        profile = find_profile(home, environ)
    except ServerNotConfigured as error:
        is_lacking = not environ.get(SERVER) and not path.exists()
        return ServerFacts() if is_lacking else ServerFacts(problem=error.message, hint=error.hint, profile=file)
    except ServerlessGpuError as error:
        return ServerFacts(problem=error.message, hint=error.hint, profile=file)
    status = path.stat() if file else None
    facts = ServerFacts(
        url=profile.url,
        profile=file,
        embedded=profile.embedded,
        is_private=status is None or (status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0),
        certificate_left_s=_written(home) if profile.embedded else _shown(profile),
    )
    return _asked(facts, profile)


def _asked(facts: ServerFacts, profile: ServerProfile) -> ServerFacts:
    """Request the server's facts one by one, and stop at the first failed request."""
    state, base = load("serverless_gpu.wire.server_status"), load("serverless_gpu.wire.base")
    access, fleet = load("serverless_gpu.wire.access"), load("serverless_gpu.wire.nodes")
    connection = load("serverless_gpu.wire.connection").Connection(profile.url, profile.token, ca=profile.ca)
    replace = msgspec.structs.replace
    try:
        try:
            data, headers = connection.fetch("/version")
            version = from_json(data, state.Version)
        except (ServerlessGpuError, msgspec.MsgspecError) as error:
            return replace(
                facts,
                away=getattr(error, "message", "")
                or (f"the program at this address is not a serverless-gpu server: {error}"),
            )
        facts = replace(
            facts,
            version=version.version,
            protocol=version.protocol,
            protocols=version.protocols,
            own_protocol=base.PROTOCOL,
            clock_ahead_s=_ahead_s(headers.get("date", "")),
            unwell=_unwell(connection),
        )
        try:
            me = connection.ask("GET", "/whoami", answer=access.PrincipalView)
        except ServerlessGpuError as error:
            return replace(facts, token_problem=error.message)
        facts = replace(facts, principal=f"{me.name} ({me.role})")
        with contextlib.suppress(NotAllowed):
            found = connection.ask("GET", "/nodes", answer=fleet.NodeList).nodes
            facts = replace(facts, nodes=tuple(_node(each, facts.clock_ahead_s) for each in found))
        with contextlib.suppress(NotAllowed):
            pools = connection.ask("GET", "/pools", answer=fleet.PoolList).pools
            shared = tuple(pool.name for pool in pools if pool.isolation == "none")
            closed = tuple(pool.name for pool in pools if pool.isolation == "unset")
            levels = {pool.name: pool.isolation for pool in pools}
            facts = replace(facts, shared_pools=shared, closed_pools=closed, levels=levels)
            users = connection.ask("GET", "/users", answer=access.PrincipalList).principals
            starting = [each for each in users if not each.disabled and reach(each.role, "runs", write=True) != "none"]
            facts = replace(facts, principals=len(starting))
        return facts
    finally:
        connection.close()


class _Certificate(msgspec.Struct, frozen=True):
    """Fields of the server's `certificate.json` that the probe reads."""

    until_ns: int


def _written(home: Path) -> float | None:
    """Return the seconds until the certificate of the local server expires.

    The probe reads the expiry date from a file, because clients on the same machine connect without TLS.
    """
    try:
        found = from_json((home / "server" / "certificate.json").read_bytes(), _Certificate)
    except (OSError, msgspec.MsgspecError):
        return None
    return (found.until_ns - SystemClock().wall_ns()) / 1e9


def _shown(profile: ServerProfile) -> float | None:
    """Return the seconds until the certificate in the server's TLS handshake expires."""
    parts = urlsplit(profile.url)
    if parts.scheme != "https" or not parts.hostname:
        return None
    context = ssl.create_default_context(cafile=profile.ca or None)
    try:
        with (
            socket.create_connection((parts.hostname, parts.port or 443), timeout=_LOOK_S) as plain,
            context.wrap_socket(plain, server_hostname=parts.hostname) as connection,
        ):
            until = (connection.getpeercert() or {}).get("notAfter")
    except OSError:  # A separate check reports an unreachable or untrusted server.
        return None
    return ssl.cert_time_to_seconds(until) - SystemClock().wall_ns() / 1e9 if isinstance(until, str) else None


def _unwell(connection: Connection) -> tuple[str, ...]:
    """Return the problems that the server reports about itself."""
    try:
        health = connection.health()
    except NotAuthenticated:  # A separate check reports a rejected token.
        return ()
    except ServerlessGpuError as error:
        return (error.message,)
    return tuple(health.problems)


def _node(view: object, ahead_s: int | None) -> ServerNode:
    name, node_state, sentence = (str(getattr(view, each)) for each in ("name", "state", "sentence"))
    seen_ns = getattr(view, "seen_ns", 0)
    silent_s = (SystemClock().wall_ns() - seen_ns) / 1e9 + (ahead_s or 0)
    return ServerNode(
        name=name,
        state=node_state,
        sentence=sentence,
        silent_s=max(0.0, silent_s) if seen_ns else None,
        clock=load("serverless_gpu.wire.agents").clock_text(getattr(view, "clock", None)),
        drained=getattr(getattr(view, "rules", None), "drain", None) is not None,
        unfiltered=str(getattr(view, "egress_problem", "")) if getattr(view, "isolation", NONE) != NONE else "",
        has_key=bool(getattr(view, "key", "")),
        key_days=_days_since(getattr(view, "enrolled_ns", None)),
        pool=str(getattr(view, "pool", "")),
        isolation=str(getattr(view, "isolation", NONE)),
        isolation_problem=str(getattr(view, "isolation_problem", "")),
    )


def _days_since(at_ns: int | None) -> int | None:
    return None if at_ns is None else max(0, SystemClock().wall_ns() - at_ns) // _DAY_NS


def _ahead_s(date: str) -> int | None:
    try:
        theirs = email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return round(theirs - SystemClock().wall_ns() / 1e9)


# --- Ray cluster ------------------------------------------------------------------------------------------------------


_LISTEN = "0A"
_VERSION = re.compile(r'^version = "([^"]+)"', re.MULTILINE)
_VERSION_BYTES = 10_000
_ADDRESS = re.compile(rb"--node[-_]ip[-_]address=(\S+)")


def look_at_pool(environ: Mapping[str, str]) -> PoolFacts:
    """Return the facts about the pool of the home directory. Raises StorageError without a home directory."""
    found = ray_keepers(find_home(environ).root)
    if not found:
        return PoolFacts()
    directory = found[0]
    roots = marked_pids(ray_machine.directory_of(directory))
    pids = sorted({*roots, *(each for pid in roots for each in descendants(pid))})
    commands = (_bytes(pid, "cmdline").replace(b"\0", b" ") for pid in roots)
    addresses = (str(found[1], "ascii", "replace") for found in map(_ADDRESS.search, commands) if found)
    with_token = f"RAY_AUTH_MODE={start_arguments.variables('')['RAY_AUTH_MODE']}".encode()
    try:
        token_problem = readers(directory / ray_machine.TOKEN)
    except OSError as error:
        token_problem = f"the doctor cannot read the token file: {error.strerror}"
    return PoolFacts(
        directory=str(directory),
        address=next(addresses, ""),
        version=_version(pids),
        without_token=tuple(_called(pid) for pid in roots if with_token not in _bytes(pid, "environ").split(b"\0")),
        token_problem=token_problem,
        listeners=tuple(sorted(_listeners(pids))),
        addresses=_addresses(),
        unfenced=linux.landlock_refusal(),
        processes=len(pids),
    )


def _version(pids: list[int]) -> str:
    """Return the running Ray version, which may be older than the installed version."""
    for pid in pids:
        with contextlib.suppress(OSError):
            program = Path(os.readlink(f"/proc/{pid}/exe"))
            if program.name in ("raylet", "gcs_server"):
                package = next(each for each in program.parents if each.name == "core").parent
                text = (package / "_version.py").read_text(encoding="utf-8")[:_VERSION_BYTES]
                known = _VERSION.search(text)
                return "" if known is None else str(known[1])
    return ""


def _listeners(pids: list[int]) -> Iterator[ListeningPort]:
    """Yield the listening ports of processes. The address "*" means all addresses."""
    inodes = {inode: pid for pid in pids for inode in _sockets(pid)}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and (pid := inodes.get(words[9])) is not None:
                    text, _, port = words[1].rpartition(":")
                    yield ListeningPort(port=int(port, 16), address=readable_address(text), process=_called(pid))


def readable_address(text: str) -> str:
    """Convert the address notation of /proc/net, 32-bit words in native byte order, to readable text."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return "*" if address.is_unspecified else str(address)


def _sockets(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def _addresses() -> tuple[str, ...]:
    """Return this machine's IP addresses, except loopback and link-local addresses."""
    found: list[str] = []
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(each.address.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    found.append(str(address))
    return tuple(dict.fromkeys(found))


def _called(pid: int) -> str:
    return _bytes(pid, "comm").decode("utf-8", "replace").strip() or f"pid {pid}"


def _bytes(pid: int, name: str) -> bytes:
    try:
        return Path("/proc", str(pid), name).read_bytes()
    except OSError:
        return b""


# --- tracking ---------------------------------------------------------------------------------------------------------


_ANSWER_S = 2.0


def look_at_tracking(environ: Mapping[str, str]) -> TrackingFacts:
    """Return the tracking destination of runs, and the state of the local MLflow servers.

    Raises StorageError without a home directory.
    """
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    is_http = uri.startswith(("http://", "https://"))
    return TrackingFacts(
        off=f"{SWITCH}=0" if environ.get(SWITCH) == "0" else "",
        installed=importlib.util.find_spec("mlflow") is not None,
        uri=without_password(uri),
        away=_away(without_userinfo(uri)) if is_http else None,
        servers=tuple(_server(each) for each in servers(find_home(environ)) if each.stage != "none"),
    )


def without_userinfo(uri: str) -> str:
    """Return a URI without user name and password."""
    return without_password(uri).replace("…@", "")


def _server(server: MlflowServer) -> TrackingServer:
    database = server.place.backing().uri
    return TrackingServer(
        uri=server.uri,
        store=without_password(server.store),
        database=without_password(database),
        file=str(local_path(database) or ""),
        python=server.python,
        stage=server.stage,
        version=server.version,
        problem=server.problem,
        pid=server.pid,
        away=_away(server.uri) if server.stage == "ready" else "",
    )


def _away(uri: str) -> str:
    """Return the reason why an MLflow server does not answer, or ""."""
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:  # An answer such as 401 proves that the server is reachable.
        error.close()
        return "" if error.code < 500 else f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
