"""What was captured comes out byte for byte, or nothing comes out (2.19, 2.20, F27, F42)."""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import signal
import stat
import tempfile
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import cast

import hypothesis.strategies as st
import msgspec
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings

from serverless_gpu.environment.capture.packer import PackSettings
from serverless_gpu.environment.capture.snapshot_capture import capture
from serverless_gpu.environment.compression import compress
from serverless_gpu.environment.documents import ContentPlace, FileRow, PackBlock, ProgressPoint, Unit, unit_address
from serverless_gpu.environment.restore.cache.unpack import MTIME_S, DirectoryWalk, WrittenTree, unpack, unpack_each
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentProblem, StorageError
from tests.support.environment.scanned import contents, scan_of, source_of
from tests.support.golden import golden

TINY = PackSettings(block_bytes=64, pack_bytes=160, threads=2)

_NAME = st.text(st.characters(exclude_characters="/", exclude_categories=("Cs", "Cc")), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
_CONTENT = st.one_of(
    st.binary(max_size=30),
    st.just(b""),
    st.binary(min_size=64, max_size=65),
    st.builds(lambda data, times: data * times, st.binary(min_size=1, max_size=9), st.integers(10, 200)),
)
_FILE = st.tuples(_CONTENT, st.booleans())
_TREES = st.recursive(
    st.dictionaries(_NAME, _FILE, max_size=4),
    lambda below: st.dictionaries(_NAME, st.one_of(_FILE, below), max_size=4),
    max_leaves=25,
)


@given(tree=_TREES, links=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_random_tree_comes_back_byte_for_byte(tree: dict[str, object], links: list[tuple[int, int]]) -> None:
    top = Path(tempfile.mkdtemp(prefix="sg-"))
    try:
        before, after = top / "before", top / "after"
        _make(before, tree)
        _link(before, links)
        blobs = StoreBlobs(MemoryStore())
        captured = capture(scan_of({"thing": source_of(before)}), blobs, settings=TINY)
        unpack(blobs.read_unit(captured.snapshot.addresses()[0]), blobs, after)
        assert contents(after / "site" if (after / "site").exists() else after) == contents(before)
    finally:
        shutil.rmtree(top)


def test_a_file_of_several_blocks_and_packs_of_the_usual_size(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "big").write_bytes(os.urandom(23_000_000) + bytes(5_000_000))
    (before / "block").write_bytes(os.urandom(4 * 1024 * 1024))
    (before / "small").write_bytes(b"x")
    unit, blobs = _captured(before, PackSettings())
    assert len(unit.packs) >= 2
    unpack(unit, blobs, tmp_path / "after")
    assert contents(tmp_path / "after" / "site") == contents(before)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o777])
def test_modes_and_times_are_ours_whatever_the_umask_and_the_source(tmp_path: Path, umask: int) -> None:
    before = tmp_path / "before"
    (before / "sub").mkdir(parents=True)
    for name, mode in (("setuid", 0o6755), ("plain", 0o600), ("empty", 0o644), ("run", 0o777)):
        (before / "sub" / name).write_bytes(b"" if name == "empty" else name.encode())
        os.chmod(before / "sub" / name, mode)
    (before / "sub" / "large").write_bytes(b"0123456789" * 50)
    unit, blobs = _captured(before, TINY)
    after = tmp_path / "after"
    old = os.umask(umask)
    try:
        unpack(unit, blobs, after)
    finally:
        os.umask(old)
    seen = {path.name: path.stat() for path in after.rglob("*")}
    modes = {name: oct(stat.S_IMODE(look.st_mode)) for name, look in seen.items()}
    assert modes == {
        "site": "0o755",
        "sub": "0o755",
        "setuid": "0o555",
        "run": "0o555",
        "plain": "0o444",
        "empty": "0o444",
        "large": "0o444",
    }
    assert stat.S_IMODE(after.stat().st_mode) == 0o755
    assert {look.st_mtime_ns for look in seen.values() if stat.S_ISREG(look.st_mode)} == {MTIME_S * 10**9}


