"""Gang placement: finds devices of one type on which a whole gang starts now.

    now     best fit: the node with the fewest devices left over; on a tie the first by name
    later   `backfill.py`: the node that likely has enough first (`promise`), or that lacks the fewest devices (`keep`)

A gang on several nodes:

    could any node that the gang may ever use hold it?   ── yes ─▶ the gang waits for one node, even if others are free
       │ no
       ▼
    whole free nodes and a part of another node, of one type in one pool, beside the reservations of other runs
       1. as few nodes as possible
       2. on a tie, the fewest devices left over on the partly used node, then smaller nodes

In this diagram, "could" considers all devices of a node. A gang therefore waits for a large node even if that node is
in use, drained or silent. A node with an older version (without `Node.crews`) runs only gangs that fit on that single
node.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.capacity import Capacity, Index, NodeDevices, together
from serverless_gpu.model.scheduling.preemption import could_use, is_open
from serverless_gpu.model.scheduling.values import DeviceShare, QueuedRun, TimedShape

Kind = tuple[str, str]
"""Pool and device type, which are the same for all devices of a gang."""
_PAIRS_MAX = 4
_NOBODY: frozenset[str] = frozenset()
_Spread = tuple[tuple[int, int, int], tuple[DeviceShare, ...]]
"""Sort key (number of nodes, unused devices on the last node, largest node size) and device shares of a gang."""
Option = tuple[tuple[int, int, str, str], NodeDevices, str, int]
"""Sort key of a node (rank, unused devices, name and identifier) with the node, device type and device count."""


def place(capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> tuple[DeviceShare, ...] | None:
    """Return devices on which a run can start now, or None. Callers record the result with `take`."""
    avoids = (wanted.avoid, _NOBODY) if wanted.avoid else (_NOBODY,)
    if is_several(capacity, wanted, ask):
        ways = (spread(capacity, wanted, ask, now_ns, avoid) for avoid in apart(wanted))
        return next((shares for shares in ways if shares is not None), None)
    for avoid in avoids:
        found = min(_options(capacity, wanted, ask, now_ns, avoid), key=lambda option: option[0], default=None)
        if found is not None:
            _, where, gpu_type, count = found
            return (DeviceShare(node_id=where.node.id, gpu_type=gpu_type, count=count),)
    return None


def fits(capacity: Capacity, shares: tuple[DeviceShare, ...], wanted: QueuedRun, ask: TimedShape, now_ns: int) -> bool:
    """Return True if a gang can use all given devices now without delaying other runs' reservations."""
    for share in shares:
        book = capacity.books.get((share.node_id, share.gpu_type))
        if capacity.places[share.node_id].free[share.gpu_type] < share.count:
            return False
        if book is not None and not book.fits(share.count, capacity.ends(wanted, ask, now_ns)):
            return False
    return True


def take(capacity: Capacity, shares: tuple[DeviceShare, ...], wanted: QueuedRun, ask: TimedShape, now_ns: int) -> None:
    """Record in the nodes' reservations that a run uses the given devices from now on."""
    for share in shares:
        book = capacity.books.get((share.node_id, share.gpu_type))
        if book is not None:
            book.take(share.count, capacity.ends(wanted, ask, now_ns))


def _options(
    capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, avoid: frozenset[str]
) -> Iterator[Option]:
    reach = capacity.reach(ask.shape)
    count = ask.shape.gpus
    for group, types, pool in reach.entries:
        rank = group.rank(capacity.terms, wanted, pool, now_ns)
        if rank is None:
            continue
        for name in types:
            index = group.index[name]
            if count is None:
                for size, row in index.whole.items():
                    # The first name is the best choice, because nodes of a group differ only in their names.
                    for _, node_id, where in row:
                        if node_id not in avoid and where.node.total[name] == size:
                            yield (rank, 0, *where.entry[:2]), where, name, size
                            break
                continue
            best = index.best(count, avoid)
            if best is not None:
                left, where = best
                yield (rank, left, *where.entry[:2]), where, name, count
    for where, types, pool in reach.singles.values():
        rank = where.group.rank(capacity.terms, wanted, pool, now_ns)
        if rank is not None and where.node.id not in avoid and not where.node.away:
            for name in types:
                needed = where.node.total[name] if count is None else count
                left = where.free[name] - needed
                if needed > 0 and left >= 0 and (where.node.id, name) not in capacity.books:
                    yield (rank, left, *where.entry[:2]), where, name, needed
    if capacity.books:
        yield from _beside(capacity, wanted, ask, now_ns, avoid)


