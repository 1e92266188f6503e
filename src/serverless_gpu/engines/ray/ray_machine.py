"""Describes this machine as part of a Ray cluster: Ray version, address, ports, devices and files.

    check_ray · own_address · taken_port     checks before the start, so that errors name the cause
    prepare_machine                          writes token, profile and node file; returns the keeper's plan

One directory of mode 0700 contains a machine's files, each of mode 0600:

    token         token of the Ray cluster; Ray's processes read it
    profile.json  how the agent reaches the server, with the agent's token          (on the server's machine: node.json)
    node.json     how to start the agent
    ca.pem        certificates that the agent trusts for the server, if the system does not trust it
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.engines.ray.ray_keeper import KeeperPlan, clean, log_path
from serverless_gpu.engines.ray.start_arguments import (
    OLDEST,
    MachineShare,
    check_node_address,
    environment,
    head_command,
    join_command,
    ports,
)
from serverless_gpu.engines.ray.uplink_launcher import NodeFile, write_node_file
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.inside.raycluster import ray_installation
from serverless_gpu.node.processes.spawn import clean_variables, search_path
from serverless_gpu.node.uplink.presence import NodePresence
from serverless_gpu.node.uplink.start_stop import PASSED_ON

_PARENT = "/tmp/sgpu-pool-"
_AWAY = "192.0.2.1"  # A documentation address (RFC 5737). The route probe sends no packet.
_DISCARD = 9
NODE, TOKEN, PROFILE, CA = "node.json", "token", "profile.json", "ca.pem"


class RayMachineFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of the files that a machine needs to join a Ray cluster."""

    home: Home
    directory: Path
    profile: Path | None  # Profile of the agent, or None on a machine that is not a node.

    @property
    def token(self) -> Path:
        """Return the path of the file that contains the cluster's token."""
        return self.directory / TOKEN

    @property
    def node(self) -> Path:
        """Return the path of the node file, which contains the agent's start settings."""
        return self.directory / NODE


# --- this machine -----------------------------------------------------------------------------------------------------


def check_ray() -> str:
    """Return the Ray version of this interpreter. Raise ServerProblem if Ray is missing or too old."""
    found = ray_installation.version() if ray_installation.origin() else ""
    if not found:
        raise ServerProblem(
            f"Ray is not installed for {sys.executable}",
            hint="install the same version on every machine: pip install 'ray>=2.55'",
        )
    if ray_installation.release(found) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ServerProblem(
            f"Ray {found} is too old for a pool of several machines", hint=f"pip install 'ray>={oldest}'"
        )
    return found


def python_version() -> str:
    """Return the version of the running Python interpreter."""
    return ".".join(map(str, sys.version_info[:3]))


def differences(version: str, python: str) -> str:
    """Describe an incompatible Ray or Python version of this machine, or return ""."""
    own, own_python = check_ray(), python_version()
    if own != version:
        return f"this machine has Ray {own}, but the pool has {version}: pip install 'ray=={version}'"
    if own_python.split(".")[:2] != python.split(".")[:2]:
        return f"this machine has Python {own_python}, but the pool needs the minor version of Python {python}"
    return ""


def own_address(towards: str = "") -> str:
    """Return the address that other machines use for this machine. Raises InvalidValue.

    `towards` names the host whose route determines the address, or is "" for the default route.
    """
    try:
        kind, _, _, _, where = socket.getaddrinfo(towards or _AWAY, _DISCARD, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            found = str(probe.getsockname()[0])
    except OSError as error:
        what = (
            (f"this machine has no route to {towards} ({error.strerror})")
            if towards
            else "the address of this machine is unknown"
        )
        raise InvalidValue(what, hint="give an address of this machine, for example --node-address 10.0.0.6") from None
    return check_node_address(found)


def check_own(address: str) -> None:
    """Raise InvalidValue if an address does not belong to this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise InvalidValue(
            (f"the address {address} does not belong to this machine: {error.strerror}"),
            hint="list this machine's addresses with `ip -brief address`",
        ) from None


def taken_port(base: int, address: str) -> int | None:
    """Return the first of Ray's ports that another process uses, or None."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports(base):
        for kind, host in ((family, address), (socket.AF_INET, "127.0.0.1")):
            with socket.socket(kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                    probe.listen()
                except OSError:
                    return port
    return None


def directory_of(files: Path) -> str:
    """Return Ray's directory.

    The path of Ray's directory is short enough for Unix sockets. A constant path lets a new keeper find the processes
    of an earlier keeper.
    """
    return f"{_PARENT}{hashlib.sha256(os.fsencode(files.absolute())).hexdigest()[:8]}/ray"


def devices_of(home: Home) -> tuple[Device, ...]:
    """Return the devices of this machine. Raise ServerProblem if the device inventory fails."""
    offer = NodePresence(home).offer(())
    if offer.problem:
        raise ServerProblem(f"this machine cannot run any attempt: {offer.problem}", hint="sgpu doctor")
    return offer.devices


def offer_text(devices: Sequence[Device]) -> str:
    """Format devices as readable text: "4 H100, 16 CPU"."""
    types = [device.type for device in devices]
    return ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types)) or "no devices"


def node_of(name: str, address: str, port: int, files: RayMachineFiles, devices: Sequence[Device]) -> MachineShare:
    """Return the resources and settings that a machine contributes to a Ray cluster."""
    ordered = sorted(devices, key=lambda device: device.kind is DeviceKind.CPU)
    return MachineShare(
        name=name,
        address=address,
        port=port,
        directory=directory_of(files.directory),
        token_file=str(files.token),
        node_file=str(files.node) if files.profile is not None else "",
        gpus=tuple(device.uuid for device in ordered if device.kind is not DeviceKind.CPU),
        types=tuple(device.type for device in ordered),
        client=ray_installation.can_serve_clients(),
    )


def prepare_machine(
    node: MachineShare,
    files: RayMachineFiles,
    token: str,
    environ: Mapping[str, str],
    *,
    head: str = "",
) -> KeeperPlan:
    """Write the files of a machine, and return the plan for the machine's Ray keeper. Raises OSError.

    `token` is the cluster's token. `environ` contains the caller's environment variables. `head` is the address of the
    Ray head, or "" on the head's machine.
    """
    current = None
    with contextlib.suppress(OSError):
        current = files.token.read_text(encoding="ascii")
    if current != token:
        write_private(files.token, token.encode("ascii"))
    if files.profile is not None:
        passed = {name: environ[name] for name in PASSED_ON if name in environ}
        file = NodeFile(
            python=sys.executable,
            paths=tuple(search_path()),
            home=str(files.home.root),
            profile=str(files.profile),
            environ={**clean_variables(environ), **passed},
        )
        write_node_file(files.node, file)
    command = join_command(sys.executable, node, head) if head else head_command(sys.executable, node)
    return KeeperPlan(
        command=tuple(command),
        environ=environment(node, clean(clean_variables(environ))),
        directory=node.directory,
        log=str(log_path(files.directory)),
        head=head,
        token=hashlib.sha256(token.encode()).hexdigest()[:12],
    )
