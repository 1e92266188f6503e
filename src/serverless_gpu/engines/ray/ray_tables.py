"""Translates Ray's tables to our nodes, gangs and sentences, and gangs to placement groups. Pure.

    node table        ─▶ Row: a name, devices by type, alive or why not      `changes` ─▶ NodeUp, NodeLost
    placement groups  ─▶ Group: whose gang, how far                          allow-lists; what is not there is UNKNOWN
    Gang              ─▶ bundles, one for each share in its order, pinned to its node by a resource
    a refusal by Ray  ─▶ Waiting or Impossible, with a sentence

A node is one of ours by its resource `sgpu_node:<name>`, which `ray start` was given, and says what it offers by
`sgpu_gpus:<TYPE>`. Where it does not, `accelerator_type:<TYPE>` and Ray's count of GPUs do.

Text that Ray wrote is shortened and printable before it goes into a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from serverless_gpu.engines.base import EngineNode, Gang, Impossible, NodeLost, NodeUp, Share, Waiting
from serverless_gpu.engines.ray.start_arguments import DEVICES, RESOURCE
from serverless_gpu.model.hardware import CPU

PIN = 0.001
"""How much of a node's own resource a bundle takes: enough to be nowhere else, however many there are."""
_TYPE = "accelerator_type:"
_TEXT_MAX = 200
_UNSAID = "Ray does not say why"

Word = TypeVar("Word", bound=StrEnum)


class GroupState(StrEnum):
    """How far a placement group is."""

    PENDING = "PENDING"
    PREPARED = "PREPARED"
    CREATED = "CREATED"
    RESCHEDULING = "RESCHEDULING"
    REMOVED = "REMOVED"
    UNKNOWN = "UNKNOWN"


class Scheduling(StrEnum):
    """What Ray's scheduler says of a placement group that is not there yet."""

    QUEUED = "QUEUED"
    STARTED = "SCHEDULING_STARTED"
    FAILED_TO_COMMIT = "FAILED_TO_COMMIT_RESOURCES"
    NO_RESOURCES = "NO_RESOURCES"
    INFEASIBLE = "INFEASIBLE"
    FINISHED = "FINISHED"
    REMOVED = "REMOVED"
    UNKNOWN = "UNKNOWN"


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node of ours in Ray's node table."""

    id: str
    name: str
    alive: bool
    address: str = ""
    counts: dict[str, int] = {}  # devices by type; none where only Ray's count is known
    declares: bool = False  # whether they are resources of Ray's, each of its own
    gpus: int = 0
    cpus: int = 0


class PlacementGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A placement group of ours."""

    gang: str
    state: GroupState
    scheduling: Scheduling = Scheduling.UNKNOWN
    said: str = ""

    def is_reserved(self) -> bool:
        """Return whether all of it has been placed, though Ray may be placing parts of it again."""
        return self.state in (GroupState.CREATED, GroupState.RESCHEDULING)

    def is_under_way(self) -> bool:
        """Return whether nothing of it has been placed yet; not so for what is UNKNOWN."""
        return self.state in (GroupState.PENDING, GroupState.PREPARED)


class KnownNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the engine remembers it."""

    row: NodeRow
    lost: str = ""  # why it is not to be counted on, or ""
    missing_ns: int | None = None  # since when Ray's table has not had it at all, or None


MISSING_NS = 120_000_000_000
"""How long a node may be missing from the table: a head that forgot everything learns of its nodes again."""


def row(raw: Mapping[str, object]) -> NodeRow | None:
    """Return a row of `ray.nodes()`, or None when it is no node of ours."""
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
    )


def rows(raw: Iterable[Mapping[str, object]]) -> list[NodeRow]:
    """Return the rows of our nodes; those that are dead have lost their names and are left to `changes`."""
    return [found for one in raw if (found := row(one)) is not None]


