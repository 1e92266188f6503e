"""The supervisor's eyes on a run that goes on: whether it stands still, uses its devices, and has GPUs that work.

    output, events ──heard──▶ HangWatch, IdleWatch      no descriptor announces what they are about: `look`
    kernel's log ──────────▶ AttemptFaults ──faults──▶ GpuFailed, at once

Lives here: asking each of them in its turn. Must not: decide anything.
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
from serverless_gpu.node.supervisor.gang_hang_reporter import HangWitness
from serverless_gpu.node.supervisor.gpu_faults import AttemptFaults
from serverless_gpu.node.supervisor.hang_watchdog import HangWatch
from serverless_gpu.node.supervisor.idle_watchdog import IdleWatch
from serverless_gpu.node.supervisor.peers import Peers


class Eyes:
    """What is looked at while one attempt goes on.

    Args:
        launch: the attempt.
        home: the home directory.
        clock: where time comes from.
        say: called with a sentence for whoever watches the run.
        notes: sentences for the receipt; added to.
    """

    def __init__(self, launch: Launch, home: Home, clock: Clock, say: Callable[[str], None], notes: list[str]) -> None:
        directory = Path(launch.directory)
        self.hangs: HangWatch | HangWitness = HangWatch(directory, clock, say, notes)
        if len(launch.all_crews) > 1:  # a rank may rightly wait for one on another node, which nobody sees from here
            self.hangs = HangWitness(directory, launch.crews[launch.crew], clock, say, notes)
        self.idleness = IdleWatch(launch.spec, clock, say, notes)
        self.gpus = AttemptFaults(launch, home, clock, notes)

    @property
    def said(self) -> str:
        """Return what stands of what was said, or ""."""
        return self.hangs.said or self.idleness.said

    def judged_by(self, peers: Peers) -> None:
        """Say what is seen to the others of the gang, and do what comes of that; on one node there are none."""
        if isinstance(self.hangs, HangWitness):
            self.hangs.tell_server = self.idleness.tell_server = peers.tell
            peers.judge = self._judged

    def heard(self, event: Event | None = None) -> None:
        """Take note that the run gets on, or that somebody needs it: an event, or output where there is none."""
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
        if isinstance(self.hangs, HangWitness):
            self.hangs.ended()
        return self.hangs.hang

    def _judged(self, news: GangNews) -> list[Event]:
        assert isinstance(self.hangs, HangWitness)
        if news.ask is not None:
            self.hangs.asked(news.ask)
        if news.idle is not None:
            self.idleness.judged(news.idle)
        ended = self.hangs.judged(news.judgement) if news.judgement is not None else None
        return [] if ended is None else [ended]
