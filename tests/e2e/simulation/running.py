"""Running a plan in a directory of its own, and making a plan that fails smaller."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.e2e.simulation.plan import Plan, Step, draw
from tests.e2e.simulation.steps import DO
from tests.e2e.simulation.world import Failed, World

SEEDS = Path(__file__).with_name("seeds.txt")
_MEMORY = Path("/dev/shm")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a plan.

    Attributes:
        text: what was wrong, or "".
        invariants: which ones.
        trace: what happened, when something was wrong.
        events: how many there were.
    """

    text: str = ""
    invariants: frozenset[str] = frozenset()
    trace: Sequence[str] = ()
    events: int = 0


def outcome(plan: Plan) -> Outcome:
    """Return what comes of a plan."""
    place = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="sgpu-sim-", dir=place) as directory:
        world = World(plan, Path(directory), DO)
        try:
            world.run()
        except Failed as error:
            invariants = frozenset(error.invariants)
            return Outcome(text=str(error), invariants=invariants, trace=error.trace, events=world.time.count)
        return Outcome(events=world.time.count, trace=world.time.trace)


def drawn(seed: tuple[int, int]) -> Outcome:
    """Return what comes of a seed and a number of steps.

    Here, and not beside `main`: another process finds nothing of a module that is named `__main__`.
    """
    return outcome(draw(*seed))


def shrunk(plan: Plan, found: Outcome) -> tuple[Plan, Outcome]:
    """Return a smaller plan that fails in the same way, and how: steps are left out as long as it does."""
    size = max(1, len(plan.steps) // 2)
    while True:
        smaller = _without(plan, found, size)
        if smaller is not None:
            plan, found = smaller
        elif size == 1:
            return plan, found
        else:
            size //= 2


def _without(plan: Plan, found: Outcome, size: int) -> tuple[Plan, Outcome] | None:
    for start in range(0, len(plan.steps), size):
        steps = list(plan.steps)
        left_out = steps[start : start + size]
        del steps[start : start + size]
        if start < len(steps):  # the others stay where they were
            pause_s = sum(step.after_s for step in left_out)
            steps[start] = msgspec.structs.replace(steps[start], after_s=steps[start].after_s + pause_s)
        smaller = msgspec.structs.replace(plan, steps=tuple[Step, ...](steps))
        came = outcome(smaller)
        if came.invariants & found.invariants:
            return smaller, came
    return None


def remembered() -> list[tuple[int, int]]:
    """Return the seeds that failed once, each with its number of steps."""
    lines = (line.partition("#")[0].split() for line in SEEDS.read_text().splitlines())
    return [(int(line[0]), int(line[1])) for line in lines if line]
