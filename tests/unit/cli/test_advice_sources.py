"""What rows of a ledger say of demand; prices of families and pools; which GPU type is looked at."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, cast

import pytest

from serverless_gpu.cli.planning import advice_sources
from serverless_gpu.cli.planning.advice_sources import (
    GpuTypeUses,
    PastUse,
    PriceBook,
    UseFilter,
    chosen,
    of_rows,
    of_server,
)
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.advice import GpuRates, GpuUse, ObservedAttempt, advise, curve_of, formulas
from serverless_gpu.model.billing.pricing import Price
from serverless_gpu.model.calendars import HOUR_NS
from serverless_gpu.wire.billing import DemandPage, DemandRow
from tests.support.golden import golden

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection

HOUR_MS = 3_600_000
ALL = UseFilter(start_ns=0, end_ns=100 * HOUR_NS)


def row(start: int, end: int, **changes: Any) -> DemandRow:
    usual: dict[str, Any] = {
        "run_id": "r",
        "fence": 1,
        "day": start // 24,
        "name": "train",
        "owner": "ada",
        "team": "search",
        "pool": "",
        "reserved": False,
        "gpu_type": "H100",
        "start_ns": start * HOUR_NS,
        "end_ns": end * HOUR_NS,
        "gpus": 4,
        "queued_ms": 0,
        "gpu_ms": 4 * (end - start) * HOUR_MS,
        "billed_ms": 4 * (end - start) * HOUR_MS,
        "lent_ms": 4 * (end - start) * HOUR_MS,
        "currency": "USD",
        "micros": 1_000_000,
    }
    return DemandRow(**(usual | changes))


def use(start: float, end: float, gpus: int) -> GpuUse:
    return GpuUse(start_ns=round(start * HOUR_NS), end_ns=round(end * HOUR_NS), gpus=gpus)


def test_a_run_over_midnight_is_one_attempt_that_was_asked_for_earlier() -> None:
    seen = {"used_ms": 40 * HOUR_MS, "observed_ms": 36 * HOUR_MS, "busy_ms": 18 * HOUR_MS, "peak_memory_bytes": 7}
    past = of_rows([row(20, 24, queued_ms=2 * HOUR_MS, **seen), row(24, 30, micros=None, **seen)], ALL)
    kind = past.kinds["H100"]
    assert kind.uses == [use(18, 22, 4), use(22, 28, 4)]
    assert (past.attempts, kind.waited_ns, kind.gpu_ms) == (1, 8 * HOUR_NS, 40 * HOUR_MS)
    assert (kind.micros, kind.unpriced_ms) == (1_000_000, 24 * HOUR_MS)
    assert (past.start_ns, past.end_ns) == (18 * HOUR_NS, 100 * HOUR_NS)
    assert past.ran == [
        ObservedAttempt(
            owner="ada",
            name="train",
            gpu_type="H100",
            gpu_ms=40 * HOUR_MS,
            observed_ms=36 * HOUR_MS,
            busy_ms=18 * HOUR_MS,
            peak_memory_bytes=7,
        )
    ]


def test_a_session_counts_for_as_long_as_no_run_had_its_devices() -> None:
    past = of_rows([row(10, 20, lent_ms=4 * 3 * HOUR_MS), row(12, 19, run_id="in it", gpus=2)], ALL)
    assert past.kinds["H100"].uses == [use(10, 13, 4), use(12, 19, 2)]
    assert past.attempts == 2


def test_time_before_the_window_is_not_looked_at() -> None:
    past = of_rows([row(10, 90)], UseFilter(start_ns=50 * HOUR_NS, end_ns=100 * HOUR_NS))
    assert past.start_ns == 50 * HOUR_NS


def test_everything_on_demand_costs_what_the_ledger_has_charged_and_not_environment_and_start() -> None:
    """Two runs of 4 GPUs: each has its devices for 5 hours, of which 3 are billed at 2.00."""
    short = {"lent_ms": 20 * HOUR_MS, "gpu_ms": 13 * HOUR_MS, "billed_ms": 12 * HOUR_MS, "micros": 24_000_000}
    past = of_rows([row(10, 15, **short), row(12, 17, run_id="other", **short)], ALL)
    kind = past.kinds["H100"]
    told = GpuRates(reserved=1_000_000, on_demand=2_000_000, billed=kind.billed)
    found = advise(curve_of(kind.uses, past.start_ns, past.end_ns), told)
    assert found.none.micros == kind.micros == 48_000_000
    assert found.duty_percent == pytest.approx(100 / 1.2)  # an hour on demand costs 1.20, not 2.00
    assert (found.best.slots, found.none.on_demand_ns) == (0, 40 * HOUR_NS)
    assert "(2.00 × 60.0 %)" in formulas(found)["break-even duty"]


def test_nothing_used_is_nothing_to_advise() -> None:
    past = of_rows([], ALL)
    assert past.start_ns < past.end_ns
    with pytest.raises(InvalidValue, match=re.escape(golden("cli.advice_sources.server-ledger-nothing"))) as raised:
        chosen(past, ALL)
    assert "--last 90d" in str(raised.value)


def test_the_type_most_used_or_all_of_a_family() -> None:
    kinds = {
        name: GpuTypeUses(uses=[use(0, 1, 1)], gpu_ms=ms) for name, ms in (("A100-40", 3), ("A100-80", 5), ("L4", 7))
    }
    past = PastUse(source="a test", start_ns=0, end_ns=1, kinds=kinds)

    def of_type(name: str) -> tuple[str, GpuTypeUses]:
        return chosen(past, UseFilter(start_ns=0, end_ns=1, gpu_type=name))

    assert of_type("")[0] == "L4"
    assert of_type("a100-80") == ("A100-80", GpuTypeUses(uses=[use(0, 1, 1)], gpu_ms=5))
    assert of_type("A100") == ("A100", GpuTypeUses(uses=[use(0, 1, 1)] * 2, gpu_ms=8))
    with pytest.raises(InvalidValue, match=re.escape(golden("cli.advice_sources.nothing-used-h100"))) as raised:
        of_type("H100")
    assert golden("cli.advice_sources.a100-40-a100") in str(raised.value)


def test_a_price_of_a_family_holds_where_there_is_no_other() -> None:
    rows = (("A100", "", 5), ("A100-80", "", 7), ("A100", "night", 2))
    book = PriceBook(rows=tuple(Price(resource=name, pool=pool, micros_per_hour=micros) for name, pool, micros in rows))
    assert [book.price(name) for name in ("A100-40", "a100_80", "A100", "H100")] == [5, 7, 5, None]
    assert [book.price("A100-40", pool) for pool in ("night", "day")] == [2, None]
    assert book.any_pool() == {"A100": 5, "A100-80": 7, "A100-40": 5}


class Asked:
    """A connection that answers with pages, and keeps what it was asked."""

    def __init__(self, pages: list[DemandPage]) -> None:
        self.pages = pages
        self.queries: list[dict[str, str]] = []

    def ask(self, method: str, path: str, *, answer: object, query: dict[str, str]) -> DemandPage:
        assert (method, path, answer) == ("GET", "/usage/demand", DemandPage)
        self.queries.append(query)
        return self.pages[len(self.queries) - 1]


def test_a_servers_ledger_is_read_page_by_page() -> None:
    pages = [DemandPage(rows=(row(1, 2),), cursor="next"), DemandPage(rows=(row(3, 4, run_id="s"),))]
    asked = Asked(pages)
    wanted = UseFilter(start_ns=7, end_ns=100 * HOUR_NS, team="search", gpu_type="H100")
    past = of_server(cast("Connection", asked), wanted)
    first = {"from_ns": "7", "to_ns": str(100 * HOUR_NS), "limit": "1000", "team": "search", "gpu_type": "H100"}
    assert asked.queries == [first, {**first, "cursor": "next"}]
    assert (past.attempts, past.remarks) == (2, [])


def test_more_rows_than_are_looked_at_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice_sources, "ROWS_MAX", 2)
    page = DemandPage(rows=(row(1, 2), row(3, 4, run_id="s")), cursor="next")
    past = of_server(cast("Connection", Asked([page])), ALL)
    assert past.attempts == 2
    assert past.remarks == [golden("cli.advice_sources.more-rows-came")]
