"""Detects hanging gangs and idle devices from the reports of all nodes.

    silence of the ranks, inspection results ─▶ memory ─▶ `gang_hang_detection.decide`
         ├─ a request to inspect the ranks, or the result ─▶ in every answer; nodes report at once
         └─ the end: each node writes its stacks and stops its ranks with `collective_hang`
    idle time of the devices ─▶ memory ─▶ `idleness.of_gang`
         ├─ a warning ─▶ in every answer
         └─ a request to stop the run, as for any other reason

`GangProgress` exists in memory only. After a server restart, nodes report their progress again. A hanging run ends like
any other failed run.

Failure cases:

- A node stops reporting. While a node of a gang is silent, the server suspends the gang's hang detection.

- During hang detection, a caller stops the run, or a node fails. The server ends the gang's hang detection.

- A node reports impossible values. The server refuses a report with impossible values, because users of other nodes
  read reported values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, StaleAttempt
from serverless_gpu.model.hangs import gang_hang_detection, idleness
from serverless_gpu.model.hangs.gang_hang_detection import CrewObservation, GangWatch, InspectionRequest, Judgement
from serverless_gpu.model.hangs.hang_detection import PLACES_MAX, WHERE_CHARACTERS_MAX
from serverless_gpu.model.hangs.hang_report import STACK_CHARACTERS_MAX, STACKS_TOLD
from serverless_gpu.model.hangs.idleness import IdleVerdict
from serverless_gpu.model.lifecycle.attempt import ACTIVE, StopReason
from serverless_gpu.server.core.hub import Hub, node_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Announcer, ReportRequests, TransitionResult
from serverless_gpu.server.records import audit, runs
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.crews import Gang, StoredCrew
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.wire.agents import Report, ReportAnswer


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a gang on several nodes.

    Attributes:
        heard_ns: time of each node's last report, by node rank.
        hangs: state of the hang detection.
        idle: idleness of each node's devices, by node rank.
        told: the warning that the server sends to the nodes of the gang.
    """

    heard_ns: Mapping[int, int] = msgspec.field(default_factory=dict)
    hangs: GangWatch = GangWatch()
    idle: Mapping[int, IdleVerdict] = msgspec.field(default_factory=dict)
    told: IdleVerdict | None = None


class GangProgress:
    """Stores the reported progress of gangs on several nodes in memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Gang, Progress] = {}

    def find(self, gang: Gang) -> Progress:
        """Return a gang's progress, which is empty for an unknown gang."""
        with self._lock:
            return self._known.get(gang, Progress())

    def change(self, gang: Gang, work: Callable[[Progress], Progress]) -> tuple[Progress, Progress]:
        """Change a gang's progress, and return its previous and new progress."""
        with self._lock:
            before = self._known.get(gang, Progress())
            now = self._known[gang] = work(before)
            return before, now

    def keep(self, gangs: Collection[Gang]) -> None:
        """Forget the progress of all gangs except the given gangs."""
        with self._lock:
            self._known = {gang: known for gang, known in self._known.items() if gang in gangs}


def check_progress(attempt: StoredAttempt, ranks: range, said: Report) -> None:
    """Refuse a report with impossible values for the reporting node."""
    seen = said.seen
    if seen is None:
        return
    numbers = [one.rank for one in seen.ranks]
    strangers = {*numbers, *seen.returned, *seen.stacks} - set(ranks)
    if strangers:
        raise InvalidValue(f"attempt {attempt.gang} has no rank {min(strangers)} on this node")
    if len(set(numbers)) < len(numbers):
        raise InvalidValue(f"a node of attempt {attempt.gang} reports the same rank twice")
    is_long = any(
        len(one.where) > WHERE_CHARACTERS_MAX or len(one.state) > 1 or len(one.places) > PLACES_MAX
        for one in seen.ranks
    )
    is_large = len(seen.stacks) > STACKS_TOLD or any(len(text) > STACK_CHARACTERS_MAX for text in seen.stacks.values())
    if is_long or is_large or len(seen.returned) > len(ranks):
        raise InvalidValue(f"a node of attempt {attempt.gang} sends rank observations over the size limits")


