"""Backfill: plans the later start of a blocked gang, and reserves or holds devices for the gang.

    promise   The release times of the devices are known: reserve the nodes that likely have enough devices first.
              A latest time (`is_bound`) stays valid over passes, whatever the order of the queue (`again`). Runs of the
              gang's class or lower do not delay the gang. A higher class may; the gang then gets a new reservation.
    suppose   The release times are unknown: reserve by a guess. A wrong guess moves the reservation. The scheduler
              shows no time.
    keep      Hold devices as they become free, on the nodes where the gang lacks the fewest devices.

The scheduler stores each reservation in the node's `PromiseBook` (`availability_timeline.py`), which is valid for one
pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice

import msgspec

from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.availability_timeline import OVERDUE_NS
from serverless_gpu.model.scheduling.capacity import Capacity, NodeDevices, NodeGroup, PartReady
from serverless_gpu.model.scheduling.gang_placement import Kind, are_one, is_several, is_usable, unkept, usable
from serverless_gpu.model.scheduling.preemption import may_use
from serverless_gpu.model.scheduling.values import DeviceShare, QueuedRun, Reservation, TimedShape

Ready = tuple[float, float, str, str, NodeDevices, str, int]
"""Sort row of a node: likely and latest release time, node name and id, node, device type and count."""
Need = tuple[NodeDevices, str, int, float, float]
"""A node, a device type and a device count, with the likely and latest time at which the devices are free."""
_ROUNDS_MAX = 16
_TURNS_MAX = 4
"""Maximum number of searches for nodes that a gang may still use at its start time."""
_SLACK_NS = 60e9
"""Tolerated delay of a reservation in nanoseconds, because a run may start one pass late."""
_Row = tuple[int, str, str, NodeDevices]
Chosen = list[tuple[NodeDevices, str, int]]
"""Device allocations: nodes, types and numbers of devices."""


class ReservationSearch:
    """Finds devices and a start time for a blocked gang, from guessed ends of runs if `by_guess`."""

    def __init__(
        self, capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, *, by_guess: bool = False
    ) -> None:
        self._floor, self._wanted, self._ask, self._now_ns = capacity, wanted, ask, now_ns
        self._by_guess = by_guess
        self._count = ask.shape.gpus
        self._likely_ns, self._limit_ns = ask.spans(wanted)
        self._is_several = is_several(capacity, wanted, ask)
        self._closing: set[int] = set()  # Node groups that the gang may no longer use at its start time.

    # --- reservations ---

    def promise(self) -> Reservation | None:
        """Reserve the devices that likely become free first, or return None if the release times are unknown."""
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
        """Return node groups that the gang may use now but not at its start time."""
        groups = {id(need[0].group): need[0].group for need in needs if not need[0].group.is_plain}
        return {
            key
            for key, group in groups.items()
            if not may_use(self._wanted, group.sample, self._floor.terms, math.ceil(at))
        }

    def may_have(self, shares: tuple[DeviceShare, ...]) -> bool:
        """Return True if the gang may still use its reserved devices, and their number still fits."""
        for share in shares:
            where = self._floor.places.get(share.node_id)
            if where is None or not self._is_usable(where, share.gpu_type):
                return False
            if share.count > where.node.total[share.gpu_type] - where.node.outside.get(share.gpu_type, 0):
                return False
        enough = self._count is None or sum(share.count for share in shares) == self._count
        return enough and are_one(self._floor, shares)

    def is_away(self, shares: tuple[DeviceShare, ...]) -> bool:
        """Return True if a node with reserved devices is unavailable."""
        places = self._floor.places
        return any(share.node_id in places and places[share.node_id].node.away for share in shares)

    def again(self, promised: Reservation) -> Reservation | None:
        """Renew a reservation of an earlier pass, or return None if its devices become free too late."""
        if not self.may_have(promised.shares):
            return None
        rows = [(self._floor.places[share.node_id], share.gpu_type, share.count) for share in promised.shares]
        needs = [(*row, *self.when(*row)) for row in rows]
        likely, bound = self._together(needs)
        told = math.inf if promised.at_ns is None else promised.at_ns
        if bound > max(told, self._now_ns + OVERDUE_NS) + _SLACK_NS:
            return None  # A run of a higher priority class uses some of the reserved devices.
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
        """Return the earliest time at which all nodes of a gang have enough devices simultaneously.

        The search repeats, because a booking of another run may occupy early-free devices at the gang's start time.
        """
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
        """Return the likely and the latest time at which unreserved devices of a node are free."""
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

    # --- node selection ---

    def _needs(self) -> list[Need]:
        """Return the devices that allow the earliest likely start of the gang, on one or more nodes."""
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
        """Yield node groups that the gang may use now, with their device types."""
        capacity, wanted = self._floor, self._wanted
        for group, types, pool in capacity.reach(self._ask.shape).entries:
            if id(group) not in self._closing and group.rank(capacity.terms, wanted, pool, self._now_ns) is not None:
                for name in types:
                    yield group, name

    def _beside(self) -> Iterator[tuple[NodeDevices, str]]:
        """Yield usable nodes that the sorted groups omit: single nodes and nodes with reservations."""
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
        """Yield a group's nodes without reservations, by the time at which enough devices are free.

        A `count` of None requests a whole node. For a multi-node gang, 0 requests all usable devices of a node.
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
        """Return the whole nodes and partly used node of a pool and type with the earliest start.

        Each additional whole node is free later but leaves fewer devices for the partly used node. The search therefore
        looks for a partly used node after each added whole node.
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
        """Return the whole nodes with the earliest partly used node, or an empty list."""
        taken = {need[0].node.id for need in needs}
        for likely, bound, _, _, node_id, where in self._merged(kind, count):
            if node_id not in taken:
                return [*needs, (where, kind[1], count, likely, bound)] if len(needs) < NODES_MAX else []
        return []

    def _merged(self, kind: Kind, count: int) -> Iterator[PartReady]:
        """Yield nodes by the time at which `count` devices (0 for all devices) are free."""
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
        """Return the sort row of a node by the time at which `count` devices are free."""
        there = where.usable(gpu_type)
        number = count or there
        if not 0 < number <= there:
            return None
        likely, bound = self.when(where, gpu_type, number)
        if math.isinf(likely):
            return None
        return (likely, bound, there - count if count else -there, *where.entry)

    # --- held devices ---

    def keep(self, nearly: float) -> Reservation | None:
        """Hold released devices for the gang on the nodes with the fewest missing devices.

        `nearly` is the fraction of the gang's devices that must already be free.
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
        """Return the node that lacks the fewest devices for the gang, and the number of missing devices."""
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
        """Return the nodes with the fewest missing devices for a multi-node gang, and the missing number.

        The method sorts nodes by descending free devices, with the partly used node last. Returns None if the nodes'
        total devices, including busy devices, are too few.
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
        """Yield the node with the most free devices of each group, as a candidate for holding devices."""
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
        """Return False if the nodes clearly have fewer than `count` free devices."""
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
    """Return the device option with the earlier start time, or on a tie the option with fewer nodes."""
    if not needs:
        return best
    found = (max(need[3] for need in needs), len(needs)), needs
    return found if best is None or found[0] < best[0] else best


def _learned(likely: float, at_ns: int | None) -> int | None:
    """Return the likely start time if clearly before the latest start time, else None."""
    return math.ceil(likely) if at_ns is not None and likely < at_ns - _SLACK_NS else None
