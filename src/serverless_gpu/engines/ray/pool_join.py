"""Prepares a machine to join a pool: checks, admission request, and files for Ray.

    Ray here? ─▶ server: may I? ─▶ same versions? ─▶ head reached? ports free? ─▶ files, plan
                 (token of the join file → agent's token, Ray's token, address, versions)

Ray reports a failed connection after 20 s without a cause. Before the start of Ray, `pool_join` therefore checks every
known cause of failed connections. The checks run in the order in which a user can fix the problems.

A machine sends the token of its join file to the server to request admission to the pool. `sgpu up --engine ray` writes
a join file for one machine. `sgpu node invite` writes a join file for several machines.

    {"server": "https://gpu.internal:7878", "token": "sgpu_…", "ca": "-----BEGIN CERTIFICATE-----…"}

The token in the join file grants no access except joining. After admission, the server sends Ray's token over TLS. Join
files have mode 0600, because every reader of a join file can add a node to the pool. A node receives users' code,
arguments and secrets.
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
from serverless_gpu.node.uplink.node_key_file import NodeKeyFile
from serverless_gpu.node.uplink.node_session import open_session
from serverless_gpu.node.uplink.presence import LEFT, instance_of
from serverless_gpu.node.uplink.server import UplinkProfile, read_profile, write_profile
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import JoinAnswer, JoinRequest, RayPool

JOIN_FILE_NAME = "join.json"
_JOIN_FILE_BYTES_MAX = 1 << 20


DIRECTORY = "ray"
"""Directory for join files in the home directory of a joining machine."""
HEAD_S = 60.0
"""Seconds that `sgpu join` waits for the start of the Ray head."""
_LOOK_S = 0.5


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `sgpu join`."""

    host: str  # Name or address of the Ray head, with or without a port.
    file: JoinFile
    path: Path
    name: str
    address: str = ""  # Address of this machine, or "" for the address that the kernel chooses.
    # First of Ray's ports on this machine, or None to use the same ports as the server's machine.
    port: int | None = None


class JoinPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Validated settings for the start of Ray."""

    plan: KeeperPlan
    offer: str
    ports: str
    profile: Path


def prepare(wish: JoinOptions, home: Home, environ: Mapping[str, str]) -> JoinPlan:
    """Run all checks, request admission from the server, and write the files of this machine.

    Raises ServerProblem if Ray is missing or incompatible, a port is in use, or the Ray head does not answer. Raises
    ServerUnavailable if the server does not answer. Raises NotAuthenticated if the server rejects the token of the join
    file. Raises NotAllowed if the server does not admit this machine or its name. Raises InvalidValue for an invalid
    address. Raises StorageError for a failed write.
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
    _keep(directory, wish, token, str(directory / ray_machine.CA) if wish.file.ca else "")
    try:
        plan = ray_machine.prepare_machine(node, files, pool.token, environ, head=head)
        (directory / LEFT).unlink(missing_ok=True)
    except OSError as error:
        raise ServerProblem(f"the directory {directory} cannot be written to: {error.strerror}") from error
    return JoinPlan(
        plan=plan, offer=ray_machine.offer_text(devices), ports=start_arguments.port_range(base), profile=profile
    )


def parse_host(text: str) -> tuple[str, int | None]:
    """Return the address of a host and the optional port. Raises InvalidValue."""
    parts = urlsplit(f"//{text}" if text.count(":") <= 1 or text.startswith("[") else f"//[{text}]")
    try:
        host, port = parts.hostname or "", parts.port
        found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0][4][0] if host else ""
    except (OSError, ValueError) as error:
        raise InvalidValue(
            f"no address is known for the host {text!r}: {error}",
            hint="give the name or address of the first machine, for example 10.0.0.5",
        ) from None
    if not found or parts.path or parts.username is not None:
        raise InvalidValue(
            f"{text!r} is not a host", hint="give the first machine's address, for example 10.0.0.5 or 10.0.0.5:7900"
        )
    return str(found), port


