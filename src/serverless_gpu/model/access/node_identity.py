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
    """The identity that a node claims."""

    name: str
    machine: str  # where its home is now
    instance: str = ""  # of its home; "" from a version that does not report it


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """The node that a token belongs to."""

    node: Identity  # its node; a name of "" stands for the first that says hello
    approved: bool  # whether an administrator, or a join token, has let it in


class HelloDecision(StrEnum):
    """The answer to a hello with a valid token."""

    ADMITTED = "admitted"
    BOUND = "bound"  # the token is this node's from now on
    MOVED = "moved"  # the same home on another machine
    PENDING = "pending"  # an administrator has to approve the name


class HelloRefused(msgspec.Struct, frozen=True):
    """The reason for which a hello is refused, and the remedy."""

    why: str
    hint: str


_OWN_TOKEN = "give each node a token of its own: `sgpu node invite`"


def judge(binding: Binding | None, said: Identity) -> HelloDecision | HelloRefused:
    """Decide on a hello. `binding` is None where nothing was decided about the token."""
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

    The kernel closes the connections of a killed process, so its successor is admitted at once.
    """
    return bool(before) and before != said and connected
