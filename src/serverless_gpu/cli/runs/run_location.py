"""Locates the wanted run: on this machine, or on the server.

A local run has its directory only here. A run of a server is the server's, even if this machine is the node that it
ran on and has a directory of it. A server that cannot be reached is an error of its own and never "there is no run": a
named run that is not here waits for it (`cli/server_connection.py`), a list shows the local runs and fails afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from serverless_gpu.cli.runs.run_choice import choose, meant
from serverless_gpu.cli.server_connection import connect, connect_briefly, patient_server
from serverless_gpu.client.remote.profile import find_profile, is_configured
from serverless_gpu.errors import InvalidValue, NotFound, ServerUnavailable
from serverless_gpu.lazy_import import load
from serverless_gpu.node.attempt.history import SERVED, run_ids
from serverless_gpu.node.base.home import Home

if TYPE_CHECKING:
    from serverless_gpu.model.cost import Cost
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.runs import RunPage, RunView

PAGE = 500
_ID_CHARACTERS = 26
_WHOLE = re.compile(r"[0-9a-z]{26}")
_PART = re.compile(r"[0-9a-z]{1,25}")
_FEW = 10
"""Runs that begin alike, of which several mean that more has to be typed."""


class Located(NamedTuple):
    """A run's identifier and the server's view of it; None for a run of this machine alone."""

    run_id: str
    view: RunView | None


def own_runs(home: Home) -> list[str]:
    """Return the runs that have to do with no server, newest first."""
    return [run_id for run_id in run_ids(home.runs) if not any((home.runs / run_id).glob(f"*/{SERVED}"))]


def server_runs(home: Home, *, limit: int, state: str = "") -> tuple[RunView, ...]:
    """Return the server's latest runs, in a state or ("") any; none without a configured server."""
    page = _page(home, {"limit": str(min(limit, PAGE))} | ({"state": state} if state else {}))
    return () if page is None else page.runs


def server_costs(home: Home, *, limit: int, state: str = "") -> tuple[tuple[RunView, ...], dict[str, Cost]]:
    """Return the server's latest runs as `server_runs` does, and each one's cost by identifier."""
    query = {"limit": str(min(limit, PAGE))} | ({"state": state} if state else {})
    try:
        page = _page(home, query | {"costs": "true"})
    except InvalidValue:  # of an earlier version, which knows no such question
        page = _page(home, query)
    return ((), {}) if page is None else (page.runs, {each.id: each.cost for each in page.costs})


def locate(home: Home, wanted: str | None) -> Located:
    """Return the wanted run; a named run that is not here waits for an unreachable server."""
    own = own_runs(home)
    if wanted is not None and len(meant(own, wanted)) == 1:
        return Located(meant(own, wanted)[0], None)
    found, elsewhere = _of_the_server(home, wanted, own)
    views = {view.id: view for view in found}
    ids = sorted({*own, *views}, reverse=True)
    if wanted is None and not ids:
        raise InvalidValue(f"there are no runs in {home.runs}, and none of a server")
    run_id = choose(home, wanted, ids, elsewhere=elsewhere)
    return Located(run_id, views.get(run_id))


def _of_the_server(home: Home, wanted: str | None, own: Sequence[str]) -> tuple[tuple[RunView, ...], str]:
    """Return the server's runs that a text may mean, and the end of the error if there are none.

    An identifier is requested by itself, and a beginning among the runs that begin so; an end is searched among the
    latest runs. The latest run does not wait for the server: with its name, a local run needs none.
    """
    if not is_configured(home.root, os.environ):
        return (), ""
    try:
        if wanted is None:
            with contextlib.closing(connect(find_profile(home.root, os.environ), home=home.root)) as connection:
                return _asked(connection, ""), ""
        with patient_server(home.root) as connection:
            found = _asked(connection, wanted.strip().lower())
            return found, f", and none at {connection.url} that you may see"
    except ServerUnavailable as error:
        raise _unknown(error, wanted, own) from None


def _unknown(error: ServerUnavailable, wanted: str | None, own: Sequence[str]) -> ServerUnavailable:
    """Return the error for a run that only the server can know."""
    if wanted is not None:
        return ServerUnavailable(f"run {wanted!r} is not on this machine, and {error.message}", hint=error.hint)
    here = f"name the run; the latest of this machine is {own[0]}" if own else error.hint
    return ServerUnavailable(f"the latest run may be the server's, and {error.message}", hint=here)


def _asked(connection: Connection, text: str) -> tuple[RunView, ...]:
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
    """Return a page of the server's runs; None where no server is configured."""
    if not is_configured(home.root, os.environ):
        return None
    with contextlib.closing(connect_briefly(find_profile(home.root, os.environ))) as connection:
        found: RunPage = connection.ask("GET", "/runs", answer=load("serverless_gpu.wire.runs").RunPage, query=query)
    return found
