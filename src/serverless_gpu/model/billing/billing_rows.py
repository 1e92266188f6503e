"""Ledger entries as rows of `system.billing.usage`, so that existing billing queries work.

    Entry ─┬─▶ a row for devices: DBU where the price is set in DBU, else GPU-hours, or slot-hours of a CPU
           ├─▶ a row for cores, where the attempt had a limit of cores: core-hours
           └─▶ a row for memory: GiB-hours

Billing queries join `list_prices` by `sku_name`, `cloud` and time. A SKU is a priced item: a GPU type, a core or a GiB
of memory, in a pool. The price at the start of an attempt applies to the whole attempt. After a price change, a join by
time finds the later price. `sgpu usage` shows the charged amount.

Columns without an equivalent in the ledger are null. Quantities are decimals in text form, because JSON numbers are not
exact.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal, localcontext
from typing import Literal

import msgspec

from serverless_gpu import units
from serverless_gpu.model.billing.ledger import EntryKind, LedgerEntry
from serverless_gpu.model.billing.pricing import CORE, MEMORY, Price, Tariff, tariff
from serverless_gpu.model.billing.usage_report import Accounted
from serverless_gpu.model.calendars import format_day
from serverless_gpu.model.hardware import CPU, families_of

CLOUD = "OWN"
"""Value of the cloud column. The values AWS, AZURE and GCP do not apply, because the team owns its machines."""
PRODUCT = "AI_RUNTIME"
DBU, GPU_HOUR, SLOT_HOUR, CORE_HOUR, GIB_HOUR = "DBU", "GPU_HOUR", "SLOT_HOUR", "CORE_HOUR", "GIB_HOUR"
RecordType = Literal["ORIGINAL", "RETRACTION", "RESTATEMENT"]
_RECORD_TYPES: Mapping[EntryKind, RecordType] = {
    EntryKind.ORIGINAL: "ORIGINAL",
    EntryKind.REVERSAL: "RETRACTION",
    EntryKind.RESTATED: "RESTATEMENT",
}
_MIB_PER_GIB = 1024
_DIGITS = Decimal("1e-18")  # Precision of decimal(38, 18), the type of quantities and prices in billing tables.
_LAST_MS = 253_402_300_799_999  # End of the year 9999, as the end date of prices without an end of validity.
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class UsageMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """Run, pool and usage policy of a billing row.

    Attributes:
        job_run_id: the run.
        job_name: the run's name.
        ai_runtime_pool_id: the pool.
        ai_runtime_workload_id: the attempt, as ``run:fence``.
        budget_policy_id: the usage policy, also in `usage_policy_id`.
        base_environment_id: address of the captured environment.
    """

    job_id: str | None = None
    job_run_id: str | None = None
    job_name: str | None = None
    notebook_id: str | None = None
    notebook_path: str | None = None
    ai_runtime_pool_id: str | None = None
    ai_runtime_workload_id: str | None = None
    budget_policy_id: str | None = None
    usage_policy_id: str | None = None
    base_environment_id: str | None = None


class IdentityMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """User, service and team of a billing row.

    Attributes:
        run_as: the user or service, also in `created_by` and `run_by`.
        owned_by: the team.
    """

    run_as: str | None = None
    owned_by: str | None = None
    created_by: str | None = None
    run_by: str | None = None


class ServerlessGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The workload type, ``SGC_WORKLOAD_NOTEBOOK`` for a kernel and otherwise ``SGC_WORKLOAD_JOBS``."""

    workload_type: str


class AiRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """The compute type, ``RESERVED_COMPUTE`` in a reserved pool and otherwise ``ON_DEMAND_COMPUTE``."""

    compute_type: str


class ProductFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Product features for filters in billing queries. `serverless_gpu` is null for cores and memory."""

    serverless_gpu: ServerlessGpu | None = None
    ai_runtime: AiRuntime | None = None


class BillingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row with the columns of `system.billing.usage`, in the same order."""

    record_id: str
    account_id: str | None
    workspace_id: str | None
    sku_name: str
    cloud: str
    usage_start_time: str
    usage_end_time: str
    usage_date: str
    custom_tags: dict[str, str]
    usage_unit: str
    usage_quantity: str
    usage_metadata: UsageMetadata
    identity_metadata: IdentityMetadata
    record_type: RecordType
    ingestion_date: str
    billing_origin_product: str
    product_features: ProductFeatures
    usage_type: str


class Pricing(msgspec.Struct, frozen=True, kw_only=True):
    """The price of one unit of a SKU."""

    default: str


class ListPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A row with the columns of `system.billing.list_prices`, in the same order."""

    price_start_time: str
    price_end_time: str | None
    account_id: str | None
    sku_name: str
    cloud: str
    currency_code: str
    usage_unit: str
    pricing: Pricing


def records(entry: LedgerEntry, account: Accounted, *, run_id: str, fence: int, posted_ns: int) -> Iterator[BillingRow]:
    """Yield the billing rows of a ledger entry for its devices, cores and memory."""
    line = entry.line
    devices = _devices(entry, account, run_id=run_id, fence=fence, posted_ns=posted_ns)
    yield devices
    sizes = ((CORE, CORE_HOUR, line.core_ms, 1), (MEMORY, GIB_HOUR, line.memory_mib_ms, _MIB_PER_GIB))
    for resource, unit, amount_ms, per in sizes:
        if amount_ms:
            yield msgspec.structs.replace(
                devices,
                record_id=f"{devices.record_id}:{resource}",
                sku_name=sku(resource, account.pool),
                usage_unit=unit,
                usage_quantity=quotient(amount_ms, units.MS_PER_HOUR * per),
                product_features=msgspec.structs.replace(devices.product_features, serverless_gpu=None),
                usage_type="COMPUTE_TIME",
            )


def list_prices(book: Sequence[Price], used: Iterable[tuple[str, str]], *, currency: str) -> list[ListPrice]:
    """Return the price book in the format of billing tables, a row per SKU and price period.

    A pool without its own price uses the price for all pools. A GPU type without its own price uses the price of its
    family. Pools and GPU types without their own price still get separate rows, so that a join by name finds a price.
    """
    wanted = {(row.resource, row.pool) for row in book} | set(used)
    wanted |= {(resource, pool) for _, pool in wanted for resource in (CORE, MEMORY)}
    return [price for resource, pool in sorted(wanted) for price in _prices_of(book, resource, pool, currency)]


def _prices_of(book: Sequence[Price], resource: str, pool: str, currency: str) -> Iterator[ListPrice]:
    names = {resource, *families_of(resource)}
    book = [row for row in book if row.pool in ("", pool) and row.resource in names]
    starts = sorted({turn for row in book for turn in (row.from_ns, row.until_ns) if turn is not None})
    begun: tuple[int, str, str] | None = None
    for at_ns in starts:
        found = tariff(book, gpu_type=resource, pool=pool, at_ns=at_ns, currency=currency)
        now = _unit_price(found, resource)
        if begun is not None and now != begun[1:]:
            yield _list_price(resource, pool, begun, at_ns, currency)
            begun = None
        if begun is None and now is not None:
            begun = (at_ns, *now)
    if begun is not None:
        yield _list_price(resource, pool, begun, None, currency)


def _unit_price(found: Tariff, resource: str) -> tuple[str, str] | None:
    """Return a resource's billing unit and the price of one unit, or None without a price."""
    if resource in (CORE, MEMORY):
        micros = found.core_micros_per_hour if resource == CORE else found.memory_micros_per_hour
        unit = CORE_HOUR if resource == CORE else GIB_HOUR
        return None if micros is None else (unit, quotient(micros, units.MICROS_PER_UNIT))
    if found.gpu_micros_per_hour is None:
        return None
    if found.dbu_micros_per_hour:
        return DBU, quotient(found.gpu_micros_per_hour, found.dbu_micros_per_hour)
    return _hour(resource), quotient(found.gpu_micros_per_hour, units.MICROS_PER_UNIT)


