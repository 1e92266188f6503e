"""Reports one attempt to the server whenever data is due, and at least every few seconds.

    news, logs, facts, outputs ─▶ Report ─▶ server ─▶ ReportAnswer ─▶ lease, stop, offsets of logs
                                    │
      final state ◀── once all logs and outputs are on the server, in the same report if they fit
          receipt ◀─ with the final state or after it; then the attempt is settled

If the server does not answer a report, the reporter repeats the report with the latest state. A repeated report is
harmless, because the server identifies all data by name or offset. Unsent data stays on this node's disk. The server's
answer extends the lease by `partition_grace_s` from the *start* of the request. The server starts its own timer later,
when it receives the request.

Failure cases:

If the server does not answer or returns errors, the reporter retries with exponential backoff of up to 5 s. The
supervisor ends the run when the lease expires.

If the server has given the attempt up, the uplink stops the attempt. The uplink still reports facts, output and the
final state, but no results.

If the attempt's token has expired, the node's next heartbeat returns another token.

If the server's database is full, the attempt continues, because a failed report still proves that the attempt runs. The
attempt stops when its lease expires, because a server with a full disk cannot record a lost attempt.

If the uplink cannot send results for an hour although the server answers, the run ends as `result_upload`. The run's
files stay on the node.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAuthenticated, ServerlessGpuError, ServerStorageFull, StaleAttempt
from serverless_gpu.model.hangs.gang_hang_detection import Silence
from serverless_gpu.model.lifecycle.attempt import SUPERVISOR_GONE, Fact, FactKind, State, StopReason
from serverless_gpu.node.attempt.history import read_receipt, spec_of
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import CrewNews, GangNews, Stopped
from serverless_gpu.node.processes.spawn import INSIDE
from serverless_gpu.node.uplink.delivery import FactsFile, LogShipment, OutputDelivery
from serverless_gpu.node.uplink.server import Backoff, UplinkServer
from serverless_gpu.wire.agents import Ending, LogPiece, Report, ReportAnswer
from serverless_gpu.wire.base import Json

AT_ONCE_S = 0.0
RECEIPT_S = 0.005
"""Longest wait of a final state for the receipt, in seconds. The same report usually contains the final state and the
receipt.
"""
SOON_S = 0.02
BEGUN_S = 0.1
"""Longest wait of a start report for the final state, in seconds. Within this time, a short run needs only one
report."""
SOME_TIME_S = 0.2
FIRST_OF_GANG_S = 0.1
"""Longest wait of a gang's first report for the node's offer, in seconds. With a warm stem, one report contains the
start and the offer.
"""


_HEARTBEAT_S = 5.0
_LOOK_S = 1.0  # Seconds between log checks of ranks without live output, because no message announces their output.
_UPLOAD_LOOK_S = 0.1
_LOGS_AGAIN_S = 5.0
_LEFT_MAX = 256
"""Maximum number of reports, each with up to 1 MiB of output, for an attempt that the server has given up."""
_NO_ROOM = (
    "the server's disk is full: the ranks' output stays on the node, which sends the output if space becomes free "
    "before the run ends"
)


class ReportListener(Protocol):
    """The controller of an attempt, which acts on the server's answers."""

    def renew(self, deadline_ns: int, stop: StopReason | None) -> None:
        """Extend the lease and forward a stop request after each answer of the server."""
        ...

    def pass_on(self, news: GangNews) -> None:
        """Receive the gang state from the server, which may be empty."""
        ...

    def heard(self, deadline_ns: int) -> None:
        """Extend the lease after a report for which the server had no disk space."""
        ...

    def settled(self) -> None:
        """Record that the server has all data of the attempt."""
        ...

    def abandon(self) -> None:
        """Stop an attempt that the server has given up."""
        ...


class _Shown(NamedTuple):
    """Parts of a report that the reporter repeats only after a change."""

    state: State
    sentence: str
    exec_ns: int | None
    tracked: str


