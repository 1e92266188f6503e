"""Usage reports as tables with typed columns, for CSV and Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, Literal

import msgspec

from serverless_gpu.model import calendars
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.billing.usage_report import Amounts, CostShare, ReportRow
from serverless_gpu.units import MS_PER_HOUR

Kind = Literal["text", "whole", "money", "part"]
_PARTS = ("busy", "seen", "idle")


class UsageTable(msgspec.Struct, frozen=True, kw_only=True):
    """A report as a table with typed columns."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]  # Column types: text, integer, money (a decimal with six digits) or fraction of 1.
    lines: tuple[tuple[Any, ...], ...]  # Table rows; None marks an empty cell, for example the cost of unpriced usage.

    def rows(self) -> list[dict[str, Any]]:
        """Return each row as a mapping from column names to cells."""
        return [dict(zip(self.names, line, strict=True)) for line in self.lines]


def report(by: Sequence[str], groups: Iterable[ReportRow]) -> UsageTable:
    """Return a usage report as a table of groups, currencies and amounts."""
    return _table(by, ((group.key, group) for group in groups))


def chargeback(from_day: int, shares: Iterable[CostShare]) -> UsageTable:
    """Return a month's cost shares as a table."""
    kept = list(shares)
    made = _table(
        ("month", "who", "is"),
        (
            ((calendars.format_month(from_day), share.name, "team" if share.is_team else "user"), share.group)
            for share in kept
        ),
    )
    micros_by_currency = {
        total.currency: total.amounts.micros for total in usage_report.totals(share.group for share in kept)
    }
    parts: list[float | None] = []
    for share in kept:
        micros, total = share.group.amounts.micros, micros_by_currency[share.group.currency]
        parts.append(micros / total if micros is not None and total else None)
    return UsageTable(
        names=(*made.names, "part_of_cost"),
        kinds=(*made.kinds, "part"),
        lines=tuple((*line, part) for line, part in zip(made.lines, parts, strict=True)),
    )


def text_cells(record: BillingRow | ListPrice) -> list[str | None]:
    """Return the cells of a billing row for CSV, with JSON for structured columns."""
    values = (getattr(record, name) for name in record.__struct_fields__)
    return [
        value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode() for value in values
    ]


def arrow_schema(pyarrow: Any, table: UsageTable) -> Any:
    """Return the schema of a Parquet file. The caller passes the optional module `pyarrow`."""
    types = {
        "text": pyarrow.string(),
        "whole": pyarrow.int64(),
        "money": pyarrow.decimal128(38, 6),
        "part": pyarrow.float64(),
    }
    return pyarrow.schema([(name, types[kind]) for name, kind in zip(table.names, table.kinds, strict=True)])


def amounts_of(group: ReportRow) -> dict[str, Any]:
    """Return a report group's amounts by column name."""
    amounts = group.amounts
    return {
        "currency": group.currency,
        "device_hours": round(amounts.gpu_ms / MS_PER_HOUR, 6),
        "cost": None if amounts.micros is None else Decimal(usage_report.decimal(amounts.micros)),
        "dbu": Decimal(usage_report.decimal(amounts.dbu_micros)),
        **msgspec.structs.asdict(amounts),
        **{name: getattr(amounts, name) for name in _PARTS},
    }


def _table(by: Sequence[str], groups: Iterable[tuple[tuple[str, ...], ReportRow]]) -> UsageTable:
    columns = amounts_of(ReportRow(key=(), currency="", amounts=Amounts()))
    kinds: dict[str, Kind] = dict.fromkeys(columns, "whole")
    kinds |= {"currency": "text", "device_hours": "part", "cost": "money", "dbu": "money"}
    kinds |= dict.fromkeys(_PARTS, "part")
    texts: dict[str, Kind] = dict.fromkeys(by, "text")
    return UsageTable(
        names=(*by, *columns),
        kinds=(*texts.values(), *kinds.values()),
        lines=tuple((*key, *amounts_of(group).values()) for key, group in groups),
    )
