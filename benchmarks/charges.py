"""How long the ledger takes to charge a million facts on one core: in pure code, and from rows to rows."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from benchmarks.databases import new_postgresql
from benchmarks.report import Row, Timing
from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.model.billing.ledger import LedgerEntry, lines, post
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, UserCodeStarted
from serverless_gpu.server.billing.charging import Charging
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.lifecycle import transitions
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, rows, tell

_FACTS, _FACTS_QUICK = 1_000_000, 100_000
_BAR_PER_MINUTE = 1_000_000
_MIDNIGHT_NS = 20_000 * 86_400 * S
_ALIVE = 42  # with the other 8, 50 facts for an attempt: three quarters of an hour
_TARIFF = Tariff(gpu_micros_per_hour=2_990_000, core_micros_per_hour=40_000, memory_micros_per_hour=5_000)
_decode = msgspec.json.Decoder(Fact).decode


def stored_facts(run_id: str, number: int) -> list[bytes]:
    """Return the facts of one attempt as the database has them; one in sixteen of them goes on over midnight."""
    kinds = ("reserved", "hydrating", "starting", "exec", *(["alive"] * _ALIVE), "stopping", "exited", "freed")
    seconds = (0, 0, 2, 3, *(3 + 60 * (turn + 1) for turn in range(_ALIVE)), 2540, 2541, 2541)
    at_ns = number % 24 * 3_600 * S + 2_700 * S * (number // 24 % 2)
    return [
        msgspec.json.encode(
            Fact(
                attempt=f"{run_id}:1",
                seq=seq,
                kind=FactKind(kind),
                boot_id="4f3c9a52-6c1e-4b57-9a57-2f8d2f0f6f11",
                boottime_ns=10**15 + at_ns + second * S + 123_456_789,
                wall_ns=_MIDNIGHT_NS + at_ns + second * S + 123_456_789,
                gpus=tuple(f"GPU-8e6a2e5c-1b7d-4c5f-9f0a-{number:06}{device:06}" for device in range(8)),
                cpus=64,
                memory_bytes=512 << 30,
                grace_ms=30_000 if kind == "stopping" else None,
            )
        )
        for seq, (kind, second) in enumerate(zip(kinds, seconds, strict=True))
    ]


def ledger(quick: bool) -> Row:
    """Charge attempts of 8 GPUs, cores and memory, from the text of their facts to the ledger's entries."""
    count = _FACTS_QUICK if quick else _FACTS
    attempts = [stored_facts(f"r{number:06}", number) for number in range(count // len(stored_facts("r", 0)))]
    facts = sum(map(len, attempts))
    ours: list[float] = []
    reading: list[float] = []
    for _ in range(1 if quick else 3):
        ours.append(_took_ms(attempts, _charged))
        reading.append(_took_ms(attempts, _read))
    per_minute = facts * 60_000 / sorted(ours)[len(ours) // 2]
    return Row(
        name=f"the ledger's entries of {facts:,} facts, one core, without a database",
        ours=Timing("facts → entries", tuple(ours)),
        against=(Timing("only reading the facts' JSON", tuple(reading)),),
        bar=f"≥ {_BAR_PER_MINUTE:,} facts per minute",
        met=per_minute >= _BAR_PER_MINUTE,
        value=f"{per_minute:,.0f} per minute, {per_minute / _BAR_PER_MINUTE:.1f}× the bar",
    )


def _charged(texts: Sequence[bytes]) -> int:
    posted: tuple[LedgerEntry, ...] = ()
    return len(post(posted, lines(map(_decode, texts), _TARIFF), final=True))


def _read(texts: Sequence[bytes]) -> int:
    return len([_decode(text) for text in texts])


def _took_ms(attempts: Sequence[Sequence[bytes]], step: Callable[[Sequence[bytes]], int]) -> float:
    began = time.perf_counter()
    for texts in attempts:
        step(texts)
    return 1000 * (time.perf_counter() - began)


def in_database(url: str, quick: bool) -> Row:
    """Let the server's loop charge attempts that have ended, until none is due.

    Args:
        url: of a database without tables.
        quick: whether to charge a tenth of them.
    """
    kind = "PostgreSQL" if url.startswith("postgresql") else "SQLite"
    with (
        contextlib.closing(Database(url, clock=SystemClock())) as database,
        tempfile.TemporaryDirectory(prefix="sg-charges-") as home,
    ):
        database.migrate()
        charging = made_services(database, Path(home), clock=SystemClock()).make(Charging)
        facts = _fill(database, charging, (_FACTS_QUICK if quick else _FACTS) // len(stored_facts("r", 0)))
        ticks: list[float] = []
        cpu_s, began = time.process_time(), time.perf_counter()
        while True:
            tick = time.perf_counter()
            if charging.tick(0) != 0:
                break
            ticks.append(1000 * (time.perf_counter() - tick))
        ours_ms, cpu_ms = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - cpu_s)
        raw = _scan_ms(database)
    per_minute = facts * 60_000 / ours_ms
    return Row(
        name=f"the ledger charges {facts:,} facts of attempts that have ended, from rows to rows, {kind}",
        ours=Timing("the server's loop", (ours_ms,)),
        against=(Timing("reading the rows of the facts", (raw,)),),
        bar=f"≥ {_BAR_PER_MINUTE:,} facts per minute",
        met=per_minute >= _BAR_PER_MINUTE,
        value=f"{per_minute:,.0f} per minute, {per_minute / _BAR_PER_MINUTE:.1f}× the bar",
        also=(Timing("of it CPU of this process", (cpu_ms,)), Timing("one transaction", tuple(ticks))),
    )


def _fill(database: Database, charging: Charging, attempts: int) -> int:
    """Write attempts that have ended and were not charged; return how many facts they have."""
    add_people(database, "alice")
    add_node(database)
    first = add_run(database)
    place(database, first)
    tell(database, first, UserCodeStarted(), exec_ns=T0 + 2 * S)
    tell(database, first, AttemptEnded(Reason.COMPLETED, began=True), at_ns=T0 + 3 * S)
    database.write(lambda connection: transitions.settle(connection, (first, 1, 0), receipt="{}", at_ns=T0 + 4 * S))
    charging.tick(0)  # it has an account from now on, as one that a scheduler places
    run, attempt = dict(rows(database, tables.runs)[0]), dict(rows(database, tables.attempts)[0])
    attempt |= {"tariff_json": msgspec.json.encode(_TARIFF).decode(), "started_ns": None}
    crew = dict(rows(database, tables.crews)[0]) | {"started_ns": None, "uncharged": True}
    facts = 0
    for start in range(0, attempts, 500):
        new: list[list[dict[str, Any]]] = [[], [], [], []]
        for number in range(start, min(attempts, start + 500)):
            run_id = new_run_id()
            began_ns = _MIDNIGHT_NS + number % 24 * 3_600 * S
            new[0].append({**run, "id": run_id})
            new[1].append({**attempt, "run_id": run_id, "created_ns": began_ns})
            new[2].append({**crew, "run_id": run_id, "token_sha256": run_id})
            new[3] += [
                {"run_id": run_id, "fence": 1, "seq": seq, "fact_json": text.decode()}
                for seq, text in enumerate(stored_facts(run_id, number))
            ]
        facts += len(new[3])
        _insert(database, new)
    return facts


def _insert(database: Database, new: Sequence[Sequence[dict[str, Any]]]) -> None:
    def work(connection: sa.Connection) -> None:
        for table, values in zip((tables.runs, tables.attempts, tables.crews, tables.facts), new, strict=True):
            connection.execute(table.insert(), values)

    database.write(work)


def _scan_ms(database: Database) -> float:
    began = time.perf_counter()
    database.read(lambda connection: sum(len(text) for text in connection.scalars(sa.select(tables.facts.c.fact_json))))
    return 1000 * (time.perf_counter() - began)


def ledger_sqlite(quick: bool) -> Row:
    """Charge what lies in a file of SQLite."""
    with tempfile.TemporaryDirectory(prefix="sg-charges-") as directory:
        return in_database(f"sqlite:///{directory}/server.db", quick)


def ledger_postgresql(quick: bool) -> Row:
    """Charge what lies in PostgreSQL."""
    return in_database(new_postgresql(), quick)


ROWS: dict[str, Callable[[bool], Row]] = {
    "ledger": ledger,
    "ledger-sqlite": ledger_sqlite,
    "ledger-postgresql": ledger_postgresql,
}
