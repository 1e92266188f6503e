"""Builds the command-line arguments and environment variables that start Ray on a machine.

    sgpu up   ─▶ head_command ─▶ ray start --head --block --port=7900 …
    sgpu join ─▶ join_command ─▶ ray start --address=10.0.0.5:7900 --block …
    every process that connects to the cluster has `variables`, above all the path of the token

All ports are fixed numbers in a range of one hundred, so that an operator can configure a firewall:

    base       GCS, which is the cluster's address      base+4, +5   Ray's agent of the node
    base+1     raylet, for work                         base+6       metrics
    base+2     raylet, for objects                      base+7 … +10 on the head: client server, dashboard, metrics
    base+3     agent for environments of tasks          base+20 … 99 workers

Each machine offers three kinds of Ray resources. The resource `sgpu_node:<name>` pins a gang to the machine. The
resource `sgpu_gpus:<type>` counts the machine's devices of a type, including CPU slots. Ray adds the resources `GPU`,
`CPU` and `accelerator_type:<type>`. All functions of the module are pure.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.errors import InvalidValue

PORT = 7900
"""Default of the first port of Ray on a machine."""
PORTS = 100
PORT_MIN, PORT_MAX = 1024, 65_536 - PORTS
WORKERS_FROM = 20
RESOURCE = "sgpu_node:"
"""Prefix of the Ray resource that identifies a machine. Each machine has one unit of its resource."""
DEVICES = "sgpu_gpus:"
"""Prefix of the Ray resources that count a machine's devices of each type."""
NODE_FILE = "SERVERLESS_GPU_RAY_NODE"
"""Environment variable, set for Ray's processes, that contains the path of the machine's node file."""
STORE_BYTES = 80_000_000
"""Ray's minimum object store size. serverless-gpu does not use the object store."""
START_S = 120
"""Time limit for the start of a raylet in seconds.

Ray's default limit of 30 s is too short for a first import from a slow disk.
"""
OLDEST = (2, 55)
"""First Ray version that can use a different directory on each machine.

Older Ray versions already support tokens.
"""
# With these health check settings, Ray detects a dead machine within 10 s instead of a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 1_000,
    "health_check_failure_threshold": 5,
}
_CPU = "CPU"


class ClusterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a process needs to connect to a Ray cluster."""

    address: str  # Address of the Ray head, for example ``10.0.0.5:7900``.
    token_file: str
    node_address: str


class MachineShare(msgspec.Struct, frozen=True, kw_only=True):
    """Resources and settings that one machine contributes to a Ray cluster."""

    name: str  # Name under which the server knows the node.
    address: str  # Address that other machines use for this machine.
    port: int = PORT  # First port of Ray on the machine.
    directory: str  # Ray's directory, whose path is short enough for Unix sockets.
    token_file: str
    node_file: str = ""  # Path of the node file, or "" on a machine that is not a node.
    gpus: tuple[str, ...] = ()  # UUIDs of the machine's GPUs.
    types: tuple[str, ...] = ()  # Type of each device: GPUs first, then CPU slots.
    client: bool = False  # True if Ray reserves a port for ``ray://`` clients.


class MachinePorts(NamedTuple):
    """The ports of Ray on one machine, except worker ports."""

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
    """Return Ray's ports on a machine, given the first port. Raise InvalidValue for an invalid port."""
    if not PORT_MIN <= base <= PORT_MAX:
        raise InvalidValue(
            f"Ray's port range cannot start at {base}",
            hint=f"choose a first port from {PORT_MIN} to {PORT_MAX}: Ray needs {PORTS} consecutive ports",
        )
    return MachinePorts(*range(base, base + len(MachinePorts._fields)))


def port_range(base: int) -> str:
    """Return Ray's port range on a machine as text, for firewall hints."""
    return f"{base}-{base + PORTS - 1}"


def check_node_address(text: str) -> str:
    """Normalize a machine's IP address. Raise InvalidValue for an address that Ray cannot use."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise InvalidValue(
            f"{text!r} is not an IP address",
            hint="give an IP address that the other machines can reach, for example --node-address 10.0.0.5",
        ) from None
    if address in (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")):
        raise InvalidValue(
            f"Ray would silently replace the node address {text} by another address of the machine",
            hint="set --node-address to an address that other machines can reach, or to 127.0.0.2 for tests on a "
            "single machine",
        )
    if address.is_unspecified or address.is_multicast:
        raise InvalidValue(
            (f"the address {text} does not identify a single machine"),
            hint="give the IP address of one machine, for example --node-address 10.0.0.5",
        )
    return str(address)


def joined(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_token(text: str) -> str:
    """Return the token of a Ray cluster. Raise InvalidValue for a token that Ray would reject."""
    token = text.strip()
    if not token or not token.isascii() or any(letter.isspace() or not letter.isprintable() for letter in token):
        raise InvalidValue(
            "the given text is not a valid token for Ray", hint="give one word, such as 64 characters of 0-9 and a-f"
        )
    return token


def variables(token_file: str) -> dict[str, str]:
    """Return the environment variables for Ray processes and for processes that connect to Ray."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        "RAY_USAGE_STATS_ENABLED": "0",  # Prevents Ray from sending usage statistics.
        # A different patch version of Python is harmless, because Ray workers run no user code.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }


def environment(node: MachineShare, clean: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for `ray start`, which Ray's workers inherit."""
    all_ports = ports(node.port)
    return {
        **{name: value for name, value in clean.items() if not name.startswith("RAY_")},
        **variables(node.token_file),
        "RAY_worker_niceness": "0",  # Runs inherit the niceness of the Ray worker that starts them.
        "RAY_prestart_worker_first_driver": "0",  # By default, Ray starts one idle worker per CPU.
        "RAY_raylet_start_wait_time_s": str(START_S),
        "AUTOSCALER_METRIC_PORT": str(all_ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(all_ports.dashboard_metrics),
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus),
        **({NODE_FILE: node.node_file} if node.node_file else {}),
    }


def head_command(python: str, node: MachineShare) -> list[str]:
    """Return the command that starts the Ray head. Raise InvalidValue for an invalid address or port."""
    all_ports = ports(node.port)
    return [
        *_start(python),
        "--head",
        f"--port={all_ports.gcs}",
        *_common(node, all_ports),
        *([f"--ray-client-server-port={all_ports.client_server}"] if node.client else []),
        "--include-dashboard=false",
        f"--dashboard-port={all_ports.dashboard}",
        "--no-monitor",  # Ray's monitor serves only the autoscaler.
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
