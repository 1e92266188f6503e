"""What the fake MLflow server of `mlflow.py` remembers, and the rules by which it takes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

KEY_CHARACTERS_MAX = 250
PARAM_CHARACTERS_MAX = 6000
TAG_CHARACTERS_MAX = 8000
METRICS_MAX = 1000
PAIRS_MAX = 100

_NAME = re.compile(r"^[/\w.\- :]*$")
_FILTER = re.compile(r"^tags\.`([^`]+)` = '([^']*)'$")
_STATUSES = ("RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")

Asked = Mapping[str, Any]


class Refusal(Exception):
    """The answer to a request that breaks a rule."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        self.code, self.message, self.status = code, message, status
        super().__init__(message)


class Point(NamedTuple):
    """One point of a series, as it came."""

    key: str
    value: float
    timestamp: int
    step: int


class FakeRun:
    """One run.

    Attributes:
        points: all of them, in the order in which they came, each once.
        files: what was uploaded, by path below the run's artifacts.
    """

    def __init__(self, run_id: str, experiment_id: str, asked: Asked) -> None:
        self.run_id = run_id
        self.experiment_id = experiment_id
        self.name = str(asked.get("run_name") or "")
        self.status = "RUNNING"
        self.start_time = int(asked.get("start_time") or 0)
        self.end_time: int | None = None
        self.lifecycle_stage = "active"
        self.tags: dict[str, str] = {}
        self.params: dict[str, str] = {}
        self.points: list[Point] = []
        self.files: dict[str, bytes] = {}
        self._seen: set[Point] = set()

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return step and value of the points of one series, in the order in which they came."""
        return [(point.step, point.value) for point in self.points if point.key == key]

    def add(self, point: Point) -> None:
        """Add a point, unless it is there."""
        if point not in self._seen:
            self._seen.add(point)
            self.points.append(point)

    def shown(self) -> dict[str, Any]:
        """Return it as MLflow shows it."""
        last = {point.key: point for point in sorted(self.points, key=lambda point: point.step)}
        info: dict[str, Any] = {
            "run_id": self.run_id,
            "run_uuid": self.run_id,
            "run_name": self.name,
            "experiment_id": self.experiment_id,
            "user_id": "",
            "status": self.status,
            "start_time": self.start_time,
            "artifact_uri": f"mlflow-artifacts:/{self.experiment_id}/{self.run_id}/artifacts",
            "lifecycle_stage": self.lifecycle_stage,
        }
        if self.end_time is not None:
            info["end_time"] = self.end_time
        data = {
            "metrics": [point._asdict() for point in last.values()],
            "params": [{"key": key, "value": value} for key, value in self.params.items()],
            "tags": [{"key": key, "value": value} for key, value in self.tags.items()],
        }
        return {"info": info, "data": data}


class FakeStore:
    """Experiments and runs.

    Attributes:
        experiments: names by identifier.
        runs: by identifier, oldest first.
    """

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {"0": "Default"}
        self.deleted: set[str] = set()
        self.runs: dict[str, FakeRun] = {}

    def do(self, method: str, name: str, asked: Asked) -> dict[str, Any]:
        """Carry a request out and return the answer.

        Args:
            method: of the request.
            name: its path below ``mlflow/``.
            asked: its body, or its query.

        Raises:
            Refusal: it breaks a rule.
        """
        verbs: dict[tuple[str, str], Callable[[Asked], dict[str, Any]]] = {
            ("GET", "experiments/get-by-name"): self._experiment_by_name,
            ("GET", "experiments/get"): self._experiment,
            ("POST", "experiments/create"): self._create_experiment,
            ("GET", "runs/get"): lambda asked: {"run": self._run(asked).shown()},
            ("POST", "runs/create"): self._create_run,
            ("POST", "runs/update"): self._update_run,
            ("POST", "runs/search"): self._search,
            ("POST", "runs/log-batch"): self._log_batch,
            ("POST", "runs/log-metric"): lambda asked: self._log(asked, metrics=[asked]),
            ("POST", "runs/log-parameter"): lambda asked: self._log(asked, params=[asked]),
            ("POST", "runs/set-tag"): lambda asked: self._log(asked, tags=[asked]),
            ("GET", "metrics/get-history"): self._history,
        }
        verb = verbs.get((method, name))
        if verb is None:
            raise Refusal("ENDPOINT_NOT_FOUND", f"the fake knows no {method} {name}", 404)
        return verb(asked)

    def put_file(self, path: str, data: bytes) -> None:
        """Take a file; its path is ``<experiment>/<run>/artifacts/<name>``."""
        run, name = self._place(path)
        run.files[name] = data

    def file(self, path: str) -> bytes:
        """Return a file.

        Raises:
            Refusal: it is not there.
        """
        run, name = self._place(path)
        if name not in run.files:
            raise Refusal("RESOURCE_DOES_NOT_EXIST", f"no file {name}", 404)
        return run.files[name]

    # --- below ------------------------------------------------------------------------------------------------------

    def _place(self, path: str) -> tuple[FakeRun, str]:
        experiment, run_id, artifacts, name = path.split("/", 3)
        run = self._run({"run_id": run_id})
        if artifacts != "artifacts" or experiment != run.experiment_id or ".." in name.split("/") or "#" in name:
            raise Refusal("INVALID_PARAMETER_VALUE", "Invalid path")
        return run, name

    def _experiment_by_name(self, asked: Asked) -> dict[str, Any]:
        for identifier, name in self.experiments.items():
            if name == asked["experiment_name"]:
                return self._experiment({"experiment_id": identifier})
        raise Refusal("RESOURCE_DOES_NOT_EXIST", f"Could not find experiment {asked['experiment_name']}", 404)

    def _experiment(self, asked: Asked) -> dict[str, Any]:
        identifier = str(asked.get("experiment_id"))
        if identifier not in self.experiments:
            raise Refusal("RESOURCE_DOES_NOT_EXIST", f"No Experiment with id={identifier} exists", 404)
        stage = "deleted" if identifier in self.deleted else "active"
        shown = {
            "experiment_id": identifier,
            "name": self.experiments[identifier],
            "lifecycle_stage": stage,
            "artifact_location": f"mlflow-artifacts:/{identifier}",
        }
        return {"experiment": shown}

    def _create_experiment(self, asked: Asked) -> dict[str, Any]:
        name = str(asked.get("name") or "")
        if not name:
            raise Refusal("INVALID_PARAMETER_VALUE", "Invalid experiment name: ''")
        if name in self.experiments.values():
            raise Refusal("RESOURCE_ALREADY_EXISTS", f"Experiment(name={name}) already exists.")
        identifier = str(len(self.experiments))
        self.experiments[identifier] = name
        return {"experiment_id": identifier}

    def _run(self, asked: Asked) -> FakeRun:
        identifier = str(asked.get("run_id") or asked.get("run_uuid"))
        if identifier not in self.runs:
            raise Refusal("RESOURCE_DOES_NOT_EXIST", f"Run with id={identifier} not found", 404)
        return self.runs[identifier]

    def _active(self, asked: Asked) -> FakeRun:
        run = self._run(asked)
        if run.lifecycle_stage != "active":
            raise Refusal("INVALID_PARAMETER_VALUE", f"The run {run.run_id} must be in the 'active' state.")
        return run

    def _create_run(self, asked: Asked) -> dict[str, Any]:
        identifier = str(asked.get("experiment_id") or "0")
        if self._experiment({"experiment_id": identifier})["experiment"]["lifecycle_stage"] != "active":
            raise Refusal("INVALID_PARAMETER_VALUE", f"The experiment {identifier} must be in the 'active' state.")
        tags = [(tag["key"], tag["value"]) for tag in asked.get("tags", ())]
        for key, value in tags:
            check(key, value, TAG_CHARACTERS_MAX)
        run = FakeRun(f"{len(self.runs) + 1:032x}", identifier, asked)
        run.tags.update(tags)
        run.tags.setdefault("mlflow.runName", run.name)
        self.runs[run.run_id] = run
        return {"run": run.shown()}

    def _update_run(self, asked: Asked) -> dict[str, Any]:
        run = self._active(asked)
        if asked.get("status", "RUNNING") not in _STATUSES:
            raise Refusal("INVALID_PARAMETER_VALUE", f"Invalid status {asked['status']}")
        run.status = str(asked.get("status") or run.status)
        run.name = str(asked.get("run_name") or run.name)
        if asked.get("end_time") is not None:
            run.end_time = int(asked["end_time"])
        return {"run_info": run.shown()["info"]}

    def _search(self, asked: Asked) -> dict[str, Any]:
        wanted = [str(identifier) for identifier in asked.get("experiment_ids", ())]
        found = [run for run in self.runs.values() if run.experiment_id in wanted and run.lifecycle_stage == "active"]
        text = str(asked.get("filter") or "")
        if text:
            matched = _FILTER.match(text)
            if matched is None:
                raise Refusal("INVALID_PARAMETER_VALUE", f"the fake knows no filter {text}")
            found = [run for run in found if run.tags.get(matched[1]) == matched[2]]
        found.sort(key=lambda run: run.start_time)
        return {"runs": [run.shown() for run in found[: int(asked.get("max_results", 1000))]]} if found else {}

    def _log_batch(self, asked: Asked) -> dict[str, Any]:
        kinds = {kind: list(asked.get(kind, ())) for kind in ("metrics", "params", "tags")}
        for kind, most in (("metrics", METRICS_MAX), ("params", PAIRS_MAX), ("tags", PAIRS_MAX)):
            if len(kinds[kind]) > most:
                raise Refusal("INVALID_PARAMETER_VALUE", f"A batch logging request can contain at most {most} {kind}.")
        if sum(len(entries) for entries in kinds.values()) > METRICS_MAX:
            raise Refusal("INVALID_PARAMETER_VALUE", "A batch logging request can contain at most 1000 of all.")
        return self._log(asked, **kinds)

    def _log(
        self, asked: Asked, metrics: list[Asked] | None = None, params: list[Asked] | None = None, tags: Any = None
    ) -> dict[str, Any]:
        """Take all of it, or nothing."""
        run = self._active(asked)
        points = [_point(entry) for entry in metrics or ()]
        for entry in params or ():
            check(entry["key"], entry.get("value", ""), PARAM_CHARACTERS_MAX)
            if run.params.get(entry["key"], entry["value"]) != entry["value"]:
                raise Refusal("INVALID_PARAMETER_VALUE", f"Changing param values is not allowed: {entry['key']}")
        for entry in tags or ():
            check(entry["key"], entry.get("value", ""), TAG_CHARACTERS_MAX)
        for point in points:
            run.add(point)
        run.params.update({entry["key"]: entry["value"] for entry in params or ()})
        run.tags.update({entry["key"]: entry["value"] for entry in tags or ()})
        return {}

    def _history(self, asked: Asked) -> dict[str, Any]:
        run = self._run(asked)
        return {"metrics": [point._asdict() for point in run.points if point.key == asked["metric_key"]]}


def _point(entry: Asked) -> Point:
    value = entry.get("value")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refusal("INVALID_PARAMETER_VALUE", f"Invalid value {value!r} for metric {entry.get('key')}")
    if "timestamp" not in entry:
        raise Refusal("INVALID_PARAMETER_VALUE", "Missing value for required parameter 'timestamp'")
    check(entry["key"], "", 1)
    return Point(entry["key"], float(value), int(entry["timestamp"]), int(entry.get("step") or 0))


def check(key: str, value: str, characters_max: int) -> None:
    """Look whether MLflow would take a name and its value.

    Args:
        key: of a metric, parameter or tag.
        value: of a parameter or tag.
        characters_max: how long the value may be.

    Raises:
        Refusal: it would not.
    """
    parts = key.split("/")
    if not _NAME.match(key) or not key or any(part in ("", ".", "..") for part in parts):
        raise Refusal("INVALID_PARAMETER_VALUE", f"Invalid name {key!r}")
    if len(key) > KEY_CHARACTERS_MAX or len(value) > characters_max:
        raise Refusal("INVALID_PARAMETER_VALUE", f"{key[:50]!r} exceeds the maximum length")
