"""A capture sends what is missing, once, with true digests, in bounded memory, or names what stands in its way."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.capture.snapshot_capture import capture
from serverless_gpu.environment.capture.unit_blocks import PACKS_MORE_MAX, places_of, plan_blocks, reuse
from serverless_gpu.environment.documents import ContentPlace, FileRow, PackBlock, Unit, unit_address
from serverless_gpu.environment.restore.cache.unpack import unpack
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import StoreUnavailable
from tests.support.environment.counting import TINY, CountingStore, two_units
from tests.support.environment.hostile import file
from tests.support.environment.scanned import contents, scan_of, source_of

GB = 10**9


# --- layout: pure -----------------------------------------------------------------------------------------------------


def _sized(*sizes: int) -> tuple[FileRow, ...]:
    return tuple(
        FileRow(path=f"site/{n:03}", size=size, sha256=hashlib.sha256(b"%d %d" % (n, size)).digest())
        for n, size in enumerate(sizes)
    )


def test_small_files_share_blocks_and_large_ones_have_their_own() -> None:
    rows = _sized(3, 0, 5, 25, 4, 10, 1)
    plans = plan_blocks(rows, range(7), block_bytes=10)
    assert [[tuple(part) for part in plan.parts] for plan in plans] == [
        [(3, 0, 10)],
        [(3, 10, 10)],
        [(3, 20, 5)],
        [(0, 0, 3), (1, 0, 0), (2, 0, 5)],
        [(4, 0, 4)],
        [(5, 0, 10)],
        [(6, 0, 1)],
    ]
    places = places_of(plans, 0)
    assert set(places) == {0, 2, 3, 4, 5, 6}
    assert all(places[row].start + rows[row].size <= plans[places[row].block].size for row in (0, 2, 4, 5, 6))


def _unit(rows: tuple[FileRow, ...], *, packs: int = 1) -> Unit:
    """Return a stored unit: one block of one small file each, spread over packs."""
    blocks = [PackBlock(n % packs, n // packs * 100, 100, row.size) for n, row in enumerate(rows)]
    return Unit(
        address=unit_address(rows),
        rows=rows,
        packs=tuple(f"{n:064x}" for n in range(packs)),
        blocks=tuple(blocks),
        places=tuple(ContentPlace(n, 0) for n in range(len(rows))),
    )


def test_unchanged_files_stay_in_their_packs() -> None:
    old = _unit(_sized(10, 20, 30, 40))
    new = (*old.rows[:2], file("site/002", 31), old.rows[3])
    found = reuse(new, old)
    assert found.packs == old.packs
    assert found.places == {0: ContentPlace(0, 0), 1: ContentPlace(1, 0), 3: ContentPlace(3, 0)}


def test_packs_that_are_less_than_half_used_are_left() -> None:
    old = _unit(_sized(*[10] * 9))
    assert reuse(old.rows[:5], old).places
    assert not reuse(old.rows[:4], old).places


def test_packs_without_anything_used_are_dropped_and_the_others_counted_anew() -> None:
    old = _unit(_sized(*[10] * 9), packs=3)
    found = reuse((old.rows[1], old.rows[4], old.rows[5], old.rows[8]), old)  # packs 1 and 2
    assert found.packs == old.packs[1:]
    assert {block.pack for block in found.blocks} == {0, 1}
    assert [found.blocks[place.block].size for place in found.places.values()] == [10] * 4


def test_a_history_of_edits_does_not_leave_ever_more_packs() -> None:
    few, many = _unit(_sized(*[10] * 10), packs=10), _unit(_sized(*[10] * 60), packs=PACKS_MORE_MAX + 1)
    assert reuse(few.rows, few).places
    assert not reuse(many.rows, many).places


def test_two_files_of_one_content_have_two_places() -> None:
    old = _unit(_sized(10, 20))
    twin = msgspec.structs.replace(old.rows[0], path="site/twin")
    found = reuse((*old.rows, twin), old)
    assert found.places == {0: ContentPlace(0, 0), 1: ContentPlace(1, 0)}


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_the_snapshot_is_written_last_and_units_after_their_packs(tmp_path: Path) -> None:
    store = CountingStore()
    captured = capture(two_units(tmp_path), StoreBlobs(store), settings=TINY)
    kinds = store.kinds()
    assert kinds[-1] == "snapshots"
    assert kinds.count("units") == 2
    assert kinds.count("packs") == captured.packs_sent > 2
    for address in captured.units_new:
        unit = StoreBlobs(store).read_unit(address)
        at = store.puts.index(f"units/{address}")
        assert all(store.puts.index(f"packs/{pack}") < at for pack in unit.packs)


def test_what_the_store_has_is_neither_read_nor_sent(tmp_path: Path) -> None:
    store = CountingStore()
    scan = two_units(tmp_path)
    capture(scan, StoreBlobs(store), settings=TINY)
    store.puts.clear()
    for path in tmp_path.rglob("f*"):
        path.unlink()  # reading one of them would fail
    captured = capture(scan, StoreBlobs(store), settings=TINY)
    assert store.kinds() == ["snapshots"]
    assert (captured.units_new, captured.units_known, captured.sent_bytes) == ((), 2, 0)


def test_the_same_content_gives_the_same_packs(tmp_path: Path) -> None:
    one, two = CountingStore(), CountingStore()
    scan = two_units(tmp_path)
    capture(scan, StoreBlobs(one), settings=TINY)
    capture(scan, StoreBlobs(two), settings=msgspec.structs.replace(TINY, threads=4))
    assert sorted(one.puts) == sorted(two.puts)


@pytest.mark.parametrize("fail_at", range(12))
def test_after_a_failure_at_any_put_the_next_capture_sends_only_the_rest(tmp_path: Path, fail_at: int) -> None:
    scan = two_units(tmp_path)
    whole = CountingStore()
    capture(scan, StoreBlobs(whole), settings=TINY)
    store = CountingStore(fail_at=fail_at)
    with pytest.raises(StoreUnavailable):
        capture(scan, StoreBlobs(store), settings=TINY)
    assert "snapshots" not in store.kinds()
    sent = list(store.puts)
    store.fail_at = -1
    store.puts.clear()
    capture(scan, StoreBlobs(store), settings=TINY)
    packs = [key for key in store.puts if key.startswith("packs/")]
    assert not set(packs) & set(sent)
    assert sorted({*sent, *store.puts}) == sorted(set(whole.puts))


def test_an_edited_file_sends_itself_and_not_the_unit(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for number in range(20):
        (before / f"f{number:02}").write_bytes(os.urandom(100_000))
    store = CountingStore()
    first = capture(scan_of({"thing": source_of(before)}), StoreBlobs(store))
    (before / "f07").write_bytes(b"edited by hand")
    again = source_of(before, previous=first.units_new[0])
    second = capture(scan_of({"thing": again}), StoreBlobs(store))
    assert first.sent_bytes > 2_000_000
    assert second.sent_bytes < 1000
    unpack(StoreBlobs(store).read_unit(second.units_new[0]), StoreBlobs(store), tmp_path / "after")
    assert contents(tmp_path / "after/site") == contents(before)


def test_edits_again_and_again_stay_right_and_bounded(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for number in range(10):
        (before / f"f{number}").write_bytes(os.urandom(50 + 30 * number))
    store, previous = CountingStore(), ""
    for round_ in range(30):
        (before / f"f{round_ % 10}").write_bytes(os.urandom(40 + 10 * (round_ % 7)))
        captured = capture(scan_of({"thing": source_of(before, previous=previous)}), StoreBlobs(store), settings=TINY)
        previous = captured.units_new[0]
        unit = StoreBlobs(store).read_unit(previous)
        held = sum(block.size for block in unit.blocks)
        assert held <= 3 * sum(row.size for row in unit.rows)
        assert len(unit.packs) <= PACKS_MORE_MAX + 15
        unpack(unit, StoreBlobs(store), tmp_path / f"after{round_}")
        assert contents(tmp_path / f"after{round_}/site") == contents(before)


@pytest.mark.parametrize("harm", ["unit", "pack", "altered"])
def test_an_old_version_that_is_not_whole_is_not_pointed_into(tmp_path: Path, harm: str) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for number in range(9):
        (before / f"f{number}").write_bytes(os.urandom(100))
    store = CountingStore()
    first = capture(scan_of({"thing": source_of(before)}), StoreBlobs(store), settings=TINY)
    unit = StoreBlobs(store).read_unit(first.units_new[0])
    if harm == "altered":
        store.put({f"units/{unit.address}": b"nonsense"})
    else:
        store.delete([f"units/{unit.address}" if harm == "unit" else f"packs/{unit.packs[0]}"])
    (before / "f3").write_bytes(b"edited")
    second = capture(scan_of({"thing": source_of(before, previous=unit.address)}), StoreBlobs(store), settings=TINY)
    unpack(StoreBlobs(store).read_unit(second.units_new[0]), StoreBlobs(store), tmp_path / "after")
    assert contents(tmp_path / "after/site") == contents(before)
