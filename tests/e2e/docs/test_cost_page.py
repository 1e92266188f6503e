"""The worked example of docs/concepts/cost.md: what its tables say follows from its tables."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from fractions import Fraction

import pytest

from serverless_gpu.model import calendars
from serverless_gpu.model.billing import advice, pricing
from serverless_gpu.model.billing.advice import GpuRates, GpuUse
from serverless_gpu.model.billing.budget import Budget, BudgetUse, Period, Scope, Spender, judge
from serverless_gpu.model.billing.ledger import LedgerEntry, LedgerLine, charge, lines, post
from serverless_gpu.model.billing.pricing import Price, Tariff
from serverless_gpu.model.cost import AttemptDuration, AttemptUse, Devices, estimated, together
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Fact, FactKind, Reason
from serverless_gpu.model.scheduling import duration_estimates
from tests.support.paths import REPOSITORY

_PAGE = (REPOSITORY / "docs" / "concepts" / "cost.md").read_text(encoding="utf-8")
_EXAMPLE = _PAGE.partition("## A worked example")[2].partition("\n## ")[0]
_EPOCH = datetime.datetime(1970, 1, 1)
_GPUS = tuple(f"GPU-{number}" for number in range(8))
_LOST = Reason.GPU_LOST

_Row = dict[str, str]


def _tables(text: str) -> Iterator[list[_Row]]:
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines())
        yield [dict(zip(head, row, strict=True)) for row in rows]


_PRICES, _FACTS, _LINES, _ENTRIES, _STANDINGS, _DAY, _SLOTS, _MIXES = _tables(_EXAMPLE)
_SAID = [" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)\n```$", _EXAMPLE, re.MULTILINE | re.DOTALL)]


def _ns(moment: str) -> int:
    since = datetime.datetime.fromisoformat(moment) - _EPOCH
    return (since // datetime.timedelta(microseconds=1)) * 1_000


def _day(day: int) -> str:
    return (_EPOCH + datetime.timedelta(days=day)).date().isoformat()


def _seconds(ms: int) -> str:
    return f"{ms // 1000}" if ms % 1000 == 0 else f"{'-' if ms < 0 else ''}{abs(ms) // 1000}.{abs(ms) % 1000:03d}"


def _tariff(at: str) -> Tariff:
    book = [
        Price(
            resource=row["resource"],
            pool=row["pool"],
            from_ns=_ns(row["from"]),
            micros_per_hour=int(Fraction(row["price"]) * 1_000_000),
        )
        for row in _PRICES
    ]
    return pricing.tariff(book, gpu_type="H100", pool="research", at_ns=_ns(at), currency="USD")


def _facts(fence: int, until: str = "9999") -> list[Fact]:
    told = [row for row in _FACTS if row["attempt"] == str(fence) and row["at"] <= until]
    return [
        Fact(
            attempt=f"bert-ft:{fence}",
            seq=seq,
            kind=FactKind(row["fact"]),
            boot_id="boot",
            boottime_ns=_ns(row["at"]),
            wall_ns=_ns(row["at"]),
            gpus=_GPUS,
            cpus=0,
            memory_bytes=0,
        )
        for seq, row in enumerate(told)
    ]


def _lines(fence: int, until: str = "9999") -> tuple[LedgerLine, ...]:
    facts = _facts(fence, until)
    tariff = _tariff(next(row["at"] for row in _FACTS if row["attempt"] == str(fence)))
    return lines(facts, tariff, is_billed=fence != 1 or MEANINGS[_LOST].is_billed)


def test_what_each_attempt_used_on_each_day_follows_from_its_facts() -> None:
    found = [
        {
            "attempt": str(fence),
            "day": _day(line.day),
            "environment": _seconds(line.environment_ms),
            "start": _seconds(line.start_ms),
            "run": _seconds(line.run_ms),
            "stop": _seconds(line.stop_ms),
            "gate": _seconds(line.gate_ms),
            "used": _seconds(line.gpu_ms),
            "billed": _seconds(line.billed_ms),
            "micros": str(line.micros),
        }
        for fence in (1, 2)
        for line in _lines(fence)
    ]
    assert found == _LINES


def test_the_cost_is_rounded_up_once() -> None:
    billed_ms = sum(line.billed_ms for line in _lines(2))
    exact = Fraction(billed_ms * 2_990_000, 3_600_000)
    assert f"{billed_ms / 1000:,.3f} GPU-seconds: {billed_ms:,} × 2,990,000" in " ".join(_EXAMPLE.split())
    assert f"= {float(exact):,.1f} micros" in " ".join(_EXAMPLE.split())
    whole = charge(_facts(2), gpu_type="H100", tariff=_tariff("2026-11-21 23:29:50"))
    assert whole.micros == -(-exact.numerator // exact.denominator) == sum(line.micros or 0 for line in _lines(2))


def test_what_the_ledger_has_of_a_node_that_was_silent() -> None:
    provisional = post((), _lines(2, until="2026-11-22 00:20:00"), final=False)
    ledger: list[LedgerEntry] = [*provisional, *post(provisional, _lines(2), final=True)]
    found = [
        {
            "number": str(entry.number),
            "day": _day(entry.line.day),
            "kind": entry.kind.value,
            "provisional": "yes" if entry.provisional else "no",
            "billed": _seconds(entry.line.billed_ms),
            "micros": str(entry.line.micros),
        }
        for entry in ledger
    ]
    assert found == _ENTRIES


def test_what_the_run_says_of_its_cost() -> None:
    attempts = [AttemptUse(lines=_lines(fence), gpu_type="H100") for fence in (1, 2)]
    assert together(attempts).text() == _SAID[0]


def test_what_was_said_beforehand() -> None:
    earlier_s = [minutes * 60.0 for minutes in (60, 70, 80)]
    devices = Devices(gpu_type="H100", count=8, tariff=_tariff("2026-11-21 21:59:00"))
    lasting = AttemptDuration(limit_s=7_200, expected_s=duration_estimates.expected_s(earlier_s))
    assert estimated(devices, lasting).text() == _SAID[1]


@pytest.mark.parametrize(("at", "micros"), [("2026-11-21 12:00:00", 2_990_000), ("2026-11-22 00:00:00", 2_490_000)])
def test_the_price_of_the_pool_goes_before_that_of_all(at: str, micros: int) -> None:
    assert _tariff(at).gpu_micros_per_hour == micros


def test_how_a_budget_stands_and_when_it_stops_the_run() -> None:
    budget = Budget(scope=Scope(kind="team", name="search"), period=Period.DAY, limit_micros=16_330_000, hard=True)
    found, before = [], 0
    for row in _STANDINGS:
        at_ns = _ns(row["at"])
        is_over = row["then"] == "has ended"
        spender = Spender(
            run_id="bert-ft",
            fence=2,
            gpus=8,
            micros_per_hour=8 * 2_990_000,
            placed_ns=_ns("2026-11-21 23:29:50"),
            started_ns=_ns("2026-11-21 23:30:00"),
            seen_ns=_ns("2026-11-22 00:40:12.980") if is_over else at_ns,
            grace_s=30.0,
            alone_s=900.0,
            is_over=is_over,
            longest_s=80 * 60.0,
        )
        standing = judge(budget, BudgetUse(), [spender], at_ns)
        reached = standing.reached
        said = {80: "80 % is reached", 95: "95 % is reached"}.get(
            max(reached, default=0) if len(reached) > before else 0
        )
        then = "has ended" if is_over else "must stop" if standing.stop else said or "goes on"
        before = len(reached)
        found.append(
            {
                "at": row["at"],
                "used": str(standing.used.micros),
                "held": str(standing.held.micros),
                "left": str(standing.left),
                "then": then,
            }
        )
    assert found == _STANDINGS


def test_how_many_gpus_pay() -> None:
    def hours_ns(text: str) -> int:
        return int(text.partition(":")[0]) * calendars.HOUR_NS

    uses = [
        GpuUse(start_ns=hours_ns(row["from"]), end_ns=hours_ns(row["until"]), gpus=int(row["GPUs"])) for row in _DAY
    ]
    curve = advice.curve_of(uses, 0, 24 * calendars.HOUR_NS)
    found = advice.advise(curve, GpuRates(reserved=1_800_000, on_demand=2_990_000))
    assert f"1.80 ÷ 2.99 = {found.duty_percent:.1f} %" in _EXAMPLE
    assert [
        {
            "slots": f"{slot.first}–{slot.last}",
            "wanted": f"{slot.share_percent:.1f} %",
            "pays": "yes" if slot.pays else "no",
        }
        for slot in found.slots
    ] == _SLOTS
    assert [
        {
            "reserve": str(mix.slots),
            "reserved": f"{mix.reserved_micros / 1e6:.2f}",
            "of that idle": f"{mix.idle_micros / 1e6:.2f}",
            "on demand": f"{mix.on_demand_micros / 1e6:.2f}",
            "together": f"{mix.micros / 1e6:.2f}",
        }
        for mix in (found.none, found.best, found.all_reserved)
    ] == _MIXES
