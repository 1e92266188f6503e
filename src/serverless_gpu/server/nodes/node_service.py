"""Services and routes for viewing nodes, abandoning dead nodes, and changing node rules.

Operators and users call the routes in this module. `agent_service.py` contains the routes for agents.

Operators may change the rules of every node. A node's owner may change the node's rules, even if an operator has set
them. Only operators may change another person's drain or quarantine. The server stores each rule change in the node's
row and in the audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model import access_control
from serverless_gpu.model.access_control import AccessReach
from serverless_gpu.model.lifecycle.run_lifecycle import Forgotten
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import RECONCILER, SCHEDULER, Hub, run_key
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.lifecycle.requeue import Requeue
from serverless_gpu.server.lifecycle.transitions import Announcer, Note, TransitionResult
from serverless_gpu.server.nodes import capacity, node_rules
from serverless_gpu.server.nodes.capacity import GONE, CapacitySnapshot
from serverless_gpu.server.nodes.device_samples import DeviceSamples
from serverless_gpu.server.nodes.node_admission import NodeAdmission, find_node
from serverless_gpu.server.records import audit, crews, nodes, principals, runs
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.nodes import (
    ApproveRequest,
    CalendarRequest,
    ForgetRequest,
    InviteAnswer,
    InviteRequest,
    LeftOut,
    NodeCalendar,
    NodeDrain,
    NodeDrainRequest,
    NodeList,
    NodeRules,
    NodeView,
    PoolView,
    QuarantineRequest,
)

WITHOUT = "without"
"""Capability of nodes that can exclude devices."""


class NodeService:
    """Views nodes and pools, and abandons dead nodes."""

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
        device_samples: DeviceSamples,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._hub = hub
        self._leases = leases
        self._presence = presence
        self._announcer = announcer
        self._requeue = requeue
        self._device_samples = device_samples

    def view_nodes(self) -> list[NodeView]:
        """Return views of all nodes."""
        there, keys = self._database.read(
            lambda connection: (capacity.load(connection, self._leases), nodes.enrolled(connection))
        )
        return capacity.view_nodes(there, self._presence, capacity.now(self._settings, self._clock), keys=keys)

    def view(self, node_id: str) -> NodeView:
        """Return the view of one node."""
        return next(view for view in self.view_nodes() if view.id == node_id)

    def view_pools(self) -> list[PoolView]:
        """Return views of all pools."""

        def work(connection: sa.Connection) -> tuple[CapacitySnapshot, Counter[str]]:
            return capacity.load(connection, self._leases), Counter(runs.queued_by_pool(connection))

        there, queued = self._database.read(work)
        return capacity.view_pools(there, self._presence, capacity.now(self._settings, self._clock), queued=queued)

    def forget(self, who: Caller, name: str, *, known_dead: bool) -> NodeView:
        """Abandon a node that an operator declares dead, and end all attempts on the node."""
        if not known_dead:
            raise InvalidValue(
                f"the server forgets node {name!r} only after its death, because active runs would run twice",
                hint="make sure that the node is dead, then confirm with i_know_it_is_dead",
            )
        at_ns = self._clock.wall_ns()
        dead = self._database.read(lambda connection: find_node(connection, name))
        self._requeue.give_back_on(dead.id, f"{dead.name} is dead and did not receive the order")

        def work(connection: sa.Connection) -> tuple[StoredNode, list[TransitionResult]]:
            node = find_node(connection, name)
            note = Note(at_ns=at_ns, detail=f"{who.name} declared {node.name} dead")
            told = [
                transitions.apply_to_crew(connection, run, crew.number, Forgotten(), note=note)
                for crew in crews.open_on(connection, node.id)
                if (run := runs.find(connection, crew.run_id)) is not None and run.fence == crew.fence
            ]
            nodes.forget(connection, node.id, at_ns=at_ns)
            detail = {"name": node.name, "runs": [one.before.id for one in told]}
            audit.record(connection, who=who, action=Action.NODE_FORGET, subject=node.id, now_ns=at_ns, detail=detail)
            return node, told

        node, told = self._database.write(work)
        self._presence.forget(node.id)
        self._device_samples.forget(node.id)
        for one in told:
            self._announcer.announce(one)
        self._hub.touch(SCHEDULER)
        return NodeView(
            id=node.id,
            name=node.name,
            state=GONE,
            sentence=f"was forgotten: {who.name} declared it dead",
            pool=node.pool,
            devices=node.hello.devices,
            unavailable=node.hello.unavailable,
            busy=0,
            runs=(),
            version=node.hello.version,
            seen_ns=node.seen_ns,
        )


class _Change(msgspec.Struct, frozen=True, kw_only=True):
    rules: NodeRules
    action: Action
    detail: dict[str, object]


class NodeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A request to change the rules of a node."""

    who: Caller
    reach: str  # Extent of the caller's access, one of `AccessReach`.
    node: str  # Name or identifier of the node to change.


