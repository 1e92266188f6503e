"""Tracks the last reports of nodes and attempts, and ends attempts of silent nodes.

    Leases     attempts, renewed by their reports      also: attempts that have released their devices
    Presence   nodes, renewed by hello and heartbeat   also: clock offsets, order streams. The scheduler
                                                       places nothing on an absent node

The reconciler calls `LivenessMonitor` every two seconds. The monitor compares the age of each attempt's last report
with two limits:

    no report for more than
    soft_expiry_s                      the server shows the run as UNREACHABLE, and cancels an unsent order
    granted grace + partition_margin   the node has stopped the ranks by its own clock: given up (NODE_GONE)

While a start order waits for an engine, the node has no ranks that could report. While the start order waits, the
node's heartbeats renew the attempt's lease. The limits depend on the attempt's granted grace period, not on the current
setting. The monitor never ends an attempt whose node reports, even if the node needs hours to stop.

Leases and presence exist only in memory. Leases use boottime, because wall clocks can jump. After its start, the server
treats every attempt as if its node had just reported. A server that was down for a day therefore abandons no attempt.
All methods of `Leases` and `Presence` are thread-safe.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import StaleAttempt
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import Event, GivenUp, IllegalRunTransition, Silent
from serverless_gpu.server.core.hub import Hub, run_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.requeue import OrderDeliveries
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.records import crews, runs
from serverless_gpu.server.records.active_runs import ActiveCrew, ActiveRun
from serverless_gpu.server.records.crews import CrewId, StoredCrew
from serverless_gpu.wire.agents import ClockReading, is_off

PRESENT_S = 20.0
"""Seconds without a message after which the scheduler stops using a node."""
_REFUSED_MAX = 1_000
_log = logging.getLogger(__name__)

TakeBack = Callable[[str, int, str], bool]
"""Requeues a run with an unsent start order, and returns True on success."""


class Leases:
    """Stores the time of the last report about each attempt on each node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[CrewId, int] = {}
        self._freed: set[CrewId] = set()

    def free(self, crew: CrewId) -> bool:
        """Record the early release of an attempt's devices on a node, and return True for a new release."""
        with self._lock:
            is_news = crew not in self._freed
            self._freed.add(crew)
            return is_news

    def freed(self) -> frozenset[CrewId]:
        """Return the attempts that have released their devices on a node."""
        with self._lock:
            return frozenset(self._freed)

    def renew(self, crew: CrewId, *, now_ns: int) -> int | None:
        """Store the time of an attempt's report from a node, and return the previous time or None."""
        with self._lock:
            before_ns = self._heard.get(crew)
            self._heard[crew] = now_ns
            return before_ns

    def last_ns(self, crew: CrewId, *, now_ns: int) -> int:
        """Return the boottime (ns) of an attempt's last report from a node, or the current boottime."""
        with self._lock:
            return self._heard.setdefault(crew, now_ns)

    def count(self) -> int:
        """Return the number of leases."""
        with self._lock:
            return len(self._heard)

    def keep(self, ids: Collection[CrewId]) -> None:
        """Delete all leases except the given leases."""
        with self._lock:
            self._heard = {crew: heard for crew, heard in self._heard.items() if crew in ids}
            self._freed.intersection_update(ids)


