"""Stores undelivered attempts on disk, so that a later monitor can continue the delivery.

    <home>/tracking/<run>.<fence>.<node rank>.json     one attempt; deleted once everything has arrived

The monitor writes an attempt's file when the attempt begins. If the attempt ends before any monitor runs, the
supervisor writes the attempt's file. The delivering monitor locks the attempt's file, so that no other monitor delivers
the same attempt. An attempt's file contains no secrets, because the monitor stores the caller's credentials only in
memory. A monitor without a tracker's credentials waits for the next run that provides them.

Failure cases: On a full or read-only disk, only the current monitor can deliver the attempt. The monitor skips an
incomplete file or a file of another version, and deletes the file after a week. If the backlog contains too many files,
the monitor discards the oldest files.
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

    observe: Observe  # The supervisor's message without variables that may contain secrets.
    origin_ns: int  # Time of the call in nanoseconds since 1970.
    has_secrets: bool = False  # True if the tracker requires the caller's credentials.


class ClaimedAttempt(msgspec.Struct):
    """A backlog attempt that this process delivers."""

    path: Path
    fd: int

    def drop(self) -> None:
        """Delete the attempt's file after the delivery is complete or impossible."""
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Unlock the attempt's file for the next monitor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Backlog:
    """The undelivered attempts of one installation. The first stored attempt creates `directory`."""

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
        """Write an attempt's file for the next monitor unless the file exists. Raises OSError."""
        path = self._directory / f"{key_of(observe)}.json"
        if path.exists():
            return
        kept = BacklogAttempt(observe=_public(observe), origin_ns=origin_ns, has_secrets=has_secrets(observe.environ))
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, msgspec.json.encode(kept).decode())

    def take(
        self, known: Collection[str], limit: int, ready: Callable[[BacklogAttempt], bool] = lambda kept: True
    ) -> Iterator[tuple[BacklogAttempt, ClaimedAttempt]]:
        """Lock and yield up to `limit` unclaimed attempts that are `ready`, oldest first.

        The backlog skips attempts in `known`, which other recorders deliver or which wait for credentials.
        """
        names: list[str] = []  # The oldest run is first, because file names begin with the run's time.
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".json"))
        too_many = max(0, len(names) - KEPT_MAX)
        for name in names[:too_many]:
            (self._directory / name).unlink(missing_ok=True)
        if too_many:
            print(
                f"discarded {too_many} attempts, because more than {KEPT_MAX} attempts wait for delivery to MLflow",
                flush=True,
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
        # The monitor has no data to send, because the attempt's directory was deleted.
        held.path.unlink(missing_ok=True)
        return None


def key_of(observe: Observe) -> str:
    """Return an attempt's key for one node, which is unique in this installation."""
    return f"{observe.run_id}.{observe.fence}.{observe.node_rank}"


def origin_of(observe: Observe, clock: Clock) -> int:
    """Return the call's time in nanoseconds since 1970, equal for all nodes and attempts of a run."""
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
    """Lock an attempt's file.

    Return None if the attempt's file is missing or already locked. Raises OSError.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not os.path.exists(path):  # The previous holder of the file has just completed the delivery.
        os.close(fd)
        return None
    return ClaimedAttempt(path, fd)
