"""Garbage collection: what goes, when, what never does, and what happens when it is interrupted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from serverless_gpu.environment.documents import ProgressPoint, Snapshot
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.environment.stores.collection import CollectionResult, Tally, collect
from serverless_gpu.environment.stores.condemned_objects import COLLECTOR, CONDEMNED, CondemnedList, read_condemned
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.errors import EnvironmentMissing, EnvironmentRejected, StoreUnavailable
from serverless_gpu.testing import FakeClock
from tests.support.environment.environments_in_stores import capture, make_pack, make_unit, snapshot_of
from tests.support.golden import golden

KEEP_S, GRACE_S = 1000, 100
HOUR_S = 3600


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Store:
    if request.param == "memory":
        return MemoryStore(clock=clock)
    return DirectoryStore(tmp_path / "store", clock=clock)


def run(store: Store, clock: FakeClock, *in_use: Snapshot, dry_run: bool = False) -> CollectionResult:
    addresses = [snapshot.address for snapshot in in_use]
    return collect(StoreBlobs(store, clock=clock), in_use=addresses, keep_s=KEEP_S, grace_s=GRACE_S, dry_run=dry_run)


def everything(store: Store) -> dict[str, bytes]:
    return {
        stored.key: store.get(stored.key)
        for kind in ("snapshots", "units", "packs", "gc")
        for stored in store.list(kind)
    }


def is_whole(store: Store, snapshot: Snapshot) -> bool:
    blobs = StoreBlobs(store)
    try:
        read = blobs.read_snapshot(snapshot.address)
        packs = [digest for address in read.addresses() for digest in blobs.read_unit(address).packs]
        return all(blobs.read_pack(digest) for digest in packs)
    except EnvironmentMissing:
        return False


def test_what_nobody_needs_is_condemned_and_then_deleted(store: Store, clock: FakeClock) -> None:
    old = capture(StoreBlobs(store, clock=clock), b"shared", b"only old")
    clock.advance(KEEP_S - 1)
    new = capture(StoreBlobs(store, clock=clock), b"shared", b"only new")
    before = sum(len(data) for data in everything(store).values())

    first = run(store, clock)
    assert first == CollectionResult(kept=Tally(snapshots=2, units=3, packs=3, bytes=before))
    clock.advance(1)
    second = run(store, clock)
    assert (second.condemned.snapshots, second.condemned.units, second.condemned.packs) == (1, 1, 1)
    assert set(second.condemned_keys) == {sentence.key for sentence in read_condemned(store).entries}
    assert second.deleted == Tally()
    assert is_whole(store, old)

    clock.advance(GRACE_S - 1)
    third = run(store, clock)
    assert third.waiting == second.condemned
    assert third.deleted == third.condemned == Tally()

    clock.advance(1)
    fourth = run(store, clock)
    assert fourth.deleted == second.condemned
    assert set(fourth.deleted_keys) == set(second.condemned_keys)
    assert fourth.kept.bytes + fourth.deleted.bytes == before
    assert fourth.kept.bytes == sum(len(data) for key, data in everything(store).items() if key != CONDEMNED)
    assert is_whole(store, new)
    assert not store.present([f"snapshots/{old.address}"])
    assert read_condemned(store) == CondemnedList()
    assert [stored.key for stored in store.list("gc")] == [CONDEMNED]


def test_snapshots_in_use_are_never_touched(store: Store, clock: FakeClock) -> None:
    snapshot = capture(StoreBlobs(store, clock=clock), b"1")
    for _ in range(5):
        clock.advance(KEEP_S + GRACE_S)
        assert run(store, clock, snapshot).deleted == Tally()
    assert is_whole(store, snapshot)
    assert run(store, clock).condemned.snapshots == 1
    clock.advance(GRACE_S)
    # In use again, though condemned long enough.
    assert run(store, clock, snapshot).deleted == Tally()
    assert is_whole(store, snapshot)


def test_a_capture_saves_what_was_condemned(store: Store, clock: FakeClock) -> None:
    capture(StoreBlobs(store, clock=clock), b"1", b"2")
    clock.advance(KEEP_S)
    run(store, clock)
    clock.advance(GRACE_S - 1)
    again = capture(StoreBlobs(store, clock=clock), b"1")
    clock.advance(1)
    collected = run(store, clock)
    assert (collected.deleted.units, collected.deleted.packs, collected.deleted.snapshots) == (1, 1, 1)
    assert is_whole(store, again)


def test_what_a_crashed_capture_left_goes(store: Store, clock: FakeClock) -> None:
    blobs = StoreBlobs(store, clock=clock)
    unit = make_unit(b"1", blobs.write_pack(make_pack(b"1")))
    blobs.write_unit(unit)
    blobs.write_pack(b"nothing points here")
    assert run(store, clock).kept == Tally(units=1, packs=2, bytes=sum(map(len, everything(store).values())))
    clock.advance(GRACE_S)
    assert run(store, clock).condemned.packs == 2
    clock.advance(GRACE_S)
    assert run(store, clock).deleted.packs == 2
    assert set(everything(store)) == {CONDEMNED}


def test_a_young_unit_keeps_the_old_packs_it_points_into(store: Store, clock: FakeClock) -> None:
    digest = StoreBlobs(store, clock=clock).write_pack(make_pack(b"1"))
    clock.advance(GRACE_S - 1)
    unit = make_unit(b"1", digest)
    StoreBlobs(store, clock=clock).write_unit(unit)
    clock.advance(50)
    # The pack is old now and no snapshot needs it, but a capture that goes on finds the unit, and looks no further.
    assert run(store, clock).condemned == Tally()
    StoreBlobs(store, clock=clock).write_snapshot(snapshot_of(unit))


def test_dry_run_changes_nothing_and_says_what_would_go(store: Store, clock: FakeClock) -> None:
    capture(StoreBlobs(store, clock=clock), b"1")
    for advance in (KEEP_S, GRACE_S):
        clock.advance(advance)
        before = everything(store)
        said = run(store, clock, dry_run=True)
        assert everything(store) == before
        assert said.dry_run
        done = run(store, clock)
        assert (said.deleted_keys, said.condemned_keys) == (done.deleted_keys, done.condemned_keys)
        assert (said.deleted, said.condemned, said.kept) == (done.deleted, done.condemned, done.kept)
    assert done.deleted.snapshots == 1


@pytest.mark.parametrize("kind", ["snapshots", "units"])
def test_below_what_cannot_be_read_nothing_is_touched(store: Store, clock: FakeClock, kind: str) -> None:
    capture(StoreBlobs(store, clock=clock), b"old")
    clock.advance(KEEP_S)
    snapshot = capture(StoreBlobs(store, clock=clock), b"new")
    altered = {"snapshots": f"snapshots/{snapshot.address}", "units": f"units/{snapshot.addresses()[0]}"}[kind]
    store.put({altered: b"altered"})
    for _ in range(3):
        collected = run(store, clock)
        assert collected.unreadable == (altered,)
        clock.advance(GRACE_S)
    left = {key.partition("/")[0] for key in everything(store) if key != altered}
    assert collected.deleted.packs == 0
    assert collected.kept.packs == 2
    assert left == {"snapshots": {"units", "packs", "gc"}, "units": {"snapshots", "packs", "gc"}}[kind]


def test_an_altered_list_condemns_anew(store: Store, clock: FakeClock) -> None:
    capture(StoreBlobs(store, clock=clock), b"1")
    clock.advance(KEEP_S)
    run(store, clock)
    store.put({CONDEMNED: b"altered"})
    clock.advance(GRACE_S)
    assert run(store, clock).condemned.snapshots == 1
    clock.advance(GRACE_S)
    assert run(store, clock).deleted.snapshots == 1


def test_the_list_of_a_newer_version_is_left_alone(clock: FakeClock) -> None:
    store = MemoryStore(clock=clock)
    store.put({CONDEMNED: encode(CondemnedList(version=2))})
    with pytest.raises(EnvironmentRejected, match="has format version 2"):
        run(store, clock)
    assert read_keys(store) == [CONDEMNED]


def read_keys(store: Store) -> list[str]:
    return sorted(stored.key for stored in store.list("gc"))


def test_two_at_once_do_nothing(store: Store, clock: FakeClock) -> None:
    capture(StoreBlobs(store, clock=clock), b"1")
    clock.advance(KEEP_S)
    other = COLLECTOR + "0" * 32
    store.put({other: b""})
    before = everything(store)
    assert run(store, clock) == CollectionResult(busy=True)
    assert everything(store) == before
    # One that died counts no longer.
    clock.advance(20 * 60)
    assert run(store, clock).condemned.snapshots == 1
    assert read_keys(store) == [CONDEMNED]


def test_clocks_that_differ_are_said(clock: FakeClock) -> None:
    store = MemoryStore(clock=FakeClock(wall_ns=clock.wall_ns() + HOUR_S * 10**9))
    with pytest.raises(StoreUnavailable, match=re.escape(golden("environment.collection.clocks-machine-store"))):
        run(store, clock)
    assert read_keys(store) == []


def test_a_collection_that_stands_still_gives_up(clock: FakeClock) -> None:
    class Slow(MemoryStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key.startswith("snapshots/"):
                clock.advance(11 * 60)
            return super().get(key, start, length)

    store = Slow(clock=clock)
    capture(StoreBlobs(store, clock=clock), b"1")
    with pytest.raises(StoreUnavailable, match=re.escape(golden("environment.collection.stood-still-660"))):
        run(store, clock)
    assert read_keys(store) == []


def test_it_says_how_far_it_is(clock: FakeClock) -> None:
    store = MemoryStore(clock=clock)
    for number in range(100):
        capture(StoreBlobs(store, clock=clock), b"%d" % number)
    said: list[ProgressPoint] = []
    clock.advance(KEEP_S)
    blobs = StoreBlobs(store, clock=clock)
    collect(blobs, keep_s=2 * KEEP_S, grace_s=GRACE_S, report=said.append)
    assert [(one.files_done, one.files_total, one.name) for one in said] == [
        (64, 100, "looking"),
        (100, 100, "looking"),
    ] * 2


@pytest.mark.parametrize("dies_at", range(40))
def test_killed_anywhere_the_next_one_goes_on(clock: FakeClock, dies_at: int) -> None:
    class Dies(MemoryStore):
        calls = -1

        def _step(self) -> None:
            self.calls += 1
            if self.calls == dies_at + 1:
                raise KeyboardInterrupt

        def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
            if self.calls >= 0:
                self._step()
            super().put(objects)

        def delete(self, keys: object) -> None:
            for key in list(keys):  # type: ignore[call-overload]  # it is iterable
                if self.calls >= 0:
                    self._step()
                super().delete([key])

    store = Dies(clock=clock)
    capture(StoreBlobs(store, clock=clock), b"1", b"2", b"3")
    clock.advance(KEEP_S)
    kept = capture(StoreBlobs(store, clock=clock), b"3", b"4")
    run(store, clock)
    clock.advance(GRACE_S)
    store.calls = 0
    try:
        run(store, clock)
    except KeyboardInterrupt:
        pass
    else:
        assert store.calls < dies_at + 1
    store.calls = -1
    for snapshot in list(store.list("snapshots")):
        assert is_whole(store, StoreBlobs(store).read_snapshot(snapshot.key.partition("/")[2]))
    again = capture(StoreBlobs(store, clock=clock, sleep=clock.advance), b"1", b"4")
    for _ in range(4):
        clock.advance(20 * 60)
        run(store, clock, kept, again)
    assert is_whole(store, kept)
    assert is_whole(store, again)
    assert len(list(store.list("packs"))) == 3
    assert read_keys(store) == [CONDEMNED]
