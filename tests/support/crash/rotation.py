"""Helpers of the tests of rotation that other tests use as well."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.server.core.server_key import Keys, Sealer, read_keys, sha256
from serverless_gpu.server.core.settings import Settings, read_settings
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.identity.bootstrap import NODE, first_tokens
from serverless_gpu.server.lifecycle.transitions import place
from serverless_gpu.server.operations import rotation
from serverless_gpu.server.records import audit, principals, runs, stored_secrets
from serverless_gpu.server.records.attempts import NewAttempt
from serverless_gpu.server.records.crews import NewCrew
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.server.records.stored_secrets import ChangedBy, SecretOwner
from serverless_gpu.wire.access import PrincipalRequest
from tests.support.server.agents import hello
from tests.support.server.stored import T0, add_node, new_run

PLACE = "between_rotation_steps"
VALUE = b"hunter2"


class Killed(BaseException):
    """In place of a signal."""


class Server:
    """A server's directory and database as `sgpu up` left them, and what of it was known before."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings, self._monkeypatch = settings, monkeypatch
        directory = settings.directory
        directory.mkdir(parents=True)
        with self.database() as database:
            database.migrate()
            self.first = first_tokens(database, directory, login="ann", now_ns=T0)
            self.keys, self.alice = read_keys(directory), principals.new_secret()
            sealer = Sealer(self.keys.sealing)
            add_node(database, owner=NODE)

            def work(connection: sa.Connection) -> None:
                said = {"hello_json": msgspec.json.encode(hello()).decode()}
                connection.execute(tables.nodes.update().values(said))
                principals.create_principal(connection, PrincipalRequest(name="alice"), now_ns=T0)
                principals.create_token(connection, NewToken(principal="alice"), secret=self.alice, now_ns=T0)
                stored_secrets.put(
                    connection, sealer, SecretOwner("user", "alice"), "HF", VALUE, ChangedBy("alice", T0)
                )

            database.write(work)
            self.waiting, self.running = self._run(database, sealer), self._run(database, sealer)
            self.attempt = self.keys.attempt_token(self.running, 1)

            def start(connection: sa.Connection) -> None:
                run = runs.find(connection, self.running)
                assert run is not None
                crew = NewCrew(
                    number=0,
                    node_id="node-1",
                    node="n1",
                    boot_id="boot-1",
                    first_rank=0,
                    gpus=1,
                    token_sha256=sha256(self.attempt),
                    grace_s=900.0,
                )
                new = NewAttempt(gpu_type="CPU", world_size=1, num_nodes=1)
                place(connection, run, new=new, on=[crew], at_ns=T0)

            database.write(start)

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        with contextlib.closing(Database(self.settings.database, clock=SystemClock())) as opened:
            yield opened

    def copied(self, home: Path) -> Server:
        """Return the same server in another home."""
        shutil.copytree(self.settings.home, home)
        other = copy.copy(self)
        other.settings = read_settings(home, {"port": 0, "node": False})
        return other

    def rotate(self, *, killed_at: int = 0) -> rotation.Rotated:
        """Rotate, or be killed at the n-th place."""
        passed = 0

        def crash(_place: str) -> None:
            nonlocal passed
            passed += 1
            if passed == killed_at:
                raise Killed

        self._monkeypatch.setenv(faults.VARIABLE, PLACE)
        self._monkeypatch.setattr(faults, "crash", crash)
        try:
            return rotation.rotate(self.settings, clock=SystemClock(), login="ann")
        finally:
            self._monkeypatch.delenv(faults.VARIABLE)

    def check(self) -> None:
        """Require that nothing of before is good, and that everything is there."""
        keys = read_keys(self.settings.directory)
        sealer = Sealer(keys.sealing)
        names = {path.name for path in self.settings.directory.iterdir()}
        assert not names & {rotation.MARK, rotation.NEXT_KEY}
        with self.database() as database:
            for secret in (self.first.token, self.first.node_token, self.alice, self.attempt, self._forged()):
                assert not self._is_good(database, secret, keys), secret[:10]
            assert self._is_good(database, keys.attempt_token(self.running, 1), keys)
            for name in ("token", "node.token"):
                assert self._is_good(database, (self.settings.directory / name).read_text().strip(), keys)
            assert database.read(lambda connection: stored_secrets.sealed_by_another(connection, sealer)) == []
            for run_id in (self.waiting, self.running):
                payload = database.read(functools.partial(runs.payload, run_id=run_id))
                assert payload is not None and sealer.unseal(payload.context_sealed, about=run_id) == b"{}"
            sealed = database.read(lambda connection: connection.scalar(sa.select(tables.secrets.c.sealed)))
            assert sealed is not None and sealer.unseal(sealed, about="secret:user:alice:HF:1") == VALUE
            entries = database.read(lambda connection: audit.entries(connection, limit=200))
            steps = [each.detail["step"] for each in entries if each.action == "server.rotate"]
            assert set(steps) >= {"secrets", "key", "attempts", "tokens", "files", "done"} and steps[-1] == "done"
            assert sum(each.action == "token.revoke" for each in entries) == 3

    def _forged(self) -> str:
        until_s = SystemClock().wall_ns() // 10**9 + 600
        return self.keys.attempt_token(self.running, 1, until_s=until_s)

    @staticmethod
    def _is_good(database: Database, secret: str, keys: Keys) -> bool:
        now_ns = SystemClock().wall_ns()
        try:
            database.read(lambda connection: principals.authenticate(connection, secret, now_ns=now_ns, keys=keys))
        except NotAuthenticated:
            return False
        return True

    @staticmethod
    def _run(database: Database, sealer: Sealer) -> str:
        new = new_run(owner="alice")
        new = msgspec.structs.replace(new, context_sealed=sealer.seal(b"{}", about=new.id))
        database.write(lambda connection: runs.insert(connection, new, at_ns=T0))
        return new.id


def made(home: Path, monkeypatch: pytest.MonkeyPatch, database: str | None = None) -> Server:
    return Server(read_settings(home, {"port": 0, "node": False, "database": database}), monkeypatch)
