"""Several looks at once, none of which may keep the others, or the process, from ending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from serverless_gpu.ambient import SystemClock
from serverless_gpu.doctor.facts import UnknownFact
from serverless_gpu.errors import HardwareError
from serverless_gpu.operating_system import start_thread

T = TypeVar("T")


def side_by_side(looks: Mapping[str, Callable[[], T]], limit_s: float) -> dict[str, T | UnknownFact]:
    """Return what each look saw, `UnknownFact` for one that failed or did not end in time.

    Args:
        looks: what to call, by name; each runs in a daemon thread of its own.
        limit_s: seconds for all of them together.
    """
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + int(limit_s * 1e9)
    answers: dict[str, Future[T]] = {name: Future() for name in looks}
    for name, look in looks.items():
        try:
            start_thread(partial(_settle, answers[name], look), f"sgpu-{name}")
        except HardwareError as error:
            answers[name].set_exception(error)
    seen: dict[str, T | UnknownFact] = {}
    for name, answer in answers.items():
        outcome = _outcome(answer, max(0.0, (deadline_ns - clock.boottime_ns()) / 1e9), limit_s)
        seen[name] = outcome
    return seen


def _outcome(answer: Future[T], left_s: float, limit_s: float) -> T | UnknownFact:
    try:
        return answer.result(timeout=left_s)
    except TimeoutError:
        if answer.done():  # the look itself ran into a time limit
            return UnknownFact(f"{answer.exception()}")
        return UnknownFact(f"there was no answer within {limit_s:g} s")
    except Exception as error:  # noqa: BLE001 - one look that fails must not cost the answers of the others
        return UnknownFact(f"{type(error).__name__}: {error}")


def _settle(answer: Future[T], look: Callable[[], T]) -> None:
    try:
        answer.set_result(look())
    except Exception as error:  # noqa: BLE001 - handed to the thread that waits
        answer.set_exception(error)
