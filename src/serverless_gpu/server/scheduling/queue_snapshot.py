"""Reads the waiting and running runs for the planner, and finds runs that limits hold back.

    queue, running runs ── identifiers, fences ─▶ known? ── yes ─▶ the same value as before
                                                     └─── no ──▶ rows, past ─▶ `queued_run` (StoredRun → QueuedRun)

Even for a queue of 10,000 runs, a tick needs only one query for run identifiers. The snapshot reads the rows of a run
only if the run is new or has been requeued. The snapshot reads past durations of runs with the same name if the name is
new or a run has ended. Each tick reads past durations for at most `LEARN_AT_ONCE` run names. The snapshot ignores small
changes of an expected duration.

`held_back` finds the runs that policy caps or budgets prevent from starting in the current tick:

    snapshot: queue, running runs ─▶ caps, budgets ─▶ model/scheduling/concurrency_limits.py ─▶ sentences by run

    estimate, for one run that is not submitted yet ─▶ `why_not`
    scheduler, in the transaction that places a run ─▶ `is_full`: the user's devices now, including this run

A held-back run waits outside the queue order, with the reason in its wait sentence. Each tick checks held-back runs
again.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import format_clock
from serverless_gpu.model.billing.budget import share_team
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import pause_s
from serverless_gpu.model.scheduling import concurrency_limits
from serverless_gpu.model.scheduling.concurrency_limits import BudgetRooms, Key, WaitingRun
from serverless_gpu.model.scheduling.duration_estimates import LEAVING_S, START_S, limit_s
from serverless_gpu.model.scheduling.values import DeviceShare, QueuedRun, QueuePolicy, Reservation, RunningRun, Used
from serverless_gpu.model.spec import Function, Kernel
from serverless_gpu.server.budgets.budget_admission import BudgetAdmission
from serverless_gpu.server.budgets.spending import LookInputs, Spending, subject_of_run
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.lifecycle import owner_suspension
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.nodes import capacity, drain
from serverless_gpu.server.nodes.capacity import CapacitySnapshot
from serverless_gpu.server.records import attempts, duration_history, policies, pools, principals, runs
from serverless_gpu.server.records.active_runs import ActiveCrew, ActiveRun
from serverless_gpu.server.records.crews import CrewId
from serverless_gpu.server.records.runs import StoredRun

LEARN_AT_ONCE = 64
FOREVER_NS = 1 << 62
"""Planner start time of runs that cannot start before some other state changes."""
_NAMES_MAX = 50_000
_NOTHING: Mapping[str, int] = MappingProxyType({})
_SAME = 0.25  # Relative change of an expected duration that the snapshot ignores.
_Name = tuple[str, str]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the queue and the nodes, from one database transaction."""

    capacity: CapacitySnapshot
    waiting: Mapping[str, QueuedRun]  # Waiting runs by identifier, sorted by class and age.
    running: Mapping[str, RunningRun]  # Runs that hold devices, by identifier.
    policy: QueuePolicy
    used: Used | None = None
    """Past usage of teams and users, or None if the caller did not request the usage."""
    promised: tuple[Reservation, ...] = ()


@dataclasses.dataclass(slots=True)
class _Entry:
    """A cached run with its attempt, its waiting state, and its demand."""

    fence: int
    waits: bool
    owner: str
    name: _Name
    wanted: QueuedRun
    candidate: WaitingRun
    kept: QueuedRun | None = None
    running: RunningRun | None = None
    running_key: tuple[object, ...] = ()
    # Fence of the leaving attempt, and the time when the snapshot first saw its stop request.
    leaving: tuple[int, int] | None = None


