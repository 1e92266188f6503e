"""Admits nodes: invites machines, exchanges join tokens, checks node tokens, approves nodes.

    invite ─▶ a join token for a number of machines and a period ─▶ JoinService.join
    join token (scope "joining") ─▶ an agent's token for this home only, and the address of the Ray cluster
    agent's token, later         ─▶ the address of the Ray cluster, after a crash or a boot
    hello ─▶ check (model/access_control.py) ─▶ refused │ ask: pending ─▶ approve │ settle: bound, moved

A machine repeats an unanswered join request with the same join token. For a repeated join request, the server creates
another agent token and revokes the previous agent token. `sgpu token list` shows all machines with a token. `sgpu token
revoke` revokes a machine's token. The audit records every step except an admitted hello. Each server process records a
repeated refusal only once.

Before it starts Ray, a joining client reports failures such as a used join token or a node name in use.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model import access_control
from serverless_gpu.model.access_control import (
    HelloDecision,
    HelloRefused,
    MachineTraits,
    NodeIdentity,
    Resource,
    may_take_name,
)
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER, Hub, node_key
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.identity import bootstrap
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.records import audit, nodes, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.nodes import Invitation, StoredBinding, StoredNode
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.nodes import (
    ApproveRequest,
    InviteAnswer,
    InviteRequest,
    JoinAnswer,
    JoinRequest,
    NodeView,
    RayPool,
)

PENDING = "PENDING"
"""Node state before an administrator's approval."""
APPROVED = "APPROVED"
"""Node state after an administrator's approval, until the node connects again."""
USES_MAX = 1_000
INVITED_S_MAX = 30 * 86_400.0
_NS = 1_000_000_000
AGENT = "agent"
_INVITE = "an administrator can create a join file for several machines: sgpu node invite --uses 10"
NAME_MAX = 128


def identity_of(said: AgentHello) -> NodeIdentity:
    """Return the node identity in a hello."""
    key = "" if said.keys is None else said.keys.fingerprint
    return NodeIdentity(name=said.name, machine=said.machine, instance=said.instance, key=key)


def check(connection: sa.Connection, who: Caller, said: AgentHello) -> HelloDecision:
    """Decide about a hello, or raise `NotAllowed` if its token belongs to another node."""
    if not who.token_id:
        return HelloDecision.ADMITTED
    node = identity_of(said)
    if node.key != who.key:
        raise NotAllowed(f"the hello of {said.name!r} names a key that is not the key of its session")
    found, before = nodes.find(connection, who.token_id), nodes.named(connection, said.name)
    is_here = before is None or access_control.is_same_machine(_traits(before.hello), _traits(said))
    answer = access_control.judge_hello(None if found is None else found.binding, node, is_here=is_here)
    if isinstance(answer, HelloRefused):
        raise NotAllowed(answer.why, hint=answer.hint)
    return answer


def _traits(said: AgentHello) -> MachineTraits:
    return MachineTraits(boot_id=said.boot_id, host=said.host)


def waiting_error(name: str) -> NotAllowed:
    """Return the error for a node that waits for an administrator."""
    return NotAllowed(
        f"the node {name!r} waits for an administrator to approve it",
        hint=f"ask an administrator to run: sgpu node approve {name}",
    )


