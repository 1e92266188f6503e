"""Explains waits, estimates starts and lists the queue, on demand from the results of the last pass.

The module makes no scheduling decisions. Callers query one run at a time, because the duration of a query may grow with
the queue length.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

import msgspec

from serverless_gpu.model.scheduling import gang_placement
from serverless_gpu.model.scheduling.backfill import Chosen, ReservationSearch
from serverless_gpu.model.scheduling.capacity import Capacity, NodeDevices
from serverless_gpu.model.scheduling.duration_estimates import says_no_end
from serverless_gpu.model.scheduling.fairness import team_of
from serverless_gpu.model.scheduling.feasibility import isolation_problem, never_served
from serverless_gpu.model.scheduling.gang_placement import is_several
from serverless_gpu.model.scheduling.planner_state import PlannerState, QueueLine
from serverless_gpu.model.scheduling.preemption import may_ask, standing
from serverless_gpu.model.scheduling.values import (
    DeviceHolder,
    DeviceShare,
    GangPart,
    QueuedRun,
    Reservation,
    StartEstimate,
    TimedShape,
    Wait,
    WaitReason,
)
from serverless_gpu.model.scheduling.wait_messages import first_few
from serverless_gpu.units import format_duration_ms

AHEAD_MAX = 64
"""Maximum number of runs ahead that a start estimate considers."""
_SOON_NS = 60e9
HOLDERS_MAX = 32
"""Maximum number of device holders in a wait explanation."""
Rank = tuple[int, bool, float, float, float, int, str]
"""Sort key of a waiting run, where the smallest key identifies the next run."""


def why(state: PlannerState, run_id: str, now_ns: int) -> Wait | None:
    """Return the reason why a run waits, or None for a run that does not wait."""
    found = state.queue.where(run_id)
    if found is None:
        return None
    wanted, line = found
    if line is None:
        return Wait(run_id=run_id, reason=WaitReason.HELD, words=wanted.held)
    never = never_served(state, wanted, line.ask)
    if never:
        return Wait(run_id=run_id, reason=WaitReason.UNSATISFIABLE, words=never)
    closed = isolation_problem(state, wanted, line.ask)
    if closed:
        return Wait(run_id=run_id, reason=WaitReason.ISOLATION, words=closed)
    place = 1 + sum(count for _, count in _ahead(state, wanted, line.ask, now_ns))
    return _Explained(state, wanted, line.ask, now_ns).wait(place)


def queue(state: PlannerState, now_ns: int, limit: int) -> tuple[str, ...]:
    """Return the waiting runs in the order of service.

    The list ends with unservable runs, followed by held runs.
    """
    order = _Order(state, now_ns)
    lines = list(state.queue.lines())
    never = [not state.capacity.is_possible(line.ask.shape) for line in lines]
    heads = [(never[number], order.rank(line, 0), number, 0) for number, line in enumerate(lines)]
    heapq.heapify(heads)
    found: list[str] = []
    while heads and len(found) < limit:
        *_, number, at = heads[0]
        found.append(lines[number].rows[at][1])
        if at + 1 < len(lines[number].rows):
            heapq.heapreplace(heads, (never[number], order.rank(lines[number], at + 1), number, at + 1))
        else:
            heapq.heappop(heads)
    held = sorted((wanted.not_before_ns, wanted.run_id) for wanted in state.queue.held())
    return tuple(found + [run_id for _, run_id in held[: max(0, limit - len(found))]])


def estimate(state: PlannerState, wanted: QueuedRun, now_ns: int) -> StartEstimate:
    """Return the estimated start time of a run, as if a client submitted the run now."""
    ask = state.queue.ask(wanted)
    never = never_served(state, wanted, ask)
    if never:
        return StartEstimate(at_ns=None, basis=never, impossible=True)
    closed = isolation_problem(state, wanted, ask)
    if closed:
        wait = Wait(run_id=wanted.run_id, reason=WaitReason.ISOLATION, words=closed)
        return StartEstimate(at_ns=None, basis=closed, wait=wait)
    shares = gang_placement.place(state.capacity, wanted, ask, now_ns)
    if shares is not None:
        return StartEstimate(
            at_ns=now_ns, node=_node(state, shares), nodes=_nodes(state, shares), basis="enough devices are free"
        )
    lines = _ahead(state, wanted, ask, now_ns)
    place = 1 + sum(count for _, count in lines)
    if place > AHEAD_MAX:
        return StartEstimate(at_ns=None, basis="too many runs are ahead", place=place)
    ahead = [(other, line) for line, count in lines for *_, other in line.rows[:count]]
    order = _Order(state, now_ns)
    ahead.sort(key=lambda entry: order.of(entry[0], entry[1].ask))
    forecast = state.capacity.forecast()
    for number, (other, line) in enumerate(ahead):
        if ReservationSearch(forecast, other, line.ask, now_ns).promise() is None:
            before = f"the start of {other.title}, which is ahead, is unknown"
            basis = f"{before}: {_unknown(state, other, line.ask, ahead[:number])}"
            return StartEstimate(
                at_ns=None, basis=basis, place=place, wait=_Explained(state, wanted, ask, now_ns).wait(place)
            )
    found = ReservationSearch(forecast, wanted, ask, now_ns).promise()
    if (
        found is None
        or found.at_ns is None
        or (
            found.likely_ns is None
            and _rests_on_caps(state, found.shares, [other for other, _ in ahead], found.at_ns, now_ns)
        )
    ):
        wait = _Explained(state, wanted, ask, now_ns).wait(place)
        return StartEstimate(at_ns=None, basis=_unknown(state, wanted, ask, ahead), place=place, wait=wait)
    known = "declared" if found.is_bound and found.likely_ns is None else "declared and learned"
    return StartEstimate(
        at_ns=found.at_ns if found.likely_ns is None else found.likely_ns,
        node=_node(state, found.shares),
        nodes=_nodes(state, found.shares),
        basis=f"by the {known} ends of the runs that have the devices"
        + (f" and of {place - 1} ahead" if ahead else ""),
        place=place,
        wait=_Explained(state, wanted, ask, now_ns).wait(place),
    )


def _unknown(state: PlannerState, wanted: QueuedRun, ask: TimedShape, ahead: list[tuple[QueuedRun, QueueLine]]) -> str:
    """Return the reason why the scheduler cannot estimate when devices become free."""
    if next(iter(gang_placement.usable(state.capacity, wanted, ask, state.now_ns)), None) is None:
        closed = _Explained(state, wanted, ask, state.now_ns).wait(0)
        return closed.words or "the run may not use any suitable node now"
    open_ended = [
        held.running.wanted.title
        for where, types, _ in state.capacity.reach(ask.shape).places()
        for name in types
        for held in where.runs.get(name, {}).values()
        if math.isinf(held.likely_ns) or _says_no_end(held.running.wanted)
    ]
    open_ended += [other.title for other, line in ahead if math.isinf(line.ask.spans(other)[0]) or _says_no_end(other)]
    if not open_ended:
        one = "several nodes" if is_several(state.capacity, wanted, ask) else "one node"
        return f"the scheduler cannot estimate when enough devices of {one} become free"
    named = ", ".join(first_few(sorted(set(open_ended))))
    return f"no timeout was declared for {named}, and too few similar runs have ended to learn from"


def _says_no_end(wanted: QueuedRun) -> bool:
    return says_no_end(expected_s=wanted.expected_s, limit_s=wanted.limit_s, capped=wanted.capped)


def _rests_on_caps(
    state: PlannerState, shares: Iterable[DeviceShare], ahead: Iterable[QueuedRun], at_ns: int, now_ns: int
) -> bool:
    """Return True if a start time depends on a run whose only time limit is a default of days."""
    if any(_says_no_end(other) and now_ns + (other.limit_s or 0.0) * 1e9 <= at_ns for other in ahead):
        return True
    return any(
        _says_no_end(held.running.wanted) and held.bound_ns <= at_ns
        for share in shares
        if share.node_id in state.capacity.places
        for held in state.capacity.places[share.node_id].runs.get(share.gpu_type, {}).values()
    )


def _is_far(state: PlannerState, kept: Reservation, now_ns: int) -> bool:
    """Return True if a reservation's start time depends on default time limits of days."""
    books = [state.capacity.books.get((share.node_id, share.gpu_type)) for share in kept.shares]
    names = {run_id for book in books if book is not None for run_id, _ in book.names} - {kept.run_id}
    ahead = [other for other in map(state.queue.find, sorted(names)) if other is not None]
    return _rests_on_caps(state, kept.shares, ahead, kept.at_ns or 0, now_ns)


