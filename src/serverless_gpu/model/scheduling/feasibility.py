"""Feasibility: decides whether any node could ever serve a run, and suggests similar requests (F82).

    nodes, pools, a request ─▶ never served? ── no ──▶ None
                                   └── yes ─▶ Shortage: why, and the request with another type, fewer devices or a pool

The server's admission calls `shortage` to refuse a run before it enters the queue. The planner calls the other
functions to explain why a queued run waits forever. A pool with `single_principal` runs only the code of one principal.
Runs of other principals wait for that pool with the reason `isolation`. Isolation never makes a run unsatisfiable,
because an administrator can change the isolation setting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from serverless_gpu.model.hardware import CPU, matches
from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.model.scheduling.capacity import Capacity, has_python
from serverless_gpu.model.scheduling.gang_placement import most, sizes
from serverless_gpu.model.scheduling.planner_state import PlannerState
from serverless_gpu.model.scheduling.preemption import could_use, is_open
from serverless_gpu.model.scheduling.values import Node, Pool, QueuedRun, QueuePolicy, TimedShape
from serverless_gpu.model.scheduling.wait_messages import first_few, isolation_sentence

NO_GPU_REMEDY = '; gpu_type="CPU" runs on CPU slots'
ELSEWHERE_REMEDY = '; env="snapshot" copies them to the node'
CHOICES_MAX = 6


class FeasibleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A feasible variant of a request, with values only for changed fields."""

    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    env: str = ""

    def changes(self) -> dict[str, int | str]:
        """Return the changed values by option name."""
        fields = {"gpus": self.gpus, "gpu_type": self.gpu_type, "pool": self.pool, "env": self.env}
        return {name: value for name, value in fields.items() if value}


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why nodes could never serve a run, and similar requests."""

    why: str  # Reason for the shortage as text, without names of client options.
    # Similar requests that the nodes could serve, the most similar request first.
    choices: tuple[FeasibleRequest, ...] = ()


def shortage(nodes: Sequence[Node], pools: Iterable[Pool], wanted: QueuedRun) -> Shortage | None:
    """Return the reason why no node could ever serve a run, or None if a node could serve the run."""
    state = PlannerState(QueuePolicy())
    for pool in pools:
        state.capacity.see_pool(pool)
    for node in nodes:
        state.capacity.see(node)
    why = never_served(state, wanted, state.queue.ask(wanted))
    if not why:
        return None
    changed = ((choice, _changed(wanted, choice)) for choice in _similar(nodes, wanted))
    found = [choice for choice, similar in changed if not never_served(state, similar, state.queue.ask(similar))]
    return Shortage(why=why.removesuffix(NO_GPU_REMEDY).removesuffix(ELSEWHERE_REMEDY), choices=tuple(_best(found)))


def _similar(nodes: Sequence[Node], wanted: QueuedRun) -> Iterator[FeasibleRequest]:
    """Yield similar requests, the most similar first, with GPUs before CPU slots."""
    pools = sorted({node.pool for node in nodes} - {wanted.pool, ""})
    types = sorted(
        {name for node in nodes for name, count in node.total.items() if count}, key=lambda name: (name == CPU, name)
    )
    sizes = sorted({count for node in nodes for count in node.total.values() if count}, reverse=True)
    fewer = [size for size in sizes if wanted.gpus is not None and size < wanted.gpus]
    others = [name for name in types if name != wanted.gpu_type]
    if wanted.machine:
        yield FeasibleRequest(env="snapshot")
    yield from (FeasibleRequest(pool=pool) for pool in pools)
    if wanted.gpu_type is not None:
        yield from (FeasibleRequest(gpus=size) for size in fewer)
    for name in others:
        yield FeasibleRequest(gpu_type=name)
        yield from (FeasibleRequest(gpu_type=name, gpus=size) for size in fewer)
    yield from (FeasibleRequest(gpu_type=name, pool=pool) for pool in pools for name in others)


def _changed(wanted: QueuedRun, choice: FeasibleRequest) -> QueuedRun:
    changes = choice.changes()
    if changes.pop("env", None):
        changes |= {"machine": ""}
    return msgspec.structs.replace(wanted, **changes)


def _best(choices: Iterable[FeasibleRequest]) -> Iterator[FeasibleRequest]:
    """Yield the best alternative per pool and type, with the largest number of devices.

    The function omits alternatives that change pool and type if changing one of the two is enough.
    """
    seen: set[tuple[str, str, str | None]] = set()
    for choice in choices:
        key = (choice.env, choice.pool, choice.gpu_type)
        is_double = bool(choice.pool and choice.gpu_type)
        simpler = {(choice.env, choice.pool, None), (choice.env, "", choice.gpu_type)} if is_double else set()
        if key not in seen and len(seen) < CHOICES_MAX and not seen & simpler:
            seen.add(key)
            yield choice


def like(wanted: QueuedRun) -> QueuedRun:
    """Return a request without the fields that do not affect feasibility."""
    return msgspec.structs.replace(
        wanted,
        run_id="",
        title="",
        queued_ns=0,
        not_before_ns=0,
        held="",
        avoid=frozenset(),
        expected_s=None,
        preemptions=0,
    )


def never_served(state: PlannerState, wanted: QueuedRun, ask: TimedShape) -> str:
    """Return the reason why no current node can ever serve a run, ignoring isolation, or ""."""
    never = impossible(state.capacity, wanted, ask)
    if not never or not wanted.second_principal:
        return never
    allowed = _allowed(wanted)
    return impossible(state.capacity, allowed, state.queue.ask(allowed))


def impossible(capacity: Capacity, wanted: QueuedRun, ask: TimedShape) -> str:
    """Return the reason why no current node can ever serve a run, or "" if a node can serve the run."""
    if not capacity.places:
        return "no node has joined this server yet"
    return "" if could_be(capacity, wanted, ask) else _sentence(capacity, wanted)


def could_be(capacity: Capacity, wanted: QueuedRun, ask: TimedShape) -> bool:
    """Return True if a current node could ever serve a run."""
    if any((wanted.gpus or 1) <= size for _, size in sizes(capacity, wanted, ask)):
        return True
    if not ask.shape.several or wanted.gpus is None:
        return False
    return max(most(capacity, wanted, ask).values(), default=0) >= wanted.gpus


def isolation_problem(state: PlannerState, wanted: QueuedRun, ask: TimedShape) -> str:
    """Return the reason why isolation blocks a run on all suitable nodes, and the remedy, or ""."""
    if not wanted.second_principal or not impossible(state.capacity, wanted, ask):
        return ""
    pools = state.capacity.terms.pools
    reach = state.capacity.reach(state.queue.ask(_allowed(wanted)).shape)
    closed = {place.node.pool for place, _types, _lender in reach.places()}
    named = sorted(name for name in closed if name in pools and pools[name].single_principal)
    return isolation_sentence(named or ["default"])


def _allowed(wanted: QueuedRun) -> QueuedRun:
    return msgspec.structs.replace(wanted, second_principal=False)


def _sentence(capacity: Capacity, wanted: QueuedRun) -> str:
    nodes = [
        place.node for place in sorted(capacity.places.values(), key=lambda place: (place.node.name, place.node.id))
    ]
    admitted = [node for node in nodes if _admits(capacity, node, wanted)]
    open_to = [node for node in admitted if is_open(wanted, node)]
    if admitted and not open_to:
        owners = sorted({node.owner for node in admitted if node.owner})
        if any(is_open(msgspec.structs.replace(wanted, preemptible=True), node) for node in admitted):
            first = f"the owner has priority on every suitable node ({', '.join(owners)})"
            return f"{first}: runs of other users need resume=True"
        return f"every suitable node is reserved for its owner: {', '.join(owners) or 'no other user may use it'}"
    if not open_to:
        return _nowhere(capacity, wanted, nodes)
    anywhere = msgspec.structs.replace(wanted, machine="")
    beyond = [node for node in nodes if _admits(capacity, node, anywhere) and is_open(wanted, node)]
    return _lacking(wanted, open_to) + _instead(wanted, beyond)


def _admits(capacity: Capacity, node: Node, wanted: QueuedRun) -> bool:
    is_here = wanted.machine in ("", node.machine)
    on_platform = not wanted.platform or not node.platform or wanted.platform == node.platform
    return could_use(wanted, node, capacity.terms) and is_here and on_platform and _has_python(node, wanted)


def _has_python(node: Node, wanted: QueuedRun) -> bool:
    return has_python(node, wanted.python) or wanted.caller == node.machine


def _nowhere(capacity: Capacity, wanted: QueuedRun, nodes: Sequence[Node]) -> str:
    """Return the reason why a run may not use any node."""
    if wanted.pool and not any(node.pool == wanted.pool for node in nodes):
        pools = sorted({node.pool for node in nodes})
        return f"pool {wanted.pool!r} has no nodes; pools with nodes: {', '.join(pools)}"
    if wanted.machine and not any(node.machine == wanted.machine for node in nodes):
        return f"the files of the run are on a machine that is not a node of this server{ELSEWHERE_REMEDY}"
    here = [node for node in nodes if wanted.machine in ("", node.machine)]
    platforms = sorted({node.platform for node in here if node.platform})
    if wanted.platform and platforms and wanted.platform not in platforms:
        return f"the run needs {wanted.platform}, and the nodes are {', '.join(platforms)}"
    in_reach = [node for node in here if could_use(wanted, node, capacity.terms)]
    if in_reach and not any(_has_python(node, wanted) for node in in_reach):
        pythons = sorted(
            {python for node in in_reach for python in node.pythons},
            key=lambda python: tuple(int(part) if part.isdigit() else 0 for part in python.split(".")),
        )
        return (
            f"needs Python {wanted.python}, and the nodes have {', '.join(pythons)}; install it with `uv "
            "python install`"
        )
    if not wanted.pool and not in_reach:
        pools = sorted({node.pool for node in here})
        lend = [name for name in pools if name in capacity.terms.pools and capacity.terms.pools[name].lends]
        or_lent = (
            f"; runs of BEST_EFFORT with resume=True or a short timeout= may borrow devices of {', '.join(lend)}"
            if lend
            else ""
        )
        return f"every node is in a reserved pool, which the run must name: {', '.join(pools)}{or_lent}"
    where = f" of pool {wanted.pool!r}" if wanted.pool else ""
    return f"no node{where} is suitable: the run needs {wanted.platform or 'its own machine'}"


def _lacking(wanted: QueuedRun, eligible: Sequence[Node]) -> str:
    """Return the reason why the devices of the usable nodes can never serve a run."""
    where = f" in pool {wanted.pool!r}" if wanted.pool else ""
    if wanted.gpu_type is None:
        types = sorted({name for node in eligible for name, count in node.total.items() if name != CPU and count})
        if not types:
            return f"no node{where} has a GPU{NO_GPU_REMEDY}"
        if len(types) > 1:
            return f"there are several GPU types{where} ({', '.join(types)}), and gpu_type does not select one"
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
        return f"no node{where} has {wanted.gpu_type}; the nodes have {listed}"
    count, name, node = max(fitting, key=lambda entry: entry[0])
    asked = wanted.gpu_type or name
    if wanted.several_nodes:
        return _too_few(wanted, [entry[1:] for entry in fitting], asked)
    return f"needs {wanted.gpus} {asked} on one node, and the largest{where} has {count} ({node.name})"


def _kinds(nodes: Sequence[tuple[str, Node]]) -> dict[tuple[str, str], list[int]]:
    """Return the node sizes for a multi-node gang, by pool and device type, in descending order."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for name, node in nodes:
        if node.crews and node.total[name]:
            kinds.setdefault((node.pool, name), []).append(node.total[name])
    return {kind: sorted(sizes, reverse=True) for kind, sizes in sorted(kinds.items())}