def test_several_units_as_one_stream(tmp_path: Path) -> None:
    units, store = {}, StoreBlobs(MemoryStore())
    for number in range(5):
        before = tmp_path / f"before{number}"
        before.mkdir()
        for name in "abc":
            (before / name).write_bytes(f"{number} {name} ".encode() * 40)
        if number == 3:
            (before / "c").unlink()
        captured = capture(scan_of({"thing": source_of(before)}), store, settings=TINY)
        units[tmp_path / f"after{number}"] = store.read_unit(captured.snapshot.addresses()[0])
    done = list(unpack_each([(unit, directory) for directory, unit in units.items()], store))
    assert sorted(done) == sorted(units)
    for number in range(5):
        assert contents(tmp_path / f"after{number}" / "site") == contents(tmp_path / f"before{number}")


def test_the_whole_is_reported_in_one_thread(tmp_path: Path) -> None:
    unit, blobs = _captured(_some_files(tmp_path), TINY)
    seen: list[ProgressPoint] = []
    unpack(unit, blobs, tmp_path / "after", report=seen.append)
    size = sum(row.size for row in unit.rows)
    files = sum(row.has_content for row in unit.rows)
    assert seen[-1].bytes_done == seen[-1].bytes_total == size
    assert seen[-1].files_done == seen[-1].files_total == files
    assert seen[-1].moved_bytes > 0


def _flip(data: bytes) -> bytes:
    return data[:20] + bytes([data[20] ^ 1]) + data[21:]


