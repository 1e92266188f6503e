"""Object stores do what every store does, on two real servers over HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest

from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import StoreUnavailable
from serverless_gpu.testing.stores import StoreConformance, pack_key
from tests.integration.environment.stores.conftest import BUCKET
from tests.support.environment.environments_in_stores import capture
from tests.support.environment.servers import SECRET, Line, cut, flip, variables
from tests.support.golden import golden

LARGE = bytes(range(256)) * 4096


class TestMoto(StoreConformance):
    """The one that has ranges."""

    @pytest.fixture
    def store(self, moto_url: str, prefix: str) -> Store:
        """Return the store of a test."""
        return open_store(f"s3://{BUCKET}/{prefix}", variables(moto_url))


class TestRclone(StoreConformance):
    """The one that has none, and checks secrets.

    It writes an object in place, so readers may see a part of it, and writers of different bytes a mixture: whoever
    reads documents and packs notices (`StoreBlobs`) and reads again.
    """

    @pytest.fixture
    def store(self, rclone_url: str, prefix: str) -> Store:
        """Return the store of a test."""
        return open_store(f"s3://{BUCKET}/{prefix}", variables(rclone_url))

    def test_writers_of_one_key_at_once(self, store: Store) -> None:
        """The same bytes from several writers are there when they are done."""
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: store.put({pack_key(LARGE): LARGE}), range(12)))
        assert store.get(pack_key(LARGE)) == LARGE


def test_two_stores_of_one_bucket_do_not_meet(server: str, prefix: str) -> None:
    here, there = (open_store(f"s3://{BUCKET}/{prefix}/{name}", variables(server)) for name in ("a", "ab"))
    here.put({pack_key(b"1"): b"1"})
    assert there.present([pack_key(b"1")]) == frozenset()
    assert [*there.list("packs")] == []


def test_what_is_not_ours_is_not_listed(server: str, prefix: str) -> None:
    store = open_store(f"s3://{BUCKET}/{prefix}", variables(server))
    store.put({pack_key(b"1"): b"1"})
    client = store._connect(10.0, False)  # type: ignore[attr-defined]  # an object that no call of ours could put
    obstore.put(client, "packs/readme.txt", b"not ours")
    assert [stored.key for stored in store.list("packs")] == [pack_key(b"1")]


@pytest.mark.parametrize("server", ["rclone", pytest.param("moto", marks=pytest.mark.long)], indirect=True)
def test_more_objects_than_a_page(server: str, prefix: str) -> None:
    store = open_store(f"s3://{BUCKET}/{prefix}", variables(server))
    keys = [pack_key(b"%d" % number) for number in range(1100)]
    for key in keys:
        store.put({key: b"x"})
    assert sorted(stored.key for stored in store.list("packs")) == sorted(keys)
    assert store.present(keys) == frozenset(keys)
    store.delete(keys)
    assert list(store.list("packs")) == []


def test_a_wrong_secret_says_what_to_check(rclone_url: str, prefix: str) -> None:
    environ = variables(rclone_url, AWS_SECRET_ACCESS_KEY="wrong-but-secret")
    store = open_store(f"s3://{BUCKET}/{prefix}", environ)
    key = pack_key(b"1")
    for call in (
        lambda: store.get(key),
        lambda: store.put({key: b"1"}),
        lambda: store.present([key]),
        lambda: list(store.list("packs")),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert (
            golden("environment.servers.store-s3-refuses", BUCKET=BUCKET, prefix=prefix, rclone_url=rclone_url)
            in caught.value.message
        )
        assert ": 403" in caught.value.message
        assert caught.value.hint == golden("environment.servers.check-aws-access")
        assert "wrong-but-secret" not in repr(caught.value) + str(caught.value)
    with pytest.raises(StoreUnavailable, match="403 SignatureDoesNotMatch"):
        store.put({key: b"1"})


def test_a_bucket_that_does_not_exist(server: str) -> None:
    store = open_store("s3://nowhere/here", variables(server))
    for call in (
        lambda: store.put({pack_key(b"1"): b"1"}),
        lambda: store.get(pack_key(b"1")),
        lambda: list(store.list("packs")),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert caught.value.message == golden("environment.servers.store-s3-nowhere", server=server)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("harm", [cut, flip])
def test_F42_what_is_altered_on_its_way_up_is_sent_again(server: str, prefix: str, harm: object) -> None:
    with Line(server, up=harm, times=2) as line:  # type: ignore[arg-type]  # cut or flip
        StoreBlobs(open_store(f"s3://{BUCKET}/{prefix}", variables(line.url))).write_pack(LARGE)
        assert line.harmed == 2
    direct = open_store(f"s3://{BUCKET}/{prefix}", variables(server))
    assert direct.get(pack_key(LARGE)) == LARGE


@pytest.mark.parametrize("harm", [cut, flip])
def test_F42_what_is_altered_on_its_way_down_is_read_again(server: str, prefix: str, harm: object) -> None:
    digest = StoreBlobs(open_store(f"s3://{BUCKET}/{prefix}", variables(server))).write_pack(LARGE)
    with Line(server, down=harm, times=1) as line:  # type: ignore[arg-type]  # cut or flip
        assert StoreBlobs(open_store(f"s3://{BUCKET}/{prefix}", variables(line.url))).read_pack(digest) == LARGE
        assert line.harmed == 1


def test_a_snapshot_through_a_server(server: str, prefix: str) -> None:
    store = open_store(f"s3://{BUCKET}/{prefix}", variables(server))
    snapshot = capture(StoreBlobs(store), b"a = 1\n", b"b = 2\n")
    again = StoreBlobs(open_store(f"s3://{BUCKET}/{prefix}", variables(server)))
    assert again.read_snapshot(snapshot.address) == snapshot
    assert again.missing_units(snapshot.addresses()) == ()
    assert again.find_snapshot(snapshot.address[:10]) == snapshot.address
