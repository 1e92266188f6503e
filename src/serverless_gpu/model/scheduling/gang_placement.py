"""Gang placement: where a gang starts now, whole or not at all, on devices of one type.

now     best fit: the node that keeps the least free; of those alike the first by name
        several nodes: where none could hold it; whole free ones and one part (`multi_node_placement.py`)
later   the node that likely has enough first (`promise`), or that lacks the fewest devices (`keep`)
"""

from __future__ import annotations

from collections.abc import Iterator

from serverless_gpu.model.scheduling.capacity import Capacity
from serverless_gpu.model.scheduling.multi_node_placement import apart, is_several, spread
from serverless_gpu.model.scheduling.node_capacity import NodeDevices
from serverless_gpu.model.scheduling.request_shapes import TimedShape
from serverless_gpu.model.scheduling.values import DeviceShare, QueuedRun

_NOBODY: frozenset[str] = frozenset()
Option = tuple[tuple[int, int, str, str], NodeDevices, str, int]
"""Rank, devices left over, name and identifier; the node, the type, how many."""


def place(floor: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> tuple[DeviceShare, ...] | None:
    """Return devices that a run can have now, or None; nothing is taken."""
    avoids = (wanted.avoid, _NOBODY) if wanted.avoid else (_NOBODY,)
    if is_several(floor, wanted, ask):
        ways = (spread(floor, wanted, ask, now_ns, avoid) for avoid in apart(wanted))
        return next((shares for shares in ways if shares is not None), None)
    for avoid in avoids:
        found = min(_options(floor, wanted, ask, now_ns, avoid), key=lambda option: option[0], default=None)
        if found is not None:
            _, where, gpu_type, count = found
            return (DeviceShare(node_id=where.node.id, gpu_type=gpu_type, count=count),)
    return None


def fits(floor: Capacity, shares: tuple[DeviceShare, ...], wanted: QueuedRun, ask: TimedShape, now_ns: int) -> bool:
    """Return whether a gang can have just these devices now, all of them, beside what is promised to others."""
    for share in shares:
        book = floor.books.get((share.node_id, share.gpu_type))
        if floor.places[share.node_id].free[share.gpu_type] < share.count:
            return False
        if book is not None and not book.fits(share.count, floor.ends(wanted, ask, now_ns)):
            return False
    return True


def take(floor: Capacity, shares: tuple[DeviceShare, ...], wanted: QueuedRun, ask: TimedShape, now_ns: int) -> None:
    """Enter devices that a run gets now into the books of their nodes."""
    for share in shares:
        book = floor.books.get((share.node_id, share.gpu_type))
        if book is not None:
            book.take(share.count, floor.ends(wanted, ask, now_ns))


def _options(
    floor: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, avoid: frozenset[str]
) -> Iterator[Option]:
    reach = floor.reach(ask.shape)
    count = ask.shape.gpus
    for group, types, pool in reach.entries:
        rank = group.rank(floor.terms, wanted, pool, now_ns)
        if rank is None:
            continue
        for name in types:
            index = group.index[name]
            if count is None:
                for size, row in index.whole.items():
                    for _, node_id, where in row:  # alike but for their names, and in the order of these
                        if node_id not in avoid and where.node.total[name] == size:
                            yield (rank, 0, *where.entry[:2]), where, name, size
                            break
                continue
            best = index.best(count, avoid)
            if best is not None:
                left, where = best
                yield (rank, left, *where.entry[:2]), where, name, count
    for where, types, pool in reach.singles.values():
        rank = where.group.rank(floor.terms, wanted, pool, now_ns)
        if rank is not None and where.node.id not in avoid and not where.node.away:
            for name in types:
                needed = where.node.total[name] if count is None else count
                left = where.free[name] - needed
                if needed > 0 and left >= 0 and (where.node.id, name) not in floor.books:
                    yield (rank, left, *where.entry[:2]), where, name, needed
    if floor.books:
        yield from _beside(floor, wanted, ask, now_ns, avoid)


def _beside(
    floor: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int, avoid: frozenset[str]
) -> Iterator[Option]:
    """Return what may be used of nodes on which something is kept."""
    reach, ends = floor.reach(ask.shape), floor.ends(wanted, ask, now_ns)
    for (node_id, name), book in floor.books.items():
        where = floor.places[node_id]
        needed = ask.shape.needs(where.node, name)
        left = where.free[name] - needed
        if left < 0 or needed <= 0 or where.node.away or node_id in avoid:
            continue
        found = reach.of(where)
        if found is None or name not in found[0]:
            continue
        rank = where.group.rank(floor.terms, wanted, found[1], now_ns)
        if rank is not None and book.fits(needed, ends):
            yield (rank, left, *where.entry[:2]), where, name, needed


def usable(floor: Capacity, wanted: QueuedRun, ask: TimedShape, now_ns: int) -> Iterator[tuple[NodeDevices, str]]:
    """Return nodes and types that a run may use now, free or not."""
    for where, types, pool in floor.reach(ask.shape).places():
        if not where.node.away and where.group.rank(floor.terms, wanted, pool, now_ns) is not None:
            for name in types:
                yield where, name


def is_usable(floor: Capacity, wanted: QueuedRun, ask: TimedShape, at: tuple[NodeDevices, str], now_ns: int) -> bool:
    """Return whether a run may use a type of a node now, free or not."""
    where, name = at
    found = floor.reach(ask.shape).of(where)
    if found is None or name not in found[0] or where.node.away:
        return False
    return where.group.rank(floor.terms, wanted, found[1], now_ns) is not None


def unkept(floor: Capacity, where: NodeDevices, gpu_type: str) -> int:
    """Return what is free of a node now beside what is kept; less than 0 where more is waited for."""
    book = floor.books.get((where.node.id, gpu_type))
    return where.free[gpu_type] if book is None else book.likely.free()
