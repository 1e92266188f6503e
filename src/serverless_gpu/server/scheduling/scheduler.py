"""Places waiting runs: reads the queue, decides, stores placements, and notifies nodes.

    a run waits, a node joined, devices are free ── wakeup ─▶ tick
        read      nodes, running runs, the queue           one transaction                 `queue_snapshot.py`
        decide    the difference to the last tick          `planner_state.py`, `model/scheduling/`
        place     attempt + order + event of waiting runs  a few per transaction           ← the intent is durable
        reserve   nodes of the engine                      outside of transactions         `gang_reservations.py`
        notify    order streams of nodes, streams of runs, runs to preempt

If the server is killed during a tick, the database contains either a waiting run or an unconfirmed order. The next
server process continues from the database, because the scheduler sends only stored orders. The scheduler rebuilds the
planner from the database after a start, a failed tick or a clock change.

`Preemptor` stops runs to free devices for other runs. Preempted runs continue later:

    decision ─▶ does the other run still wait? ─▶ StopReason.PREEMPT by the server, naming the other run ─▶ node
            ranks write a checkpoint ─▶ attempt ends: PREEMPTED ─▶ the run waits again with its old age

The preemptor skips a preemption if the run that needs the devices no longer waits. The planner's next decision uses the
new state of both runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, SecretMissing, StaleAttempt
from serverless_gpu.model.lifecycle.attempt import ACTIVE, Reason, State, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded
from serverless_gpu.model.placement import laid_out
from serverless_gpu.model.scheduling.values import Placement, Preemption
from serverless_gpu.server.budgets.spending import Spending
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.hub import Hub, node_key, run_key
from serverless_gpu.server.core.server_key import Keys, Sealer, sha256
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.identity import uid_sharing
from serverless_gpu.server.lifecycle import owner_suspension, transitions
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.nodes import drain
from serverless_gpu.server.records import audit, charges, nodes, prices, runs, stored_secrets
from serverless_gpu.server.records.attempts import NewAttempt
from serverless_gpu.server.records.crews import NewCrew
from serverless_gpu.server.records.nodes import StoredNode, by_id
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.scheduling import feasibility, queue_snapshot
from serverless_gpu.server.scheduling.feasibility import UnsatisfiableRuns
from serverless_gpu.server.scheduling.gang_reservations import EngineReservations
from serverless_gpu.server.scheduling.planner_state import PlannerSync
from serverless_gpu.server.scheduling.queue_snapshot import Reading
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons

PREEMPTED_TOGETHER = 8
AT_ONCE = 64
"""Maximum number of placements in one tick. If more placements remain, the next tick follows immediately."""
TOGETHER = 8
"""Maximum number of placements in one transaction, so that other writers do not wait long."""
SECRETS = "secrets"
"""Capability in `AgentHello.takes` that a node needs for runs with secrets."""
LOOK_AGAIN_S = 5.0
ENGINE_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


class Scheduler:
    """Places waiting runs."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        keys: Keys,
        sealer: Sealer,
        leases: Leases,
        deliveries: OrderDeliveries,
        sentences: WaitReasons,
        measures: ServerMetrics,
        spending: Spending,
        announcer: Announcer,
        impossible: UnsatisfiableRuns,
        planning: PlannerSync,
        preemptor: Preemptor,
        reserving: EngineReservations,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._keys = keys
        self._sealer = sealer
        self._leases = leases
        self._deliveries = deliveries
        self._sentences = sentences
        self._measures = measures
        self._spending = spending
        self._announcer = announcer
        self._preemptor = preemptor
        self._planning = planning
        self._impossible = impossible
        self._reserving = reserving

    def tick(self, now_ns: int) -> int | None:
        """Place waiting runs, and wake the streams of runs whose wait reason has changed."""
        reading = self._planning.read()
        self._reserving.look(reading.capacity.active)
        is_done = False
        try:
            wake_ns = self._plan(reading, now_ns)
            is_done = True
        finally:
            if not is_done:  # After a failure, rebuild the planner, because some decisions may be unstored.
                self._planning.forget()
        more = self._impossible.look(reading.waiting, now_ns) > feasibility.AT_ONCE
        for run_id in self._sentences.news():
            self._hub.touch(run_key(run_id))
        if self._planning.underway():
            return now_ns
        after_s = ENGINE_AGAIN_S if self._reserving.is_waiting or more else LOOK_AGAIN_S
        return min(now_ns + round(after_s * 1e9), wake_ns)

    def _plan(self, reading: Reading, now_ns: int) -> int:
        """Decide, store at most `AT_ONCE` placements, and return the boottime of the next decision."""
        planning = self._planning
        stored = by_id(reading.capacity.nodes)
        planning.tell(reading)
        wake_ns = now_ns + round(LOOK_AGAIN_S * 1e9)
        if len(planning.underway()) < AT_ONCE:
            with self._measures.decisions.time():
                decision = planning.decide()
            planning.promise()
            self._preemptor.preempt(decision.preemptions)
            self._measures.reservations.set(len(self._sentences.reservations()))
            if decision.wake_ns is not None:
                wake_ns = max(now_ns, self._clock.boottime_ns() + decision.wake_ns - planning.now())
        some = planning.underway()[:AT_ONCE]
        for first in range(0, len(some), TOGETHER):
            together = some[first : first + TOGETHER]
            self._place([one for one in together if all(share.node_id in stored for share in one.shares)], stored)
            planning.tried(together)
        return wake_ns

    def _place(self, placements: Sequence[Placement], stored: Mapping[str, StoredNode]) -> None:
        """Store placements and notify nodes. An impossible placement does not block other placements."""
        at_ns = self._clock.wall_ns()

        def intend(connection: sa.Connection) -> list[int | TransitionResult | None]:
            return [self._intend(connection, one, _on(one, stored), at_ns) for one in placements]

        try:
            written = self._database.write(intend)
        finally:
            self._spending.entered()
        placed: list[tuple[Placement, int]] = []
        for placement, came in zip(placements, written, strict=True):
            # Also wake the stream of a run that ended without a start order.
            self._hub.touch(run_key(placement.run_id))
            if isinstance(came, TransitionResult):
                self._announcer.announce(came)
            elif came is not None:
                placed.append((placement, came))
        self._measures.placed.inc(len(placed))
        for placement, fence in placed:
            names = ", ".join(node.name for node in _on(placement, stored))
            with server_log.bound(run=placement.run_id, attempt=fence, node=names):
                _log.info("placed")
            self._deliveries.made(placement.run_id, fence)
            for number in range(len(placement.shares)):
                crew = placement.run_id, fence, number
                self._leases.renew(crew, now_ns=self._clock.boottime_ns())
        for placement, fence in placed:
            faults.reach("after_commit_before_launch")
            self._reserving.ask(placement, fence, stored)
            for share in placement.shares:
                self._hub.touch(node_key(share.node_id))
            self._hub.touch(run_key(placement.run_id))

    def _intend(
        self, connection: sa.Connection, placement: Placement, on: Sequence[StoredNode], at_ns: int
    ) -> int | TransitionResult | None:
        """Create an attempt.

        Return the fence of the attempt, the transition of an attempt that ended at once, or None.
        """
        run = runs.find(connection, placement.run_id)
        if run is None or run.state is not State.QUEUED:
            return None  # A user has canceled the run since the decision.
        if run.owner in owner_suspension.suspended_owners(connection, run.owner):
            return None  # An administrator has suspended the owner since the decision.
        if drain.find(connection) is not None:
            return None
        if not all(nodes.is_still(connection, node) for node in on):
            # The node has restarted or left since the decision. The node's next hello message wakes the scheduler.
            return None
        if not uid_sharing.admits(connection, run.owner, on[0].pool):
            return None  # An administrator has changed the pool's isolation since the decision.
        if len(on) > 1 and (len({node.pool for node in on}) > 1 or not all(node.takes_crews for node in on)):
            return None  # A node has changed its pool or its version since the decision.
        new = NewAttempt(
            gpu_type=placement.shares[0].gpu_type,
            world_size=sum(share.count for share in placement.shares),
            num_nodes=len(on),
        )
        if queue_snapshot.is_full(connection, run, new.world_size, self._leases.freed()):
            return None  # Earlier placements in the same tick have used up the owner's policy cap.
        priced = self._at_its_price(connection, run, new, pool=on[0].pool, at_ns=at_ns)
        if priced is None:
            return None  # Earlier placements in the same tick have used up a budget.
        new = priced
        reason, problem = None, ""
        try:
            if run.spec.secrets:
                pinned = stored_secrets.pins(connection, self._sealer, run.owner, run.team, run.spec.secrets)
                new = msgspec.structs.replace(new, secrets_json=msgspec.json.encode(pinned).decode())
        except SecretMissing as error:
            reason, problem = Reason.SECRET_MISSING, error.message
        old = next((node.name for node in on if SECRETS not in node.hello.takes), "")
        if run.spec.secrets and old:
            reason = reason or Reason.REFUSED
            problem = problem or f"node {old} runs a version without support for secrets"
        try:
            fence = transitions.place(connection, run, new=new, on=self._crews(run, placement, on), at_ns=at_ns)
        except StaleAttempt:
            return None
        if reason is not None:
            return _end_at_once(connection, run.id, reason, Note(at_ns=at_ns, detail=problem))
        return fence

    def _crews(self, run: StoredRun, placement: Placement, on: Sequence[StoredNode]) -> list[NewCrew]:
        """Return the rows for the nodes of a run's next attempt, by node rank."""
        named = {node.name: node for node in on}
        laid = laid_out([(node.name, share.count) for node, share in zip(on, placement.shares, strict=True)])
        return [
            NewCrew(
                number=place.number,
                node_id=named[place.node].id,
                node=place.node,
                boot_id=named[place.node].boot_id,
                first_rank=place.first_rank,
                gpus=place.gpus,
                token_sha256=sha256(self._keys.attempt_token(run.id, run.fence + 1, place.number)),
                grace_s=self._settings.partition_grace_s,
            )
            for place in laid
        ]

    def _at_its_price(
        self, connection: sa.Connection, run: StoredRun, new: NewAttempt, *, pool: str, at_ns: int
    ) -> NewAttempt | None:
        """Fix the current prices and the account of an attempt.

        Return None if the attempt would exceed the remaining amount of a budget.
        """
        currency = self._settings.currency
        tariff = prices.tariff(connection, new.gpu_type, pool, at_ns, currency)
        account = charges.account_of_run(connection, run, gpu_type=new.gpu_type, pool=pool, currency=currency)
        if self._spending.enter(connection, run, account, tariff, gpus=new.world_size, now_ns=at_ns):
            return None
        said = {
            "tariff_json": msgspec.json.encode(tariff).decode(),
            "account_id": charges.ensure_account(connection, account),
        }
        return msgspec.structs.replace(new, **said)

    def give_back(self, run_id: str, fence: int, why: str) -> bool:
        """Requeue a run if the server has not sent its start order. Return True if the run was requeued."""
        return self._reserving.give_back(run_id, fence, why)