class NodeRuleService:
    """Drains nodes, and sets their calendars and quarantined devices."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub, nodes: NodeService) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._nodes = nodes

    def drain(self, asked: NodeCommand, said: NodeDrainRequest) -> NodeView:
        """Drain or resume a node. A later request can also stop the runs of a drained node."""
        _check_note(said.note)
        at_ns = self._clock.wall_ns()

        def decide(_: sa.Connection, node: StoredNode) -> _Change:
            before = node.rules.drain
            if not said.on:
                _check_own(asked, before.by if before is not None else "", f"drains {node.name}")
                rules = msgspec.structs.replace(node.rules, drain=None)
                return _Change(rules=rules, action=Action.NODE_RESUME, detail={})
            drain = before or NodeDrain(by=asked.who.name, since_ns=at_ns)
            drain = msgspec.structs.replace(drain, note=said.note or drain.note, stop=said.stop or drain.stop)
            if before is not None and drain != before:
                _check_own(asked, before.by, f"drains {node.name}")
                # The author of a new note replaces the previous author, because waiting users see the note with its
                # author.
                if drain.note != before.note:
                    drain = msgspec.structs.replace(drain, by=asked.who.name)
            rules = msgspec.structs.replace(node.rules, drain=drain)
            return _Change(rules=rules, action=Action.NODE_DRAIN, detail={"note": drain.note, "stop": drain.stop})

        return self._decided(asked, decide, at_ns=at_ns)

    def put_calendar(self, asked: NodeCommand, said: CalendarRequest) -> NodeView:
        """Replace a node's calendar with a new owner and new sharing times."""
        calendar = NodeCalendar(**msgspec.structs.asdict(said))
        if len(calendar.owner) > NAME_CHARACTERS_MAX or len(calendar.zone) > NAME_CHARACTERS_MAX:
            raise InvalidValue(f"an owner and a zone may have at most {NAME_CHARACTERS_MAX} characters each")
        node_rules.check_calendar(calendar)

        def decide(connection: sa.Connection, node: StoredNode) -> _Change:
            if calendar.owner != node.rules.calendar.owner and asked.reach != AccessReach.ALL:
                raise NotAllowed(
                    f"only an operator can change the owner of {node.name}", hint=f"--owner {node.rules.calendar.owner}"
                )
            if calendar.owner:
                principals.principal(connection, calendar.owner)
            rules = msgspec.structs.replace(node.rules, calendar=calendar)
            return _Change(rules=rules, action=Action.NODE_CALENDAR, detail=msgspec.to_builtins(calendar))

        return self._decided(asked, decide, at_ns=self._clock.wall_ns())

    def quarantine(self, asked: NodeCommand, said: QuarantineRequest) -> NodeView:
        """Quarantine or release a device. Runs that use the device continue."""
        _check_note(said.note)
        at_ns = self._clock.wall_ns()

        def decide(_: sa.Connection, node: StoredNode) -> _Change:
            before = next((one for one in node.rules.quarantined if one.uuid == said.uuid), None)
            others = [one for one in node.rules.quarantined if one.uuid != said.uuid]
            if before is not None:
                _check_own(asked, before.by, f"has quarantined {said.uuid[:64]}")
            if said.on:
                _check_device(node, said.uuid)
                mark = before or LeftOut(uuid=said.uuid, by=asked.who.name, since_ns=at_ns)
                others.append(msgspec.structs.replace(mark, note=said.note or mark.note))
            rules = msgspec.structs.replace(node.rules, quarantined=tuple(sorted(others, key=lambda one: one.uuid)))
            action = Action.NODE_QUARANTINE if said.on else Action.NODE_RELEASE
            return _Change(rules=rules, action=action, detail={"device": said.uuid[:64], "note": said.note})

        return self._decided(asked, decide, at_ns=at_ns)

    def _decided(
        self, asked: NodeCommand, decide: Callable[[sa.Connection, StoredNode], _Change], *, at_ns: int
    ) -> NodeView:
        """Store a node's changed rules, wake scheduler and reconciler, and return the node's view."""

        def work(connection: sa.Connection) -> tuple[str, list[str]]:
            node = find_node(connection, asked.node)
            owner = node.rules.calendar.owner
            if not access_control.covers(asked.reach, name=asked.who.name, teams=(), owner=owner):
                raise NotAllowed(
                    f"{node.name} does not belong to {asked.who.name}", hint="ask the owner of the node or an operator"
                )
            change = decide(connection, node)
            if change.rules == node.rules:
                return node.id, []
            nodes.rule(connection, node.id, change.rules)
            detail = {"name": node.name, **change.detail}
            audit.record(connection, who=asked.who, action=change.action, subject=node.id, now_ns=at_ns, detail=detail)
            return node.id, crews.stay(connection, node.id) if change.action is Action.NODE_CALENDAR else []

        node_id, told = self._database.write(work)
        for key in (SCHEDULER, RECONCILER, *map(run_key, told)):
            self._hub.touch(key)
        return self._nodes.view(node_id)


