"""Synchronizes the scheduler's planner with the database by applying the differences in each tick.

    database, presence ─▶ current state ─┐
                                         ├─ difference ─▶ Planner.apply ─▶ Planner.decide ─▶ placements, preemptions
    state that the planner knows ────────┘

After a decision of the planner, the sync treats its placements and preemptions as executed. The server may fail to
store a decision, for example because the user has canceled the run. If the server has not stored a decision, the next
tick reads the actual state and applies the difference to the planner. The sync therefore needs no code that undoes
decisions.

The planner's clock adds the boottime since the server's start to the wall clock time of the start. The planner's clock
therefore never moves backwards. If an operator moves the wall clock by more than `OFF_S`, the sync creates a new
planner from the database. The sync restores the promised latest start of each run from the database.

Failure cases:

- A tick fails. The scheduler calls `forget`, so that the next tick creates a new planner from the database.

- The server is killed before it stores a promised latest start. Without the stored promise, the next server process may
  start the run later than promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.values import (
    Arrived,
    Change,
    Decision,
    DevicesTaken,
    Gone,
    Node,
    NodeGone,
    NodeSeen,
    Placement,
    Pool,
    PoolSeen,
    Promised,
    QueuedRun,
    QueuePolicy,
    QueuePolicySet,
    Reservation,
    RunningRun,
)
from serverless_gpu.server.core.hub import Hub, run_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.records import runs
from serverless_gpu.server.scheduling.queue_snapshot import QueueSnapshot, Reading
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons

OFF_S = 1.0
V = TypeVar("V")


class PlannerSync:
    """Synchronizes a planner with the database. `PlannerSync` is not thread-safe. Other threads must use
    `WaitReasons`."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        presence: Presence,
        sentences: WaitReasons,
        roster: QueueSnapshot,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._presence = presence
        self._sentences = sentences
        self._roster = roster
        self._offers = capacity.PlannerNodes()
        self._base_ns = clock.wall_ns() - clock.boottime_ns()
        self.forget()

    def forget(self) -> None:
        """Drop the planner, so that the next tick creates a new planner."""
        self._planner: Planner | None = None
        self._policy: QueuePolicy | None = None
        self._nodes: dict[str, Node] = {}
        self._pools: dict[str, Pool] = {}
        self._waiting: dict[str, QueuedRun] = {}
        self._running: dict[str, RunningRun] = {}
        # Placed runs that the database does not show as running yet.
        self._unseen: set[str] = set()
        self._underway: dict[str, Placement] = {}  # Placements that the scheduler has not written to the database yet.
        self._promised: dict[str, Reservation] = {}  # Promised latest starts in the database.
        self._sentences.close()

    def now(self) -> int:
        """Return the time of the planner's clock in nanoseconds since 1970."""
        return self._clock.boottime_ns() + self._base_ns

    def underway(self) -> list[Placement]:
        """Return the placements that the scheduler has not written to the database yet, in queue order."""
        return list(self._underway.values())

    def tried(self, placements: Iterable[Placement]) -> None:
        """Remove placements from the list of unwritten placements."""
        for placement in placements:
            del self._underway[placement.run_id]

    def read(self) -> Reading:
        """Read the current state of the queue from the database."""
        self._set_clock()
        now_ns, afresh = self.now(), self._planner is None
        underway = {run_id: sum(share.count for share in one.shares) for run_id, one in self._underway.items()}
        return self._database.read(
            lambda connection: self._roster.read(connection, now_ns=now_ns, afresh=afresh, underway=underway)
        )

    def tell(self, reading: Reading) -> None:
        """Apply the changes in the database to the planner, which counts unstored placements as running."""
        self._underway = {run_id: one for run_id, one in self._underway.items() if run_id in reading.waiting}
        offered = self._offers.of(reading.capacity, self._presence, capacity.now(self._settings, self._clock))
        nodes = {node.id: node for node in offered}
        pools = {pool.name: pool.planned for pool in reading.capacity.pools}
        changes: list[Change] = []
        planner, is_new = self._planner, self._planner is None
        if planner is None:
            planner = self._planner = Planner(reading.policy)
            changes += [reading.used] if reading.used is not None else []
        elif self._policy != reading.policy:
            changes.append(QueuePolicySet(reading.policy))
        self._policy = reading.policy
        changes += [PoolSeen(pool) for pool in _news(self._pools, pools)]
        changes += [PoolSeen(Pool(name=name)) for name in sorted(self._pools.keys() - pools.keys())]
        changes += [NodeSeen(node) for node in _news(self._nodes, nodes)]
        changes += [NodeGone(node_id) for node_id in sorted(self._nodes.keys() - nodes.keys())]
        self._nodes, self._pools = nodes, pools
        about_runs = list(self._runs(reading))
        changes += about_runs
        changes += [Promised(one) for one in reading.promised]
        self._promised |= {one.run_id: one for one in reading.promised}
        with self._sentences.changing(planner, self.now):
            planner.apply(changes)
            self._sentences.forget(_about(change) for change in about_runs)
        for change in about_runs if not is_new else ():
            if isinstance(change, Arrived):
                self._hub.touch(run_key(change.wanted.run_id))

    def decide(self) -> Decision:
        """Return new placements and preemptions, which the planner counts as executed."""
        planner = self._planner
        assert planner is not None
        now_ns = self.now()
        with self._sentences.changing(planner, self.now):
            decision = planner.decide(now_ns)
            self._sentences.forget(placement.run_id for placement in decision.placements)
        for placement in decision.placements:
            wanted = self._waiting.pop(placement.run_id)
            self._running[placement.run_id] = RunningRun(wanted=wanted, shares=placement.shares, since_ns=now_ns)
            self._unseen.add(placement.run_id)
            self._underway[placement.run_id] = placement
        for preemption in decision.preemptions:
            running = self._running[preemption.run_id]
            self._running[preemption.run_id] = msgspec.structs.replace(running, is_leaving=True, leaving_ns=now_ns)
        return decision

    def promise(self) -> None:
        """Store the promised latest starts of runs in the database."""
        planner = self._planner
        assert planner is not None
        promises = planner.promises()
        gone = {run_id: None for run_id in self._promised.keys() - promises.keys()}
        news = gone | {run_id: one for run_id, one in promises.items() if self._promised.get(run_id) != one}
        if news:
            self._database.write(lambda connection: runs.promise(connection, news))
        self._promised = promises

    def _runs(self, reading: Reading) -> Iterator[Gone | DevicesTaken | Arrived]:
        """Return the changes of runs, beginning with departed runs, because these runs free devices."""
        waiting = {run_id: wanted for run_id, wanted in reading.waiting.items() if run_id not in self._underway}
        running = {**reading.running, **{run_id: self._running[run_id] for run_id in self._underway}}
        self._unseen.difference_update(reading.running)
        for run_id in (*self._waiting, *self._running):
            is_here = run_id in waiting or run_id in running
            had_devices = run_id in self._running and run_id not in running and run_id not in self._unseen
            if not is_here or had_devices:  # A requeued run has already used device time.
                yield Gone(run_id)
        for run_id, now_running in running.items():
            if self._running.get(run_id) != now_running:
                yield DevicesTaken(now_running)
        for run_id, wanted in waiting.items():
            if self._waiting.get(run_id) != wanted:
                yield Arrived(wanted)
        self._waiting, self._running = waiting, running
        self._unseen.intersection_update(running)

    def _set_clock(self) -> None:
        clock = self._clock
        base_ns = clock.wall_ns() - clock.boottime_ns()
        off_ns = base_ns - self._base_ns
        if abs(off_ns) > OFF_S * 1e9:
            self._base_ns = base_ns
            self._roster.move(off_ns)
            self.forget()


def _about(change: Gone | DevicesTaken | Arrived) -> str:
    match change:
        case Gone(run_id):
            return run_id
        case DevicesTaken(running):
            return running.wanted.run_id
        case Arrived(wanted):
            return wanted.run_id


def _news(before: Mapping[str, V], now: Mapping[str, V]) -> list[V]:
    """Return the values in `now` that are missing or different in `before`."""
    return [value for key, value in now.items() if before.get(key) != value]
