"""Units come to a node once, verified, whoever asks at the same time and whoever dies; what is damaged is replaced."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.environment.restore.cache import Cache
from serverless_gpu.environment.restore.restoring import restore
from serverless_gpu.environment.stores.blobs import Blobs
from serverless_gpu.environment.stores.directory import DirectoryStore
from serverless_gpu.errors import StorageError
from serverless_gpu.testing import FakeClock
from tests.support.environment import fetching_process
from tests.support.environment.cache import used
from tests.support.environment.made_environments import Counting, Made, altered
from tests.support.environment.restored_process import CANNOT_MOUNT, command
from tests.support.golden import golden
from tests.support.small_disks import small_disk


@pytest.fixture
def store() -> Counting:
    return Counting()


@pytest.fixture
def made(store: Counting) -> Made:
    return Made(Blobs(store))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "environments", clock=FakeClock())


@pytest.mark.skipif(bool(CANNOT_MOUNT), reason="this machine cannot mount overlays")
def test_F29_who_uses_a_damaged_unit_keeps_seeing_it_until_they_end(made: Made, cache: Cache) -> None:
    piece = made.distribution("alpha", {"site/alpha.py": "a = 1\n", "site/late.py": "l = 2\n"})
    snapshot = made.snapshot([made.root([piece])])
    restored = restore(snapshot.address, made.blobs, cache)
    code = "import alpha; print('up', flush=True); input(); import late; print(late.l, flush=True)"
    held = cache.hold(snapshot.address)
    user = subprocess.Popen(
        command(restored, "python", "-B", "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None and user.stdout.readline() == "up\n"
    altered(cache.unit(piece.unit.address) / "site/alpha.py")
    assert cache.verify(piece.unit.address, made.blobs) == golden("unit.cache.site-alpha-py")
    cache.evict(max_bytes=0)
    assert user.communicate("\n", timeout=60)[0] == "2\n"
    assert len(list(cache.units.glob("*/.old-*"))) == 1
    os.close(held)
    cache.evict()
    assert not list(cache.units.glob("*/.old-*"))


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, Made]:
    directory = tmp_path / "store"
    return directory, Made(Blobs(DirectoryStore(directory)))


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def finish(process: subprocess.Popen[str]) -> int:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return int(out)


def test_many_processes_fetch_each_unit_once(shared: tuple[Path, Made], tmp_path: Path) -> None:
    store, made = shared
    pieces = [made.piece({f"site/m{number}.bin": os.urandom(100_000)}) for number in range(40)]
    addresses = [piece.unit.address for piece in pieces]
    log = tmp_path / "log"
    gate, opened = os.pipe()
    crowd = [fetching_process.start(store, tmp_path / "cache", log, addresses, stdin=gate) for _ in range(4)]
    os.close(gate)
    os.close(opened)  # all of them go on now
    assert sum(map(finish, crowd)) == 40
    packs = [line.split()[1] for line in log.read_text().splitlines()]
    assert sorted(packs) == sorted(f"packs/{piece.unit.packs[0]}" for piece in pieces)


def test_a_process_killed_while_it_fetches_leaves_the_work_to_the_next(
    shared: tuple[Path, Made], tmp_path: Path
) -> None:
    store, made = shared
    one, two = (made.piece({f"site/{name}.bin": os.urandom(100_000)}) for name in ("one", "two"))
    log, cache = tmp_path / "log", Cache(tmp_path / "cache")
    stop_at = f"packs/{two.unit.packs[0]}"
    killed = fetching_process.start(store, cache.root, log, [two.unit.address], stop_at=stop_at)
    until(lambda: cache.unit(two.unit.address).with_name(f".new-{two.unit.address}").exists())
    waiting = fetching_process.start(store, cache.root, log, [one.unit.address, two.unit.address])
    until(lambda: cache.unit(one.unit.address).exists())  # it goes on with what is free
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == golden("unit.cache.waits-unit-102", address=two.unit.address[:12])
    assert waiting.poll() is None
    killed.kill()
    killed.communicate(timeout=60)
    assert finish(waiting) == 2
    assert cache.verify(two.unit.address, made.blobs) == ""
    assert not list(cache.units.glob("*/.new-*"))


def test_what_the_dead_left_is_swept(shared: tuple[Path, Made], tmp_path: Path) -> None:
    store, made = shared
    piece = made.piece({"site/one.bin": os.urandom(100_000)})
    cache = Cache(tmp_path / "cache")
    stop_at = f"packs/{piece.unit.packs[0]}"
    killed = fetching_process.start(store, cache.root, tmp_path / "log", [piece.unit.address], stop_at=stop_at)
    until(lambda: len(list(cache.units.glob("*/.new-*"))) == 1)
    cache.evict()
    assert len(list(cache.units.glob("*/.new-*"))) == 1  # it lives
    killed.kill()
    killed.communicate(timeout=60)
    cache.evict()
    assert not list(cache.units.glob("*/.new-*"))


@pytest.fixture
def disk() -> Iterator[Path]:
    """Yield a file system of 64 MB of its own."""
    with small_disk("64m") as place:
        yield place


needs_mount = pytest.mark.skipif(os.geteuid() != 0 or bool(CANNOT_MOUNT), reason="only root mounts a file system")


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and "units" in path.parts]


@needs_mount
def test_F27_a_full_disk_is_named_with_what_is_free_and_needed(disk: Path, store: Counting, made: Made) -> None:
    cache = Cache(disk / "environments")
    piece = made.piece({f"site/{number}.bin": os.urandom(1_000_000) for number in range(70)})
    reads = store.packs_got()
    with pytest.raises(StorageError) as caught:
        cache.ensure([piece.unit.address], made.blobs)
    assert caught.value.message.startswith(f"The disk at {disk} is full: 67.1 MB are free, and 3.4 MB of it stay")
    assert golden("unit.cache.environment-needs-70") in caught.value.message
    assert "SERVERLESS_GPU_HOME" in caught.value.hint
    assert store.packs_got() == reads  # seen before the first byte
    assert files_below(disk / "environments" / "units") == []


@needs_mount
def test_F27_what_nobody_uses_goes_first_and_what_is_held_stays(disk: Path, made: Made) -> None:
    clock = FakeClock()
    cache = Cache(disk / "environments", clock=clock)
    one, two = (made.piece({f"site/{name}.bin": os.urandom(40_000_000)}) for name in ("one", "two"))
    first = used(made, cache, clock, one)
    held = cache.hold(first)
    with pytest.raises(StorageError, match=golden("unit.cache.disk-full", disk=disk)):
        used(made, cache, clock, two)
    assert cache.verify(one.unit.address, made.blobs) == ""
    assert not cache.unit(two.unit.address).exists()
    os.close(held)
    used(made, cache, clock, two)
    assert cache.verify(two.unit.address, made.blobs) == ""
    assert not cache.unit(one.unit.address).exists()


@needs_mount
def test_F27_a_disk_that_others_fill_meanwhile_leaves_nothing_half_visible(
    disk: Path, store: Counting, made: Made
) -> None:
    piece = made.piece({f"site/{number}.bin": os.urandom(3_000_000) for number in range(8)})
    filler = disk / "filler"

    class Filling(Counting):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key.startswith("packs/") and not filler.exists():
                with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
                    while True:
                        file.write(bytes(1_000_000))
                with filler.open("r+b") as file:
                    file.truncate(filler.stat().st_size - 10_000_000)
            return store.get(key, start, length)

    cache = Cache(disk / "environments", floor_bytes=0)
    with pytest.raises(StorageError, match=golden("unit.cache.disk-full-free", disk=disk)):
        cache.ensure([piece.unit.address], Blobs(Filling()))
    assert files_below(disk / "environments" / "units") == []
    filler.unlink()
    assert cache.ensure([piece.unit.address], made.blobs).fetched == 1
    assert cache.verify(piece.unit.address, made.blobs) == ""
