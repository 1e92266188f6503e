"""The runs of one `.map()`: a list with the values of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar, cast, overload

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.runs.completion_order import as_completed
from serverless_gpu.client.runs.run import Run
from serverless_gpu.model.spec import patience

R = TypeVar("R")


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
