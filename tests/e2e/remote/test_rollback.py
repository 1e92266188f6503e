"""A caller waits for a run that the server lost with its database: one sentence, not the frames that were waiting."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu.errors import NotFound
from tests.support.crash.machine import FAKES, WAIT_S, Machine
from tests.support.crash.scenarios import work
from tests.support.golden import golden
from tests.support.homes import use_home
from tests.support.local.observe import wait_for
from tests.support.server.rollback import delete_log, has_identity


@pytest.fixture
def machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Yield a server without a node, where runs wait."""
    made = Machine(home, f"sqlite:///{home}/server/server.db")
    use_home(monkeypatch, home, FAKES)
    made.start("node=false", "db.high_water_mark_file.CHECKPOINT_S=3600")
    yield made
    made.close()


def test_22B3_who_waits_for_a_run_that_was_lost_gets_a_sentence(machine: Machine, tmp_path: Path) -> None:
    wait_for(lambda: has_identity(machine.home), "what the start wrote is in the file itself", limit_s=WAIT_S)
    run = work.submit(str(tmp_path), 1)  # the caller knows that it is accepted: it does not ask for it again
    machine.send(signal.SIGKILL)
    assert machine.ended() == -signal.SIGKILL
    delete_log(machine.home)
    machine.start("node=false", "accept_rollback=true")
    with pytest.raises(NotFound) as caught:
        run.results(WAIT_S)
    error = caught.value
    assert golden("remote.rollback.database-restored-rolled") in error.message
    assert "submit the run again" in error.hint
    ours = str(Path(serverless_gpu.__file__).parent)
    assert len([frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(ours)]) == 1