def _beside(
    capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, avoid: frozenset[str]
) -> Iterator[Option]:
    """Yield usable devices on nodes with reservations."""
    reach, ends = capacity.reach(ask.shape), capacity.ends(wanted, ask, now_ns)
    for (node_id, name), book in capacity.books.items():
        where = capacity.places[node_id]
        needed = ask.shape.needs(where.node, name)
        left = where.free[name] - needed
        if left < 0 or needed <= 0 or where.node.away or node_id in avoid:
            continue
        found = reach.of(where)
        if found is None or name not in found[0]:
            continue
        rank = where.group.rank(capacity.terms, wanted, found[1], now_ns)
        if rank is not None and book.fits(needed, ends):
            yield (rank, left, *where.entry[:2]), where, name, needed


def usable(capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> Iterator[tuple[NodeDevices, str]]:
    """Yield nodes and device types that a run may use now, including busy nodes."""
    for where, types, pool in capacity.reach(ask.shape).places():
        if not where.node.away and where.group.rank(capacity.terms, wanted, pool, now_ns) is not None:
            for name in types:
                yield where, name


def is_usable(capacity: Capacity, wanted: QueuedRun, ask: TimedShape, at: tuple[NodeDevices, str], now_ns: int) -> bool:
    """Return True if a run may use a device type of a node now, even if the devices are busy."""
    where, name = at
    found = capacity.reach(ask.shape).of(where)
    if found is None or name not in found[0] or where.node.away:
        return False
    return where.group.rank(capacity.terms, wanted, found[1], now_ns) is not None


def unkept(capacity: Capacity, where: NodeDevices, gpu_type: str) -> int:
    """Return the number of free unreserved devices, negative if reservations exceed free devices."""
    book = capacity.books.get((where.node.id, gpu_type))
    return where.free[gpu_type] if book is None else book.likely.free()


def is_several(capacity: Capacity, wanted: QueuedRun, ask: TimedShape) -> bool:
    """Return True if a run may use several nodes, and no single node could ever hold the run."""
    return ask.shape.several and ask.shape.gpus is not None and ask.shape.gpus > largest(capacity, wanted, ask)


def largest(capacity: Capacity, wanted: QueuedRun, ask: TimedShape) -> int:
    """Return the number of devices of the largest node that a run may ever use."""
    reach = capacity.reach(ask.shape)
    if capacity.is_plain and not reach.is_lent:
        return reach.whole
    return max((size for _, size in sizes(capacity, wanted, ask)), default=0)


def most(capacity: Capacity, wanted: QueuedRun, ask: TimedShape) -> dict[Kind, int]:
    """Return the maximum size of a multi-node gang, by pool and device type."""
    sizes: defaultdict[Kind, Counter[int]] = defaultdict(Counter)
    for group, types, _ in capacity.reach(ask.shape).entries:
        if group.sample.crews and could_use(wanted, group.sample, capacity.terms) and is_open(wanted, group.sample):
            for name in types:
                sizes[group.sample.pool, name].update(group.index[name].totals)
    for where, types, _ in capacity.reach(ask.shape).singles.values():
        if where.node.crews and could_use(wanted, where.node, capacity.terms) and is_open(wanted, where.node):
            for name in types:
                sizes[where.node.pool, name][where.node.total[name]] += 1
    return {kind: together(row) for kind, row in sizes.items()}


def are_one(capacity: Capacity, shares: tuple[DeviceShare, ...]) -> bool:
    """Return True if one gang may still use the given reserved or cleared devices together."""
    nodes = [capacity.places[share.node_id].node for share in shares]
    kinds = {(node.pool, share.gpu_type) for node, share in zip(nodes, shares, strict=True)}
    return len(nodes) < 2 or (len(kinds) == 1 and all(node.crews for node in nodes))


def apart(wanted: QueuedRun) -> Iterator[frozenset[str]]:
    """Yield sets of nodes to avoid, the strictest set first.

    The strictest sets contain the nodes on which the run failed, and one node of each pair that could not connect. A
    looser set contains only the nodes on which the run failed. The last set avoids no node.
    """
    pairs = sorted(tuple(sorted(pair)) for pair in wanted.apart)[:_PAIRS_MAX]
    if pairs:
        yield from (wanted.avoid.union(each) for each in itertools.product(*pairs))
    if pairs or wanted.avoid:
        yield wanted.avoid
    if wanted.avoid or not pairs:
        yield frozenset()


def spread(
    capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, avoid: frozenset[str] = frozenset()
) -> tuple[DeviceShare, ...] | None:
    """Return devices on several nodes on which a gang can start now, or None.

    The function uses lent devices only if other devices are not enough. The function counts devices held for the gang
    as free.
    """
    stocks = _stocks(capacity, wanted, ask, now_ns)
    count = ask.shape.gpus or 0
    for last in sorted({rank for stock in stocks.values() for rank in stock.ranks()}):
        options = [
            option
            for (_, gpu_type), stock in sorted(stocks.items())
            if (option := stock.up_to(last).gathered(gpu_type, count, avoid)) is not None
        ]
        if options:
            return min(options, key=lambda option: option[0])[1]
    return None


class _Beside:
    """A node that the group indexes omit: a single node or a node with reservations."""

    __slots__ = ("is_whole", "left", "rank", "spare", "where")

    def __init__(self, where: NodeDevices, gpu_type: str, rank: int, spare: int) -> None:
        free = where.free[gpu_type]
        self.where, self.rank, self.spare = where, rank, spare
        self.left = free - spare
        self.is_whole = 0 < free == where.usable(gpu_type) == spare


class _Stock:
    """Free devices of one type in one pool: ranked node indexes and unindexed nodes."""

    def __init__(self, indexes: list[tuple[int, Index]], beside: list[_Beside]) -> None:
        self.indexes, self.beside = indexes, beside

    def ranks(self) -> Iterator[int]:
        """Yield the preference ranks of the nodes: own nodes, ordinary nodes, lent nodes."""
        yield from (rank for rank, _ in self.indexes)
        yield from (one.rank for one in self.beside)

    def up_to(self, last: int) -> _Stock:
        """Return the free devices of all nodes up to a preference rank."""
        indexes = [(rank, index) for rank, index in self.indexes if rank <= last]
        return _Stock(indexes, [one for one in self.beside if one.rank <= last])

    def gathered(self, gpu_type: str, count: int, avoid: frozenset[str]) -> _Spread | None:
        """Return the best combination of nodes for a gang, or None if too few devices are free."""
        free = sum(index.free for _, index in self.indexes) + sum(one.spare for one in self.beside)
        if free < count:
            return None
        sizes = {size for _, index in self.indexes for size in index.whole}
        sizes |= {one.spare for one in self.beside if one.is_whole}
        options = [self._of(gpu_type, size, count, avoid) for size in sorted(sizes)]
        found = [option for option in options if option is not None]
        return min(found, key=lambda option: option[0]) if found else None

    def _of(self, gpu_type: str, size: int, count: int, avoid: frozenset[str]) -> _Spread | None:
        """Return whole nodes up to a size, and the partly used node that leaves the fewest unused devices.

        A node with more devices than the gang still needs becomes the partly used node.
        """
        left, taken = count, set(avoid)
        shares: list[DeviceShare] = []
        part: tuple[int, str] | None = None
        for number, node_id in self._wholes(size):
            if node_id in avoid:
                continue
            part = self._part(left, taken)
            if part is not None or len(shares) == NODES_MAX:
                break
            shares.append(DeviceShare(node_id=node_id, gpu_type=gpu_type, count=number))
            taken.add(node_id)
            left -= number
            if not left:
                return (len(shares), 0, size), tuple(shares)
        part = part or self._part(left, taken)
        if part is None or len(shares) == NODES_MAX:
            return None
        last = DeviceShare(node_id=part[1], gpu_type=gpu_type, count=left)
        return (len(shares) + 1, part[0], size), (*shares, last)

    def _wholes(self, most: int) -> Iterator[tuple[int, str]]:
        """Yield completely free nodes up to a size, the largest first, then by name."""
        alone: defaultdict[int, list[tuple[str, str, NodeDevices]]] = defaultdict(list)
        for one in self.beside:
            if one.is_whole:
                alone[one.spare].append(one.where.entry)
        sizes = {size for _, index in self.indexes for size in index.whole} | set(alone)
        for size in sorted((size for size in sizes if size <= most), reverse=True):
            rows = [index.whole.get(size, []) for _, index in self.indexes]
            for _, node_id, _ in heapq.merge(*rows, sorted(alone[size])):
                yield size, node_id

    def _part(self, count: int, avoid: set[str]) -> tuple[int, str] | None:
        """Return the fewest devices that remain free after allocating `count` on one node, and that node."""
        rows = [
            (best[0], *best[1].entry[:2]) for _, index in self.indexes if (best := index.best(count, avoid)) is not None
        ]
        rows += [
            (one.left + one.spare - count, *one.where.entry[:2])
            for one in self.beside
            if one.spare >= count and one.where.node.id not in avoid
        ]
        if not rows:
            return None
        left, _, node_id = min(rows)
        return left, node_id


def sizes(capacity: Capacity, wanted: QueuedRun, ask: TimedShape) -> Iterator[tuple[str, int]]:
    """Yield device types and device counts of the nodes that a run may ever use."""
    for group, types, _ in capacity.reach(ask.shape).entries:
        if could_use(wanted, group.sample, capacity.terms) and is_open(wanted, group.sample):
            yield from ((name, size) for name in types for size in group.index[name].totals)
    for where, types, _ in capacity.reach(ask.shape).singles.values():
        if could_use(wanted, where.node, capacity.terms) and is_open(wanted, where.node):
            yield from ((name, where.node.total[name]) for name in types)


def _stocks(capacity: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> dict[Kind, _Stock]:
    """Return the free devices that a gang could use now, by pool and type."""
    reach, ends = capacity.reach(ask.shape), capacity.ends(wanted, ask, now_ns)
    stocks: dict[Kind, _Stock] = {}
    for group, types, pool in reach.entries:
        rank = group.rank(capacity.terms, wanted, pool, now_ns) if group.sample.crews else None
        for name in types if rank is not None else ():
            stock = stocks.setdefault((group.sample.pool, name), _Stock([], []))
            stock.indexes.append((rank or 0, group.index[name]))
    alone = [(where, name) for where, types, _ in reach.singles.values() for name in types]
    alone = [entry for entry in alone if (entry[0].node.id, entry[1]) not in capacity.books]
    for where, name in (*alone, *((capacity.places[node_id], name) for node_id, name in capacity.books)):
        found = reach.of(where) if where.node.crews and not where.node.away else None
        rank = None if found is None else where.group.rank(capacity.terms, wanted, found[1], now_ns)
        if found is None or rank is None or name not in found[0]:
            continue
        book = capacity.books.get((where.node.id, name))
        spare = where.free[name] if book is None else min(where.free[name], book.most(ends, but=wanted.run_id))
        if spare > 0:
            stock = stocks.setdefault((where.node.pool, name), _Stock([], []))
            stock.beside.append(_Beside(where, name, rank, spare))
    return stocks