class NodeAdmission:
    """Admits, invites, approves and revokes nodes."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub, presence: Presence) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._presence = presence

    def ask(self, who: Caller, said: AgentHello) -> NotAllowed:
        """Store a node or machine that waits for approval, and return the error for its hello."""
        at_ns, node = self._clock.wall_ns(), identity_of(said)

        def work(connection: sa.Connection) -> NotAllowed:
            found = nodes.find(connection, who.token_id)
            if found is not None:
                if found.approved_ns is not None:  # The node's home has moved to another machine.
                    nodes.suspend(connection, found, node, at_ns=at_ns)
                    _record(connection, who, Action.NODE_PENDING, node, who.token_id, at_ns)
                return waiting_error(said.name)
            if not nodes.ask(connection, who.token_id, node, at_ns=at_ns):
                limit = f"{nodes.PENDING_MAX} nodes already wait for an administrator"
                return NotAllowed(
                    f"the node {said.name!r} cannot join: {limit}", hint="list the waiting nodes with `sgpu node list`"
                )
            _record(connection, who, Action.NODE_PENDING, node, who.token_id, at_ns)
            return waiting_error(said.name)

        return self._database.write(work)

    def note_refusal(self, who: Caller, said: AgentHello, error: NotAllowed) -> None:
        """Record a refused hello in the audit, unless the same hello was refused before."""
        node = identity_of(said)
        if not self._presence.is_new_refusal((who.token_id, node.name, node.machine, node.instance)):
            return
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            detail: dict[str, object] = {
                "name": node.name[:64],
                "machine": node.machine[:16],
                "why": error.message[:200],
            }
            audit.record(
                connection, who=who, action=Action.NODE_REFUSE, subject=who.token_id, now_ns=at_ns, detail=detail
            )

        self._database.write(work)

    def view_pending(self) -> list[NodeView]:
        """Return the nodes that wait for an administrator's approval."""
        now_ns = self._clock.wall_ns()
        found = self._database.read(lambda connection: nodes.pending(connection, now_ns=now_ns))
        return [_view(one) for one in found]

    def approve(self, who: Caller, request: ApproveRequest) -> NodeView:
        """Approve a waiting node."""
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> StoredBinding:
            waiting = nodes.pending(connection, now_ns=at_ns)
            named = [one for one in waiting if request.name in (one.node.name, one.token)]
            if not named:
                names = ", ".join(one.node.name for one in waiting[:8]) or "none"
                raise NotFound(f"no node {request.name[:64]!r} waits to be approved", hint=f"waiting nodes: {names}")
            if len(named) > 1:
                tokens = ", ".join(one.token for one in named[:8])
                raise InvalidValue(
                    f"{len(named)} nodes with the name {request.name[:64]!r} wait to be approved",
                    hint=f"approve one node by its token: {tokens}. Revoke the other tokens: sgpu token revoke ID",
                )
            one = named[0]
            _refuse_connected(connection, self._presence, one, now_ns=self._clock.boottime_ns())
            _supersede(connection, who, one.node, kept=one.token, at_ns=at_ns)
            nodes.bind(connection, one.token, one.node, by=who.name, at_ns=at_ns)
            _record(connection, who, Action.NODE_APPROVE, one.node, one.token, at_ns)
            return one

        view = _view(self._database.write(work))
        return msgspec.structs.replace(view, state=APPROVED, sentence="is approved and joins within a few seconds")

    def invite(self, who: Caller, request: InviteRequest) -> InviteAnswer:
        """Create a join token."""
        if who.scopes:
            raise NotAllowed(
                "a token with scopes cannot invite machines", hint="use a token without scopes to invite machines"
            )
        if not 1 <= request.uses <= USES_MAX:
            raise InvalidValue(f"a join token is valid for 1 to {USES_MAX} machines, not {request.uses}")
        if not 0 < request.expires_s <= INVITED_S_MAX:  # The chained comparison also refuses NaN.
            raise InvalidValue("a join token is valid for at most 30 days")
        if request.name and request.uses != 1:
            raise InvalidValue(
                "a join token with a node name is valid for only one machine",
                hint="omit either the name or the number of uses",
            )
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()
        label = f"invitation: {request.name or f'{request.uses} machines'}"[:LABEL_CHARACTERS_MAX]
        expires_ns = now_ns + int(request.expires_s * _NS)

        def work(connection: sa.Connection) -> str:
            bootstrap.ensure_node_service(connection, now_ns=now_ns)
            new = NewToken(
                principal=bootstrap.NODE,
                label=label,
                scopes=(Resource.JOINING,),
                expires_ns=expires_ns,
                made_by=who.name,
            )
            made = principals.create_token(connection, new, secret=secret, now_ns=now_ns)
            nodes.invite(connection, Invitation(token=made.token.id, node=request.name, uses_left=request.uses))
            detail: dict[str, object] = {"name": request.name, "uses": request.uses, "expires_ns": expires_ns}
            audit.record(
                connection, who=who, action=Action.NODE_INVITE, subject=made.token.id, now_ns=now_ns, detail=detail
            )
            return made.token.id

        return InviteAnswer(id=self._database.write(work), token=secret, uses=request.uses, expires_ns=expires_ns)

    def request_rotation(self, who: Caller, name: str) -> str:
        """Request another key of a node, and return the node's identifier."""
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> StoredNode:
            node = find_node(connection, name)
            bound = nodes.find(connection, node.token_id)
            if bound is None or not bound.node.key:
                raise InvalidValue(
                    f"the node {node.name!r} has no key",
                    hint="upgrade the node. Its next start makes a key, and the server binds the key",
                )
            nodes.request_rotation(connection, node.token_id, at_ns=at_ns)
            _record(connection, who, Action.NODE_ROTATE, bound.node, node.token_id, at_ns)
            return node

        return self._database.write(work).id

    def revoke(self, who: Caller, name: str) -> str:
        """Revoke all tokens of a node, and return the node's identifier.

        The server accepts no more reports about the node's attempts, which end when their leases expire.
        """
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> StoredNode:
            node = find_node(connection, name)
            for bound in nodes.valid_bindings(connection, node.name, now_ns=at_ns):
                _revoke_token(connection, who, bound.token, at_ns)
            nodes.revoke(connection, node.id, at_ns=at_ns)
            _record(connection, who, Action.NODE_REVOKE, identity_of(node.hello), node.token_id, at_ns)
            return node

        node = self._database.write(work)
        self._presence.forget(node.id)
        for key in (node_key(node.id), SCHEDULER):
            self._hub.touch(key)
        return node.id

    def refuse_second_process(self, before: nodes.StoredNode, said: AgentHello) -> None:
        """Refuse a node's second process while the first process is connected."""
        presence, now_ns = self._presence, self._clock.boottime_ns()
        connected = presence.is_there(before.id, now_ns=now_ns) and presence.is_streaming(before.id)
        same_boot = before.boot_id == said.boot_id
        if same_boot and access_control.second_process(before.hello.process, said.process, connected=connected):
            raise NotAllowed(
                f"another process is connected as node {said.name!r}",
                hint="stop the other process of the node",
            )


