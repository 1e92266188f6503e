"""Builds the arguments and variables with which Ray starts on the head and on other machines.

    sgpu up   ─▶ head_command ─▶ ray start --head --block --port=7900 …
    sgpu join ─▶ join_command ─▶ ray start --address=10.0.0.5:7900 --block …
    every process that connects to the cluster has `variables`, above all the path of the token

Every port is fixed and lies in one range of a hundred, so that an operator can configure a firewall:

    base       GCS, which is the cluster's address      base+4, +5   Ray's agent of the node
    base+1     raylet, for work                         base+6       metrics
    base+2     raylet, for objects                      base+7 … +10 on the head: client server, dashboard, metrics
    base+3     agent for environments of tasks          base+20 … 99 workers

A machine offers three kinds of resources. The resource `sgpu_node:<name>` pins a gang to the machine. The amount of
`sgpu_gpus:<type>` is the machine's number of devices of a type, including CPU slots. Ray itself adds `GPU`, `CPU` and
`accelerator_type:<type>`. All functions of the module are pure.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.errors import InvalidValue

PORT = 7900
"""The default first port."""
PORTS = 100
PORT_MIN, PORT_MAX = 1024, 65_536 - PORTS
WORKERS_FROM = 20
RESOURCE = "sgpu_node:"
"""Prefix of the resource that names a machine. Each machine has one unit of its resource."""
DEVICES = "sgpu_gpus:"
"""Prefix of the resources that count a machine's devices of a type."""
NODE_FILE = "SERVERLESS_GPU_RAY_NODE"
"""Variable of each raylet and its workers: the path of the machine's node file (`uplink_launcher.py`)."""
STORE_BYTES = 80_000_000
"""Ray's minimum size of its object store. serverless-gpu stores nothing in the object store."""
START_S = 120
"""Seconds that a raylet may take to start.

Ray's default of 30 s is too short for a first import from a slow disk.
"""
OLDEST = (2, 55)
"""The first version of Ray that can use another directory on each machine.

Older versions already support tokens.
"""
# With these settings Ray detects a dead machine within 10 s. With Ray's defaults, the detection takes a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 1_000,
    "health_check_failure_threshold": 5,
}
_CPU = "CPU"


class ClusterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which a process on a cluster's machine reaches the cluster."""

    address: str  # Address of the cluster, for example ``10.0.0.5:7900``.
    token_file: str
    node_address: str


class MachineShare(msgspec.Struct, frozen=True, kw_only=True):
    """The resources and settings that one machine contributes to the cluster."""

    name: str  # The node's name on the server.
    address: str  # The address at which other machines reach this machine.
    port: int = PORT  # The first of the machine's ports.
    directory: str  # Directory of Ray's files, with a path short enough for sockets.
    token_file: str
    node_file: str = ""  # Path of the node file, or "" on a machine that is not a node.
    gpus: tuple[str, ...] = ()  # UUIDs
    types: tuple[str, ...] = ()  # The type of each device: GPUs first, then CPU slots.
    client: bool = False  # True if this Ray version can serve ``ray://``, which requires a port.


class MachinePorts(NamedTuple):
    """The ports of one machine, without the ports of workers."""

    gcs: int
    node_manager: int
    object_manager: int
    runtime_env_agent: int
    agent_grpc: int
    agent_http: int
    metrics: int
    client_server: int
    dashboard: int
    autoscaler_metrics: int
    dashboard_metrics: int


def ports(base: int) -> MachinePorts:
    """Return the ports of a machine, given its first port. Raise InvalidValue if the range does not fit."""
    if not PORT_MIN <= base <= PORT_MAX:
        raise InvalidValue(
            f"Ray's ports cannot begin with {base}",
            hint=f"choose a first port from {PORT_MIN} to {PORT_MAX}: Ray needs {PORTS} ports in a row",
        )
    return MachinePorts(*range(base, base + len(MachinePorts._fields)))


def port_range(base: int) -> str:
    """Return the port range of a machine, for its firewall."""
    return f"{base}-{base + PORTS - 1}"


