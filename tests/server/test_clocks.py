"""Clocks that are wrong: a node's (F30) decides nothing, the server's (F39) is not believed at once when it jumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.model.attempt import State
from serverless_gpu.server import reporting
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.database import Database
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.attempts import Report
from tests.server.made import made_services
from tests.server.stored import T0, S, add_node, add_people, add_run, place, stored


@pytest.mark.parametrize(("said_ns", "taken_ns"), [(T0 - 3_600 * S, T0 + S), (T0 + 3_600 * S, T0 + 5 * S)])
def test_F30_a_node_whose_clock_is_an_hour_off_cannot_say_that_user_code_began_before_or_after_it_can_have(
    database: Database, tmp_path: Path, said_ns: int, taken_ns: int
) -> None:
    services = made_services(database, tmp_path, clock=FakeClock(wall_ns=T0 + 5 * S))
    add_people(database, "alice")
    add_node(database)
    run_id = add_run(database)
    fence = place(database, run_id)
    who = Caller(kind="attempt", attempt=(run_id, fence))
    said = Report(state=State.RUNNING, exec_ns=said_ns)
    reporting.report(services, who, run_id=run_id, fence=fence, said=said)
    assert stored(database, run_id).started_ns == taken_ns
