"""Shell completion of run identifiers and of names that the server knows.

The shell runs `sgpu` when the user presses the Tab key. Therefore a completer sends one request to the server and
neither retries nor fails. If the server does not answer, the completer suggests nothing. To complete local runs, the
completer reads the run directories.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from serverless_gpu.lazy_import import load

Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
_RUNS_MAX = 50


def complete_run(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the latest runs whose identifier begins with the typed text, newest first."""
    location = load("serverless_gpu.cli.runs.run_location")
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):
        found = {run_id: "" for run_id in location.own_runs(location.find_home(os.environ))[:_RUNS_MAX]}
    with contextlib.suppress(Exception):
        views = location.server_runs(location.find_home(os.environ), limit=_RUNS_MAX)
        found |= {view.id: f"{view.state.value} {view.name}".rstrip() for view in views}
    matching = sorted((each for each in found if each.startswith(incomplete.lower())), reverse=True)
    return [CompletionItem(run_id, help=found[run_id] or None) for run_id in matching]


def complete_directory(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete directory names."""
    return [CompletionItem(incomplete, type="dir")]


def _completer(path: str, key: str) -> Completer:
    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = sorted({str(each["name"]) for each in _ask(path, key) if isinstance(each, dict)})
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete


def _ask(path: str, key: str) -> Iterator[Any]:
    with contextlib.suppress(Exception):
        profile = load("serverless_gpu.client.remote.profile")
        server = load("serverless_gpu.cli.server_connection")
        found = profile.find_profile(profile.remote_home(os.environ).root, os.environ)
        with contextlib.closing(server.connect_briefly(found)) as connection:
            yield from connection.ask("GET", path, answer=dict)[key]


complete_node = _completer("/nodes", "nodes")
complete_pool = _completer("/pools", "pools")
complete_user = _completer("/users", "principals")
complete_team = _completer("/teams", "teams")
complete_policy = _completer("/policies", "policies")
complete_budget = _completer("/budgets", "budgets")
complete_index = _completer("/indexes", "indexes")
complete_secret = _completer("/secrets", "secrets")
