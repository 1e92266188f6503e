"""`sgpu usage`: prints usage, cost and chargeback reports, and exports billing rows as CSV or Parquet.

The command writes Parquet to a temporary file and then renames the file. Parquet files store money and quantities as
exact decimals. Parquet needs PyArrow, which this package does not install.
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
from typing import TYPE_CHECKING, Any

import click
import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.output import JsonType, columns, json_option, print_json, say
from serverless_gpu.cli.server_connection import server
from serverless_gpu.errors import ServerlessGpuError, StorageError
from serverless_gpu.model import calendars
from serverless_gpu.model.billing import usage_report, usage_table
from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.billing.usage_report import Amounts, DayRange, ReportRow, UsageUnit
from serverless_gpu.model.billing.usage_table import UsageTable
from serverless_gpu.model.hardware import time_unit
from serverless_gpu.node.base.private_files import replacing_file
from serverless_gpu.units import format_gpu_ms, format_micros, is_any_below_cent
from serverless_gpu.wire.billing import GROUPS_DEFAULT, GROUPS_MAX, ListPrices, RecordPage, UsageView

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection

FORMULAS = (
    "BUSY = busy device time / device time with telemetry",
    "IDLE = (idle device time with telemetry + session time without a run) / (device time with telemetry + "
    "session time without a run)",
)
_DAYS = 30
_SEGMENTS = (
    ("QUEUED", "queued_ms"),
    ("ENV", "environment_ms"),
    ("START", "start_ms"),
    ("RUN", "run_ms"),
    ("STOP", "stop_ms"),
    ("GATE", "gate_ms"),
    ("HELD", "idle_ms"),
    ("USED", "gpu_ms"),
    ("BILLED", "billed_ms"),
)


_OF_SHARES = ("gpu_ms", "billed_ms", "unpriced_ms")


@click.command("usage")
@click.option(
    "--by", metavar="FIELDS", help="Comma-separated fields to group by: user (default), team, pool, … or tag:KEY."
)
@click.option("--from", "first", metavar="DAY", help="First day of the report in UTC, for example 2026-11-01.")
@click.option("--to", "last", metavar="DAY", help="Last day of the report in UTC, inclusive (default: today).")
@click.option("--last", "lately", metavar="DURATION", help="Number of days until today (default: 30d).")
@click.option("--month", "in_month", metavar="MONTH", help="Month, for example 2026-11.")
@click.option(
    "--where",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Report only usage with this value, for example team=search. Repeatable.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, GROUPS_MAX),
    default=GROUPS_DEFAULT,
    show_default=True,
    help="Maximum number of report lines.",
)
@click.option(
    "--chargeback", metavar="MONTH", help="Report a month's costs by team, and by user for users without a team."
)
@click.option("--records", is_flag=True, help="Print ledger rows with the columns of Databricks' system.billing.usage.")
@json_option(JsonType("cli.json_types:UsageReport"), text="Print JSON (with --records, one object per line).")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option("--parquet", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write Parquet.")
def usage(as_json: bool, as_csv: bool, parquet: Path | None, **asked: Any) -> None:
    """Report usage and cost.

    Users see their own usage and their teams' usage. An operator sees all usage. FIELDS: user, team, pool, policy,
    gpu_type, name, workload, environment, run, day, week, month, tag:KEY.
    """
    if sum((as_json, as_csv, parquet is not None)) > 1:
        raise click.UsageError("specify only one of --json, --csv and --parquet")
    if asked["chargeback"] and (asked["records"] or asked["in_month"]):
        raise click.UsageError("--chargeback cannot be combined with --month or --records")
    if asked["by"] is not None and (asked["chargeback"] or asked["records"]):
        raise click.UsageError("--by cannot be combined with --chargeback or --records")
    window = _window(asked)
    where = _parse_filters(asked["where"])
    if asked["records"]:
        if where:
            raise click.UsageError("--records cannot be combined with --where. Use --from and --to")
        with server() as connection:
            records = _records(connection, window)
            if as_json:
                for record in records:
                    say(msgspec.json.encode(record).decode())
            else:
                put_records(records, parquet)
        return
    by = (
        ("team", "user")
        if asked["chargeback"]
        else usage_report.parse_by("user" if asked["by"] is None else asked["by"])
    )
    query = {
        "by": usage_report.write_by(by),
        "from_day": str(window.from_day),
        "until_day": str(window.until_day),
        "where": msgspec.json.encode(where).decode() if where else "",
        "limit": str(GROUPS_MAX if asked["chargeback"] else asked["limit"]),
    }
    with server() as connection:
        found = connection.ask("GET", "/usage", answer=UsageView, query=query)
    if asked["chargeback"]:
        table = usage_table.chargeback(found.from_day, usage_report.chargeback(found.groups))
    else:
        table = usage_table.report(found.by, found.groups)
    if as_json:
        print_json({"report": table.rows(), **_report_json(found)})
    elif as_csv or parquet is not None:
        put(table, parquet)
        for line in _remarks(found):
            say(f"sgpu: {line}", err=True)
    else:
        for line in _chargeback_lines(found) if asked["chargeback"] else _lines(found):
            say(line)


# --- requests ---------------------------------------------------------------------------------------------------------


def _window(asked: dict[str, Any]) -> DayRange:
    """Return the requested range of days, by default the last 30 days.

    With the current month as default, the report would be almost empty on the first day of a month.
    """
    ways = [name for name in ("lately", "in_month", "chargeback") if asked[name]]
    ways += ["first"] if asked["first"] or asked["last"] else []
    if len(ways) > 1:
        raise click.UsageError("specify only one of --last, --month, or --from and --to")
    if asked["in_month"] or asked["chargeback"]:
        return usage_report.month(asked["in_month"] or asked["chargeback"])
    today = SystemClock().wall_ns() // calendars.DAY_NS
    until = usage_report.day_of(asked["last"]) + 1 if asked["last"] else today + 1
    if asked["first"]:
        return usage_report.checked(DayRange(usage_report.day_of(asked["first"]), until))
    length = _DAYS
    if asked["lately"]:
        seconds = duration_s("--last", asked["lately"])
        if seconds < 86_400 or seconds % 86_400:
            raise click.BadParameter(
                "the ledger has whole days. Write a number of days such as 1d, 30d or 4w", param_hint="--last"
            )
        length = round(seconds / 86_400)
    return usage_report.checked(DayRange(max(0, until - length), until))


def _parse_filters(texts: Sequence[str]) -> dict[str, str]:
    where: dict[str, str] = {}
    for text in texts:
        # The first = ends the field, because a tag key contains no =.
        field, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(
                f"{text!r} is not a filter. Write FIELD=VALUE, for example team=search", param_hint="--where"
            )
        if field in where:
            raise click.BadParameter(f"{field} is given twice", param_hint="--where")
        usage_report.refuse_unknown(field)
        where[field] = value
    return where


def _records(connection: Connection, window: DayRange) -> Iterator[BillingRow]:
    """Return an iterator over the ledger rows, page by page.

    Fetch the first page immediately, so that errors appear early.
    """

    def page(after: int) -> RecordPage:
        query = {"after": str(after), "from_day": str(window.from_day), "until_day": str(window.until_day)}
        return connection.ask("GET", "/usage/records", answer=RecordPage, query=query)

    def rows(found: RecordPage) -> Iterator[BillingRow]:
        yield from found.records
        while found.after is not None:
            found = page(found.after)
            yield from found.records

    return rows(page(0))


# --- reports ----------------------------------------------------------------------------------------------------------


def _lines(view: UsageView) -> list[str]:
    """Return the report as terminal lines, without empty columns."""
    key = ("all", *[""] * (len(view.by) - 1))
    totals = [ReportRow(key=key, currency=total.currency, amounts=total.amounts) for total in view.totals]
    shown = [*(view.groups if view.by else ()), *totals]
    if not view.totals:
        return ["no usage is visible to you on these days"]
    has = {name: any(getattr(each.amounts, name) for each in shown) for name in Amounts.__struct_fields__}
    segments = [(title, name) for title, name in _SEGMENTS if has[name] or name in ("run_ms", "gpu_ms", "billed_ms")]
    head = [*(field.upper() for field in view.by or ("",)), "RUNS", *(title for title, _ in segments)]
    head += [*(["UNPRICED"] if has["unpriced_ms"] else []), "COST", *(["DBU"] if has["dbu_micros"] else [])]
    rows = [[*head, "BUSY", "IDLE"]]
    unit = _unit(view, ["unpriced_ms", *(name for _, name in segments)])
    exact = is_any_below_cent(group.amounts.micros for group in shown)
    for group in shown:
        amounts = group.amounts
        row = [*(_cell(part) for part in group.key or ("all",)), f"{amounts.runs:,}"]
        row += [usage_report.time_in(unit, getattr(amounts, name)) for _, name in segments]
        row += [usage_report.time_in(unit, amounts.unpriced_ms)] if has["unpriced_ms"] else []
        row += [_cost(group, exact=exact), *([usage_report.decimal(amounts.dbu_micros)] if has["dbu_micros"] else [])]
        rows.append([*row, _percent(amounts.busy), _percent(amounts.idle)])
    dates = f"{calendars.format_day(view.from_day)} to {calendars.format_day(view.until_day - 1)}, UTC"
    waiting = f"QUEUED: {unit.name} of waiting time, other columns: " if has["queued_ms"] else ""
    note = f"{dates}; {waiting}{_device_unit(view)}-{unit.name}"
    return [*columns(rows), note, *_remarks(view), *(FORMULAS if has["observed_ms"] or has["idle_ms"] else ())]


def _chargeback_lines(view: UsageView) -> list[str]:
    shares = usage_report.chargeback(view.groups)
    if not shares:
        return ["no usage is visible to you in this month"]
    unit = _unit(view, _OF_SHARES)
    rows = [["WHO", "", "RUNS", "USED", "BILLED", "UNPRICED", "COST", "PART"]]
    exact = is_any_below_cent(group.amounts.micros for group in (*(share.group for share in shares), *view.totals))
    for share in shares:
        amounts = share.group.amounts
        used = [usage_report.time_in(unit, getattr(amounts, name)) for name in _OF_SHARES]
        who = "team" if share.is_team else "user"
        cost = _cost(share.group, exact=exact)
        part = "-" if share.part is None else f"{share.part // 100}.{share.part % 100:02d} %"
        rows.append([_cell(share.name), who, f"{amounts.runs:,}", *used, cost, part])
    for total in view.totals:
        amounts = total.amounts
        used = [usage_report.time_in(unit, getattr(amounts, name)) for name in _OF_SHARES]
        cost = _cost(total, exact=exact)
        rows.append(["all", "", f"{amounts.runs:,}", *used, cost, "100.00 %" if amounts.micros else "-"])
    first, last = calendars.format_day(view.from_day), calendars.format_day(view.until_day - 1)
    dates = f"{first} to {last}, UTC; {_device_unit(view)}-{unit.name}"
    return [*columns(rows), dates, *_remarks(view)]


def _remarks(view: UsageView) -> list[str]:
    """Return remarks about omitted rows, missing prices, provisional amounts and running attempts."""
    found = []
    word = _device_unit(view)
    shown = {total.currency: total.amounts for total in usage_report.totals(view.groups)}
    for total in view.totals if view.is_cut else ():
        part = shown.get(total.currency, Amounts())
        rest_ms = total.amounts.gpu_ms - part.gpu_ms
        money = (total.amounts.micros or 0) - (part.micros or 0)
        used = f"{format_gpu_ms(rest_ms, unit=word)} for {format_micros(money, total.currency)}"
        found.append(f"the report omits rows with {used}. Increase --limit to include more rows")
    for total in view.totals:
        amounts = total.amounts
        if amounts.unpriced_ms:
            used = format_gpu_ms(amounts.unpriced_ms, unit=word)
            found.append(f"{used} have no price and no cost. Set a price for later attempts with `sgpu price set`")
        if amounts.provisional_ms:
            used = format_gpu_ms(amounts.provisional_ms, unit=word)
            found.append(
                f"{used} are provisional, because unreachable nodes have not reported the end of their attempts"
            )
        if amounts.going_ms:
            used = format_gpu_ms(amounts.going_ms, unit=word)
            found.append(f"{used} belong to running attempts, which are not in the ledger yet")
    if view.is_going_cut:
        found.append(
            f"the report omits the usage of some running attempts, because more than {view.going} attempts are running"
        )
    return found


def _device_unit(view: UsageView) -> str:
    """Return the device kind in the report's totals: GPUs, CPU slots, or both."""
    if "gpu_type" not in view.by or view.is_cut:
        return time_unit()
    return time_unit(group.key[view.by.index("gpu_type")] for group in view.groups)