def reservations(state: PlannerState, now_ns: int) -> tuple[Reservation, ...]:
    """Return the reservations, omitting start times that depend on default time limits of days."""
    return tuple(
        msgspec.structs.replace(kept, at_ns=kept.likely_ns, is_bound=False)
        if kept.at_ns is not None and _is_far(state, kept, now_ns)
        else kept
        for kept in state.reservations.values()
    )


def _node(state: PlannerState, shares: tuple[DeviceShare, ...]) -> str:
    return state.capacity.places[shares[0].node_id].node.name if len(shares) == 1 else ""


def _nodes(state: PlannerState, shares: tuple[DeviceShare, ...]) -> tuple[str, ...]:
    return tuple(state.capacity.places[share.node_id].node.name for share in shares) if len(shares) > 1 else ()


class _Order:
    """The order of the queue at one time, with cached values per user.

    The runs ahead of a given run are at the start of a queue line, because the line is in queue order.
    """

    def __init__(self, state: PlannerState, now_ns: int) -> None:
        self._state, self._now_ns, self._guarded_ns = state, now_ns, state.guarded_ns(now_ns)
        self._fairness = state.fairness.at(now_ns)
        self._shares: dict[tuple[str, str], tuple[float, float]] = {}

    def rank(self, line: QueueLine, at: int) -> Rank:
        """Return the sort key of one run of a queue line."""
        return self.of(line.rows[at][2], line.ask)

    def of(self, wanted: QueuedRun, ask: TimedShape) -> Rank:
        """Return the sort key of a run: by class, guard, team and user, then by waiting time."""
        state, queued_ns = self._state, wanted.queued_ns
        if queued_ns <= self._guarded_ns:
            # The scheduler orders runs that waited beyond the guard only by their queue time.
            return (wanted.priority, False, 0.0, 0.0, 0.0, queued_ns, wanted.run_id)
        key = (team_of(wanted), wanted.owner)
        shares = self._shares.get(key)
        if shares is None:
            shares = self._shares[key] = (self._fairness.team(key[0]), self._fairness.user(*key))
        score = -state.score(ask, queued_ns, self._now_ns)
        return (wanted.priority, True, *shares, score, queued_ns, wanted.run_id)

    def count(self, line: QueueLine, mine: Rank) -> int:
        """Return the number of runs of a queue line that are ahead of a given run."""
        if self.rank(line, 0) >= mine:
            return 0
        if self.rank(line, -1) < mine:
            return len(line.rows)
        return bisect_left(range(len(line.rows)), mine, key=lambda at: self.rank(line, at))


