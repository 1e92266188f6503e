"""Implements a client for MLflow's REST API.

Users may install any version of the package `mlflow`, because the client does not import the package.

    begin, find   experiments/get-by-name, experiments/create, runs/search, runs/create, runs/get
    log           runs/log-batch, at most 1000 points, 100 parameters or 100 tags at once
    upload        PUT mlflow-artifacts/artifacts/…, if the server stores files itself
    resume, end   runs/update

The tag `sgpu.run_id` identifies the MLflow run, so that a retry or another node does not create a second run. If two
processes create an experiment at the same time, the second process looks up the experiment again. The client refuses a
deleted experiment. The client refuses `upload` if the server's files are in a bucket or in a local directory.

    RestClient.call, put ─▶ one request, at most 2 s (10 s for slow operations) ─▶ answer, at most 1 MiB
                                                                                 ├▶ TrackerAway: retry later
                                                                                 └▶ TrackerRefused: final

Failure cases: After a refused connection, a timeout, or a status of 408, 425, 429 or 5xx except 501, MLflow counts as
unavailable. An error message from MLflow about the request is a refusal. The result of any other error depends on the
server's earlier answers. If the server has never answered like MLflow, the client raises `TrackerRefused` with a hint.
Common causes of answers unlike MLflow's are a wrong address, a login page, a wrong password or an untrusted
certificate. A server that has answered like MLflow before is probably under maintenance and counts as unavailable. The
client aborts a request after twice its timeout, except while reading the headers.

The client reads credentials from the caller's MLflow environment variables. The client sends credentials only to the
server that these variables name. The client follows no redirects. Error messages contain neither credentials nor a
server's control characters.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import os
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

import httpx2
import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.spec import Tracking
from serverless_gpu.model.tracking_rules import KEY_CHARACTERS_MAX, RUN_TAG, Status, cut
from serverless_gpu.tracking.base import Metric, TrackerAway, TrackerRefused, TrackerRun, split_userinfo
from serverless_gpu.version import __version__

METRICS_MAX = 1000
PAIRS_MAX = 100
EXPERIMENT_VARIABLE, RUN_VARIABLE = "MLFLOW_EXPERIMENT_ID", "MLFLOW_RUN_ID"
TIMEOUT_S = 2.0
LONG_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1 << 20
_PASSING = frozenset({408, 425, 429})
_UNSUPPORTED = 501
_UNSENDABLE = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.InvalidURL, ValueError, ImportError)
_TEXT_CHARACTERS_MAX = 200
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")
_BUNDLES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
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
    """An answer whose content the client ignores."""


class MlflowTracker:
    """Tracks runs on an MLflow server. Only one thread at a time may use a tracker.

    `address` is the URI of the server, with optional user and password. `address` can also be a function that returns
    the URI, or raises `TrackerAway` while the URI is unknown. `environ` contains the caller's MLflow environment
    variables. For a server that the caller did not choose, `environ` is empty.
    """

    def __init__(self, address: str | Callable[[], str], environ: Mapping[str, str]) -> None:
        self._rest = RestClient(address, environ)
        self._experiments: dict[str, str] = {}

    def find(self, tracking: Tracking, run_id: str) -> TrackerRun | None:
        """Return the first MLflow run whose tag names the run, or None."""
        if tracking.run_id:
            return self._continued(tracking.run_id)
        experiment_id = self._experiment(tracking, make=False)
        if experiment_id is None:
            return None
        if not run_id.isalnum():  # The search filter contains the ID in quotes.
            raise TrackerRefused(f"{run_id!r} is not a valid run identifier")
        wanted = {
            "experiment_ids": [experiment_id],
            "filter": f"tags.`{RUN_TAG}` = '{run_id}'",
            "max_results": 10,
            "order_by": ["attributes.start_time ASC"],
        }
        found = self._rest.call("POST", "mlflow/runs/search", wanted, answer=_Runs).runs
        return min((self._tracked(run.info) for run in found), key=lambda tracked: tracked.run_id, default=None)

    def begin(self, tracking: Tracking, run_id: str, *, tags: Mapping[str, str], at_ms: int) -> TrackerRun:
        """Create an MLflow run, or return the continued MLflow run with its name and parent unchanged.

        If the error `TrackerAway` is doubtful, MLflow may have created the run.
        """
        if tracking.run_id:
            tracked = self._continued(tracking.run_id)
            self.log(tracked, tags=tags)
            return tracked
        try:
            experiment_id = self._experiment(tracking, make=True)
        except TrackerAway as error:
            raise TrackerAway(str(error)) from None  # MLflow has not received the request to create a run yet.
        body = {
            "experiment_id": experiment_id,
            "start_time": at_ms,
            "run_name": cut(tracking.run_name, KEY_CHARACTERS_MAX) or f"jobTaskRun-{run_id}",
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        try:
            made = self._rest.call("POST", "mlflow/runs/create", body, answer=_RunAnswer, timeout_s=LONG_TIMEOUT_S)
        except MlflowNotFound as error:
            self._experiments.clear()  # Another client has permanently deleted the experiment since its lookup.
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
        """Add metric points, parameters and tags. Repeating a call changes nothing.

        After `TrackerAway`, MLflow may have stored a part of the data. After `TrackerRefused`, MLflow has stored no
        data of the refused request.
        """
        for points in _batches(metrics, METRICS_MAX):
            rows = [{"key": at.key, "value": at.value, "timestamp": at.at_ms, "step": at.step} for at in points]
            self._batch(tracked, "metrics", rows)
        for name, pairs in (("params", params), ("tags", tags)):
            for batch in _batches(list((pairs or {}).items()), PAIRS_MAX):
                self._batch(tracked, name, [{"key": key, "value": value} for key, value in batch])

    def tags(self, tracked: TrackerRun) -> Mapping[str, str]:
        """Return the current tags of an MLflow run."""
        run = self._get(tracked.run_id)
        return {tag.key: tag.value for tag in run.data.tags}

    def upload(self, tracked: TrackerRun, name: str, data: bytes) -> None:
        """Add or replace an artifact at the relative path `name`.

        Raises TrackerRefused if the client cannot access the artifact store.
        """
        root = _proxied(tracked.artifacts, tracked.uri)
        if root is None:
            raise TrackerRefused(f"MLflow at {tracked.uri} accepts no files for {tracked.artifacts or 'this run'}")
        self._rest.put(f"{_ARTIFACTS}/{quote(root.strip('/'))}/{quote(name)}", data)

    def resume(self, tracked: TrackerRun) -> None:
        """Mark the MLflow run as running again."""
        self._update(tracked, {"status": "RUNNING"})

    def end(self, tracked: TrackerRun, status: Status, at_ms: int) -> None:
        """Mark the MLflow run as ended."""
        self._update(tracked, {"status": status, "end_time": at_ms})

    def close(self) -> None:
        """Close the connection."""
        self._rest.close()

    # --- private methods --------------------------------------------------------------------------------------------

    def _experiment(self, tracking: Tracking, *, make: bool) -> str | None:
        """Return the experiment's identifier. With `make`, create a missing experiment."""
        name = tracking.experiment
        if tracking.experiment_id or not name:
            return tracking.experiment_id or "0"  # Identifier of MLflow's default experiment.
        if name in self._experiments:
            return self._experiments[name]
        experiment_id = self._looked_up(name)
        if experiment_id is None and make:
            try:
                made = self._rest.call(
                    "POST", "mlflow/experiments/create", {"name": name}, answer=_Created, timeout_s=LONG_TIMEOUT_S
                )
                experiment_id = made.experiment_id
            except MlflowExists:  # Another process has created the experiment since the lookup.
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
                f"the experiment {name} has been deleted in MLflow at {self._rest.uri}: restore it in MLflow, or "
                "set "
                "MLFLOW_EXPERIMENT_NAME to another experiment"
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
        # Ranks receive the MLflow identifiers as environment variables.
        if not (_is_id(info.run_id) and _is_id(info.experiment_id)):
            raise TrackerRefused(f"MLflow at {uri} returned invalid identifiers")
        return TrackerRun(
            run_id=info.run_id,
            experiment_id=info.experiment_id,
            uri=uri,
            url=f"{uri}/#/experiments/{quote(info.experiment_id, safe='')}/runs/{quote(info.run_id, safe='')}",
            artifacts=info.artifact_uri,
            had_ended=info.status in _ENDED,
        )


