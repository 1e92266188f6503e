"""How a run of the server ended, as commands read it: the last message of its stream, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from serverless_gpu.lazy_import import load
from serverless_gpu.node.attempt.history import read_ending

if TYPE_CHECKING:
    from serverless_gpu.node.base.stop_message import Stopped
    from serverless_gpu.wire.runs import RunView

_ENDING_S = 10.0


class RunEnding(NamedTuple):
    """Ending of a run."""

    stopped: Stopped
    directory: Path  # local files of the last attempt


def fetch_ending(view: RunView) -> RunEnding | None:
    """Return how a run that has ended did; None where the server does not say. Nothing is unpickled."""
    run = load("serverless_gpu.client.runs.attachment").attach(view.id)
    run.wait(_ENDING_S)
    stopped = read_ending(run.directory)
    return None if stopped is None else RunEnding(stopped, run.directory)