class QueueSnapshot:
    """Caches waiting and running runs between ticks. Not thread-safe."""

    def __init__(
        self, *, settings: Settings, leases: Leases, spending: Spending, budget_admission: BudgetAdmission
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._spending = spending
        self._budget_admission = budget_admission
        self._known: dict[str, _Entry] = {}
        self._expected: dict[_Name, float | None] = {}
        self._to_learn: dict[_Name, None] = {}
        self._isolation = uid_sharing.EVERYBODY

    def read(
        self,
        connection: sa.Connection,
        *,
        now_ns: int,
        afresh: bool,
        underway: Mapping[str, int] = MappingProxyType({}),
    ) -> Reading:
        """Read the queue, the nodes, and the limits on starts.

        With `afresh`, the method also reads past usage and promised starts. `underway` contains the number of devices
        of each run that the scheduler has decided to place. The database still shows the runs in `underway` as waiting.
        """
        as_of = self._budget_admission.as_of()  # Read the budget inputs before any row, as `LookInputs` explains.
        there = capacity.load(connection, self._leases)
        queue = runs.queue(connection)
        policy = pools.queue_policy(connection, self._settings.queue)
        self._set_isolation(uid_sharing.Isolation.of(there.pools, principals.first_administrator(connection)))
        self._get_to_know(connection, queue, there.active, now_ns)
        self._learn(connection)
        waiting = self._waiting(connection, queue, there, underway, as_of)
        return Reading(
            capacity=there,
            waiting=waiting,
            running=dict(self._running(there, now_ns)),
            policy=policy,
            used=duration_history.used(connection, now_ns=now_ns, half_life_s=policy.half_life_s) if afresh else None,
            promised=tuple(runs.promised(connection)) if afresh else (),
        )

    def move(self, by_ns: int) -> None:
        """Shift the pauses after failed starts by a clock step, so that their length does not change."""
        for entry in self._known.values():
            if 0 < entry.wanted.not_before_ns < FOREVER_NS:
                until_ns = entry.wanted.not_before_ns + by_ns
                entry.wanted = msgspec.structs.replace(entry.wanted, not_before_ns=until_ns)

    def _set_isolation(self, now: uid_sharing.Isolation) -> None:
        """Update the cached runs after a change of the isolation of pools."""
        if now == self._isolation:
            return
        self._isolation = now
        for entry in self._known.values():
            second = now.is_second(entry.owner)
            if entry.wanted.second_principal != second:
                entry.wanted, entry.kept = msgspec.structs.replace(entry.wanted, second_principal=second), None

    def _get_to_know(
        self, connection: sa.Connection, queue: list[tuple[str, int]], active: Iterable[ActiveRun], now_ns: int
    ) -> None:
        known = self._known
        here = {run_id for run_id, _ in queue}
        as_known = {run_id: entry.fence for run_id, entry in known.items() if entry.waits}
        new = [run_id for run_id, fence in queue if as_known.get(run_id) != fence]
        for run in active:
            here.add(run.id)
            entry = known.get(run.id)
            if entry is None or entry.fence + entry.waits != run.fence:
                new.append(run.id)
            elif entry.waits:
                entry.fence, entry.waits = run.fence, False
        for run_id in [run_id for run_id in known if run_id not in here]:
            gone = known.pop(run_id)
            if not gone.waits:
                self._to_learn[gone.name] = None
        if not new:
            return
        failed, preempted = attempts.failed_nodes(connection, new), duration_history.preemptions(connection, new)
        apart = attempts.apart_nodes(connection, new)
        for stored in runs.find_many(connection, new):
            before = Past(
                failed=failed.get(stored.id, frozenset()),
                apart=apart.get(stored.id, frozenset()),
                preemptions=preempted.get(stored.id, 0),
            )
            self._remember(stored, before, now_ns)

    def _remember(self, run: StoredRun, before: Past, now_ns: int) -> None:
        name = (run.owner, run.name)
        if run.name and name not in self._expected:
            self._to_learn[name] = None
        before = msgspec.structs.replace(
            before, expected_s=self._expected.get(name), second_principal=self._isolation.is_second(run.owner)
        )
        waits = run.state is State.QUEUED
        asked, candidate = queued_run(run, before, now_ns=now_ns), candidate_of(run)
        self._known[run.id] = _Entry(run.fence, waits, run.owner, name, asked, candidate)

    def _learn(self, connection: sa.Connection) -> None:
        """Read the past durations of run names that are new or whose runs have ended."""
        changed: set[_Name] = set()
        for name in list(self._to_learn)[:LEARN_AT_ONCE]:
            del self._to_learn[name]
            found = duration_history.expected_s(connection, *name)
            if name not in self._expected or not _is_same(self._expected[name], found):
                self._expected[name] = found
                changed.add(name)
        for entry in self._known.values() if changed else ():
            if entry.name in changed:
                expected_s = self._expected[entry.name]
                entry.wanted = msgspec.structs.replace(entry.wanted, expected_s=expected_s)
        if len(self._expected) > _NAMES_MAX:
            there = {entry.name for entry in self._known.values()}
            self._expected = {name: value for name, value in self._expected.items() if name in there}

    def _waiting(
        self,
        connection: sa.Connection,
        queue: list[tuple[str, int]],
        there: CapacitySnapshot,
        underway: Mapping[str, int],
        as_of: LookInputs,
    ) -> dict[str, QueuedRun]:
        """Return the waiting runs, with a reason for each run that may not start now."""
        if not queue:
            return {}
        shut_out, server_drain = owner_suspension.suspended_owners(connection), drain.find(connection)
        # Another transaction has deleted the runs without a cache entry.
        entries = {run_id: self._known[run_id] for run_id, _ in queue if run_id in self._known}
        if server_drain is not None:
            return {run_id: _kept_back(entry, server_drain.sentence) for run_id, entry in entries.items()}
        out = {run_id for run_id, entry in entries.items() if entry.owner in shut_out}
        closed = {run_id for run_id, entry in entries.items() if self._isolation.is_closed(entry.wanted)}
        beside = out | closed | underway.keys()  # Runs in `beside` do not count against policy caps and budgets.
        line = (entry.candidate for run_id, entry in entries.items() if run_id not in beside)
        self._spending.look(connection, as_of)
        rooms = self._budget_admission.rooms(connection, there)
        if rooms is not None:
            for run_id in underway.keys() & entries.keys():
                rooms.keep(entries[run_id].candidate)
        reasons = held_back(connection, line, self._having(there, underway), rooms)
        reasons |= {run_id: f"{entries[run_id].owner} may not start runs now" for run_id in out}
        return {
            run_id: _kept_back(entry, reasons[run_id]) if run_id in reasons else entry.wanted
            for run_id, entry in entries.items()
        }

    def _having(self, there: CapacitySnapshot, underway: Mapping[str, int]) -> Iterable[tuple[WaitingRun, int]]:
        """Return the runs that hold devices or are about to start, each with its number of devices."""
        for run in there.active:
            entry = self._known.get(run.id)
            gpus = sum(crew.gpus for crew in there.having(run))
            if entry is not None and gpus:
                yield entry.candidate, gpus
        for run_id, count in underway.items():
            if run_id in self._known and self._known[run_id].waits:
                yield self._known[run_id].candidate, count

    def _running(self, there: CapacitySnapshot, now_ns: int) -> Iterable[tuple[str, RunningRun]]:
        for run in there.active:
            entry = self._known.get(run.id)
            having = there.having(run)
            if entry is None or not having:
                continue
            is_leaving = run.stop is not None or run.state is State.STOPPING
            if is_leaving and (entry.leaving is None or entry.leaving[0] != run.fence):
                entry.leaving = (run.fence, now_ns)
            leaving_ns = entry.leaving[1] if is_leaving and entry.leaving is not None else None
            key = (run.fence, run.started_ns, leaving_ns, entry.wanted, len(having))
            if entry.running is None or entry.running_key != key:
                entry.running, entry.running_key = _as_running(run, having, entry.wanted, leaving_ns), key
            yield run.id, entry.running


def _is_same(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=_SAME)


def _kept_back(entry: _Entry, why: str) -> QueuedRun:
    """Return a run that waits outside the queue order for the given reason."""
    if entry.kept is None or entry.kept.held != why:
        entry.kept = msgspec.structs.replace(entry.wanted, not_before_ns=FOREVER_NS, held=why)
    return entry.kept


def _as_running(run: ActiveRun, having: Iterable[ActiveCrew], asked: QueuedRun, leaving_ns: int | None) -> RunningRun:
    if run.started_ns is not None:
        asked = begun(asked, (run.started_ns - run.created_ns) / 1e9)
    shares = tuple(DeviceShare(node_id=crew.node_id, gpu_type=run.gpu_type, count=crew.gpus) for crew in having)
    is_leaving = leaving_ns is not None
    return RunningRun(
        wanted=asked, shares=shares, since_ns=run.created_ns, is_leaving=is_leaving, leaving_ns=leaving_ns
    )


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a run's earlier attempts and about earlier runs."""

    failed: frozenset[str] = frozenset()  # Nodes on which an attempt of the run was lost or failed to start.
    apart: frozenset[tuple[str, str]] = frozenset()  # Pairs of nodes that could not connect to each other.
    preemptions: int = 0  # Number of times that the scheduler has preempted the run.
    expected_s: float | None = None  # Expected device time of the run, from earlier runs of the same name.
    second_principal: bool = False
    """True if pools without isolation are reserved for another principal."""


NO_PAST = Past()


def queued_run(run: StoredRun, past: Past = NO_PAST, *, now_ns: int) -> QueuedRun:
    """Convert a stored run to the planner's `QueuedRun`."""
    spec, resources = run.spec, run.spec.resources
    not_before_ns, held = _held(run, now_ns)
    several, alone = _several(run)
    # A run from a snapshot or with a pickled function needs the caller's Python version.
    needs_python = run.snapshot or (isinstance(spec.payload, Function) and not run.target.machine)
    return QueuedRun(
        run_id=run.id,
        title=capacity.title(run),
        owner=run.owner,
        team=share_team(run.team, run.member_of),
        priority=run.priority,
        queued_ns=run.queued_ns,
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        several_nodes=several,
        alone=alone,
        pool=run.pool,
        machine=run.target.machine,
        platform=run.target.platform,
        python=".".join(run.target.python.split(".")[:2]) if needs_python else "",
        caller=run.target.caller,
        avoid=past.failed,
        apart=past.apart,
        not_before_ns=not_before_ns,
        held=held,
        limit_s=limit_s(run.spec_now.limit_s, spec.grace_s),
        beyond_s=START_S + spec.grace_s + LEAVING_S,
        expected_s=past.expected_s,
        preemptible=run.life.may_resume,
        preemptions=past.preemptions,
        grace_s=spec.grace_s,
        second_principal=past.second_principal,
        capped=run.spec_now.is_capped,
    )


def _several(run: StoredRun) -> tuple[bool, str]:
    """Return True if a run may use several nodes, or False and a change that permits several nodes.

    The planner uses several nodes only if no single suitable node can hold the run. A run with `same_node`, a kernel,
    or local files always runs on one node.
    """
    spec, resources = run.spec, run.spec.resources
    if resources.gpus is None or isinstance(spec.payload, Kernel):
        return False, ""
    if resources.same_node:
        return False, "without same_node=True"
    if run.target.machine or spec.environment == "live":
        return False, 'with env="snapshot"'
    return True, ""


def begun(asked: QueuedRun, after_s: float) -> QueuedRun:
    """Return the demand of a running run, whose time limit has begun."""
    if asked.limit_s is None:
        return asked
    less_s = START_S - max(0.0, after_s)
    return msgspec.structs.replace(asked, limit_s=asked.limit_s - less_s, beyond_s=asked.beyond_s - less_s)


def _held(run: StoredRun, now_ns: int) -> tuple[int, str]:
    """Return the end and the reason of a run's pause after a failed start."""
    last = run.attempt
    if last is None or last.ended_ns is None:
        return 0, ""
    pause_ns = round(pause_s(run.infra_retries_used, last.reason, began=last.began) * 1e9)
    left_ns = min(pause_ns, last.ended_ns + pause_ns - now_ns)  # `min` bounds the remaining pause after a clock change.
    if left_ns <= 0:
        return 0, ""
    at = format_clock(now_ns + left_ns)
    cause = last.cause if last.reason is Reason.NODES_APART else None
    why = f": {cause.detail}" if cause is not None else ""
    return now_ns + left_ns, (f"attempt {last.fence} did not start on {last.node}{why}; the scheduler retries at {at}")


def candidate_of(run: StoredRun) -> WaitingRun:
    """Convert a stored run to the `WaitingRun` of policy caps and budgets."""
    resources = run.spec.resources
    return WaitingRun(
        run_id=run.id,
        subject=subject_of_run(run),
        gpus=resources.gpus,
        gpu_type=resources.gpu_type,
        grace_s=run.spec.grace_s,
        cpus=resources.cpus or 0,
        memory_bytes=resources.memory_bytes or 0,
        mandatory=run.spec.policies,
        name=run.name,
    )


def held_back(
    connection: sa.Connection,
    waiting: Iterable[WaitingRun],
    running: Iterable[tuple[WaitingRun, int]],
    rooms: BudgetRooms | None = None,
) -> dict[str, str]:
    """Return the reasons of waiting runs that caps or budgets hold back, by run identifier.

    The caller passes `waiting` in queue order.
    """
    caps = policies.caps(connection)
    if not caps and rooms is None:
        return {}
    using: Counter[Key] = Counter()
    for one, count in running:
        for policy in one.policies:
            using[policy, one.subject.owner] += count
    return concurrency_limits.held_back(waiting, using, caps, rooms)


def why_not(connection: sa.Connection, run: StoredRun, rooms: BudgetRooms | None, freed: frozenset[CrewId]) -> str:
    """Return the reason why caps or budgets would hold back a run at the front of the queue, or ""."""
    running = [(candidate_of(other), count) for other, count in _having(connection, run.owner, freed)]
    return held_back(connection, [candidate_of(run)], running, rooms).get(run.id, "")


def is_full(connection: sa.Connection, run: StoredRun, count: int, freed: frozenset[CrewId]) -> bool:
    """Return True if `count` more devices for a run would exceed one of its policy caps."""
    caps = policies.caps(connection)
    capped = [policy for policy in candidate_of(run).policies if policy in caps]
    if not capped:
        return False
    having = [(candidate_of(other).policies, held) for other, held in _having(connection, run.owner, freed)]
    return any(
        concurrency_limits.is_full(caps[policy], sum(held for names, held in having if policy in names), count)
        for policy in capped
    )


def _having(connection: sa.Connection, owner: str, freed: frozenset[CrewId]) -> Iterable[tuple[StoredRun, int]]:
    """Return the owner's runs that hold devices, each with its number of devices."""
    for run in runs.active_of(connection, owner):
        there = () if run.attempt is None else run.attempt.open_crews
        gpus = sum(crew.gpus for crew in there if crew.id not in freed)
        if gpus:
            yield run, gpus
