"""Capacity: nodes, their free devices, and the best-fitting node for a gang.

    group   nodes of one pool, platform, Python, owner and calendar; a run that may use one of them may use all
      index   nodes of one type by the number of free devices ─▶ best fit is one lookup, not a loop over nodes
      order   stored between passes; only nodes that changed, or whose estimate expired, are sorted again
    reach   groups and types that a shape may use; computed once, until a node of another kind joins

Best fit selects the node with the fewest remaining free devices, so that whole nodes stay free for gangs. During a
pass, the index omits a node with held or reserved devices (`book`). The node's `PromiseBook` then decides which runs
may start on the node.

`Capacity` also stores the runs of absent nodes, because a device is free only after its run has ended.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from serverless_gpu.model.hardware import CPU, GpuType, matches
from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.availability_timeline import (
    DeviceTimeline,
    Ends,
    HeldDevices,
    Leavers,
    PromiseBook,
)
from serverless_gpu.model.scheduling.duration_estimates import Medians
from serverless_gpu.model.scheduling.preemption import NO_CLAIM, PoolTerms, may_use, standing
from serverless_gpu.model.scheduling.values import (
    DeviceShare,
    Node,
    Pool,
    QueuedRun,
    QueuePolicy,
    RunningRun,
    Shape,
    TimedShape,
)

_P = TypeVar("_P")
Row = tuple[Any, ...]
Look = Callable[[_P, int], tuple[Row | None, float]]
"""Callback that returns a node's sort row (None to omit the node) and the row's expiry time."""
_REBUILT = 4
"""`NodeOrder` sorts all rows again if more than a quarter of its nodes are stale."""
_ORDERS_MAX = 64
"""Maximum number of stored sort orders per node group and type, beyond which the group drops the oldest order."""
_S = 1_000_000_000
_REACHES_MAX = 10_000


class Capacity:
    """Stores all nodes and their runs. `leavers` counts devices of preemptible and stopping runs."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.places: dict[str, NodeDevices] = {}
        self.terms = PoolTerms(policy=policy)
        self.books: dict[tuple[str, str], PromiseBook] = {}
        self.leavers = Leavers()
        self._reaches: dict[int, ShapeNodes] = {}
        self.is_plain = True
        self._is_forecast = False
        self._numbers = itertools.count()
        self.groups: dict[tuple[object, ...], NodeGroup] = {}
        self._runs: dict[str, dict[str, dict[str, HeldDevices]]] = {}
        self._used: dict[str, Counter[str]] = {}
        self.medians = Medians()
        self._machines: dict[str, dict[str, NodeDevices]] = {}

    # --- changes ---

    def see_pool(self, pool: Pool) -> None:
        """Add a pool, or update its settings."""
        if self.terms.pools.get(pool.name) != pool:
            self.terms = PoolTerms(policy=self.terms.policy, pools={**self.terms.pools, pool.name: pool})
            self.change()

    def set_policy(self, policy: QueuePolicy) -> None:
        """Replace the queue policy for future decisions."""
        self.terms = PoolTerms(policy=policy, pools=self.terms.pools)
        self.change()

    def see(self, node: Node) -> None:
        """Add a node, or update its reported state."""
        place = self.places.get(node.id)
        if place is not None and place.node == node:
            return
        if place is not None and _stays(place.node, node):
            for name in node.total:
                self._out(place, name)
            place.node = node
            for name in node.total:
                self._in(place, name)
            return
        self.forget(node.id)
        group = self.groups.get(_group_key(node))
        if group is None:
            group = self.groups[_group_key(node)] = NodeGroup(node, next(self._numbers))
        place = self.places[node.id] = NodeDevices(
            node, group, self._runs.setdefault(node.id, {}), self._used.setdefault(node.id, Counter())
        )
        group.add(place)
        self._machines.setdefault(node.machine, {})[node.id] = place
        for name, total in node.total.items():
            index = group.index.setdefault(name, Index())
            if total > 0:
                index.totals[total] += 1
            self._in(place, name)
        self.change()

    def forget(self, node_id: str) -> None:
        """Remove a node."""
        place = self.places.pop(node_id, None)
        if place is None:
            return
        group = place.group
        for name, total in place.node.total.items():
            self._out(place, name)
            self.books.pop((node_id, name), None)
            totals = group.index[name].totals
            totals[total] -= 1
            if totals[total] <= 0:
                del totals[total]
        group.remove(place)
        if not group.members:
            del self.groups[_group_key(place.node)]
        there = self._machines[place.node.machine]
        del there[node_id]
        if not there:
            del self._machines[place.node.machine]
        if not any(self._runs[node_id].values()):
            del self._runs[node_id], self._used[node_id]
        self.change()

    def take(self, running: RunningRun) -> None:
        """Record that a run uses its allocated devices."""
        for share in running.shares:
            runs = self._runs.setdefault(share.node_id, {}).setdefault(share.gpu_type, {})
            runs[running.wanted.run_id] = HeldDevices(running, share.count)
            self.leavers.count(running, share, share.count)
            self._used.setdefault(share.node_id, Counter())[share.gpu_type] += share.count
            self._refresh(share)

    def give(self, running: RunningRun) -> None:
        """Record that a run has released its devices."""
        for share in running.shares:
            del self._runs[share.node_id][share.gpu_type][running.wanted.run_id]
            self._used[share.node_id][share.gpu_type] -= share.count
            self.leavers.count(running, share, -share.count)
            self._refresh(share)
            if share.node_id not in self.places and not any(self._runs[share.node_id].values()):
                del self._runs[share.node_id], self._used[share.node_id]

    def _refresh(self, share: DeviceShare) -> None:
        place = self.places.get(share.node_id)
        if place is not None and share.gpu_type in place.node.total:
            self._out(place, share.gpu_type)
            self._in(place, share.gpu_type)

    def _in(self, place: NodeDevices, gpu_type: str) -> None:
        free = place.free[gpu_type] = place.count(gpu_type)
        place.group.mark(place, gpu_type)
        if not place.node.away and (place.node.id, gpu_type) not in self.books:
            place.group.index[gpu_type].add(place, free, place.usable(gpu_type))

    def _out(self, place: NodeDevices, gpu_type: str) -> None:
        if not place.node.away and (place.node.id, gpu_type) not in self.books:
            place.group.index[gpu_type].remove(place, place.free[gpu_type], place.usable(gpu_type))

    def change(self) -> None:
        """Discard the cached nodes of all shapes, which the next query computes again."""
        self._reaches.clear()
        self.is_plain = all(group.is_plain for group in self.groups.values())

    def turns_ns(self, now_ns: int) -> int | None:
        """Return the next time at which a node's calendar changes, or None without a future change."""
        turns = (group.sample.turns_ns for group in self.groups.values() if not group.is_plain)
        return min((at for at in turns if at is not None and at > now_ns), default=None)

    # --- reservations of a pass ---

    def book(self, place: NodeDevices, gpu_type: str, now_ns: int) -> PromiseBook:
        """Return the reservations of a node, and omit the node from the index until the next pass."""
        key = (place.node.id, gpu_type)
        book = self.books.get(key)
        if book is None:
            if not self._is_forecast:
                self._out(place, gpu_type)
            book = self.books[key] = place.book(gpu_type, now_ns)
        return book

    def guess(self, place: NodeDevices, gpu_type: str, now_ns: int) -> DeviceTimeline:
        """Return the guessed-end profile of a node, and store the profile with existing reservations."""
        book = self.books.get((place.node.id, gpu_type))
        if book is not None and book.guess is not None:
            return book.guess
        held = place.runs.get(gpu_type, {}).values()
        profile = DeviceTimeline(
            now_ns, place.free[gpu_type], [(one.guess(now_ns, self.medians), one.count) for one in held]
        )
        if book is not None:
            book.guess = profile.like(book.likely)
        return profile

    def ends(self, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> Ends:
        """Return the likely, the latest and the guessed end of a run that starts now."""
        likely, limit = ask.spans(wanted)
        guess = likely
        if math.isinf(guess):
            length_s = self.medians.length_s(ask.shape.gpus or self.reach(ask.shape).whole)
            guess = math.inf if length_s is None else length_s * _S
        return now_ns + likely, now_ns + limit, now_ns + guess

    def close_books(self) -> None:
        """Discard all reservations at the beginning of a pass."""
        books, self.books = self.books, {}
        for node_id, gpu_type in books:
            place = self.places[node_id]
            if not place.node.away:
                place.group.index[gpu_type].add(place, place.free[gpu_type], place.usable(gpu_type))

    def forecast(self) -> Capacity:
        """Return a copy of the capacity for trial reservations, which do not affect the original."""
        other = copy.copy(self)
        other.books, other._is_forecast = {}, True
        return other

    # --- nodes in reach ---

    def is_possible(self, shape: Shape) -> bool:
        """Return True if the nodes have enough devices for a shape, including busy devices."""
        reach = self.reach(shape)
        return (shape.gpus or 1) <= (max(reach.whole, reach.most) if shape.several else reach.whole)

    def reach(self, shape: Shape) -> ShapeNodes:
        """Return the nodes that a shape may use, including busy nodes."""
        reach = self._reaches.get(shape.number)
        if reach is None:
            if len(self._reaches) >= _REACHES_MAX:
                self._reaches.clear()
            reach = self._reaches[shape.number] = self._reach(shape)
        return reach

    def _reach(self, shape: Shape) -> ShapeNodes:
        groups: list[tuple[NodeGroup, Pool | None]] = []
        singles: list[tuple[NodeDevices, Pool | None]] = []
        for group in self.groups.values():
            admitted, pool = admits(group.sample, shape, self.terms.pools)
            if admitted and not shape.machine and has_python(group.sample, shape.python):
                groups.append((group, pool))
            elif admitted:
                machine = shape.machine or shape.caller
                singles += [
                    (place, pool)
                    for place in self._machines.get(machine, {}).values()
                    if place.group is group and (has_python(place.node, shape.python) or machine == shape.caller)
                ]
        only = self._only_type(groups, singles) if shape.gpu_type is None else None
        entries: list[Entry] = []
        for group, pool in groups:
            types = _types(shape, group.types(), group.sample.own, only)
            if types:
                entries.append((group, types, pool))
        found = {
            place.node.id: (place, types, pool)
            for place, pool in singles
            if (types := _types(shape, sorted(place.node.total), place.node.own, only))
        }
        return _measured(ShapeNodes(entries, found))

    def _only_type(
        self, groups: list[tuple[NodeGroup, Pool | None]], singles: list[tuple[NodeDevices, Pool | None]]
    ) -> str | None:
        """Return the only GPU type that a shape may use, preferring GPUs that are not lent, or None."""
        for lent in (False, True):
            names = {name for group, pool in groups if (pool is not None) is lent for name in group.types()}
            for place, pool in singles:
                if (pool is not None) is lent:
                    names |= {name for name, count in place.node.total.items() if count}
            names.discard(CPU)
            if names:
                return next(iter(names)) if len(names) == 1 else None
        return None


def admits(node: Node, shape: Shape, pools: Mapping[str, Pool]) -> tuple[bool, Pool | None]:
    """Return True if a shape may ever use a node, and the pool that would have to lend the node."""
    pool = pools.get(node.pool)
    if pool is not None and pool.single_principal and shape.second_principal:
        return False, None
    if shape.pool:
        fits, lender = node.pool == shape.pool, None
    else:
        lender = pool if pool is not None and pool.reserved else None
        fits = lender is None or lender.lends
    return fits and (not shape.platform or not node.platform or shape.platform == node.platform), lender


def has_python(node: Node, python: str) -> bool:
    """Return True if a node has a version of Python, or does not report its versions."""
    return not python or not node.pythons or python in node.pythons


def _types(shape: Shape, there: list[str], own: tuple[GpuType, ...], only: str | None) -> tuple[str, ...]:
    if shape.gpu_type is None:
        return (only,) if only is not None and only in there else ()
    return tuple(name for name in there if matches(shape.gpu_type, name, own))


def _measured(reach: ShapeNodes) -> ShapeNodes:
    """Set the size of the largest suitable node, and the maximum size of a gang on several nodes."""
    sizes: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for group, types, _ in reach.entries:
        for name in types:
            totals = group.index[name].totals
            reach.whole = max(reach.whole, *totals, 0)
            if group.sample.crews:
                sizes[group.sample.pool, name].update(totals)
    for place, types, _ in reach.singles.values():
        for name in types:
            reach.whole = max(reach.whole, place.node.total[name])
            if place.node.crews:
                sizes[place.node.pool, name][place.node.total[name]] += 1
    reach.most = max(map(together, sizes.values()), default=0)
    return reach


def _group_key(node: Node) -> tuple[object, ...]:
    hours = (node.owner, node.owner_first, node.shared, node.turns_ns)
    return (node.pool, node.platform, node.pythons, node.own, tuple(sorted(node.total)), node.crews, hours)


def _stays(old: Node, new: Node) -> bool:
    """Return True if two reports of a node differ only in the node's availability."""
    fixed = (old.name, old.machine, dict(old.total)) == (new.name, new.machine, dict(new.total))
    return fixed and _group_key(old) == _group_key(new)


class NodeOrder(Generic[_P]):
    """The nodes of one group in one sort order, updated incrementally.

    `members` maps identifiers to the group's nodes. The group updates `members`. `look` returns the sort row of a node.
    All sort rows are distinct.
    """

    __slots__ = ("_expiries", "_look", "_members", "_rows", "_seen", "_stale")

    def __init__(self, members: Mapping[str, _P], look: Look[_P]) -> None:
        self._members, self._look = members, look
        self._rows: list[Row] = []
        self._seen: dict[str, tuple[Row | None, float]] = {}
        self._stale = set(members)
        self._expiries: list[tuple[float, str]] = []

    def mark(self, node_id: str) -> None:
        """Record that a node has changed, joined or left."""
        self._stale.add(node_id)

    def rows(self, now_ns: int) -> list[Row]:
        """Return the sorted rows of the nodes at a given time, in a list that callers must not modify."""
        expiries, stale = self._expiries, self._stale
        while expiries and expiries[0][0] <= now_ns:
            stale.add(heapq.heappop(expiries)[1])
        if stale:
            self._refresh(now_ns, is_whole=_REBUILT * len(stale) > len(self._members))
            stale.clear()
        return self._rows

    def _refresh(self, now_ns: int, *, is_whole: bool) -> None:
        rows, seen = self._rows, self._seen
        for node_id in self._stale:
            before, _ = seen.pop(node_id, (None, 0.0))
            if before is not None and not is_whole:
                del rows[bisect_left(rows, before)]
            if node_id not in self._members:
                continue
            row, expires_ns = seen[node_id] = self._look(self._members[node_id], now_ns)
            if row is not None and not is_whole:
                insort(rows, row)
            if not math.isinf(expires_ns):
                heapq.heappush(self._expiries, (expires_ns, node_id))
        if is_whole:
            self._rows = sorted(row for row, _ in seen.values() if row is not None)
        if len(self._expiries) > 2 * len(seen):  # Rebuild the heap when most expiry entries belong to removed rows.
            self._expiries = [(at, node_id) for node_id, (_, at) in seen.items() if not math.isinf(at)]
            heapq.heapify(self._expiries)


class Index:
    """The nodes of a group by their number of free devices of one type."""

    __slots__ = ("counts", "free", "rows", "totals", "whole")

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.free = 0
        self.rows: dict[int, list[tuple[str, str, NodeDevices]]] = {}
        self.whole: dict[int, list[tuple[str, str, NodeDevices]]] = {}
        self.totals = Counter[int]()

    def add(self, place: NodeDevices, free: int, usable: int) -> None:
        """Add a node with its number of free devices and of usable devices."""
        if free <= 0:
            return
        self.free += free
        row = self.rows.get(free)
        if row is None:
            row = self.rows[free] = []
            insort(self.counts, free)
        insort(row, place.entry)
        if free == usable:
            insort(self.whole.setdefault(free, []), place.entry)

    def remove(self, place: NodeDevices, free: int, usable: int) -> None:
        """Remove a node from the index."""
        if free <= 0:
            return
        self.free -= free
        row = self.rows[free]
        del row[bisect_left(row, place.entry)]
        if not row:
            del self.rows[free]
            del self.counts[bisect_left(self.counts, free)]
        if free == usable:
            whole = self.whole[free]
            del whole[bisect_left(whole, place.entry)]
            if not whole:
                del self.whole[free]

    def best(self, count: int, avoid: Container[str]) -> tuple[int, NodeDevices] | None:
        """Return the node with the fewest leftover devices after allocating `count`, and the leftover number."""
        for free in self.counts[bisect_left(self.counts, count) :]:
            for _, node_id, place in self.rows[free]:
                if node_id not in avoid:
                    return free - count, place
        return None

    def most(self) -> Iterator[tuple[int, NodeDevices]]:
        """Yield nodes with their free device counts, in descending order of the counts."""
        for free in reversed(self.counts):
            for *_, place in self.rows[free]:
                yield free, place


class NodeGroup:
    """Nodes that the same runs may use."""

    __slots__ = ("_kept", "claim", "index", "is_plain", "members", "number", "order", "sample")

    def __init__(self, sample: Node, number: int) -> None:
        # `sample` is any node of the group. All nodes of a group have the same access properties.
        self.sample, self.number = sample, number
        # True if no node of the group has an owner or a calendar.
        self.is_plain = not sample.owner and sample.shared and sample.turns_ns is None
        # Strongest claim of a waiting run to the group's nodes. Runs with a weaker claim on the group's nodes must
        # wait.
        self.claim = NO_CLAIM
        self.members: dict[str, NodeDevices] = {}
        self.order: list[tuple[str, str, NodeDevices]] = []
        self.index: dict[str, Index] = {}
        self._kept: dict[str, dict[object, NodeOrder[NodeDevices]]] = {}

    def add(self, place: NodeDevices) -> None:
        """Add a node to the group."""
        self.members[place.node.id] = place
        insort(self.order, place.entry)

    def remove(self, place: NodeDevices) -> None:
        """Remove a node from the group."""
        del self.members[place.node.id]
        del self.order[bisect_left(self.order, place.entry)]
        for gpu_type in self._kept:
            self.mark(place, gpu_type)

    def mark(self, place: NodeDevices, gpu_type: str) -> None:
        """Record that the free devices or the runs of a node have changed."""
        for order in self._kept.get(gpu_type, {}).values():
            order.mark(place.node.id)

    def rows(self, gpu_type: str, key: object, look: Look[NodeDevices], now_ns: int) -> list[Row]:
        """Return the sorted rows of the group's nodes. `key` identifies the sort order that `look` defines."""
        kept = self._kept.setdefault(gpu_type, {})
        order = kept.get(key)
        if order is None:
            if len(kept) >= _ORDERS_MAX:
                del kept[next(iter(kept))]
            order = kept[key] = NodeOrder(self.members, look)
        return order.rows(now_ns)

    def first(self, gpu_type: str, count: int, books: Container[tuple[str, str]]) -> NodeDevices | None:
        """Return the first node by name that is large enough, available and without reservations."""
        for _, node_id, place in self.order:
            if place.node.total[gpu_type] >= count and not place.node.away and (node_id, gpu_type) not in books:
                return place
        return None

    def types(self) -> list[str]:
        """Return the device types of the group's nodes."""
        return sorted(name for name, index in self.index.items() if index.totals)

    def rank(self, terms: PoolTerms, wanted: QueuedRun, pool: Pool | None, now_ns: int) -> int | None:
        """Return the group's rank for a run: -1 for the owner's nodes, 1 for lent nodes, or None if unusable."""
        if pool is None and self.is_plain:
            return 0
        if standing(wanted, self.sample, terms) > self.claim or not may_use(wanted, self.sample, terms, now_ns):
            return None
        return 1 if pool is not None else -1 if self.sample.owner and self.sample.owner == wanted.owner else 0


class NodeDevices:
    """A node with its free devices and its running runs."""

    __slots__ = ("entry", "free", "group", "node", "runs", "used")

    def __init__(
        self, node: Node, group: NodeGroup, runs: dict[str, dict[str, HeldDevices]], used: Counter[str]
    ) -> None:
        self.node, self.group, self.runs, self.used = node, group, runs, used
        self.entry: tuple[str, str, NodeDevices] = (node.name, node.id, self)
        self.free: dict[str, int] = {}

    def count(self, gpu_type: str) -> int:
        """Return the number of the node's usable devices that no run holds."""
        return max(0, self.usable(gpu_type) - self.used[gpu_type])

    def usable(self, gpu_type: str) -> int:
        """Return the number of devices that runs can use on the node."""
        return self.node.total.get(gpu_type, 0) - self.node.outside.get(gpu_type, 0)

    def book(self, gpu_type: str, now_ns: int) -> PromiseBook:
        """Return a `PromiseBook` without reservations, with the release times of the node's runs."""
        until = [(held.until(now_ns), held.count) for held in self.runs.get(gpu_type, {}).values()]
        free = self.free[gpu_type]
        likely = DeviceTimeline(now_ns, free, [(at[0], count) for at, count in until if not math.isinf(at[0])])
        bound = DeviceTimeline(now_ns, free, [(at[1], count) for at, count in until if not math.isinf(at[1])])
        return PromiseBook(likely, bound)

    def ready(self, gpu_type: str, count: int, now_ns: int) -> Readiness:
        """Return the likely and latest time at which `count` devices are free, and the estimate's expiry.

        An infinite time stands for an unknown time.
        """
        missing = count - self.free[gpu_type]
        if missing <= 0:
            return now_ns, now_ns, math.inf
        held = self.runs.get(gpu_type, {}).values()
        until = [(*one.until(now_ns), one.count) for one in held]
        return (
            _enough(sorted((likely, number) for likely, _, number in until), missing),
            _enough(sorted((bound, number) for _, bound, number in until), missing),
            _expires(held, [likely for likely, _, _ in until], now_ns),
        )

    def guessed(self, gpu_type: str, count: int, now_ns: int, medians: Medians) -> Readiness:
        """Return the guessed time at which `count` devices are free, with an infinite latest time."""
        missing = count - self.free[gpu_type]
        if missing <= 0:
            return now_ns, math.inf, math.inf
        held = self.runs.get(gpu_type, {}).values()
        until = [(one.guess(now_ns, medians), one.count) for one in held]
        return _enough(sorted(until), missing), math.inf, _expires(held, [at for at, _ in until], now_ns)


Readiness = tuple[float, float, float]
"""Likely and latest time at which devices are free, and the time at which the estimate expires."""


def _expires(held: Iterable[HeldDevices], ends: Iterable[float], now_ns: int) -> float:
    """Return the expiry time of an estimate: now if a run exceeds its limit, else the earliest end."""
    is_over = any(one.bound_ns <= now_ns for one in held)
    return now_ns + 1 if is_over else min(ends, default=math.inf)


def _enough(releases: list[tuple[float, int]], missing: int) -> float:
    for at, number in releases:
        missing -= number
        if missing <= 0:
            return at
    return math.inf


def together(sizes: Mapping[int, int]) -> int:
    """Return the number of devices on the largest nodes, up to the maximum number of nodes of a gang."""
    most, nodes = 0, NODES_MAX
    for size in sorted(sizes, reverse=True):
        number = min(nodes, sizes[size])
        most += size * number
        nodes -= number
    return most


PartReady = tuple[float, float, int, str, str, NodeDevices]
"""Sort row of a node: likely and latest release time, unused devices, node name, node id and node."""
Entry = tuple[NodeGroup, tuple[str, ...], Pool | None]
Single = tuple[NodeDevices, tuple[str, ...], Pool | None]


class ShapeNodes:
    """The nodes that a shape may use."""

    __slots__ = ("entries", "is_lent", "kind", "most", "singles", "weight", "whole")

    def __init__(self, entries: list[Entry], singles: dict[str, Single]) -> None:
        # `singles`: individually suitable nodes by identifier, such as the caller's machine.
        # `entries`: node groups with their suitable device types and the pool that would lend the nodes.
        self.entries, self.singles = entries, singles
        # `most`: maximum number of devices of a gang on several nodes.
        # `whole`: number of devices of a whole node.
        self.whole = self.most = 0
        self.weight: float | None = None  # Divisor of a run's waiting time, computed on first use.
        groups = [(group.number, name) for group, types, _ in entries for name in types]
        alone = [(place.group.number, name) for place, types, _ in singles.values() for name in types]
        # Pairs of group number and device type. Runs that share a pair compete for the same devices.
        self.kind = frozenset((*groups, *alone))
        # True if a reserved pool would lend some of the nodes.
        self.is_lent = any(pool is not None for *_, pool in (*entries, *singles.values()))

    def of(self, place: NodeDevices) -> tuple[tuple[str, ...], Pool | None] | None:
        """Return a node's suitable device types and lending pool, or None for an unsuitable node."""
        single = self.singles.get(place.node.id)
        if single is not None:
            return single[1], single[2]
        for group, types, pool in self.entries:
            if place.group is group:
                return types, pool
        return None

    def places(self) -> Iterator[tuple[NodeDevices, tuple[str, ...], Pool | None]]:
        """Yield every node that the shape may use."""
        for group, types, pool in self.entries:
            for place in group.members.values():
                yield place, types, pool
        yield from self.singles.values()
