"""Reports of nodes about their crew of an attempt: the one way in which the server learns what happens to a run.

    report ─▶ is the crew there? ─▶ lease renewed (memory)
                  │
                  ├─ logs    appended to files by offset, before the transaction: losing them again is no harm
                  ├─ state, facts, files, ending, receipt: one transaction, or none when nothing is new
                  ├─ readers that wait for it are woken
                  └─ logs made durable, if the attempt has ended; then the node may forget its own

`AuthMiddleware` has checked the crew's own token, which says which one it is. A report is applied whole or not at all,
and may come twice: logs by their offsets, facts and files by their names, states because nothing goes backwards, an
ending because it is the same one.

What can go wrong:

- The attempt was given up (its node was away for too long, or restarted): the answer is `stale`. What it wrote and used
  until then is kept, as it is the truth; its state, files and ending are not taken, and a late ending is audited.
- It is given up in the very moment in which it reports again: the report renews the lease before it reads; the
  monitor looks at the lease within the transaction; after a silence the report writes, too. One sees the other.
- The database is full when an attempt reports that is over: it is refused as when the server is away. "Full" would tell
  its node that it was heard of, and may go on.
- The attempt was refused, and is reported to be starting or running all the same (an order that was delivered twice):
  `stale`, too. User code waits for the first answer, so it does not begin.
- The server was started with a longer grace than the attempt was placed with: that is written before it is granted.
- The attempt ended by its own report and the run has gone on: its receipt still comes, and is taken.
- Results lie in a blob whose parts are not here: refused, before anything is written. A run that reports to have
  completed has the results of all its ranks here.
- The server dies after the logs and before the transaction: the node sends the report again, and only what is missing
  is appended.
- A text cannot be read, or is not fit to be shown to people on other nodes: what can be read is cut to its length and
  made printable.
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
"""Signs of life of all attempts together, about: half a processor has nothing else to do than to answer 250."""
SENTENCE_CHARACTERS_MAX = 2_000
DETAIL_CHARACTERS_MAX = 300
"""Of why a crew ends: people on other nodes read it."""
_MISSED, _MISSED_IF_LOST = 2.0, 1.2
_QUIET_S_MAX = 15.0
_WHOSE = re.compile(r"(?:results|failures)/([0-9]{1,9})\..*|hang-([0-9]{1,9})-[0-9]+\.txt")
"""Rank, or node of several, of a file."""
_LINK = re.compile(r"https?://[\x21-\x7e]{1,2000}")
_SEEN = {State.QUEUED: State.STARTING, State.STARTING: State.STARTING, State.RUNNING: State.RUNNING}
_log = logging.getLogger(__name__)


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """A crew that reports, its attempt and its run."""

    run: StoredRun
    attempt: StoredAttempt
    crew: StoredCrew

    @property
    def is_current(self) -> bool:
        return self.crew.ended_ns is None and self.run.fence == self.attempt.fence

    @property
    def ranks(self) -> range:
        """Return the numbers of the crew's processes."""
        return numbered(self.crew.place, per_node=self.run.spec.per_node)

    def has(self, rank: int, stream: str) -> bool:
        """Return whether output is the crew's: of one of its processes, or the samples of its node."""
        return rank in self.ranks or (stream == "telemetry" and rank == self.crew.number)


class _Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What a report changed: `told` when it is the current attempt's, `settled` when its receipt is news."""

    told: TransitionResult | None = None
    settled: bool = False
    files: bool = False


