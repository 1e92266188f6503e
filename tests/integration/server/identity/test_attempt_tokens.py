"""Tokens of attempts end with the lease, and are renewed with it (F69)."""

from __future__ import annotations

import msgspec
import pytest
from starlette.testclient import TestClient

from serverless_gpu.errors import InvalidValue, NotAuthenticated
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp
from serverless_gpu.server.composition import Services, guarded, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Keys, parse_attempt_token, token_until_s
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.auth_middleware import Authenticator
from serverless_gpu.server.lifecycle.attempt_tokens import RENEWED_MAX
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Heartbeat, LogPiece, Report, Start
from serverless_gpu.wire.base import API
from tests.support.server.agents import H100, NODE, OTHER, hello, submit, tell
from tests.support.server.made import KEY
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database

RUN = "0" * 26


class Node:
    """A node with one attempt, as the server's verbs see it."""

    def __init__(self, services: Services, clock: FakeClock, takes: tuple[str, ...]) -> None:
        assert isinstance(services.database, Database)
        add_people(services.database, "node", "other", "alice")
        self.services, self.clock, self.agents = services, clock, services.agents
        self.admission = Authenticator(services.database, clock=clock, keys=services.keys)
        self.id = self.agents.hello(NODE, hello(takes=takes)).node
        self.run_id = submit(services)
        make_scheduler(services).tick(clock.boottime_ns())
        order = self.agents.waiting(NODE, self.id)[0]
        assert isinstance(order, Start)
        self.token = order.token

    def report(self, text: str = "") -> bool:
        """Report as a node does; return whether the answer had another token."""
        who = self.admission.authenticate(self.token)
        assert who.attempt == (self.run_id, 1, 0)
        have = len(self.services.logs.read(self.run_id, 1, rank=0, stream="stdout", limit=1000))
        pieces = (LogPiece(rank=0, stream="stdout", offset=have, data=text.encode()),) if text else ()
        said = Report(state=State.RUNNING, logs=pieces)
        answer = self.services.reports.receive(who, run_id=self.run_id, fence=1, said=said)
        self.token = answer.token or self.token
        return bool(answer.token)

    def renew(self, who: Caller = NODE) -> dict[str, str]:
        """Want another token, as a node does whose reports are refused."""
        said = Heartbeat(devices=H100, renew=(f"{self.run_id}:1", "nonsense", f"{self.run_id}:9", f"{RUN}:1"))
        return self.agents.heartbeat(who, self.id, said).tokens


@pytest.fixture
def node(services: Services, clock: FakeClock) -> Node:
    return Node(services, clock, ("renewal",))


def test_F69_a_token_ends_soon_after_the_lease_and_a_report_brings_the_next(node: Node) -> None:
    first = node.token
    assert not node.report()  # it is fresh
    node.clock.advance(300)
    assert node.report() and node.token != first
    for _ in range(20):  # hours, with an answer every few minutes
        node.clock.advance(600)
        assert node.report()
    with pytest.raises(NotAuthenticated, match="token has expired"):
        node.admission.authenticate(first)


def test_F69_a_node_that_was_cut_off_gets_another_one_by_its_own_token_and_goes_on(node: Node) -> None:
    assert not node.report("before\n")
    node.clock.advance(961)
    with pytest.raises(NotAuthenticated, match="token has expired"):
        node.report("after\n")
    found = node.renew()
    assert list(found) == [f"{node.run_id}:1"]
    node.token = found[f"{node.run_id}:1"]
    node.report("after\n")
    read = node.services.logs.read(node.run_id, 1, rank=0, stream="stdout", limit=1000)
    assert read == b"before\nafter\n"


def test_F69_nobody_gets_the_token_of_another_nodes_attempt(node: Node) -> None:
    node.agents.hello(OTHER, hello("n2", machine="m2"))
    other = node.agents.hello(OTHER, hello("n2", machine="m2")).node
    said = Heartbeat(devices=H100, renew=(f"{node.run_id}:1",))
    assert node.agents.heartbeat(OTHER, other, said).tokens == {}
    with pytest.raises(InvalidValue):
        node.agents.heartbeat(NODE, node.id, msgspec.structs.replace(said, renew=("x:1",) * (RENEWED_MAX + 1)))


def test_F69_of_an_attempt_that_was_given_up_only_what_it_has_to_tell_is_taken(node: Node) -> None:
    node.clock.advance(961)
    tell(node.services, node.run_id, GivenUp(reason=Reason.NODE_GONE))
    node.token = node.renew()[f"{node.run_id}:1"]
    who = node.admission.authenticate(node.token)
    admission = node.admission
    app = guarded(
        node.services.by_type,
        hub=node.services.hub,
        clock=node.services.clock,
        measures=node.services.measures,
        hosts=["server.test"],
        authenticate=admission.authenticate,
        reach=admission.reach,
    )
    with TestClient(app, base_url="http://server.test") as client:
        headers = {"Authorization": f"Bearer {node.token}"}
        asked = client.post(API + "/blobs/missing", headers=headers, json={"digests": []})
    assert (asked.status_code, asked.json()["code"]) == (403, "not_allowed")
    said = Report(state=State.RUNNING, logs=(LogPiece(rank=0, stream="stdout", offset=0, data=b"late\n"),))
    answer = node.services.reports.receive(who, run_id=node.run_id, fence=1, said=said)
    assert answer.stale and answer.token == ""
    assert node.services.logs.read(node.run_id, 1, rank=0, stream="stdout", limit=1000) == b"late\n"


def test_F39_a_clock_that_was_set_costs_a_renewal_and_no_run(node: Node) -> None:
    node.report()
    node.clock.step_wall(86_400)
    with pytest.raises(NotAuthenticated):
        node.report()
    node.token = node.renew()[f"{node.run_id}:1"]
    node.report()
    node.clock.step_wall(-90_000)
    assert node.report()  # good for a day by this clock: replaced at once
    until_s = token_until_s(node.token)
    assert until_s is not None and until_s - node.clock.wall_ns() / 1e9 <= 961


def test_a_node_that_takes_no_renewal_has_a_token_without_an_end(services: Services, clock: FakeClock) -> None:
    node = Node(services, clock, ())
    assert token_until_s(node.token) is None
    clock.advance(100_000)
    assert not node.report()


def test_an_end_cannot_be_written_into_a_token(node: Node) -> None:
    keys = Keys(KEY)
    until_s = token_until_s(node.token)
    assert until_s is not None and node.token == keys.attempt_token(node.run_id, 1, until_s=until_s)
    longer = node.token.replace(f"_{until_s}_", f"_{until_s + 9}_")
    without = node.token.replace(f"_{until_s}_", "_")
    another = Keys(b"x" * 32).attempt_token(node.run_id, 1, until_s=until_s)
    unplaced = keys.attempt_token(node.run_id, 2, until_s=until_s)
    for token in (longer, without, another, unplaced):
        with pytest.raises(NotAuthenticated):
            node.admission.authenticate(token)
    assert parse_attempt_token(without) == parse_attempt_token(node.token) == (node.run_id, 1, 0)
    assert parse_attempt_token(node.token.replace(f"_{until_s}_", "_0_")) is None
