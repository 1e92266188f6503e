"""Available capacity: last reported nodes minus running attempts, with views of nodes and pools."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu import ambient
from serverless_gpu.ambient import Clock
from serverless_gpu.model.egress import OPEN, Egress
from serverless_gpu.model.hardware import census
from serverless_gpu.model.isolation import NONE, Level, reaches
from serverless_gpu.model.scheduling.values import Node
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.nodes import node_rules
from serverless_gpu.server.records import active_runs, nodes, pools
from serverless_gpu.server.records.active_runs import ActiveCrew, ActiveRun
from serverless_gpu.server.records.crews import CrewId
from serverless_gpu.server.records.nodes import StoredBinding, StoredNode
from serverless_gpu.server.records.pools import RESERVED, UNSET, StoredPool
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.wire.nodes import NodeView, PoolView

EGRESS = "egress"
"""Capability of nodes that support network policies."""
STATES = UP, DRAINING, DEGRADED, SILENT, GONE, REVOKED = "UP", "DRAINING", "DEGRADED", "SILENT", "GONE", "REVOKED"


class CapacitySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes, pools and running attempts in one database transaction."""

    nodes: tuple[StoredNode, ...]
    pools: tuple[StoredPool, ...]
    active: tuple[ActiveRun, ...]
    freed: frozenset[CrewId] = frozenset()
    """Attempts that have released their devices on a node but still send results."""

    def having(self, run: ActiveRun) -> tuple[ActiveCrew, ...]:
        """Return the run's rows in `crews` that still use devices."""
        return tuple(crew for crew in run.crews if crew.id not in self.freed)

    def minimums(self) -> dict[str, Minimum]:
        """Return the requirements of pools for their nodes, by the pool's name."""
        return {pool.name: minimum_of(pool) for pool in self.pools}

    def by_node(self) -> dict[str, list[Holder]]:
        """Return the runs that use devices, by node identifier."""
        found: dict[str, list[Holder]] = defaultdict(list)
        for run in self.active:
            for crew in self.having(run):
                found[crew.node_id].append(Holder(run.id, run.gpu_type, crew.gpus))
        return found


class Minimum(NamedTuple):
    """Isolation level and network policy that a pool requires of its nodes."""

    level: Level = NONE
    egress: Egress = OPEN


def minimum_of(pool: StoredPool) -> Minimum:
    """Return the requirements of a pool for its nodes."""
    return Minimum(pool.level, pool.mode)


class Holder(NamedTuple):
    """A run that uses devices on one node, with the number of these devices."""

    run_id: str
    gpu_type: str
    gpus: int


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Current times, and the silence after which a node counts as gone, in nanoseconds."""

    boottime_ns: int
    wall_ns: int
    gone_ns: int


def now(settings: Settings, clock: Clock) -> Times:
    """Return the current wall clock time and boottime."""
    gone_ns = round((settings.partition_grace_s + settings.partition_margin_s) * 1e9)
    return Times(boottime_ns=clock.boottime_ns(), wall_ns=clock.wall_ns(), gone_ns=gone_ns)


def load(connection: sa.Connection, leases: Leases) -> CapacitySnapshot:
    """Read nodes, pools and running attempts from the database."""
    freed = leases.freed()  # A run may safely end between this read and the next read.
    return CapacitySnapshot(
        nodes=tuple(nodes.every(connection)),
        pools=tuple(pools.every(connection)),
        active=tuple(active_runs.active_briefly(connection)),
        freed=freed,
    )


def title(run: ActiveRun | StoredRun) -> str:
    """Return the title of a run in messages to other users: owner and name."""
    return f"{run.owner}/{run.name or run.id}"


class PlannerNodes:
    """Caches nodes in the data structures of the planner. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], Node]] = {}

    def of(self, snapshot: CapacitySnapshot, presence: Presence, times: Times) -> list[Node]:
        """Return the nodes of a snapshot in the data structures of the planner."""
        known, self._known = self._known, {}
        minimums = snapshot.minimums()
        for node in snapshot.nodes:
            why, sharing = away(node, presence, times, minimums), node_rules.sharing(node.rules, times.wall_ns)
            key = (node.hello, node.rules, node.name, node.pool, node.machine, why, sharing)
            before = known.get(node.id)
            if before is None or before[0] != key:
                before = key, _offer(node, away=why, sharing=sharing)
            self._known[node.id] = before
        return [offered for _, offered in self._known.values()]


def offers(snapshot: CapacitySnapshot, presence: Presence, times: Times) -> list[Node]:
    """Return the nodes of a snapshot in the data structures of the planner, without a cache."""
    return PlannerNodes().of(snapshot, presence, times)


def view_nodes(
    snapshot: CapacitySnapshot, presence: Presence, times: Times, *, keys: Mapping[str, StoredBinding]
) -> list[NodeView]:
    """Return the views of nodes for users.

    `keys` are the bindings of nodes with a key, by token identifier.
    """
    held, minimums = snapshot.by_node(), snapshot.minimums()
    return [
        _view(node, held.get(node.id, ()), presence, times, minimums, keys.get(node.token_id))
        for node in snapshot.nodes
    ]


def view_pools(
    snapshot: CapacitySnapshot, presence: Presence, times: Times, *, queued: Mapping[str, int]
) -> list[PoolView]:
    """Return the pool views that users see.

    `queued` counts waiting runs by requested pool. The key "" counts runs that may use any on-demand pool.
    """
    offered, held = offers(snapshot, presence, times), snapshot.by_node()
    anywhere = queued.get("", 0)
    return [
        _view_pool(pool, offered, held, queued=queued.get(pool.name, 0) + (anywhere if pool.kind != RESERVED else 0))
        for pool in snapshot.pools
    ]


