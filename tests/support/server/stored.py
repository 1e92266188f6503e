"""Rows that tests of the server start from: somebody, a node, a run, and what happens to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from serverless_gpu.ambient import new_run_id
from serverless_gpu.model.lifecycle.run_lifecycle import Event
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import endings, transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.records import attempts, runs
from serverless_gpu.server.records.attempts import NewAttempt
from serverless_gpu.server.records.crews import CrewOutcome, NewCrew
from serverless_gpu.server.records.runs import NewRun, StoredRun
from serverless_gpu.wire.runs import Target

T0 = 1_900_000_000_000_000_000
S = 1_000_000_000
TARGET = Target(python="3.11", platform="linux-x86_64")


def add_people(database: Database, *names: str) -> None:
    """Write principals with the role of a member."""
    rows = [{"name": name, "kind": "user", "role": "member", "created_ns": T0} for name in names]
    database.write(lambda connection: connection.execute(tables.principals.insert(), rows))


def add_node(database: Database, node_id: str = "node-1", *, name: str = "n1", owner: str = "alice") -> None:
    """Write a node, and the pool it is in when that is not there."""

    def write(connection: sa.Connection) -> None:
        if connection.execute(sa.select(tables.pools.c.name)).first() is None:
            connection.execute(tables.pools.insert(), {"name": "default", "kind": "on-demand", "created_ns": T0})
        row = {
            "id": node_id,
            "name": name,
            "machine": "m",
            "boot_id": "boot-1",
            "principal": owner,
            "pool": "default",
            "hello_json": "{}",
            "seen_ns": T0,
        }
        connection.execute(tables.nodes.insert(), row)

    database.write(write)


def new_run(run_id: str = "", *, owner: str = "alice", **spec: Any) -> NewRun:
    """Return a run as it was accepted."""
    return NewRun(
        id=run_id or new_run_id(),
        owner=owner,
        spec=RunSpec(remote=True, **spec),
        pool=spec.get("pool") or "",
        target=TARGET,
        request_sha256="0" * 64,
        context_sealed=b"sealed",
        call=b"call",
    )


def add_run(database: Database, *, at_ns: int = T0, **fields: Any) -> str:
    """Write a run that waits; return its identifier."""
    new = new_run(**fields)
    database.write(lambda connection: runs.insert(connection, new, at_ns=at_ns))
    return new.id


def stored(database: Database, run_id: str) -> StoredRun:
    """Return a run that is there."""
    run = database.read(lambda connection: runs.find(connection, run_id))
    assert run is not None
    return run


def place(database: Database, run_id: str, *, node_id: str = "node-1", world_size: int = 2, at_ns: int = T0 + S) -> int:
    """Place a run on a node; return the fence."""

    def write(connection: sa.Connection) -> int:
        run = runs.find(connection, run_id)
        assert run is not None
        new = NewAttempt(
            gpu_type="H100",
            world_size=world_size,
        )
        crew = NewCrew(
            node_id=node_id,
            node="n1",
            boot_id="boot-1",
            gpus=world_size,
            token_sha256=f"token of {run_id[-20:]}:{run.fence + 1}",
            grace_s=900.0,
        )
        return transitions.place(connection, run, new=new, on=[crew], at_ns=at_ns)

    return database.write(write)


def place_gang(database: Database, run_id: str, *gpus: int, at_ns: int = T0 + S) -> int:
    """Place a run on node-1, node-2 …, with so many devices on each; return the fence."""

    def write(connection: sa.Connection) -> int:
        run = runs.find(connection, run_id)
        assert run is not None
        new = NewAttempt(gpu_type="H100", world_size=sum(gpus), num_nodes=len(gpus))
        on = [
            NewCrew(
                number=number,
                node_id=f"node-{number + 1}",
                node=f"n{number + 1}",
                boot_id="boot-1",
                first_rank=sum(gpus[:number]),
                gpus=count,
                token_sha256=f"{run_id[-20:]}:{run.fence + 1}:{number}",
                grace_s=900.0,
            )
            for number, count in enumerate(gpus)
        ]
        return transitions.place(connection, run, new=new, on=on, at_ns=at_ns)

    return database.write(write)


def tell(database: Database, run_id: str, *happened: Event, at_ns: int = T0 + 2 * S, **note: Any) -> TransitionResult:
    """Let something happen to a run."""

    def write(connection: sa.Connection) -> TransitionResult:
        run = runs.find(connection, run_id)
        assert run is not None
        return transitions.apply(connection, run, *happened, note=Note(at_ns=at_ns, **note))

    return database.write(write)


def outcome(database: Database, run_id: str, fence: int = 1) -> CrewOutcome:
    """Return what an attempt ended with, as its run's owner is told."""
    return database.read(lambda connection: endings.outcome(connection, attempts.find(connection, run_id, fence)))


def rows(database: Database, table: sa.Table) -> Sequence[sa.RowMapping]:
    """Return all rows of a table, in the order of its key."""
    query = sa.select(table).order_by(*table.primary_key)
    return database.read(lambda connection: connection.execute(query).mappings().all())
