"""Handles the writes of all ranks to the job's MLflow run, even while MLflow does not answer.

    log_metric, log_params … ─▶ MLflow's client ─▶ RestStore.log_batch, log_metric, log_param ─▶ server
                                                          └ Writes: only for the job's run

* **Different parameters in ranks:** MLflow refuses a second value of a parameter and keeps the first value under the
  parameter's key. `Writes` stores the value of another rank as `<key>.rank<r>`, with one notice. A rank that logs two
  values of one parameter after one `start_run` gets MLflow's own error.
* **Refused values:** MLflow's asynchronous logging collects the calls of one second in a batch, which the server
  accepts or refuses as a whole. `Writes` sends a refused batch in halves, so that MLflow refuses only the bad values.
* **Limit of points:** MLflow accepts ten million points per run. The node reserves two million points for its own
  metrics. `Writes` counts the points of all ranks of a node in files in the attempt directories. At 80 % of the limit,
  a rank prints a warning. Above the limit, `Writes` drops points and prints a notice.
* **A server that does not answer:** Asynchronous logging does not wait for the server. `HeldWrites` keeps a bounded
  number of writes in memory and sends them once the server answers. MLflow's own queue would wait for a timeout at each
  write. A synchronous call waits only for a single timeout.

    keep ─▶ the newest `HELD_MAX` points and values ─▶ a thread: oldest batch first, one try per second ─▶ MLflow
                                                                                  settle: wait ─▶ give_up

MLflow accepts points in any order, because each point contains its step and time. Sending a batch twice has no further
effect. `HeldWrites` counts the points that it drops.

Failure cases: If no thread can start, `HeldWrites` keeps the writes in memory and drops the writes at the rank's end.
If the process forks, the child process starts with an empty queue. The parent process sends the writes in its own
queue.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .job import MlflowJob

HELD_MAX = 100_000
"""Maximum number of points and values that one rank holds, about 40 MB."""
_AGAIN_S = 1.0


POINTS_MAX = 8_000_000
WARN_AT = 0.8
_LOOK_EVERY = 10_000  # Number of points after which a rank reads the other ranks' counts again.
_OWN_KEYS_MAX = 10_000
_KEY_MAX = 250
_NAMES_MAX = 10  # Maximum number of alternative names for one parameter of a rank.
_CUT_FROM = 500  # Length from which the MLflow server may have truncated a value.
_TRIES_MAX = 64  # Maximum number of writes to isolate the invalid values of a batch.
_BACKGROUND = "MLflowBatchLoggingWorkerPool"
_POINTS = "points"


class Items(NamedTuple):
    """The metrics, parameters and tags in a batch of writes."""

    metrics: Sequence[Any]
    params: Sequence[Any]
    tags: Sequence[Any]

    @property
    def size(self) -> int:
        """Return the number of metrics, parameters and tags in the batch."""
        return sum(len(kind) for kind in self)

    def halves(self) -> list[Items]:
        """Split the batch by kind, or in half if all entries have the same kind. Return [] for a single entry."""
        kinds = [number for number, kind in enumerate(self) if kind]
        if len(kinds) > 1:
            return [_NOTHING._replace(**{self._fields[number]: self[number]}) for number in kinds]
        if self.size < 2:
            return []
        name, kind = self._fields[kinds[0]], self[kinds[0]]
        middle = len(kind) // 2
        return [_NOTHING._replace(**{name: half}) for half in (kind[:middle], kind[middle:])]


_NOTHING = Items((), (), ())


class PointCount:
    """Counts the points that this node's ranks have logged to a run, and enforces the limit."""

    def __init__(self, job: MlflowJob, limit: int = POINTS_MAX) -> None:
        self._job = job
        self._limit = limit
        self._lock = threading.Lock()
        self._own = 0
        self._others = 0
        self._next_look = min(_LOOK_EVERY, max(1, limit // 100))
        self._step = self._next_look
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.Lock()  # A forked child has no thread that could release the parent's lock.

    def admit(self, count: int) -> bool:
        """Return True and count the points if the run may receive `count` more points."""
        with self._lock:
            if self._pid != os.getpid():  # After a fork, the child process must not count the parent's points again.
                self._pid, self._own = os.getpid(), 0
            if not self._own:
                self._others = self._of_others("")
            total = self._own + self._others + count
            if total > self._limit:
                self._job.say_once("points-dropped", f"points beyond {self._limit:,} per run are not written to MLflow")
                return False
            self._own += count
            if self._own >= self._next_look:
                self._look()
            if total >= WARN_AT * self._limit:
                self._job.say_once(
                    "points-warned",
                    f"this run has {total:,} points in MLflow. Points beyond {self._limit:,} will be dropped. Log "
                    "less often, or log means of several steps",
                )
            return True

    def _look(self) -> None:
        self._next_look = self._own + self._step
        own = f"{self._job.rank}.{self._pid}"
        here = os.path.join(self._job.directory, _POINTS)
        with contextlib.suppress(OSError):
            os.makedirs(here, exist_ok=True)
            with open(f"{here}/.{own}", "w", encoding="ascii") as file:
                file.write(str(self._own))
            os.rename(f"{here}/.{own}", f"{here}/{own}")
        self._others = self._of_others(f"{here}/{own}")

    def _of_others(self, own: str) -> int:
        total = 0
        run = os.path.dirname(self._job.directory)
        with contextlib.suppress(OSError):
            for fence in os.listdir(run):
                with contextlib.suppress(OSError):
                    for entry in os.scandir(os.path.join(run, fence, _POINTS)):
                        if not entry.name.startswith(".") and entry.path != own:
                            with contextlib.suppress(OSError, ValueError), open(entry.path, encoding="ascii") as file:
                                total += int(file.read(32))
        return total


class Writes:
    """Intercepts the writes of MLflow's client to the job's run.

    `refused` is MLflow's exception type. An exception of this type with a bad-request code comes from the server. An
    exception with any other code means that the server did not answer.
    """

    def __init__(self, job: MlflowJob, refused: type[Exception]) -> None:
        self._job = job
        self._error = refused
        self._points = PointCount(job)
        self._lock = threading.Lock()
        self._own: dict[str, str] = {}  # Parameters that this process logged since its last start_run.
        self._held = HeldWrites(
            lambda: job.say_once(
                "back", "MLflow answers again and has received the data that ranks logged in the meantime"
            )
        )
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        self._lock = threading.Lock()  # A forked child has no thread that could release the parent's lock.

    def patch(self, store: type) -> None:
        """Wrap the write methods of MLflow's store class."""
        for name, ours in (("log_batch", self._batch), ("log_metric", self._metric), ("log_param", self._param)):
            original = getattr(store, name, None)
            if original is not None:
                setattr(store, name, wrapped(original, ours))

    def begin(self) -> None:
        """Forget earlier parameters, because a newly started run may log different values."""
        with self._lock:
            self._own.clear()

    def give_up(self) -> None:
        """Drop the held writes and all later writes that fail."""
        self._held.give_up()

    def wait(self, limit_s: float) -> bool:
        """Wait until MLflow has received all held writes, or return False after `limit_s` seconds."""
        return self._held.wait(limit_s)

    def lost(self) -> int:
        """Return the number of points and values that the rank dropped because MLflow did not answer."""
        return self._held.lost

    def _batch(
        self,
        original: Callable[..., Any],
        store: Any,
        run_id: str,
        metrics: Sequence[Any] = (),
        params: Sequence[Any] = (),
        tags: Sequence[Any] = (),
    ) -> Any:
        if run_id != self._job.run_id:
            return original(store, run_id=run_id, metrics=metrics, params=params, tags=tags)
        if metrics and not self._points.admit(len(metrics)):
            metrics = []

        def write(items: Items) -> Any:
            return original(store, run_id=run_id, **items._asdict())

        items = Items(metrics, params, tags)
        if not threading.current_thread().name.startswith(_BACKGROUND):
            return self._with_params(store, items, write)
        items = items._replace(params=self._without_twins(params))
        batch = Batch(items.size, lambda: self._has_answered(lambda: self._in_parts(store, items, write)))
        if self._held.is_away:
            self._held.keep(batch)
            return None
        try:
            return self._in_parts(store, items, write)
        except self._error as error:
            if is_answer(error):
                raise
            self._job.say_once(
                "away",
                f"MLflow does not answer. Each rank holds its newest {HELD_MAX:,} points and sends them once "
                f"MLflow answers: {_short(error)}",
            )
            self._held.keep(batch)
            return None

    def _has_answered(self, write: Callable[[], Any]) -> bool:
        """Send a held batch to MLflow again. Return False if MLflow still does not answer."""
        try:
            write()
        except self._error as error:
            if not is_answer(error):
                return False
            self._job.say_once(
                "refused", f"MLflow refuses data that a rank logged while MLflow did not answer: {_short(error)}"
            )
        except Exception as error:  # noqa: BLE001 - an error in one batch must not stop the other batches
            self._job.say_once("refused", f"cannot send data that a rank logged while MLflow did not answer: {error!r}")
        return True

    def _metric(self, original: Callable[..., Any], store: Any, run_id: str, metric: Any) -> Any:
        if run_id == self._job.run_id and not self._points.admit(1):
            return None
        return original(store, run_id, metric)

    def _param(self, original: Callable[..., Any], store: Any, run_id: str, param: Any) -> Any:
        if run_id != self._job.run_id:
            return original(store, run_id, param)
        items = _NOTHING._replace(params=[param])
        return self._with_params(store, items, lambda items: [original(store, run_id, each) for each in items.params])

    def _without_twins(self, params: Sequence[Any]) -> Sequence[Any]:
        """Return the parameters without repeated keys.

        MLflow refuses a batch with a repeated key.
        """
        first: dict[str, Any] = {}
        for param in params:
            if first.setdefault(param.key, param).value != param.value:
                rank = self._job.rank
                self._job.say_once(
                    "twice", f"rank {rank} logs two values of the parameter {param.key!r}. MLflow keeps the first value"
                )
        return list(first.values())

    def _in_parts(
        self, store: Any, items: Items, write: Callable[[Items], Any], tries: list[None] | None = None
    ) -> Any:
        """Write a batch, or its halves if MLflow refuses it, so that a bad value does not block other values."""
        tries = [] if tries is None else tries
        tries.append(None)
        try:
            return self._with_params(store, items, write)
        except self._error as error:
            halves = items.halves() if is_answer(error) and _is_about_values(error) else []
            if not halves or len(tries) > _TRIES_MAX:
                raise
        refusal: Exception | None = None
        for half in halves:
            try:
                self._in_parts(store, half, write, tries)
            except self._error as error:
                if not is_answer(error):
                    raise
                refusal = error
        if refusal is not None:
            raise refusal
        return None

    def _with_params(self, store: Any, items: Items, write: Callable[[Items], Any]) -> Any:
        params = items.params
        try:
            answer = write(items)
        except self._error as error:
            others = self._renamed(store, params) if params and is_answer(error) else None
            if others is None:
                raise
            answer = write(items._replace(params=others))
        with self._lock:
            if len(self._own) < _OWN_KEYS_MAX:
                self._own.update((param.key, param.value) for param in params)
        return answer

    def _renamed(self, store: Any, params: Sequence[Any]) -> list[Any] | None:
        """Return the parameters with unused names, or None if MLflow refused the batch for another reason."""
        there: dict[str, str] = store.get_run(self._job.run_id).data.params
        result, differing = [], []
        for param in params:
            if _same(there.get(param.key, param.value), param.value):
                result.append(param)
                continue
            own = self._own.get(param.key)
            name = self._free_name(there, param.key, param.value)
            if name is None or (own is not None and own != param.value):
                return None
            differing.append(param.key)
            result.append(type(param)(name, param.value))
        if not differing:
            return None
        key = differing[0]
        self._job.say_once(
            "params",
            f"ranks log different values of the parameter {key!r}. MLflow keeps the value of rank "
            f"{self._job.rank} as {key}.rank{self._job.rank}. Other parameters with different values get similar "
            "names",
        )
        return result

    def _free_name(self, there: dict[str, str], key: str, value: str) -> str | None:
        for number in range(1, _NAMES_MAX + 1):
            suffix = f".rank{self._job.rank}" + (f".{number}" if number > 1 else "")
            name = key[: _KEY_MAX - len(suffix)] + suffix
            if _same(there.get(name, value), value):
                return name
        return None


def wrapped(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `original` that calls `ours` with `original` as the first argument."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return function


def is_answer(error: Exception) -> bool:
    """Return True if the server refused a request, and False if the server did not answer."""
    return _is_about_values(error) or getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST"


def _is_about_values(error: Exception) -> bool:
    return getattr(error, "error_code", "") in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")


def _same(there: str, value: str) -> bool:
    return there == value or (len(there) >= _CUT_FROM and value.startswith(there))


def _short(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


class Batch(NamedTuple):
    """A batch of `size` points and values.

    `send` returns True if MLflow has answered.
    """

    size: int
    send: Callable[[], bool]


class HeldWrites:
    """A queue of unsent batches. The queue calls `on_back` once MLflow has received all batches."""

    def __init__(self, on_back: Callable[[], None], limit: int = HELD_MAX, again_s: float = _AGAIN_S) -> None:
        self._on_back = on_back
        self._limit = limit  # Maximum number of points and values to hold.
        self._again_s = again_s  # Seconds between two attempts to send a batch.
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._batches: deque[Batch] = deque()
        self._held = 0
        self._lost = 0
        self._given_up = False
        self._thread: threading.Thread | None = None

    @property
    def is_away(self) -> bool:
        """Return True while the queue waits for MLflow's answer."""
        return self._thread is not None

    @property
    def lost(self) -> int:
        """Return the number of points and values that the queue has dropped."""
        return self._lost

    def keep(self, batch: Batch) -> None:
        """Queue a batch that MLflow did not receive, or that must wait for an earlier batch."""
        with self._changed:
            if self._given_up:
                self._lost += batch.size
                return
            self._batches.append(batch)
            self._held += batch.size
            while self._held > self._limit:
                dropped = self._batches.popleft()
                self._held -= dropped.size
                self._lost += dropped.size
            if self._thread is None:
                thread = threading.Thread(target=self._replay, name="sgpu-mlflow-held", daemon=True)
                # The interpreter is shutting down, or the process cannot start a thread.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def wait(self, limit_s: float) -> bool:
        """Wait until the queue is empty, or return False after `limit_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None and not self._batches, limit_s)

    def give_up(self) -> None:
        """Drop the held batches and all later batches."""
        with self._changed:
            self._given_up = True
            self._lost += self._held
            self._held = 0
            self._batches.clear()
            self._changed.notify_all()

    def _replay(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._given_up, self._again_s)
            if self._sent():
                return

    def _sent(self) -> bool:
        """Send held batches while MLflow answers. Return True once the queue is empty."""
        while True:
            with self._changed:
                if not self._batches:
                    self._thread = None
                    self._changed.notify_all()
                    if not self._given_up:
                        self._on_back()
                    return True
                batch = self._batches.popleft()
            has_arrived = batch.send()
            with self._changed:
                if self._given_up:
                    continue  # `give_up` has already counted the batch as dropped.
                if not has_arrived:
                    self._batches.appendleft(batch)
                    return False
                self._held -= batch.size
