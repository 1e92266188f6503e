"""Applies node reports about attempts. Only nodes report the progress of a run.

    report ─▶ is the attempt on this node? ─▶ lease renewed (memory)
                  │
                  ├─ logs    appended to files by offset before the transaction; the node can resend logs
                  ├─ state, facts, files, ending, receipt: one transaction, or none if nothing is new
                  ├─ wakeup of clients that wait for the run
                  └─ logs synced to disk, if the attempt has ended; then the node may delete its copies

`AuthMiddleware` has already checked the token, which identifies the attempt and its node. The server applies a report
completely or not at all. A node may send a report twice. The server recognizes repeated log pieces by offset, and
repeated facts and files by name. The state of an attempt never moves backwards.

Failure cases:

- The server has abandoned the attempt because its node was unreachable for too long or restarted. The server answers a
  report about an abandoned attempt with `stale`. The server still accepts output and facts of an abandoned attempt, but
  no state, files or ending. The server writes the ending of an abandoned attempt to the audit.

- The server abandons the attempt while a report arrives. The report handler renews the lease before it reads the
  attempt's row. The monitor checks the lease within the transaction that abandons the attempt. After a long silence,
  the report handler always writes the attempt's row. The database therefore orders the two transactions of handler and
  monitor.

- The disk of the database is full when a node reports an attempt that has ended. The server answers the report with
  `ServerUnavailable`, so that the node sends the report again. After the error `ServerStorageFull`, the node would
  treat the report as received.

- A node reports a refused attempt as starting or running, because the server delivered the order twice. The server
  answers that the attempt is stale. User code of a refused attempt never begins, because user code waits for the
  server's first answer.

- The server restarts with a longer grace period than the attempt's stored grace period. The server stores the longer
  grace period before it sends the period to the node.

- The run has continued after the node reported the end of the attempt. The server still accepts the receipt of the
  ended attempt.

- Results refer to a blob whose parts are missing on the server. The server refuses a report with missing blob parts and
  writes nothing. The results of all ranks are therefore on the server before the run is complete.

- The server crashes after appending the logs of a report and before the transaction. The node sends the report again
  after the crash. From the repeated report, the server appends only the missing part of the logs.

- A report contains text that is too long or has control characters. The server truncates the text and replaces control
  characters before other users read the text.
"""

from __future__ import annotations

import logging
import re

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound, ServerStorageFull, ServerUnavailable, TooLarge
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, Reason, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, Event, Heard, Stopping, UserCodeStarted
from serverless_gpu.model.placement import numbered
from serverless_gpu.model.spec import Function
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import LEDGER, SCHEDULER, Hub, run_key
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import ATTEMPT, Call, Routes
from serverless_gpu.server.lifecycle import gangs, transitions
from serverless_gpu.server.lifecycle.attempt_tokens import AttemptTokens
from serverless_gpu.server.lifecycle.gang_hangs import GangHangs, check_progress
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.lifecycle.rendezvous import RendezvousService, check_meeting
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, ReportRequests, TransitionResult
from serverless_gpu.server.records import attempts, audit, crews, facts, files, nodes, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.crews import CrewId, StoredCrew
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.storage.blobs import Blobs, check_reference
from serverless_gpu.server.storage.logs import STREAMS, Logs
from serverless_gpu.wire.agents import Ending, File, LogPiece, Report, ReportAnswer
from serverless_gpu.wire.base import INLINE_BYTES_MAX, Json

