"""Provides the run list that `.map()` returns, and an iterator over runs in order of completion."""

from __future__ import annotations

import select
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar, cast, overload

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.caller_context import interruptible
from serverless_gpu.client.display.run_display import TerminalDisplay
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import InvalidOption
from serverless_gpu.model.spec import patience

R = TypeVar("R")
_LOOK_S = 1.0  # Poll interval in seconds. The loop polls because another thread may have read a run's final message.


class RunList(list[Run[R]]):
    """A list of run handles, in the order of the items that `.map()` received.

    Each run's value is the result of rank 0, as in `Run.result()`.
    """

    @overload
    def results(self, timeout: float | None = None, *, return_exceptions: Literal[False] = False) -> list[R]: ...

    @overload
    def results(self, timeout: float | None = None, *, return_exceptions: bool) -> list[R | BaseException]: ...

    def results(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[R] | list[R | BaseException]:
        """Wait for all runs and return their values in the order of the items.

        Args:
            timeout: maximum number of seconds to wait for all runs, or None.
            return_exceptions: True puts the error of a failed run into the list instead of a value. False raises the
                first error in the order of the items. After an error, the remaining runs continue.

        Raises:
            TimeoutError: a run did not end in time and continues.
            RunError: a run did not succeed.
            Exception: the exception that user code raised, with its own type.
        """
        timeout = patience("timeout", timeout)
        clock = SystemClock()
        deadline_ns = None if timeout is None else clock.boottime_ns() + round(timeout * 1e9)
        values: list[R | BaseException] = []
        for run in self:
            left_s = None if deadline_ns is None else max(0.0, (deadline_ns - clock.boottime_ns()) / 1e9)
            error = run.exception(left_s)
            if error is None:
                values.append(run.result())
            elif return_exceptions:
                values.append(error)
            else:
                raise error
        return cast("list[R] | list[R | BaseException]", values)

    def as_completed(self, timeout: float | None = None) -> Iterator[Run[R]]:
        """Yield each run when it succeeds or fails, like `serverless_gpu.as_completed`.

        Args:
            timeout: maximum number of seconds to wait for all runs, or None.

        Raises:
            TimeoutError: some runs did not end in time and continue.
        """
        return as_completed(self, timeout)

    def cancel(self) -> None:
        """Request the cancellation of every run that has not ended."""
        for run in self:
            run.cancel()


def as_completed(runs: Iterable[Run[R]], timeout: float | None = None) -> Iterator[Run[R]]:
    """Yield each run when it ends.

    Calling `result()` or `results()` on a failed run raises the run's error.

    Args:
        runs: runs that this process has started or attached to.
        timeout: maximum number of seconds to wait for all runs, or None.

    Raises:
        InvalidOption: an element of `runs` is not a run.
        TimeoutError: some runs did not end in time and continue.
        KeyboardInterrupt: the user pressed Ctrl-C. The runs continue.
    """
    given: Iterable[object] = runs
    if not isinstance(given, Iterable):
        raise InvalidOption(f"as_completed takes a list of runs, not {given!r}")
    pending: dict[Run[R], None] = {}
    for run in given:
        if not isinstance(run, Run):
            raise InvalidOption(f"as_completed takes a list of runs; {run!r} is not a run")
        pending[run] = None
    return _as_completed(list(pending), patience("timeout", timeout))


def _as_completed(pending: list[Run[R]], timeout: float | None) -> Iterator[Run[R]]:
    clock = SystemClock()
    deadline_ns = None if timeout is None else clock.boottime_ns() + round(timeout * 1e9)
    total = len(pending)
    while pending:
        ended = [run for run in pending if run._ended(0)]
        pending = [run for run in pending if run not in ended]
        yield from ended
        left_s = _LOOK_S if deadline_ns is None else min(_LOOK_S, (deadline_ns - clock.boottime_ns()) / 1e9)
        if pending and not ended:
            if left_s <= 0:
                raise TimeoutError(f"{len(pending)} of {total} runs have not ended")
            try:
                _wait_for_any(pending, left_s)
            except KeyboardInterrupt:
                TerminalDisplay(quiet=False).say(
                    f"{len(pending)} of {total} runs continue; to stop a run, call cancel() of its handle"
                )
                raise KeyboardInterrupt from None


def _wait_for_any(runs: list[Run[R]], limit_s: float) -> None:
    poll = select.poll()  # `select` supports only descriptors below 1024.
    for run in runs:
        fd = run.fileno()
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    with interruptible():
        poll.poll(limit_s * 1000)
