"""What a node has of one attempt on its disk, and the supervisor that runs it: it goes on without its uplink.

taken ─▶ waits for devices ─▶ reserved ─▶ confirmed by an answer ─▶ user code ─▶ results ─▶ gate ─▶ freed, receipt
                                 └──────── the lease is over, a stop, a kill ───────▶ ended

One with others on other nodes meets them before user code, and waits for them after it (`crew.py`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial

import msgspec

from serverless_gpu.model.billing.ledger import charge
from serverless_gpu.model.billing.pricing import UNPRICED
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.lifecycle.attempt import (
    MEANINGS,
    STOPPED_BY,
    Fact,
    FactKind,
    Failure,
    Reason,
    State,
    StopReason,
)
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.placement import numbered
from serverless_gpu.model.receipt import Receipt, Segments
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.wire.agents import Start
from tests.e2e.simulation.crew import Crew
from tests.e2e.simulation.timeline import S, Timeline, WrongClock

Gang = tuple[str, int]
_ALIVE_S = 10.0
LOST_PEER = Reason.RANK_CANCELLED
"""What ranks die of that only say that a peer is gone; nothing else here ends so, and no run may."""
_GRACE_MS = 3_000
"""What counts after a stop that was asked for; some gangs take longer."""


@dataclasses.dataclass(kw_only=True)
class Stretch:
    """User code of a crew, by the true time: until no process is left, until its devices are free."""

    run_id: str
    fence: int
    node: str
    devices: tuple[str, ...]
    began_ns: int
    ended_ns: int | None = None
    freed_ns: int | None = None
    crew: int = 0


@dataclasses.dataclass(kw_only=True)
class Work:
    """What a gang does: how long everything takes, and how it ends; drawn from the run and its fence.

    Attributes:
        notices: whether what a crew's ranks wait for tells them that one on another node is gone.
    """

    start_s: float
    run_s: float
    stop_s: float
    gate_s: float
    lines: int
    reason: Reason
    blob: bool = False
    notices: bool = False


def drawn(run_id: str, fence: int, *, long: bool = False) -> Work:
    """Return what an attempt does; the same whenever it is asked. One that is long works through any grace."""
    rng = random.Random(f"{run_id}:{fence}")
    reasons = [Reason.COMPLETED] * 7 + [Reason.RANK_RAISED, Reason.START_FAILED, Reason.NO_RESULT]
    return Work(
        start_s=rng.choice([0.05, 0.5, 3.0]),
        run_s=90.0 if long else rng.choice([0.2, 2.0, 8.0, 20.0, 60.0]),
        stop_s=rng.choice([0.1, 1.0, 6.0]),
        gate_s=rng.choice([0.1, 0.5, 3.0]),
        lines=rng.choice([0, 1, 5, 20]),
        reason=Reason.COMPLETED if long else rng.choice(reasons),
        blob=rng.random() < 0.05,
    )


def drawn_of(order: Start, *, long: bool = False) -> Work:
    """Return what a crew does: ranks of all crews work as long, each starts and stops as it can, one of them fails."""
    work = drawn(order.run_id, order.fence, long=long)
    if not order.crews:
        return work
    rng = random.Random(f"{order.run_id}:{order.fence}:{order.crew}")
    failing = random.Random(f"who fails {order.run_id}:{order.fence}").randrange(len(order.crews))
    is_failing = failing == order.crew and work.reason is not Reason.COMPLETED
    return dataclasses.replace(
        work,
        start_s=rng.choice([0.05, 0.5, 3.0]),
        stop_s=rng.choice([0.1, 1.0, 6.0]),
        gate_s=rng.choice([0.1, 0.5, 3.0]),
        reason=work.reason if is_failing else Reason.COMPLETED,
        notices=rng.random() < 0.6,
    )


def line_of(run_id: str, fence: int, number: int) -> bytes:
    """Return what rank 0 of an attempt prints."""
    return f"{run_id}:{fence} says {number}\n".encode()


def result_of(run_id: str, fence: int, rank: int) -> bytes:
    """Return what a rank returns."""
    return f"result of rank {rank} of {run_id}:{fence}".encode()


@dataclasses.dataclass(kw_only=True)
class Kept:
    """The directory of an attempt: what is left when every process is gone."""

    order: Start
    facts: list[Fact] = dataclasses.field(default_factory=list)
    log: bytearray = dataclasses.field(default_factory=bytearray)
    stopped: Stopped | None = None
    receipt: Receipt | None = None
    abandoned: bool = False

    @property
    def gang(self) -> Gang:
        """Return which attempt it is."""
        return self.order.run_id, self.order.fence

    @property
    def began(self) -> bool:
        """Return whether user code has begun."""
        return any(fact.kind is FactKind.EXEC for fact in self.facts)

    @property
    def ranks(self) -> range:
        """Return the numbers of its ranks."""
        order = self.order
        return numbered(order.crews[order.crew], per_node=False) if order.crews else range(order.world_size)

    def end(self, reason: Reason, at_ns: int) -> None:
        """Write how it ended."""
        state = MEANINGS[reason].state
        cause = None if state is State.SUCCEEDED else Failure(rank=None, reason=reason, at_ns=at_ns)
        self.stopped = Stopped(state=state, reason=reason, cause=cause, consequences=())

    def settle(self, gpus: tuple[str, ...]) -> None:
        """Write the receipt."""
        assert self.stopped is not None
        order = self.order
        tariff = order.tariff or UNPRICED
        is_billed = MEANINGS[self.stopped.reason].is_billed
        charged = charge(self.facts, gpu_type=order.gpu_type, tariff=tariff, is_billed=is_billed)
        self.receipt = Receipt(
            run_id=order.run_id,
            fence=order.fence,
            state=self.stopped.state.value,
            reason=self.stopped.reason.value,
            gpu_type=order.gpu_type,
            gpus=gpus,
            kind=DeviceKind.FAKE,
            segments=Segments(),
            gpu_ms=charged.gpu_ms,
            micros=charged.micros,
            currency=tariff.currency,
            peak_memory_bytes=None,
            warm=False,
            warm_reason="",
            gate="looked at",
            quarantined=(),
            tags={},
            facts=len(self.facts),
            world_size=order.world_size,
        )


class Machine:
    """What a supervisor needs of its node: devices, clocks, a place to write down what ran.

    Attributes:
        unreached: names of machines that it does not reach.
        gangs: crews of gangs on whatever machine, as their ranks know each other.
    """

    def __init__(self, time: Timeline, name: str, devices: tuple[str, ...], ran: list[Stretch]) -> None:
        self.time, self.name, self.ran = time, name, ran
        self.clock = WrongClock(time, boot_id=f"{name}-boot-1")
        self.free = list(devices)
        self.unreached: set[str] = set()
        self.gangs: dict[Gang, list[Crew]] = {}


class Supervisor:
    """One process that looks after one attempt.

    Args:
        machine: where it is.
        kept: the attempt's directory.
        work: what its ranks do.
        news: called when there is something to report.

    Attributes:
        lives: whether the process does.
    """

    def __init__(self, machine: Machine, kept: Kept, work: Work, news: Callable[[], None]) -> None:
        self._machine, self._time, self._kept, self._work, self._news = machine, machine.time, kept, work, news
        self.lives = True
        self._confirmed = False
        self._held: tuple[str, ...] = ()
        self._ends = False
        self._stretch: Stretch | None = None
        self.crew = Crew(machine, kept, self) if kept.order.crews else None
        self._lease_ns = self._time.now_ns + round(kept.order.partition_grace_s * S)
        self._watch_lease()
        self._take_devices()

    @property
    def state(self) -> State:
        """Return the attempt's state as the node sees it."""
        if self._ends or self._kept.stopped is not None:
            return State.STOPPING
        return State.RUNNING if self._kept.began else State.STARTING

    @property
    def begun(self) -> bool:
        """Return whether user code is at work."""
        return self._kept.began and self._kept.stopped is None

    def renew(self, until_ns: int) -> None:
        """Take that the server has answered: it may go on until then, and user code may begin."""
        self._lease_ns = max(self._lease_ns, until_ns)
        if not self._confirmed:
            self._confirmed = True
            self._maybe_begin()

    def stop(self, why: StopReason) -> None:
        """End the ranks in order."""
        self.end_because(Halt(reason=STOPPED_BY[why]), grace_ms=_GRACE_MS)

    def end_because(self, halt: Halt, *, grace_ms: int | None = None) -> None:
        """End the ranks, which may take a while, and say at once why."""
        if not self._ends and self._kept.stopped is None and self.lives:
            self._ends = True
            self._say_why(halt)
            if self._held and grace_ms is not None:
                self._fact(FactKind.STOPPING, grace_ms=grace_ms)
            pause_s = self._work.stop_s if self._kept.began else 0.0
            self._later(pause_s, lambda: self._end(halt.reason))
            self._news()

    def release(self) -> None:
        """Let the ranks exit, which have all returned, on every node."""
        if self.crew is not None and self.crew.returned and not self._ends and self.lives:
            self._ends = True
            self._later(0.05, lambda: self._end(Reason.COMPLETED))
            self._news()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        """Do something later, if it still lives then."""
        self._later(seconds, event)

    def news(self) -> None:
        """Have what is new reported."""
        self._news()

    def maybe_begin(self) -> None:
        """Begin user code, if all is there that it needs."""
        self._maybe_begin()

    def abandon(self) -> None:
        """End everything at once: the attempt is over for the server."""
        if self.lives:
            if self._kept.stopped is None:
                self._end(Reason.CANCELLED, gate=False)
            self.kill()

    def kill(self) -> None:
        """Die; the stem ends every rank with it, and the locks of the devices are gone."""
        if not self.lives:
            return
        self.lives = False
        if self._stretch is not None and self._stretch.ended_ns is None:
            self._stretch.ended_ns = self._time.now_ns
            self._are_gone()
        self._give_back()

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        self._time.after(seconds, lambda: event() if self.lives else None)

    def _take_devices(self) -> None:
        count = self._kept.order.gpus
        if self._ends or self._kept.stopped is not None:
            return
        if len(self._machine.free) < count:
            self._later(0.5, self._take_devices)
            return
        self._held = tuple(self._machine.free[:count])
        del self._machine.free[:count]
        self._fact(FactKind.RESERVED)
        self._maybe_begin()

    def _maybe_begin(self) -> None:
        if self._held and self.crew is not None and not self._ends:
            self.crew.offer_itself()
        if self._confirmed and self._held and not self._ends and (self.crew is None or self.crew.may_begin()):
            self._fact(FactKind.STARTING)
            self._later(self._work.start_s, self._begin)

    def _begin(self) -> None:
        if self._ends or self._kept.stopped is not None or self._kept.began:
            return
        if self._work.reason is Reason.START_FAILED:
            self._say_why(Halt(reason=Reason.START_FAILED))
            self._end(Reason.START_FAILED)
            return
        order = self._kept.order
        self._fact(FactKind.EXEC)
        where = tuple(f"{self._machine.name}/{device}" for device in self._held)
        now_ns = self._time.now_ns
        self._stretch = Stretch(
            run_id=order.run_id,
            fence=order.fence,
            crew=order.crew,
            node=self._machine.name,
            devices=where,
            began_ns=now_ns,
        )
        self._machine.ran.append(self._stretch)
        for number in range(self._work.lines):
            self._later(self._work.run_s * number / self._work.lines, partial(self._print, number))
        self._later(_ALIVE_S, self._alive)
        self._later(self._work.run_s, self._finish)
        self._news()

    def _finish(self) -> None:
        """Return, or fail: at once where there are no others."""
        if self._ends:
            return
        if self.crew is None:
            self._end(self._work.reason)
        elif self._work.reason is Reason.COMPLETED:
            self.crew.returned = True
            self._news()
        else:
            self.end_because(Halt(reason=self._work.reason, rank=self._kept.ranks[0], detail="no luck"))

    def _print(self, number: int) -> None:
        if self._kept.stopped is None:
            self._kept.log += line_of(*self._kept.gang, number)
            self._news()

    def _alive(self) -> None:
        if self._kept.stopped is None:
            self._fact(FactKind.ALIVE)
            self._later(_ALIVE_S, self._alive)

    def _watch_lease(self) -> None:
        left_s = (self._lease_ns - self._time.now_ns) / S
        if left_s > 0:
            self._later(left_s, self._watch_lease)
        elif self._kept.stopped is None:
            self._say_why(Halt(reason=Reason.NODE_PARTITIONED))
            self._end(Reason.NODE_PARTITIONED)

    def _end(self, reason: Reason, *, gate: bool = True) -> None:
        if self._kept.stopped is not None:
            return
        self._ends = True
        if self._stretch is not None:
            self._stretch.ended_ns = self._time.now_ns
            if reason is not Reason.COMPLETED:
                self._are_gone()
        if self._held:
            self._fact(FactKind.EXITED)
        self._kept.end(reason, self._time.now_ns)
        if gate:
            self._later(self._work.gate_s, self._free)
        self._news()

    def _say_why(self, halt: Halt) -> None:
        if self.crew is not None and self.crew.halt is None:
            self.crew.halt = halt

    def _are_gone(self) -> None:
        """Ranks of other crews may find out, by what they wait for."""
        if self.crew is not None:
            self.crew.is_gone()

    def notice(self) -> None:
        """End, if ranks work that talk to those of a crew which is gone, and say so."""
        waits = self.crew is not None and self.crew.returned
        if self._work.notices and self.begun and not waits:
            lost = Halt(reason=LOST_PEER, rank=self._kept.ranks[0], peer_lost=True, detail="the peer hung up")
            self._later(0.5, lambda: self.end_because(lost))

    def _free(self) -> None:
        gpus = self._held
        if gpus:
            self._fact(FactKind.FREED)
        self._kept.settle(gpus)
        self._give_back()
        self.lives = False
        self._news()

    def _give_back(self) -> None:
        self._machine.free += self._held
        self._held = ()
        if self._stretch is not None:
            self._stretch.freed_ns = self._time.now_ns

    def _fact(self, kind: FactKind, *, grace_ms: int | None = None) -> None:
        clock = self._machine.clock
        self._kept.facts.append(
            Fact(
                attempt=f"{self._kept.order.run_id}:{self._kept.order.fence}",
                seq=len(self._kept.facts),
                kind=kind,
                boot_id=clock.boot_id(),
                boottime_ns=clock.boottime_ns(),
                wall_ns=clock.wall_ns(),
                gpus=self._held,
                cpus=0,
                memory_bytes=0,
                grace_ms=grace_ms,
            )
        )


def ending_json(stopped: Stopped) -> msgspec.Raw:
    """Return an ending as it travels."""
    return msgspec.Raw(msgspec.json.encode(stopped))
