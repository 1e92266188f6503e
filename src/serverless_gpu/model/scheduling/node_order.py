"""Orders of nodes that are kept from pass to pass: only nodes that have changed are looked at again.

    a node changes, or what was thought of it expires  ─▶ the node is stale in each order that it belongs to
    a pass reads an order                              ─▶ stale nodes take new places; the others stay

An order says what a look at every node would say. It saves these looks, and decides nothing.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

_P = TypeVar("_P")
Row = tuple[Any, ...]
Look = Callable[[_P, int], tuple[Row | None, float]]
"""Returns the row of a node at a time, None where the node is not in the order, and when that has to be asked again."""
_REBUILT = 4
"""The order is sorted as a whole when more than one node in so many is stale."""


class NodeOrder(Generic[_P]):
    """Nodes of one group in one order.

    members: the nodes of the group by identifier; the group changes it. look: what says where a node belongs. No two
    nodes have the same row.
    """

    __slots__ = ("_expiries", "_look", "_members", "_rows", "_seen", "_stale")

    def __init__(self, members: Mapping[str, _P], look: Look[_P]) -> None:
        self._members, self._look = members, look
        self._rows: list[Row] = []
        self._seen: dict[str, tuple[Row | None, float]] = {}
        self._stale = set(members)
        self._expiries: list[tuple[float, str]] = []

    def mark(self, node_id: str) -> None:
        """Note that a node has changed, has come or has gone."""
        self._stale.add(node_id)

    def rows(self, now_ns: int) -> list[Row]:
        """Return the rows as of now, sorted; not to be changed, and not to be kept."""
        expiries, stale = self._expiries, self._stale
        while expiries and expiries[0][0] <= now_ns:
            stale.add(heapq.heappop(expiries)[1])
        if stale:
            self._refresh(now_ns, is_whole=_REBUILT * len(stale) > len(self._members))
            stale.clear()
        return self._rows

    def _refresh(self, now_ns: int, *, is_whole: bool) -> None:
        rows, seen = self._rows, self._seen
        for node_id in self._stale:
            before, _ = seen.pop(node_id, (None, 0.0))
            if before is not None and not is_whole:
                del rows[bisect_left(rows, before)]
            if node_id not in self._members:
                continue
            row, expires_ns = seen[node_id] = self._look(self._members[node_id], now_ns)
            if row is not None and not is_whole:
                insort(rows, row)
            if not math.isinf(expires_ns):
                heapq.heappush(self._expiries, (expires_ns, node_id))
        if is_whole:
            self._rows = sorted(row for row, _ in seen.values() if row is not None)
        if len(self._expiries) > 2 * len(seen):  # most of them are of rows that are gone
            self._expiries = [(at, node_id) for node_id, (_, at) in seen.items() if not math.isinf(at)]
            heapq.heapify(self._expiries)
