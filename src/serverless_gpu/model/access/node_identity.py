"""Decides whether a process may speak as a node: one token is one node's, which has one name and one home.

    token of the server's own file, of a join          ─▶ bound to a node before its first hello, or at it
    any other token that says hello for the first time ─▶ pending until an administrator approves its name
    a second name or home with a token                 ─▶ refused, whatever else is true
    a second process of a home                         ─▶ refused while the first is connected

A home is recognised by its instance, which is random and kept in the home; a container that is started again is another
machine and still the same home. Two processes of one home are told apart by a number that each makes at its start.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says it is.

    Attributes:
        name: what people call it.
        machine: where its home is now.
        instance: of its home; "" from a version that does not say.
    """

    name: str
    machine: str
    instance: str = ""


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Whose a node's token is.

    Attributes:
        node: its node; a name of "" stands for the first that says hello.
        approved: whether an administrator, or a join token, has let it in.
    """

    node: Identity
    approved: bool


class HelloDecision(StrEnum):
    """What becomes of a hello whose token is good."""

    ADMITTED = "admitted"
    BOUND = "bound"  # the token is this node's from now on
    MOVED = "moved"  # the same home on another machine
    PENDING = "pending"  # an administrator has to approve the name


class HelloRefused(msgspec.Struct, frozen=True):
    """Why a hello is refused, and what to do."""

    why: str
    hint: str


_OWN_TOKEN = "give each node a token of its own: `sgpu node invite`"


def judge(binding: Binding | None, said: Identity) -> HelloDecision | HelloRefused:
    """Return what becomes of a hello.

    Args:
        binding: whose the token is; None where that was never decided.
        said: what the node says it is.
    """
    if binding is None:
        return HelloDecision.PENDING
    bound = binding.node
    if not bound.name:
        return HelloDecision.BOUND
    if bound.name != said.name:
        return HelloRefused(f"the token of {said.name!r} is that of the node {bound.name!r}", _OWN_TOKEN)
    if bound.instance != said.instance and (bound.instance or bound.machine != said.machine):
        what = "home of this machine" if bound.machine == said.machine else "machine"
        return HelloRefused(f"the token of {said.name!r} is that of a node of this name in another {what}", _OWN_TOKEN)
    if bound.machine != said.machine and not said.instance:
        return HelloRefused(f"the token of {said.name!r} is that of a node of this name on another machine", _OWN_TOKEN)
    if not binding.approved:
        return HelloDecision.PENDING
    if bound.instance != said.instance:
        return HelloDecision.BOUND  # it did not say its instance before
    return HelloDecision.ADMITTED if bound.machine == said.machine else HelloDecision.MOVED


def second_process(before: str, said: str, *, connected: bool) -> bool:
    """Return whether a hello comes from a second process while the first is connected.

    Args:
        before: number of the process that said hello last; "" from a version that does not say.
        said: number of the one that says hello now.
        connected: whether the first has been heard of lately and has its stream of orders open. The kernel closes the
            connections of a process that is killed, so its successor is admitted at once.
    """
    return bool(before) and before != said and connected
