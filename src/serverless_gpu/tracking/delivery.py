"""Delivers the data of one attempt on one node to MLflow, in a monitor thread with retries.

    begin or find ─▶ parameters ─▶ files ─▶ points, as they arrive ─▶ failures, tags, status ─▶ receipt ─▶ over
         │                                    ▲ logs/<node rank>.telemetry, from a cursor on
         └─▶ DeliveryListener.tracked        tracking-<node rank>.state: cursor and steps, for the next process

The first node of an attempt creates the MLflow run, unless an earlier attempt or process has created a run with the
same tag. All other nodes wait for the MLflow run. The delivery repeats uncertain steps, because repeating a delivery
step changes nothing in MLflow. Only the delivery of the last attempt sets the state of the MLflow run. Deliveries of
earlier attempts add their points and files.

While MLflow is unavailable, the delivery retries with backoff and sends one notice. The file of telemetry samples
serves as the buffer. If more than 64 MB of samples are unsent, the delivery drops the oldest points and sends a notice.
The delivery skips data that MLflow refuses, for example data for a deleted run. If MLflow has another value for a
parameter, the delivery sends a tag instead. The delivery gives up 24 hours after the end of the attempt. If the monitor
process is killed, the next process continues the delivery. No other thread waits for the delivery.

The delivery sends a limited number of small files. The delivery sends spec.json, environment.json and _air.py early.
After the attempt's end, the delivery sends failures/<rank>.txt, hang.txt and the last lines of failed ranks. The
delivery sends receipt.json as the last file. The delivery skips an unreadable file, cuts a long file, and replaces
invalid UTF-8. The delivery never sends results, because results may contain any data.

Failure cases: With a full disk, a deleted directory or an unreadable state file, the delivery keeps its state in
memory. A later process repeats uncertain steps, which changes nothing in MLflow.
"""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.spec import RunSpec, Tracking
from serverless_gpu.model.tracking_rules import (
    ATTEMPT_TAG,
    GIVE_UP_S,
    RUN_TAG,
    TAG_CHARACTERS_MAX,
    cut,
    first_tags,
    folder,
    gang_tags,
    is_reported_elsewhere,
    last_tags,
    params_of,
    pause_s,
    receipt_tags,
    resumed_tags,
    spec_params,
    status_of,
    valid_key,
)
from serverless_gpu.operating_system import open_regular
from serverless_gpu.tracking.base import Tracker, TrackerAway, TrackerRefused, TrackerRun
from serverless_gpu.tracking.metric_points import BACKLOG_BYTES_MAX, MetricPoints, SampleCursor, telemetry_path

FILE_BYTES_MAX = 1 << 20
LOG_BYTES_MAX = 64 << 10
RANKS_MAX = 8
"""Maximum number of failed ranks that a delivery reports."""

_EARLY = ("spec.json", "environment.json", "_air.py")
_guard = threading.Lock()
_of_runs: weakref.WeakValueDictionary[str, SharedDeliveryState] = weakref.WeakValueDictionary()
_BYTES_MAX = 1 << 20
_POLL_S = 2.0
_LOOK_S_MAX = 5.0
_DOUBT_NS = 10 * 10**9
_FRESH_NS = 5 * 10**9  # Nanoseconds after a call within which no earlier process can have created the run.
_SETTLE_NS = 3600 * 10**9
_SUSPICIOUS = 3


