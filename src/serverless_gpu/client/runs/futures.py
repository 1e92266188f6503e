"""Provides futures of runs for `concurrent.futures.wait`, executors and `await`.

    run.future() ──▶ RunWaiter ──poll──▶ descriptors of all runs that have a future
                       │ one daemon thread per process, which ends after the last run
                       └──▶ Future.set_result(run.results()) or set_exception(...)

A forked child process inherits the futures but not the `RunWaiter` thread. Code in the child process must therefore use
the run handles. If another thread reads a run's messages, `RunWaiter` checks the run's state every second.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from serverless_gpu.client.runs.run import Run
from serverless_gpu.operating_system import start_thread

R = TypeVar("R")

_LOOK_S = 1.0


class RunWaiter:
    """A thread that resolves futures when their runs end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[Run[Any], Future[Any]] = {}
        self._wake = -1

    def add(self, run: Run[R]) -> Future[list[R]]:
        """Return a run's future. The waiter thread resolves the future when the run ends."""
        future: Future[list[R]] = Future()
        # As with an executor, a running future cannot be cancelled. Callers can call `Run.cancel` instead.
        future.set_running_or_notify_cancel()
        with self._lock:
            is_first = not self._pending
            self._pending[run] = future
            if is_first:
                self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                try:
                    start_thread(self._wait, "serverless-gpu-futures")
                except BaseException:
                    del self._pending[run]
                    os.close(self._wake)
                    raise
            else:
                os.eventfd_write(self._wake, 1)
        return future

    def _wait(self) -> None:
        while True:
            with self._lock:
                pending = list(self._pending)
            ended = [run for run in pending if run.done()]
            for run in ended:
                try:
                    self._pending[run].set_result(run.results())
                except BaseException as error:  # noqa: BLE001 - loading a result may raise any exception
                    self._pending[run].set_exception(error)
            with self._lock:
                for run in ended:
                    del self._pending[run]
                if not self._pending:
                    os.close(self._wake)
                    return
            if not ended:
                self._wait_for_news(pending)

    def _wait_for_news(self, pending: list[Run[Any]]) -> None:
        poll = select.poll()
        for fd in (self._wake, *(run.fileno() for run in pending)):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_LOOK_S * 1000):
            if fd == self._wake:
                os.eventfd_read(fd)


_waiter = RunWaiter()


def future_of(run: Run[R]) -> Future[list[R]]:
    """Return a future for a run's results."""
    return _waiter.add(run)


async def results_of(run: Run[R]) -> list[R]:
    """Await a run's results without blocking the event loop.

    Cancelling the asyncio task does not stop the run.
    """
    try:
        return await asyncio.wrap_future(run.future())
    except asyncio.CancelledError:
        run._say_that_it_goes_on()
        raise


def _forget_after_fork() -> None:
    global _waiter
    _waiter = RunWaiter()


os.register_at_fork(after_in_child=_forget_after_fork)
