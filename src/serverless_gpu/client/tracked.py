"""Finds a run's MLflow run in live messages or in files.

    protocol.Tracked, tracking.json, receipt ──▶ link ──▶ TrackedRun

An MLflow link contains the server, the experiment and the MLflow run. For a link in any other format, the server and
the experiment are "".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from serverless_gpu.json_codec import from_json

if TYPE_CHECKING:
    pass


_FILE = "tracking.json"
_FILE_BYTES_MAX = 65_536
_LINK = re.compile(r"(?P<uri>https?://[^#]*?)/?#.*/experiments/(?P<experiment>[\w-]+)/runs/(?P<run>[\w-]+)(?:/.*)?")


class TrackedRun(NamedTuple):
    """A run in MLflow.

    Attributes:
        run_id: MLflow's identifier, which `mlflow.get_run` and `MlflowClient` accept.
        url: address of the run's page for a browser.
        uri: address of the tracking server for `mlflow.set_tracking_uri`, without user and password.
        experiment_id: identifier of the run's experiment.
    """

    run_id: str
    url: str
    uri: str = ""
    experiment_id: str = ""


class _TrackingFile(msgspec.Struct, frozen=True):
    state: str = ""
    run_id: str = ""
    url: str = ""


def from_link(url: str, run_id: str = "") -> TrackedRun | None:
    """Return a link's MLflow run, or None for an empty link. A known `run_id` overrides the link's run."""
    found = _LINK.fullmatch(url)
    if found is None:
        return TrackedRun(run_id, url) if run_id else None
    return TrackedRun(run_id or found["run"], url, found["uri"], found["experiment"])


def from_directory(directory: Path) -> TrackedRun | None:
    """Return the MLflow run that a local attempt directory names, or None."""
    try:
        with (directory / _FILE).open("rb") as file:
            written = from_json(file.read(_FILE_BYTES_MAX), _TrackingFile)
    except (OSError, msgspec.MsgspecError):
        return None
    return from_link(written.url, written.run_id) if written.state == "ready" else None
