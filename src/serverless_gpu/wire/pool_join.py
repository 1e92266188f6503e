"""Joining: a machine shows a join token, and gets a node token of its own.

    POST   /agents/join    JoinRequest    → JoinAnswer       (a join token)
    GET    /agents/ray                    → RayPool          (a node's own token: it has joined before)
    POST   /nodes/invite   InviteRequest  → InviteAnswer     (administrators)
    POST   /nodes/approve  ApproveRequest → NodeView         (administrators)

A join token (scope "joining") is good for this and nothing else, for as many homes as it was made for, and for a short
time. The token that the answer has is an agent's, made for one name and one home, and is revoked alone. A home that
asks again with the same join token, since the answer was lost, gets another agent's token and costs no further use. The
token of Ray goes along: it is not in the join file.
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request

INVITED_S = 86_400.0
"""How long a join token is good where nothing else is said."""


class JoinRequest(Request, frozen=True, kw_only=True):
    """A machine that wants to join.

    Attributes:
        name: what people call it.
        machine: `ambient.machine()`.
        instance: of its home.
        ray: whether it is to join the Ray cluster of the server.
    """

    name: str
    machine: str
    instance: str
    ray: bool = True


class RayPool(Answer, frozen=True, kw_only=True):
    """The Ray cluster of a server.

    Attributes:
        address: of its head.
        port: the first of the ports on the server's machine.
        token: of the cluster.
        version: of Ray; every machine needs the same.
        python: its interpreter; every machine needs the same minor version.
        problem: why its head does not answer the server either, or "": it may be on its way.
    """

    address: str
    port: int
    token: str
    version: str
    python: str
    problem: str = ""


class JoinAnswer(Answer, frozen=True, kw_only=True):
    """What is its own.

    Attributes:
        token: an agent's, for this machine.
        ray: how it joins the cluster; None where it did not ask.
    """

    token: str
    ray: RayPool | None


class InviteRequest(Request, frozen=True, kw_only=True):
    """Make a join token.

    Attributes:
        name: the only name it lets in, or "" for any.
        uses: how many machines it lets in.
        expires_s: how long, in seconds.
    """

    name: str = ""
    uses: int = 1
    expires_s: float = INVITED_S


class InviteAnswer(Answer, frozen=True, kw_only=True):
    """A join token; its secret is said this once.

    Attributes:
        id: of the token, with which it is revoked.
        token: the secret.
        expires_ns: nanoseconds since 1970.
    """

    id: str
    token: str
    uses: int
    expires_ns: int


class ApproveRequest(Request, frozen=True, kw_only=True):
    """Let in a node that waits.

    Attributes:
        name: of the node, or the identifier of its token where several have the name.
    """

    name: str
