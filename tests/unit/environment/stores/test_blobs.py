"""What goes into a store and comes out of it: whole, checked, or a named error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.compression import compress
from serverless_gpu.environment.documents import SNAPSHOT_VERSION, SnapshotOrigin
from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.codec import DOCUMENT_BYTES_MAX, encode
from serverless_gpu.environment.stores.condemned_objects import CondemnedEntry, CondemnedList, write_condemned
from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.errors import (
    EnvironmentCorrupt,
    EnvironmentMissing,
    EnvironmentRejected,
    InvalidValue,
    StoreUnavailable,
)
from serverless_gpu.testing import FakeClock
from tests.support.environment.environments_in_stores import capture, digest_of, make_pack, make_unit, snapshot_of
from tests.support.golden import golden

A = "a" * 64


class AlteringStore(MemoryStore):
    """A store behind a line that alters what is read, a number of times."""

    times = 0
    alter: Callable[[bytes], bytes] = staticmethod(lambda data: data)
    reads = 0

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, altered or not."""
        data = super().get(key, start, length)
        self.reads += 1
        if self.reads > self.times:
            return data
        return self.alter(data)

    def from_now_on(self, alter: Callable[[bytes], bytes], *, times: int) -> None:
        self.alter, self.times, self.reads = alter, times, 0


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "store")


def test_a_snapshot_comes_out_as_it_went_in(store: Store) -> None:
    unit = make_unit(b"x = 1\n", StoreBlobs(store).write_pack(make_pack(b"x = 1\n")))
    facts = SnapshotOrigin(captured_ns=7, originals=("/somewhere",), notes=({"site/a-1.dist-info/INSTALLER": "pip\n"},))
    snapshot = snapshot_of(unit, facts=facts)
    blobs = StoreBlobs(store)
    blobs.write_unit(unit)
    blobs.write_snapshot(snapshot)
    assert StoreBlobs(store).read_unit(unit.address) == unit
    assert StoreBlobs(store).read_snapshot(snapshot.address) == snapshot
    assert StoreBlobs(store).read_pack(unit.packs[0]) == make_pack(b"x = 1\n")
    assert StoreBlobs(store).read_range(unit.packs[0], 3, 4) == make_pack(b"x = 1\n")[3:7]


def test_what_is_missing_is_named() -> None:
    blobs = StoreBlobs(MemoryStore("mine"))
    for read, what in ((blobs.read_snapshot, "snapshot"), (blobs.read_unit, "unit"), (blobs.read_pack, "pack")):
        with pytest.raises(EnvironmentMissing) as caught:
            read(A)
        assert caught.value.message == golden("environment.blobs.aaaaaaaaaaaa-store-memory", what=what)


def test_missing_keeps_the_order_asked(store: Store) -> None:
    present = StoreBlobs(store).write_pack(b"there")
    absent = [digit * 64 for digit in "fa0"]
    assert StoreBlobs(store).missing_packs([absent[0], present, *absent[1:], absent[0]]) == tuple(absent)
    assert StoreBlobs(store).missing_units([present]) == (present,)
    assert StoreBlobs(store).missing_units([]) == ()


@pytest.mark.parametrize("alter", [cut, flip, lambda data: b"", lambda data: data + b"\0"])
def test_F42_what_was_altered_on_its_way_is_read_again(alter: Callable[[bytes], bytes]) -> None:
    store = AlteringStore()
    snapshot = capture(StoreBlobs(store), b"y = 2\n" * 1000)
    unit = StoreBlobs(store).read_unit(snapshot.addresses()[0])
    reads: list[Callable[[StoreBlobs], object]] = [
        lambda blobs: blobs.read_snapshot(snapshot.address),
        lambda blobs: blobs.read_unit(unit.address),
        lambda blobs: blobs.read_pack(unit.packs[0]),
    ]
    for read in reads:
        store.from_now_on(alter, times=0)
        right = read(StoreBlobs(store))
        store.from_now_on(alter, times=1)
        assert read(StoreBlobs(store)) == right
        assert store.reads == 2
        store.from_now_on(alter, times=2)
        with pytest.raises(EnvironmentCorrupt) as caught:
            read(StoreBlobs(store))
        assert golden("environment.blobs.store-memory-altered") in caught.value.message


