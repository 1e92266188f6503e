"""One history: start, strike for so many seconds, let everything end, look."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.e2e.chaos import plan
from tests.e2e.chaos.cluster import Cluster
from tests.e2e.chaos.evidence import gather
from tests.e2e.chaos.verdict import Evidence, wrongs


class Outcome(NamedTuple):
    """What came of it."""

    evidence: Evidence
    wrongs: list[str]
    text: str


def play(home: Path, database: str, *, seed: int, seconds: float) -> Outcome:
    """Play a history and return what came of it; every process is ended.

    Args:
        home: of the server; an empty directory with a short path.
        database: url, or "" for SQLite in the home.
        seed: of calls and faults.
        seconds: how long faults come, by the plan: processes that start again add to it.
    """
    cluster = Cluster(home, database, seed)
    try:
        cluster.start()
        until = time.monotonic() + seconds
        for fault in plan.faults_within(seed, seconds):
            threading.Event().wait(fault.after_s)
            cluster.strike(fault)
        threading.Event().wait(max(0.0, until - time.monotonic()))
        evidence = gather(cluster, seed, cluster.enough())
    finally:
        cluster.end()
    found = wrongs(evidence)
    return Outcome(evidence=evidence, wrongs=found, text=_told(evidence, found, seed, seconds))


def _told(evidence: Evidence, found: list[str], seed: int, seconds: float) -> str:
    strikes = Counter(strike.victim for strike in evidence.strikes)
    outcomes = Counter(told.outcome or "none" for told in evidence.told)
    several = sum(len(seen.nodes) > 1 for seen in evidence.seen.values())
    gangs = sum(len(nodes) > 1 for seen in evidence.seen.values() for nodes in seen.nodes.values())
    return "\n".join(
        [
            f"seed {seed}, {seconds:g} s: {len(evidence.seen)} runs, {len(evidence.executions)} ranks;"
            f" {several} runs had several attempts, {gangs} attempts two nodes",
            "faults: " + ", ".join(f"{count} {victim}" for victim, count in strikes.most_common()),
            "clients were told: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()),
            *(f"WRONG {wrong}" for wrong in found or ["nothing"]),
        ]
    ).replace("WRONG nothing", "nothing is wrong")
