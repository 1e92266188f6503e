"""A cluster that is not there: nodes with devices, capacity that is counted, and faults that a test asks for.

    SimulatedEngine    obeys the conformance suite like any other engine; says what a real one would say
    its agents         `simulated_agents.py`: what runs on the nodes, driven by a clock that a test moves

Nothing here sleeps, starts a process or opens a socket, and the same calls in the same order give the same answers.
Reservations outlive the engine (`Reservations`), as those of a real cluster outlive the process that asked for them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from serverless_gpu.engines.base import (
    Engine,
    EngineNode,
    Gang,
    Impossible,
    NodeLost,
    NodeUp,
    Placed,
    Request,
    Waiting,
)


class Reservations:
    """What a cluster remembers when the process that asked it has died."""

    def __init__(self) -> None:
        self.gangs: dict[str, Gang] = {}


class SimulatedEngine(Engine):
    """Nodes with devices that gangs reserve."""

    def __init__(self, nodes: Sequence[EngineNode], reservations: Reservations | None = None) -> None:
        self._lock = threading.Lock()
        self._nodes = {node.name: node for node in nodes}
        self._lost: dict[str, str] = {}
        self._events: list[NodeUp | NodeLost] = [NodeUp(node=node) for node in nodes]
        self._reservations = reservations or Reservations()
        # what the next calls of `submit` answer instead of looking, in order: an injected fault
        self.answers: list[Waiting | Impossible] = []

    def nodes(self) -> Sequence[EngineNode]:
        """Return the nodes that are not lost."""
        with self._lock:
            return [node for name, node in self._nodes.items() if name not in self._lost]

    def has(self, node: str) -> bool:
        """Return whether a node is one of the cluster's."""
        with self._lock:
            return node in self._nodes

    def plan(self, gang: Gang) -> Request:
        """Return a reservation, written out."""
        shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Request(gang=gang, text=f"reserve for {gang.id}: {shares}")

    def submit(self, request: Request) -> Placed | Waiting | Impossible:
        """Reserve a gang if all of it fits."""
        with self._lock:
            gang = request.gang
            if gang.id in self._reservations.gangs:
                return Placed(gang=self._reservations.gangs[gang.id])
            if self.answers:
                return self.answers.pop(0)
            refused = self._never(gang) or self._not_now(gang)
            if refused is not None:
                return refused
            self._reservations.gangs[gang.id] = gang
            return Placed(gang=gang)

    def release(self, gang: str) -> None:
        """Give a reservation back, if there is one."""
        with self._lock:
            self._reservations.gangs.pop(gang, None)

    def recover(self) -> Sequence[str]:
        """Return the gangs that have reservations."""
        with self._lock:
            return sorted(self._reservations.gangs)

    def events(self) -> Sequence[NodeUp | NodeLost]:
        """Return what happened to nodes since the last call."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def close(self) -> None:
        """Leave everything as it is."""

    def lose(self, node: str, sentence: str) -> None:
        """Let a node be one that cannot be counted on."""
        with self._lock:
            self._lost[node] = sentence
            self._events.append(NodeLost(node=node, sentence=sentence))

    def bring_back(self, node: str) -> None:
        """Let a node be there again."""
        with self._lock:
            if self._lost.pop(node, None) is not None:
                self._events.append(NodeUp(node=self._nodes[node]))

    def _never(self, gang: Gang) -> Impossible | None:
        for share in gang.shares:
            if share.node not in self._nodes:
                return Impossible(sentence=f"there is no node {share.node!r}")
            total = self._total(share.node)[share.gpu_type]
            if share.count > total:
                return Impossible(sentence=f"{share.node} has {total} {share.gpu_type}, not {share.count}")
        return None

    def _not_now(self, gang: Gang) -> Waiting | None:
        for share in gang.shares:
            if share.node in self._lost:
                return Waiting(sentence=f"{share.node} {self._lost[share.node]}")
            held = sum(
                other.count
                for holder in self._reservations.gangs.values()
                for other in holder.shares
                if (other.node, other.gpu_type) == (share.node, share.gpu_type)
            )
            free = self._total(share.node)[share.gpu_type] - held
            if share.count > free:
                return Waiting(sentence=f"{free} of {share.count} {share.gpu_type} are free on {share.node}")
        return None

    def _total(self, node: str) -> Counter[str]:
        return Counter(device.type for device in self._nodes[node].devices)
