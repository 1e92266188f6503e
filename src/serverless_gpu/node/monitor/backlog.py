"""Undelivered attempts on disk: a monitor may be killed at any time, and the next one goes on.

    <home>/tracking/<run>.<fence>.<node rank>.json     one attempt; gone once everything has arrived

The monitor writes it once it has heard of the attempt; the supervisor does, if the attempt ended before any monitor
ran. The monitor that delivers holds the file's lock, so that no two monitors (of two versions, or one that is ending)
deliver the same attempt. The file holds nothing secret: credentials of the caller stay in memory, and a monitor that
has none for a tracker waits for the next run that brings them.

Failure cases: a full or read-only disk (the attempt is tracked as long as this monitor lives); a file that is half
written or of another version (passed over, and deleted after a week); too many of them (the oldest are given up).
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
"""Variables that say how a tracker is reached, and can hold no credentials."""

_SECRET = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


class BacklogAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that is to be delivered."""

    observe: Observe  # its supervisor's message, without possible secrets
    origin_ns: int  # of the call, nanoseconds since 1970
    has_secrets: bool = False  # whether the tracker takes nothing without the caller's credentials


class ClaimedAttempt(msgspec.Struct):
    """A kept attempt whose delivery is this process's."""

    path: Path
    fd: int

    def drop(self) -> None:
        """Forget it: everything has arrived, or never will."""
        self.path.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Leave it to the next monitor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Backlog:
    """The attempts of one home that are not delivered yet; makes `directory` with the first one."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock

    def keep(self, observe: Observe, origin_ns: int) -> ClaimedAttempt | None:
        """Write an attempt down and hold it; None where that cannot be done, or another process has it."""
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
        """Write an attempt down for the next monitor, unless it is there already; raises OSError."""
        path = self._directory / f"{key_of(observe)}.json"
        if path.exists():
            return
        kept = BacklogAttempt(observe=_public(observe), origin_ns=origin_ns, has_secrets=has_secrets(observe.environ))
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(path, msgspec.json.encode(kept).decode())

    def take(
        self, known: Collection[str], limit: int, ready: Callable[[BacklogAttempt], bool] = lambda kept: True
    ) -> Iterator[tuple[BacklogAttempt, ClaimedAttempt]]:
        """Yield up to `limit` unclaimed attempts that are `ready`, oldest first, and hold them.

        Attempts in `known` are skipped: others deliver them, or they are known to wait.
        """
        names: list[str] = []  # oldest run first: they begin with the time of the run
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".json"))
        too_many = max(0, len(names) - KEPT_MAX)
        for name in names[:too_many]:
            (self._directory / name).unlink(missing_ok=True)
        if too_many:
            print(f"{too_many} attempts are given up: more than {KEPT_MAX} wait to be delivered to MLflow", flush=True)
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
        held.path.unlink(missing_ok=True)  # it was deleted: nothing is left that could be sent
        return None


def key_of(observe: Observe) -> str:
    """Return what tells an attempt on a node from others of this home."""
    return f"{observe.run_id}.{observe.fence}.{observe.node_rank}"


def origin_of(observe: Observe, clock: Clock) -> int:
    """Return the time of the call, nanoseconds since 1970: the same for every node and attempt."""
    now_ns = clock.wall_ns()
    created_ns = created_wall_ns(observe.run_id)
    called_ns = now_ns - max(0, clock.boottime_ns() - observe.called_ns)
    return min(now_ns, called_ns if created_ns is None else created_ns)


def has_secrets(environ: Mapping[str, str]) -> bool:
    """Return whether variables hold credentials for a tracker."""
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
    """Take the lock of a file; None when it is missing, or another process has it. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    if not os.path.exists(path):  # its former holder has just delivered everything
        os.close(fd)
        return None
    return ClaimedAttempt(path, fd)
