"""Opens the network rules of a node for one gang on several nodes.

The rules close all nodes of the server for ranks, except the nodes of their own gang. The kernel removes an opened
address after `GANG_S` without renewal. A killed supervisor therefore leaves no open address behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.isolation.egress_rules import GANG_S
from serverless_gpu.node.spawner.verbs import Spawner

_RENEWAL_S = GANG_S / 6


class GangNetwork:
    """The addresses of the gang's other nodes in this node's network rules."""

    def __init__(self, launch: Launch, uid: int, clock: Clock, spawner: Spawner) -> None:
        self._is_filtered = launch.egress_problem == ""
        self._uid = uid
        self._clock = clock
        self._spawner = spawner
        self._addresses: tuple[str, ...] = ()
        self._renewed_ns = 0

    def open(self, addresses: Sequence[str]) -> None:
        """Open the addresses before the ranks start. Raises IsolationUnavailable or OSError."""
        if self._is_filtered and addresses:
            self._spawner.admit(self._uid, addresses)
            self._addresses, self._renewed_ns = tuple(addresses), self._clock.boottime_ns()

    def renew(self) -> str:
        """Renew the addresses if it is time. Return the problem of a failed renewal, or ""."""
        now_ns = self._clock.boottime_ns()
        if not self._addresses or now_ns - self._renewed_ns < _RENEWAL_S * 1e9:
            return ""
        self._renewed_ns = now_ns
        try:
            self._spawner.admit(self._uid, self._addresses)
        except IsolationUnavailable as error:
            return error.message
        except OSError as error:
            return str(error)
        return ""
