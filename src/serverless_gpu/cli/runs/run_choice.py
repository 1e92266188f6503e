"""Which run a person means: nothing for the latest, or any beginning or end of an identifier that only one run has."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from serverless_gpu.cli.output import say
from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.lazy_import import load
from serverless_gpu.node.attempt.history import run_ids
from serverless_gpu.node.base.home import Home, find_durable_home, find_home

if TYPE_CHECKING:
    from serverless_gpu.node.base.protocol import Status

_NAMED_MAX = 5


def this_home() -> Home:
    """Return the home of this command; print a notice when it replaces the requested one."""
    home = find_home(os.environ)
    if home.note:
        say(f"sgpu: {home.note}", err=True)
    return home


def durable_home(why: str) -> Home:
    """Return the home for a command that keeps something in it for good; see `find_durable_home`."""
    return find_durable_home(os.environ, why)


def queued_runs(home: Home) -> tuple[str, ...]:
    """Return the runs queued in the agent; none without an agent that answers."""
    with contextlib.suppress(ServerlessGpuError):
        if any(home.sockets().glob("agent-*.sock")):  # else the agent's protocol need not be loaded
            found: Status | None = load("serverless_gpu.client.agent_status").agent_status(home.root)
            return found.queued if found is not None else ()
    return ()


def choose(home: Home, wanted: str | None, ids: Sequence[str] | None = None, *, elsewhere: str = "") -> str:
    """Return the identifier of the wanted run, newest for None; `elsewhere` ends the error message."""
    ids = run_ids(home.runs) if ids is None else ids
    if wanted is None:
        if not ids:
            raise InvalidValue(f"there are no runs in {home.runs}")
        return ids[0]
    found = meant(ids, wanted)
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidValue(f"{wanted!r} means {len(found)} runs: {_listed(found)}", hint="type more of the identifier")
    raise InvalidValue(f"there is no run {wanted!r} in {home.runs}{elsewhere}", hint=_near(wanted.strip().lower(), ids))


def meant(ids: Sequence[str], wanted: str) -> list[str]:
    """Return the runs with this identifier, or all that begin or end with it."""
    text = wanted.strip().lower()
    if text in ids:
        return [text]
    return [run_id for run_id in ids if text and (run_id.startswith(text) or run_id.endswith(text))]


def _near(text: str, ids: Sequence[str]) -> str:
    if not ids:
        return "there are no runs here; is SERVERLESS_GPU_HOME the one that the run was started with?"
    close = difflib.get_close_matches(text, ids, n=1, cutoff=0.8)
    if close:
        return f"did you mean {close[0]}?"
    return f"the latest are {_listed(ids)}; `sgpu runs` lists all"


def _listed(ids: Sequence[str]) -> str:
    more = len(ids) - _NAMED_MAX
    return ", ".join(ids[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
