"""A seed becomes a plan: what happens, and when. Each seed draws which kinds of trouble it has at all, so that some
histories have one kind often and others many kinds at once."""

from __future__ import annotations

import random

import msgspec

from serverless_gpu import faults

STEPS = 60
"""Steps of a plan when nobody says how many."""
TROUBLES: dict[str, int] = {
    "kill server": 4,
    "start server with another grace": 3,
    "kill server in a write": 4,
    "kill server at a place": 4,
    "cut a node off": 5,
    "cut a client off": 1,
    "kill an uplink": 3,
    "kill a supervisor": 2,
    "reboot a node": 2,
    "burn a node": 1,
    "set the server's clock": 3,
    "set a node's clock": 2,
    "slow disk": 3,
    "full disk": 3,
    "database away": 3,
    "bad network": 5,
    "a line that dies": 4,
    "engine loses a node": 2,
    "engine refuses": 2,
}
"""What can go wrong, and how often beside the others."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is done.

    Attributes:
        after_s: so long after the step before.
        what: a trouble, or "submit", "cancel", "preempt", "drain".
        which: number of the node, the run, the place …; taken modulo how many there are.
        amount: between 0 and 1: how long, how far, how much.
    """

    after_s: float
    what: str
    which: int
    amount: float

    def __str__(self) -> str:
        return f"{self.what} ({self.which}, {self.amount:.2f})"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is done in one simulation.

    Attributes:
        seed: of everything else that is drawn.
        grace_s: how long attempts may go on alone.
        retention_s: after how long a run that ended goes.
        mixes: whether requests are served in between each other.
    """

    seed: int
    grace_s: float
    retention_s: float
    mixes: bool
    steps: tuple[Step, ...]


def draw(seed: int, steps: int = STEPS) -> Plan:
    """Return the plan of a seed.

    Args:
        seed: any number.
        steps: how many steps it has.
    """
    rng = random.Random(f"plan {seed}")
    kinds = rng.sample(sorted(TROUBLES), rng.randint(1, 6))
    weights = {"submit": 12, "cancel": 3, "preempt": 1, "drain": 1} | {kind: TROUBLES[kind] * 2 for kind in kinds}
    drawn = [Step(after_s=0.1, what="submit", which=rng.randrange(1 << 16), amount=rng.random()) for _ in range(2)]
    for _ in range(steps - len(drawn)):
        what = rng.choices(list(weights), list(weights.values()))[0]
        pause_s = rng.choice([0.05, 0.5, 2.0, 5.0])
        drawn.append(Step(after_s=pause_s, what=what, which=rng.randrange(1 << 16), amount=rng.random()))
    return Plan(
        seed=seed,
        grace_s=rng.choice([12.0, 30.0]),
        retention_s=rng.choice([40.0, 1e9, 1e9, 1e9]),
        mixes=rng.random() < 0.5,
        steps=tuple(drawn),
    )


PLACES = faults.PLACES
