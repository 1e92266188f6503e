"""`sgpu price`: sets hourly prices of devices, cores and memory, by pool and start time."""

from __future__ import annotations

from urllib.parse import quote

import click

from serverless_gpu.ambient import SystemClock, format_utc
from serverless_gpu.cli.amounts import micros, moment_ns
from serverless_gpu.cli.completion import complete_pool
from serverless_gpu.cli.money import usage
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.server_connection import server
from serverless_gpu.model.billing.pricing import MICROS_MAX
from serverless_gpu.units import MICROS_PER_UNIT
from serverless_gpu.wire.billing import ListPrices, PriceList, PriceRequest, PriceSet, PriceView

_UNITS = {"core": "core", "memory": "GiB"}


@click.group()
def price() -> None:
    """List, set and end prices.

    Resources have no default price. The server reports usage of a resource without a price as unpriced.
    """


@price.command("list")
@click.option("--all", "past", is_flag=True, help="Also list ended prices.")
@wide_option
@json_option(PriceList)
@click.option(
    "--records",
    is_flag=True,
    help="Print all prices as CSV with the columns of Databricks' system.billing.list_prices.",
)
def list_prices(past: bool, records: bool, wide: bool, as_json: bool) -> None:
    """List current and planned prices in UTC."""
    if records:
        with server() as connection:
            usage.put_prices(connection.ask("GET", "/usage/prices", answer=ListPrices), as_json=as_json)
        return
    with server() as connection:
        found = connection.ask("GET", "/prices", answer=PriceList, query={"all": f"{past}".lower()})
    if as_json:
        print_json(found)
        return
    if not found.prices:
        say("no price is set, so all usage is unpriced. Set a price, for example: sgpu price set H100 2.99")
        return
    rows = [["WHAT", "POOL", "PRICE", "DBU", "FROM", "UNTIL", "STATE"]]
    for each in found.prices:
        amount = f"{_decimal(each.micros_per_hour)} {found.currency}/h"
        dbu = _decimal(each.dbu_micros_per_hour) if each.dbu_micros_per_hour else "-"
        until = "-" if each.until_ns is None else format_utc(each.until_ns)
        state = "in force" if each.in_force else "planned" if each.from_ns > SystemClock().wall_ns() else "ended"
        rows.append([each.resource, each.pool or "every", amount, dbu, format_utc(each.from_ns), until, state])
    print_table(rows[0], rows[1:], wide=wide)


@price.command("set")
@click.argument("resource")
@click.argument("amount", required=False)
@click.option(
    "--pool",
    default="",
    metavar="NAME",
    help="Set the price in this pool instead of the price for all pools.",
    shell_complete=complete_pool,
)
@click.option(
    "--from",
    "since",
    metavar="TIME",
    help="Start time of the price in UTC, for example 2026-12-01T08:00 (default: now).",
)
@click.option("--dbu-per-gpu-hour", metavar="NUMBER", help="Number of DBUs that one device uses per hour.")
@click.option("--usd-per-dbu", metavar="AMOUNT", help="Price of one DBU in the server's currency.")
@json_option(PriceSet)
def set_price(
    resource: str,
    amount: str | None,
    pool: str,
    since: str | None,
    as_json: bool,
    **dbu: str | None,
) -> None:
    """Set the hourly price of a resource.

    RESOURCE is a GPU type (H100), `core` or `memory` (one GiB). The price applies to attempts that start after the
    price's start time. The new price replaces the previous price. Attempts that started earlier keep the previous
    price. The price of a GPU family (H100) also applies to the family's GPU types without a price.
    """
    dbu_per_gpu_hour, usd_per_dbu = dbu["dbu_per_gpu_hour"], dbu["usd_per_dbu"]
    made = (dbu_per_gpu_hour, usd_per_dbu)
    if amount is not None and made != (None, None):
        raise click.UsageError("specify either AMOUNT per hour, or --dbu-per-gpu-hour and --usd-per-dbu")
    if amount is None and None in made:
        raise click.UsageError("the price is missing. Specify AMOUNT per hour, or --dbu-per-gpu-hour and --usd-per-dbu")
    asked = PriceRequest(
        micros_per_hour=_micros("AMOUNT", amount),
        dbu_micros_per_hour=_micros("--dbu-per-gpu-hour", dbu_per_gpu_hour),
        micros_per_dbu=_micros("--usd-per-dbu", usd_per_dbu),
        pool=pool,
        from_ns=None if since is None else moment_ns("--from", since),
    )
    with server() as connection:
        done = connection.ask("PUT", f"/prices/{quote(resource, safe='')}", asked, answer=PriceSet)
    _say(done, as_json=as_json)


@price.command("end")
@click.argument("resource")
@click.option(
    "--pool", default="", metavar="NAME", help="End only the price in this pool.", shell_complete=complete_pool
)
@click.option(
    "--at", "until", metavar="TIME", help="End time of the price in UTC, for example 2026-12-01T08:00 (default: now)."
)
@json_option(PriceSet)
def end_price(resource: str, pool: str, until: str | None, as_json: bool) -> None:
    """End a price.

    If a price for all pools exists, new attempts use it after the pool's own price ends. The command also withdraws
    planned prices of the resource.
    """
    query = {"pool": pool} if pool else {}
    until_ns = None if until is None else moment_ns("--at", until)
    if until_ns is not None:
        query["at_ns"] = str(until_ns)
    with server() as connection:
        done = connection.ask("DELETE", f"/prices/{quote(resource, safe='')}", answer=PriceSet, query=query)
    _say(done, as_json=as_json, until_ns=until_ns)


def _micros(option: str, text: str | None) -> int | None:
    return None if text is None else micros(option, text, most=MICROS_MAX // MICROS_PER_UNIT)


def _say(done: PriceSet, *, as_json: bool, until_ns: int | None = None) -> None:
    if as_json:
        print_json(done)
        return
    if done.price is not None:
        since = "" if done.price.in_force else f" from {format_utc(done.price.from_ns)}"
        say(f"{_text(done.price, done.currency)}{since}")
        if not done.is_known:
            say(f"note: neither the GPU catalogue nor any node has a GPU named {done.price.resource}")
    for each in done.ended:
        verb = "before it" if done.price is not None else "ended"
        if until_ns is not None:
            verb = (
                f"ends {format_utc(until_ns)}"
                if until_ns > SystemClock().wall_ns()
                else f"ended {format_utc(until_ns)}"
            )
        say(f"{verb}: {_text(each, done.currency)}, since {format_utc(each.from_ns)}")
    for each in done.withdrawn:
        say(f"withdrawn: {_text(each, done.currency)}, planned from {format_utc(each.from_ns)}")


def _text(view: PriceView, currency: str) -> str:
    """Return a price as text: ``H100 in pool lab: 2.99 USD per device and hour``."""
    where = f" in pool {view.pool}" if view.pool else ""
    made = f", {_decimal(view.dbu_micros_per_hour)} DBU" if view.dbu_micros_per_hour else ""
    unit = _UNITS.get(view.resource, "device")
    return f"{view.resource}{where}: {_decimal(view.micros_per_hour)} {currency} per {unit} and hour{made}"


def _decimal(micros_: int) -> str:
    """Return an amount in millionths as a decimal number with at least two decimal places."""
    whole, rest = divmod(micros_, MICROS_PER_UNIT)
    digits = f"{rest:06d}".rstrip("0")
    return f"{whole:,}.{digits.ljust(2, '0')}"
