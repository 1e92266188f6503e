"""Liveness of crews and nodes: when each reported last, and how the server reacts to silence.

    Leases     crews, renewed by their reports         also: crews that have returned their devices
    Presence   nodes, renewed by hello and heartbeat   also: clock offsets, open order streams; the scheduler
                                                       places nothing on an absent node

`LivenessMonitor`, called by the reconciler every two seconds, compares the silence of each crew with two limits:

    silent for longer than
    soft_expiry_s                      the run is shown as UNREACHABLE; an order that has not left is taken back
    granted grace + partition_margin   the node has ended the crew by its own clock: given up (NODE_GONE)

While the server holds back an order for an engine, no crew exists that could report. The presence of its node then
renews the lease. The limits use the grace period that the attempt was granted, not the current setting. The monitor
never ends a crew that reports, however long the crew takes to stop or to send results.

Leases and presence exist in memory only, with times of this process's boottime clock. Wall clocks are unsuitable
because they jump. A database column is unsuitable because the next process may have another boottime. A server that
starts treats every crew as if it had just reported. A node counts as present after its first message. So a server that
was away for a day gives up no attempt. All methods are thread-safe and take the time as a value.
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
"""Seconds of silence after which a node receives no new work. Nodes send a heartbeat every five seconds."""
_REFUSED_MAX = 1_000
_log = logging.getLogger(__name__)

TakeBack = Callable[[str, int, str], bool]
"""Requeues a run whose order has not left the server, by run, fence and reason; returns True if it did so."""


class Leases:
    """The time of each crew's last report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[CrewId, int] = {}
        self._freed: set[CrewId] = set()

    def free(self, crew: CrewId) -> bool:
        """Note that a crew returned its devices before its end; return True the first time."""
        with self._lock:
            is_news = crew not in self._freed
            self._freed.add(crew)
            return is_news

    def freed(self) -> frozenset[CrewId]:
        """Return the crews that have returned their devices."""
        with self._lock:
            return frozenset(self._freed)

    def renew(self, crew: CrewId, *, now_ns: int) -> int | None:
        """Note a report of a crew; return the time of the report before it, or None."""
        with self._lock:
            before_ns = self._heard.get(crew)
            self._heard[crew] = now_ns
            return before_ns

    def last_ns(self, crew: CrewId, *, now_ns: int) -> int:
        """Return the time of a crew's last report, boottime in ns; an unknown crew counts from now on."""
        with self._lock:
            return self._heard.setdefault(crew, now_ns)

    def count(self) -> int:
        """Return the approximate number of crews that have reported."""
        with self._lock:
            return len(self._heard)

    def keep(self, ids: Collection[CrewId]) -> None:
        """Forget all crews but these."""
        with self._lock:
            self._heard = {crew: heard for crew, heard in self._heard.items() if crew in ids}
            self._freed.intersection_update(ids)


class Presence:
    """The time of each node's last message."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._clocks: dict[str, ClockReading] = {}
        self._streams: Counter[str] = Counter()
        self._refused: set[tuple[str, ...]] = set()

    def heard(self, node_id: str, *, now_ns: int) -> bool:
        """Note a message of a node; return True if the node was absent before."""
        with self._lock:
            before = self._heard.get(node_id)
            self._heard[node_id] = now_ns
            was_lost = self._lost.pop(node_id, None) is not None
            return was_lost or before is None or now_ns - before > PRESENT_S * 1e9

    def is_there(self, node_id: str, *, now_ns: int) -> bool:
        """Return True if a node sent a message recently and no engine reports it as lost."""
        with self._lock:
            heard = self._heard.get(node_id)
            return node_id not in self._lost and heard is not None and now_ns - heard <= PRESENT_S * 1e9

    def last_ns(self, node_id: str) -> int | None:
        """Return the time of a node's last message to this process, boottime in ns, or None."""
        with self._lock:
            return self._heard.get(node_id)

    def forget(self, node_id: str) -> None:
        """Forget a node that is dead."""
        with self._lock:
            self._heard.pop(node_id, None)
            self._lost.pop(node_id, None)
            self._clocks.pop(node_id, None)

    def read_clock(self, node_id: str, clock: ClockReading | None) -> bool:
        """Store the clock offset of a node; return True if the offset began or ceased to need a warning."""
        with self._lock:
            was_off = is_off(self._clocks.get(node_id))
            if clock is None:
                self._clocks.pop(node_id, None)
            else:
                self._clocks[node_id] = clock
            return is_off(clock) != was_off

    def clock(self, node_id: str) -> ClockReading | None:
        """Return the clock offset that a node reported last, or None."""
        with self._lock:
            return self._clocks.get(node_id)

    @contextlib.contextmanager
    def streaming(self, node_id: str) -> Iterator[None]:
        """Count an open order stream of a node while the context lasts."""
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
        """Note the refusal of a node; return True the first time."""
        with self._lock:
            if key in self._refused:
                return False
            if len(self._refused) >= _REFUSED_MAX:
                self._refused.clear()
            self._refused.add(key)
            return True

    def lose(self, node_id: str, sentence: str) -> None:
        """Note that an engine lost a node; the next message of the node or `find` ends this."""
        with self._lock:
            self._lost[node_id] = sentence

    def find(self, node_id: str) -> None:
        """Note that an engine no longer reports a node as lost."""
        with self._lock:
            self._lost.pop(node_id, None)

    def why_lost(self, node_id: str) -> str:
        """Return why an engine reports a node as lost, or ""."""
        with self._lock:
            return self._lost.get(node_id, "")


class LivenessMonitor:
    """Ends attempts of silent crews, and stops waiting for overdue receipts.

    Args:
        take_back: called if the order of a silent crew may not have left the server.
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
        """Compare the silence of every crew with its limits.

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
            detail = f"the node was silent for {silent_s:.0f} s"
            self._tell(crew, GivenUp(reason=Reason.NODE_GONE), heard_ns=heard_ns, detail=detail)
        elif silent_s > self._soft_s and crew.state is not State.UNREACHABLE:
            self._tell(crew, Silent(), heard_ns=heard_ns)

    def _take_back(self, run: ActiveRun, crew: ActiveCrew, now_ns: int) -> bool:
        why = f"node {crew.node} disconnected before it received the order"
        if self._presence.is_there(crew.node_id, now_ns=now_ns):
            # An earlier transaction took the order back but failed: the order still never leaves the server.
            if not self._deliveries.is_taken_back(run.id, run.fence):
                return False
            why = f"the server took back its order to {crew.node}"
        return self._take_back_order(run.id, run.fence, why)

    def _tell(self, crew: ActiveCrew, event: Event, *, heard_ns: int, detail: str = "") -> None:
        """Apply the silence of a crew to its run, unless the crew has reported or changed in the meantime."""
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
            _log.info("ignored the silence of run %s: %s", run_id, error)
            return
        if told is not None:
            self._announcer.announce(told)

    def settle_overdue(self, now_ns: int) -> None:
        """Settle crews whose receipts are overdue, by boottime since this process first saw them wait."""
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
