"""Parts of large payloads and results: whole or not at all, what their name says, there as long as they are needed."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from blake3 import blake3

from serverless_gpu.environment.stores.directory_store import DirectoryStore, MemoryStore
from serverless_gpu.errors import HashMismatch, InvalidValue, NotFound, ServerStorageFull
from serverless_gpu.model.spec import BLOB_PART_BYTES, BlobReference
from serverless_gpu.server.storage import blobs as blobs_module
from serverless_gpu.server.storage.blobs import Blobs, check_reference
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden

GRACE_S = 1000


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> DirectoryStore:
    return DirectoryStore(tmp_path / "blobs", clock=clock)


@pytest.fixture
def blobs(store: DirectoryStore, clock: FakeClock) -> Blobs:
    return Blobs(store, clock=clock, kept_free_bytes=0)


def put(blobs: Blobs, data: bytes) -> str:
    blobs.put(digest_of(data), data)
    return digest_of(data)


def test_a_part_comes_back_as_it_was_put(blobs: Blobs) -> None:
    for data in (b"", b"a part", random.Random(1).randbytes(3_000_000)):
        assert blobs.get(put(blobs, data)) == data
        assert blobs.get(put(blobs, data)) == data


def test_only_parts_that_are_not_there_are_missing_in_the_order_asked(blobs: Blobs) -> None:
    there = put(blobs, b"there")
    absent = [digest_of(b"%d" % number) for number in range(20)]
    assert blobs.missing([absent[3], there, *absent]) == (absent[3], *absent[:3], *absent[4:])
    assert blobs.missing([]) == ()


def test_F42_bytes_that_were_cut_or_flipped_are_refused_and_nothing_of_them_is_there(
    blobs: Blobs, tmp_path: Path
) -> None:
    data = random.Random(2).randbytes(100_000)
    for altered in (data[:50_000], data + b"x", data[:-1] + bytes([data[-1] ^ 4]), b""):
        with pytest.raises(HashMismatch):
            blobs.put(digest_of(data), altered)
    assert blobs.missing([digest_of(data)]) == (digest_of(data),)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_part_that_was_altered_where_it_lies_is_never_given_to_anybody(blobs: Blobs, tmp_path: Path) -> None:
    digest = put(blobs, b"content")
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    path.chmod(0o600)
    path.write_bytes(b"c0ntent")
    with pytest.raises(NotFound, match="altered"):
        blobs.get(digest)


@pytest.mark.parametrize(
    "digest", ["", "a" * 63, "a" * 65, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n", "packs/" + "a" * 58]
)
def test_what_is_no_digest_leads_nowhere(blobs: Blobs, digest: str) -> None:
    for call in (
        lambda: blobs.get(digest),
        lambda: blobs.put(digest, b""),
        lambda: blobs.missing([digest]),
        lambda: list(blobs.read(BlobReference(size=1, parts=(digest,)))),
    ):
        with pytest.raises(InvalidValue):
            call()


def test_a_part_that_is_not_there_is_not_found(blobs: Blobs) -> None:
    with pytest.raises(NotFound):
        blobs.get(digest_of(b"never put"))


def test_a_blob_is_read_whole_or_in_ranges(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs_module, "BLOB_PART_BYTES", 10)
    data = bytes(range(35))
    parts = tuple(put(blobs, data[first : first + 10]) for first in range(0, 35, 10))
    reference = BlobReference(size=35, parts=parts)
    assert b"".join(blobs.read(reference)) == data
    for start in range(0, 37, 3):
        for length in (0, 1, 9, 10, 11, 25, 100):
            assert b"".join(blobs.read(reference, start, length)) == data[start : start + length], (start, length)
    assert b"".join(blobs.read(BlobReference(size=0, parts=()))) == b""
    with pytest.raises(InvalidValue):
        list(blobs.read(reference, -1))
    with pytest.raises(InvalidValue):
        list(blobs.read(reference, 0, -1))


def test_a_part_of_another_length_than_the_size_says_is_noticed(blobs: Blobs) -> None:
    short = put(blobs, b"short")
    with pytest.raises(NotFound, match="has 5 bytes"):
        list(blobs.read(BlobReference(size=6, parts=(short,))))


def test_a_reference_has_the_parts_of_its_size() -> None:
    digest = "a" * 64
    for size, count in ((0, 0), (1, 1), (BLOB_PART_BYTES, 1), (BLOB_PART_BYTES + 1, 2)):
        check_reference(BlobReference(size=size, parts=(digest,) * count))
        with pytest.raises(InvalidValue):
            check_reference(BlobReference(size=size, parts=(digest,) * (count + 1)))
    for size in (-1, blobs_module.SIZE_MAX + 1):
        with pytest.raises(InvalidValue):
            check_reference(BlobReference(size=size, parts=()))


def test_F40_a_full_store_refuses_before_the_first_byte_and_keeps_nothing(clock: FakeClock) -> None:
    store = MemoryStore(clock=clock, capacity_bytes=1000)
    blobs = Blobs(store, clock=clock, kept_free_bytes=100)
    with pytest.raises(ServerStorageFull, match=re.escape(golden("server.blobs.901-write-kb"))):
        blobs.check_room(901)
    blobs.check_room(900)
    with pytest.raises(ServerStorageFull):
        put(blobs, b"x" * 901)
    put(blobs, b"x" * 900)
    assert [stored.size for stored in store.list("packs")] == [900]


def test_F40_a_store_that_gets_full_meanwhile_is_told_as_one(clock: FakeClock) -> None:
    class Tight(MemoryStore):
        def free_bytes(self) -> int | None:
            return None if not self.asked else super().free_bytes()

        asked = False

        def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
            self.asked = True
            super().put(objects)

    blobs = Blobs(Tight(clock=clock, capacity_bytes=10), clock=clock)
    with pytest.raises(ServerStorageFull, match="no space left"):
        put(blobs, b"more than ten bytes")


def test_what_nothing_refers_to_goes_a_grace_after_it_was_condemned(blobs: Blobs, clock: FakeClock) -> None:
    needed, idle = put(blobs, b"needed"), put(blobs, b"idle")

    def collect() -> blobs_module.BlobCollection:
        return blobs.collect(lambda: [needed], grace_s=GRACE_S)

    assert collect() == blobs_module.BlobCollection(kept=2, condemned=0, deleted=0, deleted_bytes=0)
    clock.advance(GRACE_S)
    assert collect() == blobs_module.BlobCollection(kept=1, condemned=1, deleted=0, deleted_bytes=0)
    clock.advance(GRACE_S - 1)
    assert collect().deleted == 0
    clock.advance(1)
    assert collect() == blobs_module.BlobCollection(kept=1, condemned=0, deleted=1, deleted_bytes=4)
    assert blobs.missing([needed, idle]) == (idle,)
    assert collect() == blobs_module.BlobCollection(kept=1, condemned=0, deleted=0, deleted_bytes=0)


@pytest.mark.parametrize("ask", [True, False])
def test_who_was_told_that_a_part_is_there_has_a_grace_to_refer_to_it(
    blobs: Blobs, clock: FakeClock, ask: bool
) -> None:
    digest = put(blobs, b"asked about")
    clock.advance(2 * GRACE_S)
    blobs.collect(list, grace_s=GRACE_S)
    clock.advance(2 * GRACE_S)
    if ask:
        assert blobs.missing([digest]) == ()
    else:
        put(blobs, b"asked about")
    assert blobs.collect(list, grace_s=GRACE_S).deleted == 0
    clock.advance(GRACE_S - 1)
    assert blobs.collect(lambda: [digest], grace_s=GRACE_S).kept == 1
    assert blobs.get(digest) == b"asked about"


def test_a_part_that_is_put_while_it_is_deleted_is_there_afterwards(clock: FakeClock) -> None:
    class Slow(MemoryStore):
        begun, go_on = threading.Event(), threading.Event()

        def delete(self, keys: Iterable[str]) -> None:
            self.begun.set()
            assert self.go_on.wait(30)
            super().delete(keys)

    store = Slow(clock=clock)
    blobs = Blobs(store, clock=clock)
    digest = put(blobs, b"wanted again")
    for _ in range(2):
        clock.advance(GRACE_S)
        collecting = threading.Thread(target=blobs.collect, args=(list,), kwargs={"grace_s": GRACE_S})
        collecting.start()
        if not _:
            collecting.join()
    assert store.begun.wait(30)
    assert blobs.missing([digest]) == (digest,)
    putting = threading.Thread(target=put, args=(blobs, b"wanted again"))
    putting.start()
    store.go_on.set()
    putting.join(30)
    collecting.join(30)
    assert blobs.get(digest) == b"wanted again"


def test_a_collection_that_fails_is_gone_on_with_by_the_next(clock: FakeClock) -> None:
    class Broken(MemoryStore):
        times = 1

        def delete(self, keys: Iterable[str]) -> None:
            self.times -= 1
            if self.times >= 0:
                raise OSError("no answer")
            super().delete(keys)

    blobs = Blobs(Broken(clock=clock), clock=clock)
    digest = put(blobs, b"idle")
    clock.advance(GRACE_S)
    blobs.collect(list, grace_s=GRACE_S)
    clock.advance(GRACE_S)
    with pytest.raises(OSError, match="no answer"):
        blobs.collect(list, grace_s=GRACE_S)
    assert blobs.missing([digest]) == ()
    clock.advance(GRACE_S)
    blobs.collect(list, grace_s=GRACE_S)
    clock.advance(GRACE_S)
    assert blobs.collect(list, grace_s=GRACE_S).deleted == 1