routes = Routes("attempts")
SIGNS_PER_S = 100
"""Target rate of heartbeats of all attempts. Half a CPU core of the server can answer about 250 heartbeats per
second."""
SENTENCE_CHARACTERS_MAX = 2_000
DETAIL_CHARACTERS_MAX = 300
"""Maximum length of a report's text about the reason for an end. Users of other nodes read the reason for an attempt's
end."""
_MISSED, _MISSED_IF_LOST = 2.0, 1.2
_QUIET_S_MAX = 15.0
_WHOSE = re.compile(r"(?:results|failures)/([0-9]{1,9})\..*|hang-([0-9]{1,9})-[0-9]+\.txt")
"""Matches the rank in the name of an attempt's file, or the node number in a hang report's name."""
_LINK = re.compile(r"https?://[\x21-\x7e]{1,2000}")
_SEEN = {State.QUEUED: State.STARTING, State.STARTING: State.STARTING, State.RUNNING: State.RUNNING}
_log = logging.getLogger(__name__)


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """Stored run and attempt of a report, with the attempt's row for the reporting node."""

    run: StoredRun
    attempt: StoredAttempt
    crew: StoredCrew

    @property
    def is_current(self) -> bool:
        return self.crew.ended_ns is None and self.run.fence == self.attempt.fence

    @property
    def ranks(self) -> range:
        """Return the ranks on the reporting node."""
        return numbered(self.crew.place, per_node=self.run.spec.per_node)

    def has(self, rank: int, stream: str) -> bool:
        """Return True if an output stream belongs to a rank or to the telemetry of the reporting node."""
        return rank in self.ranks or (stream == "telemetry" and rank == self.crew.number)


