"""Watchdogs of one attempt on one node: hang detection, idle devices, failing GPUs.

    output, events ──heard──▶ Watchdogs ─▶ HangWatchdog or GangHangReporter, IdleWatchdog
    event loop ──────look───▶    │
    kernel log ──────────────────┴──faults──▶ AttemptFaults ─▶ GpuFailed, at once

`HangWatchdog` follows the decisions of `model/hangs/hang_detection.py`:

    output, events ──heard──▶ HangWatchdog ──tell──▶ attached clients, receipt, hang-<n>.txt
    event loop ──────look───▶     │ └──────────────▶ HangConfirmed, if the run has a `hang_timeout`
                                  └── an inspection of the ranks (`rank_inspection.py`), polled until it is complete

In a gang on several nodes, the server detects hangs from the reports of each node's supervisor:

    output, events ──heard──▶ GangHangReporter ──silent since──▶ server ◀── supervisors of the other nodes
    event loop ──────look───▶    │  ▲  └─────observation───────▶   │
                                 │  └──────inspection request──────┤
    hang-<node>-<n>.txt, ◀───────┴──────waiting ranks──────────────┘
    HangConfirmed

A single supervisor cannot distinguish a hang from ranks that correctly wait for ranks on another node. Each supervisor
therefore reports only how long its ranks have been silent. Once all nodes are silent, the server asks every supervisor
to inspect its ranks during the same period.

`IdleWatchdog` follows the decisions of `model/hangs/idleness.py`:

    telemetry ───────seen──▶ IdleWatchdog ──tell──▶ attached clients    at four fifths of the limit
    output, events ─heard──▶     └───────────────▶ StopRequested        at the limit: ranks may save a checkpoint first
    new client ─────heard──▶

No watchdog blocks the event loop. An inspection of ranks takes several iterations of the event loop, which still
forwards output.

Failure cases: If the disk is full, attached clients get the hang message but no stack file. A sign of progress cancels
a running inspection. If the server does not answer, no node receives a judgement about a hang. Without an idle limit or
telemetry, `IdleWatchdog` stops no run, because unobserved devices do not count as idle. The first node that receives a
hang judgement ends its ranks. Ranks on other nodes may fail before their nodes receive the judgement about the hang.
Supervisors without a judgement still write their last inspection of the ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, format_clock
from serverless_gpu.model.hangs import hang_detection, idleness
from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, InspectionRequest, Judgement
from serverless_gpu.model.hangs.hang_detection import HangAction
from serverless_gpu.model.hangs.hang_report import HangFinding, ranks_text, report, sentence, stacks
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import (
    Attempt,
    Event,
    GpuFailed,
    Hang,
    HangConfirmed,
    Limits,
    Phase,
    RankReturned,
    State,
    StopReason,
    StopRequested,
)
from serverless_gpu.model.placement import CrewPlace
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import GangNews, Launch
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.gpu_faults import AttemptFaults
from serverless_gpu.node.supervisor.rank_inspection import POLL_NS, RankInspector
from serverless_gpu.node.supervisor.rendezvous import Peers
from serverless_gpu.units import format_duration_ms

# Nanoseconds after a sign of progress that may be only the traceback of a failing rank.
_LAST_WORDS_NS = 10_000_000_000
_UNEXPLAINED = Hang(waiting=(), elsewhere=())


class Watchdogs:
    """All watchdogs of one attempt.

    The watchdogs append to the receipt's `notes`.
    """

    def __init__(self, launch: Launch, home: Home, clock: Clock, say: Callable[[str], None], notes: list[str]) -> None:
        directory = Path(launch.directory)
        self.hangs: HangWatchdog | GangHangReporter = HangWatchdog(directory, clock, say, notes)
        # A rank may correctly wait for another node's rank, which this node cannot observe.
        if len(launch.all_crews) > 1:
            self.hangs = GangHangReporter(directory, launch.crews[launch.crew], clock, say, notes)
        self.idleness = IdleWatchdog(launch.spec, clock, say, notes)
        self.gpus = AttemptFaults(launch, home, clock, notes)

    @property
    def said(self) -> str:
        """Return the latest warning that still applies, or ""."""
        return self.hangs.said or self.idleness.said

    def judged_by(self, peers: Peers) -> None:
        """Connect the watchdogs to the other nodes' supervisors and to the server's judgements.

        In a gang on one node, `judged_by` has no effect.
        """
        if isinstance(self.hangs, GangHangReporter):
            self.hangs.tell_server = self.idleness.tell_server = peers.tell
            peers.judge = self._judged

    def heard(self, event: Event | None = None) -> None:
        """Record a sign of progress: an event, or output if `event` is None."""
        self.hangs.heard(event)
        self.idleness.heard()

    def faults(self, attempt: Attempt, devices: Sequence[Device]) -> list[GpuFailed]:
        """Return the attempt's devices that failed since the last call."""
        return self.gpus.hear(attempt, devices)

    def look(self, attempt: Attempt, gang: LocalGang | None) -> list[Event]:
        """Run the watchdogs' periodic checks. Return the events that end the run."""
        found: tuple[Event | None, ...] = (self.hangs.look(attempt, gang), self.idleness.look(attempt))
        return [event for event in found if event is not None]

    def ended(self) -> Hang | None:
        """Return the ranks that waited for other ranks when the run ended, or None."""
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


