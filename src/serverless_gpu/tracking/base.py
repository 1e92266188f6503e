"""Defines the interface to experiment trackers.

    Delivery ──▶ Tracker ──── MlflowTracker   MLflow's REST interface (`mlflow.py`), without the `mlflow` package

Only one thread at a time may use a tracker. Each tracker call blocks for a bounded time. After `TrackerAway`, the
caller may retry the call. After `TrackerRefused`, a retry would fail again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from serverless_gpu.model.spec import Tracking
from serverless_gpu.model.tracking_rules import Status


class TrackerAway(Exception):
    """The tracker is unavailable. With `is_doubtful`, the tracker may have executed the request."""

    def __init__(self, text: str, *, is_doubtful: bool = False) -> None:
        self.is_doubtful = is_doubtful
        super().__init__(text)


class TrackerRefused(Exception):
    """The tracker refuses a request and would refuse every retry. The message contains the reason."""


class Metric(NamedTuple):
    """A point of a metric series."""

    key: str
    value: float
    at_ms: int
    step: int


class TrackerRun(msgspec.Struct, frozen=True, kw_only=True):
    """A tracked run in the form that the tracker reports."""

    run_id: str  # MLflow's identifier of the run.
    experiment_id: str
    uri: str  # Address of the tracking server, without credentials.
    url: str  # Address of the run's web page for users.
    artifacts: str = ""  # Location of the artifacts according to the tracker.
    # True if the user ended the run before the delivery began. Ranks that log to an ended tracked run reopen this run.
    had_ended: bool = False


class Tracker(Protocol):
    """Interface to a server that stores experiments and runs."""

    def find(self, tracking: Tracking, run_id: str) -> TrackerRun | None:
        """Return the tracked run whose tag names the run, or None.

        Another node or an earlier process may have created the tracked run.
        """
        ...

    def begin(self, tracking: Tracking, run_id: str, *, tags: Mapping[str, str], at_ms: int) -> TrackerRun:
        """Create a tracked run, or return the tracked run that `tracking` continues."""
        ...

    def log(
        self,
        tracked: TrackerRun,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add metric points, parameters and tags. Repeating a call changes nothing."""
        ...

    def tags(self, tracked: TrackerRun) -> Mapping[str, str]:
        """Return all current tags of the tracked run."""
        ...

    def upload(self, tracked: TrackerRun, name: str, data: bytes) -> None:
        """Add a small file to the artifacts, or replace an existing file."""
        ...

    def resume(self, tracked: TrackerRun) -> None:
        """Mark an ended tracked run as running again for another attempt."""
        ...

    def end(self, tracked: TrackerRun, status: Status, at_ms: int) -> None:
        """Mark the tracked run as ended."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def split_userinfo(uri: str) -> tuple[str, str]:
    """Split an address into the address without trailing slash, and the credentials or ""."""
    try:
        parts = urlsplit(uri.strip())
    except ValueError:
        return "", ""
    userinfo, _, host = parts.netloc.rpartition("@")
    # Drop the query and the fragment of the address, because they may contain a secret.
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), userinfo
