"""A node's share of the run's Ray cluster, and the names of its files."""

from __future__ import annotations

import os
from typing import NamedTuple

from .. import protocol

FILES = "ray"
"""Directory of an attempt for what is kept of its cluster: logs, metrics, and `directory`, where it lies."""


class ClusterShare(NamedTuple):
    """One node's share of the cluster; travels as the dictionary ``"ray"`` of the supervisor's "go"."""

    # short, private, ours alone, made and removed by the supervisor: Ray's temporary files, sockets and token
    directory: str
    devices: int  # of the run on this node, offered as Ray's GPUs
    accelerator: str  # as in ``accelerator_type:H100``; "" for CPU slots
    cpus: int
    object_store_bytes: int
    dashboard: bool  # whether the head starts its web page
    node_rank: int  # 0 has the head and the driver
    num_nodes: int
    host: str  # this node's name, for sentences
    address: str  # where other nodes reach this one; 127.0.0.1 on one node
    head: tuple[str, int]  # where node 0 tells the others where to join; unused on one node
    secret: str  # of the nodes of one run, 64 hexadecimal digits


def files_of(attempt: str) -> str:
    """Return the directory of an attempt for what is kept of its cluster."""
    return os.path.join(attempt, FILES)


def logs_of(attempt: str, node_rank: int) -> str:
    """Return where the logs of a node's Ray are kept."""
    return os.path.join(files_of(attempt), str(node_rank))


def metrics_file(attempt: str, node_rank: int) -> str:
    """Return where the latest figures of a node's Ray are left."""
    return os.path.join(files_of(attempt), f"{node_rank}.metrics.json")


def read_share(message: protocol.Message) -> ClusterShare:
    """Return the share a message holds; raises ValueError."""
    head = message.get("head")
    if not isinstance(head, list) or len(head) != 2:
        raise ValueError(f"no address of a head: {head!r}")
    return ClusterShare(
        directory=protocol.text(message, "directory"),
        devices=protocol.integer(message, "devices"),
        accelerator=protocol.text(message, "accelerator"),
        cpus=protocol.integer(message, "cpus"),
        object_store_bytes=protocol.integer(message, "object_store_bytes"),
        dashboard=message.get("dashboard") is True,
        node_rank=protocol.integer(message, "node_rank"),
        num_nodes=protocol.integer(message, "num_nodes"),
        host=protocol.text(message, "host"),
        address=protocol.text(message, "address"),
        head=(str(head[0]), int(head[1])),
        secret=protocol.text(message, "secret"),
    )
