"""Delivery of one attempt to MLflow: its thread, its ranks' file, and news for the main thread.

    thread: MlflowDelivery.run ──tracked, untracked, said──▶ tracking.json, for ranks that import mlflow
                                                          └▶ news, and the main thread is woken
    <attempt>/tracking.json    {"state": "pending" | "away" | "ready" | "failed", "environ": {…}, "run_id",
                                "url", "sentence"}

The file holds no credentials: ranks have the caller's own `MLFLOW_TRACKING_URI` already. While its state is "pending"
it is touched every few seconds, so that ranks see that the delivery lives. "away": MLflow does not answer now, and
ranks need not wait; the home's own starting server is "pending".

Failure cases: the file cannot be written (ranks that started with the variables have them, the others do without); a
bug of ours in the thread (logged; the attempt is not tracked any more, everything else goes on).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from serverless_gpu.ambient import Clock, created_wall_ns
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.node.attempt.account import write_text
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.inside.mlflow import job as mlflow_job
from serverless_gpu.node.mlflow_server.server import ensure_server
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.messages import Observe
from serverless_gpu.tracking.base import TrackerAway, TrackerRun, split_userinfo
from serverless_gpu.tracking.delivery import DeliveryJob, MlflowDelivery
from serverless_gpu.tracking.mlflow import MlflowTracker

_NOTE_BYTES_MAX = 64 << 10
_STARTING = "the home's MLflow server is starting"
_TRIED = "the home's MLflow server could not be started and is tried again; `sgpu status` tells why"
_AGAIN = "the home's MLflow server ended unexpectedly, and is starting again"


class TrackingNote(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `tracking.json`."""

    state: Literal["pending", "away", "ready", "failed"] = "pending"
    environ: dict[str, str] = {}  # variables with which an MLflow in a rank finds the run
    run_id: str = ""
    url: str = ""
    sentence: str = ""  # why the run is not known, or ""


