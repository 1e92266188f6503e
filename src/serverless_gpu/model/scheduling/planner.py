"""The planner: applies changes to the scheduler state, decides in passes, and answers queries.

    apply   changes ─▶ queue (waiting runs), capacity (nodes and their runs), fairness (past use)
    decide  one pass over the classes: placements, preemptions and reservations. Another pass follows if a run started
            on other devices than expected. The last pass decides the preemptions.
    why     from the state after the pass: free devices, reservations, queue order (`wait_explanation.py`)

Between passes, the planner stores running and waiting runs, past usage, and announced latest start times
(`backfill.py`). The planner also stores cleared devices (`cleared_devices.py`) and the durations of ended runs
(`duration_estimates.py`), which a new planner does not have. A new planner gives the devices of stopping runs to the
first entitled run in the queue. Queries do not change the planner's state.

One pass over one class of the queue (`ClassPass`):

    runs that have waited beyond the guard, the oldest first
    then the team with the least use, its user with the least use, and of this user the line with the highest score
      the head fits     ─▶ the run is placed and charged; its team and user get new positions
      it does not       ─▶ the line is closed for this pass. A gang reserves devices if their release times are known
                           (the first `reservations` gangs), or holds devices if most of them are free already

During a pass, free devices only decrease and reservations only increase. A run that does not fit at one point of a pass
therefore does not fit later in the pass. A pass examines only the heads of queue lines, and examines each line once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import msgspec

from serverless_gpu.model.scheduling import gang_placement, wait_explanation
from serverless_gpu.model.scheduling.backfill import ReservationSearch
from serverless_gpu.model.scheduling.cleared_devices import Clearing, close_to_guests, open_to_guests
from serverless_gpu.model.scheduling.fairness import charged_all
from serverless_gpu.model.scheduling.feasibility import never_served
from serverless_gpu.model.scheduling.planner_state import PlannerState, QueueLine
from serverless_gpu.model.scheduling.values import (
    Arrived,
    Change,
    Decision,
    DeviceShare,
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
    TimedShape,
    Used,
    Wait,
)

_ROUNDS_MAX = 4
_Head = tuple[float, int, str, QueueLine]
_S = 1e9
_SOON_NS = 1_000_000_000
_PASSES_MAX = 4
"""Maximum number of passes per decision.

