"""Converts Ray's tables to nodes, gangs and messages, and converts gangs to placement groups.

    node table        ─▶ NodeRow: name, devices by type, alive or not        `node_changes` ─▶ NodeUp, NodeLost
    placement groups  ─▶ PlacementGroup: its gang and its state              unlisted states are UNKNOWN
    Gang              ─▶ bundles, one per share in order; a resource pins each bundle to its node
    a refusal by Ray  ─▶ Waiting or Impossible, with a reason

A node belongs to the pool if it has the resource `sgpu_node:<name>`, which `ray start` sets. Ray resources named
`sgpu_gpus:<TYPE>` count a node's devices. On a node without `sgpu_gpus` resources, the module uses
`accelerator_type:<TYPE>` and Ray's count of GPUs. All functions of the module are pure.

The module shortens text from Ray for messages, and replaces unprintable characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from serverless_gpu.engines.base import EngineNode, Gang, Impossible, NodeLost, NodeUp, Share, Waiting
from serverless_gpu.engines.ray.start_arguments import DEVICES, RESOURCE, joined
from serverless_gpu.model.hardware import CPU

PIN = 0.001
"""Amount of a node's pinning resource that each bundle requests, small enough for any number of bundles."""
_TYPE = "accelerator_type:"
_PORT_FIELDS = (
    *("NodeManagerPort", "ObjectManagerPort", "RuntimeEnvAgentPort", "DashboardAgentListenPort"),
    *("MetricsAgentPort", "MetricsExportPort"),
)
_TEXT_MAX = 200
_UNSAID = "Ray gives no reason"

Word = TypeVar("Word", bound=StrEnum)


class GroupState(StrEnum):
    """State of a placement group in Ray."""

    PENDING = "PENDING"
    PREPARED = "PREPARED"
    CREATED = "CREATED"
    RESCHEDULING = "RESCHEDULING"
    REMOVED = "REMOVED"
    UNKNOWN = "UNKNOWN"


class Scheduling(StrEnum):
    """Scheduling state of a placement group that Ray has not created yet."""

    QUEUED = "QUEUED"
    STARTED = "SCHEDULING_STARTED"
    FAILED_TO_COMMIT = "FAILED_TO_COMMIT_RESOURCES"
    NO_RESOURCES = "NO_RESOURCES"
    INFEASIBLE = "INFEASIBLE"
    FINISHED = "FINISHED"
    REMOVED = "REMOVED"
    UNKNOWN = "UNKNOWN"


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the pool in Ray's node table."""

    id: str
    name: str
    alive: bool
    address: str = ""
    counts: dict[str, int] = {}  # Device counts by type, or {} if Ray reports only a GPU count.
    declares: bool = False  # True if Ray has a separate resource for each device type.
    gpus: int = 0
    cpus: int = 0
    ports: tuple[int, ...] = ()  # Ports of Ray's processes on the node.


class PlacementGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A placement group that the engine has created."""

    gang: str
    state: GroupState
    scheduling: Scheduling = Scheduling.UNKNOWN
    said: str = ""

    def is_reserved(self) -> bool:
        """Return True if Ray has placed the group. The result stays True while Ray moves single bundles."""
        return self.state in (GroupState.CREATED, GroupState.RESCHEDULING)

    def is_under_way(self) -> bool:
        """Return True if Ray has not finished the first placement of the group."""
        return self.state in (GroupState.PENDING, GroupState.PREPARED)


class KnownNode(msgspec.Struct, frozen=True, kw_only=True):
    """Last known state of a node in Ray."""

    row: NodeRow
    lost: str = ""  # Reason why the scheduler must not use the node, or "".
    missing_ns: int | None = None  # Time on the boot-time clock at which Ray's table first lacked the node.


MISSING_NS = 120_000_000_000
"""Nanoseconds after which a node that is missing from Ray's table counts as lost.

