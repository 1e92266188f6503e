"""`sgpu policy`: manages usage policies and attaches them to principals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn
from urllib.parse import quote

import click
import msgspec

from serverless_gpu.cli.amounts import duration_s
from serverless_gpu.cli.completion import complete_policy, complete_pool, complete_team, complete_user
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.server_connection import server
from serverless_gpu.errors import NotFound
from serverless_gpu.model.spec import Priority
from serverless_gpu.model.usage_policy import HOLDER_KINDS, UsagePolicy, describe
from serverless_gpu.wire.access import PolicyList, PolicyView, policy_of, request_of

ANY = "any"
"""Option value that removes a policy limit."""


_COUNTS = {
    "gpus_per_run": "gpus_per_run",
    "gpus_at_once": "gpus_at_once",
    "attempts": "attempts_max",
    "unsaved_attempts": "unsaved_max",
}
"""Options of `sgpu policy set` that take a number, with their policy fields."""


@click.group()
def policy() -> None:
    """List, set and attach usage policies.

    A usage policy sets requirements and limits for runs.
    """


@policy.command("list")
@wide_option
@json_option(tuple[PolicyView, ...])
def list_policies(wide: bool, as_json: bool) -> None:
    """List usage policies and their holders."""
    _print_policies(_fetch_policies(mine=False), wide=wide, as_json=as_json)


@policy.command("mine")
@wide_option
@json_option(tuple[PolicyView, ...])
def my_policies(wide: bool, as_json: bool) -> None:
    """List the usage policies that you can use."""
    found = _fetch_policies(mine=True)
    _print_policies(found, wide=wide, as_json=as_json)
    if as_json:
        return
    mandatory = [each.name for each in found if each.holders and each.mandatory]
    if mandatory:
        say(
            f"{', '.join(mandatory)} {'applies' if len(mandatory) == 1 else 'apply'} to every run, in addition to "
            "the run's other policies"
        )
    attached = [each.name for each in found if each.holders and not each.mandatory]
    if not attached:
        other = "other " if mandatory else ""
        say(f"no {other}policy is attached to you; choose a listed policy with policy=")
    elif len(attached) == 1:
        say(f"{attached[0]} applies automatically")
    else:
        say("choose a policy with policy= or SGPU_POLICY, including policies of the run's team")


@policy.command("show")
@click.argument("name", shell_complete=complete_policy)
@json_option(PolicyView)
def show_policy(name: str, as_json: bool) -> None:
    """Show one usage policy and its holders."""
    with server() as connection:
        view = connection.ask("GET", _path(name), answer=PolicyView)
    if as_json:
        print_json(view)
        return
    say(f"policy {view.name}")
    for phrase in describe(policy_of(view)):
        say(f"  {phrase}")
    say(f"  attached to: {_holders(view)}")


@policy.command("set")
@click.argument("name", shell_complete=complete_policy)
@click.option("--pool", metavar="NAME", help="Default pool of runs.", shell_complete=complete_pool)
@click.option("--pools", metavar="A,B", help="Pools that runs may use.")
@click.option(
    "--require-tag", "required", multiple=True, metavar="KEY[=A,B]", help="Tag that every run must have. Repeatable."
)
@click.option(
    "--default-tag", "default", multiple=True, metavar="KEY=VALUE", help="Tag that runs get by default. Repeatable."
)
@click.option(
    "--gpu-types", metavar="A,B", help="GPU types that runs may request. The default is the first available type."
)
@click.option("--gpus-per-run", metavar="N", help="Maximum number of GPUs for one run.")
@click.option("--gpus-at-once", metavar="N", help="Maximum number of GPUs for all active runs of a user.")
@click.option(
    "--max-run", metavar="DURATION", help="Maximum duration of an attempt. With resume=True, another attempt follows."
)
@click.option("--attempts", metavar="N", help="Maximum number of attempts that start the run's code.")
@click.option("--total-run", metavar="DURATION", help="Maximum total duration of a run's code in all attempts.")
@click.option(
    "--unsaved-attempts",
    metavar="N",
    help="Maximum consecutive attempts without a checkpoint with resume=True (default: 3).",
)
@click.option(
    "--mandatory/--optional",
    default=None,
    help="Apply the usage policy to all runs, or only to runs that choose it.",
)
@click.option(
    "--idle", metavar="DURATION", help="Stop a run after its devices idle this long. Users may set a shorter time."
)
@click.option("--timeout", metavar="DURATION", help="Default time limit of runs.")
@click.option(
    "--team",
    metavar="NAME",
    help="Default team of runs whose owner is a member of the team.",
    shell_complete=complete_team,
)
@click.option("--require-team/--no-require-team", "team_required", default=None, help="Require a team for every run.")
@click.option("--priorities", metavar="A,B", help="Priority classes that runs may request (NORMAL,CRITICAL).")
@click.option(
    "--environment",
    "environments",
    multiple=True,
    metavar="ADDRESS",
    help="Captured environment that runs may use. Repeatable.",
)
def set_policy(name: str, **said: Any) -> None:
    """Create or change a usage policy.

    Omitted options leave the policy unchanged. The option value `any` removes a policy limit. A repeatable option
    replaces all previous values. Already submitted runs keep their policy.
    """
    changes = _changes(said)
    with server() as connection:
        try:
            before = policy_of(connection.ask("GET", _path(name), answer=PolicyView))
        except NotFound:
            before = UsagePolicy()
        after = msgspec.structs.replace(before, **changes)
        view = connection.ask("PUT", _path(name), request_of(after), answer=PolicyView)
    say(f"policy {view.name}: {'; '.join(describe(policy_of(view)))}")


@policy.command("attach")
@click.argument("name", shell_complete=complete_policy)
@click.option("--user", multiple=True, metavar="NAME", help="User. Repeatable.", shell_complete=complete_user)
@click.option("--service", multiple=True, metavar="NAME", help="Service. Repeatable.", shell_complete=complete_user)
@click.option("--team", multiple=True, metavar="NAME", help="Team. Repeatable.", shell_complete=complete_team)
def attach_policy(name: str, user: tuple[str, ...], service: tuple[str, ...], team: tuple[str, ...]) -> None:
    """Attach a usage policy to principals.

    The usage policy applies to runs submitted after the change.
    """
    _change_holders(name, "PUT", {"user": user, "service": service, "team": team})


@policy.command("detach")
@click.argument("name", shell_complete=complete_policy)
@click.option("--user", multiple=True, metavar="NAME", help="User. Repeatable.", shell_complete=complete_user)
@click.option("--service", multiple=True, metavar="NAME", help="Service. Repeatable.", shell_complete=complete_user)
@click.option("--team", multiple=True, metavar="NAME", help="Team. Repeatable.", shell_complete=complete_team)
def detach_policy(name: str, user: tuple[str, ...], service: tuple[str, ...], team: tuple[str, ...]) -> None:
    """Detach a usage policy from principals.

    Already submitted runs keep their policy.
    """
    _change_holders(name, "DELETE", {"user": user, "service": service, "team": team})


@policy.command("delete")
@click.argument("name", shell_complete=complete_policy)
def delete_policy(name: str) -> None:
    """Delete a usage policy.

    Detach the policy from all principals first. The server refuses new runs that name a deleted policy.
    """
    with server() as connection:
        view = connection.ask("DELETE", _path(name), answer=PolicyView)
    say(f"policy {view.name} is deleted")


def _fetch_policies(*, mine: bool) -> tuple[PolicyView, ...]:
    with server() as connection:
        query = {"mine": f"{mine}".lower()}
        return connection.ask("GET", "/policies", answer=PolicyList, query=query).policies


def _print_policies(found: tuple[PolicyView, ...], *, wide: bool, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [[each.name, _holders(each), "; ".join(describe(policy_of(each)))] for each in found]
    print_table(["POLICY", "ATTACHED TO", "RULES"], rows, wide=wide)


def _holders(view: PolicyView) -> str:
    return ", ".join(f"{holder.kind} {holder.name}" for holder in view.holders) or "-"


def _change_holders(name: str, method: str, said: Mapping[str, tuple[str, ...]]) -> None:
    whom = [(kind, holder) for kind in HOLDER_KINDS for holder in said[kind]]
    if not whom:
        raise click.UsageError("name a holder of the policy: --user, --service or --team")
    with server() as connection:
        for kind, holder in whom:
            path = f"{_path(name)}/holders/{kind}/{quote(holder, safe='')}"
            view = connection.ask(method, path, answer=PolicyView)
    say(f"policy {view.name} is attached to: {_holders(view)}")


def _path(name: str) -> str:
    return f"/policies/{quote(name, safe='')}"


def _changes(said: Mapping[str, Any]) -> dict[str, object]:
    changes: dict[str, object] = {}
    if said["pool"] is not None:
        changes["pool"] = "" if said["pool"] == ANY else said["pool"]
    if said["team"] is not None:
        changes["team"] = "" if said["team"] == ANY else said["team"]
    if said["team_required"] is not None:
        changes["team_required"] = said["team_required"]
    for option in ("pools", "gpu_types", "priorities"):
        if said[option] is not None:
            changes[option] = _parse_names(said[option])
    if "priorities" in changes:
        named = {each.value: each for each in Priority}
        unknown = f"is not a priority class; use one of {', '.join(named)}"
        changes["priorities"] = tuple(
            named.get(name.upper()) or _refuse_option("priorities", f"{name!r} {unknown}")
            for name in _parse_names(said["priorities"])
        )
    for option, field in _COUNTS.items():
        if said[option] is not None:
            changes[field] = _count(option, said[option])
    if said["mandatory"] is not None:
        changes["mandatory"] = said["mandatory"]
    times = (("max_run", "max_run_s"), ("total_run", "total_run_s"), ("idle", "idle_s"), ("timeout", "timeout_s"))
    for option, field in times:
        if said[option] is not None:
            changes[field] = None if said[option] == ANY else duration_s(_option(option), said[option])
    if said["required"]:
        changes["required_tags"] = dict(_parse_required_tag(text) for text in _without_any(said["required"]))
    if said["default"]:
        for text in _without_any(said["default"]):
            if "=" not in text:
                _refuse_option("default_tag", f"{text!r} is not a tag of the form KEY=VALUE, for example team=search")
        changes["default_tags"] = dict(text.split("=", 1) for text in _without_any(said["default"]))
    if said["environments"]:
        changes["environments"] = tuple(_without_any(said["environments"]))
    return changes


def _parse_names(text: str) -> tuple[str, ...]:
    return () if text == ANY else tuple(name.strip() for name in text.split(",") if name.strip())


def _without_any(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if text != ANY]


def _count(option: str, text: str) -> int | None:
    if text == ANY:
        return None
    what = "GPUs" if option.startswith("gpus") else "attempts"
    return (
        int(text)
        if text.isascii() and text.isdecimal()
        else _refuse_option(option, f"{text!r} is not a number of {what}")
    )


def _parse_required_tag(text: str) -> tuple[str, tuple[str, ...]]:
    key, sign, values = text.partition("=")
    accepted = tuple(value for value in values.split(",") if value)
    if sign and not accepted:
        _refuse_option("require_tag", f"the tag {text!r} accepts no value; use {key!r} to accept any value")
    return key, accepted


def _refuse_option(option: str, why: str) -> NoReturn:
    raise click.BadParameter(why, param_hint=_option(option))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
