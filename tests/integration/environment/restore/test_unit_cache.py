"""Units come to a node once, verified, whoever asks at the same time and whoever dies; what is damaged is replaced."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from serverless_gpu.environment.documents import ProgressPoint
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache, UnitFetch
from serverless_gpu.environment.restore.cache.unpack import MTIME_S
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, StorageError
from serverless_gpu.testing import FakeClock
from tests.support.environment import fetching_process
from tests.support.environment.made_environments import Counting, Executable, Link, Made, Piece, altered
from tests.support.environment.restored_process import CANNOT_MOUNT, command
from tests.support.golden import golden
from tests.support.small_disks import small_disk


class Boot(FakeClock):
    """A clock of one boot of the machine."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def boot_id(self) -> str:
        """Return the name of the boot."""
        return self.name


@pytest.fixture
def store() -> Counting:
    return Counting()


@pytest.fixture
def made(store: Counting) -> Made:
    return Made(StoreBlobs(store))


@pytest.fixture
def cache(tmp_path: Path) -> UnitCache:
    return UnitCache(tmp_path / "environments", clock=FakeClock())


def alpha(made: Made) -> Piece:
    return made.distribution(
        "alpha",
        {
            "site/alpha/__init__.py": "a = 1\n",
            "site/alpha/big.bin": os.urandom(5_000_000),
            "site/alpha/alias.py": Link("__init__.py"),
            "prefix/bin/tool": Executable("#!/bin/sh\necho tool\n"),
        },
    )


def test_a_unit_is_unpacked_once_read_only_and_with_one_time(store: Counting, made: Made, cache: UnitCache) -> None:
    piece = alpha(made)
    reports: list[ProgressPoint] = []
    first = cache.ensure([piece.unit.address, piece.unit.address], made.blobs, reports.append)
    place = first.directories[piece.unit.address]
    assert (place / "site/alpha/__init__.py").read_text() == "a = 1\n"
    modes = {name: stat.S_IMODE((place / name).stat().st_mode) for name in ("site/alpha/big.bin", "prefix/bin/tool")}
    assert modes == {"site/alpha/big.bin": 0o444, "prefix/bin/tool": 0o555}
    assert (place / "site/alpha/big.bin").stat().st_mtime_ns == MTIME_S * 10**9
    assert (first.fetched, first.fetched_bytes) == (1, sum(block.length for block in piece.unit.blocks))
    assert (reports[-1].bytes_done, reports[-1].bytes_total) == (piece.member.size, piece.member.size)
    count = len(store.got)
    second = UnitCache(cache.root, clock=FakeClock()).ensure([piece.unit.address], made.blobs)
    assert (second.fetched, second.directories, len(store.got)) == (0, first.directories, count)


def test_a_unit_the_store_lacks_is_named(made: Made, cache: UnitCache) -> None:
    with pytest.raises(EnvironmentMissing, match=re.escape(golden("environment.cache.unit-111111111111-store"))):
        cache.ensure(["1" * 64], made.blobs)


def test_what_was_altered_on_its_way_is_asked_for_again(store: Counting, made: Made, cache: UnitCache) -> None:
    piece = alpha(made)
    store.altered_times = 2
    assert cache.ensure([piece.unit.address], made.blobs).fetched == 1
    assert cache.verify(piece.unit.address, made.blobs) == ""


def test_an_error_of_the_disk_is_not_its_own_cause(made: Made, cache: UnitCache) -> None:
    unit = alpha(made).unit
    os.close(cache.hold("0" * 64))
    asked: list[int] = []

    def make_space(needed: int) -> None:
        asked.append(needed)
        if len(asked) > 1:
            raise StorageError("the disk is odd")

    with pytest.raises(StorageError) as caught:
        UnitFetch(cache, made.blobs, clock=cache.clock, make_space=make_space).run([unit], lambda address: False)
    assert caught.value.__cause__ is not caught.value


def test_F29_a_store_that_is_altered_for_good_is_an_error_and_leaves_nothing(
    store: Counting, made: Made, cache: UnitCache
) -> None:
    piece = alpha(made)
    store.altered_times = 1000
    with pytest.raises(EnvironmentCorrupt, match=f"pack {piece.unit.packs[0][:12]}"):
        cache.ensure([piece.unit.address], made.blobs)
    assert [path for path in cache.units.rglob("*") if not path.is_dir()] == []
    store.altered_times = 0
    assert cache.ensure([piece.unit.address], made.blobs).fetched == 1