def _named(error: TrackerRefused, variable: str) -> TrackerRefused:
    """Add the name of the caller's variable to the message of a refusal."""
    return type(error)(f"{error} ({variable} names it)") if variable else error


def _proxied(artifacts: str, uri: str) -> str | None:
    """Return the artifact path on the MLflow server, or None if the server does not store the artifacts."""
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


# --- the HTTP client of one MLflow server -----------------------------------------------------------------------------


class MlflowProblem(msgspec.Struct):
    """The JSON body of an error answer from MLflow."""

    error_code: str | int
    message: str = ""


class MlflowNotFound(TrackerRefused):
    """MLflow has no experiment or run with the requested name or identifier."""


class MlflowExists(TrackerRefused):
    """MLflow already has an experiment with the requested name."""


class _Answer(NamedTuple):
    status: int
    location: str
    body: bytes


class RestClient:
    """An HTTP client of one MLflow server. Not thread-safe. `MlflowTracker` explains the arguments."""

    def __init__(self, address: str | Callable[[], str], environ: Mapping[str, str]) -> None:
        self._address = address
        self._environ = environ
        self._client: httpx2.Client | None = None
        self._known = False
        self._clock = SystemClock()
        self.uri = ""
        """Address of the server without credentials and trailing slash, or "" before the first request."""

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        answer: type[T],
        query: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> T:
        """Send a JSON request to a path below ``/api/2.0/``, and return the answer within `timeout_s` seconds."""
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        found = self._send(method, path, content, headers, query or {}, timeout_s)
        try:
            decoded = from_json(found.body, answer)
        except msgspec.MsgspecError as error:
            raise self._strange(f"the answer does not have MLflow's format ({_shown(str(error))})") from None
        self._known = True
        return decoded

    def put(self, path: str, data: bytes) -> None:
        """Upload bytes. Raises the same errors as `call`."""
        self._send("PUT", path, data, {"Content-Type": "application/octet-stream"}, {}, LONG_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # --- private methods --------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        content: bytes,
        headers: Mapping[str, str],
        query: Mapping[str, str],
        timeout_s: float,
    ) -> _Answer:
        try:
            client = self._connected()
            request = client.build_request(
                method,
                f"{self.uri}/api/2.0/{path}",
                content=content or None,
                headers=dict(headers),
                params=dict(query) or None,
                timeout=httpx2.Timeout(timeout_s, connect=TIMEOUT_S),
            )
            found = self._received(client, request, timeout_s)
        except _UNSENDABLE as error:
            # The error message omits the invalid part, which may be a credential.
            kind = type(error).__name__
            why = f"the address, the credentials or the proxy have invalid characters or parts ({kind})"
            if isinstance(error, ImportError):
                why = "a SOCKS proxy needs the package socksio, which is not installed"
            raise TrackerRefused(f"cannot send a request to MLflow at {self.uri}: {why}") from None
        except httpx2.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise self._strange(
                    "the server's certificate is not trusted. Set MLFLOW_TRACKING_SERVER_CERT_PATH to a file with "
                    "its authority"
                ) from None
            raise TrackerAway(
                f"MLflow at {self.uri} does not answer ({_why(error, timeout_s)})",
                is_doubtful=not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError),
            ) from None
        if found.status >= 300:
            raise self._problem(found)
        return found

    def _received(self, client: httpx2.Client, request: httpx2.Request, timeout_s: float) -> _Answer:
        """Read an answer in bounded time and memory."""
        deadline_ns = self._clock.boottime_ns() + round(2 * timeout_s * 1e9)
        parts: list[bytes] = []
        size = 0
        response = client.send(request, stream=True)
        try:
            # Read without a chunk size, because a read with a chunk size would wait for a full chunk.
            for part in response.iter_raw():
                parts.append(part)
                size += len(part)
                if size > ANSWER_BYTES_MAX:
                    raise self._strange(f"the answer is longer than {ANSWER_BYTES_MAX} bytes")
                if self._clock.boottime_ns() > deadline_ns:
                    raise httpx2.ReadTimeout("the answer arrives too slowly", request=request)
        finally:
            response.close()
        return _Answer(response.status_code, response.headers.get("location", ""), b"".join(parts))

    def _connected(self) -> httpx2.Client:
        """Return the HTTP client for the server's current address."""
        uri, userinfo = split_userinfo(self._address if isinstance(self._address, str) else self._address())
        if self._client is not None and uri == self.uri:
            return self._client
        self.close()
        if urlsplit(uri).scheme not in ("http", "https"):
            raise TrackerRefused(
                f"{uri or 'an empty address'} is not a valid address of an MLflow server (http or https)"
            )
        # The client sends credentials only to the server that the caller's variables name.
        is_named = split_userinfo(self._environ.get("MLFLOW_TRACKING_URI", ""))[0] == uri
        environ = self._environ if is_named else {}
        self.uri = uri
        self._known = False
        self._client = httpx2.Client(
            headers=_headers(environ, userinfo),
            verify=_trust(uri, environ),
            proxy=proxy_for(uri, self._environ),
            follow_redirects=False,
            trust_env=False,  # Use the caller's variables, not the variables of the monitor process.
            limits=httpx2.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=30.0),
        )
        return self._client

    def _problem(self, found: _Answer) -> Exception:
        """Return the exception for an HTTP status of 300 or more."""
        try:
            problem = from_json(found.body, MlflowProblem)
        except msgspec.MsgspecError:
            problem = None
        text = problem.message if problem is not None else found.body.decode(errors="replace")
        said = f"{found.status}: {_shown(text)}".rstrip(": ")
        if found.status in _PASSING or (found.status >= 500 and found.status != _UNSUPPORTED):
            return TrackerAway(f"MLflow at {self.uri} answers {said}", is_doubtful=found.status >= 500)
        if found.status in (401, 403, 407):
            return self._strange(
                f"the server answers {said}; set MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        if problem is None:
            elsewhere = f" (to {_shown(split_userinfo(found.location)[0])})" if found.location else ""
            return self._strange(f"the server answers {said}{elsewhere}")
        self._known = True
        kinds = {"RESOURCE_DOES_NOT_EXIST": MlflowNotFound, "RESOURCE_ALREADY_EXISTS": MlflowExists}
        return kinds.get(str(problem.error_code), TrackerRefused)(f"MLflow at {self.uri} answers {said}")

    def _strange(self, what: str) -> Exception:
        """Return the exception for an answer in a format other than MLflow's."""
        if self._known:
            return TrackerAway(f"MLflow at {self.uri} does not answer like MLflow: {what}")
        return TrackerRefused(f"MLflow at {self.uri} cannot be used: {what}")


def make_ready() -> None:
    """Import the modules for the first request early, because the import takes 100 ms."""
    httpx2.Client(verify=False, trust_env=False).close()


def _headers(environ: Mapping[str, str], userinfo: str) -> dict[str, str]:
    headers = {"User-Agent": f"serverless-gpu/{__version__}", "Accept-Encoding": "identity"}
    userinfo = userinfo or split_userinfo(environ.get("MLFLOW_TRACKING_URI", ""))[1]
    name, password = environ.get("MLFLOW_TRACKING_USERNAME", ""), environ.get("MLFLOW_TRACKING_PASSWORD", "")
    if userinfo:
        name, password = (unquote(part) for part in userinfo.partition(":")[::2])
    elif environ.get("MLFLOW_TRACKING_URI") and not (name and password):
        own_file = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(OSError, configparser.Error, UnicodeError):
            own_file.read(os.path.expanduser("~/.mlflow/credentials"), encoding="utf-8")
        found = dict(own_file["mlflow"]) if own_file.has_section("mlflow") else {}
        name = name or found.get("mlflow_tracking_username", "")
        password = password or found.get("mlflow_tracking_password", "")
    for plugin in ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"):
        if environ.get(plugin, "").lower() not in ("", "0", "false"):
            raise TrackerRefused(
                f"{plugin} needs an MLflow plugin, which serverless-gpu cannot load. Use an http or https address"
            )
    if name and password:
        headers["Authorization"] = "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
    elif environ.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {environ['MLFLOW_TRACKING_TOKEN']}"
    if environ.get("MLFLOW_WORKSPACE"):
        headers["X-MLFLOW-WORKSPACE"] = environ["MLFLOW_WORKSPACE"]
    return headers


def _trust(uri: str, environ: Mapping[str, str]) -> ssl.SSLContext | bool:
    """Return the TLS context that verifies the server's certificate, or False to skip the verification."""
    if not uri.startswith("https://"):
        return False
    bundle = next((environ[name] for name in _BUNDLES if environ.get(name)), None)
    own = environ.get("MLFLOW_TRACKING_CLIENT_CERT_PATH")
    try:
        is_directory = bundle is not None and os.path.isdir(bundle)
        context = ssl.create_default_context(
            cafile=None if is_directory else bundle, capath=bundle if is_directory else None
        )
        if environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if own:
            context.load_cert_chain(own)
    except (OSError, ssl.SSLError) as error:
        raise TrackerRefused(f"the certificates for MLflow at {uri} cannot be read: {error}") from None
    return context


def proxy_for(uri: str, environ: Mapping[str, str]) -> str | None:
    """Return the proxy that the caller's variables set for an address, or None."""

    def variable(name: str) -> str:
        return environ.get(name) or environ.get(name.upper(), "")

    parts = urlsplit(uri)
    proxy = variable(f"{parts.scheme}_proxy") or variable("all_proxy")
    host = parts.hostname or ""
    if not proxy or host in ("localhost", "127.0.0.1", "::1"):
        return None
    for name in variable("no_proxy").split(","):
        bare = name.strip().lstrip(".")
        if bare and (bare == "*" or parts.netloc == bare or host == bare or host.endswith(f".{bare}")):
            return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _why(error: httpx2.TransportError, timeout_s: float) -> str:
    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection within {TIMEOUT_S:g} s"
    if isinstance(error, httpx2.TimeoutException):
        return f"nothing within {timeout_s:g} s"
    return _shown(_ERRNO.sub("", str(error))) or type(error).__name__


def _shown(text: str) -> str:
    """Return the beginning of an untrusted text on one line, without control characters."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_TEXT_CHARACTERS_MAX]