@pytest.mark.parametrize("harm", [_flip, lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1]])
def test_F42_an_altered_or_cut_pack_is_named_and_nothing_is_left(
    tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    unit, blobs = _captured(_some_files(tmp_path), TINY)
    for pack in unit.packs:
        key = f"packs/{pack}"
        blobs.store.put({key: harm(blobs.store.get(key))})
    with pytest.raises(EnvironmentCorrupt) as caught:
        unpack(unit, blobs, tmp_path / "after")
    assert any(pack[:12] in str(caught.value) for pack in unit.packs)
    assert not (tmp_path / "after").exists()


def test_F42_a_pack_that_is_gone_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    unit, blobs = _captured(_some_files(tmp_path), TINY)
    blobs.store.delete([f"packs/{unit.packs[-1]}"])
    with pytest.raises(EnvironmentProblem, match=unit.packs[-1][:12]):
        unpack(unit, blobs, tmp_path / "after")
    assert not (tmp_path / "after").exists()


def _altered(content: bytes, size: int, frame: bytes) -> tuple[Unit, StoreBlobs]:
    """Return a unit whose pack has the name it says, and whose row says another content."""
    blobs = StoreBlobs(MemoryStore())
    digest = blobs.write_pack(frame)
    rows = (
        FileRow(path="site/a", size=1, sha256=hashlib.sha256(b"a").digest()),
        FileRow(path="site/b", size=len(content), sha256=hashlib.sha256(content).digest()),
    )
    good = compress(b"a")
    other = blobs.write_pack(good)
    return (
        Unit(
            address=unit_address(rows),
            rows=rows,
            packs=(other, digest),
            blocks=(PackBlock(0, 0, len(good), 1), PackBlock(1, 0, len(frame), size)),
            places=(ContentPlace(0, 0), ContentPlace(1, 0)),
        ),
        blobs,
    )


@pytest.mark.parametrize(
    ("frame", "size", "words"),
    [
        (compress(b"other content"), 13, "'site/b' does not match its digest"),
        (compress(b"right content and more"), 13, "more content than the 13 bytes"),
        (compress(b"right"), 13, "5 bytes of content instead of 13"),
        (compress(b"right content")[:-3], 13, "ends early"),
        (compress(b"right content") + b"more", 13, "or other bytes follow the block"),
        (compress(b"right ") + compress(b"content"), 13, "or other bytes follow the block"),
        (b"no frame at all", 13, "cannot be read"),
        (compress(bytes(4 * 1024 * 1024)), 13, "more content than the 13 bytes"),
    ],
)
def test_a_block_that_is_not_what_the_unit_says_is_named(tmp_path: Path, frame: bytes, size: int, words: str) -> None:
    unit, blobs = _altered(b"right content", size, frame)
    with pytest.raises(EnvironmentCorrupt) as caught:
        unpack(unit, blobs, tmp_path / "after")
    assert words in str(caught.value)
    assert unit.address[:12] in str(caught.value)
    assert not (tmp_path / "after").exists()


def test_a_large_file_with_one_wrong_part_is_named(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "large").write_bytes(os.urandom(1000))
    unit, blobs = _captured(before, TINY)
    wrong = (msgspec.structs.replace(unit.rows[0], sha256=b"\1" * 32),)
    with pytest.raises(EnvironmentCorrupt, match=re.escape(golden("environment.unpacking.site-large-digest"))):
        unpack(msgspec.structs.replace(unit, rows=wrong), blobs, tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_parts_of_a_large_file_that_lie_across_packs_do_not_wait_for_each_other(tmp_path: Path) -> None:
    # Parts 0, 2, 4 … in one pack and 1, 3, 5 … in another: by packs, all threads would wait for a part not yet begun.
    parts = [os.urandom(50) for _ in range(40)]
    frames = [compress(part) for part in parts]
    blobs, blocks = StoreBlobs(MemoryStore()), [PackBlock(0, 0, 1, 1)] * 40
    packs = []
    for pack in (0, 1):
        offset = 0
        for index in range(pack, 40, 2):
            blocks[index] = PackBlock(pack, offset, len(frames[index]), 50)
            offset += len(frames[index])
        packs.append(blobs.write_pack(b"".join(frames[pack::2])))
    content = b"".join(parts)
    rows = (FileRow(path="site/large", size=2000, sha256=hashlib.sha256(content).digest()),)
    unit = Unit(
        address=unit_address(rows), rows=rows, packs=tuple(packs), blocks=tuple(blocks), places=(ContentPlace(0, 0),)
    )
    unpack(unit, blobs, tmp_path / "after")
    assert (tmp_path / "after/site/large").read_bytes() == content


def test_only_what_is_needed_of_a_pack_is_fetched(tmp_path: Path) -> None:
    wanted, other = compress(b"wanted"), os.urandom(5000)
    blobs = StoreBlobs(MemoryStore())
    pack = blobs.write_pack(other + wanted)
    rows = (FileRow(path="site/a", size=6, sha256=hashlib.sha256(b"wanted").digest()),)
    unit = Unit(
        address=unit_address(rows),
        rows=rows,
        packs=(pack,),
        blocks=(PackBlock(0, 0, 5000, 5000), PackBlock(0, 5000, len(wanted), 6)),
        places=(ContentPlace(1, 0),),
    )
    seen: list[ProgressPoint] = []
    unpack(unit, blobs, tmp_path / "after", report=seen.append)
    assert (tmp_path / "after/site/a").read_bytes() == b"wanted"
    assert seen[-1].moved_bytes == len(wanted)


def test_no_file_is_made_through_a_link_even_if_the_rules_had_a_hole(tmp_path: Path) -> None:
    # This unit breaks a rule (a file below a link), and `unpack` is given it all the same.
    outside = tmp_path / "outside"
    outside.mkdir()
    frame = compress(b"evil")
    blobs = StoreBlobs(MemoryStore())
    pack = blobs.write_pack(frame)
    rows = (
        FileRow(path="site/link", kind="l", target=str(outside)),
        FileRow(path="site/link/evil", size=4, sha256=hashlib.sha256(b"evil").digest()),
    )
    unit = Unit(
        address=unit_address(rows),
        rows=rows,
        packs=(pack,),
        blocks=(PackBlock(0, 0, len(frame), 4),),
        places=(ContentPlace(0, 0),),
    )
    with pytest.raises(StorageError):
        unpack(unit, blobs, tmp_path / "after")
    assert not list(outside.iterdir())
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize("planted", ["file", "link", "directory link"])
def test_what_somebody_plants_while_files_are_written_is_not_followed(tmp_path: Path, planted: str) -> None:
    outside, fresh = tmp_path / "outside", tmp_path / "fresh"
    outside.mkdir()
    (outside / "a").write_bytes(b"mine")
    (fresh / "site").mkdir(parents=True)
    if planted == "directory link":
        (fresh / "site").rmdir()
        (fresh / "site").symlink_to(outside)
    elif planted == "link":
        (fresh / "site" / "a").symlink_to(outside / "a")
    else:
        (fresh / "site" / "a").write_bytes(b"mine")
    tree = WrittenTree(fresh)
    try:
        with (
            DirectoryWalk(tree) as walk,
            pytest.raises(OSError, match=golden("environment.unpacking.exists-directory-too")),
        ):
            os.close(walk.make(FileRow(path="site/b" if planted == "directory link" else "site/a")))
    finally:
        tree.close()
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"a": b"mine"}


def test_files_may_lie_in_a_block_in_any_order(tmp_path: Path) -> None:
    # Each longer than a piece of content, so that nobody can go back to one that was passed.
    contents_by_name = {name: os.urandom(300_000) for name in "abc"}
    frame = compress(b"".join(reversed(contents_by_name.values())))
    blobs = StoreBlobs(MemoryStore())
    pack = blobs.write_pack(frame)
    rows = tuple(
        FileRow(path=f"site/{name}", size=len(content), sha256=hashlib.sha256(content).digest())
        for name, content in contents_by_name.items()
    )
    unit = Unit(
        address=unit_address(rows),
        rows=rows,
        packs=(pack,),
        blocks=(PackBlock(0, 0, len(frame), 900_000),),
        places=(ContentPlace(0, 600_000), ContentPlace(0, 300_000), ContentPlace(0, 0)),
    )
    unpack(unit, blobs, tmp_path / "after")
    assert {path.name: path.read_bytes() for path in (tmp_path / "after/site").iterdir()} == contents_by_name


def test_nothing_is_written_into_a_directory_that_is_there(tmp_path: Path) -> None:
    unit, blobs = _captured(_some_files(tmp_path), TINY)
    (tmp_path / "after").mkdir()
    (tmp_path / "after" / "mine").write_bytes(b"mine")
    with pytest.raises(StorageError, match="File exists"):
        unpack(unit, blobs, tmp_path / "after")
    assert [path.name for path in (tmp_path / "after").iterdir()] == ["mine"]


def test_F27_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "large").write_bytes(os.urandom(300_000))
    unit, blobs = _captured(before, PackSettings())
    # A file-size limit fails a write half-way, as a full disk does, and needs no mount.
    old, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(StorageError, match="after"):
            unpack(unit, blobs, tmp_path / "after")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (tmp_path / "after").exists()