def spoil_byte(place: Path) -> None:
    altered(place / "site/alpha/__init__.py")


def spoil_time(place: Path) -> None:
    os.utime(place / "site/alpha/__init__.py")


def spoil_by_removal(place: Path) -> None:
    (place / "site/alpha/big.bin").unlink()


def spoil_by_addition(place: Path) -> None:
    (place / "site/alpha/sitecustomize.py").write_text("")


def spoil_link(place: Path) -> None:
    (place / "site/alpha/alias.py").unlink()
    (place / "site/alpha/alias.py").symlink_to("/etc/passwd")


def spoil_mode(place: Path) -> None:
    (place / "site/alpha/__init__.py").chmod(0o644)


def spoil_documents(place: Path) -> None:
    (place / "unit").write_bytes(b"nonsense")


@pytest.mark.parametrize(
    ("spoil", "wrong"),
    [
        (spoil_byte, "site/alpha/__init__.py has different content"),
        (spoil_time, "site/alpha/__init__.py was modified"),
        (spoil_by_removal, "site/alpha/big.bin is missing"),
        (spoil_by_addition, "site/alpha/sitecustomize.py does not belong to the unit"),
        (spoil_link, "site/alpha/alias.py is not the link to __init__.py"),
        (spoil_mode, "site/alpha/__init__.py has the mode 644 instead of 444"),
        (spoil_documents, "the unit's documents are missing"),
    ],
)
def test_F29_what_is_damaged_in_the_cache_is_found_and_fetched_again(
    made: Made, cache: UnitCache, spoil: Callable[[Path], None], wrong: str
) -> None:
    piece = alpha(made)
    place = cache.ensure([piece.unit.address], made.blobs).directories[piece.unit.address]
    assert cache.verify(piece.unit.address, made.blobs) == ""
    spoil(place)
    assert cache.verify(piece.unit.address, made.blobs, read=spoil is spoil_byte) == wrong
    assert (place / "site/alpha/__init__.py").read_text() == "a = 1\n"
    assert cache.verify(piece.unit.address, made.blobs) == ""
    assert sorted(path.name for path in place.parent.iterdir()) == [piece.unit.address]


def test_F29_a_damaged_unit_that_cannot_be_fetched_is_not_used(store: Counting, made: Made, cache: UnitCache) -> None:
    piece = alpha(made)
    place = cache.ensure([piece.unit.address], made.blobs).directories[piece.unit.address]
    spoil_byte(place)
    store.delete([f"packs/{piece.unit.packs[0]}"])
    with pytest.raises(EnvironmentMissing):
        cache.verify(piece.unit.address, made.blobs)
    assert not place.exists()
    with pytest.raises(EnvironmentMissing):
        cache.ensure([piece.unit.address], made.blobs)


def test_bytecode_of_ours_is_no_damage(made: Made, cache: UnitCache) -> None:
    piece = alpha(made)
    place = cache.ensure([piece.unit.address], made.blobs).directories[piece.unit.address]
    (place / "site/alpha/__pycache__").mkdir()
    (place / "site/alpha/__pycache__/__init__.cpython-311.pyc").write_bytes(b"")
    assert cache.verify(piece.unit.address, made.blobs) == ""


@pytest.mark.skipif(bool(CANNOT_MOUNT), reason="this machine cannot mount overlays")
def test_F29_who_uses_a_damaged_unit_keeps_seeing_it_until_they_end(made: Made, cache: UnitCache) -> None:
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
    assert cache.verify(piece.unit.address, made.blobs) == golden("environment.cache.site-alpha-py")
    cache.evict(max_bytes=0)
    assert user.communicate("\n", timeout=60)[0] == "2\n"
    assert len(list(cache.units.glob("*/.old-*"))) == 1
    os.close(held)
    cache.evict()
    assert not list(cache.units.glob("*/.old-*"))


def test_F29_a_tree_of_links_to_a_damaged_unit_is_made_again(made: Made, cache: UnitCache) -> None:
    piece = made.distribution("alpha", {"site/alpha.py": "a = 1\n"})
    snapshot = made.snapshot([made.root([piece])])
    links = RestoreMethod(mode="links")
    restored = restore(snapshot.address, made.blobs, cache, way=links)
    module = next(Path(restored.tree).rglob("alpha.py"))
    altered(module)  # one file with the cache's
    with module.open("rb") as in_use:
        assert cache.verify(piece.unit.address, made.blobs) == golden("environment.cache.site-alpha-py")
        restore(snapshot.address, made.blobs, cache, way=links)
        assert in_use.read() == b"` = 1\n"
    assert module.read_text() == "a = 1\n"


