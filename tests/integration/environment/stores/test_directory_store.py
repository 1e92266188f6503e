"""The directory store: private, durable, whole under full disks, killed writers and several processes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import INCOMING, DirectoryStore
from serverless_gpu.errors import StorageError
from serverless_gpu.testing.stores import pack_key
from tests.support.environment.directory_store import KEY, files
from tests.support.golden import golden
from tests.support.second_process import SOURCE
from tests.support.small_disks import small_disk


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_everything_is_durable_before_it_is_said(root: Path) -> None:
    log = root.parent / "calls"
    program = f"""
import os, sys
log = open({str(log)!r}, "w")
for name in ("fsync", "rename"):
    def spied(*arguments, real=getattr(os, name), name=name):
        of = os.readlink(f"/proc/self/fd/{{arguments[0]}}") if name == "fsync" else " ".join(map(os.fspath, arguments))
        log.write(f"{{name}} {{of}}\\n")
        return real(*arguments)
    setattr(os, name, spied)
from pathlib import Path
from serverless_gpu.environment.stores.directory_store import DirectoryStore
DirectoryStore(Path({str(root)!r})).put({{{KEY!r}: b"x"}})
"""
    subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=60, env={**os.environ, "PYTHONPATH": str(SOURCE)}
    )
    calls = log.read_text().splitlines()
    place = f"{root}/packs/{KEY[6:8]}"
    *directories, content, shelf, renamed, last = calls
    assert content.startswith(f"fsync {root}/{INCOMING}/")
    assert renamed == f"rename {content.removeprefix('fsync ')} {place}/{KEY[6:]}"
    assert last == f"fsync {place}"
    assert [*directories, shelf] == [f"fsync {path}" for path in (root.parent, root, root, f"{root}/packs")]


WRITER = """
import sys
from pathlib import Path
from serverless_gpu.environment.stores.directory_store import DirectoryStore
root, key, byte, times = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = DirectoryStore(root)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(times):
    store.put({key: bytes([byte]) * (1_000_000 + byte)})
print("done", flush=True)
"""


def writer(root: Path, key: str, byte: int, times: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), key, str(byte), str(times)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("bytes_of_writers", [(1, 2), (3, 3)], ids=["different", "same"])
def test_two_processes_write_one_object(root: Path, bytes_of_writers: tuple[int, int]) -> None:
    allowed = {bytes([byte]) * (1_000_000 + byte) for byte in bytes_of_writers}
    processes = [writer(root, "gc/condemned", byte, 20) for byte in bytes_of_writers]
    try:
        assert [said(process) for process in processes] == ["ready", "ready"]
        for process in processes:
            let_go(process)
        store, seen = DirectoryStore(root), 0
        while any(process.poll() is None for process in processes):
            try:
                assert store.get("gc/condemned") in allowed
                seen += 1
            except KeyError:
                assert not seen  # not yet; never again
    finally:
        for process in processes:
            process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    assert seen
    assert store.get("gc/condemned") in allowed
    assert files(root) == ["gc/condemned"]


def test_a_killed_writer_leaves_nothing_that_is_seen(root: Path) -> None:
    process = writer(root, "gc/condemned", 1, 1_000_000)
    try:
        assert said(process) == "ready"
        let_go(process)
        deadline = time.monotonic() + 60
        while not list((root / INCOMING).glob("*")) if (root / INCOMING).is_dir() else True:
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGKILL)
    finally:
        process.communicate(timeout=60)
    store = DirectoryStore(root)
    if store.present(["gc/condemned"]):
        assert store.get("gc/condemned") == b"\1" * 1_000_001
    assert {stored.key for stored in store.list("gc")} <= {"gc/condemned"}


def limited(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a process that may write files of at most 300,000 bytes: to it, that is a disk that gets full."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    program = f"""
from pathlib import Path
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from serverless_gpu.errors import StorageError
blobs = StoreBlobs(DirectoryStore(Path({str(root)!r})))
{script}
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )


def test_F40_a_disk_that_gets_full_on_the_way(root: Path) -> None:
    script = """
for size in (200_000, 400_000):
    try:
        print(blobs.write_pack(bytes(size)))
    except StorageError as error:
        print("full:", error.message)
"""
    done = limited(root, script)
    small, full = done.stdout.splitlines()
    assert full == golden(
        "environment.directory_store.full-space-left", as_uri=root.as_uri(), strerror=os.strerror(errno.EFBIG)
    )
    # Nothing half-visible, nothing left over; what was there is; and it goes on once there is space.
    assert files(root) == [f"packs/{small[:2]}/{small}"]
    blobs = StoreBlobs(DirectoryStore(root))
    digest = pack_key(bytes(400_000)).removeprefix("packs/")
    assert blobs.missing_packs([small, digest]) == (digest,)
    assert blobs.write_pack(bytes(400_000)) == digest
    assert blobs.read_pack(digest) == bytes(400_000)


def test_F40_an_object_that_cannot_be_replaced_stays(root: Path) -> None:
    DirectoryStore(root).put({"gc/condemned": b"old"})
    done = limited(root, 'blobs.store.put({"gc/condemned": bytes(400_000)})')
    assert "StorageError" in done.stderr
    assert DirectoryStore(root).get("gc/condemned") == b"old"
    assert files(root) == ["gc/condemned"]


def test_F40_a_small_file_system() -> None:
    with small_disk("3m") as disk:
        store = DirectoryStore(disk / "store")
        blobs = StoreBlobs(store)
        first = blobs.write_pack(os.urandom(2_000_000))
        second = os.urandom(2_000_000)
        with pytest.raises(StorageError, match=golden("environment.directory_store.mb-write-mb")):
            blobs.write_pack(second)
        assert [stored.key for stored in store.list("packs")] == [f"packs/{first}"]
        assert blobs.read_pack(first)
        store.delete([f"packs/{first}"])
        blobs.write_pack(second)
