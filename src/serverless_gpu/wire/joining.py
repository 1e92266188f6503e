"""How a machine becomes a node of a pool: it shows the token of the join file, and gets what is its own.

    POST   /agents/join    JoinRequest  → JoinAnswer

The token of the join file (scope "joining") is good for this and nothing else; the one that the answer has is an
agent's, made for this machine, and is revoked alone. The token of Ray goes along: it is not in the join file.
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class JoinRequest(Request, frozen=True, kw_only=True):
    """A machine that wants to join.

    Attributes:
        name: what people call it.
        machine: `ambient.machine()`.
        instance: of its home.
    """

    name: str
    machine: str
    instance: str


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
        ray: how it joins the cluster.
    """

    token: str
    ray: RayPool
