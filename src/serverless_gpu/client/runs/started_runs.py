"""Prints the unfinished runs of this process on stderr when the process exits.

A script may drop the run handles that `.map()` returns and exit while the runs still hold devices. `submit` and `map`
therefore register each run. When a run ends, its handle updates the registration. When the process exits, an exit
handler checks the state of all registered runs. If the server does not answer, the exit handler prints that the runs
may continue. A forked child process prints nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from pathlib import Path

from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.lazy_import import load
from serverless_gpu.node.attempt.history import read_ending

_NAMED_MAX = 5
_ASKED_MAX = 20  # Maximum number of remote runs that the exit handler checks, with one request per run.
_PRUNED_AT = 256


class StartedRun:
    """A registered run, with its directory and a flag that is True after the run has ended."""

    __slots__ = ("directory", "is_over", "is_remote", "run_id")

    def __init__(self, run_id: str, directory: Path, *, is_remote: bool) -> None:
        self.run_id = run_id
        self.directory = directory
        self.is_remote = is_remote
        self.is_over = False


_started: list[StartedRun] = []
_owner = 0


def note_started(run_id: str, directory: Path, *, is_remote: bool) -> StartedRun:
    """Register a run until its handle reports that the run has ended."""
    global _owner, _started
    if _owner != os.getpid():
        _owner, _started = os.getpid(), []
        atexit.register(_name_unfinished)
    if len(_started) % _PRUNED_AT == 0:
        _started = [one for one in _started if not one.is_over]
    started = StartedRun(run_id, directory, is_remote=is_remote)
    _started.append(started)
    return started


def unfinished_text(run_ids: list[str], unknown: list[str]) -> str:
    """Return a message that lists running runs and runs in an unknown state, or "" without any run."""
    if not run_ids and not unknown:
        return ""
    ids = run_ids + unknown
    named = ", ".join(ids[:_NAMED_MAX]) + (f" and {len(ids) - _NAMED_MAX} more" if len(ids) > _NAMED_MAX else "")
    verb = "may continue" if unknown else "continues" if len(ids) == 1 else "continue"
    runs = "1 run" if len(ids) == 1 else f"{len(ids)} runs"
    return f"{runs} of this program {verb}: {named}; show a run with sgpu attach RUN, or stop it with sgpu cancel RUN"


def _name_unfinished() -> None:
    if os.getpid() != _owner:
        return
    left = [one for one in _started if not one.is_over]
    here = [one.run_id for one in left if not one.is_remote and read_ending(one.directory) is None]
    far = [one.run_id for one in left if one.is_remote]
    going, unknown = [], far
    if far:
        with contextlib.suppress(ServerlessGpuError, OSError):
            going = load("serverless_gpu.client.remote.remote_run").unfinished_runs(far[:_ASKED_MAX])
            unknown = far[_ASKED_MAX:]
    text = unfinished_text(here + going, unknown)
    if text:
        print(f"serverless-gpu: {text}", file=sys.stderr)
