"""Access control: the objects that each role may read or change, and the node that a token identifies.

    none    nothing: the resource does not exist for that role
    own     objects that the principal made, or that the server made for the principal
    team    own objects, and objects of the principal's teams
    all     every object

The auth middleware calls `reach` to decide whether a principal may use a route at all. The route then calls `covers`
for the object that the request names. A principal that requests an object out of its reach receives `NotFound`, never
`NotAllowed`. `NotAllowed` would reveal that the object exists. A token may have fewer rights than its owner, never
more. The table `SCOPES` restricts a token's role to the token's scopes.

A `Right` is independent of roles. The first administrator of a server holds every right. A holder of a right can grant
the right to other principals. A token with scopes has a right only if the right is one of its scopes.

A node's token belongs to exactly one node, with one name and one home directory:

    a token of the server's own file, or of a join     ─▶ bound to a node before or at the node's first hello
    any other token at its first hello                 ─▶ pending until an administrator approves the node's name
    a second name or home with the same token          ─▶ refused in every case
    a second process of a home                         ─▶ refused while the first process is connected
    a home with a key, on another machine              ─▶ pending until an administrator approves the machine

A node makes a key pair (`node_keys.py`). After the server has bound the node's key, the token alone is useless. A node
of an earlier version has no key. The server binds the key in the first hello message that has one.

The server recognises a node's home directory by its instance, a random value that the agent stores in the directory. A
restarted container counts as another machine with the same home directory. The boot identifier and the machine
identifier of the operating system show that a container has restarted on the same machine. Each agent process generates
a random number at startup. The random number lets the server distinguish two agent processes that use the same home
directory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Literal, get_args

import msgspec

Role = Literal["admin", "operator", "member", "viewer", "agent"]
ROLES: tuple[Role, ...] = get_args(Role)


class AccessReach(StrEnum):
    """Subset of a resource's objects that a role may access."""

    NONE = "none"
    OWN = "own"
    TEAM = "team"
    ALL = "all"


class Resource(StrEnum):
    """Resources that principals read and change."""

    # Runs with their attempts, logs, files and receipts. Write access permits submitting or stopping a run.
    RUNS = "runs"
    NODES = "nodes"  # Nodes with their state and devices. Write access permits deleting a node.
    # Node settings: drain, calendar and excluded GPUs. The reach "own" covers nodes that the caller owns.
    RULES = "node-rules"
    POOLS = "pools"
    # Fair shares of the queue and device usage. The reach "team" covers the caller and the caller's teams.
    SHARES = "shares"
    POLICIES = "policies"  # Usage policies, and the principals that administrators attach to the policies.
    PRICES = "prices"
    BUDGETS = "budgets"  # Budgets. The reach "team" covers the caller and the caller's teams.
    USAGE = "usage"  # Device usage and its cost. The reach "team" covers the caller and the caller's teams.
    # Objects of captured environments. The reach "own" permits reading by address. The reach "all" also permits listing
    # and deletion.
    ENVIRONMENTS = "environments"
    BLOBS = "blobs"  # Chunks of payloads and outputs, addressed by digest.
    AGENTS = "agents"  # Requests that a node sends about itself, such as join and heartbeat.
    # A join token only lets a machine join as a node. After the join, the server issues the machine a token with the
    # scope "agent". An agent token cannot admit further machines.
    JOINING = "joining"
    # Orders that the server sends to a node. Only the node's own token can read the orders, because orders contain
    # callers' environment variables and attempts' tokens. Reading orders requires write access, because the server
    # marks read orders as sent.
    ORDERS = "orders"
    USERS = "users"
    TEAMS = "teams"  # Teams and their members.
    TOKENS = "tokens"  # API tokens, without their secret values.
    AUDIT = "audit"
    METRICS = "metrics"  # Aggregate metrics of the whole server.
    SETTINGS = "settings"  # Settings of the server in force, its disk, its database and its backups.
    # Names and versions of secrets. Write access permits setting and deleting a secret. No route returns a secret's
    # value.
    SECRETS = "secrets"
    # Package indexes of the index proxy. Who may change an index decides which hosts the server connects to.
    INDEXES = "indexes"


