"""Figures of a real server: who may read them, what they say of what is there, and that they name nobody."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Iterator

import httpx2
import pytest

from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.server_metrics import LABEL_VALUES_MAX, OTHER, ServerMetrics
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.operations import server_status
from serverless_gpu.server.operations.server_status import StateMetrics
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest, TokenMade, TokenRequest
from serverless_gpu.wire.base import API
from tests.support.server.agents import H100, NODE, hello
from tests.support.server.runs_api import submit
from tests.support.server.served import Served
from tests.support.server.stored import add_people, add_run, place

LABELS_MAX = 5_000
"""Lines of the whole answer."""


def scrape(server: Served, token: str = "") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {token or server.token}"}
    with httpx2.Client(base_url=server.url + API, timeout=60) as client:
        return client.get("/metrics", headers=headers)


def figures(text: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_figures_are_for_a_token_that_may_see_them(server: Served) -> None:
    admin = server.connection()
    with httpx2.Client(base_url=server.url + API, timeout=60) as client:
        assert client.get("/metrics").status_code == 401
    viewer = admin.ask(
        "POST", "/users", PrincipalRequest(name="prometheus", kind="service", role="viewer"), answer=TokenMade
    )
    assert scrape(server, viewer.secret).status_code == 200
    assert scrape(server, server.node_token).status_code == 403
    asked = TokenRequest(principal="prometheus", scopes=("metrics:read",))
    scoped = admin.ask("POST", "/tokens", asked, answer=TokenMade).secret
    answer = scrape(server, scoped)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_what_happens_is_in_the_figures_and_who_did_it_is_not(server: Served) -> None:
    connection = server.connection()
    run = submit(connection)
    with httpx2.Client(base_url=server.url + API, timeout=60) as client:
        for path in ("/no-such-thing", f"/runs/{run.id}", "/runs/..%2f..", "/metrics/x"):
            client.get(path, headers={"Authorization": f"Bearer {server.token}"})
        client.request("TRACE", "/health")
    text = scrape(server).text
    found = figures(text)
    assert found['sgpu_runs{state="QUEUED"}'] == 1
    assert found["sgpu_runs_submitted_total"] == 1
    assert found['sgpu_request_seconds_count{method="GET",route="/runs/{run}",status="2xx"}'] >= 1
    assert found['sgpu_request_seconds_count{method="GET",route="other",status="4xx"}'] >= 2
    assert found['sgpu_request_seconds_count{method="other",route="other",status="4xx"}'] == 1
    assert found['sgpu_transaction_seconds_count{kind="write"}'] > 0
    assert found["sgpu_commits_total"] > 0 and found["sgpu_disk_free_bytes"] > 0
    assert found['sgpu_tick_seconds_count{loop="scheduler"}'] > 0
    assert found['sgpu_healthy{check="database"}'] == 1
    assert found["process_resident_memory_bytes"] > 1e6
    assert len(found) < LABELS_MAX
    for secret in (run.id, run.owner, server.token, "no-such-thing"):
        assert secret not in text
    assert text == re.sub(r"[^\n\x20-\x7e]", "?", text)


@pytest.fixture
def watched(services: Services) -> Iterator[Services]:
    services.measures.watch(services.make(StateMetrics))
    yield services


def value(measures: ServerMetrics, name: str, **labels: str) -> float | None:
    return measures.registry.get_sample_value(name, labels)


def test_a_sample_counts_what_is_alive(watched: Services, clock: FakeClock) -> None:
    services = watched
    assert isinstance(services.database, Database)
    add_people(services.database, "node", "alice")
    there = services.agents.hello(NODE, hello(unavailable=(H100[7].uuid,)))
    queued = clock.wall_ns() - 60_000_000_000
    placed, *_ = (add_run(services.database, at_ns=queued) for _ in range(3))
    services.leases.renew((placed, 1, 0), now_ns=clock.boottime_ns())
    place(services.database, placed, node_id=there.node, world_size=2, at_ns=clock.wall_ns())
    clock.advance(10)
    asyncio.run(services.measures.refresh())
    assert value(services.measures, "sgpu_queue_oldest_seconds") == 70
    assert value(services.measures, "sgpu_lease_age_max_seconds") == 10
    assert value(services.measures, "sgpu_orders_oldest_seconds") == 10
    assert value(services.measures, "sgpu_runs", state=State.QUEUED.value) == 2
    assert value(services.measures, "sgpu_runs", state=State.STARTING.value) == 1
    assert value(services.measures, "sgpu_runs", state=State.RUNNING.value) == 0
    assert value(services.measures, "sgpu_nodes", state="UP") == 1
    assert value(services.measures, "sgpu_orders_unacknowledged") == 1
    for state, number in {"leased": 2, "unavailable": 1, "free": len(H100) - 3, "away": 0}.items():
        assert value(services.measures, "sgpu_devices", type="H100", state=state) == number, state
    services.agents.hello(NODE, hello(unavailable=(H100[7].uuid,), draining="a process does not end"))
    clock.advance(10)
    asyncio.run(services.measures.refresh())
    assert value(services.measures, "sgpu_nodes", state="DRAINING") == 1
    assert value(services.measures, "sgpu_nodes", state="UP") == 0
    services.agents.hello(NODE, hello(unavailable=(H100[7].uuid,), degraded="NVML did not answer in 5 s"))
    clock.advance(10)
    asyncio.run(services.measures.refresh())
    assert value(services.measures, "sgpu_nodes", state="DEGRADED") == 1
    clock.advance(60)
    asyncio.run(services.measures.refresh())
    assert value(services.measures, "sgpu_nodes", state="SILENT") == 1
    assert value(services.measures, "sgpu_devices", type="H100", state="away") == len(H100) - 3


def test_types_of_devices_that_a_node_makes_up_become_other() -> None:
    counted = Counter({(f"made-up-{number:03}", "free"): 1 for number in range(100)} | {("H100", "leased"): 8})
    few = server_status.few_types(counted)
    names = {name for name, _ in few}
    assert len(names) == LABEL_VALUES_MAX + 1 and {OTHER, "H100"} <= names
    assert sum(few.values()) == 108


def test_a_database_that_hangs_costs_a_scrape_its_bound_and_no_more(
    watched: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    measures = ServerMetrics()
    monkeypatch.setattr(server_status, "BOUND_S", 0.05)
    monkeypatch.setattr(StateMetrics, "look", lambda _sampling: go.wait(60))
    measures.watch(watched.make(StateMetrics))
    asyncio.run(measures.refresh())
    assert b"sgpu_build_info" in measures.text() and b"sgpu_runs{" not in measures.text()
    go.set()
