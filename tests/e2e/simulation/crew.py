"""What a supervisor has to do with those on other nodes: it meets them, waits for them, and says why it ends.

devices ─▶ offer ─▶ (offers) ─▶ reach ─▶ (chosen) ─▶ user code ─▶ returned ─▶ (release)    in brackets: from the server
                                             (peer_failed) ─▶ it ends, too
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import Address, Chosen, CrewReach, Offer, Tried
from serverless_gpu.wire.agents import ReportAnswer

if TYPE_CHECKING:
    from tests.e2e.simulation.supervisor import Kept, Machine, Supervisor

_PROBE_S = (0.05, 0.3, 3.0)


def _address(node: str) -> str:
    return f"10.0.0.{int(node[1:])}"


class Crew:
    """One crew among others.

    Args:
        machine: where it is.
        kept: its directory.
        supervisor: whose it is.

    Attributes:
        offer: where it can be tried, once it has devices.
        reach: what it reached of the others.
        returned: whether all of its ranks have.
        halt: why it ends before its end.
    """

    def __init__(self, machine: Machine, kept: Kept, supervisor: Supervisor) -> None:
        self.offer: Offer | None = None
        self.reach: CrewReach | None = None
        self.returned = False
        self.halt: Halt | None = None
        self._machine, self._kept, self._supervisor = machine, kept, supervisor
        self._chosen: Chosen | None = None
        self._has_begun = self._tries = False
        order = kept.order
        self._others = [crew for crew in order.crews if crew.number != order.crew]
        self._rng = random.Random(f"meets {order.run_id}:{order.fence}:{order.crew}")
        machine.gangs.setdefault(kept.gang, []).append(self)

    def offer_itself(self) -> None:
        """Listen, and say where."""
        number = self._kept.order.crew
        if self.offer is None:
            address = Address(interface="eth0", address=_address(self._machine.name))
            rendezvous = 29500 if number == 0 else 0
            self.offer = Offer(crew=number, port=4000, rendezvous_port=rendezvous, addresses=(address,))
            self._supervisor.news()

    def may_begin(self) -> bool:
        """Return whether the others were met, the first time that it is so."""
        may, self._has_begun = self._chosen is not None and not self._has_begun, self._chosen is not None
        return may

    def hear(self, answer: ReportAnswer) -> None:
        """Take what the server says of the others."""
        if answer.peer_failed:
            reason = Reason.PEER_FAILED
            self._supervisor.end_because(Halt(reason=reason, peer_lost=True, detail=answer.peer_failed))
        if answer.offers and not self._tries and self.halt is None:
            self._tries = True
            self._supervisor.later(self._rng.choice(_PROBE_S), self._has_tried)
        if answer.chosen is not None and self._chosen is None:
            assert len(answer.chosen.addresses) == len(self._others) + 1, answer.chosen
            self._chosen = answer.chosen
            self._supervisor.maybe_begin()
        if answer.release:
            self._supervisor.release()

    def is_gone(self) -> None:
        """Have the others' ranks find out that those of this one are no more."""
        for other in self._machine.gangs[self._kept.gang]:
            if other is not self:
                other.notice()

    def notice(self) -> None:
        """Have the supervisor find out that ranks of the gang are no more."""
        self._supervisor.notice()

    def _has_tried(self) -> None:
        tried = []
        for other in self._others:
            reached = other.node not in self._machine.unreached
            took, problem = (self._rng.randint(50, 400), "") if reached else (None, "no route to host")
            tried.append(Tried(crew=other.number, address=_address(other.node), microseconds=took, problem=problem))
        self.reach = CrewReach(crew=self._kept.order.crew, tried=tuple(tried))
        self._supervisor.news()
