"""Active runs: a compact form of runs with an unfinished attempt, for the server's loops.

The loops read thousands of active runs every few seconds. This module therefore reads all active runs with one query.
The query for compact runs takes a quarter of the time of `runs.active`.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import ACTIVE, Fact, State, StopReason
from serverless_gpu.server.db.tables import attempts, crews, facts, nodes, runs
from serverless_gpu.server.records.crews import CrewId


class ActiveCrew(msgspec.Struct, frozen=True, gc=False):
    """Compact row of `crews`: the unfinished part of an attempt on one node.

    Attributes:
        node: the node's name.
        grace_s: the longest time that the server ever allowed the ranks to run without an answer, in seconds.
    """

    id: CrewId
    node_id: str
    node: str
    gpus: int
    grace_s: float
    state: State


class ActiveRun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Compact form of a run with an unfinished attempt.

    Attributes:
        crews: the unfinished parts of its attempt on nodes, by node rank.
        stop: the reason of its stop request, or None.
        created_ns: time of the placement of its attempt.
        started_ns: time when user code of its attempt began; None before.
        num_nodes: number of nodes of its attempt, including nodes on which the attempt has ended.
        began: True if user code of its attempt has begun.
        chosen: True if the rendezvous of its nodes has an address.
        called_off: True if the server has called the attempt off before its rendezvous.
    """

    id: str
    owner: str
    name: str
    fence: int
    state: State
    gpu_type: str
    world_size: int
    stop: StopReason | None
    created_ns: int
    started_ns: int | None
    crews: tuple[ActiveCrew, ...]
    num_nodes: int = 1
    began: bool = False
    chosen: bool = False
    called_off: bool = False

    @property
    def has_met(self) -> bool:
        """Return True if the rendezvous has an address or was called off."""
        return self.began or self.chosen or self.called_off


_CURRENT = sa.and_(attempts.c.run_id == runs.c.id, attempts.c.fence == runs.c.fence)
_OF_CURRENT = sa.and_(crews.c.run_id == runs.c.id, crews.c.fence == runs.c.fence)
_ACTIVE_BRIEFLY = (
    sa.select(
        *(runs.c[name] for name in ("id", "owner", "name", "fence", "state")),
        *(attempts.c[name] for name in ("gpu_type", "world_size")),
        runs.c.stop,
        *(attempts.c[name] for name in ("created_ns", "started_ns")),
        *(crews.c[name] for name in ("crew", "node_id")),
        nodes.c.name,
        *(crews.c[name] for name in ("gpus", "grace_s", "state")),
        attempts.c.num_nodes,
        attempts.c.began,
        attempts.c.chosen_json.is_not(None).label("chosen"),
        attempts.c.called_off,
    )
    .select_from(runs.join(attempts, _CURRENT).join(crews, _OF_CURRENT).join(nodes, nodes.c.id == crews.c.node_id))
    .where(runs.c.state.in_([state.value for state in ACTIVE]), crews.c.ended_ns.is_(None))
)


def active_briefly(connection: sa.Connection) -> list[ActiveRun]:
    """Return the runs with an unfinished attempt."""
    found: dict[str, ActiveRun] = {}
    for row in connection.execute(_ACTIVE_BRIEFLY):
        crew = ActiveCrew((row[0], row[3], row[10]), row[11], row[12], row[13], row[14], State(row[15]))
        known = found.get(row[0])
        if known is not None:
            there = tuple(sorted((*known.crews, crew), key=lambda one: one.id))
            found[row[0]] = msgspec.structs.replace(known, crews=there)
            continue
        found[row[0]] = ActiveRun(
            id=row[0],
            owner=row[1],
            name=row[2],
            fence=row[3],
            state=State(row[4]),
            gpu_type=row[5],
            world_size=row[6],
            stop=StopReason(row[7]) if row[7] else None,
            created_ns=row[8],
            started_ns=row[9],
            crews=(crew,),
            num_nodes=row[16],
            began=bool(row[17]),
            chosen=bool(row[18]),
            called_off=bool(row[19]),
        )
    return list(found.values())


class AttemptDevices(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished attempt with its devices on one node.

    Attributes:
        crew: the part of the attempt on the node.
        uuids: devices that the attempt has reserved; empty before the node has reported them.
        since_ns: time of the placement, nanoseconds since 1970.
    """

    crew: CrewId
    node_id: str
    owner: str
    team: str
    name: str
    state: State
    gpus: int
    uuids: tuple[str, ...]
    since_ns: int


_FIRST = sa.select(sa.func.min(facts.c.seq)).where(
    facts.c.run_id == crews.c.run_id, facts.c.fence == crews.c.fence, facts.c.crew == crews.c.crew
)
_FIRST_FACT = sa.and_(
    facts.c.run_id == crews.c.run_id,
    facts.c.fence == crews.c.fence,
    facts.c.crew == crews.c.crew,
    facts.c.seq == _FIRST.correlate(crews).scalar_subquery(),
)
_HOLDERS = (
    sa.select(
        *(crews.c[name] for name in ("run_id", "fence", "crew", "node_id", "gpus", "state")),
        *(runs.c[name] for name in ("owner", "team", "name")),
        attempts.c.created_ns,
        facts.c.fact_json,
    )
    .select_from(runs.join(attempts, _CURRENT).join(crews, _OF_CURRENT).outerjoin(facts, _FIRST_FACT))
    .where(runs.c.state.in_([state.value for state in ACTIVE]), crews.c.ended_ns.is_(None))
)


def device_holders(connection: sa.Connection, *, node_id: str | None = None) -> list[AttemptDevices]:
    """Return the unfinished attempts with their devices, on one node or on all nodes."""
    query = _HOLDERS if node_id is None else _HOLDERS.where(crews.c.node_id == node_id)
    return [
        AttemptDevices(
            crew=(row.run_id, row.fence, row.crew),
            node_id=row.node_id,
            owner=row.owner,
            team=row.team,
            name=row.name,
            state=State(row.state),
            gpus=row.gpus,
            # The first fact of an attempt is the reservation of its devices.
            uuids=() if row.fact_json is None else from_json(row.fact_json, Fact).gpus,
            since_ns=row.created_ns,
        )
        for row in connection.execute(query)
    ]