def settle(connection: sa.Connection, who: Caller, said: AgentHello, answer: HelloDecision, *, at_ns: int) -> None:
    """Update the token's binding to a node after an admitted hello."""
    if answer is HelloDecision.ADMITTED:
        return
    found, node = nodes.find(connection, who.token_id), identity_of(said)
    if found is None or answer in (HelloDecision.PENDING, HelloDecision.ELSEWHERE):
        raise waiting_error(said.name)
    nodes.rebind(connection, found, node, at_ns=at_ns)
    action = Action.NODE_MOVE if answer is HelloDecision.MOVED else Action.NODE_BIND
    _record(connection, who, action, node, who.token_id, at_ns)


def _record(connection: sa.Connection, who: Caller, action: Action, node: NodeIdentity, token: str, at_ns: int) -> None:
    detail: dict[str, object] = {"name": node.name, "machine": node.machine[:16], "token": token}
    if node.key:
        detail["key"] = node.key
    audit.record(connection, who=who, action=action, subject=node.name[:64], now_ns=at_ns, detail=detail)


def _revoke_token(connection: sa.Connection, who: Caller, token: str, at_ns: int) -> None:
    principals.revoke_token(connection, token, now_ns=at_ns)
    audit.record(connection, who=who, action=Action.TOKEN_REVOKE, subject=token, now_ns=at_ns)


def _refuse_connected(connection: sa.Connection, presence: Presence, waits: StoredBinding, *, now_ns: int) -> None:
    """Refuse to approve a node while another node with its name is connected."""
    there = nodes.named(connection, waits.node.name)
    if there is not None and there.token_id != waits.token and presence.is_there(there.id, now_ns=now_ns):
        raise NotAllowed(
            f"another node with the name {there.name!r} is connected",
            hint=f"revoke the connected node first, if the new node replaces it: sgpu node revoke {there.name}",
        )


def _supersede(connection: sa.Connection, who: Caller, node: NodeIdentity, *, kept: str, at_ns: int) -> None:
    """Revoke the tokens of other nodes that had the name of an approved node."""
    for bound in nodes.valid_bindings(connection, node.name, now_ns=at_ns):
        if bound.approved_ns is not None and bound.token != kept and not may_take_name(bound.node, node):
            _revoke_token(connection, who, bound.token, at_ns)


def find_node(connection: sa.Connection, name: str) -> StoredNode:
    """Return a node by its name or identifier."""
    node = nodes.named(connection, name) or nodes.get(connection, name)
    if node is None or node.forgotten_ns is not None:
        raise NotFound(f"the server has no node {name[:64]!r}", hint="list all nodes: sgpu node list")
    return node


def _view(waits: StoredBinding) -> NodeView:
    node = waits.node
    home = f", home {node.instance[-8:]}" if node.instance else ""
    home += f", key {node.key}" if node.key else ""
    return NodeView(
        id=waits.token,
        name=node.name,
        state=PENDING,
        sentence=f"on machine {node.machine[:12]}{home}: waits for an administrator: sgpu node approve {node.name}",
        pool="",
        devices=(),
        unavailable=(),
        busy=0,
        runs=(),
        version="",
        seen_ns=waits.asked_ns,
        key=node.key,
    )


