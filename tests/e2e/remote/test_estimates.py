"""When would this call start? Asked of a server: what is sent, what becomes of the answer, and a server without one."""

from __future__ import annotations

import json
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from serverless_gpu import distributed
from serverless_gpu.ambient import format_soon
from serverless_gpu.errors import ArgumentMismatch, InvalidValue, NotAuthenticated
from serverless_gpu.model.cost import CostEstimate
from serverless_gpu.model.spec import Function
from serverless_gpu.wire.queue import HolderView, WaitView
from serverless_gpu.wire.runs import EstimateRequest, EstimateView
from tests.support.golden import golden
from tests.support.remote.commands import sgpu
from tests.support.remote.fake_server import FakeServer

NOW = 1_900_000_000_000_000_000
ANSWER = EstimateView(
    at_ns=NOW + 600_000_000_000, is_bound=True, node="n3", basis="bob/sweep holds 3", place=2, now_ns=NOW
)


COST = CostEstimate(currency="USD", micros_per_hour=23_920_000, at_timeout_micros=23_920_000, basis="8 H100 × 2.99 USD")


@distributed(gpus=8, gpu_type="H100", remote=True, env="live", tags={"team": "search"})
def train(lr: float) -> object:
    """Return what it is given."""
    return lr


def question(fake: FakeServer) -> EstimateRequest:
    return msgspec.json.decode(fake.bodies[-1], type=EstimateRequest)


def test_a_server_is_asked_and_no_run_is_made(fake: FakeServer, home: Path) -> None:
    fake.estimate = ANSWER
    found = train.estimate(0.1)
    assert (found.seconds, found.is_bound, found.node, found.place) == (600.0, True, "n3", 2)
    assert found.start == datetime.fromtimestamp(NOW / 1e9 + 600, UTC)
    assert str(found).endswith(" at the latest on n3: bob/sweep holds 3; 2nd in line")
    asked = question(fake)
    assert (asked.spec.payload, asked.spec.resources.gpus, asked.snapshot) == (Function(), 8, False)
    assert asked.target.machine and asked.spec.tracker is None
    assert fake.runs == {} and fake.seen["POST runs"] == 0 and not list((home / "remote").glob("*"))


def test_what_it_would_cost_is_said_beside_when_it_would_start(fake: FakeServer) -> None:
    left = "llm: 76.08 of 100.00 USD left this month"
    fake.estimate = msgspec.structs.replace(ANSWER, cost=COST, policy="research", budgets=(left,))
    found = train.estimate(0.1)
    assert found.cost == COST
    assert str(found).splitlines()[1] == golden("remote.estimates.most-23-92")
    said = sgpu("submit", "--dry-run", "true").stdout.splitlines()
    assert said[-4].startswith("would start: at ") and said[-3:] == [
        "under policy: research",
        golden("remote.estimates.would-cost-most"),
        f"from budget: {left}",
    ]
    printed = json.loads(sgpu("submit", "--dry-run", "--json", "true").stdout)
    assert printed["estimate"]["cost"]["at_timeout_micros"] == 23_920_000


def test_an_environment_that_would_travel_needs_no_machine_and_is_not_captured(fake: FakeServer, home: Path) -> None:
    fake.estimate = ANSWER
    distributed(gpus=1, remote=True, env="snapshot")(train.__wrapped__).estimate(0.1)
    asked = question(fake)
    assert (asked.snapshot, asked.target.machine) == (True, "")
    assert not (home / "environments").exists()


def test_a_server_that_is_away_is_not_waited_for(fake: FakeServer) -> None:
    fake.stop()
    found = train.estimate(0.1)
    assert found.seconds is None and golden("remote.estimates.server-does-answer", url=fake.url) in found.basis


def test_a_server_of_an_earlier_version_cannot_say(fake: FakeServer) -> None:
    found = train.estimate(0.1)
    assert found.basis == golden("remote.estimates.server-earlier-version", url=fake.url)


def test_what_would_refuse_the_call_refuses_the_question(fake: FakeServer) -> None:
    fake.estimate = ANSWER
    with pytest.raises(ArgumentMismatch):
        train.estimate()  # type: ignore[call-arg]  # that is the point
    fake.refuse_tokens = True
    with pytest.raises(NotAuthenticated):
        train.estimate(0.1)
    assert fake.seen["POST runs"] == 0


