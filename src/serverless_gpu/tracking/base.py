"""The port to experiment trackers.

    Delivery ──▶ Tracker ──── MlflowTracker   MLflow's REST interface (`mlflow.py`); `mlflow` is never imported

A tracker is used by one thread at a time, blocks for a bounded time, and raises one of two things: `TrackerAway`, after
which the same call may be made again later, or `TrackerRefused`, after which it may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from serverless_gpu.model.spec import Tracking
from serverless_gpu.model.tracking_rules import Status


class TrackerAway(Exception):
    """The tracker does not answer, or cannot now; with `is_doubtful` it may have done what was asked nevertheless."""

    def __init__(self, text: str, *, is_doubtful: bool = False) -> None:
        self.is_doubtful = is_doubtful
        super().__init__(text)


class TrackerRefused(Exception):
    """The tracker will never take this; the text says why."""


class Metric(NamedTuple):
    """One point of a series."""

    key: str
    value: float
    at_ms: int
    step: int


class TrackerRun(msgspec.Struct, frozen=True, kw_only=True):
    """A tracked run as the tracker knows it."""

    run_id: str  # MLflow's own identifier
    experiment_id: str
    uri: str  # of the tracking server, without credentials
    url: str  # what a person opens
    artifacts: str = ""  # where its artifacts go, as the tracker says
    had_ended: bool = False  # whether its maker had ended it when it was found; ranks that log to it open it again


class Tracker(Protocol):
    """What keeps experiments."""

    def find(self, tracking: Tracking, run_id: str) -> TrackerRun | None:
        """Return the tracked run that carries this run's tag, or None: made by another node, or before a restart."""
        ...

    def begin(self, tracking: Tracking, run_id: str, *, tags: Mapping[str, str], at_ms: int) -> TrackerRun:
        """Return the tracked run: made, or the one that `tracking` continues."""
        ...

    def log(
        self,
        tracked: TrackerRun,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add points, parameters and tags; the same again changes nothing."""
        ...

    def tags(self, tracked: TrackerRun) -> Mapping[str, str]:
        """Return the tags it has now."""
        ...

    def upload(self, tracked: TrackerRun, name: str, data: bytes) -> None:
        """Add a small file to its artifacts, or replace it."""
        ...

    def resume(self, tracked: TrackerRun) -> None:
        """Mark the run as running again: another attempt of a run whose attempt before had ended."""
        ...

    def end(self, tracked: TrackerRun, status: Status, at_ms: int) -> None:
        """Mark the run as ended."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


def split_userinfo(uri: str) -> tuple[str, str]:
    """Return an address without its credentials and trailing slash, and the credentials, or ""."""
    try:
        parts = urlsplit(uri.strip())
    except ValueError:
        return "", ""
    userinfo, _, host = parts.netloc.rpartition("@")
    # A query or a fragment in the address of a server means nothing, and may be a secret.
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), userinfo