class _HangDetector:
    """Base class of `HangWatchdog` and `GangHangReporter`.

    A hang detector writes stack files to `directory` and appends to the receipt's `notes`.
    """

    def __init__(self, directory: Path, clock: Clock, tell: Callable[[str], None], notes: list[str]) -> None:
        self.said = ""  # The last message to attached clients; "" after progress.
        self.hang: Hang | None = None  # The waiting ranks, and the ranks for which they wait.
        self.wake_ns: int | None = None  # Time of the next useful call of `look`, or None.
        self._directory = directory
        self._clock = clock
        self._tell = tell
        self._notes = notes
        self._heard = True
        self._inspector: RankInspector | None = None
        self._returned_ns: int | None = None
        self._early_said = False

    def _write_file(self, path: Path, text: str) -> str:
        """Write a stack file, and return the error message of a failed write, or ""."""
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return f" could not be written ({error.strerror})"
        return ""

    def _stop_inspection(self) -> None:
        if self._inspector is not None:
            self._inspector.close()
            self._inspector = None

    def _returned_early(self, attempt: Attempt, now_ns: int) -> bool:
        """Return True the first time that some ranks have returned long before the others (F05)."""
        if self._early_said or not hang_detection.returned_early(attempt, self._returned_ns, now_ns):
            return False
        self._early_said = True
        return True

    def _say(self, told: str) -> None:
        self.said = told
        self._tell(told)


class HangWatchdog(_HangDetector):
    """Detects hangs of an attempt that runs on one node."""

    def __init__(self, directory: Path, clock: Clock, tell: Callable[[str], None], notes: list[str]) -> None:
        super().__init__(directory, clock, tell, notes)
        self._watch = hang_detection.begin(clock.boottime_ns())
        self._then = HangAction.LOOK
        self._numbers = itertools.count(1)
        self._silent_ns: int | None = None  # Start of the silent period while a warning applies.
        self._returned_at = ""

    def heard(self, event: Event | None = None) -> None:
        """Record a sign of progress: an event, or output if `event` is None."""
        self._heard = True
        if isinstance(event, RankReturned) and self._returned_ns is None:
            self._returned_ns = self._clock.boottime_ns()
            self._returned_at = format_clock(self._clock.wall_ns())

    def look(self, attempt: Attempt, gang: LocalGang | None) -> HangConfirmed | None:
        """Run the periodic check. Return the event that ends a run if a hang exceeds the limit."""
        self.wake_ns = None
        if attempt.state is not State.RUNNING or attempt.phase is Phase.RETURNED or gang is None:
            self._stop_inspection()
            return None
        now_ns = self._clock.boottime_ns()
        self._say_early_return(attempt, now_ns)
        if self._heard:
            self._heard = False
            self._watch = hang_detection.progressed(self._watch, now_ns)
            self._say_progress(now_ns)
            self._stop_inspection()
        else:
            self._watch = hang_detection.observed(self._watch, now_ns)
        confirmed = self._finish_look(attempt, gang, now_ns)
        if self._inspector is None:
            self._begin_look(attempt, gang, now_ns)
        return confirmed

    def _begin_look(self, attempt: Attempt, gang: LocalGang, now_ns: int) -> None:
        step = hang_detection.next_step(self._watch, attempt.limits, now_ns)
        if step.action is HangAction.WAIT:
            self.wake_ns = step.at_ns
            return
        ranks = sorted(set(attempt.numbers) - attempt.returned - attempt.exited)
        self._then = step.action
        self._inspector = RankInspector(gang, ranks, step.action is not HangAction.LOOK, now_ns)
        self.wake_ns = now_ns + POLL_NS

    def _finish_look(self, attempt: Attempt, gang: LocalGang, now_ns: int) -> HangConfirmed | None:
        if self._inspector is None:
            return None
        looks = self._inspector.poll(now_ns)
        if looks is None:
            self.wake_ns = now_ns + POLL_NS
            return None
        self._inspector = None
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
                return None  # Do not repeat the warning while some ranks still make progress.
        self._watch = hang_detection.warned(self._watch)
        path, problem = self._write(attempt, finding)
        told = sentence(finding)
        # The hang note begins with the stack file's name, because a receipt truncates long notes. The stack file is in
        # the run's directory.
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
        """Write the stack file of all ranks.

        Return the stack file's path, and the error message of a failed write or "".
        """
        name = f"hang-{next(self._numbers)}.txt"
        self.hang = Hang(waiting=finding.waiting, elsewhere=finding.elsewhere, stacks=stacks(finding), file=name)
        title = f"run {attempt.run_id}, attempt {attempt.fence}, at {format_clock(self._clock.wall_ns())}"
        path = self._directory / name
        return path, self._write_file(path, report(finding, title, attempt.numbers))

    def _say_progress(self, now_ns: int) -> None:
        """Report progress after a warning and withdraw the warning."""
        if self._silent_ns is None:
            return
        silent_ms = (now_ns - self._silent_ns) // 1_000_000
        self._silent_ns = None
        self._say(f"the ranks make progress again, after {format_duration_ms(silent_ms)} without output")
        self._say("")

    def _say_early_return(self, attempt: Attempt, now_ns: int) -> None:
        """Report that some ranks returned early, without ending the run."""
        if not self._returned_early(attempt, now_ns):
            return
        running = sorted(set(attempt.numbers) - attempt.returned)
        early = ranks_text(sorted(attempt.returned))
        told = f"{early} returned (the first at {self._returned_at}), {ranks_text(running)} still running"
        self._notes.append(told)
        self._say(told)


