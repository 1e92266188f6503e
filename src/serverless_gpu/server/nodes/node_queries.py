"""What operators do with nodes and pools, and what everybody may see of them."""

from __future__ import annotations

from collections import Counter

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.lifecycle.run_lifecycle import Forgotten
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER, Hub
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.lifecycle.requeue import Requeue
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.nodes import capacity
from serverless_gpu.server.nodes.capacity import GONE, Floor
from serverless_gpu.server.records import audit, nodes
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.server.records.runs import crews, runs
from serverless_gpu.wire.agents import NodeView, PoolView


class NodeService:
    """Views nodes and pools, and gives up dead nodes."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        leases: Leases,
        presence: Presence,
        announcer: Announcer,
        requeue: Requeue,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._presence = presence
        self._announcer = announcer
        self._requeue = requeue

    def view_nodes(self) -> list[NodeView]:
        """Return all nodes as people see them."""
        there = self._database.read(lambda connection: capacity.load(connection, self._leases))
        return capacity.view_nodes(there, self._presence, capacity.now(self._settings, self._clock))

    def view_pools(self) -> list[PoolView]:
        """Return all pools as people see them."""

        def work(connection: sa.Connection) -> tuple[Floor, Counter[str]]:
            return capacity.load(connection, self._leases), Counter(runs.queued_by_pool(connection))

        there, queued = self._database.read(work)
        return capacity.view_pools(there, self._presence, capacity.now(self._settings, self._clock), queued=queued)

    def forget(self, who: Caller, name: str, *, known_dead: bool) -> NodeView:
        """Give up a node that an operator knows to be dead: its attempts are over at once.

        Args:
            who: asks.
            name: of the node, or its identifier.
            known_dead: whether they said so; without that nothing is done.

        Raises:
            InvalidValue: it was not said that the node is dead.
            NotFound: there is no such node.
        """
        if not known_dead:
            raise InvalidValue(
                f"node {name!r} is given up only when it is known to be dead: what still ran there would run twice",
                hint="say i_know_it_is_dead once somebody has looked",
            )
        at_ns = self._clock.wall_ns()
        dead = self._database.read(lambda connection: find_node(connection, name))
        self._requeue.give_back_on(dead.id, f"{dead.name} is dead, and was not told")

        def work(connection: sa.Connection) -> tuple[StoredNode, list[TransitionResult]]:
            node = find_node(connection, name)
            note = Note(at_ns=at_ns, detail=f"{who.name} said that {node.name} is dead")
            told = [
                transitions.tell_crew(connection, run, crew.number, Forgotten(), note=note)
                for crew in crews.open_on(connection, node.id)
                if (run := runs.find(connection, crew.run_id)) is not None and run.fence == crew.fence
            ]
            nodes.forget(connection, node.id, at_ns=at_ns)
            detail = {"name": node.name, "runs": [one.before.id for one in told]}
            audit.record(connection, who=who, action=Action.NODE_FORGET, subject=node.id, now_ns=at_ns, detail=detail)
            return node, told

        node, told = self._database.write(work)
        self._presence.forget(node.id)
        for one in told:
            self._announcer.announce(one)
        self._hub.touch(SCHEDULER)
        return NodeView(
            id=node.id,
            name=node.name,
            state=GONE,
            sentence=f"was given up: {who.name} said that it is dead",
            pool=node.pool,
            devices=node.hello.devices,
            unavailable=node.hello.unavailable,
            busy=0,
            runs=(),
            version=node.hello.version,
            seen_ns=node.seen_ns,
        )


def find_node(connection: sa.Connection, name: str) -> StoredNode:
    """Return a node by its name or identifier.

    Raises:
        NotFound: there is none, or it was forgotten.
    """
    node = nodes.named(connection, name) or nodes.get(connection, name)
    if node is None or node.forgotten_ns is not None:
        raise NotFound(f"there is no node {name[:64]!r}", hint="sgpu nodes lists them")
    return node
