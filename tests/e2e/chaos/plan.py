"""What clients ask for, and what is killed when. Pure, and standard library only: clients import it, too."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

CLIENTS = 4
FAULT_GAP_S = (1.0, 20.0)
"""Between two faults."""


class Call(NamedTuple):
    """One call of a client.

    Attributes:
        number: of the client's calls; with the client's number it names the call.
        kind: what it does and what must come of it (`EXPECTED`).
        gpus: how many it asks for; more than `NODE_GPUS` is a gang over both nodes.
        seconds: how long its ranks take.
        after_s: for `cancel` and `preempt`: how long after it was accepted.
    """

    number: int
    kind: str
    gpus: int
    seconds: float
    after_s: float = 0.0


class Fault(NamedTuple):
    """Something that happens to a process.

    Attributes:
        after_s: since the fault before it.
        victim: what is killed, or `server-stopped`.
        lasts_s: how long the server stands still or is away; 0 elsewhere.
        pick: chooses among several processes, between 0 and 1.
    """

    after_s: float
    victim: str
    lasts_s: float
    pick: float


EXPECTED = {
    "value": "value",
    "raises": "ValueError",
    "crash": "RankCrashed",
    "retry": "value",
    "cancel": "RunCancelled",
    "preempt": "value",
    "resume": "value",
    "urgent": "value",
}
"""What a call of a kind ends with where nothing is done to it; `cancel` may be too late."""

RETRIES = {"retry": 1, "preempt": 0, "resume": 0}
RESUMES = frozenset({"preempt", "resume"})

_KINDS = (
    ("value", 40),
    ("raises", 8),
    ("crash", 6),
    ("retry", 6),
    ("cancel", 14),
    ("preempt", 8),
    ("resume", 10),
    ("urgent", 8),
)
_SHAPES = ((1, 60), (2, 25), (4, 15))
_FAULTS = (
    ("server", 16),
    ("server-stopped", 14),
    ("uplink", 12),
    ("agent", 12),
    ("supervisor", 14),
    ("stem", 8),
    ("rank", 12),
    ("client", 12),
)
VICTIMS = tuple(victim for victim, _ in _FAULTS)
"""Processes that faults happen to; `server-stopped` is the server, by SIGSTOP."""


def calls(seed: int, client: int) -> Iterator[Call]:
    """Yield a client's calls, without end."""
    chance = random.Random(f"calls {seed} {client}")
    number = 0
    while True:
        kind = _drawn(chance, _KINDS)
        gpus = int(_drawn(chance, _SHAPES))
        seconds = chance.choice((0.05, 0.3, 1.0, 2.5, 6.0))
        if kind == "urgent":
            gpus, seconds = 2, 0.5
        if kind == "resume":
            gpus, seconds = chance.choice((1, 2)), 8.0
        yield Call(number, kind, gpus, seconds, chance.uniform(0.0, 3.0))
        number += 1


def faults(seed: int) -> Iterator[Fault]:
    """Yield faults, without end."""
    chance = random.Random(f"faults {seed}")
    while True:
        victim = _drawn(chance, _FAULTS)
        lasts_s = chance.uniform(0.0, 4.0) if victim == "server" else chance.uniform(1.0, 12.0)
        yield Fault(
            after_s=chance.uniform(*FAULT_GAP_S),
            victim=victim,
            lasts_s=lasts_s if victim.startswith("server") else 0.0,
            pick=chance.random(),
        )


def faults_within(seed: int, seconds: float) -> Iterator[Fault]:
    """Yield the faults that are planned within so many seconds: the same ones, however busy the machine is."""
    planned_s = 0.0
    for fault in faults(seed):
        planned_s += fault.after_s
        if planned_s > seconds:
            return
        yield fault
        planned_s += fault.lasts_s


def name_of(client: int, call: Call) -> str:
    """Return the name of a call: its tag, and that of what its ranks leave behind."""
    return f"c{client}-{call.number}"


def _drawn(chance: random.Random, weighted: tuple[tuple[object, int], ...]) -> str:
    values = [value for value, _ in weighted]
    return str(chance.choices(values, [weight for _, weight in weighted])[0])
