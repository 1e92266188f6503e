"""A server that starts while its PostgreSQL does not answer yet."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.server import startup
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.startup import acquire_when_started, is_temporary
from tests.support.remote.server_process import ServerProcess
from tests.support.server.postgres import Cluster


def test_22B9_a_database_that_starts_is_waited_for_and_both_is_said(postgres: Cluster) -> None:
    name = postgres.new_database()
    postgres.stop()
    lines: list[str] = []

    def announce(line: str) -> None:
        lines.append(line)
        if len(lines) == 1:
            postgres.start()

    with contextlib.closing(Database(postgres.url(name), clock=SystemClock())) as database:
        acquire_when_started(database, clock=SystemClock(), announce=announce)
        assert database.leader_lock.is_held
    assert lines[0].startswith("the database does not answer: ") and lines[0].endswith(
        "waiting for the database, 60 s at most"
    )
    assert lines[1:] == ["the database answers now"]


def test_22B9_the_wait_has_an_end(postgres: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "START_S", 0.1)
    name = postgres.new_database()
    postgres.stop()
    try:
        with (
            contextlib.closing(Database(postgres.url(name), clock=SystemClock())) as database,
            pytest.raises(ServerUnavailable, match="does not answer"),
        ):
            acquire_when_started(database, clock=SystemClock(), announce=lambda _line: None)
    finally:
        postgres.start()


@pytest.mark.parametrize(
    ("message", "is_worth_a_wait"),
    [
        ("the database does not answer: connection failed: Connection refused", True),
        ("the database does not answer: FATAL:  the database system is starting up", True),
        ("the database does not answer: FATAL:  the database system is not yet accepting connections", True),
        ("the database does not answer: failed to resolve host 'db': Temporary failure in name resolution", True),
        ('the database does not answer: FATAL:  password authentication failed for user "sgpu"', False),
        ('the database does not answer: FATAL:  database "nowhere" does not exist', False),
        ('the database does not answer: FATAL:  no pg_hba.conf entry for host "10.0.0.1"', False),
        ("the database does not answer: fe_sendauth: no password supplied", False),
    ],
)
def test_22B9_only_what_time_changes_is_waited_for(message: str, is_worth_a_wait: bool) -> None:
    assert is_temporary(message) is is_worth_a_wait


def test_22B9_a_server_that_starts_before_its_database_comes_up_with_it(tmp_path: Path, postgres: Cluster) -> None:
    url = postgres.url(postgres.new_database())
    postgres.stop()
    server = ServerProcess(tmp_path, f"database={url}", "node=false", "port=0")
    try:
        server.spawn()
        log = tmp_path / "server" / "server.log"
        _until_it_says(log, "waiting for the database")
    finally:
        postgres.start()
    try:
        assert server.line().startswith("ready http://127.0.0.1:")
        assert "the database answers" in log.read_text()
    finally:
        server.kill()


def _until_it_says(path: Path, words: str) -> None:
    clock = SystemClock()
    until_ns = clock.boottime_ns() + 30 * 10**9
    while not (path.exists() and words in path.read_text()):
        assert clock.boottime_ns() < until_ns, f"{path} does not say {words!r}"