def _report_json(view: UsageView) -> dict[str, object]:
    return {
        "from": calendars.format_day(view.from_day),
        "to": calendars.format_day(view.until_day - 1),
        "totals": [usage_table.amounts_of(total) for total in view.totals],
        "is_cut": view.is_cut,
        "remarks": _remarks(view),
        "formulas": FORMULAS,
    }


def _unit(view: UsageView, names: Sequence[str]) -> UsageUnit:
    return usage_report.unit_for(
        max((getattr(total.amounts, name) for total in view.totals for name in names), default=0)
    )


def _cost(group: ReportRow, *, exact: bool) -> str:
    if group.amounts.micros is None:
        return "unpriced" if group.amounts.billed_ms else "-"
    return format_micros(group.amounts.micros, group.currency, exact=exact)


def _cell(text: str) -> str:
    """Return a user-given name as a table cell without control characters, such as line breaks in tags."""
    clean = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return clean or "-"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


AT_ONCE = 10_000
"""Number of rows per Parquet row group. The Parquet writer keeps one row group in memory."""


def put(table: UsageTable, path: Path | None) -> None:
    """Write a report as Parquet to a file, or print the report as CSV."""
    if path is None:
        _say_csv(table.names, iter(table.lines))
        return
    schema = usage_table.arrow_schema(_pyarrow(), table)
    _write_parquet(path, schema, [table.rows()])


