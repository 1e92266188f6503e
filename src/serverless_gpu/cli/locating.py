"""Where the run is that a person means: on this machine, or with the server.

A run of local mode has its directory here and nothing anywhere else. A run of a server is the server's, also when this
machine is the node that it ran on and has a directory of it. Without a server everything is here; with one that does
not answer, commands say so and go on with what is here.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from serverless_gpu.cli.choosing import choose, meant
from serverless_gpu.cli.output import say
from serverless_gpu.cli.server.reaching import connect
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import InvalidValue, NotFound, ServerNotConfigured, ServerProblem
from serverless_gpu.loading import load
from serverless_gpu.node.history import run_ids
from serverless_gpu.node.home import Home
from serverless_gpu.node.remote import FILE

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
    """A run: its identifier, and what the server says of it; None for a run of this machine alone."""

    run_id: str
    view: RunView | None


def own_runs(home: Home) -> list[str]:
    """Return the runs that have to do with no server, newest first."""
    return [run_id for run_id in run_ids(home.runs) if not any((home.runs / run_id).glob(f"*/{FILE}"))]


def server_runs(home: Home, *, limit: int, state: str = "") -> tuple[RunView, ...]:
    """Return the server's latest runs; none, and a line on stderr, when it cannot be asked.

    Args:
        home: says which server.
        limit: how many at most.
        state: only those in it; "" for all.
    """
    page = _page(home, {"limit": str(min(limit, PAGE))} | ({"state": state} if state else {}))
    return () if page is None else page.runs


def server_costs(home: Home, *, limit: int, state: str = "") -> tuple[tuple[RunView, ...], dict[str, Cost]]:
    """Return the server's latest runs as `server_runs` does, and what each has cost, by its identifier."""
    query = {"limit": str(min(limit, PAGE))} | ({"state": state} if state else {})
    try:
        page = _page(home, query | {"costs": "true"})
    except InvalidValue:  # of an earlier version, which knows no such question
        page = _page(home, query)
    return ((), {}) if page is None else (page.runs, {each.id: each.cost for each in page.costs})


def locate(home: Home, wanted: str | None) -> Located:
    """Return the run that is meant, as `choosing.choose` reads it.

    Args:
        home: where runs of this machine lie, and which server there is.
        wanted: what was typed; None for the latest run.

    Raises:
        InvalidValue: no run is meant, or several.
    """
    own = own_runs(home)
    if wanted is not None and len(meant(own, wanted)) == 1:
        return Located(meant(own, wanted)[0], None)
    found, elsewhere = _of_the_server(home, (wanted or "").strip().lower())
    views = {view.id: view for view in found}
    ids = sorted({*own, *views}, reverse=True)
    if wanted is None and not ids:
        raise InvalidValue(f"there are no runs in {home.runs}, and none of a server")
    run_id = choose(home, wanted, ids, elsewhere=elsewhere)
    return Located(run_id, views.get(run_id))


def _of_the_server(home: Home, text: str) -> tuple[tuple[RunView, ...], str]:
    """Return the server's runs that a text may mean, and how "there is no run" goes on when it means none of them.

    An identifier is asked for by itself, and a beginning where such runs begin, however many came later; an end is
    looked for among the latest runs.
    """
    try:
        profile = find_profile(home.root, os.environ)
        connection = connect(profile)
        try:
            found = _asked(connection, text)
        finally:
            connection.close()
    except ServerNotConfigured:
        return (), ""
    except ServerProblem as error:
        say(f"sgpu: {error.message}; this is what is here", err=True)
        return (), ", and the server cannot be asked"
    return found, f", and none at {profile.url} that you may see"


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
    try:
        connection = connect(find_profile(home.root, os.environ))
        try:
            found: RunPage = connection.ask(
                "GET", "/runs", answer=load("serverless_gpu.wire.runs").RunPage, query=query
            )
        finally:
            connection.close()
    except ServerNotConfigured:
        return None
    except ServerProblem as error:
        say(f"sgpu: {error.message}; this is what is here", err=True)
        return None
    return found
