"""Copies of a bucket's objects on the server's disk: one read of the bucket for all who ask, and never a wrong byte."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.environment.stores.server_store import ServedStore
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentRejected, NotFound, StoreUnavailable
from serverless_gpu.server.storage import object_cache
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.server.storage.server_stores import DiskLimits, open_storage
from serverless_gpu.testing import FakeClock
from serverless_gpu.testing.stores import pack_key
from tests.support.environment.environments_in_stores import make_pack, make_unit
from tests.support.environment.far_away import KEY, OTHER, PACK, FarAway, files, read, server_on, until
from tests.support.golden import golden
from tests.support.network.shared_bandwidth import FakeBucket
from tests.support.server.listening import app_of, listening


@pytest.fixture
def store() -> FarAway:
    return FarAway()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def environments(store: FarAway, clock: FakeClock, tmp_path: Path) -> EnvironmentStore:
    return server_on(store, tmp_path, clock=clock)


# one read for all who ask ---------------------------------------------------------------------------------------------


def test_who_asks_at_once_shares_one_read_and_later_ones_need_none(
    store: FarAway, environments: EnvironmentStore
) -> None:
    store.put({KEY: PACK})
    store.open.clear()
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(read, environments, KEY, number * 1000) for number in range(8)]
        assert store.asked.wait(60)
        store.open.set()
        assert [future.result() for future in asking] == [PACK[number * 1000 :] for number in range(8)]
    assert read(environments) == PACK
    assert store.got == [KEY]


def test_ranges_and_pieces_are_those_of_the_object(
    store: FarAway, environments: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "PIECE_BYTES", 1000)
    data = PACK[:4_500]
    key = pack_key(data)
    store.put({key: data, pack_key(b""): b""})
    ranges = ((0, 1000), (0, 1001), (500, 3000), (3_500, 1000), (3_500, 5_000), (4_000, 500), (9_000, 10), (0, 0))
    for start, length in ranges:
        assert read(environments, key, start, length) == data[start : start + length], (start, length)
    assert read(environments, key) == data
    assert max(map(len, environments.read(key))) == 1000
    assert list(environments.read(pack_key(b""))) == [b""]


def test_an_object_longer_than_the_first_request_is_whole(
    store: FarAway, environments: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "FIRST_BYTES", len(PACK) // 2)
    store.put({KEY: PACK})
    assert read(environments) == PACK
    assert store.got == [KEY, KEY]


def test_what_is_no_key_is_no_path(store: FarAway, environments: EnvironmentStore, tmp_path: Path) -> None:
    for key in ("packs/../../etc/passwd", "packs/.new-x", "", "units"):
        with pytest.raises(EnvironmentRejected):
            environments.read(key)
    with pytest.raises(EnvironmentRejected):
        environments.read(KEY, -1)
    assert store.got == []
    assert files(tmp_path) == []


def test_what_is_not_there_is_said_to_all_and_looked_for_again(store: FarAway, environments: EnvironmentStore) -> None:
    store.open.clear()
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(read, environments) for _ in range(3)]
        assert store.asked.wait(60)
        store.open.set()
        assert {type(future.exception()) for future in asking} == {NotFound}
    store.put({KEY: PACK})
    assert read(environments) == PACK


def test_a_bucket_that_does_not_answer_is_said_to_all_and_asked_again(
    store: FarAway, environments: EnvironmentStore
) -> None:
    store.put({KEY: PACK})
    store.open.clear()
    store.problem = StoreUnavailable("it is away")
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(read, environments) for _ in range(3)]
        assert store.asked.wait(60)
        until(lambda: len(store.got) == 1)
        store.open.set()
        assert {type(future.exception()) for future in asking} == {StoreUnavailable}
    store.problem = None
    assert read(environments) == PACK


def test_who_waits_for_too_long_is_sent_away_and_comes_again(
    store: FarAway, environments: EnvironmentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "WAIT_S", 0.05)
    store.put({KEY: PACK})
    store.open.clear()
    with ThreadPoolExecutor(1) as pool:
        leads = pool.submit(read, environments)
        assert store.asked.wait(60)
        with pytest.raises(StoreUnavailable, match=re.escape(golden("environment.nearby.way-memory-bucket"))):
            read(environments)
        store.open.set()
        assert leads.result() == PACK
    assert read(environments) == PACK
    assert store.got == [KEY]


def test_behind_a_bucket_that_hangs_nobody_waits_for_the_turns_of_all(
    store: FarAway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "PACKS_AT_ONCE", 1)
    monkeypatch.setattr(object_cache, "TURN_S", 0.05)
    environments = server_on(store, tmp_path)
    document = f"snapshots/{'a' * 64}"
    store.put({KEY: PACK, pack_key(OTHER): OTHER})
    store.open.clear()
    with ThreadPoolExecutor(2) as pool:
        hangs = [pool.submit(read, environments, key) for key in (KEY, document)]
        until(lambda: sorted(store.got) == [KEY, document])  # a document has a turn of its own
        with pytest.raises(StoreUnavailable, match=golden("environment.nearby.slow-packs-waited")):
            read(environments, pack_key(OTHER))
        store.open.set()
        assert hangs[0].result() == PACK
        assert type(hangs[1].exception()) is NotFound
    assert read(environments, pack_key(OTHER)) == OTHER


def test_two_servers_on_one_bucket_read_it_once_each(store: FarAway, tmp_path: Path) -> None:
    store.put({KEY: PACK})
    one, two = server_on(store, tmp_path / "one"), server_on(store, tmp_path / "two")
    for server in (one, two, one, two):
        assert read(server) == PACK
    assert store.got == [KEY, KEY]
    one.delete([KEY])
    assert read(two) == PACK, "its bytes are what its name says, whoever removed it elsewhere"
    with pytest.raises(NotFound):
        one.read(KEY)


def test_a_server_that_starts_again_finds_its_packs_and_removes_halves(
    store: FarAway, environments: EnvironmentStore, tmp_path: Path
) -> None:
    store.put({KEY: PACK, pack_key(OTHER): OTHER})
    read(environments)
    half = tmp_path / "nearby" / "packs" / ".new-half"
    half.write_bytes(b"half")
    again = server_on(store, tmp_path)
    assert read(again) == PACK
    assert read(again, pack_key(OTHER)) == OTHER
    assert store.got == [KEY, pack_key(OTHER)]
    assert not half.exists()


# never a wrong byte ---------------------------------------------------------------------------------------------------


def test_F29_a_copy_that_is_not_what_it_was_is_read_from_the_bucket_again(
    store: FarAway, environments: EnvironmentStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.put({KEY: PACK})
    read(environments)
    (copy,) = (tmp_path / "nearby" / "packs").iterdir()
    for wrong in (PACK[:-1] + bytes([PACK[-1] ^ 1]), PACK[:-1], b""):
        copy.write_bytes(wrong)
        assert read(environments) == PACK
    assert len(store.got) == 4
    assert "removes the copy" in caplog.text and golden("environment.nearby.thrown-away") in caplog.text


def test_F42_what_comes_altered_is_asked_for_once_more(store: FarAway, environments: EnvironmentStore) -> None:
    store.put({KEY: PACK})
    store.altered_times = 1
    assert read(environments) == PACK
    assert store.got == [KEY, KEY]


def test_F42_what_is_altered_in_the_bucket_is_named_and_not_kept(
    store: FarAway, environments: EnvironmentStore, tmp_path: Path
) -> None:
    store.put({KEY: OTHER})
    for tries in (2, 4):
        with pytest.raises(EnvironmentCorrupt) as caught:
            environments.read(KEY)
        assert len(store.got) == tries
    assert str(caught.value).splitlines()[0] == golden("environment.nearby.pack-store-memory", KEY=KEY[6:18])
    assert files(tmp_path) == []
    store.put({KEY: PACK})
    assert read(environments) == PACK


def test_F42_a_node_is_told_which_object_of_the_bucket_is_altered(tmp_path: Path) -> None:
    with FakeBucket() as bucket:
        storage = open_storage(tmp_path, "s3://b/p", bucket.variables(), clock=SystemClock())
        bucket.objects[f"/b/p/{KEY}"] = OTHER
        with listening(app_of(storage)) as url:
            served = ServedStore(f"sgpu+{url}", "agent", bound_s=10.0)
            with pytest.raises(EnvironmentCorrupt, match=golden("environment.nearby.pack-store-s3", KEY=KEY[6:18])):
                StoreBlobs(served).read_pack(KEY[6:])
            bucket.objects[f"/b/p/{KEY}"] = PACK
            assert StoreBlobs(served).read_pack(KEY[6:]) == PACK
            served.close()
        assert bucket.reads("packs") == {KEY[6:]: 3}


# units and snapshots --------------------------------------------------------------------------------------------------


@pytest.fixture
def unit(store: FarAway) -> tuple[str, bytes, bytes]:
    """Return a unit's key and bytes, and bytes of the same unit that point at another pack; both are in the store."""
    packs = [make_pack(b"content"), make_pack(b"content") + b"more"]
    good, other = (make_unit(b"content", pack_key(pack)[6:]) for pack in packs)
    key = f"units/{good.address}"
    store.put({**{pack_key(pack): pack for pack in packs}, key: encode(good)})
    assert encode(good) != encode(other)
    return key, encode(good), encode(other)