class JoinService:
    """Returns credentials and cluster addresses to joining nodes."""

    def __init__(
        self, *, clock: Clock, database: Transactions, presence: Presence, ray_pool: Callable[[], RayPool | None]
    ) -> None:
        self._clock = clock
        self._database = database
        self._presence = presence
        self._find_pool = ray_pool

    def join(self, who: Caller, request: JoinRequest) -> JoinAnswer:
        """Exchange a join token for an agent's token and the address of the Ray cluster."""
        if Resource.JOINING not in who.scopes:
            raise NotAllowed("a machine can join only with a join token, not with a node's token", hint=_INVITE)
        pool = self._ray_pool() if request.ray else None
        _check_request(request)
        key = "" if request.keys is None else request.keys.fingerprint
        node = NodeIdentity(name=request.name, machine=request.machine, instance=request.instance, key=key)
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()
        label = f"joined: {request.name} ({request.machine[:16]}-{request.instance[:8]})"
        new = NewToken(principal=who.name, label=label[:LABEL_CHARACTERS_MAX], scopes=(AGENT,), made_by=who.name)

        def work(connection: sa.Connection) -> str:
            self._refuse_taken(connection, request, key)
            if not nodes.of_home(connection, node, by=who.token_id):
                _use_join_token(connection, who, request)
            for before in principals.tokens_of(connection, who.name):
                if before.label == new.label and before.revoked_ns is None:
                    _revoke_token(connection, who, before.id, now_ns)
            made = principals.create_token(connection, new, secret=secret, now_ns=now_ns)
            waits = self._must_wait(connection, who, node)
            if waits:
                nodes.ask(connection, made.token.id, node, at_ns=now_ns, by=who.token_id)
                _record(connection, who, Action.NODE_PENDING, node, made.token.id, now_ns)
            else:
                _supersede(connection, who, node, kept=made.token.id, at_ns=now_ns)
                nodes.bind(connection, made.token.id, node, by=who.token_id, at_ns=now_ns)
            detail: dict[str, object] = {"principal": who.name, "scopes": new.scopes, "node": request.name}
            audit.record(
                connection, who=who, action=Action.TOKEN_CREATE, subject=made.token.id, now_ns=now_ns, detail=detail
            )
            return waiting_error(request.name).message if waits else ""

        waits = self._database.write(work)
        return JoinAnswer(token=secret, ray=None if waits else pool, waits=waits)

    def ray_pool(self, who: Caller) -> RayPool:
        """Return the Ray cluster's address for a node that has already joined."""
        found = self._database.read(lambda connection: nodes.find(connection, who.token_id))
        if found is not None and found.approved_ns is None:
            raise waiting_error(found.node.name)
        if found is None or not found.node.name:
            raise NotFound("the token does not belong to a node of this server", hint=_INVITE)
        return self._ray_pool()

    def _ray_pool(self) -> RayPool:
        pool = self._find_pool()
        if pool is None:
            raise NotAllowed(
                "this server uses one machine, so no other machine can join it",
                hint="restart the server for several machines: sgpu up --engine ray",
            )
        return pool

    def _must_wait(self, connection: sa.Connection, who: Caller, node: NodeIdentity) -> bool:
        """Return True if an administrator must approve a machine, because another node has its name.

        A join token for exactly this name is an approval.
        """
        invitation = nodes.invitation(connection, who.token_id)
        if invitation is not None and invitation.node:
            return False
        found = nodes.valid_bindings(connection, node.name, now_ns=self._clock.wall_ns())
        there = nodes.named(connection, node.name)
        if there is None or there.forgotten_ns is not None:
            return False
        return any(bound.approved_ns is not None and not may_take_name(bound.node, node) for bound in found)

    def _refuse_taken(self, connection: sa.Connection, request: JoinRequest, key: str) -> None:
        there = nodes.named(connection, request.name)
        if there is None or there.forgotten_ns is not None:
            return
        own_key = "" if there.hello.keys is None else there.hello.keys.fingerprint
        if there.hello.instance == request.instance and own_key in ("", key):
            return
        if self._presence.is_there(there.id, now_ns=self._clock.boottime_ns()):
            what = "another machine" if there.machine != request.machine else "another home of this machine"
            raise NotAllowed(
                f"a node named {request.name!r} is already connected from {what}",
                hint="give this node another name with --name",
            )


def _use_join_token(connection: sa.Connection, who: Caller, request: JoinRequest) -> None:
    """Consume one use of the join token, or raise `NotAllowed`."""
    invitation = nodes.invitation(connection, who.token_id)
    if invitation is not None and invitation.node not in ("", request.name):
        raise NotAllowed(
            f"the join token is for the node name {invitation.node!r}, not {request.name[:64]!r}",
            hint=f"--name {invitation.node}",
        )
    if not nodes.use(connection, who.token_id):
        raise NotAllowed("the join token is used up", hint=_INVITE)


def _check_request(request: JoinRequest) -> None:
    if not 0 < len(request.name) <= NAME_MAX or not request.name.isprintable():
        raise InvalidValue(
            f"a node cannot be named {request.name[:64]!r}", hint=f"use 1 to {NAME_MAX} printable characters: --name"
        )
    if max(len(request.machine), len(request.instance)) > NAME_CHARACTERS_MAX:
        raise InvalidValue(f"machine and instance may have at most {NAME_CHARACTERS_MAX} characters each")
