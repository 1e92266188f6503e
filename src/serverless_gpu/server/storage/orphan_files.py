"""Files of runs that the database does not know: evidence that it, or its disk, lost rows.

    server/logs/<run>/     output of ranks
    server/gangs/<gang>    what the machine's own engine has placed

Each is made after its run is durable, and a run that retention removed leaves a row in the audit. So a run that has
files here, and neither a row nor that entry, was acknowledged and is gone. The start names such runs in the log before
any loop forgets a gang, `sgpu server check` names them at any time, and retention keeps their output.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from serverless_gpu.server.records.runs import purgeable_runs

LOOK_MAX = 2_000
"""Runs that a start looks up, the newest ones: what a rollback loses is new."""
_NAMED_MAX = 5
_PLACES = ("logs", "gangs")
_RUN = re.compile(r"([0-9a-hjkmnp-tv-z]{26})(:[0-9]+)?")
Read = Callable[[Callable[[sa.Connection], Any]], Any]
"""`Database.read`."""


def runs_of(directory: Path, read: Read, *, limit: int | None = None) -> list[str]:
    """Return the runs that have files here and that the database does not know.

    Args:
        directory: the server's.
        read: reads the database.
        limit: how many runs are looked up, the newest ones; all without it.
    """
    names = (name for place in _PLACES for name in _names(directory / place))
    newest = sorted({match[1] for match in map(_RUN.fullmatch, names) if match}, reverse=True)[:limit]

    def known(connection: sa.Connection) -> set[str]:
        found = set(purgeable_runs.endings(connection, newest))
        return found | purgeable_runs.removed(connection, sorted(set(newest) - found))

    return sorted(set(newest) - read(known)) if newest else []


def sentence(run_ids: list[str], directory: Path) -> str:
    """Return what to tell the operator of runs that the database does not know."""
    more = f" and {len(run_ids) - _NAMED_MAX} more" if len(run_ids) > _NAMED_MAX else ""
    return (
        f"{directory} has files of {len(run_ids)} runs that the database does not know: "
        f"{', '.join(run_ids[:_NAMED_MAX])}{more}. The database or its disk lost these runs. Their output stays in "
        f"{directory / 'logs'}; remove it once nobody needs it"
    )


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(directory)
    return []
