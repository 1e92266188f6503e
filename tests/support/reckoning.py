"""What the ledger ought to say, reckoned a second time from rows of the database, without a line of the product's own.

    facts ─▶ intervals ─▶ milliseconds × devices ─▶ × tariff, rounded up once     what an attempt ought to cost
    charges ─▶ in the order of their numbers ─▶ one standing row for each day     what it costs
                                                     └── the same? and what was taken back, taken back whole?

Asked of simulated clusters after each history, and of servers that were killed at each named place.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason
from serverless_gpu.server.db import tables

DAY_NS = 86_400_000_000_000
HOUR_MS = 3_600_000
MEASURED = ("environment_ms", "start_ms", "run_ms", "stop_ms", "gate_ms", "idle_ms")
AMOUNTS = ("queued_ms", *MEASURED, "gpu_ms", "billed_ms", "core_ms", "memory_mib_ms", "micros", "dbu_micros")
"""What adds up; the rest of a row says where and when."""
Row = Mapping[str, Any]
Read = Callable[[Callable[[sa.Connection], Any]], Any]


def wrongs(read: Read, *, is_over: bool = True) -> list[str]:
    """Return what is wrong with the ledger of a database.

    Args:
        read: `Database.read`.
        is_over: whether everything has ended and had time to be charged: then nothing may be due.
    """
    return sorted(read(lambda connection: list(_all(connection, is_over))))


def totals(read: Read, *dimensions: str) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Return GPU-milliseconds and micros by columns of `accounts` or `charges`, added up row by row."""

    def work(connection: sa.Connection) -> dict[tuple[Any, ...], tuple[int, int]]:
        found: dict[tuple[Any, ...], tuple[int, int]] = defaultdict(lambda: (0, 0))
        for row in _charges(connection):
            key = tuple(row[name] for name in dimensions)
            gpu_ms, micros = found[key]
            found[key] = gpu_ms + row["gpu_ms"], micros + (row["micros"] or 0)
        return dict(found)

    result: dict[tuple[Any, ...], tuple[int, int]] = read(work)
    return result


def _all(connection: sa.Connection, is_over: bool) -> Iterator[str]:
    entries: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in _charges(connection):
        entries[row["run_id"], row["fence"], row["crew"]].append(row)
    runs = {row["id"]: row for row in _rows(connection, tables.runs)}
    attempts = {(row["run_id"], row["fence"]): row for row in _rows(connection, tables.attempts)}
    facts: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in _rows(connection, tables.facts):
        facts[row["run_id"], row["fence"], row["crew"]].append(json.loads(row["fact_json"]))
    for some in facts.values():
        some.sort(key=lambda fact: int(fact["seq"]))
    for (run_id, fence, _), own in entries.items():
        yield from (f"I7 charges of {run_id}:{fence}: {wrong}" for wrong in check_books(own))
    for row in _rows(connection, tables.crews):
        run_id, fence, number = row["run_id"], row["fence"], row["crew"]
        # What it says of itself counts; who pays follows from how all of it ended.
        crew = {**attempts[run_id, fence], **row, "reason": attempts[run_id, fence]["reason"]}
        name, own = f"{run_id}:{fence}", entries.get((run_id, fence, number), [])
        told = facts.get((run_id, fence, number), [])
        yield from (f"I7 charges of {name}: {wrong}" for wrong in _account(runs[run_id], crew, own))
        if crew["settled_ns"] is None:
            continue  # it is charged when nothing more is awaited of it
        if crew["uncharged"]:
            if is_over:
                yield f"I7 charges of {name}: they are due, and all is over"
            continue
        yield from (f"I7 charges of {name}: {wrong}" for wrong in _amount(crew, told, own))
    yield from _sums(connection)


# --- the rows of one crew ---------------------------------------------------------------------------------------------


def check_books(own: Sequence[Row]) -> Iterator[str]:
    """One standing row for each day; what is taken back is taken back whole, from where it was."""
    own = sorted(own, key=lambda row: row["number"])
    if [row["number"] for row in own] != list(range(1, len(own) + 1)):
        yield f"they are numbered {[row['number'] for row in own]}"
    standing: dict[int, Row] = {}
    known: set[int] = set()
    for row in own:
        day, kind, at = row["day"], row["kind"], f"row {row['number']} of day {row['day']}"
        if kind == "reversal":
            before = standing.pop(day, None)
            if before is None:
                yield f"{at} takes back what is not there"
            elif any(row[name] != (None if before[name] is None else -before[name]) for name in AMOUNTS):
                yield f"{at} does not take back what row {before['number']} says"
            elif (row["account_id"], row["provisional"]) != (before["account_id"], before["provisional"]):
                yield f"{at} takes back row {before['number']}, and is of another account, or kind"
            continue
        if day in standing:
            yield f"{at} is beside row {standing[day]['number']}"
        if (kind == "original") == (day in known):
            yield f"{at} is {kind}, and the day had {'one' if day in known else 'none'} before"
        standing[day] = row
        known.add(day)
        yield from (f"{at} {wrong}" for wrong in check_line(row))


def check_line(row: Row) -> Iterator[str]:
    if any((row[name] or 0) < 0 for name in AMOUNTS):
        yield "is negative, and takes nothing back"
    if not row["start_ns"] // DAY_NS == row["day"] <= row["end_ns"] // DAY_NS <= row["day"] + 1:
        yield f"goes from {row['start_ns']} to {row['end_ns']}"
    if row["end_ns"] < row["start_ns"] or row["end_ns"] > (row["day"] + 1) * DAY_NS:
        yield f"ends at {row['end_ns']}"
    if row["gpu_ms"] > row["gpus"] * (row["end_ns"] - row["start_ns"] + 1_000_000) // 1_000_000:
        yield f"has {row['gpu_ms']} ms of {row['gpus']} devices in less time than that"
    if row["billed_ms"] > row["gpu_ms"]:
        yield f"bills {row['billed_ms']} of {row['gpu_ms']} ms"


