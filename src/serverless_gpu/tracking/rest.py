"""One MLflow server over HTTP: addresses, credentials, and the classes of its failures.

    call, put ─▶ one request, at most 2 s (10 s where MLflow has work to do) ─▶ answer, at most 1 MiB
                                                                             ├▶ TrackerAway     ask again later
                                                                             └▶ TrackerRefused  never ask that again

Away: no listener, no answer in time, 408, 425, 429, every 5xx but 501. Refused: an error about the request from MLflow
itself. All else depends on whether this server has ever answered as an MLflow does. If not, it is refused at once, with
a hint: a wrong address, a login page, a wrong password, an untrusted certificate. If it has, it is probably under
maintenance, and away.

A request is given up after twice its time; only the answer's head, of 100 kB at most, may take longer. Credentials are
those of the caller's variables, as MLflow reads them, and go only to the server that these variables name. No redirect
is followed. Messages hold neither credentials nor control characters of a server.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import httpx2
import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.json_codec import from_json
from serverless_gpu.tracking.base import TrackerAway, TrackerRefused, split_userinfo
from serverless_gpu.version import __version__

T = TypeVar("T")

TIMEOUT_S = 2.0
LONG_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 1 << 20
_PASSING = frozenset({408, 425, 429})
_UNSUPPORTED = 501
_UNSENDABLE = (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError, httpx2.InvalidURL, ValueError, ImportError)
_TEXT_CHARACTERS_MAX = 200
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


class MlflowProblem(msgspec.Struct):
    """Error body of a refusal by MLflow."""

    error_code: str | int
    message: str = ""


class MlflowNotFound(TrackerRefused):
    """MLflow knows nothing by that name."""


class MlflowExists(TrackerRefused):
    """MLflow has something by that name."""


class _Answer(NamedTuple):
    status: int
    location: str
    body: bytes


class RestClient:
    """One server, for one thread at a time; `address` and `environ` as for `MlflowTracker`."""

    def __init__(self, address: str | Callable[[], str], environ: Mapping[str, str]) -> None:
        self._address = address
        self._environ = environ
        self._client: httpx2.Client | None = None
        self._known = False
        self._clock = SystemClock()
        self.uri = ""
        """Of the server, without credentials and without a slash at its end; "" until the first request."""

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
        """Send a JSON request to a path below ``/api/2.0/`` and return the answer, after `timeout_s` at most."""
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        found = self._send(method, path, content, headers, query or {}, timeout_s)
        try:
            decoded = from_json(found.body, answer)
        except msgspec.MsgspecError as error:
            raise self._strange(f"its answer is not MLflow's ({_shown(str(error))})") from None
        self._known = True
        return decoded

    def put(self, path: str, data: bytes) -> None:
        """Send bytes; as `call` otherwise."""
        self._send("PUT", path, data, {"Content-Type": "application/octet-stream"}, {}, LONG_TIMEOUT_S)

    def close(self) -> None:
        """Give the connection back."""
        if self._client is not None:
            self._client.close()
            self._client = None

    # --- below ------------------------------------------------------------------------------------------------------

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
            raise TrackerRefused(f"MLflow at {self.uri} cannot be asked: {_unsendable(error)}") from None
        except httpx2.TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise self._strange(
                    "its certificate is not trusted; MLFLOW_TRACKING_SERVER_CERT_PATH says whose is"
                ) from None
            raise TrackerAway(
                f"MLflow at {self.uri} does not answer ({_why(error, timeout_s)})",
                is_doubtful=not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError),
            ) from None
        if found.status >= 300:
            raise self._problem(found)
        return found

    def _received(self, client: httpx2.Client, request: httpx2.Request, timeout_s: float) -> _Answer:
        """Return the answer, read in bounded time and memory."""
        deadline_ns = self._clock.boottime_ns() + round(2 * timeout_s * 1e9)
        parts: list[bytes] = []
        size = 0
        response = client.send(request, stream=True)
        try:
            for (
                part
            ) in response.iter_raw():  # as it comes: with a size given, a part would be waited for until it is full
                parts.append(part)
                size += len(part)
                if size > ANSWER_BYTES_MAX:
                    raise self._strange(f"its answer is longer than {ANSWER_BYTES_MAX} bytes")
                if self._clock.boottime_ns() > deadline_ns:
                    raise httpx2.ReadTimeout("its answer comes too slowly", request=request)
        finally:
            response.close()
        return _Answer(response.status_code, response.headers.get("location", ""), b"".join(parts))

    def _connected(self) -> httpx2.Client:
        """Return the client for where the server is now."""
        uri, userinfo = split_userinfo(self._address if isinstance(self._address, str) else self._address())
        if self._client is not None and uri == self.uri:
            return self._client
        self.close()
        if urlsplit(uri).scheme not in ("http", "https"):
            raise TrackerRefused(f"{uri or 'an empty address'} is not the address of an MLflow server (http or https)")
        # Only the server that the caller's variables name gets their credentials.
        is_named = split_userinfo(self._environ.get("MLFLOW_TRACKING_URI", ""))[0] == uri
        environ = self._environ if is_named else {}
        self.uri = uri
        self._known = False
        self._client = httpx2.Client(
            headers=_headers(environ, userinfo),
            verify=_trust(uri, environ),
            proxy=proxy_for(uri, self._environ),
            follow_redirects=False,
            trust_env=False,  # the caller's variables count, not this process's
            limits=httpx2.Limits(max_connections=2, max_keepalive_connections=1, keepalive_expiry=30.0),
        )
        return self._client

    def _problem(self, found: _Answer) -> Exception:
        """Return the exception for an answer of 300 or more."""
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
                f"it answers {said}; MLFLOW_TRACKING_USERNAME and _PASSWORD, or MLFLOW_TRACKING_TOKEN, say who you are"
            )
        if problem is None:
            elsewhere = f" (to {_shown(split_userinfo(found.location)[0])})" if found.location else ""
            return self._strange(f"it answers {said}{elsewhere}")
        self._known = True
        kinds = {"RESOURCE_DOES_NOT_EXIST": MlflowNotFound, "RESOURCE_ALREADY_EXISTS": MlflowExists}
        return kinds.get(str(problem.error_code), TrackerRefused)(f"MLflow at {self.uri} answers {said}")

    def _strange(self, what: str) -> Exception:
        """Return the exception for an answer that is not MLflow's: final unless it answered well before."""
        if self._known:
            return TrackerAway(f"MLflow at {self.uri} is not itself: {what}")
        return TrackerRefused(f"MLflow at {self.uri} cannot be used: {what}")


