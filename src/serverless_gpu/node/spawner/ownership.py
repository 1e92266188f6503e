"""Returns the files of an attempt from its principal to the node.

During an attempt with a uid of its own, the principal owns the directories that its ranks write. The supervisor takes
the directories back after the last rank has ended. Then no file of the principal remains outside of its home, and an
agent without the rights of root can read and remove the results.

Failure cases: If the supervisor is killed, the agent or the uplink takes the directories back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.node.spawner.verbs import Spawner

CALL = "call.pkl"
WRITTEN = ("results", "failures", "work")
"""Directories of an attempt that its ranks write."""


def written_files(attempt: Path, checkpoints: Path | None) -> list[Path]:
    """Return the files and directories of an attempt that can belong to its principal.

    `checkpoints` contains the checkpoints of all runs.
    """
    found = [attempt / CALL, *(attempt / name for name in WRITTEN)]
    return found if checkpoints is None else [*found, checkpoints / attempt.parent.name]


def reclaim(spawner: Spawner, files: Iterable[Path]) -> str:
    """Make the node the owner of files that belong to a principal. Return a problem, or ""."""
    for path in files:
        try:
            owner = os.lstat(path).st_uid
            if owner not in (0, os.geteuid()):
                spawner.take(owner, str(path))
        except FileNotFoundError:
            continue
        except (OSError, IsolationUnavailable) as error:
            return f"{path} still belongs to the principal of the run: {error}"
    return ""
