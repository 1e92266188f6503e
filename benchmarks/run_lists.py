"""How long one page of the list of runs takes with 100,000 runs, by filter and order, on both databases.

The queries are those of `GET /runs`, and so of the page of runs. The filters include the bad cases, in which nothing
matches, so that a query reads a whole index.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

from benchmarks.databases import held, new_postgresql
from benchmarks.report import Row, Timing
from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import run_list
from serverless_gpu.server.records.run_list import RunFilter
from tests.support.web.filled import Filling, fill

RUNS, QUICK = 100_000, 5_000
_BAR_MS = 100.0
_LIMIT = 50
_FILTERS = {
    "none": RunFilter(),
    "of a member": RunFilter(seen_by="ada", teams=("vision", "robots")),
    "state": RunFilter(states=(State.FAILED,)),
    "no such state": RunFilter(states=(State.BUDGET_STOPPED,)),
    "owner": RunFilter(owner="ben"),
    "type": RunFilter(gpu_types=("L4",)),
    "no such type": RunFilter(gpu_types=("B200",)),
    "tags": RunFilter(tags={"project": "borealis", "stage": "dev"}),
    "name": RunFilter(name="eval-suite"),
    "text": RunFilter(text="not a number"),
    "no such text": RunFilter(text="zebra"),
    "no such text of a member": RunFilter(text="zebra", seen_by="ada", teams=("vision",)),
    "several": RunFilter(states=(State.FAILED,), team="vision", gpu_types=("L4",), tags={"stage": "prod"}, text="lr"),
}


def report(kind: str, quick: bool) -> Row:
    """Read a page with each filter in each order."""
    count = QUICK if quick else RUNS
    database = _filled(kind, count)
    timings = [_timed(database, name, 2 if quick else 10) for name in _FILTERS]
    values = sorted(value for timing in timings for value in timing.values)
    p95 = values[int(0.95 * (len(values) - 1))]
    return Row(
        name=f"page of {_LIMIT} among {count:,} runs, {kind}",
        ours=Timing("all filters and orders", tuple(values)),
        against=(),
        bar=f"p95 ≤ {_BAR_MS:.0f} ms",
        met=p95 <= _BAR_MS,
        value=f"p95 {p95:.0f} ms, median {statistics.median(values):.0f} ms",
        also=tuple(timings),
    )


def _timed(database: Database, name: str, rounds: int) -> Timing:
    found = []
    for sort in run_list.SORTS:
        read = functools.partial(run_list.page, wished=_FILTERS[name], limit=_LIMIT, sort=sort)
        for _ in range(rounds):
            began = time.perf_counter()
            database.read(read)
            found.append(1000 * (time.perf_counter() - began))
    return Timing(name, tuple(found))


@functools.cache
def _filled(kind: str, count: int) -> Database:
    if kind == "postgresql":
        url = new_postgresql()
    else:
        directory = held.enter_context(tempfile.TemporaryDirectory(prefix="sg-lists-"))
        url = f"sqlite:///{Path(directory) / 'server.db'}"
    database = held.enter_context(contextlib.closing(Database(url, clock=SystemClock())))
    database.migrate()
    fill(database, Filling(runs=count, nodes=125, active=900, queued=300, days=90))
    if kind == "postgresql":
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("VACUUM ANALYZE")
    return database


ROWS: dict[str, Callable[[bool], Row]] = {
    f"run-lists-{kind}": functools.partial(report, kind) for kind in ("sqlite", "postgresql")
}
