"""Stores objects in S3, Google Cloud Storage, Azure, or a server with one of their APIs.

    call ─▶ ask: request ─▶ answer ─▶ judge ─▶ done │ missing   │ ask again, with backoff    │ StoreUnavailable
                    ▲────────────────────────────────────────────────┘     5 minutes in all

If a server's entity tags are MD5 digests, the store compares the tag with the object after a put. If a server's tags
differ from the MD5 digest, the store reads the object back once to check it. The store sends an object again if its
bytes were altered in transit.

Credentials come from the environment variables of each cloud's tools (`CLOUDS`), or from the cloud machine itself. The
store passes the credentials only to the obstore library. An obstore error's text contains URLs, headers and the
server's message, and sometimes a signature or a key. `judge` therefore extracts only the status, the server's own code
(``NoSuchBucket``) and the failed step from the text. The store never shows or logs other parts of the error text.

A process must not fork after it has used an object store. A call in a forked child would wait forever, because the
child does not have obstore's threads. The store therefore rejects calls in a forked child. The agent, zygotes and
supervisors do not import this module.

Failure cases: For wrong or missing credentials or a missing bucket, the store immediately raises StoreUnavailable with
a hint. If a connection fails, or an answer is 5xx, 429, late or incomplete, the store repeats the request. After the
last attempt, the store raises StoreUnavailable with the server's last answer. If the server answers 404 for an existing
object, the store repeats the request for one second. If the server has no space, the store raises StorageError. If a
server ignores a range and sends the whole object, the store discards the unwanted bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.environment.stores.base import (
    OBJECT_BYTES_MAX,
    Store,
    Stored,
    check_key,
    check_prefix,
    check_range,
    check_size,
)
from serverless_gpu.errors import EnvironmentRejected, InvalidValue, ServerlessGpuError, StorageError, StoreUnavailable
from serverless_gpu.units import format_duration_ms

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    Client = S3Store | GCSStore | AzureStore

_CONNECT_S = 10.0
_READ_S = 30.0
"""Time limit in seconds without received data during a read."""
Connect = Callable[[float, bool], "Client"]
Verdict = Literal["again", "absent", "beyond", "whole", "refused", "no bucket", "no credentials", "full"]
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>|\"code\":\s*\"(\w{1,60})\"")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ContentSHA256Mismatch",
        "IncompleteBody",
        "Md5Mismatch",
        "OperationAborted",
        "RequestTimeout",
        "XAmzContentSHA256Mismatch",
    }
)
_TRANSIENT = frozenset({408, 409, 425, 429})
_FULL = re.compile(r"no space left|StorageFull|InsufficientStorage|QuotaExceeded|status code: 507", re.IGNORECASE)
_STEPS = (
    ("kind: Connect", "no connection"),
    ("kind: Timeout", "no answer in time"),
    ("timed out", "no answer in time"),
    ("kind: Interrupted", "the answer is incomplete"),
    ("kind: Decode", "the answer is incomplete"),
    ("kind: Request", "the connection broke during the request"),
)
# Addresses of the credential services inside of clouds. A client queries these services if no credential variables are
# set.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google|/latest/api/token|/latest/meta-data|/metadata/identity")
BOUND_S = 300.0
"""Time limit in seconds for one call, including retries."""
AT_ONCE = 16
_LATE_S = 1.0
_PAGE = 1000
_TIMEOUT_S_MIN = 0.05
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
_Value = TypeVar("_Value")
_used_by: list[int] = []
"""The ID of the process that first used an object store, if any."""


class ObjectStore(Store):
    """Stores objects in an object storage bucket.

    All object names in the bucket start with `prefix`. `bound_s` limits the duration of one call in seconds, including
    retries.
    """

    def __init__(
        self,
        scheme: str,
        bucket: str,
        prefix: str,
        environ: Mapping[str, str],
        *,
        bound_s: float = BOUND_S,
        clock: Clock | None = None,
    ) -> None:
        self.url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self._check = CLOUDS[scheme].check
        self._connect = connector(scheme, bucket, prefix, environ)
        self._endpoint = endpoint_of(scheme, environ)
        self._bound_s = bound_s
        self._clock = clock or SystemClock()
        self._clients: dict[bool, Client] = {}
        self._knows_ranges = True
        self._tags_are_md5 = True

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of an object, or a range of the bytes."""
        check_key(key)
        check_range(key, start, 0 if length is None else length)
        if length == 0:
            if not self.present((key,)):
                raise KeyError(key)
            return b""
        # Some servers return a new object only after a delay.
        late_s = 0.0 if key.startswith("gc/") else min(_LATE_S, self._bound_s / 2)
        try:
            return self._ask(f"get {key}", lambda client: self._get(client, key, start, length), late_s=late_s)
        except _Final as error:
            if error.answer.verdict == "beyond":
                return b""
            raise KeyError(key) from None

    def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
        """Put objects durably and atomically, replacing existing objects, several at a time."""
        for key, data in objects.items():
            check_size(check_key(key), data)
        _together(lambda key: self._put_one(key, objects[key]), list(objects))

    def present(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys of the given objects that exist in the bucket.

        The method sends several requests at the same time.
        """

        def look(key: str) -> bool:
            import obstore

            try:
                return bool(self._ask(f"look for {key}", lambda client: obstore.head(client, key)))
            except _Final:
                return False

        asked = [check_key(key) for key in keys]
        return frozenset(key for key, there in zip(asked, _together(look, asked), strict=True) if there)

    def list(self, prefix: str) -> Iterator[Stored]:
        """Return all objects below `prefix/`, page by page."""
        pages = _Pages(check_prefix(prefix))
        while page := self._ask(f"list {prefix}", pages.turn):
            for stored in page:
                try:
                    check_key(stored.key)
                except EnvironmentRejected:
                    # Garbage collection never deletes other programs' objects, because the store does not list them.
                    continue
                yield stored

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, ignoring objects that do not exist."""

        asked = [check_key(key) for key in keys]
        for first in range(0, len(asked), _PAGE):
            some = asked[first : first + _PAGE]
            try:
                self._ask("delete objects", partial(_delete, some))
            except _Final:  # Some clouds report an error if one of the objects does not exist.
                _together(self._delete_one, some)

    def free_bytes(self) -> int | None:
        """Return None, because no bucket reports its free space."""
        return None

    def _put_one(self, key: str, data: bytes | memoryview) -> None:
        try:
            self._ask(f"put {key}", lambda client: self._put(client, key, data), reads=False)
        except _Final as error:
            raise self._problem(f"put {key}", ErrorMeaning("no bucket", error.answer.said), 1, 0.0) from None

    def _delete_one(self, key: str) -> None:
        with contextlib.suppress(_Final):
            self._ask(f"delete {key}", partial(_delete, [key]))

    def _get(self, client: Client, key: str, start: int, length: int | None) -> bytes:
        import obstore

        if (start or length is not None) and self._knows_ranges:
            end = start + (OBJECT_BYTES_MAX if length is None else length)
            return bytes(obstore.get(client, key, options={"range": (start, end)}).bytes())
        result = obstore.get(client, key)
        if result.meta["size"] - start > OBJECT_BYTES_MAX:
            raise EnvironmentRejected(
                f"{key} has {result.meta['size']} bytes, but at most {OBJECT_BYTES_MAX} are allowed"
            )
        return bytes(memoryview(result.bytes())[start : None if length is None else start + length])

    def _put(self, client: Client, key: str, data: bytes | memoryview) -> None:
        import obstore

        # The store sends each object in one request, because a killed multipart upload would leave parts behind.
        tag = obstore.put(client, key, data, use_multipart=False)["e_tag"] or ""
        said = _MD5.fullmatch(tag) if self._tags_are_md5 else None
        if said and said[1] != hashlib.md5(data, usedforsecurity=False).hexdigest():
            if bytes(obstore.get(client, key).bytes()) != bytes(data):
                raise _ArrivedAltered
            self._tags_are_md5 = False  # With some kinds of encryption, the entity tag is not an MD5 digest.

    def _ask(
        self, what: str, request: Callable[[Client], _Value], *, reads: bool = True, late_s: float = 0.0
    ) -> _Value:
        """Send a request, and repeat it until the server gives a final answer.

        Raises _Final: the object does not exist, or does not have the requested range.
        """
        from obstore.exceptions import BaseError

        _refuse_after_fork(self.url)
        began_ns, tries = self._clock.boottime_ns(), 0
        while True:
            tries += 1
            left_s = self._bound_s - (self._clock.boottime_ns() - began_ns) / 1e9
            try:
                return request(self._client(left_s, reads))
            except (BaseError, OSError, _ArrivedAltered) as error:
                answer = _judged(error)
            took_s, pause = (self._clock.boottime_ns() - began_ns) / 1e9, pause_s(tries, random.random())
            if answer.verdict == "beyond" or (answer.verdict == "absent" and took_s + pause > late_s):
                raise _Final(answer)
            if answer.verdict == "whole" and self._knows_ranges:
                self._knows_ranges = False
                continue
            # The store tries a rejected secret twice, because an altered request gets the same answer.
            again = answer.verdict in ("again", "absent") or (answer.verdict == "refused" and tries == 1)
            if not again or took_s + pause >= self._bound_s:
                raise self._problem(what, answer, tries, took_s)
            time.sleep(pause)

    def _client(self, left_s: float, reads: bool) -> Client:
        """Return an obstore client whose requests have a time limit.

        Each request may take half of `bound_s`. The last request may take the remaining time.
        """
        half_s = self._bound_s / 2
        if left_s < half_s:
            return self._connect(max(left_s, _TIMEOUT_S_MIN), reads)
        if reads not in self._clients:
            self._clients[reads] = self._connect(half_s, reads)
        return self._clients[reads]

    def _problem(self, what: str, answer: ErrorMeaning, tries: int, took_s: float) -> ServerlessGpuError:
        name = f"the store {self.url}" + (f" (at {self._endpoint})" if self._endpoint else "")
        if answer.verdict == "full":
            return StorageError(
                f"no space left in {name}: {answer.said}",
                hint="remove unused objects with `sgpu env gc`, or choose another store",
            )
        if answer.verdict == "no bucket":
            return StoreUnavailable(
                f"{name} does not exist: {answer.said}",
                hint=f"create the bucket, or correct its name; the lookup uses {self._check}",
            )
        if answer.verdict == "no credentials":
            return StoreUnavailable(f"{name} cannot be used: {answer.said}", hint=f"set {self._check}")
        if answer.verdict == "refused":
            return StoreUnavailable(
                f"{name} refuses to {what}: {answer.said}",
                hint=f"check {self._check}, and give these credentials permission to get, put, list and delete objects",
            )
        return StoreUnavailable(
            f"{name} does not {what}: {answer.said}, tried {tries} times in {format_duration_ms(round(took_s * 1000))}",
            hint="check that the server is up and reachable from this machine, then try again",
        )


class _ArrivedAltered(Exception):
    """The server received different bytes than the store sent."""


class _Final(Exception):
    """An error answer for which a retry is useless."""

    def __init__(self, answer: ErrorMeaning) -> None:
        super().__init__(answer.said)
        self.answer = answer


class _Pages:
    """Lists objects page by page, and resumes after the last complete page if a request fails."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._last: str | None = None
        self._stream: Iterator[Sequence[ObjectMeta]] | None = None

    def turn(self, client: Client) -> list[Stored]:
        """Return the next page of objects, or an empty page at the end of the list."""
        import obstore

        stream, self._stream = self._stream, None  # If the list request fails, the next call starts a new list request.
        if stream is None:
            stream = iter(obstore.list(client, prefix=self._prefix, offset=self._last, chunk_size=_PAGE))
        page = [
            Stored(found["path"], found["size"], round(found["last_modified"].timestamp() * 1e9))
            for found in next(stream, ())
        ]
        self._stream = stream
        if page:
            self._last = page[-1].key
        return page


def _delete(keys: list[str], client: Client) -> None:
    import obstore

    obstore.delete(client, keys)


def _together(call: Callable[[str], _Value], keys: list[str]) -> list[_Value]:
    if len(keys) < 2:
        return [call(key) for key in keys]
    with ThreadPoolExecutor(min(AT_ONCE, len(keys))) as pool:
        return list(pool.map(call, keys))


def _judged(error: Exception) -> ErrorMeaning:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, _ArrivedAltered):
        return ErrorMeaning("again", "the server received different bytes than the store sent")
    denied = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
    return judge(str(error), not_found=isinstance(error, FileNotFoundError), denied=denied)


def _refuse_after_fork(url: str) -> None:
    if not _used_by:
        _used_by.append(os.getpid())
    if _used_by[0] != os.getpid():
        raise StoreUnavailable(
            f"the store {url} cannot be used in a process that was forked after its parent used an object store",
            hint="start a new process instead of forking, for example with subprocess or multiprocessing's spawn",
        )


class Cloud(NamedTuple):
    """A kind of object store, with its URL scheme, environment variables and settings."""

    variables: tuple[str, ...]  # environment variables for the location and the credentials
    endpoint: tuple[str, ...]
    check: str  # environment variables that the user should check after a refusal


CLOUDS: Mapping[str, Cloud] = {
    "s3": Cloud(
        variables=(
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_ENDPOINT_URL",
            "AWS_ENDPOINT_URL_S3",
            "AWS_ROLE_ARN",
            "AWS_ROLE_SESSION_NAME",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_STS_ENDPOINT",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            "AWS_METADATA_ENDPOINT",
            "AWS_IMDSV1_FALLBACK",
            "AWS_SKIP_SIGNATURE",
            "AWS_REQUEST_PAYER",
            "AWS_SERVER_SIDE_ENCRYPTION",
            "AWS_SSE_KMS_KEY_ID",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
            "AWS_DISABLE_BULK_DELETE",
        ),
        endpoint=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        check="AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    ),
    "gs": Cloud(
        variables=(
            "GOOGLE_APPLICATION_CREDENTIALS",
            "GOOGLE_SERVICE_ACCOUNT",
            "GOOGLE_SERVICE_ACCOUNT_PATH",
            "GOOGLE_SERVICE_ACCOUNT_KEY",
            "GOOGLE_BASE_URL",
            "GOOGLE_SKIP_SIGNATURE",
        ),
        endpoint=("GOOGLE_BASE_URL",),
        check="GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "az": Cloud(
        variables=(
            "AZURE_STORAGE_ACCOUNT_NAME",
            "AZURE_STORAGE_ACCOUNT_KEY",
            "AZURE_STORAGE_SAS_TOKEN",
            "AZURE_STORAGE_ENDPOINT",
            "AZURE_CLIENT_ID",
            "AZURE_CLIENT_SECRET",
            "AZURE_TENANT_ID",
            "AZURE_AUTHORITY_HOST",
            "AZURE_FEDERATED_TOKEN_FILE",
            "AZURE_IDENTITY_ENDPOINT",
            "AZURE_SKIP_SIGNATURE",
        ),
        endpoint=("AZURE_STORAGE_ENDPOINT",),
        check="AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)",
    ),
}


def connector(scheme: str, bucket: str, prefix: str, environ: Mapping[str, str]) -> Connect:
    """Return a function that creates a client from a time limit and a read-only flag.

    Raises StoreUnavailable: obstore is not installed. Raises InvalidValue: an environment variable has an invalid
    value.
    """
    try:
        import obstore.store as kinds
        from obstore.exceptions import BaseError
    except ImportError:
        raise StoreUnavailable(
            f"{scheme}://{bucket} cannot be used: object stores need the Python package obstore",
            hint="pip install 'serverless-gpu[store]'",
        ) from None
    cloud = CLOUDS[scheme]
    config = {name.lower(): environ[name] for name in cloud.variables if environ.get(name)}
    if scheme == "s3":
        config.setdefault("aws_region", config.pop("aws_default_region", "us-east-1"))
    plain = any(value.startswith("http://") for name, value in config.items() if name.upper() in cloud.endpoint)
    kind = {"s3": kinds.S3Store, "gs": kinds.GCSStore, "az": kinds.AzureStore}[scheme]

    def connect(timeout_s: float, reads: bool) -> Client:
        options: ClientConfig = {
            "allow_http": plain,
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, timeout_s)),
            "timeout": timedelta(seconds=timeout_s),
        }
        if reads:  # While a client sends a large object, it may receive no data for a long time.
            options["read_timeout"] = timedelta(seconds=min(_READ_S, timeout_s))
        retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)}
        client: Client = kind(
            bucket, prefix=prefix or None, config=config, client_options=options, retry_config=retries
        )
        return client

    try:
        connect(1.0, False)
    # The texts of obstore's errors may contain the value of a secret variable.
    except (BaseError, ValueError, TypeError) as error:
        raise InvalidValue(
            f"{scheme}://{bucket} cannot be used with the environment variables that are set ({type(error).__name__})",
            hint=f"look at {', '.join(name for name in cloud.variables if environ.get(name)) or cloud.check}",
        ) from None
    return connect


def endpoint_of(scheme: str, environ: Mapping[str, str]) -> str:
    """Return the store's network address without secrets, or "" if the cloud defines the address."""
    for name in CLOUDS[scheme].endpoint:
        if value := environ.get(name):
            parts = urlsplit(value)
            return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return ""


class ErrorMeaning(NamedTuple):
    """The meaning of an obstore error, and the part of its text that is safe to show."""

    verdict: Verdict
    said: str


def judge(text: str, *, not_found: bool = False, denied: bool = False) -> ErrorMeaning:
    """Return the meaning of an obstore error's text.

    `not_found` and `denied` come from the exception class of the error.
    """
    said = _said(text)
    code = said.partition(" ")[2]
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    if code in _NO_BUCKET:
        return ErrorMeaning("no bucket", said)
    if not_found:
        return ErrorMeaning("absent", said)
    if _METADATA.search(text):
        return ErrorMeaning("no credentials", "no credentials were found")
    if status == 416:
        return ErrorMeaning("beyond", said)
    if "non-partial response" in text:
        return ErrorMeaning("whole", "the server does not support ranges")
    if _FULL.search(text):
        return ErrorMeaning("full", said)
    if denied:
        return ErrorMeaning("refused", said)
    transient = not status or status >= 500 or status in _TRANSIENT or code in _TRANSIENT_CODES
    return ErrorMeaning("again" if transient else "refused", said)


def _said(text: str) -> str:
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        return f"{status[1]} {(code[1] or code[2]) if code else ''}".strip()
    for sign, words in _STEPS:
        if sign in text:
            return words
    return "no usable answer"


def pause_s(tries: int, chance: float) -> float:
    """Return the backoff in seconds before the next attempt, which doubles up to 15 s.

    `chance` is a random number between 0 and 1, which spreads the retries of many clients.
    """
    return min(15.0, 0.1 * 2.0 ** min(tries, 10)) * (0.5 + chance / 2)
