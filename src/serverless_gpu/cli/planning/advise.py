"""`sgpu advise`: recommends how many GPUs to reserve, and lists runs that underused their GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_utc
from serverless_gpu.cli.amounts import duration_s, micros
from serverless_gpu.cli.completion import complete_pool, complete_team
from serverless_gpu.cli.output import JsonType, columns, json_option, print_json, say
from serverless_gpu.cli.planning.advice_sources import (
    GpuTypeUses,
    PastUse,
    PriceBook,
    UseFilter,
    book_of_home,
    book_of_server,
    chosen,
    of_home,
    of_server,
    of_trace,
    remarks,
)
from serverless_gpu.cli.planning.pictures import load_drawing, write_picture
from serverless_gpu.cli.runs.run_location import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import ServerNotConfigured
from serverless_gpu.model.billing.advice import (
    Advice,
    GpuRates,
    Mix,
    OversizedRuns,
    Slot,
    advise,
    curve_of,
    formulas,
    formulas_of_queues,
    formulas_of_runs,
    oversized_runs,
    percent,
    price,
)
from serverless_gpu.model.hardware import GpuType, canonical, time_unit
from serverless_gpu.node.base.configuration import Configuration, read_configuration
from serverless_gpu.replay import read_trace
from serverless_gpu.replay.queue_cost import QueueOutcome, queues
from serverless_gpu.units import MICROS_PER_UNIT, format_duration_ms, format_gpu_ms, format_micros, is_any_below_cent

_PRICE_MAX = 1_000_000
_HOURS_PER_YEAR = 8766  # A year of 365.25 days.
SLOTS_MAX = 12
_RUNS_MAX = 20
_NAME_MAX = 40
_CALENDAR_NS = 315_532_800 * 1_000_000_000  # 1980


@click.command("advise")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--local", is_flag=True, help="Base the advice on this machine's runs even if a server is configured.")
@click.option("--last", default="30d", show_default=True, metavar="AGE", help="Length of the analysed time range.")
@click.option("--team", default="", help="Analyse only runs of this team.", shell_complete=complete_team)
@click.option("--pool", default="", help="Analyse only runs in this pool.", shell_complete=complete_pool)
@click.option("--gpu-type", default="", help="GPU type to analyse (default: the most used GPU type).")
@click.option(
    "--reserved", metavar="PRICE|POOL", help="Price of a reserved GPU-hour, or the name of a pool with this price."
)
@click.option(
    "--on-demand",
    metavar="PRICE|POOL",
    help="Price of an on-demand GPU-hour, or the name of a pool with this price (default: the price for all pools).",
)
@click.option("--buy", type=float, metavar="PRICE", help="Purchase price of a GPU, as an alternative to --reserved.")
@click.option("--years", type=float, default=4, show_default=True, help="Service life of a purchased GPU in years.")
@click.option("--running", type=float, default=0.0, metavar="PRICE", help="Running cost of a purchased GPU per hour.")
@click.option("--have", type=click.IntRange(0, 1_000_000), default=0, show_default=True, help="GPUs reserved today.")
@click.option("--waiting", metavar="PRICE", help="Cost of waiting one hour for one GPU.")
@click.option("--explain", is_flag=True, help="Print the formula behind each number.")
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a chart of the advice to a .png, .svg or .pdf file.",
)
@json_option(JsonType("cli.json_types:Advice"))
def advise_command(**options: Any) -> None:
    """Recommend how many GPUs to reserve.

    The command also lists runs that underused their GPUs. The recommendation is based on usage in the server's ledger.
    Without a server, the recommendation is based on this machine's runs. TRACE is a trace file in a format that `sgpu
    simulate` accepts.
    """
    drawing = None if options["png"] is None else load_drawing(options["png"], "serverless_gpu.replay.charts")
    configuration = read_configuration(this_home())
    wanted = _parse_filter(options)
    past, book = _read_use(options, wanted, configuration)
    report = _report(past, chosen(past, wanted), book, options, configuration.types)
    if options["as_json"]:
        print_json(as_json(report))
    else:
        for line in lines(report, explain=options["explain"]):
            say(line)
    path, advice = options["png"], report.advice
    if drawing is not None and advice is None:
        say(f"sgpu: {path} was not written: {report.why_not}", err=True)
    elif drawing is not None and advice is not None:
        write_picture(lambda: drawing.draw_advice(advice, title_of(report), path), path)


def _parse_filter(options: Mapping[str, Any]) -> UseFilter:
    now_ns = SystemClock().wall_ns()
    last_s = duration_s("--last", options["last"])
    if not last_s:
        raise click.BadParameter("the time range must be longer than 0", param_hint="--last")
    asked = {name: options[name] for name in ("team", "pool", "gpu_type")}
    return UseFilter(start_ns=now_ns - round(last_s) * 1_000_000_000, end_ns=now_ns, **asked)


def _read_use(options: Mapping[str, Any], wanted: UseFilter, configuration: Configuration) -> tuple[PastUse, PriceBook]:
    book = book_of_home(configuration)
    if options["trace"] is not None:
        return of_trace(read_trace(options["trace"]), wanted), book
    if options["local"] or not _has_server():
        return of_home(this_home(), wanted), book
    with server() as connection:
        return of_server(connection, wanted), book_of_server(connection)


def _has_server() -> bool:
    """Return True if a server is configured, even if the server is unreachable."""
    try:
        find_profile(this_home().root, os.environ)
    except ServerNotConfigured:
        return False
    return True


def _report(
    past: PastUse, of: tuple[str, GpuTypeUses], book: PriceBook, options: Mapping[str, Any], own: tuple[GpuType, ...]
) -> AdviceReport:
    gpu_type, kind = of
    curve = curve_of(kind.uses, past.start_ns, past.end_ns)
    rates, why_not = _rates(options, book, gpu_type, kind.billed)
    advice = None if rates is None else advise(curve, rates, gpu_type=gpu_type, now=options["have"])
    waiting = None if options["waiting"] is None else micros("--waiting", options["waiting"], most=_PRICE_MAX)
    found: tuple[QueueOutcome, ...] = ()
    if advice is not None:  # Simulate pools of the advised, current and mean size.
        mean = -(-curve.used_ns // curve.span_ns)
        sizes = {advice.best.slots, advice.now.slots, mean, (mean + curve.peak) // 2}
        found = queues(kind.uses, advice.rates, sizes, waiting=waiting)
    prices = book.any_pool()
    if rates is not None:
        prices[canonical(gpu_type, own)] = rates.on_demand
    return AdviceReport(
        past=past,
        gpu_type=gpu_type,
        kind=kind,
        advice=advice,
        why_not=why_not,
        queues=found,
        runs=oversized_runs(past.ran, prices, own),
        waiting=waiting,
        currency=book.currency,
    )


# --- prices -----------------------------------------------------------------------------------------------------------


def _rates(options: Mapping[str, Any], book: PriceBook, gpu_type: str, billed: Fraction) -> tuple[GpuRates | None, str]:
    """Return the reserved and on-demand prices, or None and a message that names the missing price."""
    if options["buy"] is not None and options["reserved"] is not None:
        raise click.UsageError("specify only one of --buy and --reserved")
    on_demand = _price("--on-demand", options["on_demand"] or "", book, gpu_type)
    reserved = _purchase_rate(options) if options["buy"] is not None else None
    if reserved is None and options["reserved"] is not None:
        reserved = _price("--reserved", options["reserved"], book, gpu_type)
    if on_demand is None:
        return None, (
            f"{gpu_type} has no on-demand price. Add `--on-demand 2.99`, or run `sgpu price set {gpu_type} 2.99`"
        )
    if billed == 0:
        return None, f"do not reserve any GPUs, because the server billed no usage of {gpu_type}"
    if on_demand == 0:
        return None, f"{gpu_type} costs nothing on demand, so do not reserve any GPUs"
    if reserved is None:
        return None, (
            "the price of a reserved GPU is unknown. Add `--reserved 1.90`, `--reserved POOL` or `--buy 30000`"
        )
    return GpuRates(reserved=reserved, on_demand=on_demand, currency=book.currency, billed=billed), ""


def _price(option: str, text: str, book: PriceBook, gpu_type: str) -> int | None:
    """Return the price from an option value, which is an amount or a pool name."""
    if text[:1] in ("", "-") or text[:1].isdigit() or text[:1] == ".":
        return micros(option, text, most=_PRICE_MAX) if text else book.price(gpu_type)
    found = book.price(gpu_type, text)
    if found is None:
        raise click.BadParameter(
            f"{text!r} is neither an amount nor the name of a pool that has a price for {gpu_type}", param_hint=option
        )
    return found


def _purchase_rate(options: Mapping[str, Any]) -> int:
    """Return the hourly cost of a purchased GPU: hourly depreciation plus running cost."""
    buy, years, running = (float(options[name]) for name in ("buy", "years", "running"))
    if not (0 <= buy <= 1e9 and 0.1 <= years <= 100 and 0 <= running <= _PRICE_MAX):
        raise click.UsageError("--buy and --running must be at least 0, and --years must be between 0.1 and 100")
    return round((buy / (years * _HOURS_PER_YEAR) + running) * MICROS_PER_UNIT)


class AdviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """All results of `sgpu advise`."""

    past: PastUse
    gpu_type: str
    kind: GpuTypeUses
    advice: Advice | None  # Reservation advice; None if a price is missing (`why_not`).
    why_not: str
    queues: tuple[QueueOutcome, ...]  # Simulation results of pools without on-demand GPUs.
    runs: tuple[OversizedRuns, ...]  # Runs that underused their GPUs.
    waiting: int | None  # Price in micros of waiting one hour for one GPU; None if not set.
    currency: str


def lines(report: AdviceReport, *, explain: bool) -> Iterator[str]:
    """Yield the report's text lines. Include the formulas if `explain` is set."""
    yield from _head(report)
    if report.advice is not None:
        yield from ("", *_mixes(report.advice))
        yield from ("", *_slots(report.advice))
        yield from ("", *_changes(report.advice))
    else:
        yield from ("", report.why_not)
    if report.queues:
        yield from ("", "waiting times without on-demand GPUs:", *_queues(report))
    yield from ("", *_runs(report))
    if explain:
        yield from ("", "formulas:", *(f"  {name}: {text}" for name, text in _formulas(report).items()))


def as_json(report: AdviceReport) -> dict[str, object]:
    """Return the report as JSON values, in micros, device-milliseconds and percent."""
    advice, past = report.advice, report.past
    queues = []
    for queue in report.queues:
        parts = msgspec.structs.asdict(queue)
        queues.append({"waited_gpu_ms": parts.pop("waited_ns") // 1_000_000} | parts)
    found: dict[str, object] = {
        "source": past.source,
        "from": format_utc(past.start_ns),
        "to": format_utc(past.end_ns),
        "left_out": past.remarks,
        "gpu_type": report.gpu_type,
        "attempts": past.attempts,
        "gpu_ms": report.kind.gpu_ms,
        "unpriced_ms": report.kind.unpriced_ms,
        "charged_micros": report.kind.micros,
        "waited_gpu_ms": report.kind.waited_ns // 1_000_000,
        "currency": report.currency,
        "advice": None,
        "queues": queues,
        "runs": [msgspec.structs.asdict(run) | {"advice": run.text()} for run in report.runs],
        "formulas": _formulas(report),
    }
    if advice is not None:
        found["advice"] = {
            "reserve": advice.best.slots,
            "break_even_duty_percent": advice.duty_percent,
            "reserved_micros_per_hour": advice.rates.reserved,
            "on_demand_micros_per_hour": advice.rates.on_demand,
            "billed_percent": float(100 * advice.rates.billed),
            "span_ms": advice.curve.span_ns // 1_000_000,
            "used_gpu_ms": advice.curve.used_ns // 1_000_000,
            "peak": advice.curve.peak,
            **{name: _mix_json(getattr(advice, name)) for name in ("best", "now", "none", "all_reserved")},
            "slots": msgspec.to_builtins(advice.slots),
            "changed": [
                {"what": each.what, "best": _mix_json(each.best), "advised": _mix_json(each.advised)}
                for each in advice.changed
            ],
        }
    return found


def title_of(report: AdviceReport) -> str:
    """Return the title of the report's chart."""
    return f"{report.gpu_type}: {report.past.source}, {_span(report.past)}"


# --- text for the terminal --------------------------------------------------------------------------------------------


def _head(report: AdviceReport) -> Iterator[str]:
    past, kind, advice = report.past, report.kind, report.advice
    yield f"{report.gpu_type}: {past.source}, {_span(past)}"
    yield from remarks(past)
    others = sorted(((each.gpu_ms, name) for name, each in past.kinds.items() if each is not kind), reverse=True)
    named = ", ".join(
        f"{name} {format_gpu_ms(gpu_ms, unit=time_unit([name]))}"
        for gpu_ms, name in others[:4]
        if name != report.gpu_type
    )
    if named:
        yield f"other GPU types with usage: {named} (choose a GPU type with --gpu-type)"
    word = time_unit([report.gpu_type])
    charged = f", charged {format_micros(kind.micros, report.currency)}" if kind.micros else ""
    unpriced = f", {format_gpu_ms(kind.unpriced_ms, unit=word)} unpriced" if kind.unpriced_ms and charged else ""
    waited = f"; runs waited {format_gpu_ms(kind.waited_ns // 1_000_000, unit=word)}" if kind.waited_ns else ""
    yield f"used: {format_gpu_ms(kind.gpu_ms, unit=word)}{charged}{unpriced}{waited}"
    if advice is None:
        return
    curve, rates = advice.curve, advice.rates
    yield f"concurrent demand: {curve.used_ns / curve.span_ns:.1f} GPUs on average, {curve.peak} at most"
    yield (
        f"reserved {price(rates.reserved)}, on demand {price(rates.on_demand)} {rates.currency} per GPU-hour: a "
        f"reserved GPU pays off if runs use the GPU for at least {advice.duty_percent:.1f} % of the time"
    )
    if rates.billed != 1:
        yield f"billed on demand: {percent(rates.billed)} of the held GPU time"
    saves = advice.now.micros - advice.best.micros
    best = f"reserve {advice.best.slots}" if advice.best.slots else "reserve none"
    gain = f": {format_micros(saves, rates.currency)} less than today" if saves > 0 else ""
    yield best + (gain or ", as today" if advice.best.slots == advice.now.slots else gain)


def _mixes(advice: Advice) -> list[str]:
    currency = advice.rates.currency
    named: dict[int, list[str]] = {}
    for name, each in (
        ("advised", advice.best),
        ("today", advice.now),
        ("all on demand", advice.none),
        ("enough for the peak", advice.all_reserved),
    ):
        named.setdefault(each.slots, []).append(name)
    mixes = {each.slots: each for each in (advice.best, advice.now, advice.none, advice.all_reserved)}
    rows = [["", "GPUS", "RESERVED", "OF THAT IDLE", "ON DEMAND", "TOGETHER", "DUTY"]]
    exact = is_any_below_cent(micros for each in mixes.values() for micros in _money(each))
    for slots in sorted(mixes):
        each = mixes[slots]
        duty = "-" if each.duty_percent is None else f"{each.duty_percent:.1f} %"
        shown = (format_micros(micros, currency, exact=exact) for micros in _money(each))
        rows.append([", ".join(named[slots]), str(slots), *shown, duty])
    return columns(rows)


def _money(each: Mix) -> tuple[int, ...]:
    return (each.reserved_micros, each.idle_micros, each.on_demand_micros, each.micros)


def _slots(advice: Advice) -> list[str]:
    rows = [["SLOT", "WANTED", "PAYS"]]
    for slot in _select_slots(advice.slots):
        number = str(slot.first) if slot.first == slot.last else f"{slot.first}–{slot.last}"
        rows.append([number, f"{slot.share_percent:.1f} %", "yes" if slot.pays else "no"])
    return columns(rows)


def _select_slots(slots: Sequence[Slot]) -> list[Slot]:
    """Return the reservation slots to print, mainly those near the advised number."""
    if len(slots) <= SLOTS_MAX:
        return list(slots)
    turn = next((place for place, slot in enumerate(slots) if not slot.pays), len(slots) - 1)
    places = {0, len(slots) - 1, turn, max(0, turn - 1)}
    spread = (round(step * (len(slots) - 1) / (SLOTS_MAX - 1)) for step in range(SLOTS_MAX))
    for place in sorted(spread, key=lambda place: abs(place - turn)):
        if len(places) < SLOTS_MAX:
            places.add(place)
    return [slots[place] for place in sorted(places)]


def _changes(advice: Advice) -> list[str]:
    currency = advice.rates.currency
    rows = [["IF", "RESERVE", "COSTS", f"WITH {advice.best.slots} RESERVED"]]
    exact = is_any_below_cent(one.micros for each in advice.changed for one in (each.best, each.advised))
    for each in advice.changed:
        costs = [format_micros(one.micros, currency, exact=exact) for one in (each.best, each.advised)]
        rows.append([each.what, str(each.best.slots), *costs])
    return columns(rows)


def _queues(report: AdviceReport) -> list[str]:
    rows = [
        [
            "GPUS",
            "MEAN WAIT",
            "95 % WAITED LESS",
            "GPU TIME WAITED",
            "WAITING COSTS",
            "ON DEMAND INSTEAD",
            "WORTH IT BELOW",
        ]
    ]
    for queue in report.queues:
        waits = (format_duration_ms(round(1000 * each)) for each in (queue.mean_wait_s, queue.p95_wait_s))
        costs = "unpriced" if queue.waiting_micros is None else format_micros(queue.waiting_micros, report.currency)
        worth = "-" if queue.worth_micros is None else f"{price(queue.worth_micros)} per GPU-hour"
        instead = format_micros(queue.avoided_micros, report.currency)
        waited = format_gpu_ms(queue.waited_ns // 1_000_000, unit=time_unit([report.gpu_type]))
        rows.append([str(queue.slots), *waits, waited, costs, instead, worth])
    replayed = max(queue.runs + queue.too_large for queue in report.queues)
    shown = columns(rows)
    if any(queue.too_large for queue in report.queues):
        parts = (f"{queue.too_large:,} with {queue.slots}" for queue in report.queues if queue.too_large)
        shown.append(f"omitted runs that need more GPUs than the pool has: {', '.join(parts)}")
    if replayed < len(report.kind.uses):
        shown.append(f"replayed: the latest {replayed:,} of {len(report.kind.uses):,} usage periods")
    return shown


def _runs(report: AdviceReport) -> list[str]:
    if not report.past.ran:
        return ["runs: no run has GPU telemetry"]
    if not report.runs:
        return ["runs: no run with 10 minutes of telemetry underused its GPUs significantly"]
    rows = [["SAVES", "COST", "USED", "BUSY", "RUN", "ON", "ADVICE"]]
    for run in report.runs[:_RUNS_MAX]:
        money = (
            "unpriced" if each is None else format_micros(each, report.currency)
            for each in (run.saves_micros, run.micros)
        )
        name = "/".join(part for part in (run.owner, run.name) if part)
        name = name if len(name) <= _NAME_MAX else name[: _NAME_MAX - 1] + "…"
        used = format_gpu_ms(run.gpu_ms, unit=time_unit([run.gpu_type]))
        rows.append([*money, used, f"{run.busy_percent:.1f} %", f"{name} ({run.runs})", run.gpu_type, run.text()])
    more = len(report.runs) - _RUNS_MAX
    head = "runs that underused their GPUs, by user and name:"
    return [head, *columns(rows), *([f"and {more:,} more runs (--json lists all runs)"] if more > 0 else [])]


def _formulas(report: AdviceReport) -> dict[str, str]:
    found = {} if report.advice is None else formulas(report.advice)
    if report.queues:
        found |= formulas_of_queues()
    return found | formulas_of_runs()


def _span(past: PastUse) -> str:
    length = format_duration_ms((past.end_ns - past.start_ns) // 1_000_000)
    if past.start_ns < _CALENDAR_NS:  # A trace's timestamps may start near 0.
        return length
    return f"{format_utc(past.start_ns)[:16]} to {format_utc(past.end_ns)[:16]} UTC ({length})"


# --- machines ---------------------------------------------------------------------------------------------------------


def _mix_json(each: Mix) -> dict[str, object]:
    return {
        "slots": each.slots,
        "micros": each.micros,
        "reserved_micros": each.reserved_micros,
        "idle_micros": each.idle_micros,
        "idle_gpu_ms": each.idle_ns // 1_000_000,
        "on_demand_micros": each.on_demand_micros,
        "on_demand_gpu_ms": each.on_demand_ns // 1_000_000,
        "duty_percent": each.duty_percent,
    }
