"""The directory store: private, durable, whole under full disks, killed writers and several processes."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from serverless_gpu.environment.stores.base import OBJECT_BYTES_MAX, Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import INCOMING, DirectoryStore, MemoryStore
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentRejected, StorageError, StoreUnavailable
from serverless_gpu.testing import FakeClock
from tests.support.environment.directory_store import DATA, KEY, files
from tests.support.environment.environments_in_stores import capture
from tests.support.golden import golden


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_only_its_owner_can_look_inside(root: Path) -> None:
    old = os.umask(0)
    try:
        capture(StoreBlobs(DirectoryStore(root)), b"1")
    finally:
        os.umask(old)
    paths = [root, *root.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o400}


def test_the_time_of_an_object_is_when_it_was_put(root: Path) -> None:
    clock = FakeClock()
    store = DirectoryStore(root, clock=clock)
    store.put({KEY: DATA})
    first = clock.wall_ns()
    clock.advance(60)
    assert [stored.put_ns for stored in store.list("packs")] == [first]
    store.put({KEY: DATA})
    assert [stored.put_ns for stored in store.list("packs")] == [clock.wall_ns()]


def test_what_killed_writers_left_is_removed_after_a_day(root: Path) -> None:
    store = DirectoryStore(root)
    store.put({KEY: DATA})
    incoming = root / INCOMING
    (incoming / "tmp-left").write_bytes(b"half")
    store.delete([])
    assert [path.name for path in incoming.iterdir()] == ["tmp-left"]
    DirectoryStore(root, leftovers_s=0).delete([])
    assert list(incoming.iterdir()) == []
    assert store.get(KEY) == DATA


def test_what_others_put_there_is_neither_listed_nor_followed(root: Path) -> None:
    store = DirectoryStore(root)
    store.put({KEY: DATA})
    directory = root / "packs" / KEY[6:8]
    secret = root.parent / "secret"
    secret.write_bytes(b"secret")
    planted = f"packs/{KEY[6:8]}{'0' * 62}"
    (directory / planted.rpartition("/")[2]).symlink_to(secret)
    (root / "packs" / "notes.txt").write_bytes(b"notes")
    (directory / ("f" * 64 if KEY[6:8] != "ff" else "0" * 64)).write_bytes(b"at a wrong place")
    assert [stored.key for stored in store.list("packs")] == [KEY]
    assert store.present([planted]) == frozenset()
    with pytest.raises(StoreUnavailable, match="cannot read"):
        store.get(planted)
    os.unlink(directory / planted.rpartition("/")[2])
    os.mkfifo(directory / planted.rpartition("/")[2])
    with pytest.raises(StoreUnavailable, match=re.escape(golden("environment.directory_store.plain-file"))):
        store.get(planted)
    store.put({planted: b"mine"})
    assert store.get(planted) == b"mine"
    assert secret.read_bytes() == b"secret"


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    store = DirectoryStore(blocked / "store")
    with pytest.raises(StoreUnavailable) as caught:
        store.put({KEY: DATA})
    assert caught.value.message == golden("environment.directory_store.cannot-write-store", KEY=KEY, url=store.url)
    assert str(blocked / "store") in caught.value.hint
    with pytest.raises(KeyError):
        store.get(KEY)
    assert store.present([KEY]) == frozenset()
    assert list(store.list("packs")) == []
    store.delete([KEY])


def test_an_object_over_the_limit_is_neither_put_nor_read(root: Path) -> None:
    store = DirectoryStore(root)
    store.put({KEY: b""})
    path = root / "packs" / KEY[6:8] / KEY[6:]
    path.chmod(0o600)
    os.truncate(path, OBJECT_BYTES_MAX + 1)
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.directory_store.range-can-read"))):
        store.get(KEY)
    assert store.get(KEY, OBJECT_BYTES_MAX - 1, 10) == b"\0\0"


# F40 ------------------------------------------------------------------------------------------------------------------


def test_F40_too_little_space_is_said_before_the_first_byte(root: Path) -> None:
    class Small(DirectoryStore):
        def free_bytes(self) -> int | None:
            return len(DATA) - 1

    with pytest.raises(StorageError) as caught:
        Small(root).put({KEY: DATA})
    assert str(caught.value) == golden("environment.directory_store.space-left-store", as_uri=root.as_uri())
    assert files(root) == []
    with pytest.raises(StorageError, match=re.escape(golden("environment.directory_store.bytes-write-10"))):
        MemoryStore(capacity_bytes=10).put({KEY: DATA})


# opening --------------------------------------------------------------------------------------------------------------


def test_what_a_person_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    urls: dict[str, str] = {
        "relative": (tmp_path / "relative").as_uri(),
        "/abs/olute": "file:///abs/olute",
        "~/mine": (tmp_path / "mine").as_uri(),
        "file:///with%20space": "file:///with%20space",
        "file://localhost/x": "file:///x",
        "memory://one": "memory://one",
    }
    opened: dict[str, Store] = {text: open_store(text, {}) for text in urls}
    assert {text: store.url for text, store in opened.items()} == urls
    assert open_store(tmp_path, {}).url == tmp_path.as_uri()
    assert open_store("memory://one", {}) is opened["memory://one"]
    assert open_store("memory://two", {}) is not opened["memory://one"]
    assert list(tmp_path.iterdir()) == []