class Right(StrEnum):
    """Rights that a principal holds in addition to its role."""

    # Lowering the isolation level of a pool, or moving a node into a pool with a lower level. The role must also permit
    # changes to pools.
    LOWER_ISOLATION = "isolation.lower"


_NONE, _OWN, _TEAM, _ALL = AccessReach.NONE, AccessReach.OWN, AccessReach.TEAM, AccessReach.ALL

# Maps each role and resource to the reach for reading and for writing. A role cannot access a resource that is missing
# in the role's table row.
POLICY: Mapping[Role, Mapping[Resource, tuple[AccessReach, AccessReach]]] = {
    "admin": dict.fromkeys(Resource, (_ALL, _ALL))
    | {Resource.AUDIT: (_ALL, _NONE), Resource.ORDERS: (_NONE, _NONE), Resource.JOINING: (_NONE, _NONE)}
    | {Resource.METRICS: (_ALL, _NONE), Resource.USAGE: (_ALL, _NONE), Resource.SETTINGS: (_ALL, _NONE)},
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
        Resource.INDEXES: (_ALL, _NONE),
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
        Resource.INDEXES: (_ALL, _NONE),
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
        Resource.INDEXES: (_ALL, _NONE),
    },
    "agent": {
        Resource.AGENTS: (_OWN, _OWN),
        Resource.JOINING: (_OWN, _OWN),
        Resource.ORDERS: (_OWN, _OWN),
        Resource.ENVIRONMENTS: (_OWN, _NONE),
        Resource.BLOBS: (_OWN, _OWN),
    },
}

# The keys are plain strings, because the role and the resource of a request may be arbitrary text.
_ROWS: Mapping[str, Mapping[Resource, tuple[AccessReach, AccessReach]]] = {
    str(role): row for role, row in POLICY.items()
}
_RESOURCES: Mapping[str, Resource] = {resource.value: resource for resource in Resource}

# Maps each token scope to the resources that the scope covers. The value True also permits changes to a resource.
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
    **{right.value: {} for right in Right},
}


def reach(role: str, resource: str, *, write: bool, scopes: Collection[str] = ()) -> AccessReach:
    """Return the reach: the objects of a resource that a role may access.

    An unknown role cannot access any resource. A token without scopes has all rights of its principal.
    """
    row = _ROWS.get(role)
    wanted = _RESOURCES.get(resource)
    if row is None or wanted is None:
        return AccessReach.NONE
    lent = [SCOPES.get(scope, {}) for scope in scopes]
    if scopes and not any(wanted in found and (found[wanted] or not write) for found in lent):
        return AccessReach.NONE
    return row.get(wanted, (_NONE, _NONE))[write]


def may_use(right: str, *, held: Collection[str], scopes: Collection[str] = ()) -> bool:
    """Return True if a holder of rights may use a right through a token with the given scopes."""
    return right in held and (not scopes or right in scopes)


def covers(reached: str, *, name: str, teams: Iterable[str], owner: str, team: str = "") -> bool:
    """Return True if a principal with the given reach may access an object."""
    if reached == AccessReach.ALL:
        return True
    if reached == AccessReach.NONE or not name:
        return False
    return owner == name or (reached == AccessReach.TEAM and bool(team) and team in teams)


