"""What nothing refers to goes, a long while later; what a run, an output or a recent run refers to stays."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from serverless_gpu.environment.stores.base import Stored
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.collection import GRACE_S, KEEP_S
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.errors import EnvironmentMissing, StoreUnavailable
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, UserCodeStarted
from serverless_gpu.model.spec import BlobReference, Function
from serverless_gpu.server import environments
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.environments import GarbageCollector
from serverless_gpu.server.records import files, runs
from serverless_gpu.server.records.files import StoredFile
from serverless_gpu.server.storage import blobs
from serverless_gpu.server.storage.blobs import Blobs
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.testing import FakeClock
from tests.support.environment.environments_in_stores import capture
from tests.support.golden import golden
from tests.support.server.made import recomposed
from tests.support.server.stored import T0, add_node, add_people, add_run, new_run, place, tell

pytestmark = pytest.mark.any_database

DAY_S = 24 * 3600


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> DirectoryStore:
    return DirectoryStore(tmp_path / "environments", clock=clock)


@pytest.fixture
def kept(services: Services, store: DirectoryStore, clock: FakeClock, tmp_path: Path) -> Services:
    """Return services whose stores go by the test's clock."""
    parts = Blobs(DirectoryStore(tmp_path / "parts", clock=clock), clock=clock, kept_free_bytes=0)
    return recomposed(services, blobs=parts, environments=EnvironmentStore(store, clock=clock, kept_free_bytes=0))


def put(services: Services, data: bytes) -> str:
    digest = blake3(data).hexdigest()
    services.blobs.put(digest, data)
    return digest


def add_finished(database: Database, at_ns: int, *, snapshot: str = "", parts: tuple[str, ...] = ()) -> str:
    """Write a run that has ended; its payload and its output are parts."""
    called = Function(call=BlobReference(size=len(parts), parts=parts[:1])) if parts else Function()
    new = msgspec.structs.replace(new_run(payload=called), snapshot=snapshot)
    database.write(lambda connection: runs.insert(connection, new, at_ns=at_ns))
    fence = place(database, new.id, at_ns=at_ns)
    for part in parts[1:]:
        output = StoredFile(name="results/0.pkl", size=1, parts=(part,))
        database.write(lambda connection, o=output: files.put(connection, new.id, fence, [o]))  # type: ignore[misc]  # mypy does not type a lambda's default
    tell(database, new.id, UserCodeStarted(), AttemptEnded(Reason.COMPLETED, began=True), at_ns=at_ns)
    return new.id


@pytest.fixture(autouse=True)
def world(database: Database) -> None:
    add_people(database, "alice")
    add_node(database)


def test_what_payloads_of_waiting_runs_and_outputs_are_made_of_is_in_use(kept: Services, database: Database) -> None:
    waits = put(kept, b"payload of one that waits")
    add_run(database, payload=Function(call=BlobReference(size=1, parts=(waits,))))
    over, output = put(kept, b"payload of one that has ended"), put(kept, b"output")
    run_id = add_finished(database, T0, parts=(over, output))
    assert database.read(runs.parts_in_use) == {waits, output}
    payload = database.read(lambda connection: runs.payload_of(connection, run_id))
    assert payload is not None and payload.parts == (over,)
    assert database.read(lambda connection: runs.payload_of(connection, "no such run")) is None


def test_a_snapshot_is_in_use_until_its_last_run_ended_long_ago(database: Database) -> None:
    add_finished(database, T0, snapshot="a" * 64)
    add_finished(database, T0 + 10, snapshot="b" * 64)
    new = msgspec.structs.replace(new_run(), snapshot="c" * 64)
    database.write(lambda connection: runs.insert(connection, new, at_ns=T0 - 10**18))
    for since_ns, expected in ((T0, "abc"), (T0 + 5, "bc"), (T0 + 11, "c")):
        found = database.read(lambda connection, s=since_ns: runs.snapshots_in_use(connection, since_ns=s))  # type: ignore[misc]  # as above
        assert found == {letter * 64 for letter in expected}


def test_parts_and_environments_that_nothing_refers_to_go(
    kept: Services, database: Database, store: DirectoryStore, clock: FakeClock
) -> None:
    documents = StoreBlobs(store, clock=clock)
    used, idle = capture(documents, b"used"), capture(documents, b"idle")
    part, output = put(kept, b"idle"), put(kept, b"output")
    collector = kept.make(GarbageCollector)
    days = (KEEP_S + 3 * GRACE_S) // DAY_S + 2
    add_finished(database, clock.wall_ns() + days * DAY_S * 10**9, snapshot=used.address, parts=(part, output))
    for _ in range(days):
        clock.advance(DAY_S)
        assert collector.tick(clock.boottime_ns()) == clock.boottime_ns() + round(environments.EVERY_S * 1e9)
    assert kept.blobs.missing([part, output]) == (part,)
    kept.environments.need(used.address)
    with pytest.raises(EnvironmentMissing):
        kept.environments.need(idle.address)
    assert StoreBlobs(store).read_unit(*used.addresses()).address in used.addresses()


def test_nothing_is_looked_at_before_it_is_time(kept: Services, clock: FakeClock) -> None:
    collector = dataclasses.replace(kept, database=None).make(GarbageCollector)  # type: ignore[arg-type]  # it is not asked
    due_ns = collector.tick(clock.boottime_ns())
    assert due_ns == clock.boottime_ns() + round(environments.FIRST_S * 1e9)
    clock.advance(environments.FIRST_S - 1)
    assert collector.tick(clock.boottime_ns()) == due_ns


def test_F43_a_store_that_does_not_answer_costs_one_collection_and_a_line(
    kept: Services, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        def list(self, prefix: str) -> Iterator[Stored]:
            raise StoreUnavailable("no answer for 5 minutes")

    away = blobs.Blobs(Away(), clock=clock)
    collector = dataclasses.replace(kept, blobs=away).make(GarbageCollector)
    clock.advance(environments.FIRST_S)
    with caplog.at_level(logging.INFO, logger="serverless_gpu.server.environments"):
        assert collector.tick(clock.boottime_ns()) is not None
    assert [record.getMessage() for record in caplog.records] == [
        golden("server.collecting.parts-collected-answer"),
        golden("server.collecting.environments-collected-kept"),
    ]