class GangHangs:
    """Detects and stops hanging gangs."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        looks: ReportRequests,
        gang_progress: GangProgress,
        announcer: Announcer,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._looks = looks
        self._gang_progress = gang_progress
        self._announcer = announcer

    def hear(self, run: StoredRun, attempt: StoredAttempt, crew: StoredCrew, said: Report) -> None:
        """Store a node's progress report, and decide whether the gang hangs."""
        is_ending = run.stop is not None or attempt.cause is not None or attempt.released or said.halt is not None
        if (
            attempt.num_nodes == 1
            or is_ending
            or len(attempt.open_crews) < attempt.num_nodes
            or said.ending is not None
        ):
            return
        work = partial(self._heard, run, attempt, crew, said)
        before, now = self._gang_progress.change((attempt.run_id, attempt.fence), work)
        if _answered(now) != _answered(before):
            for one in attempt.open_crews:
                if one.number != crew.number:
                    self._looks.ask(one.node_id, one.id)
                    self._hub.touch(node_key(one.node_id))
        if now.told is IdleVerdict.STOP:
            self._stop(run)

    def told(self, attempt: StoredAttempt, answer: ReportAnswer) -> ReportAnswer:
        """Add the gang's hang and idleness results to a report's answer."""
        ask, judgement, idle = _answered(self._gang_progress.find((attempt.run_id, attempt.fence)))
        return msgspec.structs.replace(answer, ask=ask, judgement=judgement, idle=idle)

    def _heard(
        self, run: StoredRun, attempt: StoredAttempt, crew: StoredCrew, said: Report, before: Progress
    ) -> Progress:
        now_ns = self._clock.boottime_ns()
        hangs = gang_hang_detection.with_observation(
            before.hangs, crew.number, said.silence, _printable(said.seen), returned=said.returned, now_ns=now_ns
        )
        progress = Progress(
            heard_ns={**before.heard_ns, crew.number: now_ns},
            hangs=hangs,
            idle={**before.idle, crew.number: said.idle},
            told=before.told,
        )
        if not all(one.began for one in attempt.crews):
            return progress
        # Half of the soft expiry covers two heartbeat intervals.
        fresh_ns = round(self._settings.soft_expiry_s / 2 * 1e9)
        hangs = gang_hang_detection.decide(
            hangs,
            run.spec.limits(),
            [one.place for one in attempt.crews],
            per_node=run.spec.per_node,
            now_ns=now_ns,
            fresh_ns=fresh_ns,
        )
        is_heard = all(now_ns - progress.heard_ns.get(one.number, 0) <= fresh_ns for one in attempt.crews)
        returned = {number for number, one in hangs.silent.items() if one.returned}
        at_work = [one.number for one in attempt.crews if one.number not in returned]
        is_known = is_heard and bool(at_work) and idleness.limit_s(run.spec) is not None
        levels = [progress.idle.get(number, IdleVerdict.GO_ON) for number in at_work]
        told = idleness.of_gang(levels, before.told) if is_known else None  # A gang without running ranks is not idle.
        return msgspec.structs.replace(progress, hangs=hangs, told=told)

    def _stop(self, run: StoredRun) -> None:
        """Stop a run whose devices have been idle for too long on all nodes."""
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> TransitionResult | None:
            now = runs.find(connection, run.id)
            if now is None or now.fence != run.fence or now.state not in ACTIVE:
                return None  # Ignore idle devices of an earlier attempt.
            return transitions.ask_to_stop(connection, run.id, who=audit.SERVER, why=StopReason.IDLE, at_ns=at_ns)

        try:
            done = self._database.write(work)
        except StaleAttempt:
            return  # The next report of a node repeats the stop request.
        if done is not None:
            self._announcer.announce(done)


def _answered(progress: Progress) -> tuple[InspectionRequest | None, Judgement | None, IdleVerdict | None]:
    return progress.hangs.ask, progress.hangs.judgement, progress.told


def _printable(seen: CrewObservation | None) -> CrewObservation | None:
    """Remove control characters from an observation, because users print the observation on terminals."""
    if seen is None:
        return None
    ranks = tuple(msgspec.structs.replace(one, where=_line(one.where)) for one in seen.ranks)
    stacks = {rank: "\n".join(map(_line, text.split("\n"))) for rank, text in seen.stacks.items()}
    return msgspec.structs.replace(seen, ranks=ranks, stacks=stacks)


def _line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
