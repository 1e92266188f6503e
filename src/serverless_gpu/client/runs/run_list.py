"""The runs of one `.map()` as a list with the values of all of them, and runs in the order in which they end."""

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
_LOOK_S = 1.0  # another thread may be waiting for one of the runs, and have read what its end says


class RunList(list[Run[R]]):
    """Runs in the order of their items; everything that a list can do, and their values.

    The value of a run is what its rank 0 returned, as `Run.result()` gives it.
    """

    @overload
    def results(self, timeout: float | None = None, *, return_exceptions: Literal[False] = False) -> list[R]: ...

    @overload
    def results(self, timeout: float | None = None, *, return_exceptions: bool) -> list[R | BaseException]: ...

    def results(
        self, timeout: float | None = None, *, return_exceptions: bool = False
    ) -> list[R] | list[R | BaseException]:
        """Wait for all runs and return their values, in the order of the items.

        Args:
            timeout: seconds to wait for all of them at most, or None.
            return_exceptions: True puts what ended a run in the place of its value; False raises the first of them
                in the order of the items. The other runs go on either way.

        Raises:
            TimeoutError: a run has not ended by then; it goes on.
            RunError: a run did not succeed.
            Exception: what user code raised, as its own type.
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
        """Yield the runs as they end, well or not, as `serverless_gpu.as_completed` does.

        Args:
            timeout: seconds to wait for all of them at most, or None.

        Raises:
            TimeoutError: some have not ended by then; they go on.
        """
        return as_completed(self, timeout)

    def cancel(self) -> None:
        """Ask for every run to be stopped; those that have ended stay as they are."""
        for run in self:
            run.cancel()


def as_completed(runs: Iterable[Run[R]], timeout: float | None = None) -> Iterator[Run[R]]:
    """Yield runs as they end, well or not; what ended them is raised by `result()` or `results()` of each.

    Args:
        runs: runs of this process, or attached to.
        timeout: seconds to wait for all of them at most, or None.

    Raises:
        InvalidOption: something in it is no run.
        TimeoutError: some have not ended by then; they go on.
        KeyboardInterrupt: Ctrl-C; they go on.
    """
    given: Iterable[object] = runs
    if not isinstance(given, Iterable):
        raise InvalidOption(f"as_completed takes a list of runs, not {given!r}")
    pending: dict[Run[R], None] = {}
    for run in given:
        if not isinstance(run, Run):
            raise InvalidOption(f"as_completed takes a list of runs; {run!r} is none")
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
                    f"{len(pending)} of {total} runs go on; cancel() of a handle stops one"
                )
                raise KeyboardInterrupt from None


def _wait_for_any(runs: list[Run[R]], limit_s: float) -> None:
    poll = select.poll()  # not `select`, which knows no descriptor above 1023
    for run in runs:
        fd = run.fileno()
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    with interruptible():
        poll.poll(limit_s * 1000)