def _too_few(wanted: QueuedRun, fitting: Sequence[tuple[str, Node]], asked: str) -> str:
    """Return the reason why no pool ever has enough devices for a multi-node gang."""
    kinds = _kinds(fitting)
    old = sorted({node.name for _, node in fitting if not node.crews})
    without = f"; {', '.join(first_few(old))}: the version does not support gangs on several nodes" if old else ""
    needs = f"needs {wanted.gpus} {asked}"
    if not kinds:
        return f"{needs} on several nodes{without}"
    (pool, _), sizes = max(kinds.items(), key=lambda entry: sum(entry[1]))
    of = f" of pool {pool!r}" if pool else ""
    if sum(sizes) >= (wanted.gpus or 0):
        most = sum(sizes[:NODES_MAX])
        return f"{needs}, and a gang has {NODES_MAX} nodes at most: the largest{of} have {most} together{without}"
    if len(sizes) == 1:
        return f"{needs}; the only node{of} has {sizes[0]}{without}"
    return f"{needs}; all {len(sizes)} nodes{of} have {sum(sizes)} together{without}"


def _instead(wanted: QueuedRun, nodes: Sequence[Node]) -> str:
    """Return a hint on the option that would let a single-node gang use several nodes, or ""."""
    count = wanted.gpus or 0
    if not wanted.alone or wanted.several_nodes or wanted.gpu_type is None:
        return ""
    own = [(name, node) for node in nodes for name in node.total if matches(wanted.gpu_type, name, node.own)]
    ways = [
        number
        for sizes in _kinds(own).values()
        for number in range(2, min(len(sizes), NODES_MAX) + 1)
        if sum(sizes[:number]) >= count > sum(sizes[: number - 1])
    ]
    return f"; {wanted.alone} {min(ways)} nodes would be enough" if ways else ""