def _captured(before: Path, how: PackSettings) -> tuple[Unit, StoreBlobs]:
    blobs = StoreBlobs(MemoryStore())
    captured = capture(scan_of({"thing": source_of(before)}), blobs, settings=how)
    return blobs.read_unit(captured.snapshot.addresses()[0]), blobs


def _some_files(tmp_path: Path) -> Path:
    before = tmp_path / "before"
    (before / "sub").mkdir(parents=True)
    for number in range(8):
        (before / "sub" / f"f{number}").write_bytes(blake3(b"%d" % number).digest())
    (before / "large").write_bytes(blake3(b"").digest(500))
    (before / "empty").write_bytes(b"")
    return before


def _make(directory: Path, tree: dict[str, object]) -> None:
    """Make a random tree, leaving out names that the rules take for the same."""
    directory.mkdir()
    seen: set[str] = set()
    for name, inside in tree.items():
        folded = _folded(name)
        if folded in seen:
            continue
        seen.add(folded)
        if isinstance(inside, dict):
            _make(directory / name, inside)
        else:
            content, executable = cast("tuple[bytes, bool]", inside)
            (directory / name).write_bytes(content)
            os.chmod(directory / name, 0o700 if executable else 0o600)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _link(directory: Path, links: list[tuple[int, int]]) -> None:
    """Add links from one place of a tree to another."""
    places = sorted(path for path in directory.rglob("*"))
    homes = [directory, *(path for path in places if path.is_dir())]
    if not places:
        return
    for number, (home, target) in enumerate(links):
        at = homes[home % len(homes)] / f"link \u2192 {number}"
        at.symlink_to(os.path.relpath(places[target % len(places)], at.parent))
