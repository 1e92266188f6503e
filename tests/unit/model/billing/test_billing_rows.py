"""The ledger as billing tables have it: exact quantities, and prices that the join by name and time finds."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.billing import billing_rows
from serverless_gpu.model.billing.billing_rows import BillingRow
from serverless_gpu.model.billing.ledger import EntryKind, LedgerEntry, LedgerLine
from serverless_gpu.model.billing.pricing import Price, cost, dbu_cost, tariff
from serverless_gpu.model.calendars import DAY_NS
from tests.support.model.usage import Account

HOUR_MS = 3_600_000
DAY = 20_770  # 2026-11-13
COLUMNS = [
    "record_id",
    "account_id",
    "workspace_id",
    "sku_name",
    "cloud",
    "usage_start_time",
    "usage_end_time",
    "usage_date",
    "custom_tags",
    "usage_unit",
    "usage_quantity",
    "usage_metadata",
    "identity_metadata",
    "record_type",
    "ingestion_date",
    "billing_origin_product",
    "product_features",
    "usage_type",
]


def entry(*, kind: EntryKind = EntryKind.ORIGINAL, **fields: Any) -> LedgerEntry:
    line = LedgerLine(day=DAY, start_ns=DAY * DAY_NS, end_ns=DAY * DAY_NS + 10**12, gpus=1, **fields)
    return LedgerEntry(number=1, kind=kind, provisional=False, line=line)


def rows(one: LedgerEntry, **account: Any) -> list[BillingRow]:
    return list(billing_rows.records(one, Account(**account), run_id="r", fence=2, posted_ns=(DAY + 1) * DAY_NS))


def test_a_row_has_the_columns_of_the_billing_table_and_null_where_there_is_nothing() -> None:
    assert list(BillingRow.__struct_fields__) == COLUMNS
    (row,) = rows(entry(billed_ms=HOUR_MS // 4), tags={"stage": "eval"}, reserved=True)
    assert msgspec.to_builtins(row) == {
        "record_id": "r:2:1",
        "account_id": None,
        "workspace_id": None,
        "sku_name": "SERVERLESS_GPU_H100@lab",
        "cloud": "OWN",
        "usage_start_time": "2026-11-13 00:00:00.000+00:00",
        "usage_end_time": "2026-11-13 00:16:40.000+00:00",
        "usage_date": "2026-11-13",
        "custom_tags": {"stage": "eval"},
        "usage_unit": "GPU_HOUR",
        "usage_quantity": "0.25",
        "usage_metadata": {
            "job_id": None,
            "job_run_id": "r",
            "job_name": "train",
            "notebook_id": None,
            "notebook_path": None,
            "ai_runtime_pool_id": "lab",
            "ai_runtime_workload_id": "r:2",
            "budget_policy_id": "nightly",
            "usage_policy_id": "nightly",
            "base_environment_id": "e1",
        },
        "identity_metadata": {"run_as": "alice", "owned_by": "search", "created_by": "alice", "run_by": "alice"},
        "record_type": "ORIGINAL",
        "ingestion_date": "2026-11-14",
        "billing_origin_product": "AI_RUNTIME",
        "product_features": {
            "serverless_gpu": {"workload_type": "SGC_WORKLOAD_JOBS"},
            "ai_runtime": {"compute_type": "RESERVED_COMPUTE"},
        },
        "usage_type": "GPU_TIME",
    }
    (row,) = rows(entry(), team="", pool="", policy="", name="", environment="", workload="kernel")
    assert row.sku_name == "SERVERLESS_GPU_H100" and row.identity_metadata.owned_by is None
    assert row.usage_metadata == billing_rows.UsageMetadata(job_run_id="r", ai_runtime_workload_id="r:2")
    features = row.product_features
    assert features.serverless_gpu is not None and features.serverless_gpu.workload_type == "SGC_WORKLOAD_NOTEBOOK"


def test_what_is_taken_back_is_a_retraction_and_what_holds_instead_a_restatement() -> None:
    kinds = [rows(entry(kind=kind, billed_ms=-HOUR_MS))[0] for kind in EntryKind]
    assert [row.record_type for row in kinds] == ["ORIGINAL", "RETRACTION", "RESTATEMENT"]
    assert kinds[1].usage_quantity == "-1"


def test_cores_and_memory_are_rows_of_their_own_that_no_query_takes_for_gpus() -> None:
    found = rows(entry(billed_ms=HOUR_MS, core_ms=8 * HOUR_MS, memory_mib_ms=2 * 1024 * HOUR_MS))
    assert [(row.sku_name, row.usage_unit, row.usage_quantity) for row in found] == [
        ("SERVERLESS_GPU_H100@lab", "GPU_HOUR", "1"),
        ("SERVERLESS_GPU_CORE@lab", "CORE_HOUR", "8"),
        ("SERVERLESS_GPU_MEMORY@lab", "GIB_HOUR", "2"),
    ]
    assert len({row.record_id for row in found}) == 3
    assert [row.product_features.serverless_gpu is None for row in found] == [False, True, True]


def test_a_slot_of_a_cpu_is_no_gpu() -> None:
    (row,) = rows(entry(billed_ms=HOUR_MS), gpu_type="CPU")
    assert (row.sku_name, row.usage_unit, row.usage_type) == ("SERVERLESS_GPU_CPU@lab", "SLOT_HOUR", "COMPUTE_TIME")
    (listed,) = billing_rows.list_prices([Price(resource="CPU", micros_per_hour=1)], [], currency="USD")
    assert listed.usage_unit == "SLOT_HOUR"


def test_where_prices_are_made_of_dbus_those_are_counted() -> None:
    (row,) = rows(entry(billed_ms=HOUR_MS, dbu_micros=8_884_000))
    assert (row.usage_unit, row.usage_quantity) == ("DBU", "8.884")


@pytest.mark.parametrize("at_ns", [-1, 0, 10**18, 10**30])
def test_a_moment_that_no_calendar_has_is_written_all_the_same(at_ns: int) -> None:
    assert billing_rows.moment(at_ns).endswith("+00:00")


PRICES = st.builds(
    Price,
    resource=st.sampled_from(["H100", "A100", "A100-80", "CPU", "core", "memory"]),
    pool=st.sampled_from(["", "lab"]),
    micros_per_hour=st.integers(0, 10**7),
    from_ns=st.integers(0, 9),
    until_ns=st.one_of(st.none(), st.integers(5, 20)),
    dbu_micros_per_hour=st.sampled_from([0, 8_884_000]),
)


@given(book=st.lists(PRICES, max_size=8), at_ns=st.integers(0, 25), hours=st.integers(1, 1000))
def test_the_join_by_name_and_time_gives_what_is_charged(book: list[Price], at_ns: int, hours: int) -> None:
    ms = 1_000_000  # prices begin and end at whole milliseconds in billing tables
    book = [
        msgspec.structs.replace(
            row,
            from_ns=row.from_ns * ms,
            until_ns=None if row.until_ns is None else max(row.until_ns, row.from_ns + 1) * ms,
        )
        for row in book
    ]
    used = [("H100", "lab"), ("A100-80", "lab"), ("A100-80", ""), ("CPU", "lab")]
    listed = billing_rows.list_prices(book, used, currency="USD")
    moment = billing_rows.moment(at_ns * ms)
    for gpu_type, pool in used:
        found = tariff(book, gpu_type=gpu_type, pool=pool, at_ns=at_ns * ms, currency="USD")
        joined = [
            row
            for row in listed
            if row.sku_name == billing_rows.sku(gpu_type, pool)
            and row.price_start_time <= moment
            and (row.price_end_time is None or moment < row.price_end_time)
        ]
        charged = cost(found, hours * HOUR_MS)
        if charged is None:
            assert joined == []
            continue
        (row,) = joined
        line = entry(billed_ms=hours * HOUR_MS, dbu_micros=dbu_cost(found, hours * HOUR_MS), micros=charged)
        record = rows(line, gpu_type=gpu_type, pool=pool)[0]
        assert record.usage_unit == row.usage_unit
        money = Decimal(record.usage_quantity) * Decimal(row.pricing.default) * 1_000_000
        assert abs(money - charged) < Decimal("0.001")
