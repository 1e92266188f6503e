"""`sgpu advise`: how many GPUs to reserve, or to own, and which runs had more GPU than they used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.amounts import duration_s, micros
from serverless_gpu.cli.output import print_json, say
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
)
from serverless_gpu.cli.planning.advice_tables import AdviceReport, as_json, lines, title_of
from serverless_gpu.cli.planning.pictures import drawing_room, written
from serverless_gpu.cli.runs.run_choice import this_home
from serverless_gpu.cli.server_connection import server
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import ServerNotConfigured
from serverless_gpu.model.billing.advice import Advice, Curve, GpuRates, advise, curve_of
from serverless_gpu.model.billing.oversized_runs import unneeded
from serverless_gpu.model.hardware import GpuType, canonical
from serverless_gpu.node.base.configuration import Configuration, read_configuration
from serverless_gpu.replay import read_trace
from serverless_gpu.replay.queue_cost import queues
from serverless_gpu.units import MICROS_PER_UNIT

_PRICE_MAX = 1_000_000
_HOURS_PER_YEAR = 8766  # of 365.25 days


@click.command("advise")
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--local", is_flag=True, help="Runs of this machine, though there is a server.")
@click.option("--last", default="30d", show_default=True, metavar="AGE", help="How far to look back.")
@click.option("--team", default="", help="Only runs of this team.")
@click.option("--pool", default="", help="Only runs in this pool.")
@click.option("--gpu-type", default="", help="Which type; the one most used unless told.")
@click.option("--reserved", metavar="PRICE|POOL", help="Price of a reserved GPU-hour, or a pool whose price it is.")
@click.option("--on-demand", metavar="PRICE|POOL", help="Price of a GPU-hour on demand; that of any pool unless told.")
@click.option("--buy", type=float, metavar="PRICE", help="Price of buying a GPU, in place of --reserved.")
@click.option("--years", type=float, default=4, show_default=True, help="For how long a bought GPU is used.")
@click.option("--running", type=float, default=0.0, metavar="PRICE", help="What a bought GPU costs for each hour.")
@click.option("--have", type=click.IntRange(0, 1_000_000), default=0, show_default=True, help="GPUs reserved today.")
@click.option("--waiting", metavar="PRICE", help="What it costs when a run waits one hour for one GPU.")
@click.option("--explain", is_flag=True, help="Print the formula of each number.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Write a picture of it: .png, .svg, .pdf.")
@click.option("--json", "as_json_", is_flag=True, help="Print JSON.")
def advise_command(**options: Any) -> None:
    """Say how many GPUs to reserve, and which runs had more GPU than they used.

    From the server's ledger, as far as you may see it; without a server, from this machine's runs. TRACE is a file as
    `sgpu simulate` reads it.
    """
    drawing = None if options["png"] is None else drawing_room(options["png"], "serverless_gpu.replay.advice_figure")
    configuration = read_configuration(this_home())
    wanted = _wanted(options)
    past, book = _known(options, wanted, configuration)
    report = _report(past, chosen(past, wanted), book, options, configuration.types)
    if options["as_json_"]:
        print_json(as_json(report))
    else:
        for line in lines(report, explain=options["explain"]):
            say(line)
    path, advice = options["png"], report.advice
    if drawing is not None and advice is None:
        say(f"{path} was not written: {report.why_not}", err=True)
    elif drawing is not None and advice is not None:
        written(lambda: drawing.draw(advice, title_of(report), path), path)


def _wanted(options: Mapping[str, Any]) -> UseFilter:
    now_ns = SystemClock().wall_ns()
    last_s = duration_s("--last", options["last"])
    if not last_s:
        raise click.BadParameter("more than no time is needed", param_hint="--last")
    asked = {name: options[name] for name in ("team", "pool", "gpu_type")}
    return UseFilter(start_ns=now_ns - round(last_s) * 1_000_000_000, end_ns=now_ns, **asked)


def _known(options: Mapping[str, Any], wanted: UseFilter, configuration: Configuration) -> tuple[PastUse, PriceBook]:
    book = book_of_home(configuration)
    if options["trace"] is not None:
        return of_trace(read_trace(options["trace"]), wanted), book
    if options["local"] or not _has_server():
        return of_home(this_home(), wanted), book
    with server() as connection:
        return of_server(connection, wanted), book_of_server(connection)


def _has_server() -> bool:
    """Return whether a server is configured; one that cannot be reached is, too."""
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
    found = () if advice is None else queues(kind.uses, advice.rates, _sizes(advice, curve), waiting=waiting)
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
        runs=unneeded(past.ran, prices, own),
        waiting=waiting,
        currency=book.currency,
    )


def _sizes(advice: Advice, curve: Curve) -> set[int]:
    """Return the pools to replay: the advised one, the current one, and one for the mean demand."""
    mean = -(-curve.used_ns // curve.span_ns)
    return {advice.best.slots, advice.now.slots, mean, (mean + curve.peak) // 2}


# --- prices -----------------------------------------------------------------------------------------------------------


def _rates(options: Mapping[str, Any], book: PriceBook, gpu_type: str, billed: Fraction) -> tuple[GpuRates | None, str]:
    """Return both prices; or None, and which is missing."""
    if options["buy"] is not None and options["reserved"] is not None:
        raise click.UsageError("--buy is in place of --reserved")
    on_demand = _price("--on-demand", options["on_demand"] or "", book, gpu_type)
    reserved = _bought(options) if options["buy"] is not None else None
    if reserved is None and options["reserved"] is not None:
        reserved = _price("--reserved", options["reserved"], book, gpu_type)
    if on_demand is None:
        return None, (
            f"{gpu_type} has no price on demand, so nothing can be said of reserving any; "
            f"`--on-demand 2.99`, or `sgpu price set {gpu_type} 2.99`"
        )
    if billed == 0:
        return None, f"nothing that {gpu_type} did was billed, so it costs nothing on demand: reserve none"
    if on_demand == 0:
        return None, f"{gpu_type} costs nothing on demand: reserve none"
    if reserved is None:
        return None, "what a reserved GPU costs is not known: `--reserved 1.90`, `--reserved POOL` or `--buy 30000`"
    return GpuRates(reserved=reserved, on_demand=on_demand, currency=book.currency, billed=billed), ""


def _price(option: str, text: str, book: PriceBook, gpu_type: str) -> int | None:
    """Return a typed price: an amount, or the pool that has the price."""
    if text[:1] in ("", "-") or text[:1].isdigit() or text[:1] == ".":
        return micros(option, text, most=_PRICE_MAX) if text else book.price(gpu_type)
    found = book.price(gpu_type, text)
    if found is None:
        raise click.BadParameter(
            f"{text!r} is no amount, and no pool in which {gpu_type} has a price of its own", param_hint=option
        )
    return found


def _bought(options: Mapping[str, Any]) -> int:
    """Return what an hour of a bought GPU costs: its price over its life, and what it takes to run it."""
    buy, years, running = (float(options[name]) for name in ("buy", "years", "running"))
    if not (0 <= buy <= 1e9 and 0.1 <= years <= 100 and 0 <= running <= _PRICE_MAX):
        raise click.UsageError("--buy and --running are prices from 0 on, --years is 0.1 to 100")
    return round((buy / (years * _HOURS_PER_YEAR) + running) * MICROS_PER_UNIT)
