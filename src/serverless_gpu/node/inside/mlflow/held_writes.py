"""Writes that a rank holds in memory while MLflow does not answer, and sends once it does.

    keep ─▶ the newest `HELD_MAX` points and values ─▶ a thread: the oldest batch first, a try every second ─▶ MLflow
                                                                                    settle: wait ─▶ give_up

Order does not matter to MLflow, because points carry their step and time; a batch that arrives twice is the same.
Dropped points (too many, or at the end) are counted.

Failure cases: no thread can be started (kept until `wait`, then given up); the process forks (the child starts empty:
the parent sends what it holds).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

HELD_MAX = 100_000
"""Points and values of one rank, 40 MB at most."""
_AGAIN_S = 1.0


class Batch(NamedTuple):
    """Writes sent together: `size` points and values. `send` returns whether MLflow has answered."""

    size: int
    send: Callable[[], bool]


class HeldWrites:
    """Queue of writes to send; `on_back` is called once it is empty again."""

    def __init__(self, on_back: Callable[[], None], limit: int = HELD_MAX, again_s: float = _AGAIN_S) -> None:
        self._on_back = on_back
        self._limit = limit  # most points and values
        self._again_s = again_s  # between two tries
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
        """Return whether MLflow did not answer when it was last asked."""
        return self._thread is not None

    @property
    def lost(self) -> int:
        """Return how many points and values were dropped."""
        return self._lost

    def keep(self, batch: Batch) -> None:
        """Hold what did not arrive, or has to wait for what did not."""
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
                with contextlib.suppress(RuntimeError):  # the interpreter ends, or no thread is left
                    thread.start()
                    self._thread = thread

    def wait(self, limit_s: float) -> bool:
        """Wait until everything is sent; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None and not self._batches, limit_s)

    def give_up(self) -> None:
        """Drop what is held, and whatever comes."""
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
        """Send what is held, as far as MLflow answers; return whether all of it was, or given up."""
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
                    continue  # it was counted
                if not has_arrived:
                    self._batches.appendleft(batch)
                    return False
                self._held -= batch.size
