"""Loads the database rows of runs for invariant checks, and defines violations.

    load(connection, after=…)     a page of runs in the order of their identifiers, with all their rows
    of_runs(connection, ids)      runs with the given identifiers

Loading a page needs a few indexed queries on one database snapshot. `load` omits very large data, such as attempts with
many thousand facts. `RecordedRuns.skipped` lists the omitted data. A `Crew` contains the ranks of an attempt on one
node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import sqlalchemy as sa

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import Fact, Reason, State
from serverless_gpu.server.db.tables import audit, events, facts, files, orders, runs
from serverless_gpu.server.records import attempts as attempt_rows
from serverless_gpu.server.records import charges
from serverless_gpu.server.records import crews as crew_rows
from serverless_gpu.server.records import runs as run_rows
from serverless_gpu.server.records.attempts import StoredAttempt
from serverless_gpu.server.records.charges import PostedEntry
from serverless_gpu.server.records.crews import CrewId, Gang
from serverless_gpu.server.records.events import StoredEvent
from serverless_gpu.server.records.runs import StoredRun

PAGE_RUNS = 200
EVENTS_MAX = 1_000
FACTS_MAX = 20_000
PARTS_MAX = 2_000
"""Maximum number of events per run, facts per page and result parts per page."""
OfCrew = tuple[int, int]
"""Fence of an attempt, and node number within the attempt."""
_decode_fact = msgspec.json.Decoder(Fact).decode
_decode_parts = msgspec.json.Decoder(tuple[str, ...]).decode


class SeenReceipt(msgspec.Struct, frozen=True):
    """Receipt fields that the invariants compare (see `model.receipt.Receipt`)."""

    gpu_ms: int | None = None
    facts: int | None = None
    reason: str | None = None
    micros: int | None = None
    bill: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class RecordedOrder(msgspec.Struct, frozen=True, kw_only=True):
    """An open or acknowledged order to a node."""

    seq: int
    node_id: str
    fence: int
    crew: int
    kind: str


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Stored results of an attempt."""

    count: int = 0  # Number of results.
    cut: int = 0  # Number of incomplete results.
    parts: tuple[str, ...] = ()  # Digests of result parts, at most `PARTS_MAX`.


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with all its database rows."""

    run: StoredRun
    attempts: tuple[StoredAttempt, ...] = ()  # Attempts of the run, sorted by fence.
    events: tuple[StoredEvent, ...] = ()  # Sorted events; empty for a run with too many events.
    orders: tuple[RecordedOrder, ...] = ()
    facts: Mapping[OfCrew, tuple[Fact, ...]] = {}  # Sorted facts by fence and node number.
    unread: frozenset[OfCrew] = frozenset()  # Fences and node numbers with too many facts to load.
    receipts: Mapping[OfCrew, SeenReceipt] = {}  # Receipts by fence and node number.
    charges: Mapping[OfCrew, tuple[PostedEntry, ...]] = {}
    """Sorted ledger entries by fence and node number."""
    results: Mapping[int, Results] = {}  # Results of each attempt, by fence.
    actions: Mapping[str, int] = {}  # Number of audit entries about the run, by action.


class RecordedRuns(msgspec.Struct, frozen=True, kw_only=True):
    """A page of runs from one database snapshot."""

    runs: tuple[RecordedRun, ...] = ()  # Runs, sorted by run identifier.
    absent: Mapping[str, Mapping[str, int]] = {}
    """Number of audit entries by missing run and action."""
    details: tuple[str, ...] = ()  # Details of the audit entries about these runs.
    following: str = ""  # Start of the next page; "" after the last page.
    skipped: tuple[str, ...] = ()  # Descriptions of omitted data.


def load(connection: sa.Connection, *, after: str = "", limit: int = PAGE_RUNS) -> RecordedRuns:
    """Return the next page of runs."""
    query = sa.select(runs.c.id).where(runs.c.id > after).order_by(runs.c.id).limit(limit)
    ids = list(connection.scalars(query))
    page = of_runs(connection, ids)
    return msgspec.structs.replace(page, following=ids[-1] if len(ids) == limit else "")


def of_runs(connection: sa.Connection, run_ids: Sequence[str]) -> RecordedRuns:
    """Return the runs with the given identifiers."""
    found = {run.id: run for run in run_rows.find_many(connection, run_ids)}
    ids = sorted(found)
    skipped = [f"events of run {run_id}" for run_id in ids if found[run_id].events > EVENTS_MAX]
    told = _events(connection, [run_id for run_id in ids if found[run_id].events <= EVENTS_MAX])
    tries, receipts = _attempts(connection, ids)
    known, left_out = _facts(connection, ids)
    charged = _charges(connection, ids)
    placed, results = _orders(connection, ids), _results(connection, ids)
    actions, details = _audit(connection, run_ids)
    recorded = tuple(
        RecordedRun(
            run=found[run_id],
            attempts=tuple(tries.get(run_id, ())),
            events=tuple(told.get(run_id, ())),
            orders=tuple(placed.get(run_id, ())),
            facts=_of_crews(run_id, known),
            unread=frozenset((fence, number) for other, fence, number in left_out if other == run_id),
            receipts=_of_crews(run_id, receipts),
            charges=_of_crews(run_id, charged),
            results={fence: result for (other, fence), result in results.items() if other == run_id},
            actions=actions.get(run_id, {}),
        )
        for run_id in ids
    )
    absent: dict[str, Mapping[str, int]] = {
        run_id: actions.get(run_id, {}) for run_id in run_ids if run_id not in found
    }
    skipped += [f"facts of attempt {run_id}:{fence}" for run_id, fence, _ in left_out]
    return RecordedRuns(runs=recorded, absent=absent, details=details, skipped=tuple(skipped))


def _of_crews(run_id: str, values: Mapping[CrewId, Any]) -> dict[OfCrew, Any]:
    return {(fence, number): value for (other, fence, number), value in values.items() if other == run_id}


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = {}
    for run_id, value in pairs:
        grouped.setdefault(run_id, []).append(value)
    return grouped


def _events(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[StoredEvent]]:
    query = sa.select(events).where(events.c.run_id.in_(ids)).order_by(events.c.run_id, events.c.seq)
    rows = (row._mapping for row in connection.execute(query))
    return _grouped(
        (
            row["run_id"],
            StoredEvent(
                **(
                    dict(row)
                    | {"state": State(row["state"]), "reason": Reason(row["reason"]) if row["reason"] else None}
                )
            ),
        )
        for row in rows
    )


def _attempts(
    connection: sa.Connection, ids: Sequence[str]
) -> tuple[dict[str, list[StoredAttempt]], dict[CrewId, SeenReceipt]]:
    tries = attempt_rows.of_runs(connection, ids)
    found = [tries[gang] for gang in sorted(tries)]
    receipts = crew_rows.receipts(connection, {crew.id for attempt in found for crew in attempt.crews})
    seen = {crew: _seen(text) for crew, text in receipts.items()}
    return _grouped((attempt.run_id, attempt) for attempt in found), seen


def _charges(connection: sa.Connection, ids: Sequence[str]) -> dict[CrewId, tuple[PostedEntry, ...]]:
    found: dict[CrewId, tuple[PostedEntry, ...]] = {}
    for one in charges.of_runs(connection, ids):
        crew = one.run_id, one.fence, one.crew
        found[crew] = (*found.get(crew, ()), one)
    return found


def _seen(text: str) -> SeenReceipt:
    try:
        return from_json(text, SeenReceipt)
    # This server version cannot decode the receipt.
    except (msgspec.DecodeError, RecursionError):
        return SeenReceipt()


def _orders(connection: sa.Connection, ids: Sequence[str]) -> dict[str, list[RecordedOrder]]:
    columns = [orders.c[name] for name in RecordedOrder.__struct_fields__]
    query = sa.select(orders.c.run_id, *columns).where(orders.c.run_id.in_(ids)).order_by(orders.c.seq)
    return _grouped(
        (row[0], RecordedOrder(seq=row[1], node_id=row[2], fence=row[3], crew=row[4], kind=row[5]))
        for row in connection.execute(query)
    )


def _facts(connection: sa.Connection, ids: Sequence[str]) -> tuple[dict[CrewId, tuple[Fact, ...]], list[CrewId]]:
    whose = (facts.c.run_id, facts.c.fence, facts.c.crew)
    counted = sa.select(*whose, sa.func.count()).where(facts.c.run_id.in_(ids))
    left = FACTS_MAX
    wanted: list[CrewId] = []
    skipped: list[CrewId] = []
    for run_id, fence, number, count in connection.execute(counted.group_by(*whose)):
        if count <= left:
            left -= count
            wanted.append((run_id, fence, number))
        else:
            skipped.append((run_id, fence, number))
    found: dict[CrewId, tuple[Fact, ...]] = {}
    query = sa.select(facts.c.fact_json).order_by(facts.c.seq)
    for crew in wanted:
        own = query.where(*(column == value for column, value in zip(whose, crew, strict=True)))
        found[crew] = tuple(_decode_fact(text) for text in connection.scalars(own))
    return found, skipped


def _results(connection: sa.Connection, ids: Sequence[str]) -> dict[Gang, Results]:
    there = sa.and_(files.c.run_id.in_(ids), files.c.name.startswith("results/", autoescape=True))
    is_cut = sa.case((sa.and_(files.c.inline.is_not(None), sa.func.length(files.c.inline) != files.c.size), 1), else_=0)
    counted = sa.select(files.c.run_id, files.c.fence, sa.func.count(), sa.func.sum(is_cut)).where(there)
    found = {
        (run_id, fence): Results(count=count, cut=int(cut or 0))
        for run_id, fence, count, cut in connection.execute(counted.group_by(files.c.run_id, files.c.fence))
    }
    parts = sa.select(files.c.run_id, files.c.fence, files.c.parts_json).where(there, files.c.parts_json.is_not(None))
    named: dict[Gang, list[str]] = {}
    for run_id, fence, text in connection.execute(parts.limit(PARTS_MAX)):
        named.setdefault((run_id, fence), []).extend(_decode_parts(text))
    for gang, digests in named.items():
        found[gang] = msgspec.structs.replace(found[gang], parts=tuple(digests[:PARTS_MAX]))
    return found


def _audit(connection: sa.Connection, ids: Sequence[str]) -> tuple[dict[str, Counter[str]], tuple[str, ...]]:
    query = sa.select(audit.c.subject, audit.c.action, audit.c.detail_json).where(audit.c.subject.in_(ids))
    actions: dict[str, Counter[str]] = {}
    details: list[str] = []
    for subject, action, detail in connection.execute(query):
        actions.setdefault(subject, Counter())[action] += 1
        details.append(detail)
    return actions, tuple(details)


def pages(
    read: Callable[[Callable[[sa.Connection], RecordedRuns]], RecordedRuns], *, limit: int = PAGE_RUNS
) -> Iterable[RecordedRuns]:
    """Yield all runs in pages from separate database snapshots."""
    after = ""
    while True:
        page = read(partial(load, after=after, limit=limit))
        yield page
        after = page.following
        if not after:
            return


class Violation(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A violated invariant."""

    invariant: str  # ``"I3"``
    subject: str  # violating object: ``"run <id>"``, ``"device <uuid>"``
    sentence: str  # description of the violation

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.sentence}"


def violation_of(recorded: RecordedRun, invariant: str, sentence: str) -> Violation:
    """Return the violation of an invariant by a run."""
    return Violation(invariant=invariant, subject=f"run {recorded.run.id}", sentence=sentence)
