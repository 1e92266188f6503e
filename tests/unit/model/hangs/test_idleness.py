"""Idle detection: what counts, what does not, and that a warning comes before the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.hangs.idleness import Idle, IdleVerdict, begin, decide, limit_s, seen, used
from serverless_gpu.model.spec import Command, Function, Kernel, Payload, RunSpec

SECOND = 1_000_000_000


def idle_for(idle: Idle, seconds: int) -> Idle:
    """Return the value after telemetry has said every second that nothing works."""
    for _ in range(seconds):
        idle = seen(idle, idle.heard_ns + SECOND, busy=False)
    return idle


def watched(limit: float = 100.0) -> Idle:
    idle = begin(RunSpec(idle_timeout_s=limit), 0)
    assert idle is not None
    return idle


@pytest.mark.parametrize(
    ("payload", "expected"), [(Function(), None), (Command(argv=("a",)), None), (Kernel(), 1800.0)]
)
def test_limits_by_kind_and_what_was_asked_for(payload: Payload, expected: float | None) -> None:
    assert limit_s(RunSpec(payload=payload)) == expected
    assert limit_s(RunSpec(payload=payload, idle_timeout_s=60.0)) == 60.0
    assert (begin(RunSpec(payload=payload), 0) is None) is (expected is None)


def test_warned_at_four_fifths_once_and_stopped_at_the_limit() -> None:
    idle = idle_for(watched(), 79)
    assert decide(idle) == (idle, IdleVerdict.GO_ON)
    idle, verdict = decide(idle_for(idle, 1))
    assert verdict is IdleVerdict.WARN
    assert idle.left_ns == 20 * SECOND
    idle, verdict = decide(idle_for(idle, 19))
    assert verdict is IdleVerdict.GO_ON
    assert decide(idle_for(idle, 1))[1] is IdleVerdict.STOP


def test_never_stopped_without_a_warning_before() -> None:
    idle, verdict = decide(idle_for(watched(1.0), 30))
    assert verdict is IdleVerdict.WARN
    assert decide(idle)[1] is IdleVerdict.STOP


def test_work_progress_and_a_client_that_attaches_begin_from_zero() -> None:
    warned, _ = decide(idle_for(watched(), 90))
    for again in (seen(warned, warned.heard_ns + SECOND, busy=True), used(warned, warned.heard_ns + SECOND)):
        assert (again.idle_ns, again.warned) == (0, False)
        assert decide(idle_for(again, 79))[1] is IdleVerdict.GO_ON
        assert decide(idle_for(again, 80))[1] is IdleVerdict.WARN


def test_time_nobody_observed_does_not_count() -> None:
    idle = idle_for(watched(), 50)
    later = seen(idle, idle.heard_ns + 3600 * SECOND, busy=False)  # the monitor was away, the machine slept
    assert later.idle_ns == idle.idle_ns
    back = seen(later, later.heard_ns - 10 * SECOND, busy=False)
    assert back.idle_ns == idle.idle_ns
    assert idle_for(back, 30).idle_ns == 80 * SECOND


@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["busy", "idle", "progress"])), max_size=60))
def test_a_stop_needs_the_whole_limit_seen_idle_in_a_row(news: list[tuple[int, str]]) -> None:
    idle, now, in_a_row = watched(60.0), 0, 0
    for gap, what in news:
        now += gap * SECOND
        if what == "idle":
            in_a_row += gap if gap <= 30 else 0
            idle = seen(idle, now, busy=False)
        else:
            in_a_row = 0
            idle = used(idle, now) if what == "progress" else seen(idle, now, busy=True)
        idle, verdict = decide(idle)
        assert verdict is not IdleVerdict.STOP or in_a_row >= 60
        assert verdict is not IdleVerdict.WARN or in_a_row >= 48