def test_a_unit_is_read_once_for_ten_minutes(
    store: FarAway, environments: EnvironmentStore, clock: FakeClock, unit: tuple[str, bytes, bytes]
) -> None:
    key, first, second = unit
    assert read(environments, key) == read(environments, key) == first
    store.put({key: second})  # by another server
    assert read(environments, key) == first
    clock.advance(object_cache.DOCUMENT_S + 1)
    assert read(environments, key) == second
    assert store.got == [key, key]


def test_a_unit_that_is_put_anew_or_removed_here_is_not_taken_from_a_copy(
    store: FarAway, environments: EnvironmentStore, unit: tuple[str, bytes, bytes]
) -> None:
    key, first, second = unit
    assert read(environments, key) == first
    store.delete([f"packs/{name}" for name in (stored.key[6:] for stored in store.list("packs"))])
    store.put({pack_key(make_pack(b"content") + b"more"): make_pack(b"content") + b"more"})
    environments.put(key, second)  # the one there points at what is gone
    assert read(environments, key) == second
    environments.delete([key])
    with pytest.raises(NotFound):
        environments.read(key)


def test_a_pack_that_is_missed_has_units_read_again(
    store: FarAway, environments: EnvironmentStore, unit: tuple[str, bytes, bytes]
) -> None:
    key, first, second = unit
    assert read(environments, key) == first
    store.put({key: second})
    store.delete([pack_key(make_pack(b"content"))])
    with pytest.raises(NotFound):
        environments.read(pack_key(make_pack(b"content")))
    assert read(environments, key) == second