def test_F42_a_range_that_comes_back_short_is_read_again() -> None:
    store = AlteringStore()
    digest = StoreBlobs(store).write_pack(b"0123456789")
    store.from_now_on(cut, times=1)
    assert StoreBlobs(store).read_range(digest, 2, 6) == b"234567"
    with pytest.raises(EnvironmentCorrupt, match=re.escape(golden("environment.blobs.ends-too-early"))):
        StoreBlobs(store).read_range(digest, 5, 6)


def test_F42_every_single_bit_of_a_unit_is_guarded() -> None:
    store = AlteringStore()
    address = capture(StoreBlobs(store), b"z").addresses()[0]
    right = StoreBlobs(store).read_unit(address)
    size = len(store.get(f"units/{address}"))
    for bit in range(size * 8):
        store.from_now_on(partial(flipped, bit), times=2)
        with contextlib.suppress(EnvironmentCorrupt):
            # A frame's header has bits that mean nothing.
            assert StoreBlobs(store).read_unit(address) == right


def flipped(bit: int, data: bytes) -> bytes:
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_a_document_under_another_address_is_corrupt() -> None:
    store = MemoryStore()
    first, second = capture(StoreBlobs(store), b"1"), capture(StoreBlobs(store), b"2")
    for kind, one, other in (
        ("snapshots", first.address, second.address),
        ("units", first.addresses()[0], second.addresses()[0]),
    ):
        store.put({f"{kind}/{one}": store.get(f"{kind}/{other}")})
    with pytest.raises(EnvironmentCorrupt, match=re.escape(golden("environment.blobs.address-says"))):
        StoreBlobs(store).read_snapshot(first.address)
    with pytest.raises(EnvironmentCorrupt, match=re.escape(golden("environment.blobs.address-says"))):
        StoreBlobs(store).read_unit(first.addresses()[0])


def test_a_document_that_breaks_the_rules_is_rejected_by_its_rule() -> None:
    store = MemoryStore()
    address = capture(StoreBlobs(store), b"1").addresses()[0]
    unit = StoreBlobs(store).read_unit(address)
    bad = msgspec.structs.replace(unit, packs=("../../etc/passwd",))
    store.put({f"units/{address}": encode(bad)})
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.blobs.name-pack-64"))):
        StoreBlobs(store).read_unit(address)
    with pytest.raises(EnvironmentRejected):
        StoreBlobs(store).write_unit(bad)


def test_another_version_says_to_upgrade() -> None:
    store = MemoryStore()
    snapshot = capture(StoreBlobs(store), b"1")
    unit = StoreBlobs(store).read_unit(snapshot.addresses()[0])
    newer = msgspec.structs.replace(snapshot, version=SNAPSHOT_VERSION + 1)
    store.put({f"snapshots/{snapshot.address}": encode(newer)})
    store.put({f"units/{unit.address}": encode(msgspec.structs.replace(unit, version=2))})
    store.put({"gc/condemned": encode(CondemnedList(version=2))})
    for read, newest in (
        (lambda: StoreBlobs(store).read_snapshot(snapshot.address), SNAPSHOT_VERSION),
        (lambda: StoreBlobs(store).read_unit(unit.address), 1),
        (lambda: StoreBlobs(store).missing_units([unit.address]), 1),
    ):
        with pytest.raises(EnvironmentRejected) as caught:
            read()
        said = f"has format version {newest + 1}, but this program reads version {newest}"
        assert said in caught.value.message
        assert golden("environment.blobs.pip-install-upgrade") in caught.value.hint


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"", "ends early"),
        (b"not zstd", "cannot be read"),
        (compress(b""), "cannot be read"),
        (compress(b"\xc1"), "cannot be read"),
        (compress(b"\x91" * 100_000), "cannot be read"),
        (compress(bytes(DOCUMENT_BYTES_MAX + 1)), "more content than"),
        (compress(msgspec.msgpack.encode({"version": 1, "address": A, "rows": [], "more": 1})), "unknown fields"),
        (compress(b"\x82\xa7version\x01\xa4rows\xdd\x7f\xff\xff\xff"), "cannot be read"),
        (
            compress(msgspec.msgpack.encode({"version": 1, "rows": [[]] * 1_000_001})),
            "1000001 rows, but at most 1000000 are",
        ),
    ],
    ids=["empty", "not zstd", "nothing", "not msgpack", "deep", "bomb", "more fields", "lying length", "too many"],
)
def test_what_cannot_be_a_document_is_not_decoded(document: bytes, why: str) -> None:
    store = MemoryStore()
    store.put({f"units/{A}": document})
    with pytest.raises(EnvironmentCorrupt, match=why):
        StoreBlobs(store).read_unit(A)


