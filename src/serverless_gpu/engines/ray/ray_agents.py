"""Agents on nodes that are up: through a detached actor on each, which is asked every few seconds whether one is there.

What an actor starts is no process of Ray's, so nothing follows from an actor's end, or from its silence: the next one
finds the agent as it is. Only what an actor says is a problem is one, or that several in a row say nothing on a node
that Ray has.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from serverless_gpu.ambient import Clock
from serverless_gpu.engines.ray import node_launcher
from serverless_gpu.engines.ray.driver_client import PROGRAM, DriverLink, RayProblem, Unanswered
from serverless_gpu.engines.ray.ray_tables import KnownNode, NodeRow, plain
from serverless_gpu.engines.ray.start_arguments import NODE_FILE

LOOK_EVERY_S = 5.0
_ANSWER_S = 60.0
_SILENT_MAX = 3


class RayAgents:
    """The agents of a cluster's nodes."""

    def __init__(self, link: DriverLink, clock: Clock) -> None:
        self._link, self._clock = link, clock
        self._lock = threading.Lock()
        self._asking: set[str] = set()
        self._asked_ns: dict[str, int] = {}
        self._silent: dict[str, int] = {}
        self._problems: dict[str, str] = {}

    def problems(self) -> dict[str, str]:
        """Return why no agent can be had, by name of the node."""
        with self._lock:
            return dict(self._problems)

    def due(self, known: Mapping[str, KnownNode]) -> list[NodeRow]:
        """Return the nodes whose agents are to be asked for now, each once until it is."""
        now_ns = self._clock.boottime_ns()
        with self._lock:
            self._asked_ns = {
                node: at_ns for node, at_ns in self._asked_ns.items() if now_ns - at_ns < LOOK_EVERY_S * 1e9
            }
            self._problems = {
                name: text for name, text in self._problems.items() if name in known and not known[name].lost
            }
            rows = [
                one.row
                for one in known.values()
                if not one.lost and one.missing_ns is None and one.row.id not in {*self._asking, *self._asked_ns}
            ]
            self._asking |= {row.id for row in rows}
            return rows

    def have(self, row: NodeRow) -> bool:
        """Have the agent of a node running; return whether its actor said nothing."""
        problem, is_silent = "", False
        try:
            said = self._link.ask(
                "agent",
                _ANSWER_S,
                node=row.id,
                actor=f"agent:{row.id}:{PROGRAM}",
                program=(NODE_FILE, node_launcher.LAUNCHER, node_launcher.MODULE),
            )
            problem = plain(said.get("problem"))
        except (Unanswered, RayProblem) as error:
            problem, is_silent = plain(error), True
        with self._lock:
            self._asking.discard(row.id)
            self._asked_ns[row.id] = self._clock.boottime_ns()
            self._silent[row.id] = self._silent.get(row.id, 0) + 1 if is_silent else 0
            if not problem:
                self._problems.pop(row.name, None)
            elif not is_silent or (self._silent[row.id] >= _SILENT_MAX and not self._link.trouble):
                self._problems[row.name] = f"has no agent: {problem}"
        return is_silent
