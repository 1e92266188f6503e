"""Restarts and backups while clients work: whatever a server said yes to is there afterwards.

OPERATION_TIMES says how often; `make operation` says 30.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from serverless_gpu.node.base.home import Home
from serverless_gpu.server.operations.backup import DATABASE, restore, verify
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import RunView
from tests.support.local.observe import wait_for
from tests.support.ports import own_port
from tests.support.server.backups import backup_of, going_on
from tests.support.server.runs_api import request
from tests.support.server.served import served
from tests.support.server.server_process import Process

pytestmark = pytest.mark.slow
TIMES = int(os.environ.get("OPERATION_TIMES", "3"))
CLIENTS = 4


class Clients:
    """Several who submit one run after the other, and wait for a server that is away.

    Args:
        connect: gives each a connection.

    Attributes:
        acknowledged: runs that a server said yes to.
    """

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._submit) for _ in range(CLIENTS)]
        self._failed: list[BaseException] = []
        self.acknowledged: list[str] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Submit meanwhile; nobody's request may fail."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(310)
        assert self._failed == []
        assert len(set(self.acknowledged)) == len(self.acknowledged) > 0

    def more(self) -> None:
        """Wait until each has about five more."""
        wanted = len(self.acknowledged) + 5 * CLIENTS
        wait_for(lambda: len(self.acknowledged) >= wanted or self._failed, "clients get answers", 100)

    def _submit(self) -> None:
        connection = self._connect()
        try:
            while not self._over.is_set():
                self.acknowledged.append(connection.ask("POST", "/runs", request(), answer=RunView).id)
        except BaseException as error:  # noqa: BLE001 — raised again in the thread of the test
            self._failed.append(error)
        finally:
            connection.close()


@pytest.mark.long
def test_F53_restarts_lose_no_request_and_no_run(home: Path) -> None:
    (home / "server.toml").write_text(f"runs_waiting = 1000000\nport = {own_port()}\n")
    process = Process(home)
    clients = Clients(lambda: Connection(process.url, process.token, patience_s=300))
    try:
        with clients.working():
            for _ in range(TIMES):
                clients.more()
                assert process.end(signal.SIGTERM) == 0
                process = Process(home)
            clients.more()
        there = ids(home / "server" / "server.db")
        assert set(clients.acknowledged) <= there
        assert "cut off" not in (home / "server" / "server.log").read_text()
    finally:
        process.end(signal.SIGKILL)
    print(f"{TIMES} restarts, {len(clients.acknowledged)} runs acknowledged, {len(there)} there")


def test_backups_of_a_server_that_works_have_all_that_it_had_said_yes_to(tmp_path: Path) -> None:
    with served(tmp_path / "home", runs_waiting=1_000_000) as server:
        _node, _start, running = going_on(server)
        clients = Clients(lambda: Connection(server.url, server.token, patience_s=300))
        made = []
        with clients.working():
            for _ in range(TIMES):
                clients.more()
                before = set(clients.acknowledged)
                made.append((backup_of(server.home, tmp_path / "backups"), before))
    for number, (backup, before) in enumerate(made):
        verify(backup.path)
        assert before <= ids(backup.path / DATABASE)
        other = tmp_path / f"restored-{number}"
        restore(Home(other), backup.path, nothing_ran_since=True)
        assert before <= ids(other / "server" / "server.db")
        assert (other / "server" / "logs" / running / "1" / "0.stdout").read_bytes() == b"before\n"
    print(f"{TIMES} backups, {len(clients.acknowledged)} runs acknowledged")


def ids(database: Path) -> set[str]:
    """Return the identifiers of all runs."""
    with closing(sqlite3.connect(database)) as connection:
        return {run_id for (run_id,) in connection.execute("SELECT id FROM runs")}