def _on(placement: Placement, stored: Mapping[str, StoredNode]) -> list[StoredNode]:
    """Return the nodes of a placement in the order of their node ranks."""
    return [stored[share.node_id] for share in placement.shares]


def _end_at_once(connection: sa.Connection, run_id: str, reason: Reason, note: Note) -> TransitionResult:
    """End an attempt in the transaction that created it, so that the server never sends its start order."""
    run = runs.find(connection, run_id)
    assert run is not None
    told = transitions.apply(connection, run, AttemptEnded(reason=reason, began=False), note=note)
    if run.attempt is not None:
        transitions.settle_all(connection, run.attempt, at_ns=note.at_ns)
    return told


class Preemptor:
    """Stops runs to free devices for other runs."""

    def __init__(self, *, clock: Clock, database: Transactions, measures: ServerMetrics, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._measures = measures
        self._announcer = announcer

    def preempt(self, preemptions: Sequence[Preemption]) -> int:
        """Send stop requests to runs whose devices other runs need. Return the number of stop requests."""
        asked = 0
        for first in range(0, len(preemptions), PREEMPTED_TOGETHER):
            some = preemptions[first : first + PREEMPTED_TOGETHER]
            at_ns = self._clock.wall_ns()

            def work(
                connection: sa.Connection, some: Sequence[Preemption] = some, at_ns: int = at_ns
            ) -> list[TransitionResult | None]:
                return [_ask(connection, one, at_ns) for one in some]

            for one, told in zip(some, self._database.write(work), strict=True):
                if told is not None and told.changed:
                    self._announcer.announce(told)
                    self._measures.preempted.inc()
                    _log.info("preempted run %s for run %s", one.run_id, one.for_run)
                    asked += 1
        return asked


def _ask(connection: sa.Connection, one: Preemption, at_ns: int) -> TransitionResult | None:
    run, other = runs.find(connection, one.run_id), runs.find(connection, one.for_run)
    if run is None or run.state not in ACTIVE or run.stop is not None:
        return None
    if other is None or other.state is not State.QUEUED:
        return None
    try:
        return transitions.ask_to_stop(
            connection, run.id, who=audit.SERVER, why=StopReason.PREEMPT, at_ns=at_ns, because=one.sentence
        )
    except (AlreadyFinished, StaleAttempt):
        return None
