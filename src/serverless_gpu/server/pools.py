"""Changes pools and queue shares, and serves the routes of pools.

Each change of a pool or share adds an audit entry and wakes the scheduler. Lowering the isolation of a pool or of a
node needs the right `isolation.lower` (`identity/rights.py`). `runs/queue_views.py` contains the routes of
queue shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.access_control import Right
from serverless_gpu.model.egress import EGRESS, OPEN, check_allowed
from serverless_gpu.model.isolation import LEVELS, NONE, lowers
from serverless_gpu.server.core.caller import Caller, check_name
from serverless_gpu.server.core.hub import SCHEDULER, Hub
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.identity import rights
from serverless_gpu.server.nodes import node_admission
from serverless_gpu.server.nodes.egress_policies import policy_changes
from serverless_gpu.server.nodes.node_service import NodeService
from serverless_gpu.server.records import audit, crews, pools, principals, references
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.server.records.pools import (
    ON_DEMAND,
    RESERVED,
    SHARE_KINDS,
    UNSET,
    StoredPool,
    StoredShare,
)
from serverless_gpu.wire.nodes import PoolList, PoolRequest, PoolView
from serverless_gpu.wire.queue import ShareKind, ShareView

WEIGHT_MIN, WEIGHT_MAX = 1e-3, 1e6
RETURN_MAX_S = 7 * 86_400.0
_POOL_KINDS = (ON_DEMAND, RESERVED)
_ISOLATIONS = (*LEVELS, UNSET)
_NAMED_MAX = 20


class PoolService:
    """Changes pools and queue shares."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub, nodes: NodeService) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._nodes = nodes
        # A copy in memory, because a public route sends the value without a look at the database.
        self.has_sandboxes = False

    def load(self) -> None:
        """Read whether runs of a pool start in sandboxes."""
        self.has_sandboxes = self._database.read(pools.have_sandboxes)

    def put(self, who: Caller, name: str, asked: PoolRequest) -> PoolView:
        """Create or change a pool, and move nodes into it. Runs on moved nodes continue.

        Fields of `asked` that are None stay unchanged.
        """
        check_name("a pool", name)
        if asked.kind is not None and asked.kind not in _POOL_KINDS:
            raise InvalidValue(f"{asked.kind[:64]!r} is not a kind of pool", hint=f"kinds: {', '.join(_POOL_KINDS)}")
        if asked.isolation is not None and asked.isolation not in _ISOLATIONS:
            hint = f"levels: {', '.join(_ISOLATIONS)}"
            raise InvalidValue(f"a pool cannot have the isolation {asked.isolation[:64]!r}", hint=hint)
        if asked.return_s is not None and not 0 < asked.return_s <= RETURN_MAX_S:  # The range check refuses NaN.
            raise InvalidValue(
                f"a pool cannot wait {asked.return_s} s for the return of lent GPUs", hint="1 s to 7 days"
            )
        if asked.egress is not None and asked.egress not in EGRESS:
            hint = f"network policies: {', '.join(EGRESS)}"
            raise InvalidValue(f"a pool cannot have the egress {asked.egress[:64]!r}", hint=hint)
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> bool:
            before = pools.find(connection, name) or StoredPool(name=name, kind=ON_DEMAND, created_ns=at_ns)
            pool = _changed(before, asked)
            moved = [node_admission.find_node(connection, node_name) for node_name in asked.nodes]
            lowered = _lowered(connection, before, pool, moved)
            if lowered:
                rights.check(connection, who, Right.LOWER_ISOLATION, lowered)
            pools.put(connection, pool)
            for node in moved:
                _move(connection, node, pool)
            lent = {"lends": True, "return_s": pool.return_s} if pool.lends else {}
            isolations = (before.isolation or UNSET, pool.isolation or UNSET)
            decided: dict[str, object] = {} if asked.isolation is None else {"isolation": isolations}
            if asked.egress is not None or asked.allow is not None:
                decided |= {"egress": pool.mode, "allow": list(pool.allow)}
            detail = {"kind": pool.kind, "nodes": list(asked.nodes), **lent, **decided}
            audit.record(connection, who=who, action=Action.POOL_PUT, subject=name, now_ns=at_ns, detail=detail)
            return pools.have_sandboxes(connection)

        self.has_sandboxes = self._database.write(work)
        self._hub.touch(SCHEDULER)
        return next(pool for pool in self._nodes.view_pools() if pool.name == name)

    def delete(self, who: Caller, name: str) -> PoolView:
        """Delete a pool without references, and return the deleted pool."""
        at_ns = self._clock.wall_ns()
        views = {pool.name: pool for pool in self._nodes.view_pools()}
        if name not in views:
            raise unknown_name("pool", name, list(views))

        def work(connection: sa.Connection) -> None:
            find_pool(connection, name)
            if name == pools.DEFAULT:
                raise InvalidValue(f"pool {name!r} cannot be deleted: nodes without a configured pool join it")
            moving = f"to move a node: sgpu pool set {pools.DEFAULT} --node NODE"
            referring = references.of_pool(connection, name, now_ns=at_ns)
            references.refuse(f"pool {name!r}", referring, also=moving)
            pools.delete(connection, name)
            audit.record(connection, who=who, action=Action.POOL_DELETE, subject=name, now_ns=at_ns)

        self._database.write(work)
        self.load()
        self._hub.touch(SCHEDULER)
        return views[name]

    def put_share(self, who: Caller, kind: str, name: str, weight: float) -> ShareView:
        """Set the share of a team, or of a user within a team."""
        if not WEIGHT_MIN <= weight <= WEIGHT_MAX:  # The chained comparison also refuses NaN.
            raise InvalidValue(
                f"a share cannot be {weight}", hint=f"use a number from {WEIGHT_MIN} to {WEIGHT_MAX:.0f}"
            )
        known = _kind(kind)
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            if known == "team":
                principals.team(connection, name)
            else:
                principals.principal(connection, name)
            pools.put_share(connection, StoredShare(kind=known, name=name, weight=weight, set_ns=at_ns))
            subject, detail = f"{known} {name}", {"weight": weight}
            audit.record(connection, who=who, action=Action.SHARE_SET, subject=subject, now_ns=at_ns, detail=detail)

        self._database.write(work)
        self._hub.touch(SCHEDULER)
        return ShareView(kind=known, name=name, weight=weight)

    def remove_share(self, who: Caller, kind: str, name: str) -> ShareView:
        """Reset a share to the weight 1."""
        known = _kind(kind)
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            if not pools.remove_share(connection, known, name):
                raise NotFound(f"no share was set for {known} {name[:64]!r}", hint="list the shares: sgpu share list")
            audit.record(connection, who=who, action=Action.SHARE_REMOVE, subject=f"{known} {name}", now_ns=at_ns)

        self._database.write(work)
        self._hub.touch(SCHEDULER)
        return ShareView(kind=known, name=name, weight=1.0)