def last_seen_ns(node: StoredNode, presence: Presence, times: Times) -> int:
    """Return the time of a node's last message from memory or the database, in nanoseconds since 1970."""
    last_ns = presence.last_ns(node.id)
    return node.seen_ns if last_ns is None else times.wall_ns - (times.boottime_ns - last_ns)


def away(node: StoredNode, presence: Presence, times: Times, minimums: Mapping[str, Minimum]) -> str:
    """Return why a node is unavailable now, as text that follows the node's name, or "".

    `minimums` are the requirements of pools, by the pool's name.
    """
    if node.revoked_ns is not None:
        return "was revoked by an administrator; its runs end when their partition grace has passed"
    lost = presence.why_lost(node.id)
    if lost:
        return f"is not available: {lost}"
    if not presence.is_there(node.id, now_ns=times.boottime_ns):
        return f"has been silent since {ambient.format_clock(last_seen_ns(node, presence, times))}"
    if node.hello.problem:
        return f"cannot start runs now: {node.hello.problem}"
    if node.hello.degraded:
        return f"is degraded, because the state of its devices is unknown: {node.hello.degraded}"
    why = node.hello.draining or node_rules.drained(node.rules)
    if why:
        return f"starts no new runs: {why}"
    minimum = minimums.get(node.pool, Minimum())
    if not reaches(node.hello.isolation, minimum.level):
        cause = node.hello.isolation_problem or "the node has an older version"
        return f"offers no isolation {minimum.level}, which its pool {node.pool} requires: {cause}"
    if minimum.level != NONE and minimum.egress != OPEN and (cause := egress_problem(node)):
        return f"cannot enforce the egress {minimum.egress}, which its pool {node.pool} requires: {cause}"
    return ""


def egress_problem(node: StoredNode) -> str:
    """Return the reason why a node cannot enforce a network policy, or ""."""
    return node.hello.egress_problem if EGRESS in node.hello.takes else "the node has an older version"


def state_of(node: StoredNode, presence: Presence, times: Times) -> str:
    """Return the state of a node, one of `STATES`."""
    if node.revoked_ns is not None:
        return REVOKED
    if presence.is_there(node.id, now_ns=times.boottime_ns):
        if node.hello.draining or node.rules.drain is not None:
            return DRAINING
        return DEGRADED if node.hello.degraded else UP
    return GONE if times.wall_ns - last_seen_ns(node, presence, times) > times.gone_ns else SILENT


def _offer(node: StoredNode, *, away: str, sharing: node_rules.SharingState) -> Node:
    total, outside = census(node.hello.devices, node.unavailable)
    asked = node.rules.calendar
    return Node(
        id=node.id,
        name=node.name,
        pool=node.pool,
        machine=node.machine,
        platform=node.hello.platform,
        pythons=node.hello.pythons,
        total=total,
        outside=outside,
        left_out=node_rules.left_out(node.rules),
        own=node.hello.own_types,
        away=away or sharing.problem,
        owner=asked.owner,
        owner_first=asked.owner_first,
        # With an invalid calendar, the node counts as shared, so that runs for this node stay satisfiable.
        shared=sharing.shared or bool(sharing.problem),
        turns_ns=sharing.turns_ns,
        crews=node.takes_crews,
    )


def _view(
    node: StoredNode,
    holders: Sequence[Holder],
    presence: Presence,
    times: Times,
    minimums: Mapping[str, Minimum],
    bound: StoredBinding | None,
) -> NodeView:
    seen_ns = last_seen_ns(node, presence, times)
    found = node_rules.sharing(node.rules, times.wall_ns)
    sentence = away(node, presence, times, minimums) or found.problem
    return NodeView(
        id=node.id,
        name=node.name,
        state=state_of(node, presence, times),
        sentence=sentence,
        pool=node.pool,
        devices=node.hello.devices,
        unavailable=node.hello.unavailable,
        busy=sum(one.gpus for one in holders),
        runs=tuple(one.run_id for one in holders),
        version=node.hello.version,
        seen_ns=seen_ns,
        clock=presence.clock(node.id),
        rules=node.rules,
        shared=found.shared,
        turns_ns=found.turns_ns,
        findings=node.hello.findings,
        isolation=node.hello.isolation,
        isolation_problem=node.hello.isolation_problem,
        egress_problem=egress_problem(node),
        key="" if bound is None else bound.node.key,
        enrolled_ns=None if bound is None else bound.enrolled_ns,
        rotating=bound is not None and bound.rotate_ns is not None,
    )


def _view_pool(
    pool: StoredPool, offered: Sequence[Node], held_by: Mapping[str, Sequence[Holder]], *, queued: int
) -> PoolView:
    members = [node for node in offered if node.pool == pool.name]
    total, free = Counter[str](), Counter[str]()
    for node in members:
        total.update(node.total)
        if node.away:
            continue
        held = Counter[str]()
        for one in held_by.get(node.id, ()):
            held[one.gpu_type] += one.gpus
        for name, count in node.total.items():
            free[name] += max(0, count - node.outside.get(name, 0) - held[name])
    return PoolView(
        name=pool.name,
        kind=pool.kind,
        nodes=tuple(node.name for node in members),
        total=dict(total),
        free={name: free[name] for name in total},
        queued=queued,
        lends=pool.planned.lends,
        return_s=pool.return_s,
        isolation=pool.isolation or UNSET,
        egress=pool.mode,
        allow=pool.allow,
    )