def put_records(records: Iterator[BillingRow], path: Path | None) -> None:
    """Write ledger rows with billing columns to a Parquet file, or print CSV with JSON cells."""
    if path is None:
        _say_csv(BillingRow.__struct_fields__, (usage_table.text_cells(record) for record in records))
        return
    rows = (_parquet_row(record) for record in records)
    _write_parquet(path, _records_schema(_pyarrow()), iter(lambda: list(islice(rows, AT_ONCE)), []))


def put_prices(found: ListPrices, *, as_json: bool) -> None:
    """Print the price book with billing columns, as CSV with JSON cells or as JSON lines."""
    if as_json:
        for price in found.prices:
            say(msgspec.json.encode(price).decode())
    else:
        _say_csv(ListPrice.__struct_fields__, (usage_table.text_cells(price) for price in found.prices))
    if found.is_cut:
        say("sgpu: the price list is incomplete, because the server has too many prices", err=True)


# --- CSV --------------------------------------------------------------------------------------------------------------


def _say_csv(names: Sequence[str], lines: Iterator[Sequence[Any]]) -> None:
    say(_csv_line(names))
    for line in lines:
        say(_csv_line(line))


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(["" if cell is None else cell for cell in cells])
    return text.getvalue()


# --- Parquet ----------------------------------------------------------------------------------------------------------


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        message = "--parquet needs PyArrow, which is not installed"
        raise ServerlessGpuError(message, hint="run pip install 'serverless-gpu[simulate]', or use --csv") from None
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
        raise StorageError(message, hint="choose a file in a directory that you can write to") from None
    say(f"sgpu: {path}: {count:,} rows", err=True)