def _check_own(asked: NodeCommand, by: str, what: str) -> None:
    if asked.reach != AccessReach.ALL and by not in ("", asked.who.name):
        raise NotAllowed(f"{by} {what}", hint="ask that user or an operator to change the node rules")


def _check_device(node: StoredNode, uuid: str) -> None:
    if uuid not in {device.uuid for device in node.hello.devices}:
        raise NotFound(f"{node.name} has no device {uuid[:64]!r}", hint="list the uuids: sgpu node list --json")
    if WITHOUT not in node.hello.takes:
        raise InvalidValue(
            f"{node.name} runs an old version that cannot exclude devices",
            hint="upgrade the node, or drain it: sgpu node drain",
        )


def _check_note(note: str) -> None:
    if len(note) > LABEL_CHARACTERS_MAX or not (note.isprintable() or not note):
        raise InvalidValue(f"a note may have at most {LABEL_CHARACTERS_MAX} printable characters")


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("nodes")


@routes.get("/nodes", needs=reading("nodes"))
def list_nodes(call: Call, node_admission: NodeAdmission, nodes: NodeService) -> NodeList:
    """Return all nodes."""
    return NodeList(nodes=(*nodes.view_nodes(), *node_admission.view_pending()))


@routes.get("/nodes/{node}", needs=reading("nodes"))
def read_node(call: Call, database: Transactions, nodes: NodeService, node: str) -> NodeView:
    """Return one node, by name or identifier."""
    return nodes.view(database.read(lambda connection: find_node(connection, node)).id)


@routes.post("/nodes/invite", needs=writing("tokens"))
def invite(call: Call, node_admission: NodeAdmission, body: InviteRequest) -> InviteAnswer:
    """Create a join token with a maximum number of machines and an expiry."""
    _check_administrator(call)
    return node_admission.invite(call.who, body)


@routes.post("/nodes/approve", needs=writing("tokens"))
def approve(call: Call, node_admission: NodeAdmission, body: ApproveRequest) -> NodeView:
    """Approve a node that waits for an administrator."""
    _check_administrator(call)
    return node_admission.approve(call.who, body)


@routes.post("/nodes/{node}/rotate", needs=writing("tokens"))
def rotate_key(call: Call, node_admission: NodeAdmission, nodes: NodeService, node: str) -> NodeView:
    """Request another key of a node. The node replaces its key after its next heartbeat."""
    _check_administrator(call)
    return nodes.view(node_admission.request_rotation(call.who, node))


@routes.post("/nodes/{node}/revoke", needs=writing("tokens"))
def revoke(call: Call, node_admission: NodeAdmission, nodes: NodeService, node: str) -> NodeView:
    """Revoke a node's tokens and key, and end its connection."""
    _check_administrator(call)
    return nodes.view(node_admission.revoke(call.who, node))


@routes.post("/nodes/{node}/forget", needs=writing("nodes"))
def forget(call: Call, nodes: NodeService, node: str, body: ForgetRequest) -> NodeView:
    """Abandon a dead node and its attempts."""
    return nodes.forget(call.who, node, known_dead=body.i_know_it_is_dead)


@routes.put("/nodes/{node}/drain", needs=writing("node-rules"))
def drain(call: Call, node_rules: NodeRuleService, node: str, body: NodeDrainRequest) -> NodeView:
    """Drain a node and optionally stop its runs, or resume the node."""
    return node_rules.drain(_asked(call, node), body)


@routes.put("/nodes/{node}/calendar", needs=writing("node-rules"))
def put_calendar(call: Call, node_rules: NodeRuleService, node: str, body: CalendarRequest) -> NodeView:
    """Set a node's owner and the times at which other users may use the node."""
    return node_rules.put_calendar(_asked(call, node), body)


@routes.put("/nodes/{node}/quarantine", needs=writing("node-rules"))
def quarantine(call: Call, node_rules: NodeRuleService, node: str, body: QuarantineRequest) -> NodeView:
    """Quarantine or release a device of a node."""
    return node_rules.quarantine(_asked(call, node), body)


def _check_administrator(call: Call) -> None:
    if call.reach != AccessReach.ALL:
        raise NotAllowed(
            "only administrators can invite, approve, rotate and revoke nodes", hint="ask an administrator"
        )


def _asked(call: Call, node: str) -> NodeCommand:
    return NodeCommand(who=call.who, reach=call.reach, node=node)
