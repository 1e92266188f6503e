"""The directory store: private, durable, whole under full disks, killed writers and several processes."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serverless_gpu.environment.stores.base import OBJECT_BYTES_MAX, Store
from serverless_gpu.environment.stores.blobs import Blobs
from serverless_gpu.environment.stores.directory import INCOMING, DirectoryStore
from serverless_gpu.environment.stores.memory import MemoryStore
from serverless_gpu.environment.stores.opening import open_store
from serverless_gpu.errors import EnvironmentRejected, StorageError, StoreUnavailable
from serverless_gpu.testing import FakeClock
from serverless_gpu.testing.stores import pack_key
from tests.support.environment.environments_in_stores import capture
from tests.support.golden import golden
from tests.support.second_process import SOURCE
from tests.support.small_disks import small_disk

DATA = bytes(range(256)) * 4096
KEY = pack_key(DATA)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_only_its_owner_can_look_inside(root: Path) -> None:
    old = os.umask(0)
    try:
        capture(Blobs(DirectoryStore(root)), b"1")
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
from serverless_gpu.environment.stores.directory import DirectoryStore
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
from serverless_gpu.environment.stores.directory import DirectoryStore
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
    with pytest.raises(StoreUnavailable, match=re.escape(golden("unit.directory_store.plain-file"))):
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
    assert caught.value.message == golden("unit.directory_store.cannot-write-store", KEY=KEY, url=store.url)
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
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("unit.directory_store.range-can-read"))):
        store.get(KEY)
    assert store.get(KEY, OBJECT_BYTES_MAX - 1, 10) == b"\0\0"


# F40 ------------------------------------------------------------------------------------------------------------------


def test_F40_too_little_space_is_said_before_the_first_byte(root: Path) -> None:
    class Small(DirectoryStore):
        def free_bytes(self) -> int | None:
            return len(DATA) - 1

    with pytest.raises(StorageError) as caught:
        Small(root).put({KEY: DATA})
    assert str(caught.value) == golden("unit.directory_store.space-left-store", as_uri=root.as_uri())
    assert files(root) == []
    with pytest.raises(StorageError, match=re.escape(golden("unit.directory_store.bytes-write-10"))):
        MemoryStore(capacity_bytes=10).put({KEY: DATA})


def limited(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a process that may write files of at most 300,000 bytes: to it, that is a disk that gets full."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    program = f"""
from pathlib import Path
from serverless_gpu.environment.stores.blobs import Blobs
from serverless_gpu.environment.stores.directory import DirectoryStore
from serverless_gpu.errors import StorageError
blobs = Blobs(DirectoryStore(Path({str(root)!r})))
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
        "unit.directory_store.full-space-left", as_uri=root.as_uri(), strerror=os.strerror(errno.EFBIG)
    )
    # Nothing half-visible, nothing left over; what was there is; and it goes on once there is space.
    assert files(root) == [f"packs/{small[:2]}/{small}"]
    blobs = Blobs(DirectoryStore(root))
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
        blobs = Blobs(store)
        first = blobs.write_pack(os.urandom(2_000_000))
        second = os.urandom(2_000_000)
        with pytest.raises(StorageError, match=golden("unit.directory_store.mb-write-mb")):
            blobs.write_pack(second)
        assert [stored.key for stored in store.list("packs")] == [f"packs/{first}"]
        assert blobs.read_pack(first)
        store.delete([f"packs/{first}"])
        blobs.write_pack(second)


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
