"""Health: each part by itself, bounded in time whatever hangs, and silent about everybody."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import httpx2
import msgspec
import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import StorageError, StoreUnavailable
from serverless_gpu.server import startup
from serverless_gpu.server.core.health import PartHealth, Probe, ServerHealth
from serverless_gpu.server.scheduling.scheduler import Scheduler
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.base import API
from serverless_gpu.wire.server_status import Health, Version
from tests.support.golden import golden
from tests.support.server.served import Served, served

PARTS = {"database", "store", "environments", "disk", "claim", "server"}
LOOPS = {"claim", "scheduler", "reconciler", "collector", "retention", "audit"}


class Hanging:
    """A check that does not answer until it is let go, and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.go = threading.Event()

    def __call__(self) -> str:
        self.asked += 1
        self.go.wait(60)
        return ""


def look(health: ServerHealth) -> dict[str, PartHealth]:
    return {one.name: one for one in asyncio.run(health.look())}


def test_a_server_says_how_each_part_is_and_how_long_it_took(server: Served) -> None:
    health = server.connection().health()
    assert health.ok and health.problems == ()
    assert {check.name for check in health.checks} >= PARTS | LOOPS
    assert all(check.ok and not check.problem for check in health.checks)
    assert next(check for check in health.checks if check.name == "store").ms > 0


def test_two_checks_of_one_part_are_both_asked() -> None:
    health, problems = ServerHealth(), {"held": "", "loop": ""}
    health.watch("claim", lambda: problems["held"])
    health.watch("claim", lambda: problems["loop"])
    assert look(health)["claim"].problem == ""
    problems["loop"] = "the claim has completed no tick for 91 s"
    assert look(health)["claim"].problem == problems["loop"]
    problems["held"] = "the database is not this server's now"
    assert look(health)["claim"].problem == problems["held"]


def test_a_store_that_hangs_does_not_hang_health_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(startup, "STORE_BOUND_S", 0.2)
    monkeypatch.setattr(Blobs, "try_store", lambda _blobs: go.wait(60) and "")
    with served(tmp_path) as server, httpx2.Client(base_url=server.url + API, timeout=20) as client:
        for _ in range(60):  # more than the server has threads for requests
            answer = client.get("/health")
            problem = msgspec.json.decode(answer.content, type=Health).problems
            assert answer.status_code == 503 and len(problem) == 1
            assert problem[0].startswith("the store has not answered for ")
        assert sum(thread.name == "probe-store" for thread in threading.enumerate()) == 1
        assert server.connection().ask("GET", "/version", answer=Version).version
        go.set()


def test_a_loop_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, clock = threading.Event(), FakeClock()

    def hang(_scheduler: Scheduler, now_ns: int) -> int:
        go.wait(60)
        return now_ns

    monkeypatch.setattr(Scheduler, "tick", hang)
    with served(tmp_path, clock=clock) as server:
        assert server.connection().health().ok
        clock.advance(91)
        problems = server.connection().health().problems
        assert golden("server.health.scheduler-finished-nothing") in problems
        go.set()


def test_nothing_is_left_in_the_store_by_looking(server: Served) -> None:
    assert server.connection().health().ok
    assert [path for path in (server.home / "server" / "blobs").rglob("*") if path.is_file()] == []


def test_what_hangs_is_asked_once_waited_for_once_and_named() -> None:
    clock, hanging = FakeClock(), Hanging()
    health = ServerHealth(clock)
    health.probe("store", hanging, bound_s=0.05)
    health.probe("database", lambda: "")
    found = look(health)
    assert (found["store"].problem, found["database"].problem) == (golden("server.health.store-answered"), "")
    clock.advance(30)
    for _ in range(50):  # none of them waits: the question is older than the bound
        assert look(health)["store"].problem == golden("server.health.store-answered-30")
    assert hanging.asked == 1
    hanging.go.set()


def test_after_it_hung_it_is_asked_again() -> None:
    hanging = Hanging()
    probe = Probe("store", hanging, clock=SystemClock(), fresh_s=0, bound_s=0.05)

    async def asked() -> str:
        return (await probe.answer()).problem

    assert asyncio.run(asked()).startswith("has not answered for")
    hanging.go.set()
    for thread in threading.enumerate():
        if thread.name == "probe-store":
            thread.join(30)
    assert asyncio.run(asked()) == ""
    assert hanging.asked == 2


def test_many_who_ask_at_once_are_one_question() -> None:
    hanging = Hanging()
    probe = Probe("store", hanging, clock=SystemClock(), fresh_s=0, bound_s=30)

    async def all_ask() -> list[str]:
        asking = [asyncio.ensure_future(probe.answer()) for _ in range(20)]
        await asyncio.sleep(0)
        hanging.go.set()
        return [answer.problem for answer in await asyncio.gather(*asking)]

    assert asyncio.run(all_ask()) == [""] * 20
    assert hanging.asked == 1


def test_a_good_answer_is_kept_for_a_while_and_a_bad_one_is_not() -> None:
    clock, said = FakeClock(), ["", "the store takes nothing", ""]
    health = ServerHealth(clock)
    health.probe("store", lambda: said.pop(0), fresh_s=10)
    assert look(health)["store"].problem == look(health)["store"].problem == ""
    assert len(said) == 2
    clock.advance(10)
    assert look(health)["store"].problem == golden("server.health.store-takes-nothing")
    assert look(health)["store"].problem == ""


def test_the_log_has_each_change_once_and_what_a_visitor_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    def check() -> str:
        raise OSError("/home/alice/secret is gone")

    health, working = ServerHealth(), [check]
    health.probe("store", lambda: working[0]())
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert look(health)["store"].problem == golden("server.health.store-cannot-looked")
        working[0] = lambda: ""
        assert look(health)["store"].problem == ""
    assert [record.getMessage() for record in caplog.records] == [
        golden("server.health.looked-store"),
        golden("server.health.health-store-cannot"),
        golden("server.health.health-store-well"),
    ]
    assert "alice" in caplog.text


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (StoreUnavailable("s3://secret-bucket does not answer"), "the store does not answer"),
        (StorageError("/mnt/alice is full"), "the store takes nothing"),
    ],
)
def test_a_store_that_fails_is_told_without_its_name(
    error: Exception, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(MemoryStore):
        def put(self, objects: object) -> None:
            raise error

    health = ServerHealth()
    health.probe("store", Blobs(Failing(), clock=SystemClock()).try_store)
    for _ in range(3):
        assert look(health)["store"].problem == sentence
    assert caplog.text.count(str(error)) == 1  # the operator's, and once


def test_a_server_whose_store_is_gone_is_unwell_says_so_and_goes_on(tmp_path: Path) -> None:
    with served(tmp_path) as server, httpx2.Client(base_url=server.url + API, timeout=60) as client:
        blobs = tmp_path / "server" / "blobs"
        if blobs.exists():
            blobs.rename(tmp_path / "away")
        blobs.write_text("no directory")
        answer = client.get("/health")
        said = msgspec.json.decode(answer.content, type=Health)
        assert (answer.status_code, answer.headers["Retry-After"], said.ok) == (503, "5", False)
        assert len(said.problems) == 1 and said.problems[0].startswith("the store ")
        assert str(tmp_path) not in answer.text
        assert server.connection().health().problems == said.problems
        blobs.unlink()
        assert server.connection().health().ok
