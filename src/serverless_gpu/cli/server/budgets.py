"""`sgpu budget`: how much somebody may use in a day, week or month, and how much of it is used."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from urllib.parse import quote

import click

from serverless_gpu.ambient import format_soon
from serverless_gpu.cli.columns import columns
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.cli.server.reaching import server
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.budget import Period, ScopeKind
from serverless_gpu.units import MICROS_PER_UNIT, MS_PER_HOUR, format_gpu_ms, format_micros
from serverless_gpu.wire.budgets import BudgetList, BudgetRequest, BudgetView

_SCOPES: tuple[ScopeKind, ...] = ("user", "team", "pool", "policy", "tag")
_USD = "USD"


@click.group()
def budget() -> None:
    """List, make and delete budgets: money or GPU-hours per day, week or month."""


@budget.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_budgets(as_json: bool) -> None:
    """List budgets: what is used, what runs hold, where the period ends at this rate; and alarms of the last 7 days.

    HELD is what runs that go on will have used in a minute. FORECAST is used + use per day over the last seven days ×
    days left.
    """
    with server() as connection:
        found = connection.ask("GET", "/budgets", answer=BudgetList)
    if as_json:
        print_json(found)
        return
    if not found.budgets:
        say("there is no budget that you may see; sgpu budget set makes one")
    rows = [_row(each) for each in found.budgets]
    if rows:
        for line in columns([["BUDGET", "FOR", "PER", "USED", "OF", "", "HELD", "FORECAST", "AT 100 %"], *rows]):
            say(line)
    for each in found.budgets:
        if ";" in each.sentence:
            say(f"{each.name}: {each.sentence.partition('; ')[2]}")
    for alarm in found.alarms:
        say(f"alarm {format_soon(alarm.at_ns)}: {alarm.sentence}")


@budget.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show_budget(name: str, as_json: bool) -> None:
    """Show a budget: how it stands, and what the forecast rests on."""
    with server() as connection:
        found = connection.ask("GET", _path(name), answer=BudgetView)
    if as_json:
        print_json(found)
        return
    reached = "not in this period" if found.reached_ns is None else format_soon(found.reached_ns)
    rows = [
        ["budget", f"{found.name}, for {_whose(found)}, per {found.period.value}"],
        ["used", f"{found.sentence} ({found.percent:.1f} %)"],
        ["held", f"{_amount(found, found.held)}, for {found.going_on} that go on"],
        ["at 100 %", _at_the_end(found)],
        ["forecast", f"{_amount(found, found.forecast)} at the end of the period: {found.basis}"],
        ["rate", f"{_amount(found, found.per_day)} per day"],
        ["used up", reached],
        ["period", f"{format_soon(found.start_ns)} to {format_soon(found.end_ns)}"],
    ]
    for line in columns(rows):
        say(line)


@budget.command("set")
@click.argument("name")
@click.option("--user", metavar="NAME", help="What a user or service uses.")
@click.option("--team", metavar="NAME", help="What runs of a team use.")
@click.option("--pool", metavar="NAME", help="What is used in a pool.")
@click.option("--policy", metavar="NAME", help="What runs under a usage policy use.")
@click.option("--tag", metavar="KEY=VALUE", help="What runs with a tag use; KEY alone: with any value of it.")
@click.option("--everything", is_flag=True, help="What everybody uses.")
@click.option("--money", metavar="AMOUNT", help="How much, in the server's currency.")
@click.option("--usd", metavar="AMOUNT", help="How much, where the server's currency is USD.")
@click.option("--gpu-hours", metavar="HOURS", help="How much time of devices.")
@click.option("--per", type=click.Choice([each.value for each in Period]), default="month", show_default=True)
@click.option("--hard/--soft", default=False, help="Whether runs are stopped at 100 %; else nothing new starts.")
def set_budget(
    name: str,
    per: str,
    hard: bool,
    everything: bool,
    **said: str | None,
) -> None:
    """Make a budget, or put another one in its place.

    What was used in the period counts from its beginning, in UTC. Runs that a hard budget stops get SIGTERM and their
    grace for a checkpoint; raising it takes back no stop that was asked.
    """
    kind, scope = _scope(everything, said)
    limits = [name for name in ("money", "usd", "gpu_hours") if said[name] is not None]
    if len(limits) != 1:
        raise click.UsageError("say how much it is, once: --money, --usd or --gpu-hours")
    money, is_usd = said["money"] or said["usd"], limits == ["usd"]
    asked = BudgetRequest(
        kind=kind,
        scope=scope,
        period=Period(per),
        limit_micros=_limit("--usd" if is_usd else "--money", money, MICROS_PER_UNIT),
        limit_gpu_ms=_limit("--gpu-hours", said["gpu_hours"], MS_PER_HOUR),
        currency=_USD if is_usd else "",
        hard=hard,
    )
    with server() as connection:
        found = connection.ask("PUT", _path(name), asked, answer=BudgetView)
    say(f"budget {found.name} for {_whose(found)}: {found.sentence}; at 100 % {_at_the_end(found)}")


@budget.command("delete")
@click.argument("name")
def delete_budget(name: str) -> None:
    """Delete a budget: nothing is stopped or held back for it any more."""
    with server() as connection:
        found = connection.ask("DELETE", _path(name), answer=BudgetView)
    say(f"budget {found.name} is gone; {_amount(found, found.used)} were used of it")


def _scope(everything: bool, scopes: dict[str, str | None]) -> tuple[ScopeKind, str]:
    given = [(kind, scopes[kind]) for kind in _SCOPES if scopes[kind] is not None]
    if len(given) + everything != 1:
        names = ", ".join(f"--{kind}" for kind in _SCOPES)
        raise click.UsageError(f"say for whom it is, once: {names} or --everything")
    return (given[0][0], given[0][1] or "") if given else ("everything", "")


def _limit(option: str, text: str | None, unit: int) -> int | None:
    if text is None:
        return None
    try:
        amount = Decimal(text) * unit
        return int(amount.to_integral_value())
    except (InvalidOperation, OverflowError, ValueError):
        raise InvalidValue(f"{option}: {text[:40]!r} is not an amount", hint="a number: 500, or 99.50") from None


def _row(each: BudgetView) -> list[str]:
    limit = each.limit_micros if each.limit_micros is not None else each.limit_gpu_ms or 0
    amounts = [_amount(each, amount) for amount in (each.used, limit)]
    forecast = _amount(each, each.forecast)
    return [
        *(each.name, _whose(each), each.period.value, *amounts, f"{each.percent:.1f} %"),
        *(_amount(each, each.held), forecast, _at_the_end(each)),
    ]


def _whose(each: BudgetView) -> str:
    return f"{each.kind} {each.scope}".strip()


def _amount(each: BudgetView, amount: int) -> str:
    return format_micros(amount, each.currency) if each.limit_micros is not None else format_gpu_ms(amount)


def _at_the_end(each: BudgetView) -> str:
    return "runs are stopped" if each.hard else "nothing new starts"


def _path(name: str) -> str:
    return f"/budgets/{quote(name, safe='')}"
