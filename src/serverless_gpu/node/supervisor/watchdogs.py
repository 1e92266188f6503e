"""Runs the watchdogs of an attempt: hang detection, idle devices, failing GPUs.

output, events ──heard──▶ HangWatch, IdleWatch      no descriptor announces what they are about: `look`
kernel's log ──────────▶ AttemptFaults ──faults──▶ GpuFailed, at once
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from serverless_gpu.ambient import Clock
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import Attempt, Event, GpuFailed, Hang
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import GangNews, Launch
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.gang_hang_reporter import GangHangReporter
from serverless_gpu.node.supervisor.gpu_faults import AttemptFaults
from serverless_gpu.node.supervisor.hang_watchdog import HangWatchdog
from serverless_gpu.node.supervisor.idle_watchdog import IdleWatchdog
from serverless_gpu.node.supervisor.peers import Peers


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
