"""The server's part for a gang on several nodes: who is told what the others said, decided by the model alone.

with two nodes:   gang = order_gang(server, function, args, shares=(2, 2))
                  gang.crews[1].running()
                  gang.settled()
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.client.launch.preflight import pack
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.lifecycle.gang_lifecycle import Cause, Crew, Fold, Halt, Over, fold, must_stop
from serverless_gpu.model.lifecycle.rendezvous import Address, Apart, Chosen, CrewReach, Offer, choose
from serverless_gpu.model.placement import laid_out
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.agents import Report, ReportAnswer, ReportNow, Start
from tests.support.local.observe import LIMIT_S, wait_for
from tests.support.node.agent_server import AgentServer, SeenAttempt


class SeenCrew(SeenAttempt):
    """What the server knows of one crew."""

    def __init__(self, start: Start, gang: SeenGang) -> None:
        super().__init__(start)
        self.gang = gang
        self.number = start.crew
        self.offer: Offer | None = None
        self.reach: CrewReach | None = None
        self.returned = False
        self.halt: Halt | None = None
        self.halted_before_ending = False
        self.files_at_halt: frozenset[str] = frozenset()

    def take(self, report: Report) -> ReportAnswer:
        """Take a report, as a server does, and put it together with what the others said."""
        answer = super().take(report)
        return self.gang.heard(self, report, answer)

    def folded(self) -> Crew:
        """Return it as its gang depends on it."""
        last = self.reports[-1] if self.reports else None
        over = None
        if self.ending is not None:
            over = Over(reason=self.ending.reason, began=self.ending.began, proven=self.ending.proven)
        return Crew(
            number=self.number,
            state=State.STARTING if last is None else last.state,
            began=any(report.exec_ns is not None for report in self.reports),
            returned=self.returned,
            halt=self.halt,
            over=over,
        )


class SeenGang:
    """A gang on several nodes.

    Attributes:
        holds_offers: whether what crews offer is not told yet.
        holds_chosen: whether how they meet is not told yet.
        holds_release: whether they are not released yet.
        apart: why they could not meet.
        addresses: at which crews are said to be, where it is not to be what they say.
    """

    def __init__(self, server: AgentServer, starts: Sequence[Start]) -> None:
        self.crews = [SeenCrew(start, self) for start in starts]
        self.chosen: Chosen | None = None
        self.apart: Apart | None = None
        self.cause: Cause | None = None
        self.released = False
        self.addresses: tuple[str, ...] = ()
        self.holds_offers = False
        self.holds_chosen = False
        self.holds_release = False
        self._server = server
        self._lock = threading.Lock()

    @property
    def fold(self) -> Fold:
        """Return what its crews amount to."""
        stop = next((crew.stop for crew in self.crews if crew.stop is not None), None)
        return fold([crew.folded() for crew in self.crews], self.cause, stop=stop, released=self.released)

    def heard(self, crew: SeenCrew, report: Report, answer: ReportAnswer) -> ReportAnswer:
        """Put a report together with the others, have those look for whom that is news, and answer."""
        with self._lock:
            before = [self._news(one) for one in self.crews]
            if report.offer is not None and crew.offer is None:
                crew.offer = self._offered(crew, report.offer)
            crew.reach = crew.reach or report.reach
            crew.returned = crew.returned or report.returned
            if report.halt is not None and crew.halt is None:
                crew.halt = report.halt
                crew.files_at_halt = frozenset(crew.files)
                crew.halted_before_ending = report.ending is None
            self._choose()
            came = self.fold
            self.cause, self.released = came.cause, came.releases
            after = [self._news(one) for one in self.crews]
            for one, was, now in zip(self.crews, before, after, strict=True):
                if one is not crew and now != was and one.ending is None:
                    self.look(one)
            return msgspec.structs.replace(answer, **after[crew.number])

    def look(self, crew: SeenCrew) -> None:
        """Have a crew report now."""
        order = ReportNow(run_id=crew.start.run_id, fence=crew.start.fence)
        self._server.send(order, f"node{crew.number + 1}")

    def tell_all(self) -> None:
        """Have all crews report now: what was held back is not."""
        for crew in self.crews:
            self.look(crew)

    def settled(self, limit_s: float = LIMIT_S) -> SeenGang:
        """Wait until all crews have receipts."""
        for crew in self.crews:
            wait_for(lambda crew=crew: crew.receipt is not None, "the crew is settled", limit_s)  # type: ignore[misc]  # mypy does not type a lambda's defaults
        return self

    def running(self) -> SeenGang:
        """Wait until user code runs on all nodes."""
        for crew in self.crews:
            crew.running()
        return self

    def has_offers(self) -> SeenGang:
        """Wait until all crews have offered."""
        wait_for(lambda: all(crew.offer is not None for crew in self.crews), "all crews have offered")
        return self

    def _offered(self, crew: SeenCrew, offer: Offer) -> Offer:
        """Return what a crew offers, with an address of its own where all are on one machine and must not share one."""
        if not self.addresses:
            return offer
        return msgspec.structs.replace(offer, addresses=(Address(interface="lo", address=self.addresses[crew.number]),))

    def _choose(self) -> None:
        offers = [crew.offer for crew in self.crews if crew.offer is not None]
        reaches = [crew.reach for crew in self.crews if crew.reach is not None]
        if len(reaches) < len(self.crews) or self.chosen is not None or self.apart is not None:
            return
        came = choose(offers, reaches, [crew.start.crews[crew.number].node for crew in self.crews])
        if isinstance(came, Apart):
            self.apart = came
        else:
            self.chosen = came

    def _news(self, crew: SeenCrew) -> dict[str, Any]:
        offers = tuple(one.offer for one in self.crews if one.offer is not None)
        told = len(offers) == len(self.crews) and crew.reach is None and not self.holds_offers
        is_free = self.crews[0].folded().began or crew.start.spec.ray is not None  # the port of the rendezvous
        may_begin = crew.number == 0 or is_free
        failed = ""
        cause = self.cause
        is_asked = cause is not None and cause.crew is None and crew.stop is not None  # and that is what it is told
        if must_stop(crew.folded(), cause) and cause is not None and not is_asked:
            node = "" if cause.crew is None else f"{crew.start.crews[cause.crew].node}: "
            failed = f"{node}{cause.detail or cause.reason}"
        if self.apart is not None:
            failed = self.apart.sentence
        return {
            "offers": offers if told else (),
            "chosen": self.chosen if may_begin and not self.holds_chosen else None,
            "release": self.released and not self.holds_release,
            "peer_failed": failed,
        }


def order_gang(
    server: AgentServer,
    function: Callable[..., object] | None,
    *args: object,
    shares: tuple[int, ...] = (2, 2),
    spec: dict[str, Any] | None = None,
    **changes: Any,
) -> SeenGang:
    """Order each of the nodes that have joined to start its crew of a gang.

    Args:
        server: the server.
        function: what each rank calls with the arguments; None where the spec has a command.
        args: its arguments.
        shares: devices on each of the nodes.
        spec: of the run.
        changes: of the orders.
    """
    crews = laid_out([(f"n{number}", gpus) for number, gpus in enumerate(shares)])
    run_id = new_run_id()
    nonce = changes.pop("nonce", "a secret of the gang")
    context = changes.pop("context", b"") or msgspec.json.encode(caller_context())
    starts = [
        Start(
            seq=server.next_seq() + crew.number,
            run_id=run_id,
            fence=1,
            token=f"sgpa_{run_id}_1_{crew.number}",
            spec=RunSpec(name=getattr(function, "__name__", "call"), remote=True, **(spec or {})),
            gpu_type="H100",
            world_size=sum(shares),
            context=msgspec.Raw(context),
            call=None if function is None else _packed(function, args),
            submitted_ns=SystemClock().wall_ns(),
            crews=crews,
            crew=crew.number,
            nonce=nonce,
            **changes,
        )
        for crew in crews
    ]
    gang = SeenGang(server, starts)
    for crew in gang.crews:
        server.expect(crew)
    for start in starts:
        server.send(start, f"node{start.crew + 1}")
    return gang


def _packed(function: Callable[..., object], args: tuple[object, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "call.pkl")
        pack(str(path), function, args, {})
        return path.read_bytes()
