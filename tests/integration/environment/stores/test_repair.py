"""What a store holds altered is no dead end: a restore removes it, and the next capture sends it again (F29, F42)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.capture.snapshot_capture import capture
from serverless_gpu.environment.documents import make_snapshot
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.scan.scan import Scan
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, StoreUnavailable
from serverless_gpu.testing import FakeClock
from tests.support.environment.counting import TINY
from tests.support.environment.made_environments import interpreter
from tests.support.environment.scanned import scan_of, source_of
from tests.support.golden import golden

KINDS = ("snapshots", "units", "packs")


def flip(data: bytes) -> bytes:
    """Return bytes with one bit of the middle the other way round."""
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def cut(data: bytes) -> bytes:
    """Return the first half."""
    return data[: len(data) // 2]


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore("mine") if request.param == "memory" else DirectoryStore(tmp_path / "store")


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    """Return two distributions, one of them in several packs."""
    for name, size in (("alpha", 700), ("beta", 100)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("x = 1\n")
        (tmp_path / name / f"{name}.bin").write_bytes(os.urandom(size))
    found = scan_of({name: source_of(tmp_path / name) for name in ("alpha", "beta")})
    return msgspec.structs.replace(
        found, snapshot=make_snapshot(interpreter(), found.snapshot.roots, found.snapshot.facts)
    )


def fetch(address: str, store: Store, root: Path) -> str:
    """Restore a snapshot on a node that has nothing yet."""
    return restore(address, StoreBlobs(store), UnitCache(root, clock=FakeClock()), way=RestoreMethod(mode="links")).tree


def alter(store: Store, kinds: Iterable[str], change: Callable[[bytes], bytes], *, most: int = 1000) -> list[str]:
    """Alter objects where they lie; return their keys."""
    keys = sorted(stored.key for kind in kinds for stored in store.list(kind))[:most]
    for key in keys:
        store.put({key: change(store.get(key))})
    return keys


@pytest.mark.parametrize("change", [flip, cut, lambda data: b""], ids=["flipped", "cut", "empty"])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids=[*KINDS, "all"])
def test_F29_F42_what_is_altered_in_the_store_is_removed_and_sent_again_by_the_next_capture(
    store: Store, scan: Scan, tmp_path: Path, kinds: tuple[str, ...], change: Callable[[bytes], bytes]
) -> None:
    address = capture(scan, StoreBlobs(store), settings=TINY).snapshot.address
    keys = alter(store, kinds, change)
    assert capture(scan, StoreBlobs(store), settings=TINY).units_new == (), "nobody has looked at it yet"
    alter(store, ["snapshots"] if "snapshots" in kinds else [], change)  # a capture writes it in any case
    with pytest.raises(EnvironmentCorrupt, match="altered") as caught:
        fetch(address, store, tmp_path / "first")
    assert (
        golden("snapshots.snapshot_failures.removed-store") in caught.value.hint
        and "`sgpu env capture`" in caught.value.hint
    )
    if kinds != KINDS:  # units are found only below a snapshot that can be read, packs below units
        assert not store.present(keys)
    again = capture(scan, StoreBlobs(store), settings=TINY)
    assert again.snapshot.address == address
    for _ in kinds[1:]:
        if not _restores(address, store, tmp_path / "first"):
            capture(scan, StoreBlobs(store), settings=TINY)
    tree = fetch(address, store, tmp_path / "second")
    assert next(Path(tree).glob("lib/*/site-packages/alpha.py")).read_text() == "x = 1\n"


def _restores(address: str, store: Store, root: Path) -> bool:
    try:
        fetch(address, store, root)
    except EnvironmentCorrupt:
        return False
    return True


def test_F29_a_pack_that_is_gone_takes_the_unit_with_it(store: Store, scan: Scan, tmp_path: Path) -> None:
    captured = capture(scan, StoreBlobs(store), settings=TINY)
    store.delete([stored.key for stored in store.list("packs")][:1])
    with pytest.raises(EnvironmentMissing, match=golden("environment.mending.pack-store")) as caught:
        fetch(captured.snapshot.address, store, tmp_path / "first")
    assert golden("environment.mending.removed-store-units") in caught.value.hint
    assert len(capture(scan, StoreBlobs(store), settings=TINY).units_new) == 1
    fetch(captured.snapshot.address, store, tmp_path / "second")


def test_F42_what_was_altered_on_its_way_only_is_not_removed(scan: Scan, tmp_path: Path) -> None:
    store = ShortSighted("mine")
    address = capture(scan, StoreBlobs(store), settings=TINY).snapshot.address
    before = {stored.key for kind in KINDS for stored in store.list(kind)}
    store.key = min(key for key in before if key.startswith("packs/"))
    store.altered_times = 4  # a fetch is tried twice, and reads a pack twice
    with pytest.raises(EnvironmentCorrupt):
        fetch(address, store, tmp_path / "first")
    assert {stored.key for kind in KINDS for stored in store.list(kind)} == before
    fetch(address, store, tmp_path / "first")


def test_F42_a_store_that_cannot_be_changed_is_said_with_what_is_to_be_removed(scan: Scan, tmp_path: Path) -> None:
    store = ReadOnly("mine")
    address = capture(scan, StoreBlobs(store), settings=TINY).snapshot.address
    (key,) = alter(store, ["units"], flip, most=1)
    with pytest.raises(EnvironmentCorrupt) as caught:
        fetch(address, store, tmp_path / "first")
    assert caught.value.hint.startswith(
        f"remove {key[:18]} from the store as another user, because this user cannot (not allowed)"
    )


class ShortSighted(MemoryStore):
    """A store of which one object comes altered, a few times."""

    key = ""
    altered_times = 0

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object."""
        data = super().get(key, start, length)
        if self.altered_times and key == self.key:
            self.altered_times -= 1
            return flip(data)
        return data


class ReadOnly(MemoryStore):
    """A store that deletes nothing."""

    def delete(self, keys: Iterable[str] | Collection[str]) -> None:
        """Refuse."""
        raise StoreUnavailable("not allowed")
