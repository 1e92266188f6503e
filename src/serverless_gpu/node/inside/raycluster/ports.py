"""Ports for one node's Ray processes: all named, so that clusters on one machine do not meet.

Ray's defaults are fixed numbers, or numbers one of its processes chooses and tells the others. Here each is tried out
by binding it, outside of the range from which the kernel takes ports for everybody who asks for none: in there
anybody's connection could take it between the look and Ray's start. Somebody may still be faster: then Ray does not
start, and `ray_start.py` tries others.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import NamedTuple

_LOOPBACK = "127.0.0.1"
_LOWEST, _HIGHEST = 11_000, 30_000  # below, services have their own; above, Kubernetes gives some away
_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_SPAN_MIN = 1_000
_TRIES_MAX = 2_000


class Ports(NamedTuple):
    """The ports of the Ray processes of one node.

    Attributes:
        gcs: the head's, which is what is called the cluster's address; unused on other nodes.
        object_manager: the raylet's, for objects.
        node_manager: the raylet's, for work.
        runtime_env_agent: of the agent that makes environments of tasks.
        agent_grpc: of the node's agent.
        agent_http: of the node's agent.
        metrics: where Ray's metrics of this node are read, with ``ray[default]``.
        client_server: for `ray://` connections; the head's.
        autoscaler_metrics: the head's.
        dashboard_metrics: the head's.
        dashboard: the web page, where asked for; the head's.
    """

    gcs: int
    object_manager: int
    node_manager: int
    runtime_env_agent: int
    agent_grpc: int
    agent_http: int
    metrics: int
    client_server: int
    autoscaler_metrics: int
    dashboard_metrics: int
    dashboard: int


def find(address: str = _LOOPBACK, range_file: str = _RANGE_FILE) -> Ports:
    """Return ports nobody listens on.

    Args:
        address: which Ray listens at; "" for all of this machine's, and then nobody may listen there on any of them.
        range_file: where the kernel says which ports it gives to everybody.

    Raises:
        OSError: there are not enough.
    """
    lowest, highest = _span(range_file)
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # all at once, so that none is found twice
        for _ in range(_TRIES_MAX):
            port = random.SystemRandom().randint(lowest, highest)
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind((address, port))  # also refused where somebody listens on all addresses
                chosen.append(port)
            if len(chosen) == len(Ports._fields):
                return Ports(*chosen)
    raise OSError(f"no {len(Ports._fields)} free ports between {lowest} and {highest}")


def _span(range_file: str) -> tuple[int, int]:
    try:
        with open(range_file, encoding="ascii") as file:
            low, high = (int(word) for word in file.read().split())
    except (OSError, ValueError):
        low, high = 32_768, 60_999
    if low - _LOWEST >= _SPAN_MIN:
        return _LOWEST, min(low - 1, _HIGHEST)
    if 65_535 - high >= _SPAN_MIN:
        return high + 1, 65_535
    return _LOWEST, 65_535  # it takes nearly all of them: then the tries have to do
