"""A seed becomes a plan: what happens, and when. Each seed draws which kinds of trouble it has at all, so that some
histories have one kind often and others many kinds at once."""

from __future__ import annotations

import random

import msgspec

from serverless_gpu import faults
from tests.e2e.simulation.timeline import EPOCH_S

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
MONEY: dict[str, int] = {
    "set a price": 4,
    "end a price": 1,
    "set a budget": 6,
    "delete a budget": 1,
    "set a policy": 3,
    "detach a policy": 1,
}
"""What people decide about money meanwhile."""
GANGS: dict[str, int] = {
    "cut two nodes off each other": 3,
    "cut off a crew that": 5,
    "kill the supervisor of a crew that": 4,
    "reboot the node of a crew that": 3,
    "kill the server when a crew": 6,
    "cancel when a crew": 4,
    "preempt when a crew": 3,
}
"""What else can go wrong where runs need several nodes; most of it just when a crew has come to some point."""
MONTH_ENDS_S = 1_801_440_000.0
"""2027-02-01, a Monday: a month, a week and a day end with the same moment."""

STORIES: dict[str, tuple[tuple[float, str, int | None], ...]] = {
    "the answers of a node come late, then none": (
        (0.0, "start server with another grace", 2),
        (6.0, "submit a long run", None),
        (7.0, "answers come late, then none", None),
        (60.0, "submit", None),
    ),
    "the grace becomes shorter while a node is cut off": (
        (0.0, "start server with another grace", 2),
        (6.0, "submit a long run", None),
        (8.0, "cut off who works", None),
        (1.0, "start server with another grace", 0),
        (30.0, "submit", None),
    ),
    "a node is heard no more once it may begin": (
        (0.0, "start server with another grace", 2),
        (6.0, "cut off who may begin", None),
        (0.1, "submit a long run", None),
        (45.0, "submit", None),
    ),
    "a node takes an order, and nobody hears that": (
        (0.0, "cut off who has taken an order", None),
        (0.1, "submit a long run", None),
        (30.0, "submit", None),
    ),
    "a node burns before its receipt": (
        (0.0, "burn who has told an end", None),
        (0.1, "submit", None),
        (2.0, "submit", None),
    ),
}
"""Histories that steps drawn one by one hardly ever make: (so long after the step before, what, which if it matters).
Half of all plans have one of them somewhere in the middle of everything else."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is done.

    Attributes:
        after_s: so long after the step before.
        what: a trouble, a step of a story, or "submit", "submit a large run", "cancel", "preempt", "drain",
            "drain a node", one of `MONEY`, one of `GANGS`.
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
        epoch_s: when it begins, seconds since 1970; in half of all plans a month and a week end in the middle of it.
        spends: whether there are prices, and perhaps budgets and policies.
        gangs: whether some runs need several nodes.
        asked: how many steps were asked for: others were put in between, and this draws the same plan again.
    """

    seed: int
    grace_s: float
    retention_s: float
    mixes: bool
    steps: tuple[Step, ...]
    epoch_s: float = EPOCH_S
    spends: bool = False
    gangs: bool = False
    asked: int = 0


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
    if rng.random() < 0.5:
        story = [_step(rng, *told) for told in STORIES[rng.choice(sorted(STORIES))]]
        start = rng.randint(2, max(2, steps - len(story)))
        drawn[start : start + len(story)] = story
    drawn = _with_drains(random.Random(f"drains {seed}"), drawn)
    gangs = random.Random(f"gangs {seed}")
    has_gangs = gangs.random() < 0.5
    if has_gangs:
        drawn = _with_gangs(gangs, drawn)
    money = random.Random(f"money {seed}")
    spends = money.random() < 0.5
    return Plan(
        seed=seed,
        grace_s=rng.choice([12.0, 30.0]),
        retention_s=rng.choice([40.0, 1e9, 1e9, 1e9]),
        mixes=rng.random() < 0.5,
        steps=tuple(_with_money(money, drawn) if spends else drawn),
        epoch_s=MONTH_ENDS_S - money.uniform(5.0, 90.0) if money.random() < 0.5 else EPOCH_S,
        spends=spends,
        gangs=has_gangs,
        asked=steps,
    )


def _with_drains(rng: random.Random, drawn: list[Step]) -> list[Step]:
    """Return the steps with some in between that drain a node, in every third plan; the others stay what they were."""
    if rng.random() < 2 / 3:
        return drawn
    for _ in range(rng.randint(1, 3)):
        drawn.insert(rng.randint(2, len(drawn)), _step(rng, rng.choice([0.05, 2.0]), "drain a node", None))
    return drawn


def _with_gangs(rng: random.Random, drawn: list[Step]) -> list[Step]:
    """Return the steps with some more in between: runs that need several nodes, and what can go wrong with them."""
    for _ in range(rng.randint(2, 4)):
        drawn.insert(rng.randint(1, len(drawn)), _step(rng, rng.choice([0.05, 2.0, 5.0]), "submit a large run", None))
    kinds = rng.sample(sorted(GANGS), rng.randint(1, 3))
    for _ in range(rng.randint(2, 5)):
        what = rng.choices(kinds, [GANGS[kind] for kind in kinds])[0]
        drawn.insert(rng.randint(0, len(drawn)), _step(rng, rng.choice([0.05, 0.5, 2.0]), what, None))
    return drawn


def _with_money(rng: random.Random, drawn: list[Step]) -> list[Step]:
    """Return the steps with some in between that decide about money; the first price comes before the first run."""
    kinds = rng.sample(sorted(MONEY), rng.randint(1, len(MONEY)))
    drawn = [_step(rng, 0.1, "set a price", None), *drawn]
    for _ in range(rng.randint(1, 6)):
        what = rng.choices(kinds, [MONEY[kind] for kind in kinds])[0]
        drawn.insert(rng.randint(1, len(drawn)), _step(rng, rng.choice([0.05, 0.5, 2.0]), what, None))
    return drawn


def _step(rng: random.Random, after_s: float, what: str, which: int | None) -> Step:
    return Step(
        after_s=after_s, what=what, which=rng.randrange(1 << 16) if which is None else which, amount=rng.random()
    )


PLACES = faults.PLACES
