"""Backfill: where a blocked gang will start, and what is promised to it or kept for it until then.

    promise   it is known when those who are there leave: the node, or nodes, that likely have enough first
              told as a latest time (`is_bound`) ─▶ it stays over passes, wherever the order of the queue has moved:
              `again`; no run of its class or a lower one makes it later. A higher class may: then it is promised again
    suppose   unknown: the same by a guess; it moves when the guess was wrong, and no time is shown
    keep      whatever gets free where it lacks the fewest devices

Everything is entered in books of nodes (`availability_timeline.py`), which last for a pass.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import islice

import msgspec

from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.capacity import Capacity, NodeDevices, NodeGroup, PartReady
from serverless_gpu.model.scheduling.duration_estimates import Medians, over_after_s
from serverless_gpu.model.scheduling.gang_placement import Kind, are_one, is_several, is_usable, unkept, usable
from serverless_gpu.model.scheduling.preemption import may_use
from serverless_gpu.model.scheduling.request_shapes import TimedShape
from serverless_gpu.model.scheduling.values import BEST_EFFORT, DeviceShare, QueuedRun, Reservation, RunningRun

Ready = tuple[float, float, str, str, NodeDevices, str, int]
"""When devices of a node are free, likely and at the latest; its name and identifier; the node, the type, how many."""
Need = tuple[NodeDevices, str, int, float, float]
"""A node, a type, how many; when that many are free there: likely, and at the latest."""
_ROUNDS_MAX = 16
_TURNS_MAX = 4
"""So many times it looks for nodes that do not change hands before it would be over."""
_SLACK_NS = 60e9
"""A promise that slips by less holds: who starts before it does so at the next pass, a little after they could."""
_Row = tuple[int, str, str, NodeDevices]
Chosen = list[tuple[NodeDevices, str, int]]
"""Nodes, types, how many."""


class ReservationSearch:
    """Looks for where a blocked gang will start; `by_guess` where it is unknown when others leave."""

    def __init__(
        self, capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, *, by_guess: bool = False
    ) -> None:
        self._floor, self._wanted, self._ask, self._now_ns = capacity, wanted, ask, now_ns
        self._by_guess = by_guess
        self._count = ask.shape.gpus
        self._likely_ns, self._limit_ns = ask.spans(wanted)
        self._is_several = is_several(capacity, wanted, ask)
        self._closing: set[int] = set()  # groups of nodes that change hands before it would be over

    # --- promises ---

    def promise(self) -> Reservation | None:
        """Promise it the devices that it likely has first; None where the time is unknown."""
        for _ in range(_TURNS_MAX):
            needs = self._needs()
            if not needs or math.isinf(max(need[3] for need in needs)):
                return None
            likely, bound = self._together(needs)
            if math.isinf(likely):
                return None
            closing = self._closes(needs, likely if self._by_guess or math.isinf(bound) else bound)
            if not closing:
                break
            self._closing |= closing
        else:
            return None
        self._enter(needs, likely, bound)
        is_bound = not self._by_guess and not math.isinf(bound)
        at_ns = None if self._by_guess else math.ceil(bound if is_bound else likely)
        return Reservation(
            run_id=self._wanted.run_id,
            shares=tuple(
                DeviceShare(node_id=where.node.id, gpu_type=name, count=count) for where, name, count, *_ in needs
            ),
            at_ns=at_ns,
            is_bound=is_bound,
            likely_ns=_learned(likely, at_ns) if is_bound else None,
        )

    def _closes(self, needs: list[Need], at: float) -> set[int]:
        """Return groups of nodes that the gang may use now, and no longer when it would start there."""
        groups = {id(need[0].group): need[0].group for need in needs if not need[0].group.is_plain}
        return {
            key
            for key, group in groups.items()
            if not may_use(self._wanted, group.sample, self._floor.terms, math.ceil(at))
        }

    def may_have(self, shares: tuple[DeviceShare, ...]) -> bool:
        """Return whether devices that were promised are still what it wants and may have."""
        for share in shares:
            where = self._floor.places.get(share.node_id)
            if where is None or not self._is_usable(where, share.gpu_type):
                return False
            if share.count > where.node.total[share.gpu_type] - where.node.outside.get(share.gpu_type, 0):
                return False
        enough = self._count is None or sum(share.count for share in shares) == self._count
        return enough and are_one(self._floor, shares)

    def is_away(self, shares: tuple[DeviceShare, ...]) -> bool:
        """Return whether a node is away that devices were promised on."""
        places = self._floor.places
        return any(share.node_id in places and places[share.node_id].node.away for share in shares)

    def again(self, promised: Reservation) -> Reservation | None:
        """Promise it again what it was promised in an earlier pass, for no later; None where that cannot be."""
        if not self.may_have(promised.shares):
            return None
        rows = [(self._floor.places[share.node_id], share.gpu_type, share.count) for share in promised.shares]
        needs = [(*row, *self.when(*row)) for row in rows]
        likely, bound = self._together(needs)
        told = math.inf if promised.at_ns is None else promised.at_ns
        if bound > max(told, self._now_ns + OVERDUE_NS) + _SLACK_NS:
            return None  # a run of a higher class took some of it
        self._enter(needs, min(likely, bound), bound)
        at_ns = math.ceil(min(told, bound))
        return msgspec.structs.replace(promised, at_ns=at_ns, likely_ns=_learned(likely, at_ns))

    def _enter(self, needs: list[Need], likely: float, bound: float) -> None:
        run_id = self._wanted.run_id
        for where, name, count, *_ in needs:
            book = self._floor.book(where, name, self._now_ns)
            if self._by_guess:
                self._floor.guess(where, name, self._now_ns)
                book.suppose(run_id, count, (likely, math.inf))
                continue
            until = None if math.isinf(bound) else (bound, bound + self._limit_ns)
            book.promise(run_id, count, (likely, likely + self._likely_ns), until)

    def _together(self, needs: list[Need]) -> tuple[float, float]:
        """Return when all nodes of a gang have enough at once: what one of them has before may be promised after."""
        likely, bound = max(need[3] for need in needs), max(need[4] for need in needs)
        for _ in range(_ROUNDS_MAX if len(needs) > 1 else 0):
            found = [self.when(*need[:3], (likely, bound)) for need in needs]
            last = (likely, bound)
            likely, bound = max(at for at, _ in found), max(at for _, at in found)
            if (likely, bound) == last:
                return last
        return (likely, bound) if len(needs) == 1 else (math.inf, math.inf)

    def when(
        self, where: NodeDevices, gpu_type: str, count: int, after: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[float, float]:
        """Return when so many devices of a node are free beside what is promised: likely, and at the latest."""
        book = self._floor.books.get((where.node.id, gpu_type))
        if self._by_guess and book is None:
            return max(after[0], where.guessed(gpu_type, count, self._now_ns, self._floor.medians)[0]), math.inf
        if self._by_guess:
            at = self._floor.guess(where, gpu_type, self._now_ns).earliest(count, math.inf, after[0])
            return at, math.inf
        if book is None:
            likely, bound, _ = where.ready(gpu_type, count, self._now_ns)
            return max(likely, after[0]), max(bound, after[1])
        likely = book.likely.earliest(count, self._likely_ns, after[0])
        return likely, book.bound.earliest(count, self._limit_ns, after[1])

    # --- where ---

    def _needs(self) -> list[Need]:
        """Return where it likely starts first: one node, or as many as it takes."""
        if self._is_several:
            kinds = {(group.sample.pool, name) for group, name in self._groups() if group.sample.crews}
            kinds |= {(where.node.pool, name) for where, name in self._beside() if where.node.crews}
            ways = [way for kind in sorted(kinds) if (way := self._soonest(kind)) is not None]
            return min(ways, key=lambda way: way[0])[1] if ways else []
        options: list[Ready] = []
        for group, name in self._groups():
            rows = self._of_group(group, name, self._count)
            options += [(*row[:2], *row[3:], name, self._needed(row[5], name)) for row in islice(rows, 1)]
        for where, name in self._beside():
            needed = self._needed(where, name)
            if 0 < needed <= where.node.total[name]:
                options.append((*self.when(where, name, needed), *where.entry, name, needed))
        if options and not math.isinf(min(options)[0]):
            likely, bound, _, _, where, name, needed = min(options)
            return [(where, name, needed, likely, bound)]
        return []

    def _groups(self) -> Iterator[tuple[NodeGroup, str]]:
        """Yield groups of nodes, and types, that it may use now."""
        capacity, wanted = self._floor, self._wanted
        for group, types, pool in capacity.reach(self._ask.shape).entries:
            if id(group) not in self._closing and group.rank(capacity.terms, wanted, pool, self._now_ns) is not None:
                for name in types:
                    yield group, name

    def _beside(self) -> Iterator[tuple[NodeDevices, str]]:
        """Yield nodes and types that it may use now, and that are in no order: on their own, or something is kept."""
        books, places = self._floor.books, self._floor.places
        singles = self._floor.reach(self._ask.shape).singles
        for where, types, _ in singles.values():
            for name in types:
                if (where.node.id, name) not in books and self._is_usable(where, name):
                    yield where, name
        groups = {(id(group), name) for group, name in self._groups()}
        for node_id, name in books:
            where = places[node_id]
            if node_id in singles:
                is_usable = self._is_usable(where, name)
            else:
                is_usable = (id(where.group), name) in groups and not where.node.away
            if is_usable:
                yield where, name

    def _of_group(
        self, group: NodeGroup, gpu_type: str, count: int | None, *, is_part: bool = False
    ) -> Iterator[PartReady]:
        """Yield a group's nodes without kept devices, in the order in which so many devices are free.

        `count` None means a whole node, and 0 for a part of a gang all that the node has to give.
        """
        capacity, now_ns, by_guess = self._floor, self._now_ns, self._by_guess
        medians = capacity.medians

        def look(where: NodeDevices, at_ns: int) -> tuple[PartReady | None, float]:
            there = where.usable(gpu_type) if is_part else where.node.total[gpu_type]
            number = count or there
            if where.node.away or not 0 < number <= there:
                return None, math.inf
            if by_guess:
                likely, bound, expires_ns = where.guessed(gpu_type, number, at_ns, medians)
            else:
                likely, bound, expires_ns = where.ready(gpu_type, number, at_ns)
            if math.isinf(likely):
                return None, expires_ns
            if where.free[gpu_type] >= number:
                likely, bound = 0.0, min(bound, 0.0) if not by_guess else bound
            left = 0 if not is_part else there - count if count else -there
            return (likely, bound, left, *where.entry), expires_ns

        for likely, bound, left, name, node_id, where in group.rows(gpu_type, (count, is_part, by_guess), look, now_ns):
            if (node_id, gpu_type) not in capacity.books:
                yield max(likely, now_ns), max(bound, now_ns), left, name, node_id, where

    def _soonest(self, kind: Kind) -> tuple[tuple[float, int], list[Need]] | None:
        """Return the whole nodes of a pool and type that it likely has first, and one part; when, and how many nodes.

        Each whole node more makes the part smaller, and is had later: the part is looked for at each step.
        """
        left, whole = self._count or 0, self._floor.reach(self._ask.shape).whole
        needs = list[Need]()
        best: tuple[tuple[float, int], list[Need]] | None = None
        is_looked_at = False
        for likely, bound, *_, where in self._merged(kind, 0):
            if (best is not None and likely >= best[0][0]) or len(needs) == NODES_MAX:
                break
            if left < whole and not is_looked_at:
                best, is_looked_at = _sooner(best, self._with_part(kind, needs, left)), True
            size = where.usable(kind[1])
            if size > left:
                continue
            needs.append((where, kind[1], size, likely, bound))
            left, is_looked_at = left - size, False
            if not left:
                return _sooner(best, needs)
        if left < whole and not is_looked_at:
            best = _sooner(best, self._with_part(kind, needs, left))
        return best

    def _with_part(self, kind: Kind, needs: list[Need], count: int) -> list[Need]:
        """Return whole nodes and the part that is had first beside them; nothing without any."""
        taken = {need[0].node.id for need in needs}
        for likely, bound, _, _, node_id, where in self._merged(kind, count):
            if node_id not in taken:
                return [*needs, (where, kind[1], count, likely, bound)] if len(needs) < NODES_MAX else []
        return []

    def _merged(self, kind: Kind, count: int) -> Iterator[PartReady]:
        """Yield nodes in the order in which so many devices are free; 0 for all that a node has to give."""
        pool, gpu_type = kind
        beside = list[PartReady]()
        for where, name in self._beside():
            if name == gpu_type and where.node.pool == pool and where.node.crews:
                row = self._row(where, name, count)
                beside += [row] if row is not None else []
        groups = [
            self._of_group(group, name, count, is_part=True)
            for group, name in self._groups()
            if name == gpu_type and group.sample.pool == pool and group.sample.crews
        ]
        return heapq.merge(*groups, sorted(beside))

    def _row(self, where: NodeDevices, gpu_type: str, count: int) -> PartReady | None:
        """Return when so many devices of a node are free, large nodes first, or those with the least left over."""
        there = where.usable(gpu_type)
        number = count or there
        if not 0 < number <= there:
            return None
        likely, bound = self.when(where, gpu_type, number)
        if math.isinf(likely):
            return None
        return (likely, bound, there - count if count else -there, *where.entry)

    # --- what gets free ---

    def keep(self, nearly: float) -> Reservation | None:
        """Keep devices for it as they get free, where it lacks the fewest.

        `nearly` is the part of its devices that has to be free already.
        """
        if nearly > 0 and self._count is not None and not self._is_near(nearly * self._count):
            return None
        found = self.nearest() if self._is_several else self._nearest()
        if found is None:
            return None
        lacking, chosen = found
        whole = sum(number for _, _, number in chosen)
        if whole - lacking < nearly * whole:
            return None
        for where, name, number in chosen:
            self._floor.book(where, name, self._now_ns).keep(self._wanted.run_id, number, self._now_ns)
        shares = tuple(
            DeviceShare(node_id=where.node.id, gpu_type=name, count=number) for where, name, number in chosen
        )
        return Reservation(run_id=self._wanted.run_id, shares=shares, at_ns=None, is_bound=False)

    def _nearest(self) -> tuple[int, Chosen] | None:
        """Return how many devices it lacks on the node where it lacks the fewest, and that node."""
        rows: dict[str, list[_Row]] = {}
        for where, name in self._candidates():
            needed = self._needed(where, name)
            if 0 < needed <= where.node.total[name]:
                rows.setdefault(name, []).append((max(0, needed - unkept(self._floor, where, name)), *where.entry))
        if not rows:
            return None
        lacking, gpu_type, _, _, where = min((row[0], name, *row[1:]) for name, some in rows.items() for row in some)
        return lacking, [(where, gpu_type, self._needed(where, gpu_type))]

    def nearest(self, *, kept: bool = False) -> tuple[int, Chosen] | None:
        """Return how many devices a gang on several nodes lacks where it lacks the fewest, and these nodes.

        Those with the most free devices first; the part is the last one. None where there are not enough, free or not.
        """
        rows: dict[Kind, list[_Row]] = {}
        for where, name in self._usable():
            if where.node.crews and where.usable(name) > 0:
                free = -where.free[name] if kept else -unkept(self._floor, where, name)
                rows.setdefault((where.node.pool, name), []).append((free, *where.entry))
        options: list[tuple[int, int, Chosen]] = []
        for (_, name), row in sorted(rows.items()):
            left, lacks = self._count or 0, 0
            chosen: Chosen = []
            for free, _, _, where in heapq.nsmallest(NODES_MAX, row):
                number = min(left, where.usable(name))
                chosen.append((where, name, number))
                lacks += max(0, number + free)
                left -= number
                if not left:
                    options.append((lacks, len(chosen), chosen))
                    break
        if not options:
            return None
        lacking, _, chosen = min(options, key=lambda option: option[:2])
        return lacking, chosen

    def _candidates(self) -> Iterator[tuple[NodeDevices, str]]:
        """Yield nodes among which is the one that lacks the fewest devices: of a group the one with the most free."""
        capacity, shape = self._floor, self._ask.shape
        reach = capacity.reach(shape)
        if self._count is None or reach.is_lent or reach.singles or not capacity.is_plain:
            yield from self._usable()
            return
        for group, types, _ in reach.entries:
            for name in types:
                fits = (place for _, place in group.index[name].most() if place.node.total[name] >= self._count)
                found = next(fits, None) or group.first(name, self._count, capacity.books)
                if found is not None:
                    yield found, name
        for node_id, name in capacity.books:
            if self._is_usable(capacity.places[node_id], name):
                yield capacity.places[node_id], name

    def _is_near(self, count: float) -> bool:
        """Return whether so many devices may be free where it could be; a quick look, before nodes are compared."""
        reach = self._floor.reach(self._ask.shape)
        indexes = [group.index[name] for group, types, _ in reach.entries for name in types]
        most = [where.free[name] for where, types, _ in reach.singles.values() for name in types]
        most += [self._floor.places[node_id].free[name] for node_id, name in self._floor.books]
        if self._is_several:
            return sum(most) + sum(index.free for index in indexes) >= count
        return max(most + [index.counts[-1] for index in indexes if index.counts], default=0) >= count

    def _needed(self, where: NodeDevices, gpu_type: str) -> int:
        return where.node.total[gpu_type] if self._count is None else self._count

    def _usable(self) -> Iterator[tuple[NodeDevices, str]]:
        found = usable(self._floor, self._wanted, self._ask, self._now_ns)
        if self._closing:
            return ((where, name) for where, name in found if id(where.group) not in self._closing)
        return found

    def _is_usable(self, where: NodeDevices, gpu_type: str) -> bool:
        is_closing = id(where.group) in self._closing
        return not is_closing and is_usable(self._floor, self._wanted, self._ask, (where, gpu_type), self._now_ns)


def _sooner(
    best: tuple[tuple[float, int], list[Need]] | None, needs: list[Need]
) -> tuple[tuple[float, int], list[Need]] | None:
    """Return what is had sooner, of those alike what has fewer nodes."""
    if not needs:
        return best
    found = (max(need[3] for need in needs), len(needs)), needs
    return found if best is None or found[0] < best[0] else best


def _learned(likely: float, at_ns: int | None) -> int | None:
    """Return when devices are likely free, where that is clearly before the latest time."""
    return math.ceil(likely) if at_ns is not None and likely < at_ns - _SLACK_NS else None


class DeviceTimeline:
    """What is free of one type on one node, now and later.

    now: the time. free: devices that are free now. releases: when how many more become free; those that nobody can say
    are not among them.
    """

    def __init__(self, now: int, free: int, releases: Iterable[tuple[float, int]]) -> None:
        self._now, self._free = now, free
        self._releases = sorted(releases)
        self._bookings: list[tuple[float, float, int, str]] = []
        self._earliest: dict[tuple[int, float, float], float] = {}

    def free(self, but: str = "") -> int:
        """Return what is free now beside the bookings that hold from now on; less than 0 when more is waited for.

        Bookings of the run `but` do not count. Negative when more devices are awaited.
        """
        return self._free - sum(
            count for start, _, count, whose in self._bookings if start <= self._now and whose != but
        )

    def fits(self, count: int, end: float) -> bool:
        """Return whether devices can be had now and until `end` without taking any from a booking."""
        if count > self.free():
            return False
        starts = (start for start, *_ in self._bookings if self._now < start < end)
        return all(self._at(start) >= count for start in starts)

    def most(self, end: float, but: str) -> int:
        """Return how many devices can be had now and until `end` without taking any from a booking of another run."""
        starts = (start for start, _, _, whose in self._bookings if self._now < start < end and whose != but)
        return min([self.free(but), *(self._at(start, but) for start in starts)])

    def until(self, count: int) -> float:
        """Return until when devices can be had from now on: the first booking that they would be missing from."""
        if count > self.free():
            return self._now
        starts = sorted(start for start, *_ in self._bookings if start > self._now)
        return next((start for start in starts if self._at(start) < count), math.inf)

    def take(self, count: int, end: float) -> None:
        """Note that a run has devices from now until `end`, infinite where unknown."""
        self._free -= count
        self._earliest.clear()
        if not math.isinf(end):
            insort(self._releases, (end, count))

    def like(self, other: DeviceTimeline) -> DeviceTimeline:
        """Return itself, with what is promised in another one."""
        self._bookings = list(other._bookings)
        self._earliest.clear()
        return self

    def book(self, run_id: str, count: int, span: tuple[float, float]) -> None:
        """Promise devices to a run for a time."""
        self._bookings.append((*span, count, run_id))
        self._earliest.clear()

    def earliest(self, count: int, length: float, after: float = 0.0) -> float:
        """Return when so many are free for so long for the first time after a time; infinite where unknown."""
        asked = (count, length, after)
        if asked not in self._earliest:
            self._earliest[asked] = self._found(*asked)
        return self._earliest[asked]

    def _found(self, count: int, length: float, after: float) -> float:
        steps = [(at, number) for at, number in self._releases if at > self._now]
        free = self._free + sum(number for at, number in self._releases if at <= self._now)
        for start, end, number, _ in self._bookings:
            steps.append((max(start, self._now), -number))
            if not math.isinf(end):
                steps.append((end, number))
        steps.sort()
        begun: float | None = None
        at: float = self._now
        for index in range(len(steps) + 1):
            until = steps[index][0] if index < len(steps) else math.inf
            if until > at:  # all that changes at one time was added up
                if free < count:
                    begun = None
                elif begun is None:
                    begun = max(at, after)
                if begun is not None and until >= begun + length:
                    return begun
            if index < len(steps):
                at, change = steps[index]
                free += change
        return math.inf if begun is None else begun

    def _at(self, time: float, but: str = "") -> int:
        free = self._free + sum(count for at, count in self._releases if at <= time)
        return free - sum(count for start, end, count, whose in self._bookings if start <= time < end and whose != but)


class PromiseBook:
    """Promised devices of one type on one node."""

    def __init__(self, likely: DeviceTimeline, bound: DeviceTimeline) -> None:
        # `bound`: by when they end at the latest.
        # `likely`: by when runs likely end.
        self.likely, self.bound = likely, bound
        # By when they end by a guess, where a run is promised something by that.
        self.guess: DeviceTimeline | None = None
        # Identifiers of the runs that are promised something, in their order, and how much.
        self.names: list[tuple[str, int]] = []

    def fits(self, count: int, ends: Ends) -> bool:
        """Return whether a run can have devices now without making anybody wait who was promised some."""
        likely, bound, guess = ends
        if not (self.likely.fits(count, likely) and self.bound.fits(count, bound)):
            return False
        return self.guess is None or self.guess.fits(count, guess)

    def most(self, ends: Ends, but: str) -> int:
        """Return how many devices a run can have now without making anybody wait who was promised some.

        Its own booking (`but`) does not count.
        """
        return min(profile.most(end, but) for profile, end in zip(self._profiles(), ends, strict=False))

    def take(self, count: int, ends: Ends) -> None:
        """Note that a run got devices now."""
        for profile, end in zip(self._profiles(), ends, strict=False):
            profile.take(count, end)

    def keep(self, run_id: str, count: int, now: int) -> None:
        """Hold devices for a run from now on, whenever they get free."""
        for profile in self._profiles():
            profile.book(run_id, count, (now, math.inf))
        self.names.append((run_id, count))

    def promise(self, run_id: str, count: int, likely: tuple[float, float], bound: tuple[float, float] | None) -> None:
        """Promise devices to a run. `bound` is None where the end is unknown."""
        self.likely.book(run_id, count, likely)
        if self.guess is not None:
            self.guess.book(run_id, count, likely)
        if bound is not None:
            self.bound.book(run_id, count, bound)
        self.names.append((run_id, count))

    def suppose(self, run_id: str, count: int, guess: tuple[float, float]) -> None:
        """Promise devices to a run by a guess: `guess` is there already."""
        if self.guess is not None:
            self.guess.book(run_id, count, guess)
        self.names.append((run_id, count))

    def _profiles(self) -> tuple[DeviceTimeline, ...]:
        return (self.likely, self.bound) if self.guess is None else (self.likely, self.bound, self.guess)


Ends = tuple[float, float, float]
"""When a run is over: likely, at the latest, by a guess; infinite where unknown."""


_S = 1_000_000_000
OVERDUE_NS = 60 * _S
"""What is over its own limit is being stopped: it counts as gone after that."""


class HeldDevices:
    """Devices of one type that a run has on a node."""

    __slots__ = ("_guess_ns", "bound_ns", "count", "likely_ns", "running", "size")

    def __init__(self, running: RunningRun, count: int) -> None:
        # `count`: how many.
        self.running, self.count = running, count
        self.size = sum(share.count for share in running.shares)  # how many it has altogether
        # `bound_ns`: when at the latest; the same.
        # `likely_ns`: when it gives them back, likely; infinite where unknown.
        self.likely_ns, self.bound_ns = ends(running)
        self._guess_ns = 0.0

    def guess(self, now_ns: int, medians: Medians) -> float:
        """Return when it likely gives them back; where unknown, by what others of its size did."""
        if not math.isinf(self.likely_ns):
            return self.until(now_ns)[0]
        if self._guess_ns <= now_ns:
            since_ns = self.running.since_ns
            after_s = medians.over_after_s(self.size, (now_ns - since_ns) / _S)
            self._guess_ns = max(since_ns + after_s * _S, now_ns + 1)
        return self._guess_ns

    def until(self, now_ns: int) -> tuple[float, float]:
        """Return likely and latest end, as it looks now: who has run for longer than was likely may run much longer."""
        bound = self.bound_ns if self.bound_ns > now_ns else now_ns + OVERDUE_NS
        if self.likely_ns > now_ns:
            return min(self.likely_ns, bound), bound
        since_ns, wanted = self.running.since_ns, self.running.wanted
        after_s, _ = over_after_s((now_ns - since_ns) / _S, expected_s=wanted.expected_s, limit_s=wanted.limit_s)
        likely = math.inf if after_s is None else since_ns + after_s * _S
        return (min(likely, bound) if likely > now_ns else bound), bound


def ends(running: RunningRun) -> tuple[float, float]:
    """Return when a run likely gives its devices back, and when at the latest; infinite where unknown."""
    wanted = running.wanted
    bound = math.inf if wanted.limit_s is None else running.since_ns + wanted.limit_s * _S
    likely = math.inf if wanted.expected_s is None else running.since_ns + wanted.expected_s * _S
    return min(likely, bound), bound


class Leavers:
    """Devices of runs that may be stopped and go on later, and of those that are leaving already."""

    def __init__(self) -> None:
        # By node and type: of each class, and at last of those that are leaving; no entry without any.
        self.counts: dict[tuple[str, str], list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self.counts)

    def count(self, running: RunningRun, share: DeviceShare, number: int) -> None:
        """Take note that a run has so many devices more, or less."""
        if not (running.wanted.preemptible or running.is_leaving):
            return
        key = (share.node_id, share.gpu_type)
        counts = self.counts.setdefault(key, [0] * (BEST_EFFORT + 2))
        counts[-1 if running.is_leaving else min(running.wanted.priority, BEST_EFFORT)] += number
        if not any(counts):
            del self.counts[key]

    def leaving(self, node_id: str, gpu_type: str) -> int:
        """Return how many devices of a node runs have that are leaving already."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else counts[-1]

    def most(self, node_id: str, gpu_type: str, above: int) -> int:
        """Return how many devices of a node could get free at most."""
        counts = self.counts.get((node_id, gpu_type))
        return 0 if counts is None else sum(counts[above + 1 :])