def test_nothing_is_written_before_its_parts() -> None:
    store = MemoryStore("mine")
    pack = make_pack(b"1")
    unit = make_unit(b"1", digest_of(pack))
    with pytest.raises(EnvironmentMissing) as caught:
        StoreBlobs(store).write_unit(unit)
    assert caught.value.message == golden(
        "environment.blobs.unit-cannot-written", address=unit.address[:12], digest_of=digest_of(pack)[:12]
    )
    with pytest.raises(EnvironmentMissing, match=re.escape(golden("environment.blobs.units-store"))):
        StoreBlobs(store).write_snapshot(snapshot_of(unit))
    assert [*store.list("units"), *store.list("snapshots")] == []


def test_what_is_condemned_counts_as_absent_until_it_is_put_again() -> None:
    store = MemoryStore()
    snapshot = capture(StoreBlobs(store), b"1")
    unit = StoreBlobs(store).read_unit(snapshot.addresses()[0])
    keys = (f"packs/{unit.packs[0]}", f"units/{unit.address}", f"snapshots/{snapshot.address}")
    write_condemned(store, CondemnedList(entries=tuple(CondemnedEntry(key, 1, 1) for key in keys)))
    blobs = StoreBlobs(store)
    assert blobs.missing_units([unit.address]) == (unit.address,)
    assert blobs.missing_packs(unit.packs) == unit.packs
    with pytest.raises(EnvironmentMissing):
        blobs.write_snapshot(snapshot)
    assert StoreBlobs(store).read_snapshot(snapshot.address) == snapshot
    capture(blobs, b"1")
    assert blobs.missing_units([unit.address]) == ()


def test_a_capture_that_takes_too_long_does_not_publish() -> None:
    store, clock = MemoryStore(), FakeClock()
    blobs = StoreBlobs(store, clock=clock)
    snapshot = snapshot_of(make_unit(b"1", blobs.write_pack(make_pack(b"1"))))
    blobs.write_unit(make_unit(b"1", blobs.write_pack(make_pack(b"1"))))
    clock.advance(6 * 3600 + 1)
    with pytest.raises(StoreUnavailable) as caught:
        blobs.write_snapshot(snapshot)
    assert str(caught.value) == golden("environment.blobs.capture-took-longer")
    assert list(store.list("snapshots")) == []


def test_a_snapshot_is_found_by_the_start_of_its_address() -> None:
    store = MemoryStore("mine")
    address = capture(StoreBlobs(store), b"1").address
    blobs = StoreBlobs(store)
    assert blobs.find_snapshot(address[:4]) == address
    assert blobs.find_snapshot(address) == address
    with pytest.raises(EnvironmentMissing, match=re.escape(golden("environment.blobs.store-memory-mine"))):
        blobs.find_snapshot("0" * 12)
    store.put({f"snapshots/{address[:8]}" + "0" * 56: b""})
    with pytest.raises(EnvironmentMissing) as caught:
        blobs.find_snapshot(address[:8])
    assert caught.value.message.startswith(f"2 snapshots start with {address[:8]}: {address[:8]}")
    for wrong in ("", "abc", "../..", "G" * 8, "A" * 8, "a" * 65):
        with pytest.raises(InvalidValue):
            blobs.find_snapshot(wrong)


def test_addresses_lead_nowhere_else() -> None:
    blobs = StoreBlobs(MemoryStore())
    for wrong in ("", "../x", "a" * 63, "/etc/passwd"):
        for call in (
            lambda wrong=wrong: blobs.read_unit(wrong),
            lambda wrong=wrong: blobs.read_snapshot(wrong),
            lambda wrong=wrong: blobs.read_pack(wrong),
            lambda wrong=wrong: blobs.missing_units([wrong]),
        ):
            with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.blobs.key-store"))):
                call()
