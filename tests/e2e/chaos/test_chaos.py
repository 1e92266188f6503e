"""Histories of faults: nothing lost, doubled, overlapping, orphaned, and the ledger says what receipts say.

A few seconds in `make test-spot`; a minute with a fixed seed and three minutes on each database in `make
test-all`; `make chaos` for as long as it is told.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.chaos import plan
from tests.e2e.chaos.driving import Outcome, play
from tests.support.server.postgres import cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.spot
def test_some_seconds_of_faults_lose_nothing(home: Path) -> None:
    """Of the seeds whose 15 seconds kill a supervisor, the server and a client, this is the first one."""
    outcome = play(home, "", seed=2, seconds=15)
    assert not outcome.wrongs, outcome.text
    assert [strike.victim for strike in outcome.evidence.strikes] == ["supervisor", "server", "client"]
    assert any(told.outcome == "value" for told in outcome.evidence.told), "no call had a value"


def test_a_minute_of_faults_with_a_fixed_seed_loses_nothing(home: Path) -> None:
    """Of the seeds whose minute has each kind of fault, this is the first one."""
    _require(play(home, "", seed=20962, seconds=60))


def test_three_minutes_of_faults_on_sqlite_lose_nothing(home: Path) -> None:
    """Of the seeds whose three minutes have each kind of fault, this is the first one; the next test has the second."""
    _require(play(home, "", seed=7, seconds=180))


def test_three_minutes_of_faults_on_postgresql_lose_nothing(home: Path) -> None:
    with cluster() as running:
        _require(play(home, running.url(running.new_database()), seed=8, seconds=180))


def _require(outcome: Outcome) -> None:
    print(outcome.text)
    assert not outcome.wrongs, outcome.text
    struck = {strike.victim for strike in outcome.evidence.strikes}
    assert struck == set(plan.VICTIMS), "each kind of fault has come"
    assert any(len(nodes) > 1 for seen in outcome.evidence.seen.values() for nodes in seen.nodes.values()), "no gang"
    assert any(told.outcome == "value" for told in outcome.evidence.told), "no call had a value"
