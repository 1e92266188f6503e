"""Watchdog of one attempt on one node: asks `model/hangs/hang_detection.py` what to do, and does it.

For gangs on several nodes see `gang_hang_reporter.py`.

    output, events ──heard──▶ HangWatch ──tell──▶ watchers, receipt, hang-<n>.txt
    the loop ────────look───▶     │ └────────────▶ HangConfirmed, where `hang_timeout` was asked for
                                  └── a look at the ranks (`rank_inspection.py`), polled until it is complete

It never blocks: an inspection takes several turns of the loop, and output goes on meanwhile. Failure cases: a full disk
loses the file, not the sentence; a sign of progress during an inspection makes it void.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from serverless_gpu.ambient import Clock, format_clock
from serverless_gpu.model.hangs import hang_detection
from serverless_gpu.model.hangs.hang_detection import HangAction
from serverless_gpu.model.hangs.hang_report import HangFinding, ranks_text, report, sentence, stacks
from serverless_gpu.model.lifecycle.attempt import Attempt, Event, Hang, HangConfirmed, Phase, RankReturned, State
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.rank_inspection import POLL_NS, RankInspector
from serverless_gpu.units import format_duration_ms


class HangWatchdog:
    """Detects a hang of one attempt; writes files with stacks to `directory`, and adds to `notes`."""

    def __init__(
        self,
        directory: Path,
        clock: Clock,
        tell: Callable[[str], None],
        notes: list[str],
    ) -> None:
        self.said = ""  # the last sentence for watchers, "" once the ranks make progress again
        self.hang: Hang | None = None  # the ranks that wait, and for which
        self.wake_ns: int | None = None  # when it is next worth a look, or None
        self._directory = directory
        self._clock = clock
        self._tell = tell
        self._notes = notes
        self._watch = hang_detection.begin(clock.boottime_ns())
        self._heard = True
        self._looking: RankInspector | None = None
        self._then = HangAction.LOOK
        self._numbers = itertools.count(1)
        self._silent_ns: int | None = None  # since when, as long as a warning stands
        self._returned_ns: int | None = None
        self._returned_at = ""
        self._early_said = False

    def heard(self, event: Event | None = None) -> None:
        """Record a sign of progress: an event, or output where that is None."""
        self._heard = True
        if isinstance(event, RankReturned) and self._returned_ns is None:
            self._returned_ns = self._clock.boottime_ns()
            self._returned_at = format_clock(self._clock.wall_ns())

    def look(self, attempt: Attempt, gang: LocalGang | None) -> HangConfirmed | None:
        """Do the work that is due; return the event that ends a run that hangs for too long, if any."""
        self.wake_ns = None
        if attempt.state is not State.RUNNING or attempt.phase is Phase.RETURNED or gang is None:
            self._leave()
            return None
        now_ns = self._clock.boottime_ns()
        self._say_early_return(attempt, now_ns)
        if self._heard:
            self._heard = False
            self._watch = hang_detection.progressed(self._watch, now_ns)
            self._say_progress(now_ns)
            self._leave()
        else:
            self._watch = hang_detection.observed(self._watch, now_ns)
        confirmed = self._finish_look(attempt, gang, now_ns)
        if self._looking is None:
            self._begin_look(attempt, gang, now_ns)
        return confirmed

    def _begin_look(self, attempt: Attempt, gang: LocalGang, now_ns: int) -> None:
        step = hang_detection.next_step(self._watch, attempt.limits, now_ns)
        if step.action is HangAction.WAIT:
            self.wake_ns = step.at_ns
            return
        ranks = sorted(set(attempt.numbers) - attempt.returned - attempt.exited)
        self._then = step.action
        self._looking = RankInspector(gang, ranks, step.action is not HangAction.LOOK, now_ns)
        self.wake_ns = now_ns + POLL_NS

    def _finish_look(self, attempt: Attempt, gang: LocalGang, now_ns: int) -> HangConfirmed | None:
        if self._looking is None:
            return None
        looks = self._looking.poll(now_ns)
        if looks is None:
            self.wake_ns = now_ns + POLL_NS
            return None
        self._looking = None
        spins = hang_detection.may_spin(attempt.world_size, {device.kind for device in gang.devices})
        self._watch = hang_detection.looked(self._watch, looks, now_ns, spins=spins)
        if not self._watch.looks:
            self._say_progress(now_ns)
            return None
        if self._then is HangAction.LOOK:
            return None
        at_work = self._then is HangAction.END and bool(hang_detection.moving(self._watch))
        finding = self._find(attempt, now_ns)
        if at_work:
            self._watch = hang_detection.spared(self._watch, now_ns)
            if self._watch.warned:
                return None  # said already, and nothing else is to be done
        self._watch = hang_detection.warned(self._watch)
        path, problem = self._write(attempt, finding)
        told = sentence(finding)
        # A receipt cuts what is long, so the file comes first there; its directory is the run's.
        self._notes.append(f"{path.name}{problem or ' has the stacks of all ranks'}: {told}")
        if self._then is HangAction.END and not at_work:
            return HangConfirmed(detail=told)
        self._say(f"{told}; stacks of all ranks: {path}{problem}")
        if self._silent_ns is None:
            self._silent_ns = self._watch.since_ns
        return None

    def _find(self, attempt: Attempt, now_ns: int) -> HangFinding:
        watch, moving = self._watch, hang_detection.moving(self._watch)
        waiting, elsewhere = hang_detection.divide(list(watch.last.values()), attempt.returned, moving)
        return HangFinding(
            waiting=tuple(waiting),
            elsewhere=tuple(elsewhere),
            looks=watch.last,
            first=watch.first,
            moving=moving,
            silent_ms=(now_ns - watch.since_ns) // 1_000_000,
            watched_ms=(now_ns - watch.began_ns) // 1_000_000,
        )

    def _write(self, attempt: Attempt, finding: HangFinding) -> tuple[Path, str]:
        """Write the file with all stacks; return where it is, and why it is not or ""."""
        name = f"hang-{next(self._numbers)}.txt"
        self.hang = Hang(waiting=finding.waiting, elsewhere=finding.elsewhere, stacks=stacks(finding), file=name)
        title = f"run {attempt.run_id}, attempt {attempt.fence}, at {format_clock(self._clock.wall_ns())}"
        path = self._directory / name
        try:
            path.write_text(report(finding, title, attempt.numbers), encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return path, f" could not be written ({error.strerror})"
        return path, ""

    def _say_progress(self, now_ns: int) -> None:
        """Report progress after a warning, and take the warning back."""
        if self._silent_ns is None:
            return
        silent_ms = (now_ns - self._silent_ns) // 1_000_000
        self._silent_ns = None
        self._say(f"the ranks get on again, after {format_duration_ms(silent_ms)} without output")
        self._say("")

    def _leave(self) -> None:
        if self._looking is not None:
            self._looking.close()
            self._looking = None

    def _say_early_return(self, attempt: Attempt, now_ns: int) -> None:
        """Explain an early return (F05); the run goes on, because a long evaluation looks the same."""
        if self._early_said or not hang_detection.returned_early(attempt, self._returned_ns, now_ns):
            return
        self._early_said = True
        running = sorted(set(attempt.numbers) - attempt.returned)
        early = ranks_text(sorted(attempt.returned))
        told = f"{early} returned (the first at {self._returned_at}), {ranks_text(running)} still running"
        self._notes.append(told)
        self._say(told)

    def _say(self, told: str) -> None:
        self.said = told
        self._tell(told)