def test_a_dry_run_says_when_it_would_start_and_sends_no_run(fake: FakeServer, tmp_path: Path) -> None:
    fake.estimate = ANSWER
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(9)\n")
    wished = ("--gpus", "4", "--pool", "spare", "--team", "search", "--policy", "night", "--priority", "best_effort")
    said = sgpu("submit", "--dry-run", *wished, str(script), "--lr", "1e-3")
    assert said.exit_code == 0
    assert said.stdout.splitlines()[:-1] == [
        golden("remote.estimates.would-run-lr", join=shlex.join([sys.executable, str(script)])),
        "called: train.py",
        golden("remote.estimates.gpus-only-type"),
        golden("remote.estimates.pool-spare", url=fake.url),
        golden("remote.estimates.class-best-effort"),
        golden("remote.estimates.imports-machine-files"),
        "further: nothing",
    ]
    assert said.stdout.splitlines()[-1].startswith("would start: at ")
    alone = sgpu("submit", "--dry-run", "--same-node", "--gpus", "4", str(script)).stdout
    assert golden("remote.estimates.gpus-only-type-one") in alone
    printed = json.loads(sgpu("submit", "--dry-run", "--json", str(script)).stdout)
    assert (printed["submitted"], printed["server"], printed["imports"]) == (False, fake.url, "live")
    assert printed["spec"]["payload"]["argv"] == [sys.executable, str(script)]
    assert printed["estimate"] == {
        "start": "2030-03-17T17:56:40Z",
        "seconds": 600.0,
        "is_bound": True,
        "basis": "bob/sweep holds 3",
        "node": "n3",
        "nodes": [],
        "place": 2,
        "impossible": False,
        "cost": None,
        "policy": "",
        "budgets": [],
    }
    assert fake.runs == {} and sgpu("submit", "--json", str(script)).exit_code == 2


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_F82_a_dry_run_of_what_can_never_be_ends_as_the_run_would(fake: FakeServer, options: tuple[str, ...]) -> None:
    fake.estimate = msgspec.structs.replace(ANSWER, at_ns=None, basis="no node has A10", place=0, impossible=True)
    ended = sgpu("submit", "--dry-run", *options, "--gpus", "1", "true")
    assert ended.exit_code == 1 and golden("remote.estimates.node-a10") in ended.stdout


def test_who_is_waited_for_is_told_with_the_times_of_this_place(fake: FakeServer) -> None:
    holder = HolderView(title="bob/sweep", count=3, until_ns=ANSWER.at_ns, is_bound=True)
    waiting = WaitView(reason="capacity", count=8, gpu_type="H100", node="n3", free=5, holders=(holder,), place=2)
    fake.estimate = msgspec.structs.replace(ANSWER, basis="by the declared ends", waiting=waiting)
    assert ANSWER.at_ns is not None
    minute_ns = 60 * 10**9
    assert train.estimate(0.1).basis == golden(
        "remote.estimates.declared-ends-needs", format_soon=format_soon(-(-ANSWER.at_ns // minute_ns) * minute_ns)
    )


def test_the_pool_is_what_the_variables_of_the_caller_say(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.estimate = ANSWER
    monkeypatch.setenv("SGPU_POOL", "research")
    train.estimate(0.1)
    assert question(fake).spec.pool == "research"
    assert golden("remote.estimates.pool-research", url=fake.url) in sgpu("submit", "--dry-run", "true").stdout


def test_a_dry_run_without_an_answer_still_says_what_would_be_asked_for(fake: FakeServer) -> None:
    fake.stop()
    lines = sgpu("submit", "--dry-run", "true").stdout.splitlines()
    assert lines[5] == golden("remote.estimates.imports-machine-files-if")
    assert lines[-1].startswith(f"would start: unknown: the server at {fake.url} does not answer: ")


def test_a_dry_run_of_what_a_real_server_would_refuse_is_refused(served: Path) -> None:
    before = listed()
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.estimates.pool-nowhere"))):
        sgpu("submit", "--dry-run", "--pool", "nowhere", "true")
    assert msgspec.json.decode(sgpu("submit", "--dry-run", "--json", "true").stdout)["estimate"]["basis"]
    assert listed() == before


def listed() -> set[str]:
    """Return the runs there are; what is said of those of other tests may change."""
    return {each["id"] for each in json.loads(sgpu("runs", "--json").stdout)}
