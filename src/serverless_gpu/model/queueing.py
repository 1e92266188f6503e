"""Who of those that wait is placed where, and what everybody else waits for. Values in, values out.

    queue, in order of priority class, then age ─┐
    nodes: what they have, who has it ───────────┴─▶ decide ─▶ placements, and a sentence for each that waits

A gang is placed whole or not at all, on one node, on devices of one type. The node that keeps the least free afterwards
is taken, so that large gangs find whole nodes. A run that names no pool goes to on-demand pools only.

The first gang of a kind (pool, type, machine) that cannot be placed *keeps* the node on which it fits soonest, the one
that lacks the fewest devices: nobody who comes later gets devices of that type there, so its wait ends when those who
are there now end. Everything else may be used. Those ahead of it are not bound by what it keeps.

Failure cases are sentences, not exceptions: what no node can ever serve waits, too (a node may join), and is told so
at once. Nodes that are away (silent, or with a problem of their own) are not used, and count as what could be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.model.hardware import CPU, GpuType, matches

_NAMED_MAX = 3


class Wanted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that waits.

    Attributes:
        title: what others read: ``"alice/bert-ft"``.
        priority: 0 is the first to be served.
        queued_ns: since when it waits, nanoseconds since 1970.
        gpus: how many devices; None for all of a node's.
        gpu_type: canonical name, or None for the only GPU type there is.
        pool: "" for any on-demand pool.
        machine: the only machine that will do, or "".
        platform: the only platform that will do, or "".
        python: the version of Python that it needs, as ``"3.11"``, or "".
        caller: the machine that has this version in any case, or "".
        avoid: identifiers of nodes that failed to start it; used when no other is free.
        not_before_ns: it is left alone until then, by the clock of `decide`; 0 for at once.
        held: what it is told until then.
    """

    run_id: str
    title: str
    priority: int
    queued_ns: int
    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    machine: str = ""
    platform: str = ""
    python: str = ""
    caller: str = ""
    avoid: frozenset[str] = frozenset()
    not_before_ns: int = 0
    held: str = ""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one type that a run has on a node."""

    title: str
    gpu_type: str
    count: int


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node as it can be used now.

    Attributes:
        reserved: whether only runs that name its pool may use it.
        pythons: versions of Python that it has; none when that is not known.
        total: devices by type.
        outside: those of `total` that others than this server use, or that are in quarantine.
        holdings: what runs of this server have.
        own: GPU types that the node declares itself.
        away: why it cannot be used now, in words that follow its name, or "".
    """

    id: str
    name: str
    pool: str = ""
    reserved: bool = False
    machine: str = ""
    platform: str = ""
    pythons: tuple[str, ...] = ()
    total: Mapping[str, int]
    outside: Mapping[str, int] = {}
    holdings: tuple[Holding, ...] = ()
    own: tuple[GpuType, ...] = ()
    away: str = ""


class Placement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A run that is to start: `count` devices of `gpu_type` on a node."""

    run_id: str
    node_id: str
    gpu_type: str
    count: int


class Wait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Why a run is not placed.

    Attributes:
        why: the sentence, without the place.
        place: its place among those that want the same kind of devices; 1 is the next, 0 is none: it is not in line.
        impossible: no node that has joined can ever serve it.
    """

    why: str
    place: int
    impossible: bool = False

    @property
    def sentence(self) -> str:
        """Return what people read."""
        return self.why if self.impossible or not self.place else f"{self.why}; you are {ordinal(self.place)}"


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a queue and the nodes."""

    placements: tuple[Placement, ...]
    waiting: Mapping[str, Wait]


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What a gang would take of one node."""

    gpu_type: str
    count: int


_Where = tuple[str, str, str, str, str]
_Shape = tuple[int | None, str | None, _Where]
_Kind = tuple[str | None, str, str]


