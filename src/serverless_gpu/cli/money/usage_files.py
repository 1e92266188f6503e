"""Reports and rows of the ledger as CSV and Parquet. Numbers are exact: money and quantities are decimals.

A file is written beside its place and put there whole. Parquet needs PyArrow, which the package does not.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import io
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from serverless_gpu.cli.output import say
from serverless_gpu.client.runs.atomic_files import replacing_file
from serverless_gpu.errors import ServerlessGpuError, StorageError
from serverless_gpu.model import calendars
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.billing.usage_report import Amounts, CostShare, ReportRow
from serverless_gpu.units import MS_PER_HOUR
from serverless_gpu.wire.billing import ListPrices, UsageView

Kind = Literal["text", "whole", "money", "part"]
AT_ONCE = 10_000
"""Rows of a group in a Parquet file of records: they are never all in memory."""
_PARTS = ("busy", "seen", "idle")


class UsageTable(msgspec.Struct, frozen=True, kw_only=True):
    """A report as columns."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]  # texts, whole numbers, money (a decimal with six digits), parts of 1
    lines: tuple[tuple[Any, ...], ...]  # rows; None is empty, such as a cost without a price

    def rows(self) -> list[dict[str, Any]]:
        """Return each row by the names of its columns."""
        return [dict(zip(self.names, line, strict=True)) for line in self.lines]


def report(view: UsageView) -> UsageTable:
    """Return a report as columns: groups, currency and amounts."""
    return _table(view.by, ((group.key, group) for group in view.groups))


def chargeback(view: UsageView, shares: Iterable[CostShare]) -> UsageTable:
    """Return a month's cost shares as columns."""
    kept = list(shares)
    made = _table(
        ("month", "who", "is"),
        (
            ((calendars.format_month(view.from_day), share.name, "team" if share.is_team else "user"), share.group)
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


def amounts_of(group: ReportRow) -> dict[str, Any]:
    """Return a group's amounts by column name."""
    amounts = group.amounts
    return {
        "currency": group.currency,
        "device_hours": round(amounts.gpu_ms / MS_PER_HOUR, 6),
        "cost": None if amounts.micros is None else Decimal(usage_report.decimal(amounts.micros)),
        "dbu": Decimal(usage_report.decimal(amounts.dbu_micros)),
        **msgspec.structs.asdict(amounts),
        **{name: getattr(amounts, name) for name in _PARTS},
    }


def put(table: UsageTable, path: Path | None) -> None:
    """Write a report: as Parquet into a file, or as CSV to the output."""
    if path is None:
        _say_csv(table.names, iter(table.lines))
        return
    pyarrow = _pyarrow()
    types = {
        "text": pyarrow.string(),
        "whole": pyarrow.int64(),
        "money": pyarrow.decimal128(38, 6),
        "part": pyarrow.float64(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in zip(table.names, table.kinds, strict=True)])
    _write_parquet(path, schema, [table.rows()])


def put_records(records: Iterator[BillingRow], path: Path | None) -> None:
    """Write ledger rows in billing columns: Parquet into a file, or CSV with JSON cells to stdout."""
    if path is None:
        _say_csv(BillingRow.__struct_fields__, (_csv_cells(record) for record in records))
        return
    rows = (_parquet_row(record) for record in records)
    _write_parquet(path, _records_schema(_pyarrow()), iter(lambda: list(islice(rows, AT_ONCE)), []))


def put_prices(found: ListPrices, *, as_json: bool) -> None:
    """Print the price book in billing columns: as CSV with JSON cells, or as JSON lines."""
    if as_json:
        for price in found.prices:
            say(msgspec.json.encode(price).decode())
    else:
        _say_csv(ListPrice.__struct_fields__, (_csv_cells(price) for price in found.prices))
    if found.is_cut:
        say("sgpu: cut: more was used than is shown", err=True)


# --- CSV --------------------------------------------------------------------------------------------------------------


def _say_csv(names: Sequence[str], lines: Iterator[Sequence[Any]]) -> None:
    say(_csv_line(names))
    for line in lines:
        say(_csv_line(line))


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


def _csv_cells(record: BillingRow | ListPrice) -> list[Any]:
    values = (getattr(record, name) for name in record.__struct_fields__)
    return [
        value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode() for value in values
    ]


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        message = "--parquet writes with pyarrow, which this Python does not have"
        raise ServerlessGpuError(message, hint="pip install 'serverless-gpu[simulate]', or --csv") from None
    return pyarrow


def _records_schema(pyarrow: Any) -> Any:
    texts = {name: pyarrow.string() for name in BillingRow.__struct_fields__}
    moment, date = pyarrow.timestamp("ms", tz="UTC"), pyarrow.date32()
    structs = {field.name: field.type for field in msgspec.structs.fields(BillingRow)}
    features = pyarrow.struct(
        [
            ("serverless_gpu", pyarrow.struct([("workload_type", pyarrow.string())])),
            ("ai_runtime", pyarrow.struct([("compute_type", pyarrow.string())])),
        ]
    )
    others = {
        "usage_start_time": moment,
        "usage_end_time": moment,
        "usage_date": date,
        "ingestion_date": date,
        "custom_tags": pyarrow.map_(pyarrow.string(), pyarrow.string()),
        "usage_quantity": pyarrow.decimal128(38, 18),
        "product_features": features,
    }
    for name in ("usage_metadata", "identity_metadata"):
        fields = structs[name].__struct_fields__
        others[name] = pyarrow.struct([(field, pyarrow.string()) for field in fields])
    return pyarrow.schema([(name, kind) for name, kind in (texts | others).items()])


def _parquet_row(record: BillingRow) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(record)
    for name in ("usage_start_time", "usage_end_time"):
        row[name] = datetime.datetime.fromisoformat(row[name])
    for name in ("usage_date", "ingestion_date"):
        row[name] = datetime.date.fromisoformat(row[name])
    row["usage_quantity"] = Decimal(row["usage_quantity"])
    row["custom_tags"] = sorted(row["custom_tags"].items())
    return row


def _write_parquet(path: Path, schema: Any, portions: Iterable[list[dict[str, Any]]]) -> None:
    pyarrow = _pyarrow()
    count = 0
    try:
        with (
            replacing_file(path) as beside,
            contextlib.closing(pyarrow.parquet.ParquetWriter(beside, schema)) as writer,
        ):
            for rows in portions:
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
                count += len(rows)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise StorageError(message, hint="give the path of a file in a directory you can write to") from None
    say(f"{path}: {count:,} rows", err=True)


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
