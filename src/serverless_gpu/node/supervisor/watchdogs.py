"""Watchdogs of an attempt: hang detection, idle devices, failing GPUs.

    output, events ──heard──▶ HangWatchdog, IdleWatchdog   no descriptor announces what they are about: `look`
    kernel's log ───────────▶ AttemptFaults ──faults──▶ GpuFailed, at once

`IdleWatchdog` asks `model/hangs/idleness.py` what to do, and does it:

    telemetry ───────seen──▶ IdleWatchdog ──tell──▶ watchers        at four fifths of the limit
    output, events ─heard──▶     └───────────────▶ StopRequested    at the limit: ranks may save first, as at any stop
    a client attaches heard──┘

Without a limit, or without telemetry, nothing is stopped: unobserved devices do not count as idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from serverless_gpu.ambient import Clock
from serverless_gpu.model.hangs import idleness
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import (
    Attempt,
    Event,
    GpuFailed,
    Hang,
    Phase,
    State,
    StopReason,
    StopRequested,
)
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import GangNews, Launch
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.gpu_faults import AttemptFaults
from serverless_gpu.node.supervisor.hang_watchdog import GangHangReporter, HangWatchdog
from serverless_gpu.node.supervisor.rendezvous import Peers
from serverless_gpu.units import format_duration_ms


class Watchdogs:
    """Watchdogs of one attempt; they add to `notes` of the receipt."""

    def __init__(self, launch: Launch, home: Home, clock: Clock, say: Callable[[str], None], notes: list[str]) -> None:
        directory = Path(launch.directory)
        self.hangs: HangWatchdog | GangHangReporter = HangWatchdog(directory, clock, say, notes)
        if len(launch.all_crews) > 1:  # a rank may rightly wait for one on another node, which this node does not see
            self.hangs = GangHangReporter(directory, launch.crews[launch.crew], clock, say, notes)
        self.idleness = IdleWatchdog(launch.spec, clock, say, notes)
        self.gpus = AttemptFaults(launch, home, clock, notes)

    @property
    def said(self) -> str:
        """Return what stands of what was said, or ""."""
        return self.hangs.said or self.idleness.said

    def judged_by(self, peers: Peers) -> None:
        """Send observations to the other crews, and act on their judgement; does nothing on one node."""
        if isinstance(self.hangs, GangHangReporter):
            self.hangs.tell_server = self.idleness.tell_server = peers.tell
            peers.judge = self._judged

    def heard(self, event: Event | None = None) -> None:
        """Record progress or use of the run: an event, or output where that is None."""
        self.hangs.heard(event)
        self.idleness.heard()

    def faults(self, attempt: Attempt, devices: Sequence[Device]) -> list[GpuFailed]:
        """Return which of its devices failed since the last look."""
        return self.gpus.hear(attempt, devices)

    def look(self, attempt: Attempt, gang: LocalGang | None) -> list[Event]:
        """Do what is due now; return what ends the run."""
        found: tuple[Event | None, ...] = (self.hangs.look(attempt, gang), self.idleness.look(attempt))
        return [event for event in found if event is not None]

    def ended(self) -> Hang | None:
        """Return who waited for whom, now that the run has ended."""
        if isinstance(self.hangs, GangHangReporter):
            self.hangs.ended()
        return self.hangs.hang

    def _judged(self, news: GangNews) -> list[Event]:
        assert isinstance(self.hangs, GangHangReporter)
        if news.ask is not None:
            self.hangs.asked(news.ask)
        if news.idle is not None:
            self.idleness.judged(news.idle)
        ended = self.hangs.judged(news.judgement) if news.judgement is not None else None
        return [] if ended is None else [ended]


class IdleWatchdog:
    """Detects that one attempt does not use its devices; adds to `notes` of the receipt."""

    def __init__(self, spec: RunSpec, clock: Clock, tell: Callable[[str], None], notes: list[str]) -> None:
        self.said = ""  # the warning, as long as it stands
        # of a gang on several nodes, called with this crew's `idle`; None on one node, which decides itself
        self.tell_server: Callable[..., None] | None = None
        self._level = IdleVerdict.GO_ON
        self._spec = spec
        self._clock = clock
        self._tell = tell
        self._notes = notes
        self._idle: idleness.Idle | None = None
        self._begun = False

    def heard(self) -> None:
        """Record that the run is in use: output, an event, a client that attached."""
        if self._idle is not None:
            self._idle = idleness.used(self._idle, self._clock.boottime_ns())
            self._take_back("the run gets on again")

    def seen(self, busy: bool) -> None:
        """Take note of what telemetry saw since it was last asked."""
        if self._idle is not None:
            self._idle = idleness.seen(self._idle, self._clock.boottime_ns(), busy=busy)
            if busy:
                self._take_back("the devices work again")

    def look(self, attempt: Attempt) -> StopRequested | None:
        """Do the work that is due; return the event that stops a run with idle devices, if any."""
        if attempt.state is not State.RUNNING or attempt.phase is Phase.RETURNED:  # it waits for other nodes
            self._idle = None
            return None
        if not self._begun:  # user code has just started
            self._begun = True
            self._idle = idleness.begin(self._spec, self._clock.boottime_ns())
        if self._idle is None:
            return None
        if self.tell_server is not None:
            if idleness.level(self._idle) is not self._level:
                self._level = idleness.level(self._idle)
                self.tell_server(idle=self._level)
            return None
        self._idle, verdict = idleness.decide(self._idle)
        if verdict is IdleVerdict.WARN:
            self._warn(self._idle, "no device")
        if verdict is not IdleVerdict.STOP:
            return None
        idle_for = format_duration_ms(self._idle.idle_ns // 1_000_000)
        limit = f"{self._idle.limit_ns / 1e9:g}"
        self._idle = None  # ranks that end are no sign that it gets on
        self._notes.append(f"stopped because no device did anything for {idle_for} (idle_timeout={limit})")
        return StopRequested(StopReason.IDLE)

    def judged(self, verdict: IdleVerdict) -> None:
        """Take what the server says of all nodes; that it is to stop is an order like any other."""
        if verdict is IdleVerdict.GO_ON:
            self._take_back("devices of the run work again, on another node")
        elif self._idle is not None and not self.said:
            self._warn(self._idle, "no device of any node")

    def _warn(self, idle: idleness.Idle, who: str) -> None:
        idle_for, left = (format_duration_ms(ns // 1_000_000) for ns in (idle.idle_ns, idle.left_ns))
        self._say(
            f"{who} has done anything for {idle_for}: the run is stopped in {left} (idle_timeout); "
            "work, output or `attach` keeps it"
        )

    def _take_back(self, told: str) -> None:
        if self.said:
            self._say(told)
            self._say("")

    def _say(self, told: str) -> None:
        self.said = told
        self._tell(told)
