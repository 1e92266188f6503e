"""The state of the queue, kept from change to change, and what it is asked.

    apply   changes ─▶ queue (who waits), floor (nodes, who has what), fairness (who had how much)
    decide  one pass over the classes (`scheduling_pass.py`): placements, preemptions, and what is kept for whom;
    another one
            where a run started elsewhere than was expected. Who leaves is what the last one says
    why     from what the pass has left behind: what is free, promises, the order (`wait_explanation.py`)

Remembered from pass to pass: who runs, who waits, who had how much; the latest times that were told, and the devices
(`backfill.py`); for whom others were asked to leave (`cleared_devices.py`); and how long those took that have ended
(`duration_estimates.py`). A new planner is given all but the last two: who is leaving then gives room to
the first who may ask. Asking changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from serverless_gpu.model.scheduling import wait_explanation
from serverless_gpu.model.scheduling.fairness import charged_all
from serverless_gpu.model.scheduling.feasibility import never_served
from serverless_gpu.model.scheduling.planner_state import PlannerState
from serverless_gpu.model.scheduling.scheduling_pass import ClassPass
from serverless_gpu.model.scheduling.values import (
    Arrived,
    Change,
    Decision,
    DevicesTaken,
    Gone,
    NodeGone,
    NodeSeen,
    Placement,
    PoolSeen,
    Preemption,
    Promised,
    QueuedRun,
    QueuePolicy,
    QueuePolicySet,
    Reservation,
    RunningRun,
    StartEstimate,
    TeamUse,
    Used,
    Wait,
)

_S = 1e9
_SOON_NS = 1_000_000_000
_PASSES_MAX = 4
"""So many passes of one decision: another one follows where what was kept for a run is not needed any more.

After the last of them no run is asked to leave where one more would have followed: the next decision is soon.
"""


class Planner:
    """Everything that waits and runs, and what it can run on. Not for several threads at once.

    The same changes and the same times in the same order give the same answers.

    policy: what the operator decides.
    """

    def __init__(self, policy: QueuePolicy | None = None) -> None:
        self._state = PlannerState(policy or QueuePolicy())

    # --- changes ---

    def apply(self, changes: Iterable[Change]) -> None:
        """Take note of what has changed; nothing is decided. What is known already changes nothing."""
        state = self._state
        for change in changes:
            match change:
                case Arrived(wanted):
                    self._end(wanted.run_id, began=False)
                    state.queue.put(wanted)
                case DevicesTaken(running):
                    self._start(running)
                case Gone(run_id):
                    state.queue.remove(run_id)
                    self._end(run_id, began=True)
                case NodeSeen(node):
                    state.floor.see(node)
                case NodeGone(node_id):
                    state.floor.forget(node_id)
                case PoolSeen(pool):
                    state.floor.see_pool(pool)
                case QueuePolicySet(policy):
                    state.set_policy(policy)
                case Used():
                    state.fairness.tell(change)
                case Promised(reservation):
                    state.promises[reservation.run_id] = reservation

    def _start(self, running: RunningRun) -> None:
        """Record that a run has devices."""
        state, run_id = self._state, running.wanted.run_id
        state.queue.remove(run_id)
        known = state.running.get(run_id)
        if known == running:
            return
        if known is not None:
            state.floor.give(known)
        if known is None or known.shares != running.shares:
            state.fairness.end(run_id)
            state.fairness.begin(run_id, running.wanted, charged_all(running.shares), running.since_ns)
        state.running[run_id] = running
        state.floor.take(running)

    def _end(self, run_id: str, *, began: bool) -> None:
        running = self._state.running.pop(run_id, None)
        if running is not None:
            self._state.floor.give(running)
            self._state.fairness.end(run_id)
            if began:
                self._state.ended.append(running)

    # --- decisions ---

    def decide(self, now_ns: int) -> Decision:
        """Return who starts and who has to leave, and count it as done. `now_ns` never goes back."""
        placements: list[Placement] = []
        preemptions: tuple[Preemption, ...] = ()
        wakes: list[int | None] = []
        for _ in range(_PASSES_MAX):
            self._state.begin(now_ns)
            under_way = ClassPass(self._state)
            under_way.run()
            placements += under_way.placements
            wakes += [under_way.clearing.wake_ns, now_ns + _SOON_NS if under_way.is_new else None]
            if not under_way.is_stale:
                preemptions = tuple(under_way.clearing.preemptions)
                break
            under_way.clearing.take_back()
        else:
            wakes.append(now_ns + _SOON_NS)
        wake_ns = self._wake_ns(now_ns, min((at for at in wakes if at is not None), default=None))
        return Decision(placements=tuple(placements), preemptions=preemptions, wake_ns=wake_ns)

    def _wake_ns(self, now_ns: int, ripe_ns: int | None) -> int | None:
        """Return when the state next changes by itself: a new run in line or under the guard, or a calendar."""
        state = self._state
        times = [ripe_ns, state.queue.next_ns(), state.floor.turns_ns(now_ns)]
        oldest_ns = state.queue.oldest_ns()
        if oldest_ns is not None and not math.isinf(state.policy.guard_s):
            guard_ns = math.ceil(state.policy.guard_s * _S)
            ages = [oldest_ns]
            if oldest_ns + guard_ns <= now_ns:
                ages = [line.rows[0][0] for line in state.queue.lines()]
            times.append(min((at + guard_ns for at in ages if at + guard_ns > now_ns), default=None))
        return min((at for at in times if at is not None), default=None)

    # --- questions ---

    def why(self, run_id: str, now_ns: int) -> Wait | None:
        """Return why a run waits, as of the last decision; None for one that does not wait."""
        return wait_explanation.why(self._state, run_id, now_ns)

    def estimate(self, wanted: QueuedRun, now_ns: int) -> StartEstimate:
        """Return when a run would start if it came now; nothing is changed."""
        return wait_explanation.estimate(self._state, wanted, now_ns)

    def is_waiting(self, run_id: str) -> bool:
        """Return whether a run waits, as far as this was told; `why` says why, and costs a look at the queue."""
        return self._state.queue.find(run_id) is not None

    def impossible(self, wanted: QueuedRun) -> str:
        """Return why nothing that has joined can ever serve a run, or "" when something can."""
        return never_served(self._state, wanted, self._state.queue.ask(wanted))

    def queue(self, now_ns: int, limit: int) -> tuple[str, ...]:
        """Return who waits, in the order in which they are served; those that are left alone until later come last."""
        return wait_explanation.queue(self._state, now_ns, limit)

    def promises(self) -> dict[str, Reservation]:
        """Return the latest times that were told and are kept from decision to decision, by run."""
        return dict(self._state.promises)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return what is kept for whom, as of the last decision."""
        return tuple(self._state.reservations.values())

    def told_reservations(self, now_ns: int) -> tuple[Reservation, ...]:
        """Return what is kept for whom, with times that people can use: none that only a cap of days says."""
        return wait_explanation.reservations(self._state, now_ns)

    def usage(self, now_ns: int) -> dict[str, TeamUse]:
        """Return the decayed use of each team; users without a team are under ``"~name"``."""
        return self._state.fairness.usage(now_ns)
