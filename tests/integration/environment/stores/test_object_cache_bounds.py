"""Copies of a bucket's objects are bounded, give way to others, and are never missed."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.server.storage import object_cache
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.testing import FakeClock
from serverless_gpu.testing.stores import pack_key
from tests.support.environment.far_away import KEY, OTHER, PACK, FarAway, files, read, server_on, until
from tests.support.golden import golden
from tests.support.small_disks import small_disk


@pytest.fixture
def store() -> FarAway:
    return FarAway()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def environments(store: FarAway, clock: FakeClock, tmp_path: Path) -> EnvironmentStore:
    return server_on(store, tmp_path, clock=clock)


def packs(count: int) -> dict[str, bytes]:
    data = [random.Random(number).randbytes(100_000) for number in range(count)]
    return {pack_key(each): each for each in data}


def test_what_was_not_asked_for_longest_goes_first(store: FarAway, tmp_path: Path) -> None:
    objects = packs(4)
    first, second, third, fourth = objects
    store.put(objects)
    environments = server_on(store, tmp_path, bytes_max=300_000)
    for key in (first, second, third, first, fourth):
        assert read(environments, key) == objects[key]
    assert files(tmp_path) == sorted(key[6:] for key in (first, third, fourth))
    reading = environments.read(third)
    for key in (second, first, fourth):
        read(environments, key)
    assert b"".join(reading) == objects[third], "who reads a copy that goes reads to its end"


def test_what_is_larger_than_all_copies_may_be_is_passed_on(store: FarAway, tmp_path: Path) -> None:
    store.put({KEY: PACK, pack_key(b"small"): b"small"})
    environments = server_on(store, tmp_path, bytes_max=1000)
    assert read(environments, pack_key(b"small")) == b"small"
    assert read(environments) == PACK
    assert files(tmp_path) == [pack_key(b"small")[6:]], "nothing goes for what cannot stay"


def test_a_copy_that_has_to_give_way_while_it_is_written_is_not_there(
    store: FarAway, environments: EnvironmentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, opened = environments._nearby, object_cache.KeptFile
    assert kept is not None

    def open_and_give_way(path: Path) -> object_cache.KeptFile:
        monkeypatch.setattr(kept, "bytes_max", 0)
        kept.tend()
        return opened(path)

    store.put({KEY: PACK, pack_key(OTHER): OTHER})
    assert read(environments, pack_key(OTHER)) == OTHER
    with monkeypatch.context() as patched:
        patched.setattr(object_cache, "KeptFile", open_and_give_way)
        assert read(environments) == PACK
    assert files(tmp_path) == []


def test_a_place_that_cannot_be_used_costs_copies_and_nothing_else(
    store: FarAway, environments: EnvironmentStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nearby").write_text("a file")
    store.put({KEY: PACK})
    assert read(environments) == read(environments) == PACK
    assert store.got == [KEY, KEY]
    assert len([line for line in caplog.messages if "cannot keep copies" in line]) == 1


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk("8m") as place:
        yield place


def test_F40_copies_give_way_to_others_and_a_full_disk_keeps_none(store: FarAway, disk: Path) -> None:
    objects = packs(20)
    store.put(objects)
    environments = server_on(store, disk)
    for key in objects:
        assert read(environments, key) == objects[key]
    assert len(files(disk)) == 20
    (disk / "of others").write_bytes(bytes(6_200_000))
    environments.tend()
    status = os.statvfs(disk)
    assert status.f_bavail * status.f_frsize >= status.f_blocks * status.f_frsize // 20
    assert 1 < len(files(disk)) < 20


def test_F40_a_disk_that_others_have_filled_gets_no_copies(store: FarAway, disk: Path) -> None:
    (disk / "of others").write_bytes(bytes(7_900_000))
    store.put({KEY: PACK})
    assert read(server_on(store, disk)) == PACK
    assert files(disk) == ["of others"]


def test_F40_a_disk_that_fills_while_a_copy_is_written_is_said_once(
    store: FarAway, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(object_cache, "free_bytes", lambda place: None)  # as some file systems say
    (disk / "of others").write_bytes(bytes(8_200_000))
    store.put({KEY: PACK, pack_key(OTHER): OTHER})
    environments = server_on(store, disk)
    with caplog.at_level(logging.WARNING):
        assert read(environments) == PACK
        assert read(environments, pack_key(OTHER)) == OTHER
    assert files(disk) == ["of others"]
    assert [record.getMessage() for record in caplog.records] == [
        golden("environment.nearby_room.copies-memory-bucket", disk=disk)
    ]


def test_F40_who_waits_shares_what_cannot_be_kept(
    store: FarAway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[float | None] = []

    class Watched(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            waiting.append(timeout)
            return super().result(timeout)

    monkeypatch.setattr(object_cache, "Future", Watched)
    store.put({KEY: PACK})
    store.open.clear()
    environments = server_on(store, tmp_path, bytes_max=1000)
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(read, environments) for _ in range(8)]
        assert store.asked.wait(60)
        until(lambda: len(waiting) == 7)  # all but who asked first
        store.open.set()
        assert all(future.result() == PACK for future in asking)
    assert store.got == [KEY]
