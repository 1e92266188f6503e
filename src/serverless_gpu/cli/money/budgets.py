"""`sgpu budget`: manages budgets, which limit money or GPU time per day, week or month."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import click
import msgspec

from serverless_gpu.ambient import format_soon
from serverless_gpu.cli.amounts import micros
from serverless_gpu.cli.completion import complete_budget, complete_policy, complete_pool, complete_team, complete_user
from serverless_gpu.cli.output import columns, json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.server_connection import server
from serverless_gpu.errors import NotFound
from serverless_gpu.model.billing.budget import Period, ScopeKind
from serverless_gpu.units import MS_PER_HOUR, format_gpu_ms, format_micros
from serverless_gpu.wire.billing import BudgetList, BudgetRequest, BudgetView

_SCOPES: tuple[ScopeKind, ...] = ("user", "team", "pool", "policy", "tag")
_FOR = ", ".join(f"--{kind}" for kind in _SCOPES) + " or --everything"
_MUCH = "--money or --gpu-hours"


@click.group()
def budget() -> None:
    """List, set and delete budgets.

    A budget limits money or GPU-hours per day, week or month.
    """


@budget.command("list")
@wide_option
@json_option(BudgetList)
def list_budgets(wide: bool, as_json: bool) -> None:
    """List budgets, their usage and forecast.

    HELD is the usage that the server reserves in advance for running runs, usually one minute. FORECAST adds the
    expected usage of the remaining days to the current usage. The expected daily usage is the mean of the last seven
    days. The command prints alarms of the last seven days below the table.
    """
    with server() as connection:
        found = connection.ask("GET", "/budgets", answer=BudgetList)
    if as_json:
        print_json(found)
        return
    if not found.budgets:
        say("no budgets are visible to you. Create a budget with `sgpu budget set`")
    rows = [_row(each) for each in found.budgets]
    if rows:
        print_table(["BUDGET", "FOR", "PER", "USED", "LIMIT", "%", "HELD", "FORECAST", "AT 100 %"], rows, wide=wide)
    for each in found.budgets:
        if ";" in each.sentence:
            say(f"{each.name}: {each.sentence.partition('; ')[2]}")
    for alarm in found.alarms:
        say(f"alarm {format_soon(alarm.at_ns)}: {alarm.sentence}")


@budget.command("show")
@click.argument("name", shell_complete=complete_budget)
@json_option(BudgetView)
def show_budget(name: str, as_json: bool) -> None:
    """Show one budget and its forecast."""
    with server() as connection:
        found = connection.ask("GET", _path(name), answer=BudgetView)
    if as_json:
        print_json(found)
        return
    reached = "not within this period" if found.reached_ns is None else format_soon(found.reached_ns)
    rows = [
        ["budget", f"{found.name}, for {_whose(found)}, per {found.period.value}"],
        ["used", f"{found.sentence} ({found.percent:.1f} %)"],
        ["held", f"{_amount(found, found.held)}, for running attempts: {found.going_on}"],
        ["at 100 %", _at_the_end(found)],
        ["forecast", f"{_amount(found, found.forecast)} at the end of the period: {found.basis}"],
        ["rate", f"{_amount(found, found.per_day)} per day"],
        ["used up", reached],
        ["period", f"{format_soon(found.start_ns)} to {format_soon(found.end_ns)}, of {found.time_zone}"],
    ]
    for line in columns(rows):
        say(line)


@budget.command("set")
@click.argument("name", shell_complete=complete_budget)
@click.option("--user", metavar="NAME", help="Limit the usage of this user or service.", shell_complete=complete_user)
@click.option("--team", metavar="NAME", help="Limit the usage of this team's runs.", shell_complete=complete_team)
@click.option("--pool", metavar="NAME", help="Limit the usage in this pool.", shell_complete=complete_pool)
@click.option(
    "--policy", metavar="NAME", help="Limit the usage of runs under this usage policy.", shell_complete=complete_policy
)
@click.option("--tag", metavar="KEY=VALUE", help="Limit the usage of runs with this tag. KEY alone matches any value.")
@click.option("--everything", is_flag=True, help="Limit all usage on the server.")
@click.option("--money", metavar="AMOUNT", help="Budget limit in the server's currency.")
@click.option("--gpu-hours", metavar="HOURS", help="Budget limit in GPU-hours, without CPU slot time.")
@click.option(
    "--per", type=click.Choice([each.value for each in Period]), help="Length of a budget period (default: month)."
)
@click.option(
    "--time-zone", metavar="ZONE", help="Time zone of the budget periods, for example Europe/Berlin (default: UTC)."
)
@click.option("--hard/--soft", default=None, help="At 100 %, stop running runs, or only start no new runs.")
def set_budget(
    name: str, per: str | None, time_zone: str | None, hard: bool | None, everything: bool, **said: str | None
) -> None:
    """Create or change a budget.

    The server keeps the current value of each omitted option. Usage since the beginning of the current period counts
    toward the budget. At 100 % of a hard budget, the server sends SIGTERM to the budget's runs. The stopped runs can
    save a checkpoint during their grace period. A later increase of the budget does not restart stopped runs.
    """
    changes = _scope(everything, said) | _limit(said)
    changes |= {} if per is None else {"period": Period(per)}
    changes |= {} if hard is None else {"hard": hard}
    changes |= {} if time_zone is None else {"time_zone": time_zone}
    with server() as connection:
        try:
            before = _request_of(connection.ask("GET", _path(name), answer=BudgetView))
        except NotFound:
            if "kind" not in changes:
                raise click.UsageError(f"the budget does not exist yet. Add {_FOR} to create the budget") from None
            if "limit_micros" not in changes:
                raise click.UsageError(
                    f"the budget does not exist yet. Add {_MUCH} to set the budget's limit"
                ) from None
            before = BudgetRequest(kind="everything", period=Period.MONTH)
        asked = msgspec.structs.replace(before, **changes)
        found = connection.ask("PUT", _path(name), asked, answer=BudgetView)
    say(f"budget {found.name} for {_whose(found)}: {found.sentence}; at 100 % {_at_the_end(found)}")


@budget.command("reopen")
@click.argument("name", shell_complete=complete_budget)
def reopen_budget(name: str) -> None:
    """Reopen a hard budget that has stopped runs.

    The server starts new runs until the budget is used up. If the budget is already used up, raise the budget instead
    (sgpu budget set). The server does not restart runs that the budget has stopped.
    """
    with server() as connection:
        found = connection.ask("POST", f"{_path(name)}/reopen", answer=BudgetView)
    say(f"budget {found.name} is open again: {found.sentence}")


@budget.command("delete")
@click.argument("name", shell_complete=complete_budget)
def delete_budget(name: str) -> None:
    """Delete a budget and its limit."""
    with server() as connection:
        found = connection.ask("DELETE", _path(name), answer=BudgetView)
    say(f"budget {found.name} is deleted. The budget's usage was {_amount(found, found.used)}")


def _request_of(view: BudgetView) -> BudgetRequest:
    return BudgetRequest(
        kind=view.kind,
        scope=view.scope,
        period=view.period,
        limit_micros=view.limit_micros,
        limit_gpu_ms=view.limit_gpu_ms,
        hard=view.hard,
        time_zone=view.time_zone,
    )


def _scope(everything: bool, said: Mapping[str, str | None]) -> dict[str, object]:
    given: list[tuple[str, str]] = [(kind, scope) for kind in _SCOPES if (scope := said[kind]) is not None]
    given += [("everything", "")] if everything else []
    if len(given) > 1:
        raise click.UsageError(f"specify only one of {_FOR}")
    return {"kind": given[0][0], "scope": given[0][1]} if given else {}


def _limit(said: Mapping[str, str | None]) -> dict[str, object]:
    money, hours = said["money"], said["gpu_hours"]
    if money is not None and hours is not None:
        raise click.UsageError(f"specify only one of {_MUCH}")
    if money is not None:
        return {"limit_micros": micros("--money", money), "limit_gpu_ms": None}
    if hours is not None:
        return {"limit_gpu_ms": micros("--gpu-hours", hours, unit=MS_PER_HOUR), "limit_micros": None}
    return {}


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
    return "the server stops runs" if each.hard else "no new runs start"


def _path(name: str) -> str:
    return f"/budgets/{quote(name, safe='')}"
