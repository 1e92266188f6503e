"""Ports for one node's Ray processes: all named, so that clusters on one machine do not meet.

Ray's defaults are fixed numbers, or numbers one of its processes chooses. Here each is tested by binding it, outside of
the kernel's ephemeral range, in which any connection could take it between the test and Ray's start. If another process
is faster, Ray does not start, and `ray_start.py` tries other ports.
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
    """The ports of the Ray processes of one node; some are used on the head only."""

    gcs: int  # the head's, the address of the cluster
    object_manager: int  # the raylet's, for objects
    node_manager: int  # the raylet's, for work
    runtime_env_agent: int  # of the agent that makes environments of tasks
    agent_grpc: int
    agent_http: int
    metrics: int  # of this node, with ``ray[default]``
    client_server: int  # the head's, for `ray://` connections
    autoscaler_metrics: int
    dashboard_metrics: int
    dashboard: int  # the head's web page, where asked for


def find(address: str = _LOOPBACK, range_file: str = _RANGE_FILE) -> Ports:
    """Return free ports at `address` ("" for all addresses of this machine); raises OSError.

    `range_file` holds the kernel's ephemeral range.
    """
    lowest, highest = _span(range_file)
    chosen: list[int] = []
    with contextlib.ExitStack() as held:  # all at once, so that none is found twice
        for _ in range(_TRIES_MAX):
            port = random.SystemRandom().randint(lowest, highest)
            sock = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                sock.bind((address, port))  # also refused where a process listens on all addresses
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
