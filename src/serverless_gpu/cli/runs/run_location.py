"""Locates the home directory and the requested run on this machine or on the server.

A user can name a run by a unique prefix or suffix of the run identifier. Without a run identifier, commands select the
latest run. A local run exists only in the home directory of this machine. Commands treat a server run as remote, even
if this machine has the run directory.

If the server is unreachable, commands report the unreachable server instead of a missing run. If a named run is not on
this machine, the command waits for the server (`cli/server_connection.py`). If the server is unreachable, a command
that lists runs prints the local runs and then fails.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from serverless_gpu.cli.output import say
from serverless_gpu.cli.server_connection import connect, connect_briefly, patient_server
from serverless_gpu.client.remote.profile import find_profile, is_configured
from serverless_gpu.errors import InvalidValue, NotFound, ServerlessGpuError, ServerUnavailable
from serverless_gpu.lazy_import import load
from serverless_gpu.node.attempt.history import REMOTE_FILE, run_ids
from serverless_gpu.node.base.home import Home, find_durable_home, find_home

if TYPE_CHECKING:
    from serverless_gpu.model.cost import Cost
    from serverless_gpu.node.base.protocol import Status
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.runs import RunPage, RunView

PAGE = 500
_ID_CHARACTERS = 26
_WHOLE = re.compile(r"[0-9a-z]{26}")
_PART = re.compile(r"[0-9a-z]{1,25}")
_FEW = 10
"""Maximum number of runs in a prefix search, which needs only to detect an ambiguous prefix."""
_NAMED_MAX = 5


class LocatedRun(NamedTuple):
    """A run's identifier and the server's view of the run. The view of a local run is None."""

    run_id: str
    view: RunView | None


def own_runs(home: Home) -> list[str]:
    """Return the identifiers of local runs, newest first."""
    return [run_id for run_id in run_ids(home.runs) if not any((home.runs / run_id).glob(f"*/{REMOTE_FILE}"))]


def server_runs(home: Home, *, limit: int, state: str = "") -> tuple[RunView, ...]:
    """Return the server's latest runs with a given state, or all latest runs for "".

    If no server is configured, return no runs.
    """
    page = _page(home, {"limit": str(min(limit, PAGE))} | ({"state": state} if state else {}))
    return () if page is None else page.runs


def server_costs(home: Home, *, limit: int, state: str = "") -> tuple[tuple[RunView, ...], dict[str, Cost]]:
    """Return the server's latest runs, and the cost of each run by run identifier."""
    query = {"limit": str(min(limit, PAGE))} | ({"state": state} if state else {})
    try:
        page = _page(home, query | {"costs": "true"})
    except InvalidValue:  # Earlier server versions do not support the parameter `costs`.
        page = _page(home, query)
    return ((), {}) if page is None else (page.runs, {each.id: each.cost for each in page.costs})


def locate(home: Home, wanted: str | None) -> LocatedRun:
    """Return the requested run.

    If a named run is not on this machine, wait for an unreachable server.
    """
    own = own_runs(home)
    if wanted is not None and len(matching_ids(own, wanted)) == 1:
        return LocatedRun(matching_ids(own, wanted)[0], None)
    found, elsewhere = _find_on_server(home, wanted, own)
    views = {view.id: view for view in found}
    ids = sorted({*own, *views}, reverse=True)
    if wanted is None and not ids:
        raise InvalidValue(f"no runs exist in {home.runs} or on a server")
    run_id = choose(home, wanted, ids, elsewhere=elsewhere)
    return LocatedRun(run_id, views.get(run_id))


def _find_on_server(home: Home, wanted: str | None, own: Sequence[str]) -> tuple[tuple[RunView, ...], str]:
    """Return the matching server runs, and the end of the error message if no run matches.

    A complete identifier needs one request. A prefix can match any server run. A suffix can match only the latest
    server runs. Without `wanted`, the function does not wait for the server, because the user can name a local run.
    """
    if not is_configured(home.root, os.environ):
        return (), ""
    try:
        if wanted is None:
            with contextlib.closing(connect(find_profile(home.root, os.environ), home=home.root)) as connection:
                return _query_runs(connection, ""), ""
        with patient_server(home.root) as connection:
            found = _query_runs(connection, wanted.strip().lower())
            return found, f", and no matching run at {connection.url} is visible to you"
    except ServerUnavailable as error:
        raise _unreachable_error(error, wanted, own) from None


