"""What Ray is started with, on the first machine and on the others: arguments and variables; pure.

    sgpu up   ─▶ head_command ─▶ ray start --head --block --port=7900 …
    sgpu join ─▶ join_command ─▶ ray start --address=10.0.0.5:7900 --block …
    every process that speaks with the cluster has `variables`: the token's file, above all

Every port is named, all in one range of a hundred, so that a firewall can be told:

    base       GCS, which is the cluster's address      base+4, +5   Ray's agent of the node
    base+1     raylet, for work                         base+6       figures
    base+2     raylet, for objects                      base+7 … +10 the head's: client server, page, figures
    base+3     agent for environments of tasks          base+20 … 99 workers

A machine offers `sgpu_node:<name>`, by which a gang is pinned to it, `sgpu_gpus:<type>`, one for each device of a type,
CPU slots too, and what Ray itself counts: `GPU`, `CPU`, `accelerator_type:<type>`.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from serverless_gpu.errors import InvalidValue

PORT = 7900
"""The default base of ports."""
PORTS = 100
PORT_MIN, PORT_MAX = 1024, 65_536 - PORTS
WORKERS_FROM = 20
RESOURCE = "sgpu_node:"
"""What the resource begins with that names a machine; it has 1 of it."""
DEVICES = "sgpu_gpus:"
"""What resources begin with that count a machine's devices of a type."""
NODE_FILE = "SERVERLESS_GPU_RAY_NODE"
"""Variable of every raylet of ours, and so of its workers: where the file of the machine lies (`node_launcher.py`)."""
STORE_BYTES = 80_000_000
"""Nothing of ours goes through Ray's object store; Ray takes no less."""
START_S = 120
"""How long a raylet may take to start: Ray's own 30 s are short for a first import from a slow disk."""
OLDEST = (2, 55)
"""The first version whose machines each have a directory of their own; tokens are older."""
# A machine that is gone is known to be after 10 s at most; Ray's own settings take a minute.
_HEALTH = {
    "health_check_initial_delay_ms": 2_000,
    "health_check_period_ms": 1_000,
    "health_check_timeout_ms": 1_000,
    "health_check_failure_threshold": 5,
}
_CPU = "CPU"


class ClusterAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How a process on one of its machines reaches a Ray cluster."""

    address: str  # for example ``10.0.0.5:7900``
    token_file: str
    node_address: str


class MachineShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one machine gives to the cluster."""

    name: str  # of the node, as the server knows it
    address: str  # at which the other machines reach it
    port: int = PORT  # the first of its ports
    directory: str  # of Ray's files, with a short path
    token_file: str
    node_file: str = ""  # "" for a machine that is no node: the head of a server without one
    gpus: tuple[str, ...] = ()  # UUIDs
    types: tuple[str, ...] = ()  # of its devices, one for each: GPUs first, then CPU slots
    client: bool = False  # whether this Ray can serve ``ray://``: then it does, and wants a port for it


class MachinePorts(NamedTuple):
    """The ports of one machine, but for those of workers."""

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
    """Return the ports that follow from the first; InvalidValue when there is no room for them."""
    if not PORT_MIN <= base <= PORT_MAX:
        raise InvalidValue(
            f"Ray's ports cannot begin with {base}", hint=f"the first of {PORTS} in a row: {PORT_MIN} to {PORT_MAX}"
        )
    return MachinePorts(*range(base, base + len(MachinePorts._fields)))


def port_range(base: int) -> str:
    """Return the ports of a machine, for its firewall."""
    return f"{base}-{base + PORTS - 1}"


def check_node_address(text: str) -> str:
    """Return the address of a machine as Ray can have it; InvalidValue when no other machine reaches it."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise InvalidValue(
            f"{text!r} is not an address", hint="a number that the other machines reach: --node-address 10.0.0.5"
        ) from None
    if address in (ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")):
        raise InvalidValue(
            f"a machine cannot have the address {text}: Ray would take another one of its addresses instead, unasked",
            hint="--node-address with one that the other machines reach; to try things out on one machine: 127.0.0.2",
        )
    if address.is_unspecified or address.is_multicast:
        raise InvalidValue(f"{text} is not the address of one machine", hint="such as --node-address 10.0.0.5")
    return str(address)


def joined(host: str, port: int) -> str:
    """Return ``host:port``, with brackets where an address needs them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_token(text: str) -> str:
    """Return a token of a Ray cluster; InvalidValue when Ray would not take it."""
    token = text.strip()
    if not token or not token.isascii() or any(letter.isspace() or not letter.isprintable() for letter in token):
        raise InvalidValue("that is not a token of Ray's", hint="one word, such as 64 characters of 0-9 and a-f")
    return token


def variables(token_file: str) -> dict[str, str]:
    """Return what every process has in its environment that is Ray's, or speaks with it."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        "RAY_USAGE_STATS_ENABLED": "0",  # they are on by default, and would call out
        # No user code runs in a worker of ours, so Pythons need not be alike to the last digit.
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    }


def environment(node: MachineShare, clean: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which Ray is started on a machine; its workers inherit them."""
    all_ports = ports(node.port)
    return {
        **{name: value for name, value in clean.items() if not name.startswith("RAY_")},
        **variables(node.token_file),
        "RAY_worker_niceness": "0",  # what a worker starts would be as nice: runs
        "RAY_prestart_worker_first_driver": "0",  # one for each CPU, all unused
        "RAY_raylet_start_wait_time_s": str(START_S),
        "AUTOSCALER_METRIC_PORT": str(all_ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(all_ports.dashboard_metrics),
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus),
        **({NODE_FILE: node.node_file} if node.node_file else {}),
    }


def head_command(python: str, node: MachineShare) -> list[str]:
    """Return the command that starts the head; InvalidValue when an address or a port cannot be."""
    all_ports = ports(node.port)
    return [
        *_start(python),
        "--head",
        f"--port={all_ports.gcs}",
        *_common(node, all_ports),
        *([f"--ray-client-server-port={all_ports.client_server}"] if node.client else []),
        "--include-dashboard=false",
        f"--dashboard-port={all_ports.dashboard}",
        "--no-monitor",  # it makes machines of clouds
        f"--system-config={json.dumps(_HEALTH)}",
    ]


def join_command(python: str, node: MachineShare, address: str) -> list[str]:
    """Return the command that starts Ray on a machine that joins; InvalidValue when an address or a port cannot be."""
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
