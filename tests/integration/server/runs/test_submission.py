"""Asking for a run: what is refused, what is kept, and that asking twice is asking once."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.errors import (
    EnvironmentMissing,
    IdempotencyConflict,
    InvalidValue,
    NotFound,
    ServerlessGpuError,
    TooLarge,
)
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.spec import BlobReference, Command, Function, Kernel, Resources, RunSpec
from serverless_gpu.model.usage_policy import MAX_RUN_S
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, pools, runs
from serverless_gpu.server.runs import submission
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.base import INLINE_BYTES_MAX
from serverless_gpu.wire.runs import RunRequest
from tests.support.environment.environments_in_stores import make_unit, snapshot_of
from tests.support.golden import golden
from tests.support.server.made import made_services
from tests.support.server.stored import add_people, rows, stored
from tests.support.server.submitting import ALICE, BOB, CONTEXT, LIVE, request


@pytest.fixture
def services(database: Database, tmp_path: Path) -> Services:
    add_people(database, "alice", "bob")
    return made_services(database, tmp_path, clock=FakeClock(), runs_waiting_max=3)


def test_an_accepted_run_is_written_once_with_its_event_and_who_asked(services: Services, database: Database) -> None:
    bell = services.hub.version(SCHEDULER)
    asked = request(name="fit", team="search", tags={"a": "b"})
    view = services.submissions.submit(ALICE, asked)
    assert (view.id, view.state, view.owner, view.team, view.name) == (asked.id, State.QUEUED, "alice", "search", "fit")
    assert not view.deduplicated and not view.finished
    assert view.spec == msgspec.structs.replace(asked.spec, max_run_s=MAX_RUN_S)
    assert [(row["seq"], row["state"]) for row in rows(database, tables.events)] == [(1, "QUEUED")]
    (entry,) = database.read(audit.entries)
    assert (entry.principal, entry.action, entry.subject, entry.token) == ("alice", "run.create", asked.id, "token-1")
    assert services.hub.version(SCHEDULER) != bell


def test_what_the_caller_s_variables_are_cannot_be_read_in_the_database(services: Services, database: Database) -> None:
    asked = request()
    services.submissions.submit(ALICE, asked)
    assert "s3cret-value" not in repr(rows(database, tables.runs))
    payload = database.read(lambda connection: runs.payload(connection, asked.id))
    assert payload is not None and payload.call == b"call"
    assert services.sealer.unseal(payload.context_sealed, about=asked.id) == bytes(CONTEXT)


def test_the_same_request_again_is_the_same_run(services: Services, database: Database) -> None:
    asked = request()
    services.submissions.submit(ALICE, asked)
    again = services.submissions.submit(ALICE, msgspec.json.decode(msgspec.json.encode(asked), type=RunRequest))
    assert again.deduplicated and again.id == asked.id
    assert len(rows(database, tables.runs)) == len(rows(database, tables.events)) == 1


@pytest.mark.parametrize(
    ("who", "change"),
    [
        (ALICE, {"call": b"another"}),
        (ALICE, {"context": msgspec.Raw(b'{"environ":{}}')}),
        (ALICE, {"spec": RunSpec(remote=True, retries=1)}),
        (ALICE, {"target": msgspec.structs.replace(LIVE, machine="m2")}),
        (BOB, {}),
    ],
)
def test_another_request_of_the_same_identifier_is_a_conflict(
    services: Services, database: Database, who: Caller, change: dict[str, Any]
) -> None:
    asked = request()
    services.submissions.submit(ALICE, asked)
    with pytest.raises(IdempotencyConflict, match=asked.id):
        services.submissions.submit(who, msgspec.structs.replace(asked, **change))
    assert stored(database, asked.id).owner == "alice"
    assert len(rows(database, tables.audit)) == 1


def test_F60_fifty_at_once_are_one_run(services: Services, database: Database) -> None:
    asked = request()
    together = threading.Barrier(50)

    def ask(_: int) -> bool:
        together.wait(30)
        return services.submissions.submit(ALICE, asked).deduplicated

    with ThreadPoolExecutor(50) as pool:
        assert sorted(pool.map(ask, range(50))) == [False] + [True] * 49
    for table in (tables.runs, tables.events, tables.audit):
        assert len(rows(database, table)) == 1


def test_F60_two_different_ones_at_once_are_one_run_and_one_conflict(services: Services, database: Database) -> None:
    asked = request()
    other = msgspec.structs.replace(asked, call=b"another")
    together = threading.Barrier(2)

    def ask(one: RunRequest) -> str:
        together.wait(30)
        try:
            return services.submissions.submit(ALICE, one).state
        except IdempotencyConflict as error:
            return error.code

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(ask, [asked, other])) == ["QUEUED", "idempotency_conflict"]
    assert len(rows(database, tables.runs)) == 1


def test_no_more_runs_of_one_owner_wait_than_may(services: Services) -> None:
    for _ in range(3):
        services.submissions.submit(ALICE, request())
    with pytest.raises(TooLarge, match=re.escape(golden("server.submitting.alice-runs-wait"))) as caught:
        services.submissions.submit(ALICE, request())
    assert "cancel waiting runs" in caught.value.hint
    services.submissions.submit(BOB, request())


def test_a_pool_has_to_be_there(services: Services, database: Database) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.submitting.pool-big"))):
        services.submissions.submit(ALICE, request(pool="big"))
    database.write(lambda connection: pools.ensure(connection, "big", at_ns=1))
    assert services.submissions.submit(ALICE, request(pool="big")).pool == "big"


def test_a_call_that_is_a_blob_has_to_be_there(services: Services) -> None:
    data = b"x" * 100
    digest = blake3(data).hexdigest()
    asked = request(call=None, payload=Function(call=BlobReference(size=100, parts=(digest,))))
    with pytest.raises(NotFound, match=f"{digest[:12]}"):
        services.submissions.submit(ALICE, asked)
    services.blobs.put(digest, data)
    assert services.submissions.submit(ALICE, asked).state is State.QUEUED


def test_a_command_needs_no_call(services: Services) -> None:
    view = services.submissions.submit(ALICE, request(call=None, payload=Command(argv=("python", "train.py"))))
    assert view.spec.payload == Command(argv=("python", "train.py"))


def test_a_captured_environment_runs_anywhere(services: Services) -> None:
    snapshot = snapshot_of(make_unit(b"content", "a" * 64))
    asked = request(snapshot=snapshot.address)
    asked = msgspec.structs.replace(asked, target=msgspec.structs.replace(LIVE, machine=""))
    with pytest.raises(EnvironmentMissing, match=snapshot.address[:12]):
        services.submissions.submit(ALICE, asked)
    services.environments.put(f"snapshots/{snapshot.address}", encode(snapshot))
    assert services.submissions.submit(ALICE, asked).snapshot == snapshot.address


REFUSED: dict[str, tuple[Callable[[], RunRequest], type[ServerlessGpuError], str]] = {
    "kernel": (lambda: request(call=None, payload=Kernel()), InvalidValue, "notebook kernels cannot run on a server"),
    "id": (lambda: request("../../etc"), InvalidValue, "is not a valid run identifier"),
    "no call": (lambda: request(call=None), InvalidValue, "either with the request or as a blob"),
    "two calls": (
        lambda: request(payload=Function(call=BlobReference(size=0, parts=()))),
        InvalidValue,
        "either with the request or as a blob",
    ),
    "large call": (
        lambda: request(call=b"x" * (INLINE_BYTES_MAX + 1)),
        TooLarge,
        "the pickled call in the request has",
    ),
    "no blob": (
        lambda: request(call=None, payload=Function(call=BlobReference(size=10, parts=()))),
        InvalidValue,
        "parts",
    ),
    "command with call": (
        lambda: request(payload=Command(argv=("ls",))),
        InvalidValue,
        "must not contain a pickled call",
    ),
    "empty command": (lambda: request(call=None, payload=Command(argv=())), InvalidValue, "needs a program"),
    "zero byte": (lambda: request(call=None, payload=Command(argv=("a\0b",))), InvalidValue, "zero byte"),
    "team": (lambda: request(team="others"), InvalidValue, "alice is not a member of team 'others'"),
    "secret": (lambda: request(secrets=("../TOKEN",)), InvalidValue, "a secret cannot be named '../TOKEN'"),
    "secrets": (lambda: request(secrets=("TOKEN",) * 2), InvalidValue, "names a secret twice"),
    "variable": (
        lambda: request(secrets=("A",), secret_variables={"A": "SGPU_X"}),
        InvalidValue,
        "cannot be the variable",
    ),
    "name": (lambda: request(name="x" * 257), InvalidValue, "name has 257 characters"),
    "control": (lambda: request(name="a\x1b[2J"), InvalidValue, "control characters"),
    "bidi": (lambda: request(name="a\u202eb"), InvalidValue, "control characters"),
    "zero": (lambda: request(tags={"a": "\0"}), InvalidValue, "control characters"),
    "tags": (lambda: request(tags={str(n): "" for n in range(65)}), TooLarge, "65 tags"),
    "tag": (lambda: request(tags={"k": "v" * 257}), InvalidValue, "257 characters"),
    "gpus": (lambda: request(resources=Resources(gpus=0)), InvalidValue, "gpus must be between"),
    "retries": (lambda: request(retries=101), InvalidValue, "retries must be between"),
    "timeout": (lambda: request(timeout_s=float("nan")), InvalidValue, "timeout must be between"),
    "grace": (lambda: request(grace_s=-1.0), InvalidValue, "grace must be between"),
    "version": (lambda: request(spec_version=99), InvalidValue, "version 99"),
    "client": (lambda: msgspec.structs.replace(request(), version="x" * 33), InvalidValue, "33 characters"),
    "snapshot": (lambda: request(snapshot="../" * 10), InvalidValue, "not the address of a snapshot"),
    "machine": (
        lambda: msgspec.structs.replace(request(), target=msgspec.structs.replace(LIVE, machine="")),
        InvalidValue,
        "need the machine of these files",
    ),
    "live with snapshot": (
        lambda: msgspec.structs.replace(request(), snapshot="a" * 64),
        InvalidValue,
        "and no snapshot",
    ),
    "context": (
        lambda: msgspec.structs.replace(request(), context=msgspec.Raw(b"[]")),
        InvalidValue,
        "context is not a JSON object",
    ),
    "large context": (
        lambda: msgspec.structs.replace(request(), context=msgspec.Raw(b'{"a":"' + b"x" * (2 << 20) + b'"}')),
        TooLarge,
        "environment variables",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name_and_nothing_is_written(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        submission.check(make(), ALICE)


def test_submitting_checks_before_it_writes(services: Services, database: Database) -> None:
    with pytest.raises(InvalidValue):
        services.submissions.submit(ALICE, request(team="others"))
    assert rows(database, tables.runs) == []