def _unreachable_error(error: ServerUnavailable, wanted: str | None, own: Sequence[str]) -> ServerUnavailable:
    """Return the error for a run that is not on this machine while the server is unreachable."""
    if wanted is not None:
        return ServerUnavailable(f"run {wanted!r} is not on this machine, and {error.message}", hint=error.hint)
    here = f"name the run. The latest run of this machine is {own[0]}" if own else error.hint
    return ServerUnavailable(f"the latest run may be on the server, and {error.message}", hint=here)


def _query_runs(connection: Connection, text: str) -> tuple[RunView, ...]:
    wire = load("serverless_gpu.wire.runs")
    if _WHOLE.fullmatch(text):
        with contextlib.suppress(NotFound):
            return (connection.ask("GET", f"/runs/{text}", answer=wire.RunView),)
        return ()
    if _PART.fullmatch(text):
        after_them = text + "z" * (_ID_CHARACTERS + 1 - len(text))
        query = {"limit": str(_FEW), "cursor": after_them}
        page = connection.ask("GET", "/runs", answer=wire.RunPage, query=query)
        if meaning := tuple(view for view in page.runs if view.id.startswith(text)):
            return meaning
    limit = PAGE if text else 1
    latest: tuple[RunView, ...] = connection.ask("GET", "/runs", answer=wire.RunPage, query={"limit": str(limit)}).runs
    return latest


def _page(home: Home, query: dict[str, str]) -> RunPage | None:
    """Return a page of the server's runs, or None if no server is configured."""
    if not is_configured(home.root, os.environ):
        return None
    with contextlib.closing(connect_briefly(find_profile(home.root, os.environ))) as connection:
        found: RunPage = connection.ask("GET", "/runs", answer=load("serverless_gpu.wire.runs").RunPage, query=query)
    return found


def this_home() -> Home:
    """Return the home directory of this command.

    Print a notice if another home directory replaces the requested one.
    """
    home = find_home(os.environ)
    if home.note:
        say(f"sgpu: {home.note}", err=True)
    return home


def durable_home(why: str) -> Home:
    """Return the home directory for a command that stores permanent data."""
    return find_durable_home(os.environ, why)


def queued_runs(home: Home) -> tuple[str, ...]:
    """Return the runs in the agent's queue. Return no runs if no agent answers."""
    with contextlib.suppress(ServerlessGpuError):
        # If no agent socket exists, skip importing the agent's protocol.
        if any(home.sockets().glob("agent-*.sock")):
            found: Status | None = load("serverless_gpu.client.agent").agent_status(home.root)
            return found.queued if found is not None else ()
    return ()


def choose(home: Home, wanted: str | None, ids: Sequence[str] | None = None, *, elsewhere: str = "") -> str:
    """Return the identifier of the requested run, or of the newest run without `wanted`.

    The error message for an unknown run ends with `elsewhere`.
    """
    ids = run_ids(home.runs) if ids is None else ids
    if wanted is None:
        if not ids:
            raise InvalidValue(f"no runs exist in {home.runs}")
        return ids[0]
    found = matching_ids(ids, wanted)
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidValue(
            f"{wanted!r} means {len(found)} runs: {_list_text(found)}",
            hint="type more characters of the run identifier",
        )
    raise InvalidValue(
        f"run {wanted!r} does not exist in {home.runs}{elsewhere}", hint=_suggestion(wanted.strip().lower(), ids)
    )


def matching_ids(ids: Sequence[str], wanted: str) -> list[str]:
    """Return the run `wanted`, or all runs whose identifier begins or ends with `wanted`."""
    text = wanted.strip().lower()
    if text in ids:
        return [text]
    return [run_id for run_id in ids if text and (run_id.startswith(text) or run_id.endswith(text))]


def _suggestion(text: str, ids: Sequence[str]) -> str:
    if not ids:
        return "this home directory has no runs. Set SERVERLESS_GPU_HOME to the home directory of the run"
    close = difflib.get_close_matches(text, ids, n=1, cutoff=0.8)
    if close:
        return f"did you mean {close[0]}?"
    return f"the latest runs are {_list_text(ids)}. List all runs with `sgpu runs`"


def _list_text(ids: Sequence[str]) -> str:
    more = len(ids) - _NAMED_MAX
    return ", ".join(ids[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