class GangHangReporter(_HangDetector):
    """Reports the silence and the inspections of one node's ranks to the server.

    The attribute `hang` contains the server's judgement about a hang.
    """

    def __init__(
        self, directory: Path, place: CrewPlace, clock: Clock, tell: Callable[[str], None], notes: list[str]
    ) -> None:
        super().__init__(directory, clock, tell, notes)
        # Callback for changed fields of the node's state: `silent`, `silent_since_ns`, `seen`.
        self.tell_server: Callable[..., None] = lambda **changes: None
        self._place = place
        self._attempt: Attempt | None = None
        self._own = hang_detection.begin(clock.boottime_ns())
        self._silences = 0
        self._is_told = False
        self._ask: InspectionRequest | None = None
        self._round = self._own
        self._until_ns = 0
        self._is_last = False
        self._awaits_word = False
        self._moved_ns: int | None = None
        self._judgement: Judgement | None = None
        self._files = 0

    def heard(self, event: Event | None = None) -> None:
        """Record a sign of progress: an event, or output if `event` is None."""
        self._heard = True
        if isinstance(event, RankReturned):
            self._returned_ns = self._clock.boottime_ns()

    def asked(self, ask: InspectionRequest) -> None:
        """Start the inspection that the server has requested from all nodes."""
        if ask == self._ask or self._heard:
            return
        self._ask = ask
        now_ns, window_ns = self._clock.boottime_ns(), ask.window_ms * 1_000_000
        self._stop_inspection()
        self._round = msgspec.structs.replace(hang_detection.begin(now_ns - window_ns), seen_ns=now_ns)
        self._until_ns = now_ns + window_ns

    def judged(self, judgement: Judgement) -> HangConfirmed | None:
        """Apply the server's judgement about a hang of the gang. Return the event that ends the run, if any."""
        if judgement == self._judgement:
            return None
        self._judgement = judgement
        self._awaits_word = False
        if not judgement.sentence:
            if self.said:
                self._say("the ranks make progress again")
                self._say("")
            return None
        self._files = max(judgement.number, self._files + 1)
        who, where = judgement.hang or _UNEXPLAINED, f"hang-*-{self._files}.txt"
        self.hang = msgspec.structs.replace(who, file=where)
        path, problem = self._write(self._files, who, judgement.sentence)
        told = f"{path.name}{problem}" if problem else f"{where} have the stacks of all ranks"
        # The merged receipt shows the note once, because all nodes write the same note.
        self._notes.append(f"{told}: {judgement.sentence}")
        if judgement.ends:
            return HangConfirmed(detail=judgement.sentence)
        self._say(f"{judgement.sentence}; stacks of all ranks: {self._directory}/{where}{problem}")
        return None

    def ended(self) -> None:
        """Write the last inspection if the ranks hung until the attempt ended without a judgement."""
        moved_ns, now_ns = self._moved_ns, self._clock.boottime_ns()
        has_returned = self._attempt is not None and self._attempt.phase is Phase.RETURNED
        has_moved = moved_ns is not None and now_ns - moved_ns >= _LAST_WORDS_NS
        if self._awaits_word and not has_returned and not has_moved:
            self._write(
                self._files + 1, _UNEXPLAINED, "the run ended before the server reported which ranks wait for which"
            )
        self._awaits_word = False

    def look(self, attempt: Attempt, gang: LocalGang | None) -> None:
        """Run the periodic check of this node's ranks."""
        self.wake_ns = None
        self._attempt = attempt
        now_ns = self._clock.boottime_ns()
        self._say_early_return(attempt, now_ns)
        due = hang_detection.due_of(hang_detection.begin(0), attempt.limits)
        # Minimum silence before an inspection, in nanoseconds, or None if no inspection is due.
        quiet_ns = None if due is None else due.at_ns - due.window_ns
        if attempt.state is not State.RUNNING or attempt.phase is Phase.RETURNED or gang is None or quiet_ns is None:
            self._stop_inspection()
            if attempt.state is not State.RUNNING:
                self.ended()
            return
        before = self._own
        self._own = hang_detection.observed(before, now_ns)
        if self._heard or self._own.since_ns > before.since_ns:
            self._heard = False
            self._own = hang_detection.progressed(self._own, now_ns)
            self._forget()
        elif not self._is_told and now_ns - self._own.since_ns >= quiet_ns:
            self._is_told, self._silences = True, self._silences + 1
            self.tell_server(silent=self._silences, silent_since_ns=self._own.since_ns)
        if not self._is_told:
            self._wake(self._own.since_ns + quiet_ns)
        if self._until_ns:
            self._go_on_looking(attempt, gang, now_ns)

    def _go_on_looking(self, attempt: Attempt, gang: LocalGang, now_ns: int) -> None:
        if self._inspector is not None:
            looks = self._inspector.poll(now_ns)
            if looks is None:
                self._wake(now_ns + POLL_NS)
                return
            self._inspector = None
            kinds = {device.kind for device in gang.devices}
            spins = hang_detection.may_spin(
                attempt.world_size + 1, kinds
            )  # A single rank on this node may wait for ranks on other nodes.
            self._round = hang_detection.noted(self._round, looks, now_ns, spins=spins)
            if self._is_last:
                self._tell_seen(attempt)
                return
        window_ns = self._until_ns - self._round.since_ns >> 1
        step = hang_detection.next_step(self._round, Limits(hang_warning_ns=2 * window_ns), now_ns)
        if step.action is HangAction.WAIT:
            self._wake(step.at_ns)
            return
        self._is_last = step.action is not HangAction.LOOK
        ranks = sorted(set(attempt.numbers) - attempt.returned - attempt.exited)
        self._inspector = RankInspector(gang, ranks, self._is_last, now_ns)
        self._wake(now_ns + POLL_NS)

    def _tell_seen(self, attempt: Attempt) -> None:
        assert self._ask is not None
        self._until_ns = 0
        ranks, returned = hang_detection.seen(self._round), tuple(sorted(attempt.returned))
        waiting, elsewhere = hang_detection.divided(ranks, returned)
        own = self._finding(tuple(waiting), tuple(elsewhere))
        seen = CrewObservation(number=self._ask.number, ranks=ranks, returned=returned, stacks=stacks(own))
        self._awaits_word, self._moved_ns = True, None
        self.tell_server(seen=seen)

    def _finding(self, waiting: tuple[int, ...], elsewhere: tuple[int, ...]) -> HangFinding:
        now_ns, watch = self._clock.boottime_ns(), self._round
        return HangFinding(
            waiting=waiting,
            elsewhere=elsewhere,
            looks=watch.last,
            first=watch.first,
            moving=hang_detection.moving(watch),
            silent_ms=(now_ns - self._own.since_ns) // 1_000_000,
            watched_ms=(now_ns - watch.began_ns) // 1_000_000 if watch.looks else 0,
        )

    def _write(self, number: int, who: Hang, told: str) -> tuple[Path, str]:
        """Write the stack file of this node's ranks.

        Return the stack file's path, and the error message of a failed write or "".
        """
        path = self._directory / f"hang-{self._place.number}-{number}.txt"
        if self._attempt is None:
            return path, " could not be written (no rank has been inspected yet)"
        attempt = self._attempt
        at = format_clock(self._clock.wall_ns())
        title = f"run {attempt.run_id}, attempt {attempt.fence}, node {self._place.node}, at {at}"
        return path, self._write_file(
            path, report(self._finding(who.waiting, who.elsewhere), title, attempt.numbers, told)
        )

    def _forget(self) -> None:
        """Discard the state of a silent period after a sign of progress."""
        self._stop_inspection()
        self._until_ns = 0
        if self._moved_ns is None:
            self._moved_ns = self._own.since_ns
        if self._is_told:
            self._is_told = False
            self.tell_server(silent=0, silent_since_ns=0, seen=None)

    def _wake(self, at_ns: int | None) -> None:
        if at_ns is not None:
            self.wake_ns = at_ns if self.wake_ns is None else min(self.wake_ns, at_ns)

    def _say_early_return(self, attempt: Attempt, now_ns: int) -> None:
        """Report to attached clients why a node is quiet after its ranks returned.

        The run continues.
        """
        if not self._returned_early(attempt, now_ns):
            return
        running = sorted(set(attempt.numbers) - attempt.returned)
        others = ranks_text(running) if running else "ranks on other nodes"
        told = f"{ranks_text(sorted(attempt.returned))} returned a minute ago, {others} still running"
        self._notes.append(told)
        self._say(told)


