"""When would a run start? Checked as one that is asked for, and nothing of the question is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue, SecretMissing, TooLarge
from serverless_gpu.model.scheduling.values import BEST_EFFORT, QueuedRun, StartEstimate
from serverless_gpu.model.spec import Kernel, Priority, Resources, RunSpec
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.scheduling.wait_reasons import WaitReasons
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.runs import EstimateRequest, EstimateView, Target
from serverless_gpu.wire.server_status import DrainRequest
from tests.support.golden import golden
from tests.support.server.made import made_services, recomposed
from tests.support.server.served import Served
from tests.support.server.stored import add_people, rows

ALICE = Caller(name="alice", role="member", teams=("search",), token_id="token-1")
LIVE = Target(machine="m1", caller="m1", python="3.11.7", platform="linux-x86_64")
ANYWHERE = Target(caller="m1", python="3.11.7", platform="linux-x86_64")
ANSWER = StartEstimate(at_ns=42, is_bound=True, node="n3", basis="bob/sweep holds 3", place=2)


class Asked(WaitReasons):
    """A planner that has one answer."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[QueuedRun] = []

    def estimate(self, wanted: QueuedRun) -> StartEstimate:
        self.wanted.append(wanted)
        return ANSWER


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def services(database: Database, tmp_path: Path, asked: Asked) -> Services:
    add_people(database, "alice", "bob")
    return recomposed(made_services(database, tmp_path, clock=FakeClock()), sentences=asked)


def question(target: Target = LIVE, *, snapshot: bool = False, **spec: Any) -> EstimateRequest:
    spec = {"resources": Resources(gpus=8, gpu_type="H100"), **spec}
    return EstimateRequest(spec=RunSpec(remote=True, **spec), target=target, snapshot=snapshot)


def test_a_question_becomes_what_the_run_would_want_and_nothing_is_kept(
    services: Services, database: Database, asked: Asked
) -> None:
    said = question(name="bert-ft", team="search", priority=Priority.BEST_EFFORT, resume=True)
    view = services.estimates.make(ALICE, said)
    assert view.cost is not None and "8 H100, unpriced" in view.cost.basis
    assert msgspec.structs.replace(view, cost=None) == EstimateView(
        at_ns=42, is_bound=True, node="n3", basis="bob/sweep holds 3", place=2, now_ns=services.clock.wall_ns()
    )
    (wanted,) = asked.wanted
    assert (wanted.title, wanted.owner, wanted.team, wanted.priority) == (
        "alice/bert-ft",
        "alice",
        "search",
        BEST_EFFORT,
    )
    assert (wanted.gpus, wanted.gpu_type, wanted.machine, wanted.preemptible) == (8, "H100", "m1", True)
    assert (wanted.python, wanted.queued_ns) == ("", services.clock.wall_ns())  # its files name their interpreter
    assert rows(database, tables.runs) == rows(database, tables.events) == rows(database, tables.audit) == []


def test_what_travels_needs_its_version_of_python(services: Services, asked: Asked) -> None:
    services.estimates.make(ALICE, question(ANYWHERE, snapshot=True, environment="snapshot"))
    assert (asked.wanted[0].python, asked.wanted[0].machine) == ("3.11", "")


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ({"pool": "nowhere"}, InvalidValue, "there is no pool 'nowhere'"),
        ({"team": "other"}, InvalidValue, "alice is not a member of team 'other'"),
        ({"secrets": ("HF_TOKEN",)}, SecretMissing, "HF_TOKEN"),
        ({"payload": Kernel()}, InvalidValue, "kernels"),
        ({"resources": Resources(gpus=0)}, InvalidValue, "gpus"),
        ({"name": "x" * 300}, InvalidValue, "name has 300"),
        ({"tags": {str(number): "" for number in range(1_000)}}, TooLarge, "tags"),
    ],
)
def test_what_would_refuse_the_run_refuses_the_question(
    services: Services, asked: Asked, spec: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        services.estimates.make(ALICE, question(**spec))
    assert asked.wanted == []


def test_a_machine_with_a_name_that_moves_the_screen_is_refused(services: Services) -> None:
    with pytest.raises(InvalidValue, match="control characters"):
        services.estimates.make(ALICE, question(Target(machine="\x1b[2J", python="3.11", platform="x")))


def test_while_the_server_starts_nothing_nobody_can_say_when(services: Services, database: Database) -> None:
    admin = Caller(name="bob", role="admin", token_id="t")
    services.drain.put(admin, DrainRequest(on=True, note="new disks"))
    view = services.estimates.make(ALICE, question())
    assert view.at_ns is None and "bob drains it" in view.basis and "new disks" in view.basis


def test_who_may_start_nothing_is_told_that(services: Services, database: Database) -> None:
    database.write(lambda connection: connection.execute(tables.principals.update().values(role="viewer")))
    view = services.estimates.make(ALICE, question())
    assert (view.at_ns, view.basis) == (None, golden("server.estimating.alice-may-start"))


def test_a_real_server_says_why_nobody_can_say(server: Served) -> None:
    connection = server.connection()
    view = connection.ask("POST", "/estimates", question(), answer=EstimateView)
    assert view.at_ns is None and view.basis