class DeliveryJob(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the attempt whose data the delivery sends."""

    run_id: str
    fence: int
    node_rank: int = 0  # The first node of the gang creates, describes and ends the MLflow run.
    num_nodes: int = 1
    spec: RunSpec
    environment: str = ""  # Description of the ranks' Python environment, or "".
    called_ns: int  # Time of the user's call in nanoseconds since 1970.


class DeliveryListener(Protocol):
    """Receives progress messages in the delivery's thread, in methods that must not block."""

    def tracked(self, tracked: TrackerRun) -> None:
        """Receive the MLflow run, once per process."""
        ...

    def untracked(self, sentence: str, *, final: bool) -> None:
        """Receive a new reason for a missing MLflow run. `final` is True if the delivery has given up."""
        ...

    def said(self, sentence: str, *, note: bool) -> None:
        """Receive a message for attached clients. With `note`, the run's receipt also contains the message."""
        ...


class MlflowDelivery:
    """Delivers the data of one attempt on one node to MLflow.

    Call `run` in a separate thread. `run` closes the tracker at its end.
    """

    def __init__(
        self,
        directory: Path,
        job: DeliveryJob,
        tracker: Tracker,
        listener: DeliveryListener,
        *,
        clock: Clock | None = None,
    ) -> None:
        if job.spec.tracker is None:
            raise ValueError(f"run {job.run_id} does not use MLflow tracking")
        self._directory = directory
        self._job = job
        self._tracking: Tracking = job.spec.tracker
        self._tracker = tracker
        self._listener = listener
        self._clock = clock or SystemClock()
        self._path = state_path(directory, job.node_rank)
        self._memory = load_state(self._path)
        self._changed = threading.Condition()
        self._stopped = False
        self._woken = False
        self._failures = 0
        cursor = SampleCursor(self._memory.offset, self._memory.sent_ns)
        path = telemetry_path(directory, job.node_rank)
        self._points = MetricPoints(path, job.num_nodes, cursor, backlog_bytes_max=BACKLOG_BYTES_MAX)
        self._is_first = job.node_rank == 0
        self._is_established = False
        self._is_superseded = False
        self._together = shared_delivery_state(job.run_id)
        self._folder = folder(self._tracking, job.run_id, job.fence, job.node_rank)
        self._suspicious: dict[str, int] = {}
        self._said_away = False
        self._said_untracked = ""
        self._said_dropped = self._memory.dropped
        self._why_dropped = ""

    @property
    def over(self) -> str:
        """Return the reason why the delivery has ended, for example ``"delivered"``, or ""."""
        return self._memory.over

    @property
    def failures(self) -> int:
        """Return the number of consecutive requests that failed because MLflow was unavailable."""
        return self._failures

    def run(self) -> None:
        """Deliver data until the delivery is complete or another thread calls `stop`."""
        try:
            while not self._stopped and not self._memory.over:
                seconds = self._turn()
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopped or self._woken or bool(self._memory.over), timeout=seconds
                    )
                    self._woken = False
        finally:
            self._tracker.close()

    def stop(self) -> None:
        """Stop `run` after the current request. The next process can continue the delivery."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def abandon(self, why: str) -> None:
        """End the delivery permanently. Call this method only after `run` has returned."""
        self._memory.over = why
        self._save()

    def wake(self) -> None:
        """Retry immediately, because MLflow may be available again or new samples exist."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def ending(self, state: State, reason: Reason, sentence: str = "") -> None:
        """Record the end of the attempt, after which its directory has the final logs and failures."""
        ending = AttemptEnding(state=state, reason=reason, sentence=sentence, at_ns=self._clock.wall_ns())
        with self._changed:
            if self._memory.ending is None:
                self._memory.ending = ending
            self._woken = True
            self._changed.notify_all()

    def settled(self) -> None:
        """Record that the attempt's receipt exists or will never exist."""
        with self._changed:
            self._memory.is_settled = True
            self._woken = True
            self._changed.notify_all()

    # --- private methods, in the delivery thread ------------------------------------------------------------------

    def _turn(self) -> float:
        """Run all possible delivery steps. Return the seconds until the next try."""
        try:
            while not self._stopped and not self._memory.over and self._step():
                self._failures = 0
                self._save()
        except TrackerAway as error:
            return self._is_away(error)
        self._failures = 0
        return _POLL_S

    def _step(self) -> bool:
        steps: tuple[Callable[[], bool], ...] = (
            self._establish,
            self._parameters,
            self._early_files,
            self._some_points,
            self._failure_files,
            self._end,
            self._account,
            self._finish,
        )
        return any(step() for step in steps)

    # --- the MLflow run -----------------------------------------------------------------------------------------

    def _establish(self) -> bool:
        memory = self._memory
        if self._is_established:
            return False
        try:
            if memory.tracked is None:
                makes = self._is_first and not self._tracking.run_id
                found = self._begun() if makes else self._tracker.find(self._tracking, self._job.run_id)
                if found is None:
                    raise _NotYet("the first node has not created the MLflow run yet")
                memory.tracked = found
                self._save()
            self._resume()
        except TrackerRefused as error:
            memory.over = f"refused: {error}"
            self._save()
            self._listener.untracked(str(error), final=True)
            return True
        self._is_established = True
        self._listener.tracked(memory.tracked)
        return True

    def _begun(self) -> TrackerRun:
        """Find or create the MLflow run."""
        job, memory, shared = self._job, self._memory, self._together
        with shared.lock:
            now_ns = self._clock.wall_ns()
            asked_ns = max(memory.asked_ns, shared.asked_ns)
            is_tried = bool(asked_ns or self._failures or memory.ending)
            if job.fence > 1 or is_tried or now_ns - job.called_ns > _FRESH_NS:
                found = self._tracker.find(self._tracking, job.run_id)
                if found is not None:
                    return found
                if 0 <= now_ns - asked_ns < _DOUBT_NS:
                    raise _NotYet("an earlier request may still create the MLflow run")
            memory.asked_ns = shared.asked_ns = now_ns
            self._save()
            tags = first_tags(self._tracking, job.run_id, job.fence, job.spec.tags)
            try:
                return self._tracker.begin(self._tracking, job.run_id, tags=tags, at_ms=job.called_ns // 1_000_000)
            except TrackerAway as error:
                if not error.is_doubtful:
                    memory.asked_ns = shared.asked_ns = 0
                raise

    def _resume(self) -> None:
        """Reopen an MLflow run that an earlier attempt ended."""
        if not self._is_first or self._job.fence == 1 or "end" in self._memory.done:
            return
        with self._together.lock:
            if not self._has_later():
                # Set the attempt tag first, so that deliveries of earlier attempts do not end the MLflow run again.
                tags = resumed_tags(self._tracking, self._job.run_id, self._job.fence)
                self._refusable(lambda: self._tracker.log(self._known, tags=tags))
                if not self._tracking.run_id and self._memory.ending is None:
                    self._tracker.resume(self._known)

    def _has_later(self) -> bool:
        """Return True if a later attempt has begun, because only the last attempt sets the MLflow run's state."""
        if not self._is_superseded:
            tags = self._tags()
            attempt = tags.get(ATTEMPT_TAG, "")
            # A user's MLflow run may contain several serverless-gpu runs.
            is_ours = tags.get(RUN_TAG) == self._job.run_id
            self._is_superseded = is_ours and attempt.isdecimal() and int(attempt) > self._job.fence
        return self._is_superseded

    def _parameters(self) -> bool:
        if not self._is_first or "params" in self._memory.done:
            return False
        params = params_of(self._tracking, spec_params(self._job.spec))
        try:
            self._tracker.log(self._known, params=params)
        except TrackerRefused:
            # Send each parameter separately, because MLflow refuses a whole request if one parameter already has
            # another value.
            for key, value in params.items():
                try:
                    self._tracker.log(self._known, params={key: value})
                except TrackerRefused:
                    self._log_tags({valid_key(f"sgpu.param.{key}"): value})
        with self._together.lock:
            if not self._has_later():
                tags = {ATTEMPT_TAG: str(self._job.fence), "sgpu.environment": self._job.environment}
                if self._tracking.run_id:  # An MLflow run that the user created has no serverless-gpu tags yet.
                    tags |= first_tags(self._tracking, self._job.run_id, self._job.fence, self._job.spec.tags)
                self._log_tags(tags)
        self._memory.done.add("params")
        return True

    # --- files --------------------------------------------------------------------------------------------------

    def _early_files(self) -> bool:
        if not self._is_first or "early" in self._memory.done:
            return False
        files = ((name, _head(path)) for name, path in early_files(self._directory))
        return self._uploaded(files, "early")

    def _failure_files(self) -> bool:
        ending = self._memory.ending
        if ending is None or ending.state is State.SUCCEEDED or "failures" in self._memory.done:
            return False
        return self._uploaded(failure_files(self._directory), "failures")

    def _uploaded(self, files: Iterable[tuple[str, bytes]], step: str) -> bool:
        """Send all unsent files of a step, and mark the step as done."""
        for name, data in files:
            if name not in self._memory.done:
                self._upload(name, data)
                self._memory.done.add(name)
                self._save()
        self._memory.done.add(step)
        return True

    def _upload(self, name: str, data: bytes) -> None:
        """Send a file.

        If MLflow refuses the file, send its text as a tag. Raises TrackerAway if the step must be retried.
        """
        if self._suspicious.get(name):  # Raises TrackerAway if MLflow also fails to answer a simpler request.
            self._refusable(lambda: self._tracker.tags(self._known))
        try:
            self._tracker.upload(self._known, f"{self._folder}{name}", data)
            return
        except TrackerAway:
            self._suspicious[name] = self._suspicious.get(name, 0) + 1
            if self._suspicious[name] <= _SUSPICIOUS:
                raise
        except TrackerRefused:
            pass
        text = cut(data.decode(errors="replace"), TAG_CHARACTERS_MAX, keep_end=name.startswith(("logs/", "failures/")))
        self._log_tags({valid_key(f"sgpu.file.{self._folder.removeprefix('sgpu/')}{name}"): text})

    # --- points -------------------------------------------------------------------------------------------------

    def _some_points(self) -> bool:
        metrics = self._points.next(ended=self._memory.ending is not None)
        if not metrics:
            self._say_dropped()
            return False
        try:
            self._tracker.log(self._known, metrics=metrics)
        except TrackerRefused as error:
            self._memory.dropped += len(metrics)
            if not self._why_dropped:
                self._why_dropped = f"refused them: {error}"
        self._points.sent()
        return True

    def _say_dropped(self) -> None:
        dropped = self._memory.dropped
        if dropped == self._said_dropped:
            return
        self._said_dropped = dropped
        why = self._why_dropped or "was unavailable for too long"
        self._listener.said(f"{dropped:,} points of system metrics were dropped: MLflow {why}", note=True)

    # --- end of the attempt -------------------------------------------------------------------------------------

    def _end(self) -> bool:
        ending = self._memory.ending
        if ending is None or "end" in self._memory.done:
            return False
        failed = ending.state is not State.SUCCEEDED
        if self._is_first or failed:
            with self._together.lock:
                if not self._has_later() and not (
                    self._job.num_nodes > 1 and is_reported_elsewhere(ending.reason, self._tags())
                ):
                    self._log_tags(last_tags(self._tracking, ending.state, ending.reason, ending.sentence))
                    # An MLflow run that the user created is ended by the user's code.
                    if not self._tracking.run_id or self._known.had_ended:
                        at_ms = ending.at_ns // 1_000_000
                        self._refusable(lambda: self._tracker.end(self._known, status_of(ending.state), at_ms))
        self._memory.done.add("end")
        return True

    def _account(self) -> bool:
        if not self._has_settled or "receipt" in self._memory.done:
            return False
        data = _head(self._directory / "receipt.json")
        if data:
            if "receipt.json" not in self._memory.done:
                self._upload("receipt.json", data)
                self._memory.done.add("receipt.json")
            # A receipt from another version may have an unreadable format.
            with self._together.lock, contextlib.suppress(msgspec.MsgspecError):
                receipt = from_json(data, Receipt)
                if not self._has_later():
                    self._log_tags(receipt_tags(self._tracking, receipt, self._job.node_rank, self._job.num_nodes))
                    if self._job.num_nodes > 1:  # Only the last node to finish can read the tags of all nodes.
                        self._log_tags(gang_tags(self._tracking, self._tags(), self._job.num_nodes))
        self._memory.done.add("receipt")
        return True

    @property
    def _has_settled(self) -> bool:
        memory = self._memory
        if memory.ending is None:
            return False
        return memory.is_settled or self._clock.wall_ns() - memory.ending.at_ns > _SETTLE_NS

    def _finish(self) -> bool:
        if "receipt" in self._memory.done:
            self._memory.over = "delivered"
            self._save()
        return False

    # --- helpers ------------------------------------------------------------------------------------------------

    @property
    def _known(self) -> TrackerRun:
        if self._memory.tracked is None:
            raise RuntimeError("a step ran before the MLflow run was known")
        return self._memory.tracked

    def _tags(self) -> Mapping[str, str]:
        with contextlib.suppress(TrackerRefused):
            return self._tracker.tags(self._known)
        return {}

    def _log_tags(self, tags: Mapping[str, str]) -> None:
        tags = {key: value for key, value in tags.items() if value}
        if tags:
            self._refusable(lambda: self._tracker.log(self._known, tags=tags))

    def _refusable(self, act: Callable[[], object]) -> None:
        """Execute an optional request, and ignore its refusal by MLflow."""
        with contextlib.suppress(TrackerRefused):
            act()

    def _save(self) -> None:
        memory = self._memory
        memory.offset, memory.sent_ns = self._points.cursor
        save_state(self._path, memory)

    def _is_away(self, error: TrackerAway) -> float:
        """Record that MLflow is unavailable, and return the seconds until the next try."""
        self._failures += 1
        self._memory.dropped += self._points.shorten()
        ending = self._memory.ending
        waited_ns = 0 if ending is None else self._clock.wall_ns() - ending.at_ns
        if waited_ns > GIVE_UP_S * 10**9 or not self._directory.is_dir():
            self._memory.over = f"given up: {error}"
        elif not isinstance(error, _NotYet):
            self._say_away(str(error))
        self._save()
        pause = pause_s(self._failures) * random.uniform(0.5, 1.0)
        return min(pause, _LOOK_S_MAX) if isinstance(error, _NotYet) else pause

    def _say_away(self, sentence: str) -> None:
        if not self._is_established:
            if sentence != self._said_untracked:
                self._said_untracked = sentence
                self._listener.untracked(sentence, final=False)
        elif self._failures > 1 and not self._said_away:  # One failed request does not justify a notice to the user.
            self._said_away = True
            self._listener.said(
                f"{sentence}; the node keeps system metrics on its disk until MLflow is available again", note=False
            )


class _NotYet(TrackerAway):
    """The expected MLflow run does not exist yet, although MLflow answers."""


class SharedDeliveryState:
    """State that all deliveries of a run in one process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asked_ns = 0


def shared_delivery_state(run_id: str) -> SharedDeliveryState:
    """Return the shared state of a run's deliveries."""
    with _guard:
        shared = _of_runs.get(run_id)
        if shared is None:
            shared = _of_runs[run_id] = SharedDeliveryState()
        return shared


class AttemptEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The state, reason and time (nanoseconds since 1970) of an attempt's end."""

    state: State
    reason: Reason
    sentence: str = ""
    at_ns: int


class DeliveryState(msgspec.Struct, kw_only=True):
    """The persistent state of one delivery."""

    tracked: TrackerRun | None = None  # MLflow run of the delivery, or None before the first answer.
    asked_ns: int = 0  # Time of the last unanswered request to create the MLflow run, in nanoseconds since 1970, or 0.
    offset: int = 0  # Offset in the sample file up to which the delivery has sent or dropped all samples.
    sent_ns: int = 0  # Time of the last sent sample. MLflow also contains all samples before this time.
    dropped: int = 0  # Number of dropped metric points.
    done: set[str] = msgspec.field(default_factory=set)  # Names of completed steps.
    ending: AttemptEnding | None = None  # End of the attempt, or None while the attempt runs.
    is_settled: bool = False  # True if the attempt's receipt exists or will never exist.
    over: str = ""  # Reason for the end of the delivery, or "" while the delivery continues.


def state_path(directory: Path, node_rank: int) -> Path:
    """Return the path of a delivery's state file."""
    return directory / f"tracking-{node_rank}.state"


def load_state(path: Path) -> DeliveryState:
    """Return the stored state of a delivery, or an empty state without a readable file."""
    with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
        return from_json(file.read(_BYTES_MAX), DeliveryState)
    return DeliveryState()


def save_state(path: Path, memory: DeliveryState) -> None:
    """Store the state of a delivery, and ignore a full disk or a missing directory."""
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(memory))
        temporary.replace(path)


