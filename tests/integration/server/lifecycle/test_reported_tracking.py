"""What nodes report beside a run's life: where it is tracked, and what telemetry saw of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import run_key
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.runs import run_views
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Ending, LogPiece, Report, ReportAnswer
from tests.support.server.made import made_services
from tests.support.server.stored import T0, S, add_node, add_people, add_run, place, stored

pytestmark = pytest.mark.any_database

FAILED = Ending(state=State.FAILED, reason=Reason.RANK_RAISED, began=True, stopped=msgspec.Raw(b'{"a":2}'))


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    add_people(database, "alice")
    add_node(database)
    (tmp_path / "server").mkdir()
    return made_services(database, tmp_path, clock=FakeClock(wall_ns=T0 + S))


def say(services: Services, run_id: str, state: State = State.RUNNING, *, fence: int = 1, **said: Any) -> ReportAnswer:
    who = Caller(kind="attempt", attempt=(run_id, fence, 0))
    return services.reports.receive(who, run_id=run_id, fence=fence, said=Report(state=state, **said))


LINK = "http://127.0.0.1:5000/#/experiments/1/runs/m1"


def test_the_link_to_mlflow_is_kept_over_attempts_and_what_is_no_link_is_not(
    services: Services, database: Database
) -> None:
    run_id = add_run(database, retries=1)
    place(database, run_id)
    say(services, run_id, exec_ns=T0, tracked="javascript:alert(1)")
    say(services, run_id, exec_ns=T0, tracked=f"http://{'x' * 3_000}")
    assert stored(database, run_id).tracked == ""
    seen = services.hub.version(run_key(run_id))
    say(services, run_id, exec_ns=T0, tracked=LINK)
    assert stored(database, run_id).tracked == run_views.run_view(stored(database, run_id)).tracked == LINK
    assert services.hub.version(run_key(run_id)) != seen
    seen = services.hub.version(run_key(run_id))
    say(services, run_id, exec_ns=T0, tracked=LINK)
    assert services.hub.version(run_key(run_id)) == seen
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=FAILED)
    assert place(database, run_id) == 2
    say(services, run_id, State.STARTING, fence=2)
    assert stored(database, run_id).tracked == LINK


def test_samples_of_nodes_are_kept_beside_the_output_of_every_attempt(services: Services, database: Database) -> None:
    run_id = add_run(database, retries=1)
    place(database, run_id)
    first = LogPiece(rank=0, stream="telemetry", offset=0, data=b"[1]\n")
    assert say(services, run_id, exec_ns=T0, logs=(first,)).offsets == {}
    late = LogPiece(rank=0, stream="telemetry", offset=9, data=b"[3]\n")
    assert say(services, run_id, exec_ns=T0, logs=(late,)).offsets == {"0.telemetry": 4}
    say(services, run_id, State.STOPPING, exec_ns=T0, ending=FAILED)
    place(database, run_id)
    say(services, run_id, fence=2, logs=(msgspec.structs.replace(first, data=b"[2]\n"),))
    kept = [services.logs.read(run_id, fence, rank=0, stream="telemetry", limit=99) for fence in (1, 2)]
    assert kept == [b"[1]\n", b"[2]\n"]