class IdleWatchdog:
    """Detects that an attempt does not use its devices, and appends to the receipt's `notes`."""

    def __init__(self, spec: RunSpec, clock: Clock, tell: Callable[[str], None], notes: list[str]) -> None:
        self.said = ""  # Current warning about idle devices, or "".
        # Callback for this node's `idle` state in a gang on several nodes. In a gang on one node, the callback is None,
        # because that node decides without the server.
        self.tell_server: Callable[..., None] | None = None
        self._level = IdleVerdict.GO_ON
        self._spec = spec
        self._clock = clock
        self._tell = tell
        self._notes = notes
        self._idle: idleness.Idle | None = None
        self._begun = False

    def heard(self) -> None:
        """Record a sign of use: output, an event or a newly attached client."""
        if self._idle is not None:
            self._idle = idleness.used(self._idle, self._clock.boottime_ns())
            self._take_back("the run makes progress again")

    def seen(self, busy: bool) -> None:
        """Record whether telemetry saw a busy device since the last sample."""
        if self._idle is not None:
            self._idle = idleness.seen(self._idle, self._clock.boottime_ns(), busy=busy)
            if busy:
                self._take_back("the devices work again")

    def look(self, attempt: Attempt) -> StopRequested | None:
        """Run the periodic check. Return the event that stops a run with idle devices, if any."""
        # After its ranks have returned, the run waits for other nodes.
        if attempt.state is not State.RUNNING or attempt.phase is Phase.RETURNED:
            self._idle = None
            return None
        if not self._begun:  # This check is the first since user code started.
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
        self._idle = None  # Messages from ending ranks must not count as progress.
        self._notes.append(f"the run stopped because no device was busy for {idle_for} (idle_timeout={limit})")
        return StopRequested(StopReason.IDLE)

    def judged(self, verdict: IdleVerdict) -> None:
        """Apply the server's judgement about idle devices. An idle run ends by an ordinary cancel request."""
        if verdict is IdleVerdict.GO_ON:
            self._take_back("devices of the run on another node work again")
        elif self._idle is not None and not self.said:
            self._warn(self._idle, "no device of any node")

    def _warn(self, idle: idleness.Idle, who: str) -> None:
        idle_for, left = (format_duration_ms(ns // 1_000_000) for ns in (idle.idle_ns, idle.left_ns))
        self._say(
            f"{who} has been busy for {idle_for}: the run will stop in {left} (idle_timeout). Device use, output or "
            "`sgpu attach` prevents the stop"
        )

    def _take_back(self, told: str) -> None:
        if self.said:
            self._say(told)
            self._say("")

    def _say(self, told: str) -> None:
        self.said = told
        self._tell(told)