def table() -> str:
    """Return the access policy as a Markdown table with "read / write" in each cell."""
    rows = [["", *ROLES], ["---"] * (len(ROLES) + 1)]
    for resource in Resource:
        cells = [POLICY[role].get(resource, (_NONE, _NONE)) for role in ROLES]
        texts = [dict.fromkeys("–" if one == AccessReach.NONE else one.value for one in cell) for cell in cells]
        rows.append([resource.value, *map(" / ".join, texts)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


class NodeIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that a node claims in its hello message."""

    name: str
    machine: str  # The machine that currently stores the node's home directory.
    # Random identifier of the node's home directory. The identifier is empty if an old agent version reports no
    # instance.
    instance: str = ""
    # Fingerprint of the node's keys, whose private keys the node has proven. Empty for a node of an earlier version.
    key: str = ""


class MachineTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Traits of the machine in a node's hello message, beside the machine's identifier."""

    boot_id: str
    host: str = ""  # Hash of the operating system's machine identifier, or "" if the system has none.


class TokenBinding(msgspec.Struct, frozen=True, kw_only=True):
    """Binding of a token to exactly one node."""

    # The node that the token is bound to. An empty name binds the token to the first node that sends a hello message.
    node: NodeIdentity
    approved: bool  # True after an administrator approved the node, or after a join token admitted the node.


class HelloDecision(StrEnum):
    """The server's answer to a node's hello message with a valid token."""

    ADMITTED = "admitted"
    BOUND = "bound"  # The hello message binds the token to the node.
    MOVED = "moved"  # Another machine now uses the node's home directory.
    PENDING = "pending"  # An administrator must approve the node's name.
    ELSEWHERE = "elsewhere"  # An administrator must approve the machine to which the node's home directory moved.


class HelloRefused(msgspec.Struct, frozen=True):
    """The reason why the server refuses a node's hello message, and the remedy."""

    why: str
    hint: str


_OWN_TOKEN = "create a separate token for each node: `sgpu node invite`"
OWN_KEY = (
    "if the node has lost its file node.key, join it again: `sgpu node invite NAME`, then `sgpu join` with the new file"
)


def is_same_machine(before: MachineTraits, said: MachineTraits) -> bool:
    """Return True if two descriptions share the kernel's boot or the identifier of the operating system.

    A restarted container shares the boot of its machine. A restarted machine keeps the identifier of its system.
    """
    same_boot = bool(before.boot_id) and before.boot_id == said.boot_id
    return same_boot or (bool(before.host) and before.host == said.host)


def judge_hello(
    binding: TokenBinding | None, said: NodeIdentity, *, is_here: bool = True
) -> HelloDecision | HelloRefused:
    """Accept or refuse a node's hello message. `binding` is None before the server binds the token.

    `is_here` is False if nothing shows that the node is still on the machine of its last hello message.
    """
    if binding is None:
        return HelloDecision.PENDING
    bound = binding.node
    if bound.key and bound.key != said.key:
        return HelloRefused(f"the token of {said.name!r} belongs to a node with another key", OWN_KEY)
    if not bound.name:
        return HelloDecision.BOUND
    if bound.name != said.name:
        return HelloRefused(f"the token of {said.name!r} belongs to the node {bound.name!r}", _OWN_TOKEN)
    if bound.instance != said.instance and (bound.instance or bound.machine != said.machine):
        what = "home directory of this machine" if bound.machine == said.machine else "machine"
        return HelloRefused(f"the token of {said.name!r} belongs to a node of this name in another {what}", _OWN_TOKEN)
    if bound.machine != said.machine and not said.instance:
        return HelloRefused(f"the token of {said.name!r} belongs to a node of this name on another machine", _OWN_TOKEN)
    if not binding.approved:
        return HelloDecision.PENDING
    if bound.machine != said.machine and said.key and not is_here:
        return HelloDecision.ELSEWHERE
    if bound.instance != said.instance or bound.key != said.key:
        return HelloDecision.BOUND  # The node's earlier version reported no instance, or had no key.
    return HelloDecision.ADMITTED if bound.machine == said.machine else HelloDecision.MOVED


def may_take_name(held: NodeIdentity, said: NodeIdentity) -> bool:
    """Return True if a joining node is the node that already has the name, so that it needs no approval.

    `held` is the approved node of this name. A node without a key is recognised by its home directory.
    """
    return held.key == said.key if held.key else held.instance == said.instance


def second_process(before: str, said: str, *, connected: bool) -> bool:
    """Return True if a second agent process sends hello while the first agent process is still connected.

    The kernel closes the connections of a killed agent, so the server accepts the next agent process without delay.
    """
    return bool(before) and before != said and connected
