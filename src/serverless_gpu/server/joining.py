"""Machines that join: what one gets for the token of the join file.

    join file (token of scope "joining") ─▶ an agent's token for this machine alone, and how it joins the Ray cluster

Asked again by the same home of the same machine, there is another token, and the one of before is revoked: whoever
asks has just lost it, or is about to write a new one over it. Which machines have a token, `sgpu token list` shows, and
`sgpu token revoke` takes one away.

Failure cases: the server makes no pool of several machines; the name belongs to another machine that is there (both
said before Ray is started, and not by a node that is refused later in a log).
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.server import audit, identity, nodes
from serverless_gpu.server.audit import Action
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.identity import NewToken
from serverless_gpu.server.services import Services
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.joining import JoinAnswer, JoinRequest

AGENT = "agent"
NAME_MAX = 128


def join(services: Services, who: Caller, request: JoinRequest) -> JoinAnswer:
    """Let a machine join.

    Raises:
        NotAllowed: this server makes no pool of several machines, or the name belongs to one that is there.
        InvalidValue: a name that cannot be.
    """
    pool = services.ray_pool()
    if pool is None:
        raise NotAllowed(
            "this server has one machine: no other can join it",
            hint="it is started so that others can: sgpu up --engine ray",
        )
    _check(request)
    secret, now_ns = identity.new_secret(), services.clock.wall_ns()
    label = f"joined: {request.name} ({request.machine[:16]}-{request.instance[:8]})"
    new = NewToken(principal=who.name, label=label[:LABEL_CHARACTERS_MAX], scopes=(AGENT,))

    def work(connection: sa.Connection) -> None:
        _refuse_taken(services, connection, request)
        for before in identity.tokens_of(connection, who.name):
            if before.label == new.label and before.revoked_ns is None:
                identity.revoke_token(connection, before.id, now_ns=now_ns)
                audit.record(connection, who=who, action=Action.TOKEN_REVOKE, subject=before.id, now_ns=now_ns)
        made = identity.create_token(connection, new, secret=secret, now_ns=now_ns)
        detail: dict[str, object] = {"principal": who.name, "scopes": new.scopes, "node": request.name}
        audit.record(
            connection, who=who, action=Action.TOKEN_CREATE, subject=made.token.id, now_ns=now_ns, detail=detail
        )

    services.database.write(work)
    return JoinAnswer(token=secret, ray=pool)


def _refuse_taken(services: Services, connection: sa.Connection, request: JoinRequest) -> None:
    there = nodes.named(connection, request.name)
    if there is None or there.forgotten_ns is not None or there.hello.instance == request.instance:
        return
    if services.presence.is_there(there.id, now_ns=services.clock.boottime_ns()):
        what = "another machine" if there.machine != request.machine else "another home of this machine"
        raise NotAllowed(
            f"a node named {request.name!r} is connected, and it is {what}", hint="give this one another name: --name"
        )


def _check(request: JoinRequest) -> None:
    if not 0 < len(request.name) <= NAME_MAX or not request.name.isprintable():
        raise InvalidValue(
            f"a node cannot be named {request.name[:64]!r}", hint=f"1 to {NAME_MAX} printable characters: --name"
        )
    if max(len(request.machine), len(request.instance)) > NAME_CHARACTERS_MAX:
        raise InvalidValue(f"machine and instance have {NAME_CHARACTERS_MAX} characters at most")
