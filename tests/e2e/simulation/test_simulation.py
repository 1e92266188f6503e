"""A server, nodes, clients and everything that can go wrong between them, on virtual time (`make sim` for thousands).

A seed that fails prints how to repeat it, and gets a line in `seeds.txt`. Whether the simulation would find anything at
all is asked with bugs that are put in on purpose.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.simulation.plan import Plan, draw
from tests.e2e.simulation.planted import BUGS, FOUND_AS
from tests.e2e.simulation.running import Outcome, outcome, remembered, shrunk

SEEDS, STEPS, AT_ONCE = 200, 20, 10


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[] if first else [pytest.mark.spot]) for first in range(0, SEEDS, AT_ONCE)],
)
def test_whatever_happens_what_was_promised_holds(first: int) -> None:
    wrong = [came.text for seed in range(first, first + AT_ONCE) if (came := outcome(draw(seed, STEPS))).text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_what_failed_once_does_not_fail_again() -> None:
    wrong = [came.text for seed, steps in remembered() if (came := outcome(draw(seed, steps))).text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_seed_is_a_history_in_every_process() -> None:
    """Whatever was played before, and whatever order sets have, so that a seed that CI prints can be repeated."""
    other, one = outcome(draw(12, 15)), outcome(draw(11, 15))
    command = [sys.executable, "-m", "tests.e2e.simulation", "--seed", "11", "--steps", "15", "--trace"]
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    fresh = subprocess.run(command, capture_output=True, check=True, text=True, env=environ).stdout.splitlines()
    assert fresh == [*one.trace, f"seed 11, 15 steps: {one.events} events, nothing was wrong"]
    assert one.trace and one.trace != other.trace


def found(name: str) -> tuple[Plan, Outcome]:
    """Return the first plan that finds a bug, and how; which one it is depends on everything, so it is looked for."""
    with BUGS[name]():
        for seed in range(SEEDS):
            plan = draw(seed, STEPS)
            came = outcome(plan)
            if FOUND_AS[name] in came.invariants:
                return plan, came
    raise AssertionError(f"{SEEDS} seeds did not find it")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND_AS)
def test_a_bug_that_is_put_in_is_found(name: str) -> None:
    plan, came = found(name)
    print(f"{name}: found by seed {plan.seed}")
    assert f"SIM_SEED={plan.seed} SIM_STEPS={STEPS}" in came.text


@pytest.mark.slow
def test_a_plan_that_fails_becomes_a_small_one() -> None:
    name = "acknowledged before it is durable"
    plan, came = found(name)
    with BUGS[name]():
        small, smaller = shrunk(plan, came)
    assert FOUND_AS[name] in smaller.invariants
    assert len(small.steps) <= 5 < len(plan.steps)
