"""MLflow over its REST interface; `mlflow` itself is never imported, so any version of it, or none, may be installed.

    begin, find   experiments/get-by-name, experiments/create, runs/search, runs/create, runs/get
    log           runs/log-batch, at most 1000 points, 100 parameters or 100 tags at once
    upload        PUT mlflow-artifacts/artifacts/…, where the server takes files itself
    resume, end   runs/update

The tag `sgpu.run_id` identifies an MLflow run of ours, so that it is not made twice: by another node, by a restarted
process, or after a request whose answer did not come. Of two that make an experiment at once, the second looks again.
A deleted experiment is refused, and so is `upload` to a server whose files lie in a bucket or on its disk. Failures of
the connection: see `rest.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from serverless_gpu.model.spec import Tracking
from serverless_gpu.model.tracking_rules import KEY_CHARACTERS_MAX, RUN_TAG, Status, cut
from serverless_gpu.tracking.base import Metric, TrackerAway, TrackerRefused, TrackerRun
from serverless_gpu.tracking.rest import LONG_TIMEOUT_S, MlflowExists, MlflowNotFound, RestClient

METRICS_MAX = 1000
PAIRS_MAX = 100
EXPERIMENT_VARIABLE, RUN_VARIABLE = "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"
_ARTIFACTS = "mlflow-artifacts/artifacts"

T = TypeVar("T")


class _Experiment(msgspec.Struct):
    experiment_id: str
    lifecycle_stage: str = "active"


class _ExperimentAnswer(msgspec.Struct):
    experiment: _Experiment


class _Created(msgspec.Struct):
    experiment_id: str


_ENDED = frozenset({"FINISHED", "FAILED", "KILLED"})


class _Info(msgspec.Struct):
    run_id: str
    experiment_id: str
    artifact_uri: str = ""
    lifecycle_stage: str = "active"
    status: str = "RUNNING"


class _Tag(msgspec.Struct):
    key: str
    value: str = ""


class _Data(msgspec.Struct):
    tags: list[_Tag] = []


class _Run(msgspec.Struct):
    info: _Info
    data: _Data = msgspec.field(default_factory=_Data)


class _RunAnswer(msgspec.Struct):
    run: _Run


class _Runs(msgspec.Struct):
    runs: list[_Run] = []


class _Nothing(msgspec.Struct):
    """An answer without content."""


class MlflowTracker:
    """One MLflow server, for one thread at a time.

    `address` is its URI, with optional user and password, or a function that returns it or raises `TrackerAway` while
    it is unknown. `environ` has the caller's MLflow variables; none for a server that the caller did not choose.
    """

    def __init__(self, address: str | Callable[[], str], environ: Mapping[str, str]) -> None:
        self._rest = RestClient(address, environ)
        self._experiments: dict[str, str] = {}

    def find(self, tracking: Tracking, run_id: str) -> TrackerRun | None:
        """Return the first MLflow run with this run's tag, or None."""
        if tracking.run_id:
            return self._continued(tracking.run_id)
        experiment_id = self._experiment(tracking, make=False)
        if experiment_id is None:
            return None
        if not run_id.isalnum():  # it stands between quotes in the filter
            raise TrackerRefused(f"{run_id!r} is no identifier of a run")
        wanted = {
            "experiment_ids": [experiment_id],
            "filter": f"tags.`{RUN_TAG}` = '{run_id}'",
            "max_results": 10,
            "order_by": ["attributes.start_time ASC"],
        }
        found = self._rest.call("POST", "mlflow/runs/search", wanted, answer=_Runs).runs
        return min((self._tracked(run.info) for run in found), key=lambda tracked: tracked.run_id, default=None)

    def begin(self, tracking: Tracking, run_id: str, *, tags: Mapping[str, str], at_ms: int) -> TrackerRun:
        """Return the MLflow run: made, or the continued one, which keeps its name and parent.

        A doubtful TrackerAway may have made the run nevertheless.
        """
        if tracking.run_id:
            tracked = self._continued(tracking.run_id)
            self.log(tracked, tags=tags)
            return tracked
        try:
            experiment_id = self._experiment(tracking, make=True)
        except TrackerAway as error:
            raise TrackerAway(str(error)) from None  # it was not asked for a run yet
        body = {
            "experiment_id": experiment_id,
            "start_time": at_ms,
            "run_name": cut(tracking.run_name, KEY_CHARACTERS_MAX) or f"jobTaskRun-{run_id}",
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        try:
            made = self._rest.call("POST", "mlflow/runs/create", body, answer=_RunAnswer, timeout_s=LONG_TIMEOUT_S)
        except MlflowNotFound as error:
            self._experiments.clear()  # deleted for good since we looked
            raise _named(error, EXPERIMENT_VARIABLE if tracking.experiment_id else "") from None
        return self._tracked(made.run.info)

    def log(
        self,
        tracked: TrackerRun,
        *,
        metrics: Sequence[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add points, parameters and tags; repeating changes nothing.

        After TrackerAway some may have arrived; TrackerRefused rejects the whole request that has a wrong item.
        """
        for points in _batches(metrics, METRICS_MAX):
            rows = [{"key": at.key, "value": at.value, "timestamp": at.at_ms, "step": at.step} for at in points]
            self._batch(tracked, "metrics", rows)
        for name, pairs in (("params", params), ("tags", tags)):
            for batch in _batches(list((pairs or {}).items()), PAIRS_MAX):
                self._batch(tracked, name, [{"key": key, "value": value} for key, value in batch])

    def tags(self, tracked: TrackerRun) -> Mapping[str, str]:
        """Return the run's current tags."""
        run = self._get(tracked.run_id)
        return {tag.key: tag.value for tag in run.data.tags}

    def upload(self, tracked: TrackerRun, name: str, data: bytes) -> None:
        """Add or replace an artifact at the relative path `name`; TrackerRefused where we cannot write."""
        root = _proxied(tracked.artifacts, tracked.uri)
        if root is None:
            raise TrackerRefused(f"MLflow at {tracked.uri} takes no files for {tracked.artifacts or 'this run'}")
        self._rest.put(f"{_ARTIFACTS}/{quote(root.strip('/'))}/{quote(name)}", data)

    def resume(self, tracked: TrackerRun) -> None:
        """Mark the run as running again."""
        self._update(tracked, {"status": "RUNNING"})

    def end(self, tracked: TrackerRun, status: Status, at_ms: int) -> None:
        """Mark the run as ended."""
        self._update(tracked, {"status": status, "end_time": at_ms})

    def close(self) -> None:
        """Give the connection back."""
        self._rest.close()

    # --- below ------------------------------------------------------------------------------------------------------

    def _experiment(self, tracking: Tracking, *, make: bool) -> str | None:
        """Return the experiment's identifier; None when it is not there and not to be made."""
        name = tracking.experiment
        if tracking.experiment_id or not name:
            return tracking.experiment_id or "0"  # MLflow's own default
        if name in self._experiments:
            return self._experiments[name]
        experiment_id = self._looked_up(name)
        if experiment_id is None and make:
            try:
                made = self._rest.call(
                    "POST", "mlflow/experiments/create", {"name": name}, answer=_Created, timeout_s=LONG_TIMEOUT_S
                )
                experiment_id = made.experiment_id
            except MlflowExists:  # another process was faster
                experiment_id = self._looked_up(name)
        if experiment_id is not None:
            self._experiments = {name: experiment_id}
        return experiment_id

    def _looked_up(self, name: str) -> str | None:
        query = {"experiment_name": name}
        try:
            found = self._rest.call("GET", "mlflow/experiments/get-by-name", answer=_ExperimentAnswer, query=query)
        except MlflowNotFound:
            return None
        if found.experiment.lifecycle_stage != "active":
            raise TrackerRefused(
                f"the experiment {name} has been deleted in MLflow at {self._rest.uri}: "
                "restore it there, or name another one in MLFLOW_EXPERIMENT_NAME"
            )
        return found.experiment.experiment_id

    def _continued(self, run_id: str) -> TrackerRun:
        try:
            info = self._get(run_id).info
        except MlflowNotFound as error:
            raise _named(error, RUN_VARIABLE) from None
        if info.lifecycle_stage != "active":
            deleted = TrackerRefused(f"the MLflow run {run_id} has been deleted in MLflow at {self._rest.uri}")
            raise _named(deleted, RUN_VARIABLE)
        return self._tracked(info)

    def _get(self, run_id: str) -> _Run:
        return self._rest.call("GET", "mlflow/runs/get", answer=_RunAnswer, query={"run_id": run_id}).run

    def _batch(self, tracked: TrackerRun, kind: str, entries: list[dict[str, object]]) -> None:
        self._rest.call("POST", "mlflow/runs/log-batch", {"run_id": tracked.run_id, kind: entries}, answer=_Nothing)

    def _update(self, tracked: TrackerRun, change: dict[str, object]) -> None:
        self._rest.call("POST", "mlflow/runs/update", {"run_id": tracked.run_id, **change}, answer=_Nothing)

    def _tracked(self, info: _Info) -> TrackerRun:
        uri = self._rest.uri
        if not (_is_id(info.run_id) and _is_id(info.experiment_id)):  # ranks get them as variables
            raise TrackerRefused(f"MLflow at {uri} has identifiers that no MLflow has")
        return TrackerRun(
            run_id=info.run_id,
            experiment_id=info.experiment_id,
            uri=uri,
            url=f"{uri}/#/experiments/{quote(info.experiment_id, safe='')}/runs/{quote(info.run_id, safe='')}",
            artifacts=info.artifact_uri,
            had_ended=info.status in _ENDED,
        )


def _named(error: TrackerRefused, variable: str) -> TrackerRefused:
    """Return a refusal that names the caller's variable with the unknown value."""
    return type(error)(f"{error} ({variable} names it)") if variable else error


def _proxied(artifacts: str, uri: str) -> str | None:
    """Return the path below the server's own store of files, or None when they lie somewhere else."""
    parts, server = urlsplit(artifacts), urlsplit(uri)
    if parts.scheme == "mlflow-artifacts" and parts.netloc in ("", server.netloc):
        return parts.path
    prefix = f"{server.path}/api/2.0/{_ARTIFACTS}/"
    if (parts.scheme, parts.netloc) == (server.scheme, server.netloc) and parts.path.startswith(prefix):
        return parts.path.removeprefix(prefix)
    return None


def _is_id(text: str) -> bool:
    return 0 < len(text) <= KEY_CHARACTERS_MAX and text.isascii() and text.isprintable()


def _batches(entries: Sequence[T], size: int) -> Iterator[list[T]]:
    rest = iter(entries)
    while batch := list(islice(rest, size)):
        yield batch