class Presence:
    """Stores the time of each node's last message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._clocks: dict[str, ClockReading] = {}
        self._streams: Counter[str] = Counter()
        self._refused: set[tuple[str, ...]] = set()

    def heard(self, node_id: str, *, now_ns: int) -> bool:
        """Store the time of a node's message, and return True if the node was absent before."""
        with self._lock:
            before = self._heard.get(node_id)
            self._heard[node_id] = now_ns
            was_lost = self._lost.pop(node_id, None) is not None
            return was_lost or before is None or now_ns - before > PRESENT_S * 1e9

    def is_there(self, node_id: str, *, now_ns: int) -> bool:
        """Return True if a node sent a recent message and no engine has reported the node as lost."""
        with self._lock:
            heard = self._heard.get(node_id)
            return node_id not in self._lost and heard is not None and now_ns - heard <= PRESENT_S * 1e9

    def last_ns(self, node_id: str) -> int | None:
        """Return the boottime (ns) of a node's last message to this server process, or None."""
        with self._lock:
            return self._heard.get(node_id)

    def forget(self, node_id: str) -> None:
        """Delete the presence of a node that an operator has declared dead."""
        with self._lock:
            self._heard.pop(node_id, None)
            self._lost.pop(node_id, None)
            self._clocks.pop(node_id, None)

    def read_clock(self, node_id: str, clock: ClockReading | None) -> bool:
        """Store a node's clock offset, and return True if the offset became excessive or normal."""
        with self._lock:
            was_off = is_off(self._clocks.get(node_id))
            if clock is None:
                self._clocks.pop(node_id, None)
            else:
                self._clocks[node_id] = clock
            return is_off(clock) != was_off

    def clock(self, node_id: str) -> ClockReading | None:
        """Return a node's last reported clock offset, or None."""
        with self._lock:
            return self._clocks.get(node_id)

    @contextlib.contextmanager
    def streaming(self, node_id: str) -> Iterator[None]:
        """Count a node's order stream as open until the `with` block ends."""
        with self._lock:
            self._streams[node_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._streams[node_id] -= 1
                if not self._streams[node_id]:
                    del self._streams[node_id]

    def is_streaming(self, node_id: str) -> bool:
        """Return True if a node has an open order stream."""
        with self._lock:
            return node_id in self._streams

    def is_new_refusal(self, key: tuple[str, ...]) -> bool:
        """Record a node's refusal, and return True for a new refusal."""
        with self._lock:
            if key in self._refused:
                return False
            if len(self._refused) >= _REFUSED_MAX:
                self._refused.clear()
            self._refused.add(key)
            return True

    def lose(self, node_id: str, sentence: str) -> None:
        """Record that an engine has lost a node, until the node's next message."""
        with self._lock:
            self._lost[node_id] = sentence

    def find(self, node_id: str) -> None:
        """Record that an engine has found a lost node again."""
        with self._lock:
            self._lost.pop(node_id, None)

    def why_lost(self, node_id: str) -> str:
        """Return the engine's reason for reporting a node as lost, or ""."""
        with self._lock:
            return self._lost.get(node_id, "")


class LivenessMonitor:
    """Ends attempts of silent nodes, and settles attempts with overdue receipts.

    Args:
        take_back: cancels the start order for a silent node if the order is unsent.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        leases: Leases,
        presence: Presence,
        deliveries: OrderDeliveries,
        announcer: Announcer,
        take_back: TakeBack,
    ) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._presence = presence
        self._deliveries = deliveries
        self._announcer = announcer
        self._take_back_order = take_back
        self._soft_s = settings.soft_expiry_s
        self._grace_s, self._margin_s = settings.partition_grace_s, settings.partition_margin_s
        self._unsettled: dict[CrewId, int] = {}

    def check(self, active: Sequence[ActiveRun], held_back: Collection[str], now_ns: int) -> None:
        """Compare the age of each attempt's last report with the silence limits.

        Args:
            active: runs with an unfinished attempt.
            held_back: identifiers of the runs whose order waits for an engine.
            now_ns: boottime, nanoseconds.
        """
        for run in active:
            for crew in run.crews:
                if run.id in held_back and self._presence.is_there(crew.node_id, now_ns=now_ns):
                    self._leases.renew(crew.id, now_ns=now_ns)
                self._look(run, crew, now_ns)

    def _look(self, run: ActiveRun, crew: ActiveCrew, now_ns: int) -> None:
        heard_ns = self._leases.last_ns(crew.id, now_ns=now_ns)
        silent_s = (now_ns - heard_ns) / 1e9
        if silent_s > self._soft_s and self._take_back(run, crew, now_ns):
            return
        if silent_s > crew.grace_s + self._margin_s:
            detail = f"the node sent no report for {silent_s:.0f} s"
            self._tell(crew, GivenUp(reason=Reason.NODE_GONE), heard_ns=heard_ns, detail=detail)
        elif silent_s > self._soft_s and crew.state is not State.UNREACHABLE:
            self._tell(crew, Silent(), heard_ns=heard_ns)

    def _take_back(self, run: ActiveRun, crew: ActiveCrew, now_ns: int) -> bool:
        why = f"node {crew.node} disconnected before it received the order"
        if self._presence.is_there(crew.node_id, now_ns=now_ns):
            # The node never receives an order that an earlier, failed transaction has cancelled.
            if not self._deliveries.is_taken_back(run.id, run.fence):
                return False
            why = f"the server cancelled its order to {crew.node} before sending the order"
        return self._take_back_order(run.id, run.fence, why)

    def _tell(self, crew: ActiveCrew, event: Event, *, heard_ns: int, detail: str = "") -> None:
        """Apply a node's silence to a run on the node, unless the attempt has changed meanwhile."""
        note = Note(at_ns=self._clock.wall_ns(), detail=detail)
        run_id, fence, number = crew.id

        def work(connection: sa.Connection) -> TransitionResult | None:
            found = runs.find(connection, run_id)
            if found is None or found.attempt is None or found.fence != fence:
                return None
            now = found.attempt.crews[number]
            if now.state is not crew.state or now.ended_ns is not None:
                return None
            if self._leases.last_ns(crew.id, now_ns=heard_ns) != heard_ns:
                return None
            return transitions.apply_to_crew(connection, found, number, event, note=note)

        try:
            told = self._database.write(work)
        except (StaleAttempt, IllegalRunTransition) as error:
            _log.info("the server could not apply a node's silence to run %s: %s", run_id, error)
            return
        if told is not None:
            self._announcer.announce(told)

    def settle_overdue(self, now_ns: int) -> None:
        """Settle attempts whose receipts are overdue since this server's first check."""
        ended = {one.id: one for one in self._database.read(crews.unsettled)}
        self._unsettled = {crew: self._unsettled.get(crew, now_ns) for crew in ended}
        for crew, one in ended.items():
            if now_ns - self._unsettled[crew] > (self._grace_s + self._margin_s) * 1e9:
                self._settle_without(one)

    def _settle_without(self, crew: StoredCrew) -> None:
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> bool:
            return transitions.settle(connection, crew.id, receipt=None, at_ns=at_ns)

        self._database.write(work)
        self._hub.touch(run_key(crew.run_id))
