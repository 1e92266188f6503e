"""The ledger against a second reckoning that knows none of its code: any facts, any prices, any way to post them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from serverless_gpu.model.billing.ledger import LedgerEntry, LedgerLine, lines, post
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from tests.support import reckoning

MS = 1_000_000
MIDNIGHT_NS = 20_500 * reckoning.DAY_NS
KINDS = [*FactKind, FactKind.ALIVE, FactKind.ALIVE, FactKind.EXEC, FactKind.FREED]
LATER = (FactKind.ALIVE, FactKind.STOPPING, FactKind.EXITED, FactKind.FREED)
PRICES = st.none() | st.integers(0, 10**13)
TARIFFS = st.builds(Tariff, gpu_micros_per_hour=PRICES, core_micros_per_hour=PRICES, memory_micros_per_hour=PRICES)


@st.composite
def histories(draw: st.DrawFn) -> list[Fact]:
    """Return what a node could write about one attempt, around midnight: in order, perhaps over a reboot."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    boottime_ns, boot, facts = rng.randrange(10**15), 0, list[Fact]()
    wall_ns = MIDNIGHT_NS - rng.choice([10, 10**5, 10**8]) * MS
    for seq in range(draw(st.integers(0, 14))):
        passed_ns = rng.choice([0, rng.randrange(MS), rng.randrange(10**4) * MS, rng.randrange(2 * 10**8) * MS])
        boottime_ns, wall_ns = boottime_ns + passed_ns, wall_ns + passed_ns
        if rng.random() < 0.03:
            boot, boottime_ns = boot + 1, rng.randrange(10**12)
        may_begin = not boot and not {FactKind.STOPPING, FactKind.EXITED} & {fact.kind for fact in facts}
        kind = rng.choice([kind for kind in KINDS if may_begin or kind is not FactKind.EXEC])
        facts.append(
            Fact(
                attempt="run:1",
                seq=seq,
                kind=kind,
                boot_id=f"boot-{boot}",
                boottime_ns=boottime_ns,
                # A clock that is set meanwhile moves nothing: each stretch goes by what it said at the beginning.
                wall_ns=wall_ns + (rng.choice([0, 3_600_000 * MS, -5 * MS]) if kind in LATER else 0),
                gpus=("GPU-0", "GPU-1", "GPU-2")[: rng.choice([1, 2, 3])] if not facts else facts[0].gpus,
                cpus=rng.choice([0, 8]) if not facts else facts[0].cpus,
                memory_bytes=rng.choice([0, 3 << 30]) if not facts else facts[0].memory_bytes,
                grace_ms=rng.choice([None, 0, 30_000]) if kind is FactKind.STOPPING else None,
            )
        )
    return facts


def row_of(entry: LedgerEntry) -> dict[str, Any]:
    """Return an entry as a row of the ledger."""
    said = {"number": entry.number, "kind": entry.kind.value, "provisional": entry.provisional, "account_id": 1}
    return msgspec.structs.asdict(entry.line) | said | {"queued_ms": 0}


def rows_of(facts: Sequence[Fact]) -> list[Mapping[str, Any]]:
    """Return facts as the database has them."""
    return [msgspec.json.decode(msgspec.json.encode(fact)) for fact in facts]


def summed(days: Sequence[LedgerLine], name: str) -> int:
    """Return what an amount of some lines adds up to."""
    return sum(getattr(line, name) or 0 for line in days)


@settings(deadline=None)
@given(histories(), TARIFFS, st.booleans())
def test_lines_are_what_a_second_reckoning_says(facts: list[Fact], tariff: Tariff, is_billed: bool) -> None:
    days = lines(facts, tariff, is_billed=is_billed)
    used_ms, counted_ms = reckoning.used(rows_of(facts))
    assert (summed(days, "gpu_ms"), summed(days, "billed_ms")) == (used_ms, counted_ms if is_billed else 0)
    if tariff.gpu_micros_per_hour is None:
        assert all(line.micros is None for line in days)
    elif days:
        core, memory = tariff.core_micros_per_hour or 0, tariff.memory_micros_per_hour or 0
        exact = summed(days, "billed_ms") * tariff.gpu_micros_per_hour + summed(days, "core_ms") * core
        exact = exact * 1024 + summed(days, "memory_mib_ms") * memory
        assert summed(days, "micros") == -(-exact // (reckoning.HOUR_MS * 1024))
    assert [
        wrong for line in days for wrong in reckoning.check_line(msgspec.structs.asdict(line) | {"queued_ms": 0})
    ] == []


@settings(deadline=None)
@given(histories(), TARIFFS, st.randoms(use_true_random=False), st.booleans())
def test_however_facts_arrive_and_however_often_they_are_posted_the_books_are_right_and_the_sums_the_same(
    facts: list[Fact], tariff: Tariff, rng: random.Random, is_billed: bool
) -> None:
    posted: list[LedgerEntry] = []
    there: list[Fact] = []
    for fact in rng.sample(facts, len(facts)):
        there += [fact, fact][: rng.choice([1, 1, 2])]
        if rng.random() < 0.5:  # the reason may come before the last fact, so what is billed may change
            final = rng.random() < 0.2
            posted += post(posted, lines(there, tariff, is_billed=rng.random() < 0.5), final=final)
    whole = lines(facts, tariff, is_billed=is_billed)
    posted += post(posted, whole, final=True)
    rows = [row_of(entry) for entry in posted]
    assert list(reckoning.check_books(rows)) == []
    assert post(posted, whole, final=True) == ()
    for name in reckoning.AMOUNTS[1:]:
        assert sum(row[name] or 0 for row in rows) == summed(whole, name)
        assert sum(row[name] or 0 for row in rows if row["provisional"]) == 0
