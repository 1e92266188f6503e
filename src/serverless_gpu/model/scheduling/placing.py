"""Where a gang starts now, and where a blocked one will: whole or not at all, on devices of one type.

now     best fit: the node that keeps the least free; of those alike the first by name
        several nodes: one, if one will do; else whole free nodes, the largest first, and one part
later   the node that likely has enough first (`promise`), or that lacks the fewest devices (`keep`)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from serverless_gpu.model.scheduling.floor import Floor
from serverless_gpu.model.scheduling.places import Index, Place
from serverless_gpu.model.scheduling.shapes import Ask
from serverless_gpu.model.scheduling.values import Share, Wanted

_NOBODY: frozenset[str] = frozenset()
Option = tuple[tuple[int, int, str, str], Place, str, int]
"""Rank, devices left over, name and identifier; the node, the type, how many."""


def place(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> tuple[Share, ...] | None:
    """Return devices that a run can have now, or None; nothing is taken.

    Args:
        floor: what there is.
        wanted: the run.
        ask: what it asks for.
        now_ns: the time.
    """
    avoids = (wanted.avoid, _NOBODY) if wanted.avoid else (_NOBODY,)
    for avoid in avoids:
        found = min(_options(floor, wanted, ask, now_ns, avoid), key=_first, default=None)
        if found is not None:
            _, where, gpu_type, count = found
            return (Share(node_id=where.node.id, gpu_type=gpu_type, count=count),)
    if ask.shape.several and ask.shape.gpus is not None:
        for avoid in avoids:
            shares = _spread(floor, wanted, ask, now_ns, avoid)
            if shares is not None:
                return shares
    return None


def fits(floor: Floor, shares: tuple[Share, ...], wanted: Wanted, ask: Ask, now_ns: int) -> bool:
    """Return whether a gang can have just these devices now, all of them, beside what is promised to others."""
    for share in shares:
        book = floor.books.get((share.node_id, share.gpu_type))
        if floor.places[share.node_id].free[share.gpu_type] < share.count:
            return False
        if book is not None and not book.fits(share.count, floor.ends(wanted, ask, now_ns)):
            return False
    return True


def take(floor: Floor, shares: tuple[Share, ...], wanted: Wanted, ask: Ask, now_ns: int) -> None:
    """Enter devices that a run gets now into the books of their nodes."""
    for share in shares:
        book = floor.books.get((share.node_id, share.gpu_type))
        if book is not None:
            book.take(share.count, floor.ends(wanted, ask, now_ns))


def _first(option: Option) -> tuple[int, int, str, str]:
    return option[0]


def _options(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int, avoid: frozenset[str]) -> Iterator[Option]:
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


def _beside(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int, avoid: frozenset[str]) -> Iterator[Option]:
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


def _spread(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int, avoid: frozenset[str]) -> tuple[Share, ...] | None:
    """Return whole free nodes and one part that make a gang together, as few nodes as possible, lent ones last."""
    count = ask.shape.gpus or 0
    found: list[tuple[int, str, Index]] = []
    for group, types, pool in floor.reach(ask.shape).entries:
        rank = group.rank(floor.terms, wanted, pool, now_ns)
        if rank is not None:
            found += [(rank, name, group.index[name]) for name in types]
    for last in sorted({rank for rank, *_ in found}):
        options: list[tuple[Share, ...]] = []
        for gpu_type in sorted({name for _, name, _ in found}):
            indexes = [index for rank, name, index in found if rank <= last and name == gpu_type]
            if sum(index.free for index in indexes) >= count:
                shares = _composed(gpu_type, count, indexes, avoid)
                options += [shares] if shares is not None else []
        if options:
            return min(options, key=len)
    return None


def _composed(gpu_type: str, count: int, indexes: list[Index], avoid: frozenset[str]) -> tuple[Share, ...] | None:
    """Return the largest whole nodes that it takes, and the part that leaves the least over."""
    shares: list[Share] = []
    used = set(avoid)
    for size in sorted({size for index in indexes for size in index.whole}, reverse=True):
        for _, node_id, _ in heapq.merge(*(index.whole.get(size, ()) for index in indexes)):
            if size > count:
                break
            if node_id not in avoid:
                shares.append(Share(node_id=node_id, gpu_type=gpu_type, count=size))
                used.add(node_id)
                count -= size
    if not count:
        return tuple(shares)
    taken = frozenset(used)
    rests = [(best[0], *best[1].entry[:2]) for index in indexes if (best := index.best(count, taken)) is not None]
    if not rests:
        return None
    return (*shares, Share(node_id=min(rests)[2], gpu_type=gpu_type, count=count))


def usable(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> Iterator[tuple[Place, str]]:
    """Return nodes and types that a run may use now, free or not."""
    for where, types, pool in floor.reach(ask.shape).places():
        if not where.node.away and where.group.rank(floor.terms, wanted, pool, now_ns) is not None:
            for name in types:
                yield where, name


def is_usable(floor: Floor, wanted: Wanted, ask: Ask, at: tuple[Place, str], now_ns: int) -> bool:
    """Return whether a run may use a type of a node now, free or not."""
    where, name = at
    found = floor.reach(ask.shape).of(where)
    if found is None or name not in found[0] or where.node.away:
        return False
    return where.group.rank(floor.terms, wanted, found[1], now_ns) is not None


def unkept(floor: Floor, where: Place, gpu_type: str) -> int:
    """Return what is free of a node now beside what is kept; less than 0 where more is waited for."""
    book = floor.books.get((where.node.id, gpu_type))
    return where.free[gpu_type] if book is None else book.likely.free()
