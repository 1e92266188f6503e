"""The interface to experiment trackers.

    Delivery ──▶ Tracker ──── MlflowTracker   MLflow's REST interface (`mlflow.py`), without the `mlflow` package

Only one thread at a time may use a tracker. A call blocks only for a bounded time. After the exception `TrackerAway`,
the caller may retry the call. After the exception `TrackerRefused`, a retry would fail again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from serverless_gpu.model.spec import Tracking
from serverless_gpu.model.tracking_rules import Status


class TrackerAway(Exception):
    """The tracker is unavailable. If `is_doubtful` is True, the tracker may have executed the request."""

    def __init__(self, text: str, *, is_doubtful: bool = False) -> None:
        self.is_doubtful = is_doubtful
        super().__init__(text)


class TrackerRefused(Exception):
    """The tracker refuses the request, and a retry would fail too. The message is the reason."""


class Metric(NamedTuple):
    """A point of a metric series."""

    key: str
    value: float
    at_ms: int
    step: int


class TrackerRun(msgspec.Struct, frozen=True, kw_only=True):
    """A tracked run, as the tracker reports it."""

    run_id: str  # MLflow's identifier of the run.
    experiment_id: str
    uri: str  # Address of the tracking server, without credentials.
    url: str  # Web page of the run, for users.
    artifacts: str = ""  # Location of the artifacts, as the tracker reports it.
    # True if the user ended the run before the delivery began. Ranks that log to an ended run reopen the run.
    had_ended: bool = False


class Tracker(Protocol):
    """A server that stores experiments and runs."""

    def find(self, tracking: Tracking, run_id: str) -> TrackerRun | None:
        """Return the tracked run with this run's tag, or None.

        Another node, or a process before a restart, may have created the tracked run.
        """
        ...

    def begin(self, tracking: Tracking, run_id: str, *, tags: Mapping[str, str], at_ms: int) -> TrackerRun:
        """Return a new tracked run, or the run that `tracking` continues."""
        ...

    def log(
        self,
        tracked: TrackerRun,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add points, parameters and tags. Repeating a call changes nothing."""
        ...

    def tags(self, tracked: TrackerRun) -> Mapping[str, str]:
        """Return the current tags of the tracked run."""
        ...

    def upload(self, tracked: TrackerRun, name: str, data: bytes) -> None:
        """Add a small file to the artifacts, or replace an existing file."""
        ...

    def resume(self, tracked: TrackerRun) -> None:
        """Mark an ended run as running again, for another attempt."""
        ...

    def end(self, tracked: TrackerRun, status: Status, at_ms: int) -> None:
        """Mark the run as ended."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...


def split_userinfo(uri: str) -> tuple[str, str]:
    """Return an address without its credentials and trailing slash, and the credentials or ""."""
    try:
        parts = urlsplit(uri.strip())
    except ValueError:
        return "", ""
    userinfo, _, host = parts.netloc.rpartition("@")
    # A server address needs no query or fragment, and these may contain a secret.
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), userinfo