class Reporter:
    """Sends the reports of one attempt."""

    def __init__(
        self,
        directory: Path,
        remote: ServerAttempt,
        news: PendingReport,
        *,
        server: UplinkServer,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._remote = remote
        self._news = news
        self._server = server
        self._clock = clock
        self._say = say
        self._credential = credential = server.credentials.of(remote.gang)
        self._line = server.line(credential.token)
        self._route = f"/attempts/{remote.run_id}/{remote.fence}/report"
        self._facts = FactsFile(directory / "facts.jsonl")
        self._delivery = OutputDelivery(directory, server, credential.token, clock)
        self._logs = LogShipment(directory / "logs", known=True)
        self._heartbeat_s = _HEARTBEAT_S
        self._logs_again_ns = 0
        self._said_ns = 0
        self._shown: _Shown | None = None
        self._exec_ns: int | None = None
        self._gpus: tuple[str, ...] = ()
        self._ending_sent = False
        self._tracked = ""
        self._error = ""
        self._was_heard = False
        self._until_ns = 0
        self._over = False
        self._refused = False
        self._left = _LEFT_MAX
        self._probe = CheckpointProbe(directory, remote)
        self._saved, self._looks = 0, set[str]()

    def run(self, listener: ReportListener, *, fresh: bool, first_s: float = AT_ONCE_S) -> None:
        """Send reports until the server has settled the attempt or given the attempt up.

        `fresh` is True for a new attempt without reports.
        """
        self._logs = LogShipment(self._directory / "logs", known=fresh)
        self._said_ns = self._clock.boottime_ns() + round((first_s - self._heartbeat_s) * 1e9)
        self._news.learn(first_s)  # User code waits for the server's first answer.
        backoff = Backoff()
        try:
            while True:
                report = self._next()
                if report is None:
                    continue
                asked_ns = self._clock.boottime_ns()
                answer = self._ask(report, backoff)
                if answer is None:
                    if self._was_heard:
                        self._until_ns = asked_ns + round(self._remote.partition_grace_s * 1e9)
                        listener.heard(self._until_ns)
                    continue
                self._said_ns = asked_ns
                self._note(report, answer)
                is_told = report.receipt or (self._ending_sent and self._has_no_receipt())
                is_settled = bool(is_told) and self._logs.is_complete(())
                if answer.stale:
                    self._over = True
                    listener.abandon()
                    if is_settled or not self._has_more_to_say(report):
                        return
                    continue
                self._until_ns = asked_ns + round(answer.partition_grace_s * 1e9)
                # The supervisor gets the gang state before a stop request, because a stop must not end ranks that may
                # already exit.
                listener.pass_on(_of_the_gang(answer))
                listener.renew(self._until_ns, answer.stop)
                if is_settled:
                    listener.settled()
                    return
        finally:
            self._delivery.close()
            self._line.close()

    def _ask(self, report: Report, backoff: Backoff) -> ReportAnswer | None:
        """Send a report, and return the server's answer.

        If the server has not accepted the report, pause and return None.
        """
        try:
            answer = self._line.get().ask("POST", self._route, report, answer=ReportAnswer)
        except StaleAttempt:
            self._refused = True
            return ReportAnswer(stale=True)
        except ServerlessGpuError as error:
            if isinstance(error, NotAuthenticated):
                self._server.credentials.refused(self._remote.gang)
            text = f"report of {self._remote.gang}: {type(error).__name__}: {error.message}"
            if text != self._error:  # Log only the first of several equal errors.
                self._say(text)
            self._error = text
            # The server cannot have given up the attempt, because the server received a report within the lease.
            is_held = not self._over and self._clock.boottime_ns() < self._until_ns
            self._was_heard = isinstance(error, ServerStorageFull) and is_held
            self._delivery.refused(error, ended=report.ending is not None)
            self._server.look_again()
            if error.retryable:
                self._delivery.unanswered()
            threading.Event().wait(backoff.next_s())
            self._news.learn(AT_ONCE_S)
            return None
        self._error = ""
        backoff.reset()
        self._server.answered()
        self._credential.take(answer.token)
        return answer

    # --- report contents -----------------------------------------------------------------------------------------

    def _next(self) -> Report | None:
        """Wait until a report is due and return the report, or None if no report is necessary."""
        heartbeat_s = (self._said_ns - self._clock.boottime_ns()) / 1e9 + self._heartbeat_s
        look_s = _UPLOAD_LOOK_S if self._delivery.is_uploading else _LOOK_S
        woken = self._news.wait(max(0.0, min(heartbeat_s, look_s)))
        known = self._news.known
        # Telemetry samples arrive every second but do not trigger a report. Periodic reports include the samples.
        self._logs.samples = known.ending is not None or heartbeat_s <= look_s
        if self._over:
            report = self._late(known)
        else:
            report = self._running(known) if known.ending is None else self._ended(known, known.ending)
        shown = _Shown(report.state, report.sentence, report.exec_ns, report.tracked)
        content = report.logs or report.facts or report.files or report.ending or report.receipt
        is_same = shown == self._shown or (self._delivery.is_uploading and heartbeat_s > self._heartbeat_s - _LOOK_S)
        if not woken and not content and is_same and heartbeat_s > look_s:
            return None
        self._shown = shown
        return report

    def _running(self, known: AttemptState) -> Report:
        """Return the report of an attempt that has not ended."""
        crew = known.crew or CrewNews()
        state = State.STOPPING if known.stop is not None or crew.halt is not None else known.state
        files = self._delivery.before_the_end(None if crew.halt is None else crew.halt.rank)
        facts = self._learn_from(self._facts.unsent())
        # If the previous attempt was lost, the server may not know that attempt's last checkpoint.
        if known.begun and self._remote.fence > 1:
            self._look_at_checkpoints("start")
        silence = None
        if crew.silent:  # The report contains the duration of the silence, because the server has another clock.
            silent_ns = self._clock.boottime_ns() - crew.silent_since_ns
            silence = Silence(number=crew.silent, ms=max(0, silent_ns // 1_000_000))
        return Report(
            state=state,
            sentence=known.sentence or (_NO_ROOM if self._has_no_room() else ""),
            world_size=self._remote.world_size,
            gpus=self._gpus,
            exec_ns=self._exec_ns,
            logs=self._pieces(),
            facts=facts,
            files=files,
            tracked=known.tracked,
            offer=None if known.begun else crew.offer,
            reach=None if known.begun else crew.reach,
            returned=crew.returned,
            halt=crew.halt,
            silence=silence,
            seen=crew.seen,
            idle=crew.idle,
            saved=self._saved,
        )

    def _ended(self, known: AttemptState, stopped: Stopped) -> Report:
        """Return the report of an attempt whose ranks have ended. The last report contains the final state."""
        facts = self._learn_from(self._facts.unsent())
        logs = self._pieces()
        cancelled = known.stop is StopReason.CANCEL
        delivered = self._delivery.deliver(stopped, self._server.profile.upload_s, cancelled=cancelled)
        # The reporter sends the final state even if the server's disk is full. The final state names the incomplete
        # logs.
        are_told = self._logs.is_complete(logs) or self._has_no_room()
        is_last = self._ending_sent or (delivered.is_last and are_told)
        if not is_last and (logs or delivered.files):
            self._news.learn(AT_ONCE_S)
        ending = None
        if is_last and not self._ending_sent:
            ending = _ending(delivered.stopped, began=known.begun, log_ends=self._logs.ends_missing(logs))
            logs += self._logs.closing(logs)
            # Another attempt may continue from the saved checkpoints.
            if delivered.stopped.state is not State.SUCCEEDED:
                self._look_at_checkpoints("end")
        receipt = (
            self._receipt(delivered.stopped)
            if is_last and known.finished and self._facts.is_complete()
            else msgspec.UNSET
        )
        return Report(
            state=State.STOPPING,
            sentence=delivered.sentence or (_NO_ROOM if self._has_no_room() and not is_last else ""),
            world_size=self._remote.world_size,
            gpus=self._gpus,
            exec_ns=self._exec_ns,
            logs=logs,
            facts=facts,
            files=delivered.files,
            ending=ending,
            receipt=receipt,
            freed=known.finished,
            tracked=known.tracked or self._tracked,
            returned=known.crew is not None and known.crew.returned,
            halt=None if known.crew is None else known.crew.halt,
            saved=self._saved,
        )

    def _look_at_checkpoints(self, when: str) -> None:
        if when not in self._looks:
            self._looks.add(when)
            self._saved = max(self._saved, self._probe.newest())

    def _late(self, known: AttemptState) -> Report:
        """Return the report of an attempt that the server has given up: all facts, but no results."""
        facts = self._learn_from(self._facts.unsent())
        logs = self._pieces()
        stopped = known.ending
        is_last = stopped is not None and (self._logs.is_complete(logs) or self._has_no_room())
        ending = None
        if stopped is not None and is_last and not self._ending_sent:
            ending = _ending(stopped, began=known.begun, log_ends=self._logs.ends_missing(logs))
        has_receipt = stopped is not None and is_last and known.finished and self._facts.is_complete()
        return Report(
            state=State.STOPPING,
            world_size=self._remote.world_size,
            gpus=self._gpus,
            exec_ns=self._exec_ns,
            logs=logs,
            facts=facts,
            ending=ending,
            receipt=self._receipt(stopped) if stopped is not None and has_receipt else msgspec.UNSET,
            freed=known.finished,
        )

    def _has_no_receipt(self) -> bool:
        """Return True if no receipt can follow because the attempt's directory was deleted."""
        return self._news.known.finished and read_receipt(self._directory) is None

    def _has_more_to_say(self, report: Report) -> bool:
        """Return True if a given-up attempt that had devices still has data to report."""
        if report.logs or report.facts:
            self._left -= 1
        return not self._refused and self._left > 0 and (self._directory / "facts.jsonl").exists()

    def _pieces(self) -> tuple[LogPiece, ...]:
        return () if self._has_no_room() else self._logs.pieces()

    def _has_no_room(self) -> bool:
        """Return True if the server's disk was full at the last report."""
        return self._clock.boottime_ns() < self._logs_again_ns

    def _learn_from(self, facts: tuple[Fact, ...]) -> tuple[Fact, ...]:
        for fact in facts:
            self._gpus = fact.gpus or self._gpus
            if fact.kind is FactKind.EXEC and self._exec_ns is None:
                is_this_boot = fact.boot_id == self._clock.boot_id()
                told_ns = self._server.time.wall_ns(fact.boottime_ns) if is_this_boot else None
                self._exec_ns = told_ns or fact.wall_ns
        return facts

    def _receipt(self, stopped: Stopped) -> Json:
        receipt = read_receipt(self._directory)
        if receipt is None:
            return msgspec.UNSET
        self._tracked = receipt.tracked
        # The supervisor did not know that the uplink had failed to send the results.
        if receipt.state != stopped.state.value:
            receipt = msgspec.structs.replace(receipt, state=stopped.state.value, reason=stopped.reason.value)
        return msgspec.Raw(msgspec.json.encode(receipt))

    # --- server state --------------------------------------------------------------------------------------------

    def _note(self, report: Report, answer: ReportAnswer) -> None:
        self._heartbeat_s = answer.heartbeat_s
        if report.logs:
            has_room = self._logs.taken(report.logs, answer.offsets)
            self._logs_again_ns = 0 if has_room else self._clock.boottime_ns() + round(_LOGS_AGAIN_S * 1e9)
        self._facts.taken()
        self._delivery.taken(report.files)
        self._delivery.answered()
        self._ending_sent = self._ending_sent or report.ending is not None
        self._logs.samples = self._news.known.ending is not None
        has_no_room = self._has_no_room()
        wanted = bool(answer.offsets) and not has_no_room
        behind = wanted or not (has_no_room or self._logs.is_complete(())) or not self._facts.is_complete()
        known = self._news.known
        if wanted or (known.ending is not None and behind) or (self._ending_sent and known.finished):
            self._news.learn(AT_ONCE_S)
        # Data written during a report waits for the next report, because each report takes CPU time from the ranks.
        elif behind:
            self._news.learn(SOON_S)


def _of_the_gang(answer: ReportAnswer) -> GangNews:
    return GangNews(
        offers=answer.offers,
        chosen=answer.chosen,
        release=answer.release,
        peer_failed=answer.peer_failed,
        ask=answer.ask,
        judgement=answer.judgement,
        idle=answer.idle,
    )


def _ending(stopped: Stopped, *, began: bool, log_ends: dict[str, int]) -> Ending:
    # A missing cause shows that the supervisor died without a message.
    lost = stopped.reason in SUPERVISOR_GONE and stopped.cause is None
    word: Json = msgspec.UNSET if lost else msgspec.Raw(msgspec.json.encode(stopped))
    return Ending(
        state=stopped.state,
        reason=stopped.reason,
        began=began,
        stopped=word,
        log_ends=log_ends,
        proven=stopped.proven,
    )


class AttemptState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an attempt as its supervisor reports it."""

    state: State = State.STARTING
    sentence: str = ""
    begun: bool = False  # True once user code has begun.
    ending: Stopped | None = None  # Final state of the attempt; None while the attempt runs.
    finished: bool = False  # True once the receipt is written.
    stop: StopReason | None = None  # Reason of a requested stop, or None.
    tracked: str = ""  # Link to the run in MLflow, once known.
    crew: CrewNews | None = None  # State of this node for the other nodes of the gang; None for a gang on one node.


class PendingReport:
    """Holds the newest unreported state of an attempt and the deadline for its report.

    The attempt's listening thread writes the state that the reporter reads. Each change has a separate report deadline.
    A report combines all pending changes. A run of ten milliseconds therefore needs only one report. A rank that prints
    line by line does not cause one request per line.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._known = AttemptState()
        self._due_ns: int | None = None

    @property
    def known(self) -> AttemptState:
        """Return the current state of the attempt."""
        return self._known

    def learn(self, within_s: float, **changes: object) -> None:
        """Change fields of `AttemptState`. A report must contain the changes within `within_s` seconds."""
        with self._condition:
            if changes:
                self._known = msgspec.structs.replace(self._known, **changes)
            due_ns = self._clock.boottime_ns() + round(within_s * 1e9)
            if self._due_ns is None or due_ns < self._due_ns:
                self._due_ns = due_ns
                self._condition.notify_all()

    def wait(self, limit_s: float) -> bool:
        """Wait up to `limit_s` seconds for a due change.

        If a change is due, mark the change as reported and return True.
        """
        limit_ns = self._clock.boottime_ns() + round(limit_s * 1e9)
        with self._condition:
            while True:
                until_ns = limit_ns if self._due_ns is None else min(limit_ns, self._due_ns)
                left_s = (until_ns - self._clock.boottime_ns()) / 1e9
                if left_s <= 0:
                    was_due = self._due_ns is not None and self._due_ns <= self._clock.boottime_ns()
                    self._due_ns = None if was_due else self._due_ns
                    return was_due
                self._condition.wait(left_s)


_PROBE_KILL_S = 0.2
_STUCK_PROBES_MAX = 3
_PROBE_BYTES_MAX = 32
_stuck_probes: list[subprocess.Popen[bytes]] = []


class CheckpointProbe:
    """Finds the newest attempt of a run that saved a checkpoint, as evidence that `resume` makes progress.

    A short-lived process lists the checkpoint directory, because a call into a hanging shared file system blocks its
    thread permanently. The result is 0 (unknown) if the directory is unreadable or does not answer within a few
    seconds. After too many hanging probes, the result is also 0. The server treats an attempt with the result 0 as an
    attempt without a checkpoint.

    `directory` is in a home whose configuration names the checkpoint directory. `program` lists the directory and
    prints the result.
    """

    def __init__(
        self, directory: Path, remote: ServerAttempt, *, program: Path = INSIDE / "checkpoints.py", limit_s: float = 5.0
    ) -> None:
        self._home, self._directory, self._remote = Home(directory.parents[2]), directory, remote
        self._program, self._limit_s = program, limit_s

    def newest(self) -> int:
        """Return the number of the newest attempt with a checkpoint, up to this attempt; 0 if unknown."""
        spec = spec_of(self._directory)
        if spec is None or not spec.resume:
            return 0
        checkpoints = self._home.checkpoints
        with contextlib.suppress(InvalidValue):
            checkpoints = Path(read_configuration(self._home).checkpoints or checkpoints)
        found = self._ask(checkpoints / self._remote.run_id / str(self._remote.fence))
        return found if 0 < found <= self._remote.fence else 0

    def _ask(self, directory: Path) -> int:
        _stuck_probes[:] = [process for process in _stuck_probes if process.poll() is None]
        if len(_stuck_probes) >= _STUCK_PROBES_MAX:
            return 0
        argv = [sys.executable, "-I", "-S", str(self._program), str(directory)]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            return 0
        try:
            process.wait(self._limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_PROBE_KILL_S)
            _stuck_probes.append(process)  # The probe may block in the kernel until the file system answers.
            if process.stdout is not None:
                process.stdout.close()
            return 0
        assert process.stdout is not None
        with process.stdout as pipe:
            text = pipe.read(_PROBE_BYTES_MAX).strip()
        return int(text) if text.isdigit() else 0