def _ahead(state: PlannerState, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> list[tuple[QueueLine, int]]:
    """Return the number of runs ahead for the same kind of devices, by queue line."""
    order = _Order(state, now_ns)
    mine = order.of(wanted, ask)
    capacity, kind = state.capacity, state.capacity.reach(ask.shape).kind
    same = (line for line in state.queue.lines() if not kind.isdisjoint(capacity.reach(line.ask.shape).kind))
    counts = [(line, order.count(line, mine)) for line in same if capacity.is_possible(line.ask.shape)]
    return [(line, count) for line, count in counts if count]


class _Explained:
    """Explains the wait of a run that at least one node could serve."""

    def __init__(self, state: PlannerState, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> None:
        self._state, self._floor = state, state.capacity
        self._wanted, self._ask, self._now_ns = wanted, ask, now_ns
        self._is_several = is_several(state.capacity, wanted, ask)
        self._reservation: Reservation | None = state.reservations.get(wanted.run_id)

    def wait(self, place: int) -> Wait:
        """Return the wait of the run, with its position in the queue."""
        if self._is_several:
            return self._several(place)
        nearest = self._nearest()
        if nearest is None:
            return self._closed(place)
        where, name = nearest
        needed = self._ask.shape.needs(where.node, name)
        free = where.free[name]
        ahead = self._keeper(where, name) if free else ""
        at_ns, is_bound, likely_ns = self._start(where, name, needed, place)
        kept_ns, spare_s = self._spare([(where, name, needed)])
        return msgspec.structs.replace(
            self._there(where, name, self._reason(ahead, enough=free >= needed), free),
            outside=where.node.outside.get(name, 0),
            holders=self._holders([(where, name)], lacking=needed - free) if free < needed else (),
            ahead=ahead,
            kept_ns=kept_ns,
            spare_s=spare_s,
            place=place,
            at_ns=at_ns,
            is_bound=is_bound,
            words=where.node.left_out if free < needed else "",
            likely_ns=likely_ns,
        )

    def _there(self, where: NodeDevices, gpu_type: str, reason: WaitReason, free: int) -> Wait:
        """Return the common fields of every wait for devices of a node."""
        shape = self._ask.shape
        return Wait(
            run_id=self._wanted.run_id,
            count=shape.needs(where.node, gpu_type),
            whole=shape.gpus is None,
            gpu_type=self._wanted.gpu_type or gpu_type,
            reason=reason,
            one_node=not self._is_several,
            node=where.node.name,
            free=free,
        )

    def _spare(self, chosen: Chosen) -> tuple[int | None, float]:
        """Return the time at which other runs need the devices, and the longest fitting time limit."""
        if any(where.free[name] < count for where, name, count in chosen):
            return None, 0.0
        books = [(self._floor.books.get((where.node.id, name)), count) for where, name, count in chosen]
        ends = [min(book.likely.until(count), book.bound.until(count)) for book, count in books if book is not None]
        until = min(ends, default=math.inf)
        if until <= self._now_ns or math.isinf(until):
            return None, 0.0
        left_s = (until - self._now_ns) / 1e9 - self._wanted.beyond_s
        return int(until), max(0.0, left_s // 60 * 60)

    def _reason(self, ahead: str, *, enough: bool) -> WaitReason:
        if self._wanted.run_id in self._state.clearing:
            return WaitReason.MAKING_ROOM
        return WaitReason.RESERVED if ahead else WaitReason.TURN if enough else WaitReason.CAPACITY

    def _nearest(self) -> tuple[NodeDevices, str] | None:
        """Return the node that explains the wait.

        The method prefers a node with enough devices held for other runs. The next choices are the reserved node and
        the node with the fewest missing devices.
        """
        kept = min(self._kept(), key=lambda option: option[:2], default=None)
        if kept is not None and self._wanted.run_id not in self._state.clearing:
            return kept[2], kept[3]
        if self._reservation is not None and self._reservation.shares:
            share = self._reservation.shares[0]
            where = self._floor.places.get(share.node_id)
            if where is not None:
                return where, share.gpu_type
        options = []
        for where, name in gang_placement.usable(self._floor, self._wanted, self._ask, self._now_ns):
            needed = self._ask.shape.needs(where.node, name)
            if 0 < needed <= where.node.total[name]:
                lacking = needed - where.free[name]
                options.append((bool(self._keeper(where, name)), lacking, *where.entry[:2], where, name))
        if not options:
            return None
        *_, where, name = min(options, key=lambda option: option[:4])
        return where, name

    def _kept(self) -> Iterator[tuple[str, str, NodeDevices, str]]:
        """Yield nodes with enough free devices that the scheduler holds for other runs.

        Users who see free devices expect an explanation why a waiting run does not start.
        """
        reach = self._floor.reach(self._ask.shape)
        for node_id, name in self._floor.books:
            where = self._floor.places[node_id]
            found = reach.of(where)
            needed = self._ask.shape.needs(where.node, name)
            enough = found is not None and name in found[0] and 0 < needed <= where.free[name] and not where.node.away
            if enough and self._keeper(where, name):
                yield *where.entry[:2], where, name

    def _keeper(self, where: NodeDevices, gpu_type: str) -> str:
        """Return the title of the first run for which the scheduler holds devices of a node, or ""."""
        book = self._floor.books.get((where.node.id, gpu_type))
        others = (run_id for run_id, _ in book.names if run_id != self._wanted.run_id) if book is not None else ()
        for run_id in others:
            other = self._state.queue.find(run_id)
            if other is not None:
                return other.title
        return ""

    def _start(self, where: NodeDevices, gpu_type: str, count: int, place: int) -> tuple[int | None, bool, int | None]:
        """Return the start time, True if it is a latest start time, and the likely start time."""
        if self._reservation is not None:
            return self._promised()
        if place != 1 or where.free[gpu_type] >= count:
            return None, False, None
        likely, _ = ReservationSearch(self._floor, self._wanted, self._ask, self._now_ns).when(where, gpu_type, count)
        share = DeviceShare(node_id=where.node.id, gpu_type=gpu_type, count=count)
        if math.isinf(likely) or _rests_on_caps(self._state, (share,), (), int(likely), self._now_ns):
            return None, False, None
        return int(likely), False, None  # Without a reservation, the run may start later than the likely time.

    def _promised(self) -> tuple[int | None, bool, int | None]:
        """Return the reserved start time, True if it is a latest start time, and the learned start time.

        A reserved start time in the past is invalid, because a run is late or a node lost its devices.
        """
        kept = self._reservation
        if kept is None or kept.at_ns is None or kept.at_ns <= self._now_ns:
            return None, False, None
        likely_ns = kept.likely_ns if kept.likely_ns is not None and kept.likely_ns > self._now_ns else None
        if likely_ns is not None and not kept.is_bound:
            return likely_ns, False, None
        if likely_ns is None and _is_far(self._state, kept, self._now_ns):
            return None, False, None
        return kept.at_ns, kept.is_bound, likely_ns

    def _holders(self, rows: list[tuple[NodeDevices, str]], *, lacking: int = 0) -> tuple[DeviceHolder, ...]:
        """Return the runs that hold devices of the given nodes, the earliest release first.

        `lacking` is the number of devices that preemption must free, or 0 without preemption.
        """
        found = []
        asked = self._asked(rows[0], lacking) if lacking and len(rows) == 1 else {}
        for where, name in rows:
            for held in where.runs.get(name, {}).values():
                running = held.running
                likely, bound = held.until(self._now_ns)
                is_bound = not math.isinf(bound)
                until = bound if is_bound else likely
                if running.is_leaving and running.leaving_ns is not None:
                    gone = running.leaving_ns + running.wanted.grace_s * 1e9
                    until, is_bound = (gone, False) if self._now_ns < gone < until else (until, is_bound)
                elif _says_no_end(running.wanted):
                    until, is_bound = math.inf, False
                title = held.running.wanted.title
                holder = DeviceHolder(
                    title=title,
                    count=held.count,
                    until_ns=None if math.isinf(until) else int(until),
                    is_bound=is_bound,
                    is_leaving=running.is_leaving,
                    asked_ns=asked.get(running.wanted.run_id),
                    likely_ns=math.ceil(likely) if is_bound and self._now_ns < likely < until - _SOON_NS else None,
                    node=where.node.name if self._is_several else "",
                )
                found.append(((until, -held.count, title), holder))
        return tuple(holder for _, holder in sorted(found, key=lambda entry: entry[0])[:HOLDERS_MAX])

    def _asked(self, row: tuple[NodeDevices, str], lacking: int) -> dict[str, int]:
        """Return the preemption times of the runs on a node, or an empty result if these runs are not enough."""
        where, name = row
        asked: dict[str, int] = {}
        for held in sorted(where.runs.get(name, {}).values(), key=lambda held: held.running.since_ns):
            at_ns = may_ask(self._wanted, held.running, where.node, self._floor.terms)
            if at_ns is not None and at_ns > self._now_ns and lacking > 0:
                asked[held.running.wanted.run_id] = at_ns
                lacking -= held.count
        return asked if lacking <= 0 else {}

    def _closed(self, place: int) -> Wait:
        """Return the wait of a run whose nodes are all unavailable or restricted to their owners."""
        wanted, count = self._wanted, self._ask.shape.gpus
        away, closed = [], []
        for where, types, _ in self._floor.reach(self._ask.shape).places():
            for name in types:
                if not 0 < (count or 1) <= where.node.total[name] and not self._is_several:
                    continue
                if where.node.away:
                    away.append(f"{where.node.name} {where.node.away}")
                elif not gang_placement.is_usable(self._floor, wanted, self._ask, (where, name), self._now_ns):
                    closed.append((where.node.turns_ns or math.inf, *where.entry[:2], where, name))
        if not closed:
            words = "; ".join(first_few(sorted(set(away))))
            return Wait(
                run_id=wanted.run_id,
                reason=WaitReason.AWAY,
                count=count or 0,
                whole=count is None,
                gpu_type=wanted.gpu_type or "",
                one_node=not self._is_several,
                place=place,
                words=words,
            )
        *_, where, name = min(closed, key=lambda entry: entry[:3])
        words = _claimed(where, wanted, self._floor)
        if words:
            return msgspec.structs.replace(
                self._there(where, name, WaitReason.RESERVED, where.free[name]),
                holders=self._holders([(where, name)]),
                place=place,
                words=words,
            )
        spare_s, words = self._before_turn(where, name) if where.node.shared else (0.0, "")
        return msgspec.structs.replace(
            self._there(where, name, WaitReason.CALENDAR, where.free[name] if where.node.shared else 0),
            owner=where.node.owner,
            turns_ns=where.node.turns_ns,
            spare_s=spare_s,
            place=place,
            words=words,
        )

    def _before_turn(self, where: NodeDevices, gpu_type: str) -> tuple[float, str]:
        """Return the longest time limit that ends before a node's calendar changes, or 0 with an explanation."""
        turns_ns = where.node.turns_ns
        if turns_ns is None:
            return 0.0, ""
        left_s = ((turns_ns - self._now_ns) / 1e9 - self._wanted.beyond_s) // 60 * 60
        if left_s < 60:
            beyond = format_duration_ms(round(self._wanted.beyond_s * 1000))
            return 0.0, f"in addition to its time limit, a run needs {beyond} to start and to stop"
        needed = self._ask.shape.needs(where.node, gpu_type)
        return (left_s, "") if where.free[gpu_type] >= needed else (0.0, "")

    def _several(self, place: int) -> Wait:
        """Return the wait of a gang on several nodes."""
        chosen = self._chosen()
        if not chosen:
            return self._closed(place)
        lacks = [(where, name) for where, name, count in chosen if where.free[name] < count]
        kept = (self._keeper(where, name) for where, name, _ in chosen if where.free[name])
        ahead = next((title for title in kept if title), "")
        at_ns, is_bound, likely_ns = self._promised()
        kept_ns, spare_s = self._spare(chosen)
        return Wait(
            run_id=self._wanted.run_id,
            reason=self._reason(ahead, enough=not lacks),
            count=self._ask.shape.gpus or 0,
            gpu_type=self._wanted.gpu_type or chosen[0][1],
            one_node=False,
            nodes=tuple(
                GangPart(node=where.node.name, count=count, free=where.free[name]) for where, name, count in chosen
            ),
            free=sum(where.free[name] for where, name, _ in chosen),
            outside=sum(where.node.outside.get(name, 0) for where, name in lacks),
            holders=self._holders(lacks) if lacks else (),
            ahead=ahead,
            kept_ns=kept_ns,
            spare_s=spare_s,
            place=place,
            at_ns=at_ns,
            is_bound=is_bound,
            words="; ".join(first_few([where.node.left_out for where, _ in lacks if where.node.left_out])),
            likely_ns=likely_ns,
        )

    def _chosen(self) -> Chosen:
        """Return the devices that explain the wait of a gang on several nodes.

        The method prefers nodes with enough devices held for other runs. The next choices are the reserved devices and
        the nodes with the fewest missing devices. If quarantine or use outside of the server leaves too few devices,
        the method returns all usable nodes. If some nodes are currently closed to the gang, the method returns an empty
        list.
        """
        seeker = ReservationSearch(self._floor, self._wanted, self._ask, self._now_ns)
        found = seeker.nearest(kept=True)
        if found is not None and found[0] == 0 and self._wanted.run_id not in self._state.clearing:
            return found[1]
        shares = self._reservation.shares if self._reservation is not None else ()
        if shares and all(share.node_id in self._floor.places for share in shares):
            return [(self._floor.places[share.node_id], share.gpu_type, share.count) for share in shares]
        found = seeker.nearest()
        if found is not None:
            return found[1]
        rows = list(gang_placement.usable(self._floor, self._wanted, self._ask, self._now_ns))
        is_all = len(rows) == sum(len(types) for _, types, _ in self._floor.reach(self._ask.shape).places())
        return [(where, name, where.node.total[name]) for where, name in rows] if is_all else []


def _part(where: NodeDevices, gpu_type: str, count: int) -> GangPart:
    return GangPart(node=where.node.name, count=count, free=where.free[gpu_type])


def _claimed(where: NodeDevices, wanted: QueuedRun, capacity: Capacity) -> str:
    """Return a message about the owner or pool that excludes a guest run from a node, or ""."""
    node = where.node
    if standing(wanted, node, capacity.terms) <= where.group.claim:
        return ""
    if node.owner_first and node.owner and wanted.owner != node.owner:
        return f"{node.name} belongs to {node.owner}, whose waiting runs have priority"
    return f"pool {node.pool!r} lends no devices while its own runs wait"
