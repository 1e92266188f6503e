"""What a delivery remembers between two processes: a file beside the logs of its attempt, whole or not there.

    <attempt>/tracking-<node rank>.state     which MLflow run, up to where points were sent, which steps are done

Failure cases: a full disk, or a directory that was deleted: the delivery goes on with what it has in memory, and a next
one does again what it cannot know was done, which changes nothing in MLflow; a file that cannot be read: likewise.
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
    """The state of one delivery.

    Attributes:
        tracked: the MLflow run, once it is known.
        asked_ns: when MLflow was last asked to make one without an answer yet, nanoseconds since 1970, or 0.
        offset: up to where the file of samples is sent, or was given up.
        sent_ns: moment of the last sample that was sent; those behind `offset` that are not later were sent, too.
        dropped: points that were given up.
        done: steps that need not be done again.
        ending: how the attempt ended, or None while it has not.
        is_settled: whether its receipt is there.
        over: why there is nothing left to do, or "".
    """

    tracked: TrackerRun | None = None
    asked_ns: int = 0
    offset: int = 0
    sent_ns: int = 0
    dropped: int = 0
    done: set[str] = msgspec.field(default_factory=set)
    ending: AttemptEnding | None = None
    is_settled: bool = False
    over: str = ""


def memory_path(directory: Path, node_rank: int) -> Path:
    """Return where the delivery of an attempt on a node remembers."""
    return directory / f"tracking-{node_rank}.state"


def load_memory(path: Path) -> DeliveryState:
    """Return what was remembered; an empty memory where nothing was, or nothing can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
        return from_json(file.read(_BYTES_MAX), DeliveryState)
    return DeliveryState()


def save_memory(path: Path, memory: DeliveryState) -> None:
    """Write it down; a disk that is full, or a directory that is gone, is not worth ending a delivery for."""
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(memory))
        temporary.replace(path)
