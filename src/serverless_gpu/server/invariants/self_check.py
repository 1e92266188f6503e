"""The self-check loop: a working server checks the invariants that tests hold it to (`run_invariants.py`).

    every 5 s    a page of runs, in one read ─▶ violations ─▶ log (ERROR, once for each), `/metrics`
                 the next entries of the audit's chain (`ChainCheck`)
                 and the server's memory: runs that could be placed and are not, that wait without a reason, what grows
    the end      a minute's pause, then from the first run on again; 5 s while a device or a run is found twice

    sgpu server check    everything at once, from the database alone: `check`

It only reads, a page at a time, so a million runs take an hour and delay nothing. It remembers the ends of runs, and
reports one that changes later. It remembers lendings of devices (the last `LENDINGS_MAX`), so that two runs that had
one at the same time are found pages apart.

`MissedRunCheck` looks for runs that the scheduler forgot:

    database ─▶ a planner of its own, with every running run and no waiting one
                   └─ for each waiting run: would it start at once if it came alone?
                          └─ yes, and the scheduler says that there is no room ─▶ forgotten

A run that a rule keeps back (reserved devices, runs ahead, a calendar, a drain) is not forgotten. The check finds a
scheduler that does not know what the database knows: a change that it missed, a node that it counts as away.

Failure cases: the database or the store is away (tried again, without a violation); very many violations (each is
logged once; beyond `TOLD_MAX` the log says that it names no more, and they are counted). Violations of the moment are
forgotten when they are over.
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
"""Between two pages, and between the last page and the first again."""
QUEUE_MAX = 1_000
"""A longer queue is not checked for missed runs: that costs as much as the scheduler's own work."""
TELL_MAX = 20
"""Waiting runs whose sentence is asked for, which costs a look at the queue; of the others, whether they are known."""
PARTS_MAX = 50
ENDS_MAX = 50_000
TOLD_MAX = 1_000
OF_THE_MOMENT = frozenset({"I11", "I12", "I14", "I15"})
"""Looked at whole at each tick: what is not found any more has ended."""
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""`Database.read`."""
_NUMBER = re.compile(r"\d+")
_log = logging.getLogger(__name__)


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a check."""

    runs: int = 0  # how many were looked at
    violations: tuple[Violation, ...] = ()  # what is wrong, sorted
    skipped: tuple[str, ...] = ()  # what is too much to be looked at
    lost: tuple[str, ...] = ()
    """How the database was rolled back, and of which runs there are files and no rows (`operations/backup.py`)."""


class SelfCheck:
    """Checks some runs at a time, while the server works."""

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
        self.seen = 0  # how many runs were looked at
        self.found = 0  # how often something was wrong, each thing once as long as it is remembered

    def tick(self, now_ns: int) -> int | None:
        """Look at the next page, and at what the server thinks; return when to look again."""
        page = self._database.read(partial(invariant_inputs.load, after=self._after))
        moment = msgspec.structs.replace(self._moment(now_ns), missing_parts=self._missing(page))
        found = violations(page, History(ends=self._ends), moment)
        chained = [broken_chain(*one) for one in self._chain.look(self._database.read)]
        self._tell(sorted({*found, *self._lendings.look(page), *chained}))
        self._remember(page)
        self.seen += len(page.runs)
        self._after = page.following
        # What is so for a minute is looked at more often than at its ends.
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
        if is_due or not waiting:  # it costs as much as a scheduler that starts
            placeable = self._second_look.forgotten() if 0 < len(waiting) <= QUEUE_MAX else []
            self._unplaced, self._looked_ns = _since(self._unplaced, placeable, now_ns), now_ns
        return LiveState(
            untold_s={run_id: (now_ns - since_ns) / 1e9 for run_id, since_ns in self._untold.items()},
            unplaced_s={run_id: (now_ns - since_ns) / 1e9 for run_id, since_ns in self._unplaced.items()},
            unstopped_s={run_id: (now_ns - since_ns) / 1e9 for run_id, since_ns in self._unstopped.items()},
            sizes=self._hub.sizes(),
        )

    def _missing(self, page: RecordedRuns) -> frozenset[str]:
        """Return which of the results' parts are not in the store; of very many, some are looked for."""
        parts = [part for recorded in page.runs for results in recorded.results.values() for part in results.parts]
        if not parts:
            return frozenset()
        try:
            return frozenset(self._blobs.missing(parts[:PARTS_MAX]))
        except (ServerProblem, StorageError) as error:
            _log.warning("results were not looked for: %s", error.message)
            return frozenset()

    def _tell(self, found: Sequence[Violation]) -> None:
        keys = [(one.invariant, one.subject, _NUMBER.sub("0", one.sentence)) for one in found]
        self._told.difference_update({told for told in self._told if told[0] in OF_THE_MOMENT}.difference(keys))
        for violation, key in zip(found, keys, strict=True):
            if key in self._told:
                continue
            if len(self._told) < TOLD_MAX:
                self._told.add(key)
                _log.error("what is never true is true: %s", violation)
            elif not self._is_full_said:
                self._is_full_said = True
                _log.error("more than %d things are wrong; `sgpu server check` names the others", TOLD_MAX)
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
    """Look at every run of a database and at the chain of its audit, page by page.

    Runs that `history` names and that are gone are looked for by name.
    """
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
    """Return since when each has been in the set without a break."""
    return {run_id: before.get(run_id, now_ns) for run_id in now}


class MissedRunCheck:
    """Finds runs that could be placed and that the scheduler does not place. For one thread."""

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
        """Return the runs that could be placed now and that no rule keeps back."""
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
    """Return whether the scheduler gives no rule for a run that fits: it names no room, or no reason at all."""
    return wait is None or wait.reason in _NO_ROOM or (wait.reason is WaitReason.TURN and wait.place == 1)
