"""Makes this machine a node of a pool: checks, admission request and files before the start of Ray.

    Ray here? ─▶ server: may I? ─▶ same versions? ─▶ head reached? ports free? ─▶ files, plan
                 (token of the join file → agent's token, Ray's token, address, versions)

Ray itself reports a failed connection only after 20 s and gives no cause. Therefore `pool_join` first checks every
known cause, in the order in which a user can fix the problems. Ray starts only after all checks.

With the join file (mode 0600), a machine requests admission to the pool from the server. `sgpu up --engine ray` writes
a join file for one machine. `sgpu node invite` writes a join file for several machines.

    {"server": "https://gpu.internal:7878", "token": "sgpu_…", "ca": "-----BEGIN CERTIFICATE-----…"}

The token in the join file permits only joining. The join file does not contain Ray's token, which the server sends over
TLS. A process that can read the join file can make a machine a node of the pool. A node receives users' code, arguments
and secrets.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import SystemClock, machine
from serverless_gpu.engines.ray import ray_machine, start_arguments
from serverless_gpu.engines.ray.ray_keeper import KeeperPlan, unreachable
from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, NotFound, ServerProblem, ServerUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.private_files import readers, write_private
from serverless_gpu.node.uplink.presence import LEFT, instance_of
from serverless_gpu.node.uplink.server import UplinkProfile, read_profile, write_profile
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import JoinAnswer, JoinRequest, RayPool

JOIN_FILE_NAME = "join.json"
_JOIN_FILE_BYTES_MAX = 1 << 20


DIRECTORY = "ray"
"""Directory, in the home of a joining machine, that holds its join files."""
HEAD_S = 60.0
"""Seconds that `sgpu join` waits for a head that is starting."""
_LOOK_S = 0.5


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `sgpu join`."""

    host: str  # The head as a name or an address, with or without a port.
    file: JoinFile
    path: Path
    name: str
    address: str = ""  # Address of this machine, or "" for the local address of the route to the head.
    # First of Ray's ports on this machine, or None for the same port as on the server's machine.
    port: int | None = None


class JoinPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The checked settings with which Ray can start."""

    plan: KeeperPlan
    offer: str
    ports: str
    profile: Path


def prepare(wish: JoinOptions, home: Home, environ: Mapping[str, str]) -> JoinPlan:
    """Run all checks, ask the server, and write this machine's files.

    Raises ServerProblem if Ray is missing, its version differs from the pool's, a port is in use or the head does not
    answer. Raises ServerUnavailable if the server does not answer. Raises NotAuthenticated if the server rejects the
    token of the join file. Raises NotAllowed if the server does not admit this machine or its name. Raises InvalidValue
    for an invalid address. Raises StorageError if a file cannot be written.
    """
    ray_machine.check_ray()
    host, port = parse_host(wish.host)
    _refuse_loopback(wish, host)
    address = wish.address or ray_machine.own_address(host)
    start_arguments.check_node_address(address)
    ray_machine.check_own(address)
    token, pool = _ask(wish, home)
    if different := ray_machine.differences(pool.version, pool.python):
        raise ServerProblem(different, hint="")
    head = start_arguments.joined(host, port or int(pool.address.rpartition(":")[2]))
    base = pool.port if wish.port is None else wish.port
    refuse_closed(head, patience_s=HEAD_S if pool.problem else 0.0, ports=start_arguments.port_range(base))
    _refuse_taken(base, address)
    directory = home.root / DIRECTORY
    profile = directory / ray_machine.PROFILE
    files = ray_machine.RayMachineFiles(home=home, directory=directory, profile=profile)
    devices = ray_machine.devices_of(home)
    node = ray_machine.node_of(wish.name, address, base, files, devices)
    try:
        ca = str(directory / ray_machine.CA) if wish.file.ca else ""
        write_profile(profile, UplinkProfile(url=wish.file.server, token=token, ca=ca, name=wish.name))
        plan = ray_machine.prepare_machine(node, files, pool.token, environ, head=head)
        (directory / LEFT).unlink(missing_ok=True)
    except OSError as error:
        raise ServerProblem(f"{directory} cannot be written to: {error.strerror}") from error
    return JoinPlan(
        plan=plan, offer=ray_machine.offer_text(devices), ports=start_arguments.port_range(base), profile=profile
    )


def parse_host(text: str) -> tuple[str, int | None]:
    """Return the address of a host, and the port if the text has one. Raises InvalidValue."""
    parts = urlsplit(f"//{text}" if text.count(":") <= 1 or text.startswith("[") else f"//[{text}]")
    try:
        host, port = parts.hostname or "", parts.port
        found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0][4][0] if host else ""
    except (OSError, ValueError) as error:
        raise InvalidValue(
            f"the host {text!r} is not found: {error}",
            hint="give the name or address of the first machine, for example 10.0.0.5",
        ) from None
    if not found or parts.path or parts.username is not None:
        raise InvalidValue(
            f"{text!r} is not a host", hint="give a name or an address: 10.0.0.5, or with a port 10.0.0.5:7900"
        )
    return str(found), port


def _refuse_loopback(wish: JoinOptions, host: str) -> None:
    """Refuse a server on another machine if that server listens only on its loopback address."""
    if not _is_loopback(urlsplit(wish.file.server).hostname or ""):
        return
    try:
        ray_machine.check_own(host)
    except InvalidValue:
        raise InvalidValue(
            f"{wish.path} gives {wish.file.server} as the server's address, which only the server's own machine "
            "can reach",
            hint="start the server with --host, --tls-cert and --tls-key, and copy the file again",
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ask(wish: JoinOptions, home: Home) -> tuple[str, RayPool]:
    """Return this machine's token and the pool's Ray settings.

    Use the saved agent token, or else the join token.
    """
    directory = home.root / DIRECTORY
    ca = str(directory / ray_machine.CA) if wish.file.ca else ""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ca:
            write_private(Path(ca), wish.file.ca.encode())
    except OSError as error:
        raise ServerProblem(f"{directory} cannot be written to: {error.strerror}") from error
    request = JoinRequest(name=wish.name, machine=machine(), instance=instance_of(home))
    url = wish.file.server
    again = _ask_again(wish, directory, ca)
    if again is not None:
        return again
    with contextlib.closing(Connection(url, wish.file.token, ca=ca)) as connection:
        try:
            answer = connection.ask("POST", "/agents/join", request, answer=JoinAnswer)
            if answer.ray is None:
                raise ServerProblem(f"the server at {url} does not say how to join its Ray cluster", hint="")
            return answer.token, answer.ray
        except NotAuthenticated as error:
            raise NotAuthenticated(
                f"the server at {url} does not accept the token of {wish.path}: {error.message}",
                hint="run `sgpu node invite` on the first machine and copy the file that it writes",
            ) from None
        except NotFound:
            raise ServerProblem(
                f"the server at {url} has no route for joining machines",
                hint="the server may be older than this package; upgrade it: pip install --upgrade serverless-gpu",
            ) from None
        except ServerUnavailable as error:
            hint = (
                f"test it from here: curl {url}/api/v1/version   (to use another address of the server: --server URL)"
            )
            raise ServerUnavailable(error.message, hint=hint) from None


def _ask_again(wish: JoinOptions, directory: Path, ca: str) -> tuple[str, RayPool] | None:
    """Return the pool's settings for the saved token, or None if this machine needs a join token."""
    try:
        profile = read_profile(directory / ray_machine.PROFILE)
    except InvalidValue:
        return None
    if (profile.url, profile.name) != (wish.file.server, wish.name):
        return None
    with contextlib.closing(Connection(profile.url, profile.token, ca=ca)) as connection:
        try:
            return profile.token, connection.ask("GET", "/agents/ray", answer=RayPool)
        except (NotAuthenticated, NotAllowed, NotFound, ServerUnavailable):
            return None  # The later request with the join token reports a server that is down.


