"""This machine becomes a node of a pool: what is looked at, asked and written before Ray is started.

    Ray here? ─▶ server: may I? ─▶ same versions? ─▶ head reached? ports free? ─▶ files, plan
                 (token of the join file → agent's token, Ray's token, address, versions)

Ray itself says after 20 s that it could not connect, and not why. So all that can be wrong is found out first, in the
order in which a person can mend it, and nothing is started before.

The join file, 0600, is what a machine needs to ask the server whether it may join. `sgpu up --engine ray` makes one for
one machine, `sgpu node invite` for several.

    {"server": "https://gpu.internal:7878", "token": "sgpu_…", "ca": "-----BEGIN CERTIFICATE-----…"}

The token is good for joining and nothing else. Ray's token is not in it: the server gives that, over TLS. A process
that has the file can make a machine a node of the pool, and a node is given users' code, arguments and secrets.
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
"""Of the files of a machine that joins, in its home."""
HEAD_S = 60.0
"""How long a head is waited for that is being started."""
_LOOK_S = 0.5


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `sgpu join`."""

    host: str  # where the head is: a name or an address, with a port or without one
    file: JoinFile
    path: Path
    name: str
    address: str = ""  # of this machine; "" for the one that leads to the head
    port: int | None = None  # the first of Ray's ports here; None for as on the server's machine


class JoinPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What can be started."""

    plan: KeeperPlan
    offer: str
    ports: str
    profile: Path


def prepare(wish: JoinOptions, home: Home, environ: Mapping[str, str]) -> JoinPlan:
    """Look at everything, ask the server, and write this machine's files.

    Raises ServerProblem (no Ray here, or not the pool's; a port is taken; the head does not answer), ServerUnavailable,
    NotAuthenticated (the token of the join file is not good), NotAllowed (the server lets in no machine, or not under
    this name), InvalidValue (an address cannot be) or StorageError.
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
        raise ServerProblem(f"{directory} cannot be written: {error.strerror}") from error
    return JoinPlan(
        plan=plan, offer=ray_machine.offer_text(devices), ports=start_arguments.port_range(base), profile=profile
    )


def parse_host(text: str) -> tuple[str, int | None]:
    """Return the address of a host, and the port if one was said; raises InvalidValue."""
    parts = urlsplit(f"//{text}" if text.count(":") <= 1 or text.startswith("[") else f"//[{text}]")
    try:
        host, port = parts.hostname or "", parts.port
        found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0][4][0] if host else ""
    except (OSError, ValueError) as error:
        raise InvalidValue(f"{text!r} is not found: {error}", hint="the first machine: a name, or 10.0.0.5") from None
    if not found or parts.path or parts.username is not None:
        raise InvalidValue(
            f"{text!r} is not a machine", hint="a name or an address: 10.0.0.5, or with a port 10.0.0.5:7900"
        )
    return str(found), port


def _refuse_loopback(wish: JoinOptions, host: str) -> None:
    """Refuse to ask a server that listens to its own machine only, from another one."""
    if not _is_loopback(urlsplit(wish.file.server).hostname or ""):
        return
    try:
        ray_machine.check_own(host)
    except InvalidValue:
        raise InvalidValue(
            f"{wish.path} says that the server is at {wish.file.server}: only its own machine reaches that",
            hint="start it with --host, --tls-cert and --tls-key, too, and copy the file again",
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _ask(wish: JoinOptions, home: Home) -> tuple[str, RayPool]:
    """Return this machine's own token and how it joins: as it has joined before, else with the join token."""
    directory = home.root / DIRECTORY
    ca = str(directory / ray_machine.CA) if wish.file.ca else ""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ca:
            write_private(Path(ca), wish.file.ca.encode())
    except OSError as error:
        raise ServerProblem(f"{directory} cannot be written: {error.strerror}") from error
    request = JoinRequest(name=wish.name, machine=machine(), instance=instance_of(home))
    url = wish.file.server
    again = _ask_again(wish, directory, ca)
    if again is not None:
        return again
    with contextlib.closing(Connection(url, wish.file.token, ca=ca)) as connection:
        try:
            answer = connection.ask("POST", "/agents/join", request, answer=JoinAnswer)
            if answer.ray is None:
                raise ServerProblem(f"the server at {url} does not say how its Ray is joined", hint="")
            return answer.token, answer.ray
        except NotAuthenticated as error:
            raise NotAuthenticated(
                f"the server at {url} does not take the token of {wish.path}: {error.message}",
                hint="on the first machine: sgpu node invite; copy the file that it writes",
            ) from None
        except NotFound:
            raise ServerProblem(
                f"the server at {url} knows nothing of joining",
                hint="is it as new as this package? pip install --upgrade",
            ) from None
        except ServerUnavailable as error:
            hint = f"from here: curl {url}/api/v1/version   (an address that this machine reaches: --server URL)"
            raise ServerUnavailable(error.message, hint=hint) from None


def _ask_again(wish: JoinOptions, directory: Path, ca: str) -> tuple[str, RayPool] | None:
    """Return what a machine that has joined before gets for its own token, or None where it needs a join token."""
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
            return None  # where the server is away, the next question says so


def refuse_closed(head: str, *, patience_s: float, ports: str) -> None:
    """Refuse to join a head that is not reached; one that the server does not reach either may be on its way."""
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
            f"Ray's head at {head} answers nobody, the server neither: {why}",
            hint="on the first machine: sgpu status   (its log: server/ray/keeper.log in the home)",
        )
    raise ServerProblem(
        f"the server answers, and Ray at {head} does not: {why}",
        hint=f"between the machines of a pool, TCP {ports} has to be open, in both directions",
    )


def _refuse_taken(base: int, address: str) -> None:
    taken = ray_machine.taken_port(base, address)
    if taken is not None:
        raise ServerProblem(
            f"port {taken} is taken on this machine, and Ray needs {start_arguments.port_range(base)}",
            hint="another range of a hundred: --ray-port 8100",
        )


class JoinFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it says."""

    server: str
    token: str
    ca: str = ""  # certificates to trust, PEM; "" for the system's


def write_join_file(path: Path, file: JoinFile) -> None:
    """Write a join file, readable by this user alone; raises OSError."""
    write_private(path, msgspec.json.format(msgspec.json.encode(file)) + b"\n")


def read_join_file(path: Path) -> JoinFile:
    """Return what a join file says; InvalidValue when it is not there, others can read it, or it is none."""
    try:
        others = readers(path)
        with path.open("rb") as opened:
            data = opened.read(_JOIN_FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidValue(
            f"{path} cannot be read: {error.strerror}",
            hint="`sgpu up --engine ray` says where it wrote it: copy that here",
        ) from None
    if others:
        raise InvalidValue(
            f"{path} lets in whoever has it, and {others}",
            hint=f"chmod 600 {path}   (did somebody read it? sgpu token revoke, and make another: sgpu node invite)",
        )
    try:
        return from_json(data, JoinFile)
    except msgspec.MsgspecError:
        raise InvalidValue(
            f"{path} is not a join file", hint="it is server/join.json in the home of `sgpu up --engine ray`, as it is"
        ) from None