Nodes rejoin a restarted Ray head one by one.
"""


def row(raw: Mapping[str, object]) -> NodeRow | None:
    """Convert a row of `ray.nodes()`, or return None for a node outside the pool."""
    resources = _numbers(raw.get("Resources"))
    names = [key.removeprefix(RESOURCE) for key in resources if key.startswith(RESOURCE)]
    if len(names) != 1 or not isinstance(raw.get("NodeID"), str):
        return None
    offers = {key.removeprefix(DEVICES): round(count) for key, count in resources.items() if key.startswith(DEVICES)}
    gpus = round(resources.get("GPU", 0))
    types = [key.removeprefix(_TYPE) for key in resources if key.startswith(_TYPE)]
    declares = bool(offers)
    if not declares and len(types) == 1 and gpus:
        offers = {types[0]: gpus}
    return NodeRow(
        id=str(raw["NodeID"]),
        name=names[0],
        alive=raw.get("Alive") is True,
        address=plain(raw.get("NodeManagerAddress")),
        counts=dict(sorted(offers.items())),
        declares=declares,
        gpus=gpus,
        cpus=int(resources.get("CPU", 0)),
        ports=tuple(port for port in (raw.get(name) for name in _PORT_FIELDS) if isinstance(port, int) and port > 0),
    )


def rows(raw: Iterable[Mapping[str, object]]) -> list[NodeRow]:
    """Return the rows of the pool's live nodes.

    Use `deaths` to find dead nodes, because Ray omits the names of dead nodes.
    """
    return [found for one in raw if (found := row(one)) is not None]


def deaths(raw: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Return the Ray identifiers of dead nodes with the cause of each death."""
    return {
        str(one.get("NodeID")): plain(one.get("DeathReasonMessage"))
        for one in raw
        if one.get("Alive") is False and one.get("NodeID")
    }


def update_nodes(
    known: Mapping[str, KnownNode], table: Sequence[Mapping[str, object]], now_ns: int
) -> dict[str, KnownNode]:
    """Return the state of each node by name, after a poll of Ray's node table.

    `table` is the result of `ray.nodes()` at boottime `now_ns`. A node is lost if the table lists the node as dead, or
    has lacked the node for `MISSING_NS`. Two live rows can have the same node name if Ray restarts on a node before the
    head notices the exit of the old raylet. The function uses the newer of the live rows.
    """
    dead = deaths(table)
    alive: dict[str, NodeRow] = {}
    for one in rows(table):
        before = known.get(one.name)
        if one.alive and (one.name not in alive or (before is not None and before.row.id == alive[one.name].id)):
            alive[one.name] = one
    return {name: _next(known.get(name), alive.get(name), dead, now_ns) for name in sorted({*known, *alive})}


def with_problems(known: Mapping[str, KnownNode], problems: Mapping[str, str]) -> dict[str, KnownNode]:
    """Return all nodes, and treat the nodes in `problems` as lost.

    `problems` maps node names to reasons.
    """
    return {
        name: msgspec.structs.replace(one, lost=problems[name]) if name in problems and not one.lost else one
        for name, one in known.items()
    }


def node_changes(told: Mapping[str, str], known: Mapping[str, KnownNode]) -> list[NodeUp | NodeLost]:
    """Return the node events since the last call. A node that was never up produces no NodeLost.

    `told` maps each node name to the reason in its last NodeLost event, or to "" after a NodeUp event.
    """
    events: list[NodeUp | NodeLost] = []
    for name, one in known.items():
        if one.lost and told.get(name) == "":
            events.append(NodeLost(node=name, sentence=one.lost))
        elif not one.lost and told.get(name) != "":
            events.append(NodeUp(node=engine_node(one.row)))
    return events


def engine_node(row: NodeRow) -> EngineNode:
    """Return a node for the scheduler, without devices, because the node's agent reports the devices."""
    return EngineNode(name=row.name, endpoints=tuple(joined(row.address, port) for port in row.ports if row.address))


def gang_name(pool: str, gang: str) -> str:
    """Return the name of a gang's placement group."""
    return f"{namespace(pool)}:{gang}"


def namespace(pool: str) -> str:
    """Return the Ray namespace of one server's actors and placement groups."""
    return f"sgpu:{pool}"


def groups(pool: str, table: Iterable[Mapping[str, object]]) -> dict[str, PlacementGroup]:
    """Return the placement groups of a pool by gang identifier, except removed groups."""
    found = {}
    for one in table:
        name, prefix = one.get("name"), gang_name(pool, "")
        if isinstance(name, str) and name.startswith(prefix):
            read = group(name.removeprefix(prefix), one)
            if read.state is not GroupState.REMOVED:
                found[read.gang] = read
    return found


def group(gang: str, raw: Mapping[str, object]) -> PlacementGroup:
    """Convert a row of `placement_group_table()`. An unknown state becomes UNKNOWN."""
    state, said = _listed(GroupState, raw.get("state")), raw.get("stats")
    scheduling = mapping(said).get("scheduling_state")
    return PlacementGroup(
        gang=gang, state=state, scheduling=_listed(Scheduling, scheduling), said=plain(scheduling or raw.get("state"))
    )


def bundles(gang: Gang, known: Mapping[str, KnownNode]) -> list[dict[str, float]]:
    """Return one bundle for each share of a gang, each pinned to the node of its share."""
    return [_bundle(share, known[share.node].row) for share in gang.shares]


def in_words(gang: Gang) -> str:
    """Describe the reservation of a gang in a readable message."""
    shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
    return f"reserve in Ray for {gang.id}: {shares}"


