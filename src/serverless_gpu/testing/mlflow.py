"""Provides a fake MLflow server that records all requests and simulates failures for tests.

    with FakeMlflow() as mlflow:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
        ...
        mlflow.behave("hangs")          # until the next call
        mlflow.behave("answers")
        assert mlflow.run_of(run_id).series("loss") == [(0, 0.7), (1, 0.5)]

The fake is a real HTTP server on a loopback port, so that MLflow clients in other processes can use the fake. The fake
supports experiments, runs, metrics, parameters, tags, search by one tag, and files through the artifact proxy. Like
MLflow, the fake refuses a whole request if one name or value is invalid. The fake ignores duplicate points, and refuses
a parameter with a changed value.

Behaviours:

    answers   answers as MLflow does
    refuses   no process listens on the port, but the port stays reserved
    hangs     holds requests without an answer, and processes them when the behaviour changes
    loses     processes requests and closes the connection before the answer
    fails     answers 500 to all requests
    forbids   answers 401 to all requests
    foreign   answers an HTML page to all requests, like a proxy's login page
    slow      answers after a delay

Tests call `behave` to simulate failures.
"""

from __future__ import annotations

import contextlib
import http.server
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

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
    """An error answer of the fake to an invalid request."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        self.code, self.message, self.status = code, message, status
        super().__init__(message)


class Point(NamedTuple):
    """A metric point that a client has sent to the fake."""

    key: str
    value: float
    timestamp: int
    step: int


class FakeRun:
    """An MLflow run of the fake.

    Attributes:
        points: all points in the order of arrival, without duplicates.
        files: uploaded files by path below the run's artifacts.
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
        """Return the step and value of each point of one series, in order of arrival."""
        return [(point.step, point.value) for point in self.points if point.key == key]

    def add(self, point: Point) -> None:
        """Add a metric point unless the series already contains the same point."""
        if point not in self._seen:
            self._seen.add(point)
            self.points.append(point)

    def shown(self) -> dict[str, Any]:
        """Return the run in MLflow's JSON format."""
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
    """The experiments and runs of the fake.

    Attributes:
        experiments: names by identifier.
        runs: runs by identifier, oldest first.
    """

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {"0": "Default"}
        self.deleted: set[str] = set()
        self.runs: dict[str, FakeRun] = {}

    def do(self, method: str, name: str, asked: Asked) -> dict[str, Any]:
        """Execute an API request and return its answer.

        Args:
            method: HTTP method of the request.
            name: path of the request below ``mlflow/``.
            asked: body of the request, or its query.

        Raises:
            Refusal: the request is invalid.
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
            ("GET", "metrics/get-history"): lambda asked: {
                "metrics": [point._asdict() for point in self._run(asked).points if point.key == asked["metric_key"]]
            },
        }
        verb = verbs.get((method, name))
        if verb is None:
            raise Refusal("ENDPOINT_NOT_FOUND", f"the fake does not support {method} {name}", 404)
        return verb(asked)

    def put_file(self, path: str, data: bytes) -> None:
        """Store a file. The path is ``<experiment>/<run>/artifacts/<name>``."""
        run, name = self._place(path)
        run.files[name] = data

    def file(self, path: str) -> bytes:
        """Return the content of an artifact file.

        Raises:
            Refusal: the file does not exist.
        """
        run, name = self._place(path)
        if name not in run.files:
            raise Refusal("RESOURCE_DOES_NOT_EXIST", f"no file {name}", 404)
        return run.files[name]

    # --- private methods --------------------------------------------------------------------------------------------

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
                raise Refusal("INVALID_PARAMETER_VALUE", f"the fake does not support the filter {text}")
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
        """Store either all entries of a request or none of them."""
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


def _point(entry: Asked) -> Point:
    value = entry.get("value")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Refusal("INVALID_PARAMETER_VALUE", f"Invalid value {value!r} for metric {entry.get('key')}")
    if "timestamp" not in entry:
        raise Refusal("INVALID_PARAMETER_VALUE", "Missing value for required parameter 'timestamp'")
    check(entry["key"], "", 1)
    return Point(entry["key"], float(value), int(entry["timestamp"]), int(entry.get("step") or 0))


def check(key: str, value: str, characters_max: int) -> None:
    """Refuse a metric, parameter or tag that MLflow would refuse.

    Args:
        key: name of a metric, parameter or tag.
        value: value of a parameter or tag.
        characters_max: maximum length of the value.

    Raises:
        Refusal: MLflow would refuse the name or value.
    """
    parts = key.split("/")
    if not _NAME.match(key) or not key or any(part in ("", ".", "..") for part in parts):
        raise Refusal("INVALID_PARAMETER_VALUE", f"Invalid name {key!r}")
    if len(key) > KEY_CHARACTERS_MAX or len(value) > characters_max:
        raise Refusal("INVALID_PARAMETER_VALUE", f"{key[:50]!r} exceeds the maximum length")


__all__ = ["Behaviour", "FakeMlflow", "FakeRun"]

Behaviour = Literal["answers", "refuses", "hangs", "loses", "fails", "forbids", "foreign", "slow"]

_HANG_S_MAX = 600.0
_BODY_BYTES_MAX = 64 << 20
_PREFIX = "/api/2.0/"
_FILES = "mlflow-artifacts/artifacts/"


class FakeMlflow:
    """A fake MLflow server, for use in a ``with`` statement.

    Args:
        slow_s: delay of the behaviour "slow" in seconds.

    Attributes:
        uri: value for ``MLFLOW_TRACKING_URI``.
        store: the received experiments and runs.
        requests: method and path of all requests in the order of arrival, with any behaviour.
        authorizations: the ``Authorization`` headers of all requests.
    """

    def __init__(self, *, slow_s: float = 0.2) -> None:
        self.uri = ""
        self.store = FakeStore()
        self.requests: list[tuple[str, str]] = []
        self.authorizations: list[str] = []
        self._slow_s = slow_s
        self._port = 0
        self._behaviour: Behaviour = "answers"
        self._only = ""
        self._changed = threading.Condition()
        self._server: _Server | None = None
        self._placeholder: socket.socket | None = None

    def __enter__(self) -> FakeMlflow:
        self._listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.behave("refuses")
        if self._placeholder is not None:
            self._placeholder.close()

    def behave(self, behaviour: Behaviour, *, only: str = "") -> None:
        """Change the fake's behaviour for the following requests.

        Args:
            behaviour: a behaviour from the list in the module docstring.
            only: part of the paths that the behaviour applies to, "" for all. The fake answers other paths normally.
        """
        with self._changed:
            self._behaviour, self._only = behaviour, only
            self._changed.notify_all()
        if behaviour == "refuses":
            self._close()
        elif self._server is None:
            self._listen()

    @property
    def runs(self) -> list[FakeRun]:
        """Return all MLflow runs of the fake, oldest first."""
        return list(self.store.runs.values())

    def run_of(self, run_id: str) -> FakeRun:
        """Return the MLflow run whose tag names a serverless-gpu run.

        Raises:
            AssertionError: not exactly one MLflow run has the tag.
        """
        found = [run for run in self.runs if run.tags.get("sgpu.run_id") == run_id]
        if len(found) != 1:
            raise AssertionError(f"{len(found)} MLflow runs have the tag sgpu.run_id={run_id}, not 1")
        return found[0]

    def wait(self, condition: Callable[[FakeMlflow], bool], timeout_s: float = 30.0) -> None:
        """Wait until a condition is true, and check the condition after every request.

        Args:
            condition: function that returns True to end the wait.
            timeout_s: maximum wait in seconds.

        Raises:
            AssertionError: the condition does not become true in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise AssertionError(
                    f"the condition was not true within {timeout_s:g} s; requests were {self.requests[-20:]}"
                )

    # --- private methods --------------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> _Reply | None:
        """Return the reply to a request, or None to close the connection.

        Args:
            method: HTTP method of the request.
            target: path and query.
            headers: headers of the request.
            body: body of the request.
        """
        path = urlsplit(target).path
        with self._changed:
            self.requests.append((method, path))
            self.authorizations.append(headers.get("Authorization", ""))
            self._changed.notify_all()
            behaviour = self._of(path)
            if behaviour == "hangs":
                self._changed.wait_for(lambda: self._of(path) != "hangs", _HANG_S_MAX)
                behaviour = self._of(path)
            elif behaviour == "slow":
                self._changed.wait_for(lambda: self._of(path) != "slow", self._slow_s)
            if behaviour == "refuses":
                return None
            if behaviour == "fails":
                return _Reply(500, {"error_code": "INTERNAL_ERROR", "message": "the test selected `fails`"})
            if behaviour == "forbids":
                return _Reply(401, "You are not authenticated.")
            if behaviour == "foreign":
                return _Reply(200, "<html><body>Please sign in.</body></html>")
            reply = self._done(method, target, body)
            self._changed.notify_all()
            return None if behaviour == "loses" else reply

    def _of(self, path: str) -> Behaviour:
        return self._behaviour if self._only in path else "answers"

    def _done(self, method: str, target: str, body: bytes) -> _Reply:
        parts = urlsplit(target)
        if parts.path in ("/health", "/version"):
            return _Reply(200, "OK" if parts.path == "/health" else "3.17.2")
        name = parts.path.removeprefix(_PREFIX)
        try:
            if name.startswith(_FILES):
                path = unquote(name.removeprefix(_FILES))
                if method == "PUT":
                    self.store.put_file(path, body)
                    return _Reply(200, {})
                return _Reply(200, self.store.file(path))
            query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
            asked: dict[str, Any] = msgspec.json.decode(body) if body else dict(query)
            return _Reply(200, self.store.do(method, name.removeprefix("mlflow/"), asked))
        except Refusal as refusal:
            return _Reply(refusal.status, {"error_code": refusal.code, "message": refusal.message})

    def _listen(self) -> None:
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None
        self._server = _Server(("127.0.0.1", self._port), _handler(self))
        self._port = self._server.server_address[1]
        self.uri = f"http://127.0.0.1:{self._port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def _close(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        server.shutdown()
        server.server_close()
        server.hang_up()
        # A bound socket that does not listen reserves the port while the kernel refuses clients.
        self._placeholder = socket.socket()
        self._placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._placeholder.bind(("127.0.0.1", self._port))


class _Reply:
    def __init__(self, status: int, content: object) -> None:
        self.status = status
        if isinstance(content, bytes):
            self.kind, self.data = "application/octet-stream", content
        elif isinstance(content, str):
            self.kind, self.data = "text/html", content.encode()
        else:
            self.kind, self.data = "application/json", msgspec.json.encode(content)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that have disconnected."""

    def hang_up(self) -> None:
        """Close idle keep-alive connections."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _handler(fake: FakeMlflow) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _HANG_S_MAX
        # Send head and body in one packet, because a second packet would wait 40 ms for an acknowledgement.
        wbufsize = -1

        def _any(self) -> None:
            length = min(int(self.headers.get("Content-Length") or 0), _BODY_BYTES_MAX)
            reply = fake.answer(self.command, self.path, dict(self.headers), self.rfile.read(length))
            if reply is None:
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(len(reply.data)))
            self.end_headers()
            self.wfile.write(reply.data)

        do_GET = do_POST = do_PUT = do_PATCH = _any

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the request log."""

    return Handler