def ordinal(number: int) -> str:
    """Return ``"1st"``, ``"2nd"``, ``"3rd"``, ``"4th"`` …"""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def decide(queue: Sequence[Wanted], nodes: Sequence[Node], *, now_ns: int = 0) -> Decision:
    """Return who starts where, and why the others wait.

    Args:
        queue: everybody who waits, in any order.
        nodes: everything that has joined.
        now_ns: the time; those that are left alone until later wait beside the line, and nothing is kept for them.
    """
    floor = _Floor(nodes)
    placements: list[Placement] = []
    waits: dict[_Shape, list[tuple[Wanted, int]]] = {}
    never: dict[_Shape, str] = {}
    kinds: Counter[_Kind] = Counter()
    keepers: set[_Kind] = set()
    waiting = {wanted.run_id: Wait(why=wanted.held, place=0) for wanted in queue if wanted.not_before_ns > now_ns}
    for wanted in sorted((wanted for wanted in queue if wanted.run_id not in waiting), key=_order):
        shape, kind = _shape(wanted), (wanted.gpu_type, wanted.pool, wanted.machine)
        # What is free only shrinks during a pass: what could not be placed once cannot be placed later.
        placement = None if shape in waits else floor.place(wanted)
        if placement is not None:
            placements.append(placement)
            continue
        if shape not in waits:
            never[shape] = impossible(wanted, nodes)
            if kind not in keepers and floor.keep(wanted):
                keepers.add(kind)
        kinds[kind] += not never[shape]
        waits.setdefault(shape, []).append((wanted, kinds[kind]))
    for shape, members in waits.items():
        waiting |= _waits(members, never[shape], floor)
    return Decision(placements=tuple(placements), waiting=waiting)


def impossible(wanted: Wanted, nodes: Sequence[Node]) -> str:
    """Return why nothing that has joined can ever serve a run, or "" when something can."""
    if not nodes:
        return "no node has joined this server yet"
    eligible = [node for node in nodes if _admits(node, wanted)]
    if not eligible:
        return _nowhere(wanted, nodes)
    if any(_needs(wanted, node, eligible) for node in eligible):
        return ""
    return _lacking(wanted, eligible)


def _waits(members: Sequence[tuple[Wanted, int]], never: str, floor: _Floor) -> dict[str, Wait]:
    """Return what is said to the gangs of one shape: only the first of them may have something kept for it."""
    sentences = [never or floor.why(wanted) for wanted, _ in members[:2]]
    return {
        wanted.run_id: Wait(why=sentences[min(number, 1)], place=place, impossible=bool(never))
        for number, (wanted, place) in enumerate(members)
    }


def _order(wanted: Wanted) -> tuple[int, int, str]:
    return (wanted.priority, wanted.queued_ns, wanted.run_id)


def _shape(wanted: Wanted) -> _Shape:
    return (wanted.gpus, wanted.gpu_type, _where(wanted))


def _where(wanted: Wanted) -> _Where:
    """Return everything on which it depends which nodes a run may use."""
    return (wanted.pool, wanted.machine, wanted.platform, wanted.python, wanted.caller if wanted.python else "")


def _admits(node: Node, wanted: Wanted) -> bool:
    """Return whether a run may use a node at all, whatever devices it has."""
    pool_fits = node.pool == wanted.pool if wanted.pool else not node.reserved
    return (
        pool_fits
        and wanted.machine in ("", node.machine)
        and (not wanted.platform or not node.platform or wanted.platform == node.platform)
        and _has_python(node, wanted)
    )


def _has_python(node: Node, wanted: Wanted) -> bool:
    return not wanted.python or not node.pythons or wanted.python in node.pythons or wanted.caller == node.machine


def _needs(wanted: Wanted, node: Node, eligible: Sequence[Node]) -> list[Need]:
    """Return what a gang could take of a node if nobody else were there: one entry for each type that will do."""
    if wanted.gpu_type is None:
        types = _gpu_types(eligible)
        fitting = [name for name in node.total if name in types] if len(types) == 1 else []
    else:
        fitting = [name for name in node.total if matches(wanted.gpu_type, name, node.own)]
    counts = [(name, wanted.gpus or node.total[name]) for name in sorted(fitting)]
    return [Need(gpu_type=name, count=count) for name, count in counts if 0 < count <= node.total[name]]


