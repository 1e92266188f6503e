"""Every fault point × SIGKILL × restart × invariants, with real processes, on SQLite and on PostgreSQL.

One server and node for each kind of database, for all places: a place is armed while they run. Places of the first
start have a home of their own. `make crash` has each place with both databases, `make test` with one of them in turn.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu import faults
from tests.support.crash.machine import FAKES, Machine
from tests.support.crash.scenarios import ELSEWHERE, SCENARIOS
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.server.postgres import Cluster, cluster

pytestmark = pytest.mark.slow
OFTEN = ("lifecycle.attempt_tokens._RENEWED_AFTER=0", "Settings.heartbeat_s=1")
"""Each sign of life of an attempt brings it another token, but for those of its first second."""
ALONE = [place for place, scenario in SCENARIOS.items() if scenario.alone]
TOGETHER = [place for place in SCENARIOS if place not in ALONE]
KINDS = ("sqlite", "postgresql")
SPOT = {("sqlite", "in_ledger_batch"), ("postgresql", "after_launch_before_ack")}


@pytest.fixture(scope="module")
def postgres() -> Iterator[Cluster]:
    """Yield a PostgreSQL for all tests of this module."""
    with cluster() as running:
        yield running


@pytest.fixture
def empty(request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a machine whose server was never started."""
    machine = _made(request, kind)
    use_home(monkeypatch, machine.home, FAKES)
    yield machine
    machine.close()
    shutil.rmtree(machine.home)


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Yield a machine whose server runs, for all tests of one kind of database."""
    machine = _made(request, request.param, *OFTEN)
    with pytest.MonkeyPatch.context() as patch:
        use_home(patch, machine.home, FAKES)
        machine.start()
        machine.set_price(2_990_000)
        yield machine
        machine.close()
    shutil.rmtree(machine.home)


@pytest.fixture
def machine(shared: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a machine with a server and a node."""
    use_home(monkeypatch, shared.home, FAKES)
    yield shared


def _each(places: Sequence[str]) -> list[Any]:
    """Return every place with both kinds of database."""
    return [
        pytest.param(kind, place, marks=[pytest.mark.spot] if (kind, place) in SPOT else [])
        for kind in KINDS
        for place in places
    ]


def _made(request: pytest.FixtureRequest, kind: str, *words: str) -> Machine:
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    if kind == "sqlite":
        return Machine(home, f"sqlite:///{home}/server/server.db", *words)
    running: Cluster = request.getfixturevalue("postgres")
    return Machine(home, running.url(running.new_database()), *words)


@pytest.mark.spot
def test_every_place_has_a_scenario() -> None:
    assert list(SCENARIOS) == [place for place in faults.PLACES if place not in ELSEWHERE]
    for place, file in ELSEWHERE.items():
        assert place in faults.PLACES and f'"{place}"' in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(("kind", "place"), _each(ALONE))
def test_a_server_killed_in_its_first_start_or_as_it_is_restored_starts(
    empty: Machine, place: str, tmp_path: Path
) -> None:
    SCENARIOS[place].play(empty, place, tmp_path)
    empty.check()


@pytest.mark.parametrize(("shared", "place"), _each(TOGETHER), indirect=["shared"])
def test_F31_F32_F33_F34_nothing_acknowledged_is_lost_and_nothing_runs_twice(
    machine: Machine, place: str, tmp_path: Path
) -> None:
    SCENARIOS[place].play(machine, place, tmp_path)
    machine.check()
    machine.check_ledger()


def test_a_server_that_is_started_with_a_fault_point_says_so(machine: Machine) -> None:
    assert golden("crash.crash_points.sgpu-fault-set") in machine.log()


def test_a_place_that_a_file_names_is_one_process_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[str] = []
    monkeypatch.setattr(faults, "crash", died.append)
    monkeypatch.setenv(faults.VARIABLE, f"@{tmp_path / 'armed'}")
    faults.reach("before_commit")
    (tmp_path / "armed").write_text("before_commit\n")
    for place in ("after_order_left", "before_commit", "before_commit"):
        faults.reach(place)
    assert died == ["before_commit"] and not (tmp_path / "armed").exists()
