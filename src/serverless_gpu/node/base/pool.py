"""Detects whether a home's machine is in a Ray pool: its ranks are fenced then (`inside/linux.py`).

server/ray/keeper.lock is held by what keeps the Ray of a server here (`sgpu up --engine ray`), ray/keeper.lock by `sgpu
join`.
"""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.node.base.lock_files import held_note

PLACES = ("server/ray", "ray")
LOCK = "keeper.lock"


def keepers(home: Path) -> list[Path]:
    """Return the directories in a home of those that keep a Ray now."""
    return [home / place for place in PLACES if held_note(home / place / LOCK) is not None]


def in_pool(attempt: Path) -> bool:
    """Return whether the home of ``<home>/runs/<run>/<fence>`` is in a pool now."""
    return bool(keepers(attempt.parents[2])) if len(attempt.parents) > 2 else False