def deaths(raw: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Return Ray's identifiers of nodes that are dead, and what Ray says of each."""
    return {
        str(one.get("NodeID")): plain(one.get("DeathReasonMessage"))
        for one in raw
        if one.get("Alive") is False and one.get("NodeID")
    }


def update_nodes(
    known: Mapping[str, KnownNode], table: Sequence[Mapping[str, object]], now_ns: int
) -> dict[str, KnownNode]:
    """Return what is known of each node, by name, after a look at Ray's table (`ray.nodes()`) at boottime `now_ns`.

    Only what the table says dead is lost, or what it has not had for `MISSING_NS`. Of two rows alive for one
    node the new one counts: Ray was started there again, and has not noticed yet that the other one is gone.
    """
    dead = deaths(table)
    alive: dict[str, NodeRow] = {}
    for one in rows(table):
        before = known.get(one.name)
        if one.alive and (one.name not in alive or (before is not None and before.row.id == alive[one.name].id)):
            alive[one.name] = one
    return {name: _next(known.get(name), alive.get(name), dead, now_ns) for name in sorted({*known, *alive})}


def with_problems(known: Mapping[str, KnownNode], problems: Mapping[str, str]) -> dict[str, KnownNode]:
    """Return the nodes, with those lost that can have no agent: `problems` says why, by name."""
    return {
        name: msgspec.structs.replace(one, lost=problems[name]) if name in problems and not one.lost else one
        for name, one in known.items()
    }


def node_changes(told: Mapping[str, str], known: Mapping[str, KnownNode]) -> list[NodeUp | NodeLost]:
    """Return what is news; a node that was never up is not lost.

    `told` says why each node was last said to be lost, "" where it was said to be up.
    """
    events: list[NodeUp | NodeLost] = []
    for name, one in known.items():
        if one.lost and told.get(name) == "":
            events.append(NodeLost(node=name, sentence=one.lost))
        elif not one.lost and told.get(name) != "":
            events.append(NodeUp(node=engine_node(name)))
    return events


def engine_node(name: str) -> EngineNode:
    """Return a node as the engine tells of it: its devices are for its agent to say."""
    return EngineNode(name=name)


def gang_name(pool: str, gang: str) -> str:
    """Return the name of a gang's placement group."""
    return f"{namespace(pool)}:{gang}"


def namespace(pool: str) -> str:
    """Return Ray's namespace for all that is a server's."""
    return f"sgpu:{pool}"


def groups(pool: str, table: Iterable[Mapping[str, object]]) -> dict[str, PlacementGroup]:
    """Return our placement groups that are not removed, by gang."""
    found = {}
    for one in table:
        name, prefix = one.get("name"), gang_name(pool, "")
        if isinstance(name, str) and name.startswith(prefix):
            read = group(name.removeprefix(prefix), one)
            if read.state is not GroupState.REMOVED:
                found[read.gang] = read
    return found


def group(gang: str, raw: Mapping[str, object]) -> PlacementGroup:
    """Return a row of `placement_group_table()`; states that are on no list are UNKNOWN."""
    state, said = _listed(GroupState, raw.get("state")), raw.get("stats")
    scheduling = mapping(said).get("scheduling_state")
    return PlacementGroup(
        gang=gang, state=state, scheduling=_listed(Scheduling, scheduling), said=plain(scheduling or raw.get("state"))
    )


def bundles(gang: Gang, known: Mapping[str, KnownNode]) -> list[dict[str, float]]:
    """Return what Ray is to reserve: a bundle for each share, in their order, which can be on its node only."""
    return [_bundle(share, known[share.node].row) for share in gang.shares]


def in_words(gang: Gang) -> str:
    """Return what is reserved for a gang, for people."""
    shares = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
    return f"reserve in Ray for {gang.id}: {shares}"


def refusal(gang: Gang, known: Mapping[str, KnownNode]) -> Waiting | Impossible | None:
    """Return why Ray need not be asked for a gang, or None."""
    for share in gang.shares:
        if share.node not in known:
            return Impossible(sentence=f"there is no node {share.node!r} in the Ray cluster")
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
            return Waiting(sentence=f"{share.node} has not joined the Ray head again")
    return None


def placement_refusal(
    gang: Gang, said: PlacementGroup, known: Mapping[str, KnownNode], free: Mapping[str, Mapping[str, float]]
) -> Waiting | Impossible:
    """Return what a gang waits for that Ray did not reserve, or why it never will.

    `said` is how its placement group was when it was given up, `known` the nodes as looked at afterwards, `free` what
    Ray has free, by its identifiers of nodes.
    """
    if (first := refusal(gang, known)) is not None:
        return first
    if said.scheduling is Scheduling.INFEASIBLE:
        wanted = ", ".join(f"{share.count} {share.gpu_type} on {share.node}" for share in gang.shares)
        return Impossible(sentence=f"Ray says that its cluster can never have {wanted}")
    if said.state is GroupState.UNKNOWN or said.scheduling is Scheduling.UNKNOWN:
        return Waiting(sentence=f"Ray is reserving {gang.id}, and calls that {said.said!r}")
    for share in gang.shares:
        one = known[share.node].row
        there = free.get(one.id, {})
        have = int(min(there.get(key, 0) for key in _bundle(share, one) if key != RESOURCE + share.node))
        if have < share.count:
            return Waiting(sentence=f"{have} of {share.count} {share.gpu_type} are free on {share.node}, says Ray")
    return Waiting(sentence=f"Ray is still reserving {gang.id}")


def plain(text: object) -> str:
    """Return text that Ray wrote as it may stand in a sentence: one line, short, printable."""
    words = " ".join(str(text or "").split())
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return shown if len(shown) <= _TEXT_MAX else f"{shown[:_TEXT_MAX]} …"


def mapping(raw: object) -> Mapping[str, object]:
    """Return an object of JSON, or none of its members when it is something else."""
    return raw if isinstance(raw, Mapping) else {}


def mappings(raw: object) -> list[Mapping[str, object]]:
    """Return a list of objects of JSON, without what is none."""
    return [one for one in raw if isinstance(one, Mapping)] if isinstance(raw, Sequence) else []


def free(raw: object) -> dict[str, dict[str, float]]:
    """Return what is free, by Ray's identifiers of nodes."""
    return {name: _numbers(resources) for name, resources in mapping(raw).items()}


def _next(before: KnownNode | None, alive: NodeRow | None, dead: Mapping[str, str], now_ns: int) -> KnownNode:
    if alive is not None:
        return KnownNode(row=alive)
    assert before is not None
    if before.lost:
        return before
    if before.row.id in dead:
        gone = msgspec.structs.replace(before.row, alive=False)
        return KnownNode(row=gone, lost=f"is lost: Ray says that it is dead ({dead[before.row.id] or _UNSAID})")
    since_ns = now_ns if before.missing_ns is None else before.missing_ns
    lost = f"is lost: the Ray head has not known it for {MISSING_NS // 10**9} s"
    return KnownNode(row=before.row, lost=lost if now_ns - since_ns >= MISSING_NS else "", missing_ns=since_ns)


def _bundle(share: Share, one: NodeRow) -> dict[str, float]:
    count = float(share.count)
    base, has = ("CPU", one.cpus) if share.gpu_type == CPU else ("GPU", one.gpus)
    wanted = {DEVICES + share.gpu_type: count} if one.declares else {}
    if not wanted or has >= share.count:  # devices that only we know of are none of Ray's
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
