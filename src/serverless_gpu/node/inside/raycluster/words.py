"""What a node is told of the Ray cluster it makes with the others of its run, and what its files are called."""

from __future__ import annotations

import os
from typing import NamedTuple

from .. import protocol

FILES = "ray"
"""Directory of an attempt for what is kept of its cluster: logs, metrics, and `directory`, where it lies."""


class ClusterShare(NamedTuple):
    """One node's share of the cluster; travels as the dictionary ``"ray"`` of the supervisor's "go".

    Attributes:
        directory: short, private, ours alone: Ray's temporary files, sockets and token live below it. The supervisor
            makes it and removes it.
        devices: devices of the run on this node, offered as Ray's GPUs.
        accelerator: their type, as in ``accelerator_type:H100``; "" for CPU slots.
        cpus: CPUs offered.
        object_store_bytes: size of the object store.
        dashboard: whether the head starts its web page.
        node_rank: number of this node; 0 has the head and the driver.
        num_nodes: nodes of the cluster.
        host: this node's name, for sentences.
        address: the address other nodes reach this one at; 127.0.0.1 where there is only one node.
        head: address and port at which node 0 tells the others where to join; unused where there is only one node.
        secret: what the nodes of one run know and nobody else, 64 hexadecimal digits.
    """

    directory: str
    devices: int
    accelerator: str
    cpus: int
    object_store_bytes: int
    dashboard: bool
    node_rank: int
    num_nodes: int
    host: str
    address: str
    head: tuple[str, int]
    secret: str


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
    """Return the share a message holds.

    Raises:
        ValueError: something is missing, or not of its type.
    """
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
