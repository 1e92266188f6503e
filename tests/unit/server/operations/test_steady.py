"""F39: the server's wall clock jumps, and is not believed at once."""

from __future__ import annotations

import pytest

from serverless_gpu.server.core.loops import BELIEVED_S, SETTLING_S, JumpTolerantClock
from serverless_gpu.testing import FakeClock

DAY_S, HOUR_S = 86_400.0, 3_600.0


@pytest.fixture
def machine() -> FakeClock:
    return FakeClock()


@pytest.fixture
def steady(machine: FakeClock) -> JumpTolerantClock:
    """Return a clock that has settled."""
    steady = JumpTolerantClock(machine)
    machine.advance(SETTLING_S + 1)
    return steady


@pytest.mark.parametrize("jump_s", [DAY_S, -HOUR_S])
def test_F39_a_jump_is_believed_after_an_hour_and_not_before(
    machine: FakeClock, steady: JumpTolerantClock, jump_s: float
) -> None:
    right_ns = steady.wall_ns()
    machine.step_wall(jump_s)
    assert steady.wall_ns() == right_ns
    machine.advance(BELIEVED_S - 1)
    assert steady.wall_ns() == right_ns + round((BELIEVED_S - 1) * 1e9)
    machine.advance(1)
    assert steady.wall_ns() == machine.wall_ns()


def test_F39_a_clock_that_was_put_right_again_was_never_believed(machine: FakeClock, steady: JumpTolerantClock) -> None:
    right_ns = steady.wall_ns()
    machine.step_wall(DAY_S)
    assert steady.wall_ns() == right_ns
    machine.advance(60)
    machine.step_wall(-DAY_S)
    assert steady.wall_ns() == machine.wall_ns() == right_ns + 60 * 10**9


def test_another_jump_counts_from_its_own_moment(machine: FakeClock, steady: JumpTolerantClock) -> None:
    machine.step_wall(DAY_S)
    steady.wall_ns()
    machine.advance(BELIEVED_S / 2)
    machine.step_wall(DAY_S)
    steady.wall_ns()
    machine.advance(BELIEVED_S - 1)
    assert steady.wall_ns() == machine.wall_ns() - round(2 * DAY_S * 1e9)
    machine.advance(1)
    assert steady.wall_ns() == machine.wall_ns()


def test_small_steps_and_whatever_comes_soon_after_the_start_are_believed(machine: FakeClock) -> None:
    steady = JumpTolerantClock(machine)
    machine.step_wall(DAY_S)
    assert steady.wall_ns() == machine.wall_ns()
    machine.advance(SETTLING_S)
    steady.wall_ns()
    for _ in range(3):
        machine.step_wall(100)
        assert steady.wall_ns() == machine.wall_ns()