class _Applied(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of a report: the run's transition, and True for a new receipt or new files."""

    told: TransitionResult | None = None
    settled: bool = False
    files: bool = False


class ReportService:
    """Applies node reports about attempts."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        logs: Logs,
        blobs: Blobs,
        leases: Leases,
        looks: ReportRequests,
        presence: Presence,
        measures: ServerMetrics,
        announcer: Announcer,
        attempt_tokens: AttemptTokens,
        gang_hangs: GangHangs,
        rendezvous: RendezvousService,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._logs = logs
        self._blobs = blobs
        self._leases = leases
        self._looks = looks
        self._presence = presence
        self._measures = measures
        self._announcer = announcer
        self._attempt_tokens = attempt_tokens
        self._gang_hangs = gang_hangs
        self._rendezvous = rendezvous

    def receive(self, who: Caller, *, run_id: str, fence: int, said: Report) -> ReportAnswer:
        """Apply a report, and return after the complete report is durable."""
        arrived_ns = self._clock.boottime_ns()
        said = with_billed_loss(said)
        crew = (run_id, fence, who.attempt[2] if who.attempt is not None else 0)
        found = self._database.read(lambda connection: _find(connection, crew))
        if found is None:
            return self._answer(stale=True)
        # Read the attempt again below if the server has requested a report after the first read.
        was_asked = self._looks.done(found.crew.node_id, crew)
        self._check(found, said)
        was_silent = False
        if found.crew.ended_ns is None:
            heard_ns = self._leases.renew(crew, now_ns=arrived_ns)
            was_silent = heard_ns is None or arrived_ns - heard_ns > self._settings.soft_expiry_s * 1e9
            self._grant(found.crew)
        offsets = self._append(found.attempt, said.logs)
        if said.logs:
            faults.reach("after_logs_before_state")
        if said.ending is not None and not found.crew.given_up:
            self._close_logs(found.crew, said, offsets)
        is_freed = said.freed and found.is_current and self._leases.free(crew)
        applied = _Applied()
        # After a long silence, a report needs a transaction, because the monitor may abandon the attempt concurrently.
        is_news = was_silent or self._is_news(found, said)
        if is_news:
            if said.ending is not None:
                faults.reach("after_upload_before_state")
            applied = self._write(who, found, said)
            if applied.told is not None and applied.told.looks:
                faults.reach("after_decided_before_told")
            if said.ending is not None:
                faults.reach("after_report_before_answer")
        self._announce(found, said, applied, is_news=is_news)
        if is_freed:
            # Wake the scheduler after the transaction, so that the scheduler sees every change of the report.
            self._hub.touch(SCHEDULER)
        if found.is_current:
            self._rendezvous.hear(found.attempt, found.crew, said)
            self._gang_hangs.hear(found.run, found.attempt, found.crew, said)
        if said.ending is not None or (said.logs and found.crew.ended_ns is not None):
            self._logs.sync(run_id, fence)  # Only the reporting node waits for the fsync of the logs.
        # After a heartbeat without news, the first read of the attempt is still current.
        if is_news or was_asked or found.run.state is not State.RUNNING:
            found = self._database.read(lambda connection: _find(connection, crew)) or found
        stop = found.run.stop if found.is_current else None
        answer = self._answer(stale=found.crew.is_stale(said.state))
        token = "" if answer.stale else self._attempt_tokens.next(who)
        answer = msgspec.structs.replace(answer, stop=stop, offsets=offsets, token=token)
        if found.attempt.num_nodes == 1 or not found.is_current:
            return answer
        return self._gang_hangs.told(found.attempt, self._with_gang_news(found, answer))

    def gang_news(self, connection: sa.Connection, crew: CrewId) -> ReportAnswer:
        """Return the rendezvous news and stop requests for a node of a gang."""
        found = _find(connection, crew)
        if found is None or found.attempt.num_nodes == 1 or not found.is_current:
            return ReportAnswer()
        return self._with_gang_news(found, ReportAnswer(stop=found.run.stop))

    def _with_gang_news(self, found: _Found, answer: ReportAnswer) -> ReportAnswer:
        word = gangs.reply(found.attempt, found.crew, is_stopping=answer.stop is not None)
        answer = msgspec.structs.replace(
            answer, release=word.release, peer_failed=word.peer_failed, stop=answer.stop or word.stop
        )
        return self._rendezvous.told(found.run, found.crew, answer)

    def _answer(self, *, stale: bool) -> ReportAnswer:
        settings = self._settings
        return ReportAnswer(stale=stale, partition_grace_s=settings.partition_grace_s, heartbeat_s=self._heartbeat_s())

    def _heartbeat_s(self) -> float:
        """Return the seconds between heartbeats of an attempt.

        The interval grows with the number of attempts. The interval affects only reports without news, because nodes
        report news immediately. The server shows an attempt as unreachable only after more than three lost heartbeats.
        """
        settings = self._settings
        wanted_s = self._leases.count() / SIGNS_PER_S
        return max(settings.heartbeat_s, min(wanted_s, settings.soft_expiry_s / 4, settings.partition_grace_s / 4))

    def quiet_s(self, crew: StoredCrew) -> float | None:
        """Return the seconds since a node's last report about an attempt, or None if the report is not late.

        Each node reports a running attempt every `heartbeat_s` seconds. If an engine has also lost the node, the server
        allows fewer missed heartbeats.
        """
        now_ns = self._clock.boottime_ns()
        silent_s = (now_ns - self._leases.last_ns(crew.id, now_ns=now_ns)) / 1e9
        missed = _MISSED_IF_LOST if self._presence.why_lost(crew.node_id) else _MISSED
        return silent_s if silent_s > min(missed * self._heartbeat_s(), _QUIET_S_MAX) else None

    def _grant(self, crew: StoredCrew) -> None:
        """Store the configured grace period of an attempt on a node if the stored grace period is shorter.

        The configured grace period may become shorter at a restart. After a restart with a shorter grace period, the
        server still waits for the longest granted grace period.
        """
        grace_s = self._settings.partition_grace_s
        if grace_s > crew.grace_s:
            self._database.write(lambda connection: crews.note(connection, crew.id, grace_s=grace_s))

    def _check(self, found: _Found, said: Report) -> None:
        """Refuse a report with impossible values before the server applies any part of the report."""
        ranks = found.ranks
        check_meeting(found.attempt, found.crew, said)
        check_progress(found.attempt, ranks, said)
        for piece in said.logs:
            if not found.has(piece.rank, piece.stream):
                raise InvalidValue(
                    f"attempt {found.attempt.gang} has no rank {piece.rank}; its world size is {len(ranks)}"
                )
        if sum(len(file.inline or b"") for file in said.files) > INLINE_BYTES_MAX:
            raise TooLarge(
                f"the files in one report may have at most {INLINE_BYTES_MAX} bytes together",
                hint="send the files as blobs",
            )
        for file in said.files:
            _check_file(found, file)
        parts = {part for file in said.files if file.blob is not None for part in file.blob.parts}
        missing = self._blobs.missing(parts) if parts else ()
        if missing:
            raise NotFound(
                f"{len(missing)} parts of the files of {found.attempt.gang} are not on the server",
                hint="upload the missing parts, then send the report again",
            )
        for name in said.ending.log_ends if said.ending is not None else ():
            rank, _, stream = name.partition(".")
            if not rank.isdecimal() or not found.has(int(rank), stream) or stream not in STREAMS:
                raise InvalidValue(f"attempt {found.attempt.gang} has no output {name[:40]!r}")
        for fact in said.facts:
            _check_fact(found.crew, fact)
        if said.halt is not None and said.halt.rank is not None and said.halt.rank not in ranks:
            raise InvalidValue(f"attempt {found.attempt.gang} has no rank {said.halt.rank} on node {found.crew.node}")
        if not 0 <= said.saved <= found.attempt.fence:
            raise InvalidValue(
                f"attempt {found.attempt.gang} reports checkpoints of attempt {said.saved}, which does not exist"
            )
        if said.exec_ns is not None and not 0 < said.exec_ns < 1 << 63:
            raise InvalidValue(
                f"attempt {found.attempt.gang} reports an invalid start time of user code: {said.exec_ns}"
            )
        if json_text(said.receipt) is not None and said.ending is None and found.crew.ended_ns is None:
            raise InvalidValue(f"attempt {found.attempt.gang} sent a receipt before its end")

    def _append(self, attempt: StoredAttempt, pieces: tuple[LogPiece, ...]) -> dict[str, int]:
        """Append output to logs, and return the next expected offset of each incompletely stored stream."""
        wanted: dict[str, int] = {}
        for piece in pieces:
            following = self._logs.append(
                attempt.run_id,
                attempt.fence,
                rank=piece.rank,
                stream=piece.stream,
                offset=piece.offset,
                data=piece.data,
            )
            self._measures.log_bytes.inc(min(len(piece.data), max(0, following - piece.offset)))
            name = f"{piece.rank}.{piece.stream}"
            wanted.pop(name, None)
            if following != piece.offset + len(piece.data):
                wanted[name] = following
        return wanted

    def _close_logs(self, crew: StoredCrew, said: Report, offsets: dict[str, int]) -> None:
        """Mark missing output at the end of a log if the server's disk was too full for the output."""
        ends = dict(said.ending.log_ends) if said.ending is not None else {}
        for piece in said.logs:
            name, end = f"{piece.rank}.{piece.stream}", piece.offset + len(piece.data)
            # If a log piece continues the stored output, only a full server disk can have truncated the piece.
            if piece.offset <= offsets.get(name, end) < end:
                ends.setdefault(name, end)
        for name, end in ends.items():
            rank, _, stream = name.partition(".")
            where = f"runs/{crew.run_id}/{crew.fence}/logs/{name}"
            why = (
                f"the server's disk was full when the run ended; the output is on node {crew.node}, {where} in "
                "the agent's home"
            )
            missing = self._logs.close_short(crew.run_id, crew.fence, rank=int(rank), stream=stream, end=end, why=why)
            self._measures.log_bytes_dropped.inc(missing)
            offsets.pop(name, None)

    def _is_news(self, found: _Found, said: Report) -> bool:
        """Return True if the server must write the report to the database, beyond renewing the lease."""
        if said.facts or said.files or said.ending is not None or json_text(said.receipt) is not None:
            return True
        if not found.is_current:
            return False
        if tracked(said) not in ("", found.run.tracked) or said.saved > found.run.saved:
            return True
        if gangs.with_report(found.crew, returned=_returned(found, said), halt=_halt(found, said)) != found.crew:
            return True
        unwritten_ns = self._clock.wall_ns() - found.crew.lease_ns
        is_due = not 0 <= unwritten_ns < self._settings.lease_written_s * 1e9
        return is_due or sentence(said) != found.crew.sentence or bool(_happened(found.crew, said))

    def _write(self, who: Caller, found: _Found, said: Report) -> _Applied:
        """Store a report in one transaction.

        Raises:
            ServerStorageFull: the disk is full, and the attempt continues. The answer shows that the report arrived.
            ServerUnavailable: the disk is full, and the attempt has ended. The node must send the report again.
        """
        at_ns, crew = self._clock.wall_ns(), found.crew.id
        try:
            return self._database.write(lambda connection: _apply(connection, who, crew, said, at_ns=at_ns))
        except ServerStorageFull as error:
            if found.crew.ended_ns is None:
                raise
            raise ServerUnavailable(error.message, hint=error.hint) from error

    def _announce(self, found: _Found, said: Report, applied: _Applied, *, is_news: bool) -> None:
        if applied.told is not None:
            self._announcer.announce(applied.told)
        is_said = sentence(said) != found.crew.sentence or tracked(said) not in (
            "",
            found.run.tracked,
        )
        is_ending = is_news and (said.ending is not None or said.halt is not None)
        if said.logs or applied.settled or applied.files or is_said or is_ending:
            self._hub.touch(run_key(found.run.id))
        if applied.settled:
            # The scheduler now knows the free devices, because the node has checked its devices.
            self._hub.touch(SCHEDULER)
        if applied.settled or (said.facts and found.crew.ended_ns is not None):
            self._hub.touch(LEDGER)


@routes.post("/attempts/{run}/{fence}/report", needs=ATTEMPT)
def report(call: Call, reports: ReportService, run: str, fence: int, body: Report) -> ReportAnswer:
    """Apply a node's report about an attempt."""
    return reports.receive(call.who, run_id=run, fence=fence, said=body)


def _find(connection: sa.Connection, crew: CrewId) -> _Found | None:
    run_id, fence, number = crew
    run = runs.find(connection, run_id)
    if run is None:
        return None
    attempt = run.attempt
    if attempt is None or attempt.fence != fence:
        attempt = attempts.find(connection, run_id, fence)
    if attempt is None or number >= len(attempt.crews):
        return None
    return _Found(run=run, attempt=attempt, crew=attempt.crews[number])


def _check_fact(crew: StoredCrew, fact: Fact) -> None:
    """Refuse a fact with impossible values for its attempt, because the server bills every accepted fact."""
    if fact.attempt != crew.gang:
        raise InvalidValue(f"the report of {crew.gang} contains a fact of another attempt")
    times = (fact.boottime_ns, fact.wall_ns)
    amounts = (fact.cpus, fact.memory_bytes, fact.grace_ms or 0)
    if not all(0 <= value < 1 << 62 for value in (*times, *amounts)) or not 0 <= fact.seq < 1 << 31:
        raise InvalidValue(f"fact {fact.seq} of attempt {crew.gang} has a number out of range")
    if len(fact.gpus) > crew.gpus:
        held = len(fact.gpus)
        raise InvalidValue(f"attempt {crew.gang} reports {held} devices but has {crew.gpus}")


def _check_file(found: _Found, file: File) -> None:
    files.check_name(file.name)
    whose = _WHOSE.fullmatch(file.name)
    if whose is not None and found.attempt.num_nodes > 1:  # All nodes of a gang share one namespace of file names.
        rank, node = whose.groups()
        if (node is not None and int(node) != found.crew.number) or (rank is not None and int(rank) not in found.ranks):
            raise InvalidValue(f"{file.name} of attempt {found.attempt.gang} does not belong to node {found.crew.node}")
    if (file.inline is None) == (file.blob is None):
        raise InvalidValue(f"file {file.name} must contain either its bytes or a blob")
    if file.blob is not None:
        check_reference(file.blob)
    if file.size != (len(file.inline) if file.inline is not None else file.blob.size if file.blob else 0):
        raise InvalidValue(f"file {file.name} does not have the stated size of {file.size} bytes")


def _apply(connection: sa.Connection, who: Caller, crew: CrewId, said: Report, *, at_ns: int) -> _Applied:
    run_id, fence, _ = crew
    found = _find(connection, crew)
    if found is None:
        return _Applied()
    _keep_facts(connection, found.crew, said)
    if found.crew.given_up:
        ending = said.ending
        # The audit records an ending only once, even if the node repeats its final report.
        if ending is not None and crews.note_late(connection, crew, reason=ending.reason.value):
            detail = {"fence": fence, "reason": ending.reason.value, "given_up_as": found.crew.reason or ""}
            audit.record(connection, who=who, action=Action.RUN_STALE, subject=run_id, now_ns=at_ns, detail=detail)
        settled = _settle(connection, found.crew, said, at_ns=at_ns)
        return _Applied(settled=settled)
    stored = [
        StoredFile(
            name=file.name, size=file.size, inline=file.inline, parts=file.blob.parts if file.blob is not None else ()
        )
        for file in said.files
    ]
    # After the attempt's end, the server accepts new files with the receipt but changes no stored file.
    if tracked(said) not in ("", found.run.tracked):
        runs.note_tracked(connection, run_id, tracked(said))
    if found.is_current and said.saved > found.run.saved:
        runs.note_saved(connection, run_id, said.saved)
        saved = msgspec.structs.replace(found.run, saved=said.saved, unsaved=0)
        found = msgspec.structs.replace(found, run=saved)
    written = files.put(connection, run_id, fence, stored, replace=found.crew.ended_ns is None)
    told = _tell(connection, found, said, at_ns=at_ns) if found.is_current else None
    settled = _settle(connection, found.crew, said, at_ns=at_ns)
    return _Applied(told=told, settled=settled, files=bool(written))


def _keep_facts(connection: sa.Connection, crew: StoredCrew, said: Report) -> None:
    if said.facts:
        for seq in facts.add(connection, crew.id, said.facts):
            _log.error(
                "fact %d of attempt %s arrived again with other contents, which the server ignores", seq, crew.gang
            )
        if crew.ended_ns is not None:
            # Write `uncharged` even if `uncharged` is already True. On PostgreSQL, the write forces the repetition of a
            # concurrent charge that lacks the new facts.
            crews.note(connection, crew.id, uncharged=True)


def _tell(connection: sa.Connection, found: _Found, said: Report, *, at_ns: int) -> TransitionResult:
    crew = found.crew
    if said.ending is not None:
        _check_results(connection, found, said)
        stopped = json_text(said.ending.stopped)
        crews.note(connection, crew.id, stopped_json=stopped, lease_ns=at_ns, sentence=sentence(said))
        # The node reports an unkillable process only with its next heartbeat. Until the next heartbeat, the scheduler
        # must not use the node.
        if not said.ending.proven:
            nodes.drain(connection, crew.node_id, f"unkillable: a process of run {crew.run_id}")
        if said.ending.reason is Reason.GPU_LOST:  # Another attempt must not use the GPU of the unkillable process.
            nodes.drain(connection, crew.node_id, f"{Reason.GPU_LOST}: a GPU of run {crew.run_id}")
    else:
        crews.note(connection, crew.id, lease_ns=at_ns, sentence=sentence(said))
    exec_ns = None
    if said.exec_ns is not None and crew.started_ns is None:
        # The server limits the start of user code to the time between placement and now. Nodes of protocol 1 send the
        # start by their own wall clock, which may be wrong.
        placed_ns = found.attempt.created_ns
        exec_ns = min(max(said.exec_ns, placed_ns), max(at_ns, placed_ns))
    note = Note(
        at_ns=at_ns,
        detail=ending_detail(said),
        exec_ns=exec_ns,
        returned=_returned(found, said),
        halt=_halt(found, said),
    )
    return transitions.apply_to_crew(connection, found.run, crew.number, *_happened(crew, said), note=note)


def _happened(crew: StoredCrew, said: Report) -> list[Event]:
    """Return the events in a report that the database does not contain yet."""
    seen = _SEEN.get(said.state, State.STOPPING)
    began = said.exec_ns is not None or (said.ending is not None and said.ending.began)
    happened: list[Event] = []
    if crew.state is State.UNREACHABLE:
        happened.append(Heard(seen))
    if began and not crew.began:
        happened.append(UserCodeStarted())
    state = crew.before if crew.state is State.UNREACHABLE else crew.state
    if seen is State.STOPPING and state is not State.STOPPING:
        happened.append(Stopping())
    if said.ending is not None:
        happened.append(AttemptEnded(said.ending.reason, began=said.ending.began, proven=said.ending.proven))
    return happened


def _returned(found: _Found, said: Report) -> bool:
    """Return True if all ranks on the node have returned and wait for ranks of other nodes."""
    return said.returned and found.attempt.num_nodes > 1


def _halt(found: _Found, said: Report) -> Halt | None:
    """Return the reason for which a node of a gang ends early, or None."""
    if found.attempt.num_nodes == 1:
        return None
    if said.halt is not None:
        return msgspec.structs.replace(said.halt, detail=_line(said.halt.detail))
    ending = said.ending
    if ending is None or MEANINGS[ending.reason].state is State.SUCCEEDED:
        return None
    cause = cause_of(ending)
    if cause is None:
        return Halt(reason=ending.reason)
    rank = cause.rank if cause.rank in found.ranks else None
    return Halt(reason=ending.reason, rank=rank, peer_lost=cause.peer_lost, detail=_line(cause.detail))


def _check_results(connection: sa.Connection, found: _Found, said: Report) -> None:
    """Refuse the end of a completed run while results of its ranks are missing on the server."""
    attempt, ending = found.attempt, said.ending
    if ending is None or ending.reason is not Reason.COMPLETED or not isinstance(found.run.spec.payload, Function):
        return
    wanted = {str(number) for number in found.ranks}
    names = files.names(connection, attempt.run_id, attempt.fence, prefix="results/")
    there = len(wanted & {name.partition(".")[0] for name in names})
    if there < len(wanted):
        raise InvalidValue(
            f"attempt {attempt.gang} reports completion, but the server has only {there} of {len(wanted)} results",
            hint="send the missing results before the ending or together with the ending",
        )


def _settle(connection: sa.Connection, crew: StoredCrew, said: Report, *, at_ns: int) -> bool:
    """Store the receipt. If the supervisor was lost without details, settle the attempt without a receipt."""
    receipt = json_text(said.receipt)
    if receipt is None and (said.ending is None or json_text(said.ending.stopped) is not None):
        return False
    return transitions.settle(connection, crew.id, receipt=receipt, at_ns=at_ns)


# --- texts in reports ----------------------------------------------------------------------------------------------


class _Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `node.protocol.Stopped.cause` that the server shows to users."""

    rank: int | None = None
    peer_lost: bool = False
    detail: str = ""


class _Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `node.protocol.Stopped` that the server decodes.

    The client decodes all fields of `Stopped`.
    """

    cause: _Cause | None = None


def cause_of(ending: Ending) -> _Cause | None:
    """Return the cause of an attempt's end from the node's report, or None."""
    stopped = json_text(ending.stopped)
    try:
        return None if stopped is None else from_json(stopped, _Stopped).cause
    # A node of another version may send a cause in an unknown format.
    except msgspec.DecodeError:
        return None


def with_billed_loss(said: Report) -> Report:
    """Replace `SUPERVISOR_LOST` with `SUPERVISOR_KILLED` in a report without evidence of the loss.

    The server charges for `SUPERVISOR_KILLED` but not for `SUPERVISOR_LOST`. Older nodes send no evidence for a lost
    supervisor.
    """
    ending = said.ending
    if ending is None or ending.reason is not Reason.SUPERVISOR_LOST:
        return said
    cause = cause_of(ending)
    if cause is not None and cause.detail:
        return said
    ending = msgspec.structs.replace(ending, reason=Reason.SUPERVISOR_KILLED)
    return msgspec.structs.replace(said, ending=ending)


def ending_detail(said: Report) -> str:
    """Return the details of an attempt's end for users: the node's message, or the failed rank's error."""
    if said.ending is None or said.sentence or json_text(said.ending.stopped) is None:
        return sentence(said) if said.ending is not None else ""
    cause = cause_of(said.ending)
    if cause is None or not cause.detail:
        return ""
    line = cause.detail.strip().partition("\n")[0]
    return storable(line if cause.rank is None else f"rank {cause.rank}: {line}")


def sentence(said: Report) -> str:
    """Return the node's message about its attempt."""
    return storable(said.sentence)


def tracked(said: Report) -> str:
    """Return the MLflow link of a run, or "" if the reported text is not a plain HTTP link."""
    return said.tracked if _LINK.fullmatch(said.tracked) else ""


def json_text(json: Json) -> str | None:
    """Return JSON bytes as text, or None for missing JSON."""
    decoded = bytes(json).decode() if isinstance(json, msgspec.Raw) else ""
    return None if decoded in ("", "null") else decoded


def storable(text: str) -> str:
    """Return text that PostgreSQL can store, truncated to the maximum length."""
    return text[:SENTENCE_CHARACTERS_MAX].replace("\0", "")


def _line(text: str) -> str:
    """Return the first line of a text, with spaces instead of control characters."""
    line = text.strip().partition("\n")[0][:DETAIL_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else " " for character in line)
