"""State of a delivery across processes: a file beside the logs of its attempt, written atomically.

    <attempt>/tracking-<node rank>.state     which MLflow run, up to where points were sent, which steps are done

Failure cases: with a full disk, a deleted directory or an unreadable file the delivery continues in memory, and a later
one repeats the steps in doubt, which changes nothing in MLflow.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.tracking.base import TrackerRun

_BYTES_MAX = 1 << 20


class AttemptEnding(msgspec.Struct, frozen=True, kw_only=True):
    """How an attempt ended, and when, nanoseconds since 1970."""

    state: State
    reason: Reason
    sentence: str = ""
    at_ns: int


class DeliveryState(msgspec.Struct, kw_only=True):
    """The state of one delivery."""

    tracked: TrackerRun | None = None  # None while unknown
    asked_ns: int = 0  # last unanswered request to make the run, nanoseconds since 1970, or 0
    offset: int = 0  # in the file of samples: everything before is sent or dropped
    sent_ns: int = 0  # last sample sent; earlier samples behind `offset` were sent, too
    dropped: int = 0  # points
    done: set[str] = msgspec.field(default_factory=set)  # steps
    ending: AttemptEnding | None = None  # of the attempt; None before
    is_settled: bool = False  # whether the receipt exists
    over: str = ""  # why nothing is left to do, or ""


def memory_path(directory: Path, node_rank: int) -> Path:
    """Return where the delivery of an attempt on a node remembers."""
    return directory / f"tracking-{node_rank}.state"


def load_memory(path: Path) -> DeliveryState:
    """Return the stored state; an empty one if absent or unreadable."""
    with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
        return from_json(file.read(_BYTES_MAX), DeliveryState)
    return DeliveryState()


def save_memory(path: Path, memory: DeliveryState) -> None:
    """Write it down; a disk that is full, or a directory that is gone, is not worth ending a delivery for."""
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(memory))
        temporary.replace(path)