def _refuse_loopback(wish: JoinOptions, host: str) -> None:
    """Refuse a remote server that listens only on a loopback address."""
    if not _is_loopback(urlsplit(wish.file.server).hostname or ""):
        return
    try:
        ray_machine.check_own(host)
    except InvalidValue:
        raise InvalidValue(
            f"{wish.path} contains the server address {wish.file.server}, which other machines cannot reach",
            hint="start the server with --host, --tls-cert and --tls-key, then copy the join file again",
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ask(wish: JoinOptions, home: Home) -> tuple[str, RayPool]:
    """Return this machine's token and the pool's Ray settings.

    A machine that has joined before uses its saved agent token instead of the join token.
    """
    directory = home.root / DIRECTORY
    ca = str(directory / ray_machine.CA) if wish.file.ca else ""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ca:
            write_private(Path(ca), wish.file.ca.encode())
    except OSError as error:
        raise ServerProblem(f"the directory {directory} cannot be written to: {error.strerror}") from error
    keys = NodeKeyFile(home)
    request = JoinRequest(name=wish.name, machine=machine(), instance=instance_of(home), keys=keys.current.public)
    url = wish.file.server
    again = _ask_again(wish, directory, ca, keys)
    if again is not None:
        return again
    with contextlib.closing(Connection(url, wish.file.token, ca=ca)) as connection:
        try:
            answer = connection.ask("POST", "/agents/join", request, answer=JoinAnswer)
            if answer.waits:
                _keep(directory, wish, answer.token, ca)
                hint = f"run `sgpu node approve {wish.name}` on the first machine, then this command again"
                raise NotAllowed(
                    f"{answer.waits}; the key of this node is {keys.current.public.fingerprint}", hint=hint
                )
            if answer.ray is None:
                raise ServerProblem(f"the server at {url} did not send the settings of its Ray cluster", hint="")
            return answer.token, answer.ray
        except NotAuthenticated as error:
            raise NotAuthenticated(
                f"the server at {url} does not accept the token of {wish.path}: {error.message}",
                hint="run `sgpu node invite` on the first machine and copy the new join file here",
            ) from None
        except NotFound:
            raise ServerProblem(
                f"the server at {url} has no route for joining machines",
                hint="upgrade the server: pip install --upgrade serverless-gpu",
            ) from None
        except ServerUnavailable as error:
            hint = (
                f"test the connection with `curl {url}/api/v1/version`   (to use a different server address, pass "
                "--server URL)"
            )
            raise ServerUnavailable(error.message, hint=hint) from None


def _keep(directory: Path, wish: JoinOptions, token: str, ca: str) -> None:
    """Save the token of this machine, which is valid only with the machine's key."""
    try:
        profile = UplinkProfile(url=wish.file.server, token=token, ca=ca, name=wish.name)
        write_profile(directory / ray_machine.PROFILE, profile)
    except OSError as error:
        raise ServerProblem(f"the directory {directory} cannot be written to: {error.strerror}") from error


def _ask_again(wish: JoinOptions, directory: Path, ca: str, keys: NodeKeyFile) -> tuple[str, RayPool] | None:
    """Return the pool's settings if the server accepts the saved token and the key, otherwise None.

    Raises NotAllowed if the machine still waits for an administrator.
    """
    try:
        profile = read_profile(directory / ray_machine.PROFILE)
    except InvalidValue:
        return None
    if (profile.url, profile.name) != (wish.file.server, wish.name):
        return None
    try:
        with contextlib.closing(Connection(profile.url, profile.token, ca=ca)) as connection:
            session = open_session(connection, profile.token, keys)
    except (NotAuthenticated, NotAllowed, NotFound, ServerUnavailable):
        return None  # The request with the join token reports an unreachable server.
    with contextlib.closing(Connection(profile.url, session.token, ca=ca)) as connection:
        try:
            return profile.token, connection.ask("GET", "/agents/ray", answer=RayPool)
        except (NotAuthenticated, NotFound, ServerUnavailable):
            return None


def refuse_closed(head: str, *, patience_s: float, ports: str) -> None:
    """Raise ServerProblem if the Ray head does not answer within `patience_s` seconds."""
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
            f"the Ray head at {head} does not answer this machine or the server: {why}",
            hint="run `sgpu status` on the first machine   (the home directory has Ray's log: server/ray/keeper.log)",
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
            hint="choose another range of a hundred ports, for example --ray-port 8100",
        )


class JoinFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a join file."""

    server: str
    token: str
    ca: str = ""  # Trusted PEM certificates, or "" for the system's certificates.


def write_join_file(path: Path, file: JoinFile) -> None:
    """Write a private join file. Raises OSError."""
    write_private(path, msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def read_join_file(path: Path) -> JoinFile:
    """Return the content of a join file.

    Raises InvalidValue for a missing or invalid join file, or a join file that other users can read.
    """
    try:
        others = readers(path)
        with path.open("rb") as opened:
            data = opened.read(_JOIN_FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be read: {error.strerror}",
            hint="copy the join file from the path that `sgpu up --engine ray` prints",
        ) from None
    if others:
        raise InvalidValue(
            f"the join file {path} lets any reader join the pool, and {others}",
            hint=f"chmod 600 {path}   (if another user has read the file, run sgpu token revoke, then sgpu node "
            "invite)",
        )
    try:
        return from_json(data, JoinFile)
    except msgspec.MsgspecError:
        raise InvalidValue(
            f"the file {path} is not a valid join file",
            hint="copy server/join.json unchanged from the home directory of `sgpu up --engine ray`",
        ) from None