def test_a_unit_that_breaks_a_rule_is_passed_on_and_not_kept(
    store: FarAway, environments: EnvironmentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(data: bytes, address: str) -> None:
        raise EnvironmentRejected("a rule")

    monkeypatch.setattr("serverless_gpu.server.storage.environment_store.unit_of", refuse)
    store.put({f"units/{'a' * 64}": b"by another version"})
    assert read(environments, f"units/{'a' * 64}") == b"by another version"
    assert files(tmp_path) == []


def test_a_store_that_is_a_directory_has_no_copies(tmp_path: Path) -> None:
    storage = open_storage(tmp_path, "", {}, clock=SystemClock(), room=DiskLimits(kept_free_bytes=0))
    storage.environments.put(KEY, PACK)
    assert read(storage.environments) == PACK
    assert not (tmp_path / "nearby").exists()


def test_the_bucket_of_these_tests_does_what_a_store_needs() -> None:
    with FakeBucket() as bucket:
        store = open_store("s3://b/p", bucket.variables())
        store.put({KEY: PACK, pack_key(OTHER): OTHER})
        assert store.present([KEY, pack_key(b"absent")]) == {KEY}
        assert store.get(KEY, 1000, 10) == PACK[1000:1010]
        assert store.get(KEY, len(PACK) + 1, 10) == b""
        store.delete([KEY, pack_key(b"absent")])
        assert store.present([KEY, pack_key(OTHER)]) == {pack_key(OTHER)}
        with pytest.raises(KeyError):
            store.get(KEY)


def test_copies_can_be_switched_off(tmp_path: Path) -> None:
    with FakeBucket() as bucket:
        storage = open_storage(
            tmp_path, "s3://b/p", bucket.variables(), clock=SystemClock(), room=DiskLimits(nearby_bytes_max=0)
        )
        storage.environments.put(KEY, PACK)
        assert read(storage.environments) == read(storage.environments) == PACK
        assert bucket.reads("packs") == {KEY[6:]: 2}
    assert files(tmp_path) == []
