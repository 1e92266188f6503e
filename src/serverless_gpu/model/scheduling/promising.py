"""Where a blocked gang will start, and what is promised to it or kept for it until then.

    promise   it is known when those who are there leave: the node, or nodes, that likely have enough first
              told as a latest time (`is_bound`) ─▶ it stays over passes, wherever the order of the queue has moved:
              `again`; nobody of its class or a lower one makes it later. A higher class may: then it is promised anew
    suppose   nobody can say: the same by a guess; it moves when the guess was wrong, and no time is told
    keep      whatever gets free where it lacks the fewest devices

Everything is entered in books of nodes (`reserving.py`), which last for a pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

import msgspec

from serverless_gpu.model.scheduling.floor import Floor
from serverless_gpu.model.scheduling.holding import OVERDUE_NS
from serverless_gpu.model.scheduling.places import Place, Ready
from serverless_gpu.model.scheduling.placing import is_usable, unkept, usable
from serverless_gpu.model.scheduling.shapes import Ask
from serverless_gpu.model.scheduling.values import Reservation, Share, Wanted

Need = tuple[Place, str, int, float, float]
"""A node, a type, how many; when that many are free there: likely, and at the latest."""
_ROUNDS_MAX = 16
_SLACK_NS = 60e9
"""A promise that slips by less holds: who starts before it does so when somebody looks, a little after they could."""
_Whole = tuple[float, float, str, str, Place]
_Row = tuple[int, str, str, Place]


class Seeker:
    """A gang that is blocked looks for where it will start.

    Args:
        floor: what there is.
        wanted: the run.
        ask: what it asks for.
        now_ns: the time.
        by_guess: whether it goes by a guess where nobody can say when somebody leaves.
    """

    def __init__(self, floor: Floor, wanted: Wanted, ask: Ask, now_ns: int, *, by_guess: bool = False) -> None:
        self._floor, self._wanted, self._ask, self._now_ns = floor, wanted, ask, now_ns
        self._by_guess = by_guess
        self._count = ask.shape.gpus
        self._likely_ns, self._limit_ns = ask.spans(wanted)

    # --- promises ---

    def promise(self) -> Reservation | None:
        """Promise it the devices that it likely has first; None where nobody can say when that is."""
        needs = self._needs()
        if not needs or math.isinf(max(need[3] for need in needs)):
            return None
        likely, bound = self._together(needs)
        if math.isinf(likely):
            return None
        self._enter(needs, likely, bound)
        is_bound = not self._by_guess and not math.isinf(bound)
        at_ns = None if self._by_guess else math.ceil(bound if is_bound else likely)
        return Reservation(run_id=self._wanted.run_id, shares=_shares(needs), at_ns=at_ns, is_bound=is_bound)

    def may_have(self, shares: tuple[Share, ...]) -> bool:
        """Return whether devices that were promised are still what it wants and may have."""
        for share in shares:
            where = self._floor.places.get(share.node_id)
            if where is None or not self._is_usable(where, share.gpu_type):
                return False
            if share.count > where.node.total[share.gpu_type] - where.node.outside.get(share.gpu_type, 0):
                return False
        return self._count is None or sum(share.count for share in shares) == self._count

    def is_away(self, shares: tuple[Share, ...]) -> bool:
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
            return None  # somebody of a higher class took some of it
        self._enter(needs, min(likely, bound), bound)
        return msgspec.structs.replace(promised, at_ns=math.ceil(min(told, bound)))

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
        self, where: Place, gpu_type: str, count: int, after: tuple[float, float] = (0.0, 0.0)
    ) -> tuple[float, float]:
        """Return when so many devices of a node are free beside what is promised: likely, and at the latest.

        Args:
            where: the node.
            gpu_type: the type.
            count: how many.
            after: not before that, likely and at the latest.
        """
        book = self._floor.books.get((where.node.id, gpu_type))
        if self._by_guess and book is None:
            return max(after[0], where.guessed(gpu_type, count, self._now_ns, self._floor.medians)), math.inf
        if self._by_guess:
            at = self._floor.guess(where, gpu_type, self._now_ns).earliest(count, math.inf, after[0])
            return at, math.inf
        if book is None:
            likely, bound = where.ready(gpu_type, count, self._now_ns)
            return max(likely, after[0]), max(bound, after[1])
        likely = book.likely.earliest(count, self._likely_ns, after[0])
        return likely, book.bound.earliest(count, self._limit_ns, after[1])

    # --- where ---

    def _needs(self) -> list[Need]:
        """Return where it likely starts first: one node, or as many as it takes."""
        rows = self._ready()
        while rows and (rows[0][3], rows[0][5]) in self._floor.books:
            heapq.heappop(rows)
        options = rows[:1]
        for node_id, name in self._floor.books:
            where = self._floor.places[node_id]
            needed = self._needed(where, name)
            if 0 < needed <= where.node.total[name] and self._is_usable(where, name):
                options.append((*self.when(where, name, needed), *where.entry, name, needed))
        if options and not math.isinf(min(options)[0]):
            likely, bound, _, _, where, name, needed = min(options)
            return [(where, name, needed, likely, bound)]
        is_large = self._ask.shape.several and (self._count or 0) > self._floor.reach(self._ask.shape).whole
        return self._needs_several() if is_large else []

    def _ready(self) -> list[Ready]:
        """Return a heap of when a shape's devices are free on nodes of which nothing was promised when it was made."""
        floor, key = self._floor, (self._ask.shape.number, self._by_guess)
        if floor.is_plain and not floor.reach(self._ask.shape).is_lent and key in floor.ready:
            return floor.ready[key]
        rows: list[Ready] = []
        for where, name in self._usable():
            needed = self._needed(where, name)
            if 0 < needed <= where.node.total[name] and (where.node.id, name) not in floor.books:
                likely, bound = self.when(where, name, needed)
                if not math.isinf(likely):
                    rows.append((likely, bound, *where.entry, name, needed))
        heapq.heapify(rows)
        floor.ready[key] = rows
        return rows

    def _needs_several(self) -> list[Need]:
        """Return the whole nodes that it likely has first, and one part, of one type."""
        options: list[list[Need]] = []
        for name, row in sorted(self._ready_whole().items()):
            left, needs = self._count or 0, list[Need]()
            for likely, bound, _, _, where in self._with_books(row, name):
                number = min(left, where.node.total[name])
                needs.append((where, name, number, likely, bound))
                left -= number
                if not left:
                    options.append(needs)
                    break
        return min(options, key=lambda needs: (max(need[3] for need in needs), len(needs)), default=[])

    def _ready_whole(self) -> dict[str, list[_Whole]]:
        """Return, by type, when whole nodes are free of which nothing was promised when that was worked out."""
        floor, key = self._floor, (self._ask.shape.number, self._by_guess)
        if floor.is_plain and not floor.reach(self._ask.shape).is_lent and key in floor.wholes:
            return floor.wholes[key]
        rows: dict[str, list[_Whole]] = {}
        for where, name in self._usable():
            if (where.node.id, name) not in floor.books:
                likely, bound = self.when(where, name, where.node.total[name])
                if not math.isinf(likely):
                    rows.setdefault(name, []).append((likely, bound, *where.entry))
        for row in rows.values():
            row.sort()
        floor.wholes[key] = rows
        return rows

    def _with_books(self, row: list[_Whole], gpu_type: str) -> Iterator[_Whole]:
        """Yield whole nodes in the order in which they are free: those of which something was promised, too."""
        floor, booked = self._floor, list[_Whole]()
        for node_id, name in floor.books:
            where = floor.places[node_id]
            if name == gpu_type and self._is_usable(where, name):
                likely, bound = self.when(where, name, where.node.total[name])
                if not math.isinf(likely):
                    booked.append((likely, bound, *where.entry))
        free = (entry for entry in row if (entry[3], gpu_type) not in floor.books)
        return heapq.merge(free, sorted(booked))

    # --- what gets free ---

    def keep(self, nearly: float) -> Reservation | None:
        """Keep devices for it as they get free, where it lacks the fewest.

        Args:
            nearly: part of its devices that has to be free already.
        """
        if nearly > 0 and self._count is not None and not self._is_near(nearly * self._count):
            return None
        rows: dict[str, list[_Row]] = {}
        for where, name in self._candidates():
            needed = self._needed(where, name)
            if needed > 0 and (self._ask.shape.several or needed <= where.node.total[name]):
                rows.setdefault(name, []).append((max(0, needed - unkept(self._floor, where, name)), *where.entry))
        options = [option for name, row in sorted(rows.items()) for option in self._nearest(name, row)]
        if not options:
            return None
        lacking, chosen = min(options, key=lambda option: option[0])
        whole = sum(number for _, _, number in chosen)
        if whole - lacking < nearly * whole:
            return None
        for where, name, number in chosen:
            self._floor.book(where, name, self._now_ns).keep(self._wanted.run_id, number, self._now_ns)
        shares = tuple(Share(node_id=where.node.id, gpu_type=name, count=number) for where, name, number in chosen)
        return Reservation(run_id=self._wanted.run_id, shares=shares, at_ns=None, is_bound=False)

    def _candidates(self) -> Iterator[tuple[Place, str]]:
        """Yield nodes among which is the one that lacks the fewest devices: of a group the one with the most free."""
        floor, shape = self._floor, self._ask.shape
        reach = floor.reach(shape)
        if self._count is None or shape.several or reach.is_lent or reach.singles or not floor.is_plain:
            yield from self._usable()
            return
        for group, types, _ in reach.entries:
            for name in types:
                fits = (place for _, place in group.index[name].most() if place.node.total[name] >= self._count)
                found = next(fits, None) or group.first(name, self._count, floor.books)
                if found is not None:
                    yield found, name
        for node_id, name in floor.books:
            if self._is_usable(floor.places[node_id], name):
                yield floor.places[node_id], name

    def _is_near(self, count: float) -> bool:
        """Return whether so many devices may be free where it could be; a quick look, before nodes are compared."""
        reach = self._floor.reach(self._ask.shape)
        indexes = [group.index[name] for group, types, _ in reach.entries for name in types]
        most = [where.free[name] for where, types, _ in reach.singles.values() for name in types]
        most += [self._floor.places[node_id].free[name] for node_id, name in self._floor.books]
        if self._ask.shape.several:
            return sum(most) + sum(index.free for index in indexes) >= count
        return max(most + [index.counts[-1] for index in indexes if index.counts], default=0) >= count

    def _nearest(self, gpu_type: str, row: list[_Row]) -> Iterator[tuple[int, list[tuple[Place, str, int]]]]:
        """Return what it would have on devices of one type, and how many of them it lacks."""
        lacking, *_, where = min(row, key=lambda entry: entry[:3])
        if self._count is None or self._count <= where.node.total[gpu_type]:
            yield lacking, [(where, gpu_type, self._needed(where, gpu_type))]
        elif self._ask.shape.several:
            left, lacks = self._count, 0
            chosen: list[tuple[Place, str, int]] = []
            for missing, _, _, where in sorted(row, key=lambda entry: entry[:3]):
                number = min(left, where.node.total[gpu_type])
                chosen.append((where, gpu_type, number))
                lacks += max(0, number - (self._count - missing))
                left -= number
                if not left:
                    yield lacks, chosen
                    return

    def _needed(self, where: Place, gpu_type: str) -> int:
        return where.node.total[gpu_type] if self._count is None else self._count

    def _usable(self) -> Iterator[tuple[Place, str]]:
        return usable(self._floor, self._wanted, self._ask, self._now_ns)

    def _is_usable(self, where: Place, gpu_type: str) -> bool:
        return is_usable(self._floor, self._wanted, self._ask, (where, gpu_type), self._now_ns)


def _shares(needs: list[Need]) -> tuple[Share, ...]:
    return tuple(Share(node_id=where.node.id, gpu_type=name, count=count) for where, name, count, *_ in needs)
