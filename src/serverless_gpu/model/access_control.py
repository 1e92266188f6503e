"""Access control: how far each role may reach which resource, and which process may speak as a node.

    none    nothing: for that role the resource is not there
    own     what the principal made, or what was made for it
    team    that, and what belongs to a team it is in
    all     everything

The auth middleware asks with `reach` whether a principal may use a route at all; the route then asks with `covers`
about the one thing it is for. What a principal may not see is `NotFound`, never `NotAllowed`: a refusal would say that
it exists. A token may be good for less than its owner, never for more: its scopes, when it has any, are a second table
(`SCOPES`).

A node's token is one node's, which has one name and one home:

    token of the server's own file, of a join          ─▶ bound to a node before its first hello, or at it
    any other token that says hello for the first time ─▶ pending until an administrator approves its name
    a second name or home with a token                 ─▶ refused, whatever else is true
    a second process of a home                         ─▶ refused while the first is connected

A home is recognised by its instance, which is random and kept in the home; a container that is started again is another
machine and still the same home. Two processes of one home are told apart by a number that each makes at its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Literal, get_args

import msgspec

Role = Literal["admin", "operator", "member", "viewer", "agent"]
ROLES: tuple[Role, ...] = get_args(Role)


class AccessReach(StrEnum):
    """The reach of a principal on a resource."""

    NONE = "none"
    OWN = "own"
    TEAM = "team"
    ALL = "all"


class Resource(StrEnum):
    """Resources that principals read and change."""

    RUNS = "runs"  # runs, their attempts, logs, files and receipts; write: ask for one, stop it
    NODES = "nodes"  # nodes as people see them; write: forget one
    # What people decide about a node: drained, its calendar, GPUs left out; own: they are its owner.
    RULES = "node-rules"
    POOLS = "pools"
    SHARES = "shares"  # of the queue, and use of devices; team: those of one's teams, and one's own
    POLICIES = "policies"  # usage policies, and whom they are attached to
    PRICES = "prices"
    BUDGETS = "budgets"  # team: those of one's teams, and one's own
    USAGE = "usage"  # what was used and what it cost; team: by one's teams, and by oneself
    ENVIRONMENTS = "environments"  # objects of captured environments; own: by their address; all: list and delete
    BLOBS = "blobs"  # parts of payloads and outputs, by their digest
    AGENTS = "agents"  # a node's own side: join, heartbeat
    # Becoming a node with the token of the join file, which is good for nothing else; what a machine gets for it has
    # the scope "agent", and cannot let in another one.
    JOINING = "joining"
    # What a node is told to do; with it go the callers' variables and the tokens of attempts, so a node's own token is
    # all that reaches them, and asking for them is a write: they count as sent.
    ORDERS = "orders"
    USERS = "users"
    TEAMS = "teams"  # teams and who is in them
    TOKENS = "tokens"  # tokens, without their secrets
    AUDIT = "audit"
    METRICS = "metrics"  # figures of the whole server, without names
    SECRETS = "secrets"  # names and versions of secrets; write: set, delete. No route returns a value


_NONE, _OWN, _TEAM, _ALL = AccessReach.NONE, AccessReach.OWN, AccessReach.TEAM, AccessReach.ALL

# Role → resource → how far it may read, and write. A resource that is missing is out of reach.
POLICY: Mapping[Role, Mapping[Resource, tuple[AccessReach, AccessReach]]] = {
    "admin": dict.fromkeys(Resource, (_ALL, _ALL))
    | {Resource.AUDIT: (_ALL, _NONE), Resource.ORDERS: (_NONE, _NONE), Resource.JOINING: (_NONE, _NONE)}
    | {Resource.METRICS: (_ALL, _NONE), Resource.USAGE: (_ALL, _NONE)},
    "operator": {
        Resource.RUNS: (_ALL, _ALL),
        Resource.NODES: (_ALL, _ALL),
        Resource.RULES: (_ALL, _ALL),
        Resource.POOLS: (_ALL, _ALL),
        Resource.SHARES: (_ALL, _ALL),
        Resource.POLICIES: (_ALL, _ALL),
        Resource.PRICES: (_ALL, _ALL),
        Resource.BUDGETS: (_ALL, _ALL),
        Resource.USAGE: (_ALL, _NONE),
        Resource.ENVIRONMENTS: (_ALL, _ALL),
        Resource.BLOBS: (_OWN, _OWN),
        Resource.USERS: (_OWN, _NONE),
        Resource.TEAMS: (_TEAM, _NONE),
        Resource.TOKENS: (_OWN, _OWN),
        Resource.METRICS: (_ALL, _NONE),
        Resource.SECRETS: (_TEAM, _TEAM),
    },
    "member": {
        Resource.RUNS: (_TEAM, _OWN),
        Resource.NODES: (_ALL, _NONE),
        Resource.RULES: (_OWN, _OWN),
        Resource.POOLS: (_ALL, _NONE),
        Resource.SHARES: (_TEAM, _NONE),
        Resource.POLICIES: (_ALL, _NONE),
        Resource.PRICES: (_ALL, _NONE),
        Resource.BUDGETS: (_TEAM, _NONE),
        Resource.USAGE: (_TEAM, _NONE),
        Resource.ENVIRONMENTS: (_OWN, _OWN),
        Resource.BLOBS: (_OWN, _OWN),
        Resource.USERS: (_OWN, _NONE),
        Resource.TEAMS: (_TEAM, _NONE),
        Resource.TOKENS: (_OWN, _OWN),
        Resource.METRICS: (_ALL, _NONE),
        Resource.SECRETS: (_TEAM, _TEAM),
    },
    "viewer": {
        Resource.RUNS: (_TEAM, _NONE),
        Resource.NODES: (_ALL, _NONE),
        Resource.POOLS: (_ALL, _NONE),
        Resource.SHARES: (_TEAM, _NONE),
        Resource.POLICIES: (_ALL, _NONE),
        Resource.PRICES: (_ALL, _NONE),
        Resource.BUDGETS: (_TEAM, _NONE),
        Resource.USAGE: (_TEAM, _NONE),
        Resource.USERS: (_OWN, _NONE),
        Resource.TEAMS: (_TEAM, _NONE),
        Resource.TOKENS: (_OWN, _OWN),
        Resource.METRICS: (_ALL, _NONE),
    },
    "agent": {
        Resource.AGENTS: (_OWN, _OWN),
        Resource.JOINING: (_OWN, _OWN),
        Resource.ORDERS: (_OWN, _OWN),
        Resource.ENVIRONMENTS: (_OWN, _NONE),
        Resource.BLOBS: (_OWN, _OWN),
    },
}

# By what comes from outside, which may be anything.
_ROWS: Mapping[str, Mapping[Resource, tuple[AccessReach, AccessReach]]] = {
    str(role): row for role, row in POLICY.items()
}
_RESOURCES: Mapping[str, Resource] = {resource.value: resource for resource in Resource}

# Scope of a token → what it lets through: resources, and whether to change them, too.
SCOPES: Mapping[str, Mapping[Resource, bool]] = {
    "read": {resource: False for resource in Resource if resource is not Resource.ORDERS},
    "agent": {
        Resource.AGENTS: True,
        Resource.ORDERS: True,
        Resource.ENVIRONMENTS: False,
        Resource.BLOBS: True,
    },
    "submit": {
        Resource.RUNS: True,
        Resource.ENVIRONMENTS: True,
        Resource.BLOBS: True,
        Resource.NODES: False,
        Resource.POOLS: False,
        Resource.POLICIES: False,
    },
    **{resource.value: {resource: True} for resource in Resource},
    **{f"{resource.value}:read": {resource: False} for resource in Resource if resource is not Resource.ORDERS},
}


def reach(role: str, resource: str, *, write: bool, scopes: Collection[str] = ()) -> AccessReach:
    """Return the reach of a role on a resource.

    An unknown role or resource reaches nothing. Without scopes the token may do all that its principal may.
    """
    row = _ROWS.get(role)
    wanted = _RESOURCES.get(resource)
    if row is None or wanted is None:
        return AccessReach.NONE
    lent = [SCOPES.get(scope, {}) for scope in scopes]
    if scopes and not any(wanted in found and (found[wanted] or not write) for found in lent):
        return AccessReach.NONE
    return row.get(wanted, (_NONE, _NONE))[write]


def covers(reached: str, *, name: str, teams: Iterable[str], owner: str, team: str = "") -> bool:
    """Return whether one thing is in reach."""
    if reached == AccessReach.ALL:
        return True
    if reached == AccessReach.NONE or not name:
        return False
    return owner == name or (reached == AccessReach.TEAM and bool(team) and team in teams)


def table() -> str:
    """Return the policy as people read it: a Markdown table, "read / write" in each cell."""
    rows = [["", *ROLES], ["---"] * (len(ROLES) + 1)]
    for resource in Resource:
        cells = [POLICY[role].get(resource, (_NONE, _NONE)) for role in ROLES]
        texts = [dict.fromkeys("–" if one == AccessReach.NONE else one.value for one in cell) for cell in cells]
        rows.append([resource.value, *map(" / ".join, texts)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that a node claims."""

    name: str
    machine: str  # where its home is now
    instance: str = ""  # of its home; "" from a version that does not report it


class TokenBinding(msgspec.Struct, frozen=True, kw_only=True):
    """The node that a token belongs to."""

    node: NodeIdentity  # its node; a name of "" stands for the first that says hello
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


def judge_hello(binding: TokenBinding | None, said: NodeIdentity) -> HelloDecision | HelloRefused:
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