def test_a_unit_of_an_earlier_boot_is_read_before_it_is_used_again(
    store: Counting, made: Made, cache: UnitCache
) -> None:
    piece = alpha(made)
    before = UnitCache(cache.root, clock=Boot("before"))
    place = before.ensure([piece.unit.address], made.blobs).directories[piece.unit.address]
    altered(place / "site/alpha/__init__.py")
    assert before.ensure([piece.unit.address], made.blobs).fetched == 0
    after = UnitCache(cache.root, clock=Boot("after"))
    assert after.ensure([piece.unit.address], made.blobs).fetched == 1
    assert (place / "site/alpha/__init__.py").read_text() == "a = 1\n"


def test_a_unit_that_was_written_to_the_disk_is_only_looked_at_after_a_boot(
    made: Made, cache: UnitCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = alpha(made)
    before = UnitCache(cache.root, clock=Boot("before"))
    before.ensure([piece.unit.address], made.blobs)
    before.settle([piece.unit.address])
    with monkeypatch.context() as nothing_is_read:
        nothing_is_read.setattr("serverless_gpu.environment.restore.cache.unit_cache.damage", None)
        assert UnitCache(cache.root, clock=Boot("after")).ensure([piece.unit.address], made.blobs).fetched == 0


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Path, Made]:
    directory = tmp_path / "store"
    return directory, Made(StoreBlobs(DirectoryStore(directory)))


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
    log, cache = tmp_path / "log", UnitCache(tmp_path / "cache")
    stop_at = f"packs/{two.unit.packs[0]}"
    killed = fetching_process.start(store, cache.root, log, [two.unit.address], stop_at=stop_at)
    until(lambda: cache.unit(two.unit.address).with_name(f".new-{two.unit.address}").exists())
    waiting = fetching_process.start(store, cache.root, log, [one.unit.address, two.unit.address])
    until(lambda: cache.unit(one.unit.address).exists())  # it goes on with what is free
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == golden("environment.cache.waits-unit-102", address=two.unit.address[:12])
    assert waiting.poll() is None
    killed.kill()
    killed.communicate(timeout=60)
    assert finish(waiting) == 2
    assert cache.verify(two.unit.address, made.blobs) == ""
    assert not list(cache.units.glob("*/.new-*"))


def test_what_the_dead_left_is_swept(shared: tuple[Path, Made], tmp_path: Path) -> None:
    store, made = shared
    piece = made.piece({"site/one.bin": os.urandom(100_000)})
    cache = UnitCache(tmp_path / "cache")
    stop_at = f"packs/{piece.unit.packs[0]}"
    killed = fetching_process.start(store, cache.root, tmp_path / "log", [piece.unit.address], stop_at=stop_at)
    until(lambda: len(list(cache.units.glob("*/.new-*"))) == 1)
    cache.evict()
    assert len(list(cache.units.glob("*/.new-*"))) == 1  # it lives
    killed.kill()
    killed.communicate(timeout=60)
    cache.evict()
    assert not list(cache.units.glob("*/.new-*"))


# --- space ------------------------------------------------------------------------------------------------------------