Another pass follows if a run no longer needs the devices that the planner held for the run. If the last allowed pass is
also stale, the planner preempts no run and decides again within a second.
"""


class Planner:
    """Decides which waiting runs start, based on all runs and nodes. Not thread-safe.

    The decisions are deterministic: the same changes and times in the same order produce the same decisions.

    `policy` contains the operator's queue settings.
    """

    def __init__(self, policy: QueuePolicy | None = None) -> None:
        self._state = PlannerState(policy or QueuePolicy())

    # --- changes ---

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply changes to the planner's state without a decision. A repeated change has no effect."""
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
                    state.capacity.see(node)
                case NodeGone(node_id):
                    state.capacity.forget(node_id)
                case PoolSeen(pool):
                    state.capacity.see_pool(pool)
                case QueuePolicySet(policy):
                    state.set_policy(policy)
                case Used():
                    state.fairness.tell(change)
                case Promised(reservation):
                    state.promises[reservation.run_id] = reservation

    def _start(self, running: RunningRun) -> None:
        """Record that a run uses its allocated devices."""
        state, run_id = self._state, running.wanted.run_id
        state.queue.remove(run_id)
        known = state.running.get(run_id)
        if known == running:
            return
        if known is not None:
            state.capacity.give(known)
        if known is None or known.shares != running.shares:
            state.fairness.end(run_id)
            state.fairness.begin(run_id, running.wanted, charged_all(running.shares), running.since_ns)
        state.running[run_id] = running
        state.capacity.take(running)

    def _end(self, run_id: str, *, began: bool) -> None:
        running = self._state.running.pop(run_id, None)
        if running is not None:
            self._state.capacity.give(running)
            self._state.fairness.end(run_id)
            if began:
                self._state.ended.append(running)

    # --- decisions ---

    def decide(self, now_ns: int) -> Decision:
        """Return the runs to start and to preempt, and record the decisions. `now_ns` never decreases."""
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
        """Return the next time at which a start delay, the guard time or a node calendar changes the plan."""
        state = self._state
        times = [ripe_ns, state.queue.next_ns(), state.capacity.turns_ns(now_ns)]
        oldest_ns = state.queue.oldest_ns()
        if oldest_ns is not None and not math.isinf(state.policy.guard_s):
            guard_ns = math.ceil(state.policy.guard_s * _S)
            ages = [oldest_ns]
            if oldest_ns + guard_ns <= now_ns:
                ages = [line.rows[0][0] for line in state.queue.lines()]
            times.append(min((at + guard_ns for at in ages if at + guard_ns > now_ns), default=None))
        return min((at for at in times if at is not None), default=None)

    # --- queries ---

    def why(self, run_id: str, now_ns: int) -> Wait | None:
        """Return the reason why a run waits, as of the last decision, or None for a run that does not wait."""
        return wait_explanation.why(self._state, run_id, now_ns)

    def estimate(self, wanted: QueuedRun, now_ns: int) -> StartEstimate:
        """Return the estimated start of a run, without changing the planner's state."""
        return wait_explanation.estimate(self._state, wanted, now_ns)

    def is_waiting(self, run_id: str) -> bool:
        """Return True if a run waits, without the slower queue search of `why`."""
        return self._state.queue.find(run_id) is not None

    def impossible(self, wanted: QueuedRun) -> str:
        """Return the reason why no current node can ever serve a run, or "" if any node can."""
        return never_served(self._state, wanted, self._state.queue.ask(wanted))

    def queue(self, now_ns: int, limit: int) -> tuple[str, ...]:
        """Return the waiting runs in the order of service, with held runs last."""
        return wait_explanation.queue(self._state, now_ns, limit)

    def promises(self) -> dict[str, Reservation]:
        """Return the announced latest start times by run, which the planner keeps between decisions."""
        return dict(self._state.promises)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return the reservations of the last decision."""
        return tuple(self._state.reservations.values())

    def told_reservations(self, now_ns: int) -> tuple[Reservation, ...]:
        """Return the reservations, omitting start times that depend only on a default time limit of days."""
        return wait_explanation.reservations(self._state, now_ns)

    def usage(self, now_ns: int) -> dict[str, TeamUse]:
        """Return the decayed usage by team, with users without a team under ``"~name"``."""
        return self._state.fairness.usage(now_ns)


class ClassPass:
    """One pass over all priority classes.

    In the planner's `state`, placed runs immediately count as started.
    """

    def __init__(self, state: PlannerState) -> None:
        self._state, self._now_ns, self._number = state, state.now_ns, state.number
        self.placements: list[Placement] = []  # Placements in decision order.
        # `is_stale`: True if a run started on devices other than its held or cleared devices. Another pass can then
        # give the unused held devices to other runs and avoid preemptions. `is_new`: True if a run received its first
        # latest start time. The scheduler serves a run with a latest start time first, which may change later
        # reservations.
        self.is_stale = self.is_new = False
        self.clearing = Clearing(state, self._start)
        self._promised = 0
        # Users and device kinds with a reservation that the planner keeps between passes.
        self._firm: set[object] = set()
        self._teams: dict[str, _Team] = {}
        self._most: list[tuple[float, str]] = []  # The waiting teams with the most usage.
        # Pairs of device kind and team for which the pass holds devices, because the team has used less than its share.
        self._behind: set[object] = set()
        self._kinds: set[object] = set()  # Device kinds with devices held for a nearly fitting gang.

    def run(self) -> None:
        """Place runs, starting with runs that have cleared devices and ending with guest runs."""
        hosts = close_to_guests(self._state)
        self.clearing.serve()
        for priority in sorted(self._state.queue.classes):
            self._serve(priority)
        for _ in range(_ROUNDS_MAX):  # Guest runs may have waited for runs that the preceding round placed.
            if not hosts or not open_to_guests(self._state, hosts):
                break
            self._number = self._state.number = self._number + 1
            self.clearing.again()
            for priority in sorted(self._state.queue.classes):
                self._serve(priority)

    def _serve(self, priority: int) -> None:
        """Place the runs of one priority class that fit now."""
        self._redeem(priority)
        self._serve_guarded(priority)
        fairness = self._state.fairness
        teams = [(fairness.team(name), name) for name in self._state.queue.classes.get(priority, ())]
        self._most = heapq.nlargest(2, teams)
        heapq.heapify(teams)
        users = self._teams = {}
        while teams:
            _, name = teams[0]
            team = users.get(name)
            if team is None:
                team = users[name] = _Team(self._state, priority, name)
            if self._serve_team(team):
                heapq.heapreplace(teams, (fairness.team(name), name))
            else:
                heapq.heappop(teams)

    def _serve_guarded(self, priority: int) -> None:
        """Place runs that have waited beyond the guard time, the oldest first.

        For each device kind, the first blocked run receives the devices that other runs release.
        """
        state = self._state
        since_ns = state.guarded_ns(self._now_ns)
        oldest_ns = state.queue.oldest_ns()
        if oldest_ns is None or oldest_ns > since_ns:
            return
        due = [
            (line.rows[0][0], line.rows[0][1], line)
            for users in state.queue.classes.get(priority, {}).values()
            for lines in users.values()
            for line in lines
            if line.rows[0][0] <= since_ns
        ]
        heapq.heapify(due)
        kinds = set[object]()
        while due:
            _, _, line = due[0]
            if self._kind(line.ask) in kinds:
                heapq.heappop(due)
            elif not self._place(line, line.rows[0][2]):
                heapq.heappop(due)
                if self._keep_guarded(line):
                    kinds.add(self._kind(line.ask))
            elif line.rows and line.rows[0][0] <= since_ns:
                heapq.heapreplace(due, (line.rows[0][0], line.rows[0][1], line))
            else:
                heapq.heappop(due)

    def _keep_guarded(self, line: QueueLine) -> bool:
        wanted, capacity = line.rows[0][2], self._state.capacity
        if wanted.run_id in self._state.reservations or self.clearing.clear(wanted, line.ask):
            return True
        seeker = ReservationSearch(capacity, wanted, line.ask, self._now_ns)
        if wanted.queued_ns <= self._state.guarded_ns(self._now_ns, times=2):
            return self._promise(line, seeker.promise() or seeker.keep(0.0))
        by_guess = ReservationSearch(capacity, wanted, line.ask, self._now_ns, by_guess=True)
        return self._promise(line, seeker.promise() or by_guess.promise())

    def _serve_team(self, team: _Team) -> bool:
        """Place the next run of a team that fits now, and return True if a run started."""
        while team.users:
            _, owner = team.users[0]
            if self._serve_user(team.heads(owner, self._now_ns)):
                heapq.heapreplace(team.users, (self._state.fairness.user(team.name, owner), owner))
                return True
            heapq.heappop(team.users)
        return False

    def _serve_user(self, heads: list[_Head]) -> bool:
        """Place the next run of a user that fits now, and return True if a run started."""
        while heads:
            line = heads[0][3]
            wanted = line.rows[line.skipped][2] if line.skipped < len(line.rows) else None
            if wanted is None:
                heapq.heappop(heads)
            elif not self._is_blocked(line, wanted) and self._place(line, wanted):
                self._next(heads, line)
                return True
            elif self._reserve(line, wanted):
                line.skipped += 1
                self._next(heads, line)
            else:
                heapq.heappop(heads)
        return False

    def _next(self, heads: list[_Head], line: QueueLine) -> None:
        """Move a queue line to the position of its next run among the user's lines."""
        if line.skipped < len(line.rows):
            queued_ns, run_id, _ = line.rows[line.skipped]
            score = self._state.score(line.ask, queued_ns, self._now_ns)
            heapq.heapreplace(heads, (-score, queued_ns, run_id, line))
        else:
            heapq.heappop(heads)

    # --- placement of one run ---

    def _place(self, line: QueueLine, wanted: QueuedRun) -> bool:
        """Start a run if devices are free, or else close the run's queue line for the pass."""
        state = self._state
        shares = gang_placement.place(state.capacity, wanted, line.ask, self._now_ns)
        if shares is None:
            self._block(line, wanted)
            return False
        self._start(wanted, line.ask, shares)
        return True

    def _start(self, wanted: QueuedRun, ask: TimedShape, shares: tuple[DeviceShare, ...]) -> None:
        state, run_id = self._state, wanted.run_id
        running = RunningRun(wanted=wanted, shares=shares, since_ns=self._now_ns)
        state.queue.remove(run_id)
        state.running[run_id] = running
        gang_placement.take(state.capacity, shares, wanted, ask, self._now_ns)
        state.capacity.take(running)
        cleared = state.clearing.pop(run_id, None)
        state.promises.pop(run_id, None)
        kept = state.reservations.pop(run_id, None)
        places = state.capacity.places
        self.is_stale |= cleared is not None
        self.is_stale |= kept is not None and any(
            share.node_id in places and places[share.node_id].free.get(share.gpu_type) for share in kept.shares
        )
        state.fairness.place(run_id, wanted, charged_all(shares))
        self.placements.append(Placement(run_id=run_id, shares=shares))

    def _is_blocked(self, line: QueueLine, wanted: QueuedRun) -> bool:
        number, ask = self._number, line.ask
        if ask.shape.several and wanted.run_id in self._state.reservations:
            # The run may fit where an equal run does not, because devices held for the run are free for that run only.
            return False
        if ask.shape.blocked == number or ask.blocked == number or line.blocked == number:
            return True
        return ask.shape.is_walled(number, ask.spans(wanted))

    def _block(self, line: QueueLine, wanted: QueuedRun) -> None:
        """Record other runs that cannot fit in this pass.

        The record covers all runs of the shape, runs of equal or longer duration, or runs of the same owner.
        """
        capacity, ask = self._state.capacity, line.ask
        shape = ask.shape
        if not capacity.is_plain:
            line.blocked = self._number
        elif capacity.reach(shape).is_lent:
            ask.blocked = self._number
        elif capacity.books:  # A run of equal or longer duration does not fit either.
            shape.wall(self._number, ask.spans(wanted))
        else:
            shape.blocked = self._number

    def _reserve(self, line: QueueLine, wanted: QueuedRun) -> bool:
        """Reserve or hold devices for a blocked gang.

        Returns True if the pass may examine the next run of the queue line.
        """
        state, ask = self._state, line.ask
        if wanted.run_id in state.reservations or self.clearing.clear(wanted, ask):
            return True
        if ask.shape.gpus == 1:
            return False
        is_new = ask.shape.unreserved != self._number
        is_early = is_new and self._promised < state.policy.reservations
        if is_early and self._promise(line, ReservationSearch(state.capacity, wanted, ask, self._now_ns).promise()):
            return True
        whose = (self._kind(ask), line.team)
        is_behind = whose not in self._behind and self._is_behind(line)
        if not (is_new or is_behind):
            return False
        seeker = ReservationSearch(state.capacity, wanted, ask, self._now_ns)
        if is_behind and self._note(self._keep_share(seeker, wanted, ask)):
            self._behind.add(whose)
            return True
        is_first = self._kind(ask) not in self._kinds and state.is_gang_of_nodes(ask)
        if is_first and self._note(seeker.keep(state.policy.nearly)):
            self._kinds.add(self._kind(ask))
        ask.shape.unreserved = self._number
        return False

    def _keep_share(self, seeker: ReservationSearch, wanted: QueuedRun, ask: TimedShape) -> Reservation | None:
        """Hold devices for a gang whose team or user has used less than its share.

        For a gang smaller than a node, the scheduler holds released devices, because the gang can soon start. The
        scheduler reserves whole nodes at a guessed start time, because held whole nodes would stay idle for long. Other
        runs may start on the reserved nodes if their guessed end is before the gang's start. Under lasting overload,
        other runs on the reserved nodes could delay the gang forever. After `node_patience_s`, the scheduler therefore
        holds one whole node for a waiting gang.
        """
        has_waited = self._now_ns - wanted.queued_ns >= self._state.policy.node_patience_s * 1e9
        capacity = self._state.capacity
        if not self._state.is_gang_of_nodes(ask) or (
            has_waited and not gang_placement.is_several(capacity, wanted, ask)
        ):
            return seeker.keep(0.0)
        return ReservationSearch(capacity, wanted, ask, self._now_ns, by_guess=True).promise()

    def _promise(self, line: QueueLine, reservation: Reservation | None) -> bool:
        """Record a reservation of a blocked run.

        The latest start time of a user's first gang of a device kind stays fixed. The start times of the user's other
        gangs may move.
        """
        if reservation is None:
            return False
        whose = (line.team, line.owner, self._kind(line.ask))
        if reservation.is_bound and whose not in self._firm:
            self._firm.add(whose)
            self._state.promises[reservation.run_id] = _as_told(reservation)
            self.is_new = True
        elif reservation.is_bound:
            reservation = msgspec.structs.replace(reservation, is_bound=False)
        self._promised += 1
        return self._note(reservation)

    def _redeem(self, priority: int) -> None:
        """Start runs whose reserved devices are free, and renew the reservations of all other runs."""
        state = self._state
        for run_id, promised in sorted(state.promises.items(), key=lambda entry: (entry[1].at_ns or 0, entry[0])):
            found = state.queue.where(run_id)
            if found is None or found[1] is None:
                del state.promises[run_id]
            elif found[0].priority == priority and run_id not in state.reservations:
                self._redeem_one(found[0], found[1], promised)

    def _redeem_one(self, wanted: QueuedRun, line: QueueLine, promised: Reservation) -> None:
        state, ask = self._state, line.ask
        seeker = ReservationSearch(state.capacity, wanted, ask, self._now_ns)
        if seeker.may_have(promised.shares) and gang_placement.fits(
            state.capacity, promised.shares, wanted, ask, self._now_ns
        ):
            self._start(wanted, ask, promised.shares)
            return
        again = seeker.again(promised)
        if again is None:
            # A reservation on an absent node stays valid, because the node may reconnect in time.
            if not seeker.is_away(promised.shares):
                del state.promises[wanted.run_id]
            return
        state.promises[wanted.run_id] = _as_told(again)
        self._firm.add((line.team, line.owner, self._kind(ask)))
        self._promised += 1
        self._note(again)

    def _kind(self, ask: TimedShape) -> frozenset[tuple[int, str]]:
        """Return the node groups and device types for which a run competes."""
        return self._state.capacity.reach(ask.shape).kind

    def _is_behind(self, line: QueueLine) -> bool:
        """Return True if a gang's team or user is far enough behind for holding devices."""
        state, team = self._state, self._teams.get(line.team)
        gpus = line.ask.shape.gpus or state.capacity.reach(line.ask.shape).whole
        if team is None:
            return False
        due, fairness = gpus * state.policy.patience_s, state.fairness
        return fairness.is_behind(line.team, "", due, self._most) or fairness.is_behind(
            line.team, line.owner, due, team.most
        )

    def _note(self, reservation: Reservation | None) -> bool:
        if reservation is not None:
            self._state.reservations[reservation.run_id] = reservation
        return reservation is not None


def _as_told(reservation: Reservation) -> Reservation:
    """Return a reservation without its likely start time, which each pass computes again."""
    return msgspec.structs.replace(reservation, likely_ns=None)


class _Team:
    """Users of a team in order of usage, with the heads of the users' queue lines.

    `most` contains the two users with the most usage.
    """

    def __init__(self, state: PlannerState, priority: int, name: str) -> None:
        self._state, self.name = state, name
        self._lines = state.queue.classes[priority][name]
        self.users = [(state.fairness.user(name, owner), owner) for owner in self._lines]
        self.most = heapq.nlargest(2, self.users)
        heapq.heapify(self.users)
        self._heads: dict[str, list[_Head]] = {}

    def heads(self, owner: str, now_ns: int) -> list[_Head]:
        """Return the heads of a user's queue lines as a heap, the highest score first."""
        heads = self._heads.get(owner)
        if heads is None:
            heads = self._heads[owner] = []
            for line in self._lines.get(owner, ()):
                line.skipped = 0
                queued_ns, run_id, _ = line.rows[0]
                heads.append((-self._state.score(line.ask, queued_ns, now_ns), queued_ns, run_id, line))
            heapq.heapify(heads)
        return heads