def refusal(gang: Gang, known: Mapping[str, KnownNode]) -> Waiting | Impossible | None:
    """Return the refusal of a gang that cannot fit on the known nodes, or None."""
    for share in gang.shares:
        if share.node not in known:
            return Impossible(sentence=f"the Ray cluster has no node {share.node!r}")
        one = known[share.node].row
        if one.declares or (one.counts and share.gpu_type != CPU):
            total = one.counts.get(share.gpu_type, 0)
        else:
            total = one.cpus if share.gpu_type == CPU else one.gpus
        if share.count > total:
            return Impossible(sentence=f"{share.node} has {total} {share.gpu_type}, not {share.count}")
    for share in gang.shares:
        if lost := known[share.node].lost:
            return Waiting(sentence=f"{share.node} {lost}")
        if known[share.node].missing_ns is not None:
            return Waiting(sentence=f"{share.node} has not rejoined the Ray head")
    return None


def placement_refusal(
    gang: Gang, said: PlacementGroup, known: Mapping[str, KnownNode], free: Mapping[str, Mapping[str, float]]
) -> Waiting | Impossible:
    """Explain, as Waiting or Impossible, why Ray did not reserve a gang.

    `said` is the last state of the gang's placement group. `known` contains the nodes that Ray listed after the
    reservation attempt. `free` maps Ray's node identifiers to free resources.
    """
    if (first := refusal(gang, known)) is not None:
        return first
    if said.scheduling is Scheduling.INFEASIBLE:
        wanted = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Impossible(sentence=f"Ray reports that its cluster can never provide {wanted}")
    if said.state is GroupState.UNKNOWN or said.scheduling is Scheduling.UNKNOWN:
        return Waiting(sentence=f"Ray reports the state {said.said!r} for {gang.id}")
    for share in gang.shares:
        one = known[share.node].row
        there = free.get(one.id, {})
        have = int(min(there.get(key, 0) for key in _bundle(share, one) if key != RESOURCE + share.node))
        if have < share.count:
            return Waiting(sentence=f"Ray reports {have} of {share.count} {share.gpu_type} free on {share.node}")
    return Waiting(sentence=f"Ray is still reserving {gang.id}")


def plain(text: object) -> str:
    """Shorten text from Ray to one printable line for a message."""
    words = " ".join(str(text or "").split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return shown if len(shown) <= _TEXT_MAX else f"{shown[:_TEXT_MAX]} …"


def mapping(raw: object) -> Mapping[str, object]:
    """Return a JSON object, or an empty mapping for any other value."""
    return raw if isinstance(raw, Mapping) else {}


def mappings(raw: object) -> list[Mapping[str, object]]:
    """Return the JSON objects in a list, and skip other items."""
    return [one for one in raw if isinstance(one, Mapping)] if isinstance(raw, Sequence) else []


def free(raw: object) -> dict[str, dict[str, float]]:
    """Return the free resources of each node by Ray's node identifier."""
    return {name: _numbers(resources) for name, resources in mapping(raw).items()}


def _next(before: KnownNode | None, alive: NodeRow | None, dead: Mapping[str, str], now_ns: int) -> KnownNode:
    if alive is not None:
        return KnownNode(row=alive)
    assert before is not None
    if before.lost:
        return before
    if before.row.id in dead:
        gone = msgspec.structs.replace(before.row, alive=False)
        return KnownNode(row=gone, lost=f"is lost: Ray reports the node as dead ({dead[before.row.id] or _UNSAID})")
    since_ns = now_ns if before.missing_ns is None else before.missing_ns
    lost = f"is lost: the node has been missing from Ray's node table for {MISSING_NS // 10**9} s"
    return KnownNode(row=before.row, lost=lost if now_ns - since_ns >= MISSING_NS else "", missing_ns=since_ns)


def _bundle(share: Share, one: NodeRow) -> dict[str, float]:
    count = float(share.count)
    base, has = ("CPU", one.cpus) if share.gpu_type == CPU else ("GPU", one.gpus)
    wanted = {DEVICES + share.gpu_type: count} if one.declares else {}
    if not wanted or has >= share.count:  # Ray does not count devices that only serverless-gpu knows.
        wanted[base] = count
    return {**wanted, RESOURCE + share.node: PIN}


def _numbers(raw: object) -> dict[str, float]:
    if not isinstance(raw, Mapping):
        return {}
    return {str(key): float(value) for key, value in raw.items() if isinstance(value, int | float)}


def _listed(words: type[Word], raw: object) -> Word:
    try:
        return words(str(raw))
    except ValueError:
        return words("UNKNOWN")
