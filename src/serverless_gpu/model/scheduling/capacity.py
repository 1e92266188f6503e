"""Capacity: nodes, what is free on them, and the node that a gang fits best.

    group   nodes of one pool, platform, Python, owner, calendar: runs that may use one of them may use all
      index   of one type: nodes by how many devices are free ─▶ best fit is one look, not a walk over nodes
    reach   groups and types that a shape may use; found once, until nodes of another kind come

The node that keeps the least free afterwards is taken, so that whole nodes stay whole for gangs. A node on which
something is kept or promised leaves the index for the pass (`book`): what may start there still is asked of its book.

Runs are remembered by node, also for nodes that are not there: devices are free when their run is gone, not before.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from serverless_gpu.model.hardware import CPU, GpuType, matches
from serverless_gpu.model.scheduling.availability_timeline import (
    DeviceTimeline,
    Ends,
    HeldDevices,
    Leavers,
    PromiseBook,
)
from serverless_gpu.model.scheduling.duration_estimates import Medians
from serverless_gpu.model.scheduling.node_capacity import Entry, Index, NodeDevices, NodeGroup, ShapeNodes, together
from serverless_gpu.model.scheduling.preemption import Terms
from serverless_gpu.model.scheduling.request_shapes import Shape, TimedShape
from serverless_gpu.model.scheduling.values import DeviceShare, Node, Pool, QueuedRun, QueuePolicy, RunningRun

_S = 1_000_000_000
_REACHES_MAX = 10_000


class Capacity:
    """Every node, and who has what of it; `leavers`: who could be asked to leave."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.places: dict[str, NodeDevices] = {}
        self.terms = Terms(policy=policy)
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
        """Take note of a pool."""
        if self.terms.pools.get(pool.name) != pool:
            self.terms = Terms(policy=self.terms.policy, pools={**self.terms.pools, pool.name: pool})
            self.change()

    def set_policy(self, policy: QueuePolicy) -> None:
        """Decide otherwise from now on."""
        self.terms = Terms(policy=policy, pools=self.terms.pools)
        self.change()

    def see(self, node: Node) -> None:
        """Take note of a node as it is now."""
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
        """Take note that a node is not there any more."""
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
        """Take note that a run has devices."""
        for share in running.shares:
            runs = self._runs.setdefault(share.node_id, {}).setdefault(share.gpu_type, {})
            runs[running.wanted.run_id] = HeldDevices(running, share.count)
            self.leavers.count(running, share, share.count)
            self._used.setdefault(share.node_id, Counter())[share.gpu_type] += share.count
            self._refresh(share)

    def give(self, running: RunningRun) -> None:
        """Take note that a run has its devices no longer."""
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
        """Find out anew what is in reach of whom."""
        self._reaches.clear()
        self.is_plain = all(group.is_plain for group in self.groups.values())

    def turns_ns(self, now_ns: int) -> int | None:
        """Return when the next calendar turns; None for never."""
        turns = (group.sample.turns_ns for group in self.groups.values() if not group.is_plain)
        return min((at for at in turns if at is not None and at > now_ns), default=None)

    # --- what is kept during a pass ---

    def book(self, place: NodeDevices, gpu_type: str, now_ns: int) -> PromiseBook:
        """Return who is promised what of a node; it leaves the index until the next pass."""
        key = (place.node.id, gpu_type)
        book = self.books.get(key)
        if book is None:
            if not self._is_forecast:
                self._out(place, gpu_type)
            book = self.books[key] = place.book(gpu_type, now_ns)
        return book

    def guess(self, place: NodeDevices, gpu_type: str, now_ns: int) -> DeviceTimeline:
        """Return what is free when by a guess; it is kept with the node's book, where there is one."""
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
        """Return when a run that starts now is over: likely, at the latest, by a guess."""
        likely, limit = ask.spans(wanted)
        guess = likely
        if math.isinf(guess):
            length_s = self.medians.length_s(ask.shape.gpus or self.reach(ask.shape).whole)
            guess = math.inf if length_s is None else length_s * _S
        return now_ns + likely, now_ns + limit, now_ns + guess

    def close_books(self) -> None:
        """Forget what was kept: a pass begins."""
        books, self.books = self.books, {}
        for node_id, gpu_type in books:
            place = self.places[node_id]
            if not place.node.away:
                place.group.index[gpu_type].add(place, place.free[gpu_type], place.usable(gpu_type))

    def forecast(self) -> Capacity:
        """Return a floor on which promises are tried: they leave this one as it is."""
        other = copy.copy(self)
        other.books, other._is_forecast = {}, True
        return other

    # --- what is in reach ---

    def is_possible(self, shape: Shape) -> bool:
        """Return whether there are devices enough for a shape, free or not."""
        reach = self.reach(shape)
        return (shape.gpus or 1) <= (max(reach.whole, reach.most) if shape.several else reach.whole)

    def reach(self, shape: Shape) -> ShapeNodes:
        """Return what a shape may use, whether it is free or not."""
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
        """Return the only GPU type there is; what would only be lent counts where there is nothing else."""
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
    """Return whether a shape may use a node, whatever it has, and the pool that would have to lend it."""
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
    """Return whether a node has a version of Python, or does not say which it has."""
    return not python or not node.pythons or python in node.pythons


def _types(shape: Shape, there: list[str], own: tuple[GpuType, ...], only: str | None) -> tuple[str, ...]:
    if shape.gpu_type is None:
        return (only,) if only is not None and only in there else ()
    return tuple(name for name in there if matches(shape.gpu_type, name, own))


def _measured(reach: ShapeNodes) -> ShapeNodes:
    """Note how large the largest node in reach is, and what a gang on several nodes can have at most."""
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
    """Return whether a node differs only in what is free of it."""
    fixed = (old.name, old.machine, dict(old.total)) == (new.name, new.machine, dict(new.total))
    return fixed and _group_key(old) == _group_key(new)
