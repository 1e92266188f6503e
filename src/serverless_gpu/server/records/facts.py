"""Append-only repository of facts, which are the events on an attempt's devices.

A node numbers an attempt's facts and repeats each fact until the server acknowledges it. The server ignores a repeated
fact. If a repeated fact has different contents, the server logs an error and keeps the first fact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import Fact
from serverless_gpu.server.db.database import in_chunks
from serverless_gpu.server.db.tables import facts
from serverless_gpu.server.records.crews import CrewId

_ENDS = 50  # Number of facts to read at each end of an attempt, larger than the number without heartbeats.
_WHOSE = (facts.c.run_id, facts.c.fence, facts.c.crew)
_decode = msgspec.json.Decoder(Fact).decode


def add(connection: sa.Connection, crew: CrewId, new: Sequence[Fact]) -> list[int]:
    """Insert facts that are not stored yet.

    Returns:
        The numbers of the facts that contradict stored facts. The function did not insert contradicting facts.
    """
    run_id, fence, number = crew
    if any(fact.attempt != f"{run_id}:{fence}" for fact in new):
        raise InvalidValue(f"the report of {run_id}:{fence} contains a fact of another attempt")
    numbers = sorted({fact.seq for fact in new})
    query = sa.select(facts.c.seq, facts.c.fact_json).where(_of(crew))
    if numbers:
        query = query.where(facts.c.seq.between(numbers[0], numbers[-1]))
    known: dict[int, str] = {seq: text for seq, text in connection.execute(query)}
    rows, contradicting = [], []
    for fact in new:
        text = msgspec.json.encode(fact).decode()
        if fact.seq not in known:
            known[fact.seq] = text
            rows.append({"run_id": run_id, "fence": fence, "crew": number, "seq": fact.seq, "fact_json": text})
        elif _decode(known[fact.seq]) != fact:
            contradicting.append(fact.seq)
    if rows:
        connection.execute(facts.insert(), rows)
        faults.reach("in_ledger_batch")
    return contradicting


def of_crew(connection: sa.Connection, crew: CrewId) -> list[Fact]:
    """Return the facts of an attempt on one node, in order."""
    query = sa.select(facts.c.fact_json).where(_of(crew)).order_by(facts.c.seq)
    return [_decode(text) for text in connection.execute(query).scalars()]


def of_crews(connection: sa.Connection, ids: Collection[CrewId]) -> dict[CrewId, list[Fact]]:
    """Return the facts of each attempt on each node, in order. An attempt may have no facts."""
    found: dict[CrewId, list[Fact]] = {crew: [] for crew in ids}
    query = sa.select(*_WHOSE, facts.c.fact_json).order_by(*_WHOSE, facts.c.seq)
    for some in _are(ids):
        for run_id, fence, number, text in connection.execute(query.where(some)):
            found[run_id, fence, number].append(_decode(text))
    return found


def ends_of_crews(connection: sa.Connection, ids: Collection[CrewId]) -> dict[CrewId, list[Fact]]:
    """Return the first and last facts of each attempt on each node, in order.

    The omitted facts are heartbeats, which only repeat information that the last heartbeat also contains.
    """
    found: dict[CrewId, list[Fact]] = {crew: [] for crew in ids}
    for some in _are(ids):
        last = sa.select(*_WHOSE, sa.func.max(facts.c.seq).label("last")).where(some).group_by(*_WHOSE).subquery()
        same = sa.and_(*(last.c[column.name] == column for column in _WHOSE))
        ends = sa.or_(facts.c.seq <= _ENDS, facts.c.seq > last.c.last - _ENDS)
        query = sa.select(*_WHOSE, facts.c.fact_json).join(last, same).where(ends).order_by(*_WHOSE, facts.c.seq)
        for run_id, fence, number, text in connection.execute(query):
            found[run_id, fence, number].append(_decode(text))
    return found


def counts(connection: sa.Connection, ids: Collection[CrewId]) -> dict[CrewId, int]:
    """Return the number of facts of each attempt on each node, without attempts that have no facts."""
    query = sa.select(*_WHOSE, sa.func.count()).group_by(*_WHOSE)
    rows = (row for some in _are(ids) for row in connection.execute(query.where(some)))
    return {(run_id, fence, number): count for run_id, fence, number, count in rows}


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove the facts of all attempts of a run."""
    connection.execute(facts.delete().where(facts.c.run_id == run_id))


def _of(crew: CrewId) -> sa.ColumnElement[bool]:
    return sa.and_(*(column == value for column, value in zip(_WHOSE, crew, strict=True)))


def _are(ids: Collection[CrewId]) -> Iterator[sa.ColumnElement[bool]]:
    for some in in_chunks(sorted(ids)):
        # Filter by run too, because SQLite uses no index for triples and would read all facts.
        runs = facts.c.run_id.in_(sorted({run_id for run_id, _, _ in some}))
        yield sa.and_(runs, sa.tuple_(*_WHOSE).in_(some))
