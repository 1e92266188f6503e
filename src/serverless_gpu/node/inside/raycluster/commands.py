"""Converts a node's share of the cluster to the arguments of `ray start`; pure.

Every port is named (see `ports.py`), usage statistics are off, the dashboard is off unless asked for. `--block` keeps
the program there as the parent of Ray's processes, so that its end shows the end of the cluster.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from .directory import SPILL
from .ray_start import LOOPBACK, Ports
from .words import ClusterShare


def head_arguments(share: ClusterShare, ports: Ports, temporary: str, *, client: bool) -> list[str]:
    """Return the arguments that start the head, which is a node with devices, too.

    `temporary` is Ray's directory for sessions. `client` says that this Ray can serve `ray://` connections: it then
    uses a fixed port unless it gets another one; a Ray that cannot refuses the option.
    """
    arguments = [
        "--head",
        f"--port={ports.gcs}",
        *_common(share, ports, temporary),
        f"--include-dashboard={'true' if share.dashboard else 'false'}",
        f"--dashboard-host={LOOPBACK}",
        f"--dashboard-port={ports.dashboard}",
    ]
    return arguments + ([f"--ray-client-server-port={ports.client_server}"] if client else [])


def worker_arguments(share: ClusterShare, ports: Ports, temporary: str, address: str) -> list[str]:
    """Return the arguments that start a node which joins the head at `address`.

    `temporary` is Ray's directory for sessions.
    """
    return [f"--address={address}", *_common(share, ports, temporary)]


def cluster_address(share: ClusterShare, ports: Ports) -> str:
    """Return what a driver has as RAY_ADDRESS, and other nodes join."""
    return f"{LOOPBACK if share.num_nodes == 1 else share.address}:{ports.gcs}"


def listens_at(share: ClusterShare) -> str:
    """Return the address at which Ray listens on a node, "" for all that its machine has."""
    return LOOPBACK if share.num_nodes == 1 else ""


def ready_sentence(share: ClusterShare, shares: Sequence[ClusterShare], version: str, page: str) -> str:
    """Return the sentence for a ready cluster; `page` is the dashboard's address, or ""."""
    devices, cpus = sum(one.devices for one in shares), sum(one.cpus for one in shares)
    nodes = "1 node" if len(shares) == 1 else f"{len(shares)} nodes"
    gpus = f"{devices} {share.accelerator}, " if share.accelerator and devices else ""
    store = f"object store {share.object_store_bytes / 1e9:.1f} GB" + (" on each" if len(shares) > 1 else "")
    sentence = f"Ray {version}: {nodes}, {gpus}{cpus} CPUs, {store}"
    return f"{sentence}, dashboard {page}" if page else sentence


def _common(share: ClusterShare, ports: Ports, temporary: str) -> list[str]:
    arguments = [
        "--block",
        f"--object-manager-port={ports.object_manager}",
        f"--node-manager-port={ports.node_manager}",
        f"--runtime-env-agent-port={ports.runtime_env_agent}",
        f"--dashboard-agent-grpc-port={ports.agent_grpc}",
        f"--dashboard-agent-listen-port={ports.agent_http}",
        f"--metrics-export-port={ports.metrics}",
        "--min-worker-port=0",  # the kernel's choice: it gives out only free ports
        "--max-worker-port=0",
        f"--num-cpus={share.cpus}",
        f"--num-gpus={share.devices if share.accelerator else 0}",
        f"--object-store-memory={share.object_store_bytes}",
        f"--temp-dir={temporary}",
        f"--object-spilling-directory={os.path.join(share.directory, SPILL)}",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    ]
    if share.accelerator and share.devices:  # 1 however many there are, as Ray itself has it
        arguments.append("--resources=" + json.dumps({f"accelerator_type:{share.accelerator}": 1}))
    if share.num_nodes > 1:
        arguments.append(f"--node-ip-address={share.address}")
    return arguments
