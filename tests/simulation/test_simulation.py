"""A server, nodes, clients and everything that can go wrong between them, on virtual time (`make sim` for thousands).

A seed that fails prints how to repeat it, and gets a line in `seeds.txt`. Whether the simulation would find anything at
all is asked with bugs that are put in on purpose.
"""

from __future__ import annotations

import pytest

from tests.simulation.plan import Step, draw
from tests.simulation.planted import BUGS, FOUND_BY
from tests.simulation.running import outcome, remembered, shrunk

SEEDS, STEPS, AT_ONCE = 200, 20, 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_whatever_happens_what_was_promised_holds(first: int) -> None:
    wrong = [found.text for seed in range(first, first + AT_ONCE) if (found := outcome(draw(seed, STEPS))).text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_what_failed_once_does_not_fail_again() -> None:
    wrong = [found.text for seed, steps in remembered() if (found := outcome(draw(seed, steps))).text]
    assert not wrong, "\n".join(wrong)


def test_a_seed_is_a_history() -> None:
    one, same, other = (outcome(draw(seed, 15)) for seed in (11, 11, 12))
    assert (one.trace, one.events) == (same.trace, same.events)
    assert one.trace != other.trace


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND_BY)
def test_a_bug_that_is_put_in_is_found(name: str) -> None:
    seed, steps, invariant = FOUND_BY[name]
    with BUGS[name]():
        found = outcome(draw(seed, steps))
    assert invariant in found.invariants, f"seed {seed} finds {sorted(found.invariants) or 'nothing'}"
    assert outcome(draw(seed, steps)).text == ""
    assert f"SIM_SEED={seed} SIM_STEPS={steps}" in found.text


def test_a_plan_that_fails_becomes_a_small_one() -> None:
    name = "acknowledged before it is durable"
    seed, steps, invariant = FOUND_BY[name]
    with BUGS[name]():
        plan = draw(seed, steps)
        small, found = shrunk(plan, outcome(plan))
    assert invariant in found.invariants
    assert len(small.steps) <= 3 < len(plan.steps)
    assert all(isinstance(step, Step) for step in small.steps)
