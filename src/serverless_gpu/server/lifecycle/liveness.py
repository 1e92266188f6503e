"""Liveness of crews and nodes: when each was heard of last, and what follows when one falls silent.

    Leases     crews, renewed by their reports         also: whether they have given their devices back
    Presence   nodes, renewed by hello and heartbeat   also: clock offsets, open streams of orders; an absent node
                                                       gets nothing new

`LivenessMonitor`, called by the reconciler every two seconds, compares the silence of each crew with two limits:

    silent for longer than
    soft_expiry_s                      the run is shown as UNREACHABLE; where its order has not left, it is taken back
    granted grace + partition_margin   the node has ended the crew by its own clock: given up (NODE_GONE)

An order that is held back for an engine has no crew to report yet: its node's presence renews the lease. How long
silence may last is what the attempt was granted, not what this server grants today. A crew that is heard of is never
ended here, however long it stops or sends results.

Leases and presence are memory, by this process's boottime, and lost with it. No wall clock takes part: it jumps, and a
column would be read by the next process with another boottime. So a server that starts knows nothing: every crew counts
as heard of at that moment, and a node as present once it has said something. A server that was away for a day gives
nothing up for it. All methods may be called from any thread, and take the time as a value.
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
"""A node that has not been heard of for so long gets nothing new; it says something every five seconds."""
_REFUSED_MAX = 1_000
_log = logging.getLogger(__name__)

TakeBack = Callable[[str, int, str], bool]
"""Returns a run to the queue whose order has not left the server, by run, fence and why; whether that was so."""


class Leases:
    """When crews were heard of last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[CrewId, int] = {}
        self._freed: set[CrewId] = set()

    def free(self, crew: CrewId) -> bool:
        """Note that a crew has given its devices back, though it has not ended; return whether that is news."""
        with self._lock:
            is_news = crew not in self._freed
            self._freed.add(crew)
            return is_news

    def freed(self) -> frozenset[CrewId]:
        """Return the crews that have no devices any more."""
        with self._lock:
            return frozenset(self._freed)

    def renew(self, crew: CrewId, *, now_ns: int) -> int | None:
        """Note that a crew reported; return when it was heard of before, None for never."""
        with self._lock:
            before_ns = self._heard.get(crew)
            self._heard[crew] = now_ns
            return before_ns

    def last_ns(self, crew: CrewId, *, now_ns: int) -> int:
        """Return when a crew was heard of last, boottime in nanoseconds; one that never was counts from now on."""
        with self._lock:
            return self._heard.setdefault(crew, now_ns)

    def count(self) -> int:
        """Return how many crews there are that have been heard of, about."""
        with self._lock:
            return len(self._heard)

    def keep(self, ids: Collection[CrewId]) -> None:
        """Forget all crews but these."""
        with self._lock:
            self._heard = {crew: heard for crew, heard in self._heard.items() if crew in ids}
            self._freed.intersection_update(ids)


class Presence:
    """When nodes were heard of last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heard: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self._clocks: dict[str, ClockReading] = {}
        self._streams: Counter[str] = Counter()
        self._refused: set[tuple[str, ...]] = set()

    def heard(self, node_id: str, *, now_ns: int) -> bool:
        """Note that a node said something; return whether it was not there before."""
        with self._lock:
            before = self._heard.get(node_id)
            self._heard[node_id] = now_ns
            was_lost = self._lost.pop(node_id, None) is not None
            return was_lost or before is None or now_ns - before > PRESENT_S * 1e9

    def is_there(self, node_id: str, *, now_ns: int) -> bool:
        """Return whether a node can be counted on."""
        with self._lock:
            heard = self._heard.get(node_id)
            return node_id not in self._lost and heard is not None and now_ns - heard <= PRESENT_S * 1e9

    def last_ns(self, node_id: str) -> int | None:
        """Return when a node was heard of last, boottime in nanoseconds; None for never since this process started."""
        with self._lock:
            return self._heard.get(node_id)

    def forget(self, node_id: str) -> None:
        """Note that a node is dead."""
        with self._lock:
            self._heard.pop(node_id, None)
            self._lost.pop(node_id, None)
            self._clocks.pop(node_id, None)

    def read_clock(self, node_id: str, clock: ClockReading | None) -> bool:
        """Note how far a node's clock is off; return whether that has become, or ceased to be, worth a word."""
        with self._lock:
            was_off = is_off(self._clocks.get(node_id))
            if clock is None:
                self._clocks.pop(node_id, None)
            else:
                self._clocks[node_id] = clock
            return is_off(clock) != was_off

    def clock(self, node_id: str) -> ClockReading | None:
        """Return how far a node's clock is off, as it said last, or None."""
        with self._lock:
            return self._clocks.get(node_id)

    @contextlib.contextmanager
    def streaming(self, node_id: str) -> Iterator[None]:
        """Note that a node has its stream of orders open, for as long as the context lasts."""
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
        """Return whether a node has its stream of orders open."""
        with self._lock:
            return node_id in self._streams

    def is_new_refusal(self, key: tuple[str, ...]) -> bool:
        """Note that a node was refused; return whether that is news."""
        with self._lock:
            if key in self._refused:
                return False
            if len(self._refused) >= _REFUSED_MAX:
                self._refused.clear()
            self._refused.add(key)
            return True

    def lose(self, node_id: str, sentence: str) -> None:
        """Note that an engine does not count on a node, until it is heard of again or `find` is called."""
        with self._lock:
            self._lost[node_id] = sentence

    def find(self, node_id: str) -> None:
        """Note that an engine counts on a node again."""
        with self._lock:
            self._lost.pop(node_id, None)

    def why_lost(self, node_id: str) -> str:
        """Return what an engine says about a node that it does not count on, or ""."""
        with self._lock:
            return self._lost.get(node_id, "")


class LivenessMonitor:
    """Ends attempts of crews that fell silent, and stops waiting for receipts that do not come.

    Args:
        take_back: used where the order of a silent crew may not have left the server.
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
            active: runs that have an attempt which has not ended.
            held_back: identifiers of those whose order waits for an engine.
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
            detail = f"nothing was heard of it for {silent_s:.0f} s"
            self._tell(crew, GivenUp(reason=Reason.NODE_GONE), heard_ns=heard_ns, detail=detail)
        elif silent_s > self._soft_s and crew.state is not State.UNREACHABLE:
            self._tell(crew, Silent(), heard_ns=heard_ns)

    def _take_back(self, run: ActiveRun, crew: ActiveCrew, now_ns: int) -> bool:
        why = f"{crew.node} went away before it was told"
        if self._presence.is_there(crew.node_id, now_ns=now_ns):
            # Taken back, and that could not be written down then: it never leaves.
            if not self._deliveries.is_taken_back(run.id, run.fence):
                return False
            why = f"its order to {crew.node} was taken back"
        return self._take_back_order(run.id, run.fence, why)

    def _tell(self, crew: ActiveCrew, event: Event, *, heard_ns: int, detail: str = "") -> None:
        """Tell a run that a crew of it is silent, unless that was heard of meanwhile: who reports was answered."""
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
            _log.info("nothing was done about run %s: %s", run_id, error)
            return
        if told is not None:
            self._announcer.announce(told)

    def settle_overdue(self, now_ns: int) -> None:
        """Settle crews whose receipt would have come long ago, as this process saw them wait, by its boottime."""
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
