"""A server in front of a bucket: what it keeps there, and what its clients see when the bucket has a bad day."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.server_store import ServedStore
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import StoreUnavailable
from serverless_gpu.model.spec import BlobReference
from serverless_gpu.server.storage import server_stores
from serverless_gpu.server.storage.server_stores import Storage, open_storage
from serverless_gpu.testing.stores import StoreConformance
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.server_status import Health
from tests.integration.environment.stores.conftest import BUCKET
from tests.support.environment.environments_in_stores import capture
from tests.support.environment.servers import Reply, Scripted, variables
from tests.support.server.listening import app_of, listening

DATA = random.Random(1).randbytes(100_000)
DIGEST = blake3(DATA).hexdigest()


def storage_at(endpoint: str, prefix: str, directory: Path) -> Storage:
    return open_storage(directory, f"s3://{BUCKET}/{prefix}", variables(endpoint), clock=SystemClock())


class TestBehindAServer(StoreConformance):
    """Over HTTP, in front of a bucket."""

    @pytest.fixture
    def store(self, moto_url: str, prefix: str, tmp_path: Path) -> Iterator[Store]:
        """Return the store of a test."""
        with listening(app_of(storage_at(moto_url, prefix, tmp_path))) as url:
            served = ServedStore(f"sgpu+{url}", "operator")
            yield served
            served.close()


def test_blobs_and_environments_lie_in_the_bucket_beside_each_other(server: str, prefix: str, tmp_path: Path) -> None:
    storage = storage_at(server, prefix, tmp_path)
    storage.blobs.put(DIGEST, DATA)
    with listening(app_of(storage)) as url:
        served = ServedStore(f"sgpu+{url}", "member")
        snapshot = capture(StoreBlobs(served), b"one")
        served.close()
    again = storage_at(server, prefix, tmp_path)
    assert b"".join(again.blobs.read(BlobReference(size=len(DATA), parts=(DIGEST,)))) == DATA
    assert again.blobs.missing([DIGEST, "0" * 64]) == ("0" * 64,)
    again.environments.need(snapshot.address)
    bucket = open_store(f"s3://{BUCKET}/{prefix}", variables(server))
    assert DIGEST not in {stored.key.partition("/")[2] for stored in bucket.list("packs")}
    there = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.parent for path in there] == [tmp_path / "nearby" / "packs"], "a copy, for nodes"


def test_F43_errors_of_the_bucket_that_pass_are_seen_by_nobody(tmp_path: Path) -> None:
    with Scripted(Reply(503), Reply(500), Reply(429), Reply(200)) as bucket:
        with listening(app_of(storage_at(bucket.url, "p", tmp_path))) as url:
            connection = Connection(url, "member")
            connection.put(f"/blobs/{DIGEST}", DATA)
            connection.close()
        assert len(bucket.asked) == 4
        assert all(asked.startswith("PUT") and DIGEST in asked for asked in bucket.asked)


def test_F43_what_was_just_put_and_is_said_to_be_absent_is_asked_for_again(tmp_path: Path) -> None:
    with Scripted(Reply(404), Reply(404), Reply(200, DATA)) as bucket:
        assert storage_at(bucket.url, "p", tmp_path).blobs.get(DIGEST) == DATA


def test_F43_a_bucket_that_does_not_answer_is_a_503_while_everything_else_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_stores, "STORE_S", 4.0)
    with Scripted(Reply(hold=True)) as bucket, listening(app_of(storage_at(bucket.url, "p", tmp_path))) as url:
        failed: list[BaseException] = []

        def put() -> None:
            connection = Connection(url, "member")
            try:
                connection.put(f"/blobs/{DIGEST}", DATA)
            except StoreUnavailable as error:
                failed.append(error)
            finally:
                connection.close()

        putting = [threading.Thread(target=put) for _ in range(45)]  # more than any pool of threads has
        for thread in putting:
            thread.start()
        while len(bucket.asked) < 32:
            time.sleep(0.01)
        other = Connection(url, "member")
        assert other.ask("GET", "/health", answer=Health).ok
        assert failed == [], "it was answered while all of them wait"
        other.close()
        for thread in putting:
            thread.join(60)
        assert len(failed) == 45


def test_F43_who_sends_waits_with_patience_for_a_store_that_comes_back(tmp_path: Path) -> None:
    """The server gives up long before the client does; what the client sends again is what it sent before."""
    with Scripted(Reply(403), Reply(403), Reply(200)) as bucket:
        storage = storage_at(bucket.url, "p", tmp_path)
        with listening(app_of(storage)) as url:
            connection = Connection(url, "member", patience_s=30.0)
            connection.put(f"/blobs/{DIGEST}", DATA)
            connection.close()
        assert len(bucket.asked) == 3
