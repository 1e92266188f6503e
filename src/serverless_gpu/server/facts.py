"""Facts: the query room of what happened on the devices of attempts, only ever added to.

A fact has a number within its attempt and comes until it is acknowledged. One that is there is not written again; one
that is there and says something else is a contradiction, and the first one stays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.facts import Fact
from serverless_gpu.server.attempts import Gang
from serverless_gpu.server.portions import portions
from serverless_gpu.server.tables import facts

_ENDS = 50  # of an attempt on a server: what is not a sign of life is less, at either end
_decode = msgspec.json.Decoder(Fact).decode


def add(connection: sa.Connection, run_id: str, fence: int, new: Sequence[Fact]) -> list[int]:
    """Write the facts that are not there yet.

    Args:
        new: facts of this attempt, in any order, each as often as it was sent.

    Returns:
        The numbers of those that contradict what is there, which were not written.

    Raises:
        InvalidValue: a fact is about another attempt.
    """
    if any(fact.attempt != f"{run_id}:{fence}" for fact in new):
        raise InvalidValue(f"a fact came with the report of {run_id}:{fence} that is about another attempt")
    numbers = sorted({fact.seq for fact in new})
    query = sa.select(facts.c.seq, facts.c.fact_json).where(_of(run_id, fence))
    if numbers:
        query = query.where(facts.c.seq.between(numbers[0], numbers[-1]))
    known: dict[int, str] = {seq: text for seq, text in connection.execute(query)}
    rows, contradicting = [], []
    for fact in new:
        text = msgspec.json.encode(fact).decode()
        if fact.seq not in known:
            known[fact.seq] = text
            rows.append({"run_id": run_id, "fence": fence, "seq": fact.seq, "fact_json": text})
        elif _decode(known[fact.seq]) != fact:
            contradicting.append(fact.seq)
    if rows:
        connection.execute(facts.insert(), rows)
        faults.reach("in_ledger_batch")
    return contradicting


def of_attempt(connection: sa.Connection, run_id: str, fence: int) -> list[Fact]:
    """Return the facts of an attempt, in order."""
    query = sa.select(facts.c.fact_json).where(_of(run_id, fence)).order_by(facts.c.seq)
    return [_decode(text) for text in connection.execute(query).scalars()]


def of_attempts(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, list[Fact]]:
    """Return the facts of attempts, each in order; those without any are there, too."""
    found: dict[Gang, list[Fact]] = {gang: [] for gang in gangs}
    query = sa.select(facts.c.run_id, facts.c.fence, facts.c.fact_json)
    for some in _are(gangs):
        rows = connection.execute(query.where(some).order_by(facts.c.run_id, facts.c.fence, facts.c.seq))
        for run_id, fence, text in rows:
            found[run_id, fence].append(_decode(text))
    return found


def ends_of_attempts(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, list[Fact]]:
    """Return the first and the last facts of attempts, each in order; those without any are there, too.

    Between them are signs of life, one a minute, that say no more than the last of them.
    """
    found: dict[Gang, list[Fact]] = {gang: [] for gang in gangs}
    of = (facts.c.run_id, facts.c.fence)
    for some in _are(gangs):
        last = sa.select(*of, sa.func.max(facts.c.seq).label("last")).where(some).group_by(*of).subquery()
        same = sa.and_(last.c.run_id == facts.c.run_id, last.c.fence == facts.c.fence)
        ends = sa.or_(facts.c.seq <= _ENDS, facts.c.seq > last.c.last - _ENDS)
        query = sa.select(*of, facts.c.fact_json).join(last, same).where(ends).order_by(*of, facts.c.seq)
        for run_id, fence, text in connection.execute(query):
            found[run_id, fence].append(_decode(text))
    return found


def counts(connection: sa.Connection, gangs: Collection[Gang]) -> dict[Gang, int]:
    """Return how many facts there are of attempts; those without any are left out."""
    query = sa.select(facts.c.run_id, facts.c.fence, sa.func.count()).group_by(facts.c.run_id, facts.c.fence)
    rows = (row for some in _are(gangs) for row in connection.execute(query.where(some)))
    return {(run_id, fence): number for run_id, fence, number in rows}


def remove(connection: sa.Connection, run_id: str) -> None:
    """Remove the facts of all attempts of a run."""
    connection.execute(facts.delete().where(facts.c.run_id == run_id))


def _of(run_id: str, fence: int) -> sa.ColumnElement[bool]:
    return sa.and_(facts.c.run_id == run_id, facts.c.fence == fence)


def _are(gangs: Collection[Gang]) -> Iterator[sa.ColumnElement[bool]]:
    for some in portions(sorted(gangs)):
        # The runs beside the pairs: SQLite looks pairs up in no index, and would read all facts there are.
        runs = facts.c.run_id.in_(sorted({run_id for run_id, _ in some}))
        yield sa.and_(runs, sa.tuple_(facts.c.run_id, facts.c.fence).in_(some))