def used(made: Made, cache: UnitCache, clock: FakeClock, *pieces: Piece) -> str:
    """Restore an environment of these units and return its address; a second passes."""
    clock.advance(1)
    snapshot = made.snapshot([made.root(pieces)])
    restore(snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links"))
    return snapshot.address


def test_what_was_not_used_for_longest_goes_first_and_never_what_is_held(made: Made, tmp_path: Path) -> None:
    clock = FakeClock()
    cache = UnitCache(tmp_path / "cache", clock=clock)
    old, middle, young, common = (
        made.piece({f"site/{name}.bin": os.urandom(1_000_000)}) for name in ("old", "middle", "young", "common")
    )
    first = used(made, cache, clock, old, common)
    second = used(made, cache, clock, middle)
    third = used(made, cache, clock, young, common)
    held = cache.hold(second)

    def there() -> list[str]:
        names = {"old": old, "middle": middle, "young": young, "common": common}
        return [name for name, piece in names.items() if cache.unit(piece.unit.address).exists()]

    assert cache.evict(max_bytes=10**9) == 0
    assert 1_000_000 < cache.evict(max_bytes=3_200_000) < 1_100_000
    assert there() == ["middle", "young", "common"]
    assert not cache.environment(first).exists()
    cache.evict(max_bytes=0)
    assert there() == ["middle"]
    assert not cache.environment(third).exists()
    os.close(held)
    assert cache.evict(max_bytes=0) > 0
    assert there() == []
    restored = restore(third, made.blobs, cache, way=RestoreMethod(mode="links"))
    assert restored.units_fetched == 2


@pytest.mark.parametrize("mode", ["overlay", "links"])
def test_environments_that_nobody_uses_go_and_their_units_stay(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["overlay", "links"]
) -> None:
    monkeypatch.setattr("serverless_gpu.environment.restore.cache.unit_cache.ENVIRONMENTS_MAX", 2)
    cache = UnitCache(tmp_path / "environments")
    snapshots = [made.simple("shared", f"mine{number}") for number in range(5)]
    held = cache.hold(snapshots[0].address)
    for snapshot in snapshots:
        assert not restore(snapshot.address, made.blobs, cache, way=RestoreMethod(mode=mode)).mended
    cache.evict()
    left = {snapshots[number].address for number in (0, 3, 4)}
    assert {path.name for path in cache.trees.iterdir()} == left
    locks = {path.name.partition(".")[0] for path in cache.locks.iterdir()}
    assert locks - {"units", "evicting", "linking"} == left
    assert cache.sizes()[0] == 6
    os.close(held)
    assert not restore(snapshots[4].address, made.blobs, cache, way=RestoreMethod(mode=mode)).mended


def test_a_restore_evicts_afterwards_what_is_over_the_size(made: Made, tmp_path: Path) -> None:
    clock = FakeClock()
    cache = UnitCache(tmp_path / "cache", clock=clock, max_bytes=1_500_000)
    one, two = (made.piece({f"site/{name}.bin": os.urandom(1_000_000)}) for name in ("one", "two"))
    used(made, cache, clock, one)
    used(made, cache, clock, two)
    assert not cache.unit(one.unit.address).exists()
    assert cache.unit(two.unit.address).exists()


def test_a_restore_does_not_evict_itself_from_a_cache_that_is_too_small_for_it(made: Made, tmp_path: Path) -> None:
    clock = FakeClock()
    cache = UnitCache(tmp_path / "cache", clock=clock, max_bytes=1)
    piece = made.piece({"site/one.bin": os.urandom(100_000)})
    used(made, cache, clock, piece)
    assert cache.unit(piece.unit.address).exists()


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
    cache = UnitCache(disk / "environments")
    piece = made.piece({f"site/{number}.bin": os.urandom(1_000_000) for number in range(70)})
    reads = store.packs_got()
    with pytest.raises(StorageError) as caught:
        cache.ensure([piece.unit.address], made.blobs)
    assert caught.value.message.startswith(golden("environment.cache.disk-full-kept", disk=disk))
    assert golden("environment.cache.environment-needs-70") in caught.value.message
    assert "SERVERLESS_GPU_HOME" in caught.value.hint
    assert store.packs_got() == reads  # seen before the first byte
    assert files_below(disk / "environments" / "units") == []


@needs_mount
def test_F27_what_nobody_uses_goes_first_and_what_is_held_stays(disk: Path, made: Made) -> None:
    clock = FakeClock()
    cache = UnitCache(disk / "environments", clock=clock)
    one, two = (made.piece({f"site/{name}.bin": os.urandom(40_000_000)}) for name in ("one", "two"))
    first = used(made, cache, clock, one)
    held = cache.hold(first)
    with pytest.raises(StorageError, match=golden("environment.cache.disk-full", disk=disk)):
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

    cache = UnitCache(disk / "environments", floor_bytes=0)
    with pytest.raises(StorageError, match=golden("environment.cache.disk-full-free", disk=disk)):
        cache.ensure([piece.unit.address], StoreBlobs(Filling()))
    assert files_below(disk / "environments" / "units") == []
    filler.unlink()
    assert cache.ensure([piece.unit.address], made.blobs).fetched == 1
    assert cache.verify(piece.unit.address, made.blobs) == ""
