"""A server and its node, real processes of one home, in which a place is armed while they run: who reaches it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.invariants import self_check
from serverless_gpu.server.invariants.run_invariants import History
from serverless_gpu.wire.billing import PriceRequest, PriceSet
from serverless_gpu.wire.connection import Connection
from tests.e2e.remote.conftest import end_node
from tests.support.local.observe import cancel_all, wait_for
from tests.support.ports import own_port
from tests.support.reckoning import wrongs
from tests.support.remote.server_process import ServerProcess

T = TypeVar("T")
WAIT_S = 60.0
FAKES = "H100:2"


class Machine:
    """A home with a server and a node; killed, started, looked at.

    Args:
        home: the home directory.
        database: url of the server's.
        words: what the server is told at each start, as `tests.support.remote.server_process` takes it.

    Attributes:
        home: the home directory.
        database: url of the server's.
        url: where the server was the last time it started.
        acknowledged: runs whose submission was answered, and that are kept.
    """

    def __init__(self, home: Path, database: str, *words: str) -> None:
        self.home = home
        self.database = database
        self.url = ""
        self.acknowledged: set[str] = set()
        self._armed = home / "armed"
        self._server = ServerProcess(home, f"port={own_port()}", *words)

    # --- the server ----------------------------------------------------------------------------------------------

    def start(self, *words: str, fault: str = "") -> None:
        """Start the server and wait until it answers.

        Args:
            words: as `tests.support.remote.server_process` takes them.
            fault: what `SGPU_FAULT` says; the file that `arm` writes, unless said.
        """
        self.spawn(*words, fault=fault)
        line = self.line()
        assert line.startswith("ready "), f"{line!r}: {(self.home / 'server.stderr').read_text()[-2000:]}"
        self.url = line.split()[1]

    def spawn(self, *words: str, fault: str = "") -> None:
        """Start the server and do not wait."""
        with (self.home / "server.stderr").open("ab") as errors:
            told = (f"database={self.database}", *words)
            self._server.spawn(*told, environ={faults.VARIABLE: fault or f"@{self._armed}"}, errors=errors)

    def line(self) -> str:
        """Return the next line the server prints; "" when it has ended."""
        return self._server.line()

    def send(self, number: int) -> None:
        """Send the server a signal."""
        self._server.send(number)

    def ended(self) -> int:
        """Wait until the server has ended; return its exit status."""
        return self._server.ended()

    def stop(self) -> None:
        """End the server in order, if it runs."""
        self._server.kill(signal.SIGTERM)

    def close(self) -> None:
        """End everything of this home."""
        self._armed.unlink(missing_ok=True)
        close_all()
        cancel_all(self.home)
        self.stop()
        end_node(self.home)

    def command(self, *words: str) -> int:
        """Run `sgpu server …`, which may reach the place that is armed; return its exit status."""
        named = {faults.VARIABLE: f"@{self._armed}", "SGPU_DATABASE": self.database}
        with (self.home / "server.stderr").open("ab") as errors:
            program = [sys.executable, "-m", "serverless_gpu.cli", "server", *words]
            done = subprocess.run(
                program, env={**os.environ, **named}, stdout=errors, stderr=errors, timeout=WAIT_S, check=False
            )
        return done.returncode

    def copied_database(self) -> str:
        """Return the url of a copy of a database of PostgreSQL that nobody uses."""
        url = sa.make_url(self.database)
        copied = url.set(database=f"{url.database}_copied")
        engine = sa.create_engine(url.set(database="postgres"), isolation_level="AUTOCOMMIT")
        with contextlib.closing(engine.connect()) as connection:
            connection.execute(sa.text(f'CREATE DATABASE "{copied.database}" TEMPLATE "{url.database}"'))
        engine.dispose()
        return copied.render_as_string(hide_password=False)

    def connection(self, token: str = "token", *, patience_s: float = 0.0) -> Connection:
        """Return a connection with the token of one of the server's files."""
        secret = (self.home / "server" / token).read_text(encoding="ascii").strip()
        return Connection(self.url, secret, patience_s=patience_s)

    def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Return what a work finds in the server's database."""
        database = Database(self.database, clock=SystemClock())
        try:
            return database.read(work)
        finally:
            database.close()

    def check(self) -> None:
        """Require that everything is true that always is, and that nothing acknowledged is lost."""
        checked = self_check.check(self.read, history=History(acknowledged=frozenset(self.acknowledged)))
        assert not checked.violations and not checked.skipped, checked

    def set_price(self, micros_per_hour: int) -> None:
        """Give the machine's GPUs a price."""
        asked = PriceRequest(micros_per_hour=micros_per_hour)
        with contextlib.closing(self.connection()) as connection:
            connection.ask("PUT", "/prices/H100", asked, answer=PriceSet)

    def check_ledger(self) -> None:
        """Require that everything is charged before long, and that it is what its facts say, whoever died when.

        Facts of earlier attempts may come at any moment, and are due until they are charged: that passes.
        """
        until_s = time.monotonic() + WAIT_S
        while (found := wrongs(self.read)) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not found, "\n".join(found)

    def log(self) -> str:
        """Return what the server has logged."""
        return (self.home / "server" / "server.log").read_text()

    # --- the place -----------------------------------------------------------------------------------------------

    def arm(self, place: str) -> None:
        """Have the next process that reaches the place die there."""
        assert place in faults.PLACES
        beside = self._armed.with_suffix(".new")
        beside.write_text(place, encoding="utf-8")
        beside.replace(self._armed)

    def is_armed(self) -> bool:
        """Return whether nobody has reached the place yet."""
        return self._armed.exists()

    def wait_hit(self, place: str) -> None:
        """Wait until a process has died at the place."""
        wait_for(lambda: not self.is_armed(), f"somebody has reached {place}", limit_s=WAIT_S)

    def recover(self, *words: str) -> None:
        """Start the server again where it is what died."""
        assert self.ended() == -signal.SIGKILL
        self.start(*words)
