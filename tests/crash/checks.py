"""What must be so whatever was killed, read from the database and the files of a server: rows of §7's invariants."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.attempt import TERMINAL, State
from serverless_gpu.model.ledger import Fact, FactKind, Receipt, charge
from serverless_gpu.server import tables
from serverless_gpu.server.database import Database

Rows = list[sa.RowMapping]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The tables, read in one moment."""

    runs: Rows
    attempts: Rows
    events: Rows
    facts: Rows
    files: Rows
    orders: Rows
    audit: Rows


def read(url: str) -> Seen:
    """Return what a database holds."""
    database = Database(url, clock=SystemClock())
    try:
        return database.read(
            lambda connection: Seen(
                **{
                    name: list(connection.execute(sa.select(tables.metadata.tables[name])).mappings())
                    for name in Seen.__struct_fields__
                }
            )
        )
    finally:
        database.close()


def violations(seen: Seen, acknowledged: set[str]) -> list[str]:
    """Return what is not as it must be.

    Args:
        seen: the tables.
        acknowledged: runs whose submission was answered.
    """
    found = [f"I1: run {run_id} was acknowledged and is gone" for run_id in acknowledged - {r["id"] for r in seen.runs}]
    found += [*_of_events(seen), *_of_intervals(seen), *_of_results(seen), *_of_charges(seen)]
    created = Counter(row["subject"] for row in seen.audit if row["action"] == "run.create")
    found += [f"I8: run {run['id']} has {created[run['id']]} rows that say it was made" for run in seen.runs
              if created[run["id"]] != 1]  # fmt: skip
    starts = Counter((row["run_id"], row["fence"]) for row in seen.orders if row["kind"] == "start")
    found += [f"attempt {gang} has {count} orders to start" for gang, count in starts.items() if count != 1]
    return found


def _of_events(seen: Seen) -> Iterator[str]:
    for run in seen.runs:
        events = sorted((row for row in seen.events if row["run_id"] == run["id"]), key=lambda row: int(row["seq"]))
        if [row["seq"] for row in events] != list(range(1, run["events"] + 1)):
            yield f"I5: the events of run {run['id']} have gaps, or there are more than it counts"
        ends = [row["seq"] for row in events if State(row["state"]) in TERMINAL]
        if ends != ([run["events"]] if State(run["state"]) in TERMINAL else []):
            yield f"I2: run {run['id']} is {run['state']}, and it ended at events {ends} of {run['events']}"


def _of_intervals(seen: Seen) -> Iterator[str]:
    """No device is held by two attempts at once; no two attempts of a run execute at once."""
    held: dict[str, list[tuple[int, int, str]]] = {}
    for gang, facts in _facts(seen).items():
        began = next((fact for fact in facts if fact.kind is FactKind.RESERVED), None)
        if began is not None:
            end_ns = max(fact.boottime_ns for fact in facts)
            for thing in (*began.gpus, f"run {gang[0]}"):
                held.setdefault(thing, []).append((began.boottime_ns, end_ns, f"{gang[0]}:{gang[1]}"))
    for thing, spans in held.items():
        spans.sort()
        for (_, end_ns, one), (start_ns, _, other) in itertools.pairwise(spans):
            if start_ns < end_ns:
                yield f"I3, I4: {thing} is held by {one} and by {other} at once"


def _of_results(seen: Seen) -> Iterator[str]:
    there = Counter((row["run_id"], row["fence"]) for row in seen.files if row["name"].startswith("results/"))
    ranks = {(row["run_id"], row["fence"]): row["world_size"] for row in seen.attempts}
    for run in seen.runs:
        gang = (run["id"], run["fence"])
        if run["state"] == State.SUCCEEDED and there[gang] != ranks[gang]:
            yield f"I6: run {run['id']} has succeeded, with {there[gang]} of {ranks[gang]} results"


def _of_charges(seen: Seen) -> Iterator[str]:
    """What is charged is what the facts say, in any order and with any repetition."""
    facts = _facts(seen)
    for row in seen.attempts:
        if row["receipt_json"] is None:
            continue
        receipt = msgspec.json.decode(row["receipt_json"], type=Receipt)
        known = facts.get((row["run_id"], row["fence"]), [])
        for told in (known, [*reversed(known), *known]):
            gpu_ms = charge(told, gpu_type=receipt.gpu_type, price=None).gpu_ms
            if gpu_ms != receipt.gpu_ms:
                yield f"I7: {row['run_id']} is charged {receipt.gpu_ms} ms, and its facts say {gpu_ms} ms"


def _facts(seen: Seen) -> dict[tuple[str, int], list[Fact]]:
    found: dict[tuple[str, int], list[Fact]] = {}
    for row in sorted(seen.facts, key=lambda row: int(row["seq"])):
        fact = msgspec.json.decode(row["fact_json"], type=Fact)
        found.setdefault((row["run_id"], row["fence"]), []).append(fact)
    return found