def _account(run: Row, attempt: Row, own: Sequence[Row]) -> Iterator[str]:
    spec = json.loads(run["spec_json"])
    wanted = {
        "owner": run["owner"],
        "team": run["team"],
        "name": run["name"],
        "gpu_type": attempt["gpu_type"],
        "environment": run["snapshot"],
        "policy": spec.get("policy") or "",
    }
    for row in own:
        different = [name for name, value in wanted.items() if row[name] != value]
        if json.loads(row["tags_json"]) != spec.get("tags", {}):
            different.append("tags")
        if different:
            yield f"row {row['number']} has another {', '.join(different)} than its run"
    if len({row["account_id"] for row in own}) > 1:
        yield "they are of more than one account"


def _amount(attempt: Row, facts: Sequence[Row], own: Sequence[Row]) -> Iterator[str]:
    """What a crew that is settled used and costs, against its facts and its tariff.

    Nothing provisional stands once its node has said everything.
    """
    known = json.loads(attempt["receipt_json"] or "{}").get("facts")
    is_whole = not facts or facts[-1]["kind"] == "freed" or (known is not None and len(facts) >= known)
    for name in AMOUNTS if is_whole else ():
        left = sum(row[name] or 0 for row in own if row["provisional"])
        if left:
            yield f"it is settled, and {name} of its provisional rows adds up to {left}"
    summed = {name: sum(row[name] or 0 for row in own) for name in AMOUNTS}
    used_ms, counted_ms = used(facts)
    if summed["gpu_ms"] != used_ms:
        yield f"they say {summed['gpu_ms']} ms, and its facts {used_ms}"
    is_billed = attempt["reason"] is None or MEANINGS[Reason(attempt["reason"])].is_billed
    if summed["billed_ms"] != (counted_ms if is_billed else 0):
        yield f"it ended as {attempt['reason']}, and {summed['billed_ms']} of {counted_ms} ms are billed"
    tariff = json.loads(attempt["tariff_json"])
    gpu, core, memory = (tariff.get(f"{name}_micros_per_hour") for name in ("gpu", "core", "memory"))
    if gpu is None:
        if any(row["micros"] is not None for row in own):
            yield "it has no price, and costs something"
        return
    exact = (summed["billed_ms"] * gpu + summed["core_ms"] * (core or 0)) * 1024
    wanted = -(-(exact + summed["memory_mib_ms"] * (memory or 0)) // (HOUR_MS * 1024))
    if summed["micros"] != wanted:
        yield f"they cost {summed['micros']} micros, and {summed['billed_ms']} ms ought to cost {wanted}"


def used(facts: Sequence[Row]) -> tuple[int, int]:
    """Return the GPU-milliseconds that facts say were used, and those of them that count.

    After a stop of ours no more than its grace counts, which the fact about it says.
    """
    ordered = sorted({fact["seq"]: fact for fact in facts}.values(), key=lambda fact: int(fact["seq"]))
    use_ms = counted_ms = at = 0
    while at < len(ordered):
        start = ordered[at]
        at += 1
        if start["kind"] not in ("exec", "held"):
            continue
        begin_ns: int = start["boottime_ns"]
        seen = {"last": begin_ns}
        limit_ns: int | None = None
        while at < len(ordered) and "freed" not in seen and ordered[at]["kind"] != "held":
            fact = ordered[at]
            at += 1
            if fact["boot_id"] == start["boot_id"]:
                if fact["kind"] == "stopping" and "stopping" not in seen and fact.get("grace_ms") is not None:
                    limit_ns = fact["boottime_ns"] + fact["grace_ms"] * 1_000_000
                seen.setdefault(fact["kind"], fact["boottime_ns"])
                seen["last"] = fact["boottime_ns"]
        end_ns = seen.get("freed", seen.get("exited", seen["last"]))
        until_ns = end_ns if limit_ns is None else min(end_ns, limit_ns)
        gpus = len(set(start["gpus"]))
        use_ms += (end_ns - begin_ns) // 1_000_000 * gpus
        counted_ms += max(0, until_ns - begin_ns) // 1_000_000 * gpus
    return use_ms, counted_ms


# --- all of them ------------------------------------------------------------------------------------------------------


def _sums(connection: sa.Connection) -> Iterator[str]:
    """By whatever it is added up, it is the same."""
    rows = _charges(connection)
    whole = {name: sum(row[name] or 0 for row in rows) for name in AMOUNTS}
    columns = [getattr(tables.charges.c, name) for name in AMOUNTS]
    summed = connection.execute(sa.select(*(sa.func.coalesce(sa.func.sum(column), 0) for column in columns))).one()
    if list(map(int, summed)) != list(whole.values()):
        yield f"I7 ledger: with accounts it adds up to {whole}, without to {list(summed)}"


def _charges(connection: sa.Connection) -> list[Row]:
    query = sa.select(tables.charges, tables.accounts).join(tables.accounts).order_by(tables.charges.c.seq)
    return [dict(row._mapping) for row in connection.execute(query)]


def _rows(connection: sa.Connection, table: sa.Table) -> list[Row]:
    return [dict(row._mapping) for row in connection.execute(sa.select(table))]