def _gpu_types(nodes: Sequence[Node]) -> list[str]:
    return sorted({name for node in nodes for name, count in node.total.items() if name != CPU and count})


class _Floor:
    """The nodes while a pass goes on: what is free shrinks, and what is kept for somebody grows."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._kept: dict[tuple[str, str], Wanted] = {}
        self._new: dict[str, list[Holding]] = {}
        self._free: dict[tuple[str, str], int] = {}
        self._eligible: dict[_Where, list[Node]] = {}
        for node in nodes:
            held = Counter[str]()
            for holding in node.holdings:
                held[holding.gpu_type] += holding.count
            for name, total in node.total.items():
                self._free[node.id, name] = max(0, total - node.outside.get(name, 0) - held[name])

    def place(self, wanted: Wanted) -> Placement | None:
        """Take devices for a gang where they are free, and return which; None when they are not."""
        options = [
            (node.id in wanted.avoid, self._free[node.id, need.gpu_type] - need.count, node.name, node, need)
            for node, need in self._possible(wanted)
            if not node.away
            and need.count <= self._free[node.id, need.gpu_type]
            and (node.id, need.gpu_type) not in self._kept
        ]
        if not options:
            return None
        *_, node, need = min(options, key=lambda option: option[:3])
        self._free[node.id, need.gpu_type] -= need.count
        holding = Holding(title=wanted.title, gpu_type=need.gpu_type, count=need.count)
        self._new.setdefault(node.id, []).append(holding)
        return Placement(run_id=wanted.run_id, node_id=node.id, gpu_type=need.gpu_type, count=need.count)

    def keep(self, wanted: Wanted) -> bool:
        """Keep the node on which a gang fits soonest from everybody who comes later; return whether there is one."""
        nearest = self._nearest(wanted, kept=False)
        if nearest is None:
            return False
        node, need = nearest
        self._kept[node.id, need.gpu_type] = wanted
        return True

    def why(self, wanted: Wanted) -> str:
        """Return what a gang waits for."""
        nearest = self._nearest(wanted, kept=True)
        if nearest is None:
            away = sorted({f"{node.name} {node.away}" for node, _ in self._possible(wanted)})
            return "; ".join((_needing(wanted), *_some(away)))
        node, need = nearest
        free = self._free[node.id, need.gpu_type]
        keeper = self._kept.get((node.id, need.gpu_type))
        parts = [_needing(wanted, need), f"{free or 'none'} free on {node.name}"]
        if keeper is not None and keeper.run_id != wanted.run_id and free:
            parts[-1] += f", kept for {keeper.title}, which is ahead"
        holders = (*node.holdings, *self._new.get(node.id, ()))
        parts += _some([f"{title} has {count} of it" for title, count in _by_title(holders, need.gpu_type)])
        outside = node.outside.get(need.gpu_type, 0)
        if outside:
            parts.append(f"{outside} of it used by others than this server, or in quarantine")
        return "; ".join(parts)

    def _possible(self, wanted: Wanted) -> list[tuple[Node, Need]]:
        key = _where(wanted)
        if key not in self._eligible:
            self._eligible[key] = [node for node in self._nodes if _admits(node, wanted)]
        eligible = self._eligible[key]
        return [(node, need) for node in eligible for need in _needs(wanted, node, eligible)]

    def _nearest(self, wanted: Wanted, *, kept: bool) -> tuple[Node, Need] | None:
        """Return where a gang fits soonest; what is kept for others counts only where `kept` says so, and then last."""
        options: list[tuple[bool, int, str, Node, Need]] = []
        for node, need in self._possible(wanted):
            keeper = self._kept.get((node.id, need.gpu_type))
            others = keeper is not None and keeper.run_id != wanted.run_id
            if not node.away and (kept or not others):
                lacking = need.count - self._free[node.id, need.gpu_type]
                options.append((others, lacking, node.name, node, need))
        if not options:
            return None
        *_, node, need = min(options, key=lambda option: option[:3])
        return node, need


def _needing(wanted: Wanted, need: Need | None = None) -> str:
    count = wanted.gpus or (need.count if need is not None else None)
    name = wanted.gpu_type or (need.gpu_type if need is not None else "GPU")
    what = f"needs {count} {name}" if wanted.gpus else f"needs every {name} of a node"
    if wanted.gpus is None and need is not None:
        what += f" ({need.count})"
    return what if wanted.gpus is None or count == 1 else f"{what} on one node"


def _by_title(holdings: Sequence[Holding], gpu_type: str) -> list[tuple[str, int]]:
    counts = Counter[str]()
    for holding in holdings:
        if holding.gpu_type == gpu_type:
            counts[holding.title] += holding.count
    return counts.most_common()


def _some(texts: Sequence[str]) -> list[str]:
    more = len(texts) - _NAMED_MAX
    return [*texts[:_NAMED_MAX], f"{more} more"] if more > 0 else list(texts)


def _nowhere(wanted: Wanted, nodes: Sequence[Node]) -> str:
    """Return why no node may be used at all."""
    if wanted.pool and not any(node.pool == wanted.pool for node in nodes):
        pools = sorted({node.pool for node in nodes})
        return f"pool {wanted.pool!r} has no nodes; pools that have: {', '.join(pools)}"
    if wanted.machine and not any(node.machine == wanted.machine for node in nodes):
        return 'its files lie on a machine that is no node of this server; env="snapshot" takes them along'
    here = [node for node in nodes if wanted.machine in ("", node.machine)]
    platforms = sorted({node.platform for node in here if node.platform})
    if wanted.platform and platforms and wanted.platform not in platforms:
        return f"made on {wanted.platform}, and the nodes are {', '.join(platforms)}"
    in_reach = [node for node in here if (node.pool == wanted.pool if wanted.pool else not node.reserved)]
    if in_reach and not any(_has_python(node, wanted) for node in in_reach):
        pythons = sorted({python for node in in_reach for python in node.pythons}, key=_version)
        return f"needs Python {wanted.python}, and the nodes have {', '.join(pythons)}; `uv python install` adds one"
    if not wanted.pool:
        pools = sorted({node.pool for node in here if node.reserved})
        return f"every node is in a reserved pool, which has to be named: {', '.join(pools)}"
    return f"no node of pool {wanted.pool!r} is what it needs ({wanted.platform or 'its own machine'})"


def _version(python: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in python.split("."))


def _lacking(wanted: Wanted, eligible: Sequence[Node]) -> str:
    """Return why the devices of the nodes that may be used will never do."""
    where = f" in pool {wanted.pool!r}" if wanted.pool else ""
    if wanted.gpu_type is None:
        types = _gpu_types(eligible)
        if not types:
            return f'no node{where} has a GPU; gpu_type="CPU" runs on CPU slots'
        if len(types) > 1:
            return f"there are several GPU types{where} ({', '.join(types)}), and gpu_type does not say which"
    fitting = [
        (count, name, node)
        for node in eligible
        for name, count in node.total.items()
        if count and (matches(wanted.gpu_type, name, node.own) if wanted.gpu_type else name != CPU)
    ]
    if not fitting:
        there = Counter[str]()
        for node in eligible:
            there.update({name: count for name, count in node.total.items() if name != CPU})
        listed = ", ".join(f"{count} {name}" for name, count in sorted(there.items())) or "no GPU"
        return f"no node{where} has {wanted.gpu_type}; there is {listed}"
    count, name, node = max(fitting, key=lambda entry: entry[0])
    asked = wanted.gpu_type or name
    return f"needs {wanted.gpus} {asked} on one node, and the largest{where} has {count} ({node.name})"