class AttemptDelivery:
    """The delivery of one attempt.

    `environ` has the caller's variables that configure MLflow, credentials among them; the thread calls `wake` for
    news.
    """

    def __init__(
        self,
        home: Home,
        kept: BacklogAttempt,
        environ: Mapping[str, str],
        held: ClaimedAttempt | None,
        wake: Callable[[], None],
    ) -> None:
        observe = self._observe = kept.observe
        self.status: messages.TrackedNote | messages.Untracked | None = None  # None while unknown
        self.held = held  # its file in the backlog, if any
        self._answer: messages.TrackedNote | messages.Untracked | None = None
        self._environ = environ
        self._home = home
        self._wake = wake
        self._news: queue.SimpleQueue[messages.MonitorMessage] = queue.SimpleQueue()
        self._path = Path(observe.directory) / mlflow_job.FILE
        self._asked = Path(observe.directory) / mlflow_job.ASKED
        job = DeliveryJob(
            run_id=observe.run_id,
            fence=observe.fence,
            node_rank=observe.node_rank,
            num_nodes=observe.num_nodes,
            spec=observe.spec,
            environment=observe.environment,
            called_ns=kept.origin_ns,
        )
        self._delivery = MlflowDelivery(Path(observe.directory), job, self._tracker(), self)
        self._thread = threading.Thread(target=self._run, name=f"deliver {observe.run_id}", daemon=True)

    @property
    def target(self) -> str:
        """Return what tells its tracker from others."""
        return target_of(self._observe)

    @property
    def is_done(self) -> bool:
        """Return whether nothing more is sent by this process."""
        return not self._thread.is_alive()

    @property
    def over(self) -> str:
        """Return why nothing is left to be sent, by any process, or ""."""
        return self._delivery.over

    def start(self) -> None:
        """Begin to deliver."""
        noted = TrackingNote()
        with contextlib.suppress(OSError, msgspec.MsgspecError), self._path.open("rb") as file:
            noted = from_json(file.read(_NOTE_BYTES_MAX), TrackingNote)
        if not isinstance(self.status, messages.TrackedNote) and noted.state != "ready":
            self._note(TrackingNote())
        self._thread.start()

    def ending(self, state: State, reason: Reason, sentence: str) -> None:
        """Say that the attempt has ended; its logs and failures lie there."""
        self._delivery.ending(state, reason, sentence)

    def settled(self) -> None:
        """Say that its receipt lies there, too, or never will."""
        self._delivery.settled()

    def stop(self) -> None:
        """End the thread soon; another process, or this one later, goes on."""
        self._delivery.stop()

    def take_answer(self) -> messages.TrackedNote | messages.Untracked | None:
        """Return what its tracker's last answer, or silence, came to, once."""
        answer, self._answer = self._answer, None
        return answer

    def wake(self) -> None:
        """Try again now."""
        self._delivery.wake()

    def tend(self) -> None:
        """Show ranks that the delivery lives; go on at once when the home's server has come up."""
        if isinstance(self.status, messages.TrackedNote) or self.is_done:
            return
        with contextlib.suppress(OSError):
            os.utime(self._path)
        with contextlib.suppress(OSError):
            os.unlink(self._asked)  # a rank has seen that MLflow answers
            self._delivery.wake()
        tracker = self._observe.spec.tracker
        if isinstance(self.status, messages.Untracked) and tracker is not None and not tracker.uri:
            with contextlib.suppress(TrackerAway):
                self._address()
                self._delivery.wake()

    def news(self) -> Iterator[messages.MonitorMessage]:
        """Yield what is new, once."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    # --- the delivery's thread -----------------------------------------------------------------------------------

    def tracked(self, tracked: TrackerRun) -> None:
        """Hear which MLflow run it is."""
        environ = {"MLFLOW_RUN_ID": tracked.run_id, "MLFLOW_EXPERIMENT_ID": tracked.experiment_id}
        if split_userinfo(self._environ.get("MLFLOW_TRACKING_URI", ""))[0] != tracked.uri:
            environ["MLFLOW_TRACKING_URI"] = tracked.uri
        self._note(TrackingNote(state="ready", environ=environ, run_id=tracked.run_id, url=tracked.url))
        self._tell(messages.TrackedNote(run_id=tracked.run_id, url=tracked.url, environ=environ))

    def untracked(self, sentence: str, *, final: bool) -> None:
        """Record that the run is not tracked, yet or for good."""
        is_starting = sentence in (_STARTING, _AGAIN)
        self._note(TrackingNote(state="failed" if final else "pending" if is_starting else "away", sentence=sentence))
        self._tell(messages.Untracked(sentence=sentence, final=final, is_starting=is_starting))

    def said(self, sentence: str, *, note: bool) -> None:
        """Hear a sentence."""
        self._tell(messages.UserSentence(sentence=sentence, note=note))

    def _run(self) -> None:
        try:
            self._delivery.run()
        except Exception:  # noqa: BLE001 - one attempt's delivery must not end those of the others
            traceback.print_exc()
            self._delivery.abandon("failed")  # it would fail again, for ever
            self.untracked("the delivery to MLflow failed; the node's monitor.log says how", final=True)
        self._wake()

    def _tell(self, message: messages.MonitorMessage) -> None:
        if isinstance(message, messages.TrackedNote | messages.Untracked):
            self.status = self._answer = message
        self._news.put(message)
        self._wake()

    # --- where to ------------------------------------------------------------------------------------------------

    def _tracker(self) -> MlflowTracker:
        tracking = self._observe.spec.tracker
        if tracking is None or not tracking.uri:
            return MlflowTracker(self._address, {})
        named = self._environ.get("MLFLOW_TRACKING_URI", "")
        is_callers = split_userinfo(named)[0] == tracking.uri.rstrip("/")
        return MlflowTracker(named if is_callers else tracking.uri, self._environ)

    def _address(self) -> str:
        return address_of(self._home, self._observe, self._environ)

    # --- tracking.json -------------------------------------------------------------------------------------------

    def _note(self, note: TrackingNote) -> None:
        with contextlib.suppress(OSError):
            write_text(self._path, msgspec.json.encode(note).decode())


def address_of(home: Home, observe: messages.Observe, environ: Mapping[str, str]) -> str:
    """Return the address of the home's server for an attempt's store, starting it if needed.

    Raises TrackerAway while it is not up, or cannot be.
    """
    store = observe.spec.tracker.store if observe.spec.tracker is not None else ""
    serving = ensure_server(home, observe.python, store, environ=environ)
    if not serving.ready:
        # One that could not be started before is nothing that ranks wait for, although it is being tried again.
        starting = _TRIED if serving.failures else _STARTING
        raise TrackerAway(_AGAIN if serving.is_restarting else serving.problem or starting)
    return serving.uri


def target_of(observe: messages.Observe) -> str:
    """Return what tells an attempt's tracker from others."""
    tracking = observe.spec.tracker
    return "" if tracking is None else tracking.uri or f"store {tracking.store}"


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