def refuse_closed(head: str, *, patience_s: float, ports: str) -> None:
    """Raise ServerProblem if the head does not answer. Wait while the server cannot reach the head either."""
    clock = SystemClock()
    until_ns = clock.boottime_ns() + round(patience_s * 1e9)
    why = unreachable(head)
    while why and clock.boottime_ns() < until_ns:
        select.select([], [], [], _LOOK_S)
        why = unreachable(head)
    if not why:
        return
    if patience_s:
        raise ServerProblem(
            f"Ray's head at {head} does not answer this machine or the server: {why}",
            hint="run `sgpu status` on the first machine   (log of Ray: server/ray/keeper.log in the home)",
        )
    raise ServerProblem(
        f"the server answers, but Ray at {head} does not: {why}",
        hint=f"open TCP {ports} between the machines of the pool, in both directions",
    )


def _refuse_taken(base: int, address: str) -> None:
    taken = ray_machine.taken_port(base, address)
    if taken is not None:
        raise ServerProblem(
            f"port {taken} is in use on this machine, and Ray needs {start_arguments.port_range(base)}",
            hint="choose another range of a hundred ports: --ray-port 8100",
        )


class JoinFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a join file."""

    server: str
    token: str
    ca: str = ""  # PEM certificates to trust, or "" for the system's certificates.


def write_join_file(path: Path, file: JoinFile) -> None:
    """Write a join file, readable by this user only. Raises OSError."""
    write_private(path, msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def read_join_file(path: Path) -> JoinFile:
    """Return the content of a join file.

    Raises InvalidValue if the file is missing, not valid, or readable by others.
    """
    try:
        others = readers(path)
        with path.open("rb") as opened:
            data = opened.read(_JOIN_FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be read: {error.strerror}",
            hint="`sgpu up --engine ray` prints the path of the file that it wrote; copy that file here",
        ) from None
    if others:
        raise InvalidValue(
            f"{path} lets any reader join the pool, and {others}",
            hint=f"chmod 600 {path}   (if another user has read it: sgpu token revoke, then sgpu node invite)",
        )
    try:
        return from_json(data, JoinFile)
    except msgspec.MsgspecError:
        raise InvalidValue(
            f"{path} is not a join file",
            hint="copy server/join.json, unchanged, from the home of `sgpu up --engine ray`",
        ) from None
