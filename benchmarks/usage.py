"""How long a report of use takes: a million charges of a month, of 2,000 accounts, on both databases.

The server's loop has added them up by account and day, as it does within a minute. The bad case has a tag of its own
for every run, so that there are as many accounts as charges: reports that ask for no tag are made of plain accounts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

from benchmarks.databases import held, new_postgresql
from benchmarks.report import Row, Timing
from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.billing.usage_report import DayRange
from serverless_gpu.server.billing.usage_rollup import fold
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import usage
from serverless_gpu.server.records.usage import ReportRequest

CHARGES, ACCOUNTS, QUICK = 1_000_000, 2_000, 50_000
_DAY, _DAYS = 20_770, 30
_DAY_NS = 86_400_000_000_000
_BAR_S = 2.0
_LIMIT = 1_000
_ORDINARY = (("user",), ("team", "user"), ("month", "team"), ("day", "pool"), ("tag:project",), ("run",))


def report(kind: str, quick: bool) -> Row:
    """Report the use of a month by each of the ways that people ask for."""
    count = QUICK if quick else CHARGES
    rounds = 1 if quick else 3
    ordinary, odd = _filled(kind, count, min(ACCOUNTS, count)), _filled(kind, count, count)
    timings = [_timed(ordinary, by, rounds) for by in _ORDINARY]
    slowest = max(timings, key=lambda timing: timing.median)
    bad = [_timed(odd, by, rounds, "a tag of its own for each run: ") for by in (("user",), ("tag:project",), ("run",))]
    floor = Timing("the database: one sum over all, nothing else", tuple(_floor_ms(ordinary) for _ in range(rounds)))
    return Row(
        name=f"usage report over {count:,} charges, {kind}",
        ours=Timing(f"the slowest, {slowest.label}", slowest.values),
        against=(floor,),
        bar=f"≤ {_BAR_S:.0f} s, where runs share accounts",
        met=slowest.median <= 1000 * _BAR_S,
        value=f"{slowest.median / 1000:.1f} s",
        also=(*timings, *bad),
    )


def _timed(database: Database, by: tuple[str, ...], rounds: int, prefix: str = "") -> Timing:
    wanted = ReportRequest(by=by, window=DayRange(_DAY, _DAY + _DAYS), limit=_LIMIT)
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        groups = database.read(lambda connection: usage.find(connection, wanted)).groups
        found.append(1000 * (time.perf_counter() - began))
        assert groups
    return Timing(f"{prefix}by {', '.join(by)}", tuple(found))


def _floor_ms(database: Database) -> float:
    query = sa.select(sa.func.sum(tables.charges.c.micros), sa.func.sum(tables.charges.c.gpu_ms))
    began = time.perf_counter()
    database.read(lambda connection: connection.execute(query).one())
    return 1000 * (time.perf_counter() - began)


@functools.cache
def _filled(kind: str, count: int, accounts: int) -> Database:
    if kind == "postgresql":
        url = new_postgresql()
    else:
        directory = held.enter_context(tempfile.TemporaryDirectory(prefix="sg-usage-"))
        url = f"sqlite:///{Path(directory) / 'server.db'}"
    database = held.enter_context(contextlib.closing(Database(url, clock=SystemClock())))
    database.migrate()
    # By the drivers: through the server's own rooms this takes a quarter of an hour.
    put = _put_postgresql if kind == "postgresql" else _put_sqlite
    put(
        url,
        {
            "accounts": _accounts(accounts),
            "account_tags": _tags(accounts),
            "charges": _charges(count, accounts),
            "utilisations": _seen(count, accounts),
        },
    )
    database.write(functools.partial(fold, limit=count))
    return database


def _put_sqlite(url: str, rows: dict[str, Iterator[dict[str, Any]]]) -> None:
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        for table, each in rows.items():
            names = [column.name for column in tables.metadata.tables[table].columns]
            marks = ", ".join(f":{name}" for name in names)
            connection.executemany(f"INSERT INTO {table} ({', '.join(names)}) VALUES ({marks})", each)


def _put_postgresql(url: str, rows: dict[str, Iterator[dict[str, Any]]]) -> None:
    with psycopg.connect(url) as connection:
        for table, each in rows.items():
            names = [column.name for column in tables.metadata.tables[table].columns]
            statement = f"COPY {table} ({', '.join(names)}) FROM STDIN".encode()
            with connection.cursor() as cursor, cursor.copy(statement) as copy:
                for row in each:
                    copy.write_row([row[name] for name in names])
            connection.commit()
            connection.execute(f"ANALYZE {table}".encode())


def _accounts(count: int) -> Iterator[dict[str, Any]]:
    """Yield plain accounts, then those with tags; with more than `ACCOUNTS`, each has a tag of its own."""
    for number in range(-ACCOUNTS, count):
        chance = random.Random(number % ACCOUNTS)
        project = f"p{number % 40}" if count <= ACCOUNTS else f"p{number}"
        yield {
            "id": 1 + ACCOUNTS + number,
            "sha256": f"{ACCOUNTS + number:064x}",
            "owner": f"user{chance.randrange(200)}",
            "team": f"team{chance.randrange(20)}",
            "pool": f"pool{chance.randrange(4)}",
            "reserved": False,
            "policy": "",
            "gpu_type": chance.choice(["H100", "A100-80", "L4"]),
            "name": f"train{chance.randrange(100)}",
            "workload": "function",
            "environment": "" if number < 0 else "e" * 64,
            "currency": "USD",
            "tags_json": "{}" if number < 0 else f'{{"project":"{project}","stage":"train"}}',
            "member_of_json": None,
            "plain_id": 1 + number % ACCOUNTS,
        }


def _tags(count: int) -> Iterator[dict[str, Any]]:
    for row in _accounts(count):
        for key, value in json.loads(row["tags_json"]).items():
            yield {"key": key, "account_id": row["id"], "value": value}


def _charges(count: int, accounts: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(2)
    for number in range(count):
        day = _DAY + number * _DAYS // count
        used_ms, gpus = chance.randrange(1000, 4_000_000), chance.choice([1, 1, 2, 4, 8])
        gpu_ms = used_ms * gpus
        yield {
            "seq": number + 1,
            "run_id": f"{number:026d}",
            "fence": 1,
            "number": 1,
            "kind": "original",
            "provisional": False,
            "crew": 0,
            "account_id": 1 + ACCOUNTS + (number if accounts == count else chance.randrange(accounts)),
            "posted_ns": (day + 1) * _DAY_NS,
            "day": day,
            "start_ns": day * _DAY_NS,
            "end_ns": day * _DAY_NS + used_ms * 1_000_000,
            "gpus": gpus,
            "queued_ms": chance.randrange(100_000),
            "environment_ms": gpus * 300,
            "start_ms": gpus * 200,
            "run_ms": gpu_ms,
            "stop_ms": gpus * 90,
            "gate_ms": gpus * 40,
            "idle_ms": 0,
            "gpu_ms": gpu_ms,
            "billed_ms": gpu_ms,
            "core_ms": 0,
            "memory_mib_ms": 0,
            "micros": gpu_ms * 3,
            "dbu_micros": 0,
        }


def _seen(count: int, accounts: int) -> Iterator[dict[str, Any]]:
    for row in _charges(count, accounts):
        yield {
            **{name: row[name] for name in ("run_id", "fence", "crew", "account_id", "day", "gpus", "gpu_ms")},
            "plain_id": 1 + (row["account_id"] - 1) % ACCOUNTS,
            "observed_ms": row["gpu_ms"],
            "busy_ms": row["gpu_ms"] // 2,
            "peak_memory_bytes": 1 << 30,
        }


ROWS: dict[str, Callable[[bool], Row]] = {
    f"usage-{kind}": functools.partial(report, kind) for kind in ("sqlite", "postgresql")
}