class ReportService:
    """Applies reports of nodes about their attempts."""

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
        """Apply a report; everything of it is durable when this returns."""
        arrived_ns = self._clock.boottime_ns()
        said = with_billed_loss(said)
        crew = (run_id, fence, who.attempt[2] if who.attempt is not None else 0)
        found = self._database.read(lambda connection: _find(connection, crew))
        if found is None:
            return self._answer(stale=True)
        # What it was asked for may be newer than what was read; what is new after this asks again.
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
        # After a silence it may be given up at this moment: then a transaction decides which of the two came first.
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
            self._hub.touch(SCHEDULER)  # after the transaction: one look at all that the report changed
        if found.is_current:
            self._rendezvous.hear(found.attempt, found.crew, said)
            self._gang_hangs.hear(found.run, found.attempt, found.crew, said)
        if said.ending is not None or (said.logs and found.crew.ended_ns is not None):
            self._logs.sync(run_id, fence)  # only the node waits for that
        if is_news or was_asked or found.run.state is not State.RUNNING:  # else as it was read: most are signs of life
            found = self._database.read(lambda connection: _find(connection, crew)) or found
        stop = found.run.stop if found.is_current else None
        answer = self._answer(stale=found.crew.is_stale(said.state))
        token = "" if answer.stale else self._attempt_tokens.next(who)
        answer = msgspec.structs.replace(answer, stop=stop, offsets=offsets, token=token)
        if found.attempt.num_nodes == 1 or not found.is_current:
            return answer
        return self._gang_hangs.told(found.attempt, self._with_gang_news(found, answer))

    def gang_news(self, connection: sa.Connection, crew: CrewId) -> ReportAnswer:
        """Return the answer about rendezvous and end of its gang that a crew would get if it reported now."""
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
        """Return how often an attempt is to be heard of that has nothing to say: less often where there are thousands.

        News comes at once in any case, so this decides only how much of the server's time goes by being told that
        nothing has changed. Three lost reports still fit into the silence after which an attempt is shown as
        unreachable.
        """
        settings = self._settings
        wanted_s = self._leases.count() / SIGNS_PER_S
        return max(settings.heartbeat_s, min(wanted_s, settings.soft_expiry_s / 4, settings.partition_grace_s / 4))

    def quiet_s(self, crew: StoredCrew) -> float | None:
        """Return for how many seconds nothing was heard of a crew; None where it may just have nothing to say.

        A running crew reports each `heartbeat_s`; one whose node is lost to its engine as well is missed sooner.
        """
        now_ns = self._clock.boottime_ns()
        silent_s = (now_ns - self._leases.last_ns(crew.id, now_ns=now_ns)) / 1e9
        missed = _MISSED_IF_LOST if self._presence.why_lost(crew.node_id) else _MISSED
        return silent_s if silent_s > min(missed * self._heartbeat_s(), _QUIET_S_MAX) else None

    def _grant(self, crew: StoredCrew) -> None:
        """Write how long a crew may go on without an answer, where that is longer than before.

        The next server may grant less, and waits for as long as this one has granted.
        """
        grace_s = self._settings.partition_grace_s
        if grace_s > crew.grace_s:
            self._database.write(lambda connection: crews.note(connection, crew.id, grace_s=grace_s))

    def _check(self, found: _Found, said: Report) -> None:
        """Refuse what cannot be, before anything of the report is applied."""
        ranks = found.ranks
        check_meeting(found.attempt, found.crew, said)
        check_progress(found.attempt, ranks, said)
        for piece in said.logs:
            if not found.has(piece.rank, piece.stream):
                raise InvalidValue(f"attempt {found.attempt.gang} has no rank {piece.rank}: it has {len(ranks)}")
        if sum(len(file.inline or b"") for file in said.files) > INLINE_BYTES_MAX:
            raise TooLarge(
                f"the files of one report have more than {INLINE_BYTES_MAX} bytes", hint="send them as blobs"
            )
        for file in said.files:
            _check_file(found, file)
        parts = {part for file in said.files if file.blob is not None for part in file.blob.parts}
        missing = self._blobs.missing(parts) if parts else ()
        if missing:
            raise NotFound(
                f"{len(missing)} parts of the files of {found.attempt.gang} are not on the server",
                hint="send them first, and report again",
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
            raise InvalidValue(f"attempt {found.attempt.gang} is said to see checkpoints of attempt {said.saved}")
        if said.exec_ns is not None and not 0 < said.exec_ns < 1 << 63:
            raise InvalidValue(f"user code of {found.attempt.gang} is said to have begun at {said.exec_ns}")
        if json_text(said.receipt) is not None and said.ending is None and found.crew.ended_ns is None:
            raise InvalidValue(f"a receipt of attempt {found.attempt.gang} came, and it has not ended")

    def _append(self, attempt: StoredAttempt, pieces: tuple[LogPiece, ...]) -> dict[str, int]:
        """Append output; return where a stream wants to go on, for those that did not fit on."""
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
        """Say in the output of a crew that ends what there was no room for: more of it will not come."""
        ends = dict(said.ending.log_ends) if said.ending is not None else {}
        for piece in said.logs:
            name, end = f"{piece.rank}.{piece.stream}", piece.offset + len(piece.data)
            if piece.offset <= offsets.get(name, end) < end:  # it fits on to what is there, so the disk is full
                ends.setdefault(name, end)
        for name, end in ends.items():
            rank, _, stream = name.partition(".")
            where = f"runs/{crew.run_id}/{crew.fence}/logs/{name}"
            why = f"the server's disk was full when the run ended; it is on node {crew.node}, {where} in its home"
            missing = self._logs.close_short(crew.run_id, crew.fence, rank=int(rank), stream=stream, end=end, why=why)
            self._measures.log_bytes_dropped.inc(missing)
            offsets.pop(name, None)

    def _is_news(self, found: _Found, said: Report) -> bool:
        """Return whether there is anything to write; most reports only say that the attempt is alive."""
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
        """Write what a report says.

        Raises:
            ServerStorageFull: there is no room, and the attempt goes on: it was heard of, which its node is told so.
            ServerUnavailable: there is no room, and the attempt is over: nothing that it could take for an answer.
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
            self._hub.touch(SCHEDULER)  # its devices were looked at, and are free or known not to be
        if applied.settled or (said.facts and found.crew.ended_ns is not None):
            self._hub.touch(LEDGER)


@routes.post("/attempts/{run}/{fence}/report", needs=ATTEMPT)
def report(call: Call, reports: ReportService, run: str, fence: int, body: Report) -> ReportAnswer:
    """Take what is new about an attempt."""
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
    """Refuse what no crew can have used: everything else is counted, and paid for."""
    if fact.attempt != crew.gang:
        raise InvalidValue(f"a fact came with the report of {crew.gang} that is about another attempt")
    times = (fact.boottime_ns, fact.wall_ns)
    amounts = (fact.cpus, fact.memory_bytes, fact.grace_ms or 0)
    if not all(0 <= value < 1 << 62 for value in (*times, *amounts)) or not 0 <= fact.seq < 1 << 31:
        raise InvalidValue(f"fact {fact.seq} of attempt {crew.gang} has a number that cannot be")
    if len(fact.gpus) > crew.gpus:
        held = len(fact.gpus)
        raise InvalidValue(f"attempt {crew.gang} is said to hold {held} devices, and has {crew.gpus}")


def _check_file(found: _Found, file: File) -> None:
    files.check_name(file.name)
    whose = _WHOSE.fullmatch(file.name)
    if whose is not None and found.attempt.num_nodes > 1:  # files of all crews lie side by side
        rank, node = whose.groups()
        if (node is not None and int(node) != found.crew.number) or (rank is not None and int(rank) not in found.ranks):
            raise InvalidValue(f"{file.name} of attempt {found.attempt.gang} is not of node {found.crew.node}")
    if (file.inline is None) == (file.blob is None):
        raise InvalidValue(f"file {file.name} comes either with its bytes or as a blob")
    if file.blob is not None:
        check_reference(file.blob)
    if file.size != (len(file.inline) if file.inline is not None else file.blob.size if file.blob else 0):
        raise InvalidValue(f"file {file.name} is said to have {file.size} bytes, and has another number")


def _apply(connection: sa.Connection, who: Caller, crew: CrewId, said: Report, *, at_ns: int) -> _Applied:
    run_id, fence, _ = crew
    found = _find(connection, crew)
    if found is None:
        return _Applied()
    _keep_facts(connection, found.crew, said)
    if found.crew.given_up:
        ending = said.ending
        # It may come again and again; the audit has it once.
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
    # What was acknowledged with the ending stays as it was; the receipt and what comes with it is new then.
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
            _log.error("fact %d of attempt %s came again and says something else; the first stays", seq, crew.gang)
        if crew.ended_ns is not None:
            # Always written: on PostgreSQL a charge that is made at this moment without these facts is made again.
            crews.note(connection, crew.id, uncharged=True)


def _tell(connection: sa.Connection, found: _Found, said: Report, *, at_ns: int) -> TransitionResult:
    crew = found.crew
    if said.ending is not None:
        _check_results(connection, found, said)
        stopped = json_text(said.ending.stopped)
        crews.note(connection, crew.id, stopped_json=stopped, lease_ns=at_ns, sentence=sentence(said))
        if not said.ending.proven:  # the node says so, too, with its next sign of life; until then nothing is placed
            nodes.drain(connection, crew.node_id, f"unkillable: a process of run {crew.run_id}")
        if said.ending.reason is Reason.GPU_LOST:  # another attempt must not meet that GPU
            nodes.drain(connection, crew.node_id, f"{Reason.GPU_LOST}: a GPU of run {crew.run_id}")
    else:
        crews.note(connection, crew.id, lease_ns=at_ns, sentence=sentence(said))
    exec_ns = None
    if said.exec_ns is not None and crew.started_ns is None:
        # After it was placed and before now: a node of protocol 1 says it by its own clock, which may be an hour off.
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
    """Return what a report says of a crew that is not known yet."""
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
    """Return whether all ranks of a crew wait for those of others; never for a gang of one crew."""
    return said.returned and found.attempt.num_nodes > 1


def _halt(found: _Found, said: Report) -> Halt | None:
    """Return why a crew of several ends before its end: what it said of that, or else its ending."""
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
    """Check that the results are durable here before the end is reported to clients."""
    attempt, ending = found.attempt, said.ending
    if ending is None or ending.reason is not Reason.COMPLETED or not isinstance(found.run.spec.payload, Function):
        return
    wanted = {str(number) for number in found.ranks}
    names = files.names(connection, attempt.run_id, attempt.fence, prefix="results/")
    there = len(wanted & {name.partition(".")[0] for name in names})
    if there < len(wanted):
        raise InvalidValue(
            f"attempt {attempt.gang} is said to have completed, and {there} of {len(wanted)} results are here",
            hint="results come before the ending, or with it",
        )


def _settle(connection: sa.Connection, crew: StoredCrew, said: Report, *, at_ns: int) -> bool:
    """Write the receipt; a crew whose node has nothing to say of its end, its supervisor lost, gets none."""
    receipt = json_text(said.receipt)
    if receipt is None and (said.ending is None or json_text(said.ending.stopped) is not None):
        return False
    return transitions.settle(connection, crew.id, receipt=receipt, at_ns=at_ns)


# --- texts of a report ---------------------------------------------------------------------------------------------


class _Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `node.protocol.Stopped.cause` for people."""

    rank: int | None = None
    peer_lost: bool = False
    detail: str = ""


class _Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """What is read here of `node.protocol.Stopped`; the rest is for the client."""

    cause: _Cause | None = None


def cause_of(ending: Ending) -> _Cause | None:
    """Return what failed, as far as the node says so."""
    stopped = json_text(ending.stopped)
    try:
        return None if stopped is None else from_json(stopped, _Stopped).cause
    except msgspec.DecodeError:  # of another version; the client may know it
        return None


def with_billed_loss(said: Report) -> Report:
    """Return a report that has `SUPERVISOR_LOST`, which costs nothing, only with evidence.

    A node before that distinction sends none; then the run pays, as for `SUPERVISOR_KILLED`.
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
    """Return the detail of an ending for people: what the node says, or which rank it was and why."""
    if said.ending is None or said.sentence or json_text(said.ending.stopped) is None:
        return sentence(said) if said.ending is not None else ""
    cause = cause_of(said.ending)
    if cause is None or not cause.detail:
        return ""
    line = cause.detail.strip().partition("\n")[0]
    return storable(line if cause.rank is None else f"rank {cause.rank}: {line}")


def sentence(said: Report) -> str:
    """Return what the node says about the attempt."""
    return storable(said.sentence)


def tracked(said: Report) -> str:
    """Return the link to the run in MLflow, or "": people open it, and a node may say what it likes."""
    return said.tracked if _LINK.fullmatch(said.tracked) else ""


def json_text(json: Json) -> str | None:
    """Return JSON as it came; None where nothing did."""
    decoded = bytes(json).decode() if isinstance(json, msgspec.Raw) else ""
    return None if decoded in ("", "null") else decoded


def storable(text: str) -> str:
    """Return text as PostgreSQL takes it, and not too much of it."""
    return text[:SENTENCE_CHARACTERS_MAX].replace("\0", "")


def _line(text: str) -> str:
    """Return the first line of a text, as others may read it on their terminals."""
    line = text.strip().partition("\n")[0][:DETAIL_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else " " for character in line)
