"""`python -m tests.e2e.simulation`: many seeds, or one of them again, traced, or shrunk to what it takes to fail."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator

from tests.e2e.simulation.plan import STEPS, draw
from tests.e2e.simulation.running import Outcome, drawn, outcome, remembered, shrunk

_TRACE_LINES = 400


def main() -> int:
    """Run what was asked for; return 1 when something was wrong."""
    asked = _parser().parse_args()
    if asked.seed is not None:
        return _one(asked)
    seeds: Iterable[tuple[int, int]] = ((seed, asked.steps) for seed in range(asked.first, asked.first + asked.seeds))
    if asked.remembered:
        seeds = remembered()
    began_s, count, failed, events = time.monotonic(), 0, 0, 0
    for found in _all(list(seeds), asked.jobs):
        count, events, failed = count + 1, events + found.events, failed + bool(found.text)
        if found.text:
            print(found.text, flush=True)
        elif count % 500 == 0:
            print(f"{count} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{count} seeds of {asked.steps} steps, {events} events: {failed} failed, {time.monotonic() - began_s:.0f} s")
    return 1 if failed else 0


def _one(asked: argparse.Namespace) -> int:
    plan = draw(asked.seed, asked.steps)
    found = outcome(plan)
    if found.text and asked.shrink:
        plan, found = shrunk(plan, found)
        print("the steps that are left:")
        print("\n".join(f"  {step.after_s:5.2f} s later: {step}" for step in plan.steps))
    if asked.trace:
        print("\n".join(found.trace[-_TRACE_LINES:]))
    print(found.text or f"seed {asked.seed}, {asked.steps} steps: {found.events} events, nothing was wrong")
    return 1 if found.text else 0


def _all(seeds: list[tuple[int, int]], jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(drawn, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(drawn, seeds, chunksize=10)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, default=STEPS, help="what is done in each")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--remembered", action="store_true", help="those of seeds.txt, which failed once")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--trace", action="store_true", help="print what happened in it")
    parser.add_argument("--shrink", action="store_true", help="leave out what it does not take to fail")
    return parser


if __name__ == "__main__":
    sys.exit(main())