def make_ready() -> None:
    """Load the modules of the first request (100 ms), for a process that will be in a hurry."""
    httpx2.Client(verify=False, trust_env=False).close()


def _headers(environ: Mapping[str, str], userinfo: str) -> dict[str, str]:
    headers = {"User-Agent": f"serverless-gpu/{__version__}", "Accept-Encoding": "identity"}
    userinfo = userinfo or split_userinfo(environ.get("MLFLOW_TRACKING_URI", ""))[1]
    name, password = environ.get("MLFLOW_TRACKING_USERNAME", ""), environ.get("MLFLOW_TRACKING_PASSWORD", "")
    if userinfo:
        name, password = (unquote(part) for part in userinfo.partition(":")[::2])
    elif environ.get("MLFLOW_TRACKING_URI") and not (name and password):
        name, password = _credentials_file(name, password)
    for plugin in ("MLFLOW_TRACKING_AUTH", "MLFLOW_TRACKING_AWS_SIGV4"):
        if environ.get(plugin, "").lower() not in ("", "0", "false"):
            raise TrackerRefused(f"{plugin} asks for an MLflow plugin, which only your own programs can use")
    if name and password:
        headers["Authorization"] = "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
    elif environ.get("MLFLOW_TRACKING_TOKEN"):
        headers["Authorization"] = f"Bearer {environ['MLFLOW_TRACKING_TOKEN']}"
    if environ.get("MLFLOW_WORKSPACE"):
        headers["X-MLFLOW-WORKSPACE"] = environ["MLFLOW_WORKSPACE"]
    return headers


def _credentials_file(name: str, password: str) -> tuple[str, str]:
    """Return a name and a password as MLflow's own file has them, where they were not given."""
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(OSError, configparser.Error, UnicodeError):
        parser.read(os.path.expanduser("~/.mlflow/credentials"), encoding="utf-8")
    found = dict(parser["mlflow"]) if parser.has_section("mlflow") else {}
    return name or found.get("mlflow_tracking_username", ""), password or found.get("mlflow_tracking_password", "")


def _trust(uri: str, environ: Mapping[str, str]) -> ssl.SSLContext | bool:
    """Return the check of the server's certificate (20 ms to make); False for plain HTTP."""
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


_BUNDLES = ("MLFLOW_TRACKING_SERVER_CERT_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


def proxy_for(uri: str, environ: Mapping[str, str]) -> str | None:
    """Return the caller's proxy for an address, or None."""

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


def _unsendable(error: Exception) -> str:
    """Return why a request is impossible, without the faulty part, which may be a credential."""
    if isinstance(error, ImportError):
        return "a SOCKS proxy needs a package that is not installed beside serverless-gpu (socksio)"
    kind = type(error).__name__
    return f"its address, the credentials or the proxy have characters or parts that are not valid ({kind})"


def _why(error: httpx2.TransportError, timeout_s: float) -> str:
    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection within {TIMEOUT_S:g} s"
    if isinstance(error, httpx2.TimeoutException):
        return f"nothing within {timeout_s:g} s"
    return _shown(_ERRNO.sub("", str(error))) or type(error).__name__


def _shown(text: str) -> str:
    """Return the beginning of a foreign text, on one line and without control characters."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(printable.split())[:_TEXT_CHARACTERS_MAX]
