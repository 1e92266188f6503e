"""Undelivered attempts on disk, so that a later monitor can continue after a monitor was killed.

    <home>/tracking/<run>.<fence>.<node rank>.json     one attempt; deleted once everything has arrived

The monitor writes the file when an attempt begins. The supervisor writes the file if the attempt ended before any
monitor ran. The delivering monitor locks the file, so that no two monitors deliver the same attempt. The file contains
no secrets: the caller's credentials stay in memory. A monitor without credentials for a tracker waits for the next run
with the tracker's credentials.

Failure cases: On a full or read-only disk, the present monitor tracks the attempt, but a later monitor cannot continue.
The monitor skips a file that is incomplete or of another version, and deletes it after a week. If there are too many
files, the monitor discards the oldest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.attempt.usage_account import write_text
from serverless_gpu.node.monitor.messages import Observe
from serverless_gpu.tracking.base import split_userinfo

KEPT_MAX = 10_000
_ENTRY_BYTES_MAX = 4 << 20
_FOREIGN_NS = 7 * 24 * 3600 * 10**9

_HARMLESS = frozenset(
    {
        "MLFLOW_TRACKING_INSECURE_TLS",
        "MLFLOW_TRACKING_SERVER_CERT_PATH",
        "MLFLOW_TRACKING_CLIENT_CERT_PATH",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "PYTHONPATH",
        "PYTHONHOME",
    }
)
"""Variables that configure the connection to a tracker and cannot contain credentials."""

_SECRET = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


class BacklogAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt with data to deliver."""

    observe: Observe  # The supervisor's message, without variables that may contain secrets.
    origin_ns: int  # Time of the call, in nanoseconds since 1970.
    has_secrets: bool = False  # True if the tracker requires the caller's credentials.


class ClaimedAttempt(msgspec.Struct):
    """An attempt in the backlog that this process delivers."""

    path: Path
    fd: int

    def drop(self) -> None:
        """Delete the attempt's file, because the delivery is complete or impossible."""
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Release the attempt's file for the next monitor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Backlog:
    """The undelivered attempts of one home. The first attempt creates `directory`."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    def keep(self, observe: Observe, origin_ns: int) -> ClaimedAttempt | None:
        """Write and lock an attempt's file.

        Return None if the write fails or another process has locked the file.
        """
        path = self._directory / f"{key_of(observe)}.json"
        try:
            held = hold_kept(path)
            if held is None:
                self.leave(observe, origin_ns)
                held = hold_kept(path)
        except OSError:
            return None
        return held

    def leave(self, observe: Observe, origin_ns: int) -> None:
        """Write an attempt's file for the next monitor, unless it exists. Raises OSError."""
        path = self._directory / f"{key_of(observe)}.json"
        if path.exists():
            return
        kept = BacklogAttempt(observe=_public(observe), origin_ns=origin_ns, has_secrets=has_secrets(observe.environ))
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, msgspec.json.encode(kept).decode())

    def take(
        self, known: Collection[str], limit: int, ready: Callable[[BacklogAttempt], bool] = lambda kept: True
    ) -> Iterator[tuple[BacklogAttempt, ClaimedAttempt]]:
        """Yield and lock up to `limit` unclaimed attempts that are `ready`, oldest first.

        The backlog skips attempts in `known`, because another recorder delivers them or they wait for credentials.
        """
        names: list[str] = []  # Names begin with the run's time, so the oldest run is first.
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".json"))
        too_many = max(0, len(names) - KEPT_MAX)
        for name in names[:too_many]:
            (self._directory / name).unlink(missing_ok=True)
        if too_many:
            print(
                f"discarded {too_many} attempts: more than {KEPT_MAX} attempts wait for delivery to MLflow", flush=True
            )
        for name in names[too_many:]:
            if limit <= 0:
                return
            if name.removesuffix(".json") in known:
                continue
            with contextlib.suppress(OSError):
                held = hold_kept(self._directory / name)
                if held is None:
                    continue
                kept = self._read(held)
                if kept is None or not ready(kept):
                    held.leave()
                    continue
                limit -= 1
                yield kept, held

    def _read(self, held: ClaimedAttempt) -> BacklogAttempt | None:
        try:
            kept = from_json(os.pread(held.fd, _ENTRY_BYTES_MAX, 0), BacklogAttempt)
        except msgspec.MsgspecError:
            if self._clock.wall_ns() - os.fstat(held.fd).st_mtime_ns > _FOREIGN_NS:
                held.path.unlink(missing_ok=True)
            return None
        if Path(kept.observe.directory).is_dir():
            return kept
        held.path.unlink(missing_ok=True)  # The attempt's directory was deleted, so the monitor has no data to send.
        return None


def key_of(observe: Observe) -> str:
    """Return the key of an attempt on a node, which is unique in this home."""
    return f"{observe.run_id}.{observe.fence}.{observe.node_rank}"


def origin_of(observe: Observe, clock: Clock) -> int:
    """Return the time of the call in nanoseconds since 1970, equal for all nodes and attempts of a run."""
    now_ns = clock.wall_ns()
    created_ns = created_wall_ns(observe.run_id)
    called_ns = now_ns - max(0, clock.boottime_ns() - observe.called_ns)
    return min(now_ns, called_ns if created_ns is None else created_ns)


def has_secrets(environ: Mapping[str, str]) -> bool:
    """Return True if the variables contain credentials for a tracker."""
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    return any(environ.get(name) for name in _SECRET) or "@" in uri


def _public(observe: Observe) -> Observe:
    kept = {name: value for name, value in observe.environ.items() if name in _HARMLESS}
    for name, value in observe.environ.items():
        if name.lower().endswith("_proxy") and "@" not in value:
            kept[name] = value
    if "MLFLOW_TRACKING_URI" in observe.environ:
        kept["MLFLOW_TRACKING_URI"] = split_userinfo(observe.environ["MLFLOW_TRACKING_URI"])[0]
    return msgspec.structs.replace(observe, environ=kept)


def hold_kept(path: Path) -> ClaimedAttempt | None:
    """Lock an attempt's file. Return None if the file is missing or already locked. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not os.path.exists(path):  # The previous holder of the file has just delivered everything.
        os.close(fd)
        return None
    return ClaimedAttempt(path, fd)
