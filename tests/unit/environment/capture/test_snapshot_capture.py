"""What cannot be captured is named before anything counts, and reports and memory have bounds (F40, F41)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from serverless_gpu.environment.capture.snapshot_capture import capture
from serverless_gpu.environment.documents import FileRow, ProgressPoint
from serverless_gpu.environment.restore.cache.unpack import unpack
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import MemoryStore
from serverless_gpu.errors import EnvironmentTooLarge, EnvironmentUnsupported, StorageError
from tests.support.environment.counting import TINY, WHOLE_PACKS, CountingStore, claiming, two_units
from tests.support.environment.scanned import contents, scan_of, source_of
from tests.support.golden import golden

GB = 10**9


# --- what is not as it was said ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 500])
def test_a_record_that_lies_leads_to_the_true_address(tmp_path: Path, length: int) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "edited").write_bytes(b"x" * length)
    (before / "plain").write_bytes(b"plain")
    (before / "other").write_bytes(b"other")
    true = scan_of({"thing": source_of(before)})
    claimed = claiming(true, "site/edited", sha256=hashlib.sha256(b"as it was installed").digest())
    assert claimed.snapshot.address != true.snapshot.address
    blobs = StoreBlobs(MemoryStore())
    captured = capture(claimed, blobs, settings=TINY)
    assert captured.snapshot == true.snapshot
    assert captured.scan.sources == true.sources
    assert captured.moved == {claimed.snapshot.addresses()[0]: true.snapshot.addresses()[0]}
    unpack(blobs.read_unit(true.snapshot.addresses()[0]), blobs, tmp_path / "after")
    assert contents(tmp_path / "after/site") == contents(before)


@pytest.mark.parametrize(("claimed", "real"), [(5, 7), (5, 0), (0, 5), (5, 300), (300, 5), (300, 301), (300, 299)])
def test_a_size_that_was_another_is_corrected(tmp_path: Path, claimed: int, real: int) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for name in ("a", "c"):
        (before / name).write_bytes(name.encode() * 40)
    (before / "y").write_bytes(os.urandom(real))  # after others that were counted already
    true = scan_of({"thing": source_of(before)})
    wrong = claiming(true, "site/y", size=claimed, sha256=hashlib.sha256(bytes(claimed)).digest())
    blobs, seen = StoreBlobs(MemoryStore()), list[ProgressPoint]()
    captured = capture(wrong, blobs, settings=TINY, report=seen.append)
    assert captured.snapshot == true.snapshot
    assert seen[-1].bytes_done == 80 + real
    assert seen[-1].files_done == 3
    unpack(blobs.read_unit(true.snapshot.addresses()[0]), blobs, tmp_path / "after")
    assert contents(tmp_path / "after/site") == contents(before)


def test_a_file_that_never_has_the_size_it_says_is_named(tmp_path: Path) -> None:
    # As a log that grows with each look: the kernel says 0 bytes, and gives more.
    row = FileRow(path="site/uptime", size=0, sha256=hashlib.sha256(b"").digest())
    store = CountingStore()
    with pytest.raises(EnvironmentUnsupported, match=re.escape(golden("environment.taking.proc-uptime-changes"))):
        capture(scan_of({"thing": LocalUnit(rows=(row,), files=("/proc/uptime",))}), StoreBlobs(store))
    assert not store.puts


def test_a_text_stands_instead_of_a_file(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "tool").write_bytes(b"#!/home/me/venv/bin/python\nprint()\n")
    text = b"#!python\nprint()\n"
    row = FileRow(path="site/tool", size=len(text), sha256=hashlib.sha256(text).digest(), kind="x")
    source = LocalUnit(rows=(row,), files=(str(before / "tool"),), texts={0: text})
    blobs = StoreBlobs(MemoryStore())
    captured = capture(scan_of({"thing": source}), blobs)
    assert not captured.moved
    unpack(blobs.read_unit(captured.units_new[0]), blobs, tmp_path / "after")
    assert (tmp_path / "after/site/tool").read_bytes() == text


# --- what cannot be captured ------------------------------------------------------------------------------------------


def test_a_file_that_is_gone_is_named_and_nothing_is_sent(tmp_path: Path) -> None:
    scan, store = two_units(tmp_path), CountingStore()
    gone = sorted(tmp_path.rglob("f*"))[-1]
    gone.unlink()
    with pytest.raises(
        EnvironmentUnsupported, match=golden("environment.taking.disappeared-while-environment", gone=gone)
    ):
        capture(scan, StoreBlobs(store), settings=TINY)
    assert not store.puts


@pytest.mark.parametrize("kind", ["fifo", "directory", "unreadable"])
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_sent(tmp_path: Path, kind: str) -> None:
    scan, store = two_units(tmp_path), CountingStore()
    bad = sorted(tmp_path.rglob("f*"))[-1]
    bad.unlink()
    if kind == "fifo":
        os.mkfifo(bad)
    elif kind == "directory":
        bad.mkdir()
    else:
        bad.symlink_to("/proc/self/mem")  # open to everybody, readable by nobody: also for root
    with pytest.raises(EnvironmentUnsupported, match=re.escape(str(bad))):
        capture(scan, StoreBlobs(store), settings=TINY)
    assert "snapshots" not in store.kinds()
    assert "units" not in store.kinds() or kind != "unreadable"


def test_a_file_without_permission_is_named_before_anything_is_sent() -> None:
    top = Path(tempfile.mkdtemp(prefix="sg-"))
    uid = os.geteuid()
    try:
        scan, store = two_units(top), CountingStore()
        bad = sorted(top.rglob("f*"))[-1]
        bad.chmod(0)
        if uid == 0:
            top.chmod(0o755)
            os.seteuid(65534)  # root reads everything
        with pytest.raises(EnvironmentUnsupported) as caught:
            capture(scan, StoreBlobs(store), settings=TINY)
    finally:
        os.seteuid(uid)
        shutil.rmtree(top)
    assert str(caught.value) == golden("environment.taking.cannot-read-so", bad=bad)
    assert not store.puts


def test_a_name_that_no_restore_would_accept_is_refused(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for name in ("README", "readme"):
        (before / name).write_bytes(name.encode())
    store = CountingStore()
    with pytest.raises(EnvironmentUnsupported) as caught:
        capture(scan_of({"thing": source_of(before)}), StoreBlobs(store))
    assert golden("environment.taking.thing-readme-same") in str(caught.value)
    assert not store.puts


def test_zeros_without_measure_are_refused_by_name(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    with open(before / "zeros", "wb") as sparse:
        sparse.truncate(400_000_000)
    zeros = FileRow(path="site/zeros", size=400_000_000, sha256=bytes(32))  # corrected by the capture
    store = CountingStore()
    with pytest.raises(EnvironmentUnsupported, match=golden("environment.taking.thing-cannot-captured")):
        capture(scan_of({"thing": LocalUnit(rows=(zeros,), files=(str(before / "zeros"),))}), StoreBlobs(store))
    assert "snapshots" not in store.kinds()
    assert "units" not in store.kinds()


def test_F41_over_the_cap_the_ten_largest_are_named_before_a_byte_moves(tmp_path: Path) -> None:
    sources = {}
    for number in range(16):
        path = tmp_path / f"data{number}"
        with open(path, "wb") as sparse:
            sparse.truncate(GB + number * 10**8)
        row = FileRow(path=f"site/data{number}", size=path.stat().st_size, sha256=bytes(32))
        sources[f"package{number}"] = LocalUnit(rows=(row,), files=(str(path),))
    store = CountingStore()
    with pytest.raises(EnvironmentTooLarge) as caught:
        capture(scan_of(sources), StoreBlobs(store))
    largest = "\n".join(f"  {1 + number / 10:6.1f} GB  package{number} 1.0" for number in range(15, 5, -1))
    assert str(caught.value) == golden("environment.taking.environment-holds-28", largest=largest)
    assert not store.puts


def test_F40_a_store_without_space_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    store = CountingStore(free=10_000_000)
    with pytest.raises(StorageError, match=golden("environment.taking.memory-10-mb")) as caught:
        capture(two_units(tmp_path), StoreBlobs(store), settings=TINY)
    assert golden("environment.taking.67-mb-always") in caught.value.message
    assert "SERVERLESS_GPU_HOME" in caught.value.hint
    assert not store.puts


def test_F40_a_store_that_becomes_full_keeps_what_it_has_and_goes_on_later(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    for number in range(8):
        (before / f"f{number}").write_bytes(os.urandom(5_000_000))
    scan = scan_of({"thing": source_of(before)})
    store = CountingStore(free=64 * 1024 * 1024 + 15_000_000)
    with pytest.raises(StorageError, match=re.escape(golden("environment.taking.nothing-can-seen"))):
        capture(scan, StoreBlobs(store), settings=WHOLE_PACKS)
    sent = [key for key in store.puts if key.startswith("packs/")]
    assert sent
    assert "snapshots" not in store.kinds()
    store.free = GB
    captured = capture(scan, StoreBlobs(store), settings=WHOLE_PACKS)
    assert captured.packs_known == len(sent)


# --- reports and bounds -----------------------------------------------------------------------------------------------


def test_reports_come_from_one_thread_and_end_with_everything(tmp_path: Path) -> None:
    seen: list[ProgressPoint] = []
    threads = set()

    def report(progress: ProgressPoint) -> None:
        seen.append(progress)
        threads.add(threading.get_ident())

    scan = two_units(tmp_path)
    captured = capture(scan, StoreBlobs(CountingStore()), settings=TINY, report=report)
    assert threads == {threading.get_ident()}
    assert seen[-1] == ProgressPoint(
        phase="capture",
        bytes_done=scan.snapshot.size,
        bytes_total=scan.snapshot.size,
        files_done=scan.snapshot.files,
        files_total=scan.snapshot.files,
        moved_bytes=captured.sent_bytes,
    )


def test_reports_go_on_while_a_store_is_slow(tmp_path: Path) -> None:
    reports = threading.Semaphore(0)

    class Slow(MemoryStore):
        def put(self, objects: Mapping[str, bytes | memoryview]) -> None:
            if any(key.startswith("packs/") for key in objects):
                for _ in range(4):  # with nothing to report, this waits for four reports all the same
                    assert reports.acquire(timeout=30)
            super().put(objects)

    before = tmp_path / "before"
    before.mkdir()
    (before / "f").write_bytes(b"x")
    capture(scan_of({"thing": source_of(before)}), StoreBlobs(Slow()), report=lambda progress: reports.release())