# --- files of an attempt ----------------------------------------------------------------------------------------------


def early_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of files that exist from the beginning of an attempt."""
    for name in _EARLY:
        if (directory / name).exists():
            yield name, directory / name


def failure_files(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of files about failed ranks."""
    for rank in _failed(directory):
        text = _failure_text(directory, rank)
        if text:
            yield f"failures/{rank}.txt", text.encode(errors="replace")
        for stream in ("stdout", "stderr"):
            tail = _tail(directory / "logs" / f"{rank}.{stream}", LOG_BYTES_MAX)
            if tail:
                yield f"logs/{rank}.{stream}.txt", tail
    for path in sorted(directory.glob("hang-*.txt"))[-1:]:  # The newest hang report contains the most stacks.
        yield "failures/hang.txt", _head(path)


class _Cause(msgspec.Struct):
    rank: int | None = None


class _Stopped(msgspec.Struct):
    cause: _Cause | None = None


class _Record(msgspec.Struct):
    type: str = ""
    message: str = ""
    traceback: str = ""


def _failed(directory: Path) -> list[int]:
    """Return at most `RANKS_MAX` failed ranks, beginning with the rank that caused the failure."""
    ranks: set[int] = set()
    with contextlib.suppress(OSError):
        for path in (directory / "failures").iterdir():
            if path.stem.isdigit() and path.suffix in (".json", ".stack") and path.stat().st_size:
                ranks.add(int(path.stem))
    cause: int | None = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        stopped = from_json(_head(directory / "stopped.json"), _Stopped)
        cause = stopped.cause.rank if stopped.cause is not None else None
    first = [] if cause is None else [cause]
    return (first + sorted(ranks - set(first)))[:RANKS_MAX]


def _failure_text(directory: Path, rank: int) -> str:
    parts: list[str] = []
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        record = from_json(_head(directory / "failures" / f"{rank}.json"), _Record)
        parts.append(record.traceback.strip() or f"{record.type}: {record.message}")
    stack = _head(directory / "failures" / f"{rank}.stack").decode(errors="replace").strip()
    if stack:
        parts.append(stack)
    return cut("\n\n".join(parts), FILE_BYTES_MAX // 4, keep_end=True)


def _head(path: Path) -> bytes:
    """Return the first `FILE_BYTES_MAX` bytes of a file, or b"" for an unreadable file."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.read(FILE_BYTES_MAX)
    return b""


def _tail(path: Path, limit: int) -> bytes:
    with contextlib.suppress(OSError), open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - limit))
        data = file.read(limit)
        # Drop the incomplete first line of the tail.
        return data if size <= limit else data.partition(b"\n")[2] or data
    return b""
