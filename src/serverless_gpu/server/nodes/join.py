"""Machines that join: what one gets for a join token.

    join token (scope "joining") ─▶ an agent's token for this home alone, and how it joins the Ray cluster
    that agent's token, later    ─▶ how it joins the Ray cluster, after a crash or a boot

Asked again with the same join token by the same home, the server makes another agent's token and revokes the one of
before: its answer was lost. `sgpu token list` shows which machines have a token, and `sgpu token revoke` takes one
away.

Failure cases: the server makes no pool of several machines; the join token is used up; the name belongs to another
machine that is there. All are reported before Ray is started.
"""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.model.access.node_identity import Identity
from serverless_gpu.model.access.roles import Resource
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.liveness import Presence
from serverless_gpu.server.records import audit, node_tokens, nodes, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.nodes import JoinAnswer, JoinRequest, RayPool

AGENT = "agent"
_INVITE = "an administrator makes a join file, also for several machines: sgpu node invite --uses 10"
NAME_MAX = 128


class JoinService:
    """Returns credentials and cluster addresses to nodes that join."""

    def __init__(
        self, *, clock: Clock, database: Transactions, presence: Presence, ray_pool: Callable[[], RayPool | None]
    ) -> None:
        self._clock = clock
        self._database = database
        self._presence = presence
        self._find_pool = ray_pool

    def join(self, who: Caller, request: JoinRequest) -> JoinAnswer:
        """Let a machine join.

        Raises:
            NotAllowed: this server makes no pool of several machines, the token is not for joining or is used up, or
                the name belongs to a machine that is there.
            InvalidValue: a name that cannot be.
        """
        if Resource.JOINING not in who.scopes:
            raise NotAllowed("a machine joins with a join token, not with a node's own", hint=_INVITE)
        pool = self._ray_pool() if request.ray else None
        _check(request)
        node = Identity(name=request.name, machine=request.machine, instance=request.instance)
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()
        label = f"joined: {request.name} ({request.machine[:16]}-{request.instance[:8]})"
        new = NewToken(principal=who.name, label=label[:LABEL_CHARACTERS_MAX], scopes=(AGENT,))

        def work(connection: sa.Connection) -> None:
            self._refuse_taken(connection, request)
            if not node_tokens.of_home(connection, node, by=who.token_id):
                _use(connection, who, request)
            for before in principals.tokens_of(connection, who.name):
                if before.label == new.label and before.revoked_ns is None:
                    principals.revoke_token(connection, before.id, now_ns=now_ns)
                    audit.record(connection, who=who, action=Action.TOKEN_REVOKE, subject=before.id, now_ns=now_ns)
            made = principals.create_token(connection, new, secret=secret, now_ns=now_ns)
            node_tokens.bind(connection, made.token.id, node, by=who.token_id, at_ns=now_ns)
            detail: dict[str, object] = {"principal": who.name, "scopes": new.scopes, "node": request.name}
            audit.record(
                connection, who=who, action=Action.TOKEN_CREATE, subject=made.token.id, now_ns=now_ns, detail=detail
            )

        self._database.write(work)
        return JoinAnswer(token=secret, ray=pool)

    def ray_pool(self, who: Caller) -> RayPool:
        """Return how a node that has joined before joins the Ray cluster.

        Raises:
            NotFound: the token belongs to no node that was let in.
            NotAllowed: this server makes no pool of several machines.
        """
        found = self._database.read(lambda connection: node_tokens.find(connection, who.token_id))
        if found is None or found.approved_ns is None or not found.node.name:
            raise NotFound("the token belongs to no node of this server", hint=_INVITE)
        return self._ray_pool()

    def _ray_pool(self) -> RayPool:
        pool = self._find_pool()
        if pool is None:
            raise NotAllowed(
                "this server has one machine: no other can join it",
                hint="it is started so that others can: sgpu up --engine ray",
            )
        return pool

    def _refuse_taken(self, connection: sa.Connection, request: JoinRequest) -> None:
        there = nodes.named(connection, request.name)
        if there is None or there.forgotten_ns is not None or there.hello.instance == request.instance:
            return
        if self._presence.is_there(there.id, now_ns=self._clock.boottime_ns()):
            what = "another machine" if there.machine != request.machine else "another home of this machine"
            raise NotAllowed(
                f"a node named {request.name!r} is connected, and it is {what}",
                hint="give this one another name: --name",
            )


def _use(connection: sa.Connection, who: Caller, request: JoinRequest) -> None:
    """Use the join token once.

    Raises:
        NotAllowed: it is used up, or for another name.
    """
    invitation = node_tokens.invitation(connection, who.token_id)
    if invitation is not None and invitation.node not in ("", request.name):
        raise NotAllowed(
            f"the join token is for a node named {invitation.node!r}, not {request.name[:64]!r}",
            hint=f"--name {invitation.node}",
        )
    if not node_tokens.use(connection, who.token_id):
        raise NotAllowed("the join token is used up", hint=_INVITE)


def _check(request: JoinRequest) -> None:
    if not 0 < len(request.name) <= NAME_MAX or not request.name.isprintable():
        raise InvalidValue(
            f"a node cannot be named {request.name[:64]!r}", hint=f"1 to {NAME_MAX} printable characters: --name"
        )
    if max(len(request.machine), len(request.instance)) > NAME_CHARACTERS_MAX:
        raise InvalidValue(f"machine and instance have {NAME_CHARACTERS_MAX} characters at most")
