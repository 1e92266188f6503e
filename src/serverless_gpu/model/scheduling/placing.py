"""Where a gang starts now, and where a blocked one will: whole or not at all, on devices of one type.

now     best fit: the node that keeps the least free; of those alike the first by name
        several nodes: one, if one will do; else whole free nodes, the largest first, and one part
later   the node that likely has enough first (`promise`), or that lacks the fewest devices (`keep`)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from serverless_gpu.model.scheduling.floor import Floor, Index, Place, Ready
from serverless_gpu.model.scheduling.shapes import Ask
from serverless_gpu.model.scheduling.values import Reservation, Share, Wanted

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
    return _spread(floor, wanted, ask, now_ns) if ask.shape.several else None


def take(floor: Floor, shares: tuple[Share, ...], ask: Ask, now_ns: int) -> None:
    """Enter devices that a run gets now into the books of their nodes."""
    for share in shares:
        book = floor.books.get((share.node_id, share.gpu_type))
        if book is not None:
            book.take(share.count, now_ns + ask.likely_ns, now_ns + ask.limit_ns)


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
                    for _, node_id, where in row:
                        if node_id not in avoid and where.node.total[name] == size:
                            yield (rank, 0, *where.entry[:2]), where, name, size
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
    reach = floor.reach(ask.shape)
    for (node_id, name), book in floor.books.items():
        where = floor.places[node_id]
        needed = where.node.total[name] if ask.shape.gpus is None else ask.shape.gpus
        left = where.free[name] - needed
        if left < 0 or needed <= 0 or where.node.away or node_id in avoid:
            continue
        found = reach.of(where)
        if found is None or name not in found[0]:
            continue
        rank = where.group.rank(floor.terms, wanted, found[1], now_ns)
        if rank is not None and book.fits(needed, now_ns + ask.likely_ns, now_ns + ask.limit_ns):
            yield (rank, left, *where.entry[:2]), where, name, needed


def _spread(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> tuple[Share, ...] | None:
    """Return whole free nodes and one part that make a gang together, as few nodes as possible."""
    count = ask.shape.gpus
    if count is None:
        return None
    found: dict[str, list[Index]] = {}
    for group, types, pool in floor.reach(ask.shape).entries:
        if group.rank(floor.terms, wanted, pool, now_ns) is not None:
            for name in types:
                found.setdefault(name, []).append(group.index[name])
    options = [
        shares
        for name, indexes in sorted(found.items())
        if sum(index.free for index in indexes) >= count and (shares := _composed(name, count, indexes)) is not None
    ]
    return min(options, key=len, default=None)


def _composed(gpu_type: str, count: int, indexes: list[Index]) -> tuple[Share, ...] | None:
    """Return the largest whole nodes that it takes, and the part that leaves the least over."""
    shares: list[Share] = []
    used: set[str] = set()
    for size in sorted({size for index in indexes for size in index.whole}, reverse=True):
        for _, node_id, _ in heapq.merge(*(index.whole.get(size, ()) for index in indexes)):
            if size > count:
                break
            shares.append(Share(node_id=node_id, gpu_type=gpu_type, count=size))
            used.add(node_id)
            count -= size
    if not count:
        return tuple(shares)
    avoid = frozenset(used)
    rests = [(best[0], *best[1].entry[:2]) for index in indexes if (best := index.best(count, avoid)) is not None]
    if not rests:
        return None
    return (*shares, Share(node_id=min(rests)[2], gpu_type=gpu_type, count=count))


def usable(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> Iterator[tuple[Place, str]]:
    """Return nodes and types that a run may use now, free or not."""
    for where, types, pool in floor.reach(ask.shape).places():
        if not where.node.away and where.group.rank(floor.terms, wanted, pool, now_ns) is not None:
            for name in types:
                yield where, name


# --- later ------------------------------------------------------------------------------------------------------------


def promise(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> Reservation | None:
    """Promise a blocked gang the devices that it likely has first; None where nobody can say when that is."""
    needs = _needs(floor, wanted, ask, now_ns)
    if not needs:
        return None
    likely = max(at for *_, at, _ in needs)
    bound = max(at for *_, at in needs)
    if math.isinf(likely):
        return None
    for where, name, count, _, _ in needs:
        book = floor.book(where, name, now_ns)
        until = None if math.isinf(bound) else (bound, bound + ask.limit_ns)
        book.promise(wanted.run_id, count, (likely, likely + ask.likely_ns), until)
    is_bound = not math.isinf(bound)
    return Reservation(
        run_id=wanted.run_id,
        shares=tuple(Share(node_id=where.node.id, gpu_type=name, count=count) for where, name, count, *_ in needs),
        at_ns=int(bound if is_bound else likely),
        is_bound=is_bound,
    )


def keep(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int, *, nearly: float) -> Reservation | None:
    """Keep devices for a blocked gang as they get free, where it lacks the fewest.

    Args:
        floor: what there is.
        wanted: the run.
        ask: what it asks for.
        now_ns: the time.
        nearly: part of its devices that has to be free already.
    """
    count = ask.shape.gpus
    if nearly > 0 and count is not None and not _is_near(floor, ask, nearly * count):
        return None
    rows: dict[str, list[tuple[int, str, str, Place]]] = {}
    for where, name in usable(floor, wanted, ask, now_ns):
        free = unkept(floor, where, name)
        needed = where.node.total[name] if count is None else count
        if needed > 0 and (ask.shape.several or needed <= where.node.total[name]):
            rows.setdefault(name, []).append((max(0, needed - free), *where.entry))
    options = [option for name, row in sorted(rows.items()) for option in _nearest(ask, name, row)]
    if not options:
        return None
    lacking, chosen = min(options, key=lambda option: option[0])
    whole = sum(number for _, _, number in chosen)
    if whole - lacking < nearly * whole:
        return None
    for where, name, number in chosen:
        floor.book(where, name, now_ns).keep(wanted.run_id, number, now_ns)
    shares = tuple(Share(node_id=where.node.id, gpu_type=name, count=number) for where, name, number in chosen)
    return Reservation(run_id=wanted.run_id, shares=shares, at_ns=None, is_bound=False)


def _is_near(floor: Floor, ask: Ask, count: float) -> bool:
    """Return whether so many devices may be free where a gang could be; a quick look, before nodes are compared."""
    reach = floor.reach(ask.shape)
    indexes = [group.index[name] for group, types, _ in reach.entries for name in types]
    most = [where.free[name] for where, types, _ in reach.singles.values() for name in types]
    most += [floor.places[node_id].free[name] for node_id, name in floor.books]
    if ask.shape.several:
        return sum(most) + sum(index.free for index in indexes) >= count
    return max(most + [index.counts[-1] for index in indexes if index.counts], default=0) >= count


def _nearest(
    ask: Ask, gpu_type: str, row: list[tuple[int, str, str, Place]]
) -> Iterator[tuple[int, list[tuple[Place, str, int]]]]:
    """Return what a gang would have on devices of one type, and how many of them it lacks."""
    count = ask.shape.gpus
    lacking, *_, where = min(row, key=lambda entry: entry[:3])
    if count is None or count <= where.node.total[gpu_type]:
        yield lacking, [(where, gpu_type, where.node.total[gpu_type] if count is None else count)]
    elif ask.shape.several:
        left, lacks = count, 0
        chosen: list[tuple[Place, str, int]] = []
        for missing, _, _, where in sorted(row, key=lambda entry: entry[:3]):
            number = min(left, where.node.total[gpu_type])
            chosen.append((where, gpu_type, number))
            lacks += max(0, number - (count - missing))
            left -= number
            if not left:
                yield lacks, chosen
                return


def unkept(floor: Floor, where: Place, gpu_type: str) -> int:
    """Return what is free of a node now beside what is kept; less than 0 where more is waited for."""
    book = floor.books.get((where.node.id, gpu_type))
    return where.free[gpu_type] if book is None else book.likely.free()


Need = tuple[Place, str, int, float, float]
"""A node, a type, how many; when that many are free there: likely, and at the latest."""


def _needs(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> list[Need]:
    """Return where a gang likely starts first: one node, or as many as it takes."""
    rows = _ready(floor, wanted, ask, now_ns)
    while rows and (rows[0][3], rows[0][5]) in floor.books:
        heapq.heappop(rows)
    options = rows[:1]
    for node_id, name in floor.books:
        where = floor.places[node_id]
        needed = where.node.total[name] if ask.shape.gpus is None else ask.shape.gpus
        if _is_usable(floor, wanted, ask, (where, name), now_ns) and 0 < needed <= where.node.total[name]:
            likely, bound = when(floor, where, name, needed, ask, now_ns)
            options.append((likely, bound, *where.entry, name, needed))
    if options and not math.isinf(min(options)[0]):
        likely, bound, _, _, where, name, needed = min(options)
        return [(where, name, needed, likely, bound)]
    is_large = ask.shape.several and (ask.shape.gpus or 0) > floor.reach(ask.shape).whole
    return _needs_several(floor, wanted, ask, now_ns) if is_large else []


def _ready(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> list[Ready]:
    """Return a heap of when a shape's devices are free on nodes of which nothing was promised when it was made."""
    key = ask.shape.number
    if floor.is_plain and not floor.reach(ask.shape).is_lent and key in floor.ready:
        return floor.ready[key]
    rows: list[Ready] = []
    for where, name in usable(floor, wanted, ask, now_ns):
        needed = where.node.total[name] if ask.shape.gpus is None else ask.shape.gpus
        if 0 < needed <= where.node.total[name] and (where.node.id, name) not in floor.books:
            likely, bound = where.ready(name, needed, now_ns)
            if not math.isinf(likely):
                rows.append((likely, bound, *where.entry, name, needed))
    heapq.heapify(rows)
    floor.ready[key] = rows
    return rows