def find_pool(connection: sa.Connection, name: str) -> StoredPool:
    """Return a pool."""
    found = pools.find(connection, name)
    if found is None:
        raise unknown_name("pool", name, [pool.name for pool in pools.every(connection)])
    return found


def _changed(before: StoredPool, asked: PoolRequest) -> StoredPool:
    kind = before.kind if asked.kind is None else asked.kind
    # An on-demand pool cannot lend devices, because the pool already serves all users.
    lends = (before.lends and kind == RESERVED) if asked.lends is None else asked.lends
    if lends and kind != RESERVED:
        raise InvalidValue(
            f"pool {before.name!r} is on-demand and cannot lend, because all users can already use the pool",
            hint=f"reserve it: sgpu pool set {before.name} --reserved --lend",
        )
    pool = StoredPool(
        name=before.name,
        kind=kind,
        created_ns=before.created_ns,
        lends=lends,
        return_s=before.return_s if asked.return_s is None else asked.return_s,
        isolation=before.isolation if asked.isolation is None else asked.isolation,
        egress=before.egress if asked.egress is None else asked.egress,
        allow_json=before.allow_json if asked.allow is None else _allow_json(asked.allow),
    )
    if pool.level == NONE and pool.mode != OPEN:
        raise InvalidValue(
            f"pool {pool.name!r} cannot have the egress {pool.mode!r} without isolation, because a node recognizes "
            "the connections of runs by their own uids",
            hint=f"sgpu pool set {pool.name} --isolation sandbox, or --egress open",
        )
    return pool


def _allow_json(texts: tuple[str, ...]) -> str:
    return msgspec.json.encode(check_allowed(texts)).decode()


def _move(connection: sa.Connection, node: StoredNode, pool: StoredPool) -> None:
    """Move a node into a pool, unless the node's network rules would change for running attempts."""
    before = pools.find(connection, node.pool)
    if before is not None and before.name != pool.name and policy_changes(before, pool):
        going_on = crews.open_on(connection, node.id)
        if going_on:
            raise InvalidValue(
                f"node {node.name} runs {len(going_on)} attempts under the network policy of pool {before.name!r}",
                hint=f"wait until its runs have ended (sgpu node drain {node.name}), then move the node",
            )
    pools.move(connection, pool.name, node_id=node.id)


def _lowered(connection: sa.Connection, before: StoredPool, after: StoredPool, moved: Sequence[StoredNode]) -> str:
    """Describe a change that lowers the isolation of a pool's runs or of a node's runs, or return ""."""
    was, now = before.isolation or UNSET, after.isolation or UNSET
    if lowers(was, now):
        return f"lower the isolation of pool {after.name!r} from {was} to {now}"
    for node in moved:
        there = pools.find(connection, node.pool)
        was = UNSET if there is None else there.isolation or UNSET
        if lowers(was, now):
            return f"move node {node.name!r} from isolation {was} of pool {node.pool!r} to {now} of {after.name!r}"
    return ""


def _kind(kind: str) -> ShareKind:
    for known in SHARE_KINDS:
        if kind == known:
            return known
    raise InvalidValue(f"a {kind[:64]!r} cannot have a share", hint=f"valid kinds of shares: {', '.join(SHARE_KINDS)}")


def unknown_name(what: str, name: str, there: list[str]) -> InvalidValue:
    """Return the error for an unknown pool or policy. The error's hint lists the existing names."""
    more = f" and {len(there) - _NAMED_MAX} more" if len(there) > _NAMED_MAX else ""
    plural = {"policy": "policies"}.get(what, f"{what}s")
    return InvalidValue(
        f"there is no {what} {name[:64]!r}", hint=f"{plural}: {', '.join(there[:_NAMED_MAX]) or 'none'}{more}"
    )


routes = Routes("nodes")


@routes.get("/pools", needs=reading("pools"))
def list_pools(call: Call, nodes: NodeService) -> PoolList:
    """Return all pools."""
    return PoolList(pools=tuple(nodes.view_pools()))


@routes.put("/pools/{name}", needs=writing("pools"))
def put_pool(call: Call, pools: PoolService, name: str, body: PoolRequest) -> PoolView:
    """Create or change a pool, and move nodes into it."""
    return pools.put(call.who, name, body)


@routes.delete("/pools/{name}", needs=writing("pools"))
def delete_pool(call: Call, pools: PoolService, name: str) -> PoolView:
    """Delete a pool without references."""
    return pools.delete(call.who, name)
