"""Checks the run invariants (`run_invariants.py`) in a loop of the running server.

    every 5 s    a page of runs, in one read ─▶ violations ─▶ log (ERROR, once for each), `/metrics`
                 the next entries of the audit's chain (`ChainCheck`)
                 and the server's memory: placeable runs that wait, runs that wait without a reason, growing tables
    the end      a minute's pause, then from the first run again; 5 s while a run is suspicious

    sgpu server check    everything at once, from the database alone: `check`

The self-check loop reads one page of runs per tick. A full check of a million runs takes an hour and delays no request.
The loop remembers final run states and reports later changes of a final state. The loop also remembers the last
`LENDINGS_MAX` device assignments. The loop therefore detects double assignments even if the two runs are many pages
apart.

`MissedRunCheck` searches for waiting runs that the scheduler missed:

    database ─▶ a separate planner, with every running run and no waiting run
                   └─ for each waiting run: would it start immediately if it were the only one?
                          └─ yes, but the scheduler reports that no capacity is free ─▶ forgotten

The scheduler has not missed a run that waits because of a rule, such as a reservation. `MissedRunCheck` detects a
scheduler whose in-memory state differs from the database, for example after a missed change.

Failure cases:

* The database or the store does not answer. The self-check loop retries the page and reports no violation.

* The database contains very many violations. The self-check loop logs each violation once. Beyond `TOLD_MAX`
  violations, the loop only counts violations.

The self-check loop forgets an in-memory violation when the violation ends.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import ServerProblem, StorageError
from serverless_gpu.model.lifecycle.attempt import TERMINAL, Reason, State
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import Change, DevicesTaken, NodeSeen, PoolSeen, QueuedRun, Wait, WaitReason
from serverless_gpu.server.audit import ChainCheck
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions, in_chunks
from serverless_gpu.server.invariants import invariant_inputs
from serverless_gpu.server.invariants.invariant_inputs import PAGE_RUNS, RecordedRuns, Violation
from serverless_gpu.server.invariants.run_invariants import History, Lendings, LiveState, broken_chain, violations
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.records import runs
from serverless_gpu.server.scheduling.queue_snapshot import QueueSnapshot
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons
from serverless_gpu.server.storage.blobs import Blobs

_NO_ROOM = frozenset({WaitReason.CAPACITY, WaitReason.AWAY, WaitReason.ISOLATION, WaitReason.UNSATISFIABLE})
EVERY_S = 5.0
ROUND_S = 60.0
"""Seconds between two rounds through all runs."""
QUEUE_MAX = 1_000
"""Maximum queue length for `MissedRunCheck`, which costs as much as scheduling."""
TELL_MAX = 20
"""Maximum number of waiting runs whose wait reason one tick computes."""
PARTS_MAX = 50
ENDS_MAX = 50_000
TOLD_MAX = 1_000
OF_THE_MOMENT = frozenset({"I11", "I12", "I14", "I15"})
"""Invariants of the in-memory state, which each tick checks completely."""
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""Signature of `Database.read`."""
_NUMBER = re.compile(r"\d+")
_log = logging.getLogger(__name__)


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a check."""

    runs: int = 0  # Number of checked runs.
    violations: tuple[Violation, ...] = ()  # Violations, sorted.
    skipped: tuple[str, ...] = ()  # Descriptions of data that the check omitted.
    lost: tuple[str, ...] = ()
    """Signs of lost data, such as a rolled-back database."""


class SelfCheck:
    """Checks one page of runs per tick in a running server."""

    def __init__(
        self,
        *,
        database: Transactions,
        hub: Hub,
        blobs: Blobs,
        sentences: WaitReasons,
        measures: ServerMetrics,
        spending: Spending,
        second_look: MissedRunCheck,
    ) -> None:
        self._database = database
        self._hub = hub
        self._blobs = blobs
        self._sentences = sentences
        self._measures = measures
        self._spending = spending
        self._second_look = second_look
        self._after = ""
        self._chain = ChainCheck()
        self._ends: dict[str, tuple[State, Reason]] = {}
        self._unplaced: dict[str, int] = {}
        self._looked_ns: int | None = None
        self._untold: dict[str, int] = {}
        self._unstopped: dict[str, int] = {}
        self._lendings = Lendings()
        self._told: set[tuple[str, str, str]] = set()
        self._is_full_said = False
        self.seen = 0  # Number of checked runs.
        self.found = 0  # Number of reported violations.

    def tick(self, now_ns: int) -> int | None:
        """Check the next page and the in-memory state, and return the next tick's due time."""
        page = self._database.read(partial(invariant_inputs.load, after=self._after))
        moment = msgspec.structs.replace(self._moment(now_ns), missing_parts=self._missing(page))
        found = violations(page, History(ends=self._ends), moment)
        chained = [broken_chain(*one) for one in self._chain.look(self._database.read)]
        self._tell(sorted({*found, *self._lendings.look(page), *chained}))
        self._remember(page)
        self.seen += len(page.runs)
        self._after = page.following
        # Violations that must last a minute need several checks within the minute.
        is_in_doubt = bool(self._untold or self._unplaced or self._unstopped)
        goes_on = bool(page.following) or not self._chain.done
        if not goes_on:
            self._chain.begin_again()
        return now_ns + round((EVERY_S if goes_on or is_in_doubt else ROUND_S) * 1e9)

    def _moment(self, now_ns: int) -> LiveState:
        waiting = [run_id for run_id, _ in self._database.read(partial(runs.queue, limit=QUEUE_MAX + 1))]
        told = self._sentences
        untold = [run_id for run_id in waiting[:TELL_MAX] if told.wait(run_id) is None]
        untold += [run_id for run_id in waiting[TELL_MAX:] if not told.is_waiting(run_id)]
        self._untold = _since(self._untold, untold, now_ns)
        unstopped = {run_id for each in self._spending.standings().values() for run_id in each.stop}
        self._unstopped = _since(self._unstopped, unstopped, now_ns)
        is_due = self._unplaced or self._looked_ns is None or now_ns - self._looked_ns >= ROUND_S * 1e9
        if is_due or not waiting:  # `MissedRunCheck` costs as much as a scheduler start.
            placeable = self._second_look.forgotten() if 0 < len(waiting) <= QUEUE_MAX else []
            self._unplaced, self._looked_ns = _since(self._unplaced, placeable, now_ns), now_ns
        return LiveState(
            untold_s={run_id: (now_ns - since_ns) / 1e9 for run_id, since_ns in self._untold.items()},
            unplaced_s={run_id: (now_ns - since_ns) / 1e9 for run_id, since_ns in self._unplaced.items()},
            unstopped_s={run_id: (now_ns - since_ns) / 1e9 for run_id, since_ns in self._unstopped.items()},
            sizes=self._hub.sizes(),
        )

    def _missing(self, page: RecordedRuns) -> frozenset[str]:
        """Return the missing result parts among the page's first `PARTS_MAX` parts."""
        parts = [part for recorded in page.runs for results in recorded.results.values() for part in results.parts]
        if not parts:
            return frozenset()
        try:
            return frozenset(self._blobs.missing(parts[:PARTS_MAX]))
        except (ServerProblem, StorageError) as error:
            _log.warning("the self-check could not find missing results in the store: %s", error.message)
            return frozenset()

    def _tell(self, found: Sequence[Violation]) -> None:
        keys = [(one.invariant, one.subject, _NUMBER.sub("0", one.sentence)) for one in found]
        self._told.difference_update({told for told in self._told if told[0] in OF_THE_MOMENT}.difference(keys))
        for violation, key in zip(found, keys, strict=True):
            if key in self._told:
                continue
            if len(self._told) < TOLD_MAX:
                self._told.add(key)
                _log.error("invariant violated: %s", violation)
            elif not self._is_full_said:
                self._is_full_said = True
                _log.error(
                    "the self-check found more than %d violations: list all violations with `sgpu server check`",
                    TOLD_MAX,
                )
            self.found += 1
            self._measures.violations.labels(violation.invariant).inc()

    def _remember(self, page: RecordedRuns) -> None:
        for recorded in page.runs:
            run = recorded.run
            if run.state in TERMINAL and run.reason is not None:
                self._ends.setdefault(run.id, (run.state, run.reason))
        while len(self._ends) > ENDS_MAX:
            del self._ends[next(iter(self._ends))]