def _hour(gpu_type: str) -> str:
    """Return the billing unit of a device type, such as GPU-hours. CPU slots have a separate billing unit."""
    return SLOT_HOUR if gpu_type == CPU else GPU_HOUR


def _list_price(
    resource: str, pool: str, begun: tuple[int, str, str], until_ns: int | None, currency: str
) -> ListPrice:
    from_ns, unit, price = begun
    return ListPrice(
        price_start_time=moment(from_ns),
        price_end_time=None if until_ns is None else moment(until_ns),
        account_id=None,
        sku_name=sku(resource, pool),
        cloud=CLOUD,
        currency_code=currency,
        usage_unit=unit,
        pricing=Pricing(default=price),
    )


def sku(resource: str, pool: str) -> str:
    """Return the SKU name of a resource, with the pool if the resource has one.

    Examples: ``SERVERLESS_GPU_H100``, ``SERVERLESS_GPU_H100@search``.
    """
    return f"SERVERLESS_GPU_{resource.upper().replace(' ', '_')}{f'@{pool}' if pool else ''}"


def quotient(amount: int, per: int) -> str:
    """Return `amount` ÷ `per` with up to 18 decimal places, the precision of billing tables."""
    with localcontext(prec=60):
        return format((Decimal(amount) / Decimal(per)).quantize(_DIGITS).normalize(), "f")


def moment(at_ns: int) -> str:
    """Return a timestamp in the format of billing tables, such as ``2026-11-22 17:45:41.123+00:00``."""
    at_ms = min(max(at_ns // 1_000_000, 0), _LAST_MS)
    return (_EPOCH + datetime.timedelta(milliseconds=at_ms)).isoformat(sep=" ", timespec="milliseconds")


def _devices(entry: LedgerEntry, account: Accounted, *, run_id: str, fence: int, posted_ns: int) -> BillingRow:
    line = entry.line
    is_dbu = line.dbu_micros != 0
    return BillingRow(
        record_id=f"{run_id}:{fence}:{entry.number}",
        account_id=None,
        workspace_id=None,
        sku_name=sku(account.gpu_type, account.pool),
        cloud=CLOUD,
        usage_start_time=moment(line.start_ns),
        usage_end_time=moment(line.end_ns),
        usage_date=format_day(line.day),
        custom_tags=dict(account.tags),
        usage_unit=DBU if is_dbu else _hour(account.gpu_type),
        usage_quantity=quotient(line.dbu_micros, units.MICROS_PER_UNIT)
        if is_dbu
        else quotient(line.billed_ms, units.MS_PER_HOUR),
        usage_metadata=UsageMetadata(
            job_run_id=run_id,
            job_name=account.name or None,
            ai_runtime_pool_id=account.pool or None,
            ai_runtime_workload_id=f"{run_id}:{fence}",
            budget_policy_id=account.policy or None,
            usage_policy_id=account.policy or None,
            base_environment_id=account.environment or None,
        ),
        identity_metadata=IdentityMetadata(
            run_as=account.owner, owned_by=account.team or None, created_by=account.owner, run_by=account.owner
        ),
        record_type=_RECORD_TYPES[entry.kind],
        ingestion_date=moment(posted_ns)[:10],
        billing_origin_product=PRODUCT,
        product_features=ProductFeatures(
            serverless_gpu=ServerlessGpu(
                workload_type="SGC_WORKLOAD_NOTEBOOK" if account.workload == "kernel" else "SGC_WORKLOAD_JOBS"
            ),
            ai_runtime=AiRuntime(compute_type="RESERVED_COMPUTE" if account.reserved else "ON_DEMAND_COMPUTE"),
        ),
        usage_type="COMPUTE_TIME" if account.gpu_type == CPU else "GPU_TIME",
    )