def check_node_address(text: str) -> str:
    """Return the address of a machine in Ray's form. Raise InvalidValue if other machines cannot reach it."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise InvalidValue(
            f"{text!r} is not an address",
            hint="give a numeric address that the other machines reach: --node-address 10.0.0.5",
        ) from None
    if address in (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")):
        raise InvalidValue(
            f"a machine cannot have the address {text}: Ray would silently use another of its addresses",
            hint="use --node-address with an address that the other machines reach; to test on one machine: 127.0.0.2",
        )
    if address.is_unspecified or address.is_multicast:
        raise InvalidValue(
            f"{text} is not the address of one machine", hint="give one address, for example --node-address 10.0.0.5"
        )
    return str(address)


def joined(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_token(text: str) -> str:
    """Return the token of a Ray cluster. Raise InvalidValue if Ray would reject it."""
    token = text.strip()
    if not token or not token.isascii() or any(letter.isspace() or not letter.isprintable() for letter in token):
        raise InvalidValue(
            "the text is not a valid token of Ray", hint="give one word, such as 64 characters of 0-9 and a-f"
        )
    return token


def variables(token_file: str) -> dict[str, str]:
    """Return the environment variables of each Ray process and of each process that connects to Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        "RAY_USAGE_STATS_ENABLED": "0",  # Ray sends usage statistics by default.
        # No user code runs in Ray workers, so a different patch version of Python is harmless.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }


def environment(node: MachineShare, clean: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `ray start` on a machine. Ray's workers inherit it."""
    all_ports = ports(node.port)
    return {
        **{name: value for name, value in clean.items() if not name.startswith("RAY_")},
        **variables(node.token_file),
        "RAY_worker_niceness": "0",  # Runs inherit the niceness of the Ray worker that starts them.
        "RAY_prestart_worker_first_driver": "0",  # By default, Ray starts one unused worker per CPU.
        "RAY_raylet_start_wait_time_s": str(START_S),
        "AUTOSCALER_METRIC_PORT": str(all_ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(all_ports.dashboard_metrics),
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus),
        **({NODE_FILE: node.node_file} if node.node_file else {}),
    }


def head_command(python: str, node: MachineShare) -> list[str]:
    """Return the command that starts the head. Raise InvalidValue for an invalid address or port."""
    all_ports = ports(node.port)
    return [
        *_start(python),
        "--head",
        f"--port={all_ports.gcs}",
        *_common(node, all_ports),
        *([f"--ray-client-server-port={all_ports.client_server}"] if node.client else []),
        "--include-dashboard=false",
        f"--dashboard-port={all_ports.dashboard}",
        "--no-monitor",  # Ray's monitor only starts machines in clouds.
        f"--system-config={json.dumps(_HEALTH)}",
    ]


def join_command(python: str, node: MachineShare, address: str) -> list[str]:
    """Return the command that starts Ray on a joining machine.

    Raises InvalidValue for an invalid address or port.
    """
    return [*_start(python), f"--address={address}", *_common(node, ports(node.port))]


def _start(python: str) -> Sequence[str]:
    return (python, "-m", "ray.scripts.scripts", "start", "--block")


def _common(node: MachineShare, all_ports: MachinePorts) -> list[str]:
    return [
        f"--node-ip-address={check_node_address(node.address)}",
        f"--node-manager-port={all_ports.node_manager}",
        f"--object-manager-port={all_ports.object_manager}",
        f"--runtime-env-agent-port={all_ports.runtime_env_agent}",
        f"--dashboard-agent-grpc-port={all_ports.agent_grpc}",
        f"--dashboard-agent-listen-port={all_ports.agent_http}",
        f"--metrics-export-port={all_ports.metrics}",
        f"--min-worker-port={node.port + WORKERS_FROM}",
        f"--max-worker-port={node.port + PORTS - 1}",
        f"--num-gpus={len(node.gpus)}",
        f"--num-cpus={node.types.count(_CPU)}",
        f"--resources={json.dumps(_resources(node))}",
        f"--object-store-memory={STORE_BYTES}",
        f"--temp-dir={node.directory}",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]


def _resources(node: MachineShare) -> dict[str, float]:
    if not node.node_file:
        return {}
    types = dict.fromkeys(node.types)
    return {
        f"{RESOURCE}{node.name}": 1,
        **{f"{DEVICES}{name}": node.types.count(name) for name in types},
        **{f"accelerator_type:{name}": 1 for name in types if name != _CPU},
    }