def check(read: Read, *, history: History | None = None, limit: int = PAGE_RUNS) -> CheckResult:
    """Check all runs and the audit chain of a database."""
    found: set[Violation] = set()
    skipped: list[str] = []
    seen: set[str] = set()
    lendings = Lendings()
    for page in invariant_inputs.pages(read, limit=limit):
        found.update(violations(page, history))
        found.update(lendings.look(page))
        skipped += page.skipped
        seen.update(recorded.run.id for recorded in page.runs)
    for gone in in_chunks(sorted((history or History()).acknowledged - seen), limit):
        absent = read(partial(invariant_inputs.of_runs, run_ids=gone))
        found.update(violations(absent, history))
    chain = ChainCheck()
    while not chain.done:
        found.update(broken_chain(*one) for one in chain.look(read))
    return CheckResult(runs=len(seen), violations=tuple(sorted(found)), skipped=tuple(skipped))


def _since(before: dict[str, int], now: Collection[str], now_ns: int) -> dict[str, int]:
    """Return the start time of each run's uninterrupted membership in a set."""
    return {run_id: before.get(run_id, now_ns) for run_id in now}


class MissedRunCheck:
    """Finds waiting runs that the scheduler missed. `MissedRunCheck` is not thread-safe."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        presence: Presence,
        sentences: WaitReasons,
        roster: QueueSnapshot,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._presence = presence
        self._sentences = sentences
        self._roster = roster

    def forgotten(self) -> list[str]:
        """Return the runs that could start now without a rule that delays them."""
        now_ns = self._clock.wall_ns()
        reading = self._database.read(lambda connection: self._roster.read(connection, now_ns=now_ns, afresh=False))
        if not reading.waiting:
            return []
        planner = Planner(reading.policy)
        nodes = capacity.offers(reading.capacity, self._presence, capacity.now(self._settings, self._clock))
        changes: list[Change] = [PoolSeen(pool.planned) for pool in reading.capacity.pools]
        changes += [NodeSeen(node) for node in nodes]
        changes += [DevicesTaken(running) for running in reading.running.values()]
        planner.apply(changes)
        fits: dict[QueuedRun, bool] = {}
        found = []
        for run_id, wanted in reading.waiting.items():
            if wanted.not_before_ns > now_ns:
                continue
            alike = msgspec.structs.replace(wanted, run_id="", title="", queued_ns=now_ns, not_before_ns=0, held="")
            if alike not in fits:
                estimate = planner.estimate(alike, now_ns)
                fits[alike] = estimate.at_ns is not None and estimate.at_ns <= now_ns and not estimate.impossible
            if fits[alike] and _is_forgotten(self._sentences.wait(run_id)):
                found.append(run_id)
        return found


def _is_forgotten(wait: Wait | None) -> bool:
    """Return True if no rule explains the wait of a run that could start."""
    return wait is None or wait.reason in _NO_ROOM or (wait.reason is WaitReason.TURN and wait.place == 1)