def _is_usable(floor: Floor, wanted: Wanted, ask: Ask, at: tuple[Place, str], now_ns: int) -> bool:
    """Return whether a run may use a type of a node now, free or not."""
    where, name = at
    found = floor.reach(ask.shape).of(where)
    if found is None or name not in found[0] or where.node.away:
        return False
    return where.group.rank(floor.terms, wanted, found[1], now_ns) is not None


def _needs_several(floor: Floor, wanted: Wanted, ask: Ask, now_ns: int) -> list[Need]:
    """Return the whole nodes that a gang likely has first, and one part, of one type."""
    options: list[list[Need]] = []
    rows: dict[str, list[tuple[float, float, str, str, Place]]] = {}
    for where, name in usable(floor, wanted, ask, now_ns):
        likely, bound = when(floor, where, name, where.node.total[name], ask, now_ns)
        if not math.isinf(likely):
            rows.setdefault(name, []).append((likely, bound, *where.entry))
    for name, row in sorted(rows.items()):
        left, needs = ask.shape.gpus or 0, list[Need]()
        for likely, bound, _, _, where in sorted(row):
            number = min(left, where.node.total[name])
            needs.append((where, name, number, likely, bound))
            left -= number
            if not left:
                options.append(needs)
                break
    return min(options, key=lambda needs: (max(need[3] for need in needs), len(needs)), default=[])


def when(floor: Floor, where: Place, gpu_type: str, count: int, ask: Ask, now_ns: int) -> tuple[float, float]:
    """Return when so many devices of a node are free for a run beside what is promised: likely, and at the latest."""
    book = floor.books.get((where.node.id, gpu_type))
    if book is None:
        return where.ready(gpu_type, count, now_ns)
    return book.likely.earliest(count, ask.likely_ns), book.bound.earliest(count, ask.limit_ns)
