"""The server is killed while the crews of a gang meet, are released or called off: real nodes, and one outcome.

On SQLite and on PostgreSQL: `make crash` has each place with both, `make test` two of them with one each.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import RunCancelled
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import self_check
from serverless_gpu.server.invariants.run_invariants import History
from serverless_gpu.wire.billing import PriceRequest, PriceSet
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import announced, wait_for
from tests.support.ports import own_port
from tests.support.reckoning import wrongs
from tests.support.remote.gang_work import fail_in_the_last, stay
from tests.support.remote.machines import Machines
from tests.support.server.postgres import Cluster, cluster

pytestmark = pytest.mark.slow
T = TypeVar("T")
WAIT_S = 60.0


class Gangs(NamedTuple):
    """A server with two nodes of two GPUs each, and the file that names the place at which the server is to die."""

    pool: Machines
    database: str
    armed: Path

    def arm(self, place: str) -> None:
        """Have the server die at a place, the next time that it comes there."""
        beside = self.armed.with_suffix(".new")
        beside.write_text(place, encoding="utf-8")
        beside.replace(self.armed)

    def recover(self) -> None:
        """Wait until it has died, and start it again."""
        wait_for(lambda: not self.armed.exists(), "the server is at the place", limit_s=WAIT_S)
        assert self.pool.server.ended() == -signal.SIGKILL
        self.pool.server.start()

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what a work finds in the server's database."""
        database = Database(self.database, clock=SystemClock())
        try:
            return database.read(work)
        finally:
            database.close()


@pytest.fixture(scope="module")
def postgres() -> Iterator[Cluster]:
    """Yield a PostgreSQL for all tests of this module."""
    with cluster() as running:
        yield running


@pytest.fixture(scope="module")
def gangs(request: pytest.FixtureRequest) -> Iterator[Gangs]:
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    database = f"sqlite:///{home}/server/server.db"
    if request.param == "postgresql":
        running: Cluster = request.getfixturevalue("postgres")
        database = running.url(running.new_database())
    with pytest.MonkeyPatch.context() as patch:
        use_home(patch, home, "")
        patch.setenv(faults.VARIABLE, f"@{home / 'armed'}")
        with Machines(home, f"database={database}", f"port={own_port()}", "Settings.heartbeat_s=1") as pool:
            for name in ("n1", "n2"):
                pool.join(name)
            pool.ask("PUT", "/prices/H100", PriceRequest(micros_per_hour=2_990_000), answer=PriceSet)
            yield Gangs(pool, database, home / "armed")
    shutil.rmtree(home, ignore_errors=True)


def meets(gangs: Gangs, place: str, where: Path) -> str:
    """All of it runs once, whatever of the meeting was forgotten."""
    gangs.arm(place)
    run = gangs.pool.submit(stay, str(where))
    gangs.recover()
    for rank in range(4):
        announced(where, f"1.rank{rank}")
    (where / "go").touch()
    assert run.results(WAIT_S) == [0, 1, 2, 3]
    return run.id


def is_released(gangs: Gangs, place: str, where: Path) -> str:
    """Ranks that have all returned exit, and it has succeeded."""
    run = gangs.pool.submit(stay, str(where))
    for rank in range(4):
        announced(where, f"1.rank{rank}")
    gangs.arm(place)
    (where / "go").touch()
    gangs.recover()
    assert run.results(WAIT_S) == [0, 1, 2, 3]
    return run.id


def fails(gangs: Gangs, place: str, where: Path) -> str:
    """The ranks on the other node end, too, and the caller has the exception of the one that failed."""
    gangs.arm(place)
    run = gangs.pool.submit(fail_in_the_last, str(where))
    gangs.recover()
    with pytest.raises(ValueError, match=re.escape(golden("crash.gangs.luck-rank"))):
        run.results(WAIT_S)
    return run.id


def is_called_off(gangs: Gangs, place: str, where: Path) -> str:
    """Nobody begins, and it ends as it was asked to."""
    uplink = gangs.pool.nodes["n2"].uplink()
    os.kill(uplink.pid, signal.SIGSTOP)
    try:
        run = gangs.pool.submit(stay, str(where))
        wait_for(lambda: gangs.pool.view(run).state == "STARTING", "it is placed", limit_s=WAIT_S)
        gangs.arm(place)
        run.cancel()
        gangs.recover()
    finally:
        os.kill(uplink.pid, signal.SIGCONT)
    with contextlib.suppress(RunCancelled):
        run.results(WAIT_S)
        raise AssertionError("it was cancelled")
    assert not list(where.glob("*.rank*"))
    return run.id


PLACES = [
    ("after_offer_before_answer", meets),
    ("after_choose_before_commit", meets),
    ("after_chosen_before_answer", meets),
    ("after_decided_before_told", is_released),
    ("after_decided_before_told", fails),
    ("after_called_off_before_told", is_called_off),
]


def _each() -> list[Any]:
    """Return every place with both kinds of database."""
    return [pytest.param(kind, *one) for kind in ("sqlite", "postgresql") for one in PLACES]


@pytest.mark.parametrize(("gangs", "place", "play"), _each(), indirect=["gangs"])
def test_F31_a_gang_is_what_it_was_wherever_its_server_is_killed(
    gangs: Gangs, place: str, play: Callable[[Gangs, str, Path], str], tmp_path: Path
) -> None:
    run_id = play(gangs, place, tmp_path)
    assert {path.name[0] for path in tmp_path.glob("*.rank*")} <= {"1"}  # of one attempt, each rank once
    wait_for(lambda: all(node.is_free() for node in gangs.pool.nodes.values()), "all is free", limit_s=WAIT_S)
    wait_for(lambda: not wrongs(gangs.read), "all is charged, and rightly so", limit_s=WAIT_S)
    checked = self_check.check(gangs.read, history=History(acknowledged=frozenset({run_id})))
    assert not checked.violations and not checked.skipped, checked
