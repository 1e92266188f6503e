"""What somebody writes to a mounted unit below the cache is found, also when its size and its time are as they were."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import Snapshot, SnapshotOrigin
from serverless_gpu.environment.restore.cache import unit_cache as unit_cache_module
from serverless_gpu.environment.restore.cache.cache_directory import read_document, write_document
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.cache.unit_integrity import BYTECODE, LOOK_S, sweep_unit
from serverless_gpu.environment.restore.cache.unpack import MTIME_S
from serverless_gpu.environment.restore.restore import OVERLAY, RestoredTree, RestoreMethod, compile_rest, restore
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.testing import FakeClock
from tests.support.environment.made_environments import Counting, Made, altered
from tests.support.golden import golden

SOURCE = "value = 1\n" + "# long enough to be compiled before the first import\n" * 4000
LINKS = RestoreMethod(mode="links", why="a test")


class Node:
    """A cache, over several boots of its machine."""

    def __init__(self, root: Path) -> None:
        self.store = Counting()
        self.made = Made(StoreBlobs(self.store))
        self.root = root
        self.clock = FakeClock()
        self.boots = 0
        self.cache = UnitCache(root, clock=self.clock)

    def boot(self) -> None:
        """Start the machine again."""
        self.boots += 1
        name = f"boot-{self.boots}"
        self.clock.boot_id = lambda: name  # type: ignore[method-assign]  # of this boot
        self.cache = UnitCache(self.root, clock=self.clock)

    def restore(self, snapshot: Snapshot, way: RestoreMethod = OVERLAY) -> RestoredTree:
        return restore(snapshot.address, StoreBlobs(self.store), self.cache, way=way)

    def snapshot(self) -> Snapshot:
        pieces = [
            self.made.distribution(name, {f"site/{name}/__init__.py": SOURCE, f"site/{name}/sub/more.py": "x = 1\n"})
            for name in ("alpha", "beta")
        ]
        loaded = tuple(f"site/{name}/__init__.py" for name in ("alpha", "beta"))
        return self.made.snapshot([self.made.root(pieces)], facts=SnapshotOrigin(loaded=(loaded,)))

    def unit(self, snapshot: Snapshot, number: int = 0) -> Path:
        return self.cache.unit(snapshot.roots[0].members[number].address)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "environments")


def later(node: Node) -> None:
    node.clock.advance(LOOK_S)


def rebooted(node: Node) -> None:
    node.boot()


def replaced(file: Path) -> None:
    """Put another file of the same size and time in the place of one."""
    other = file.with_name("other")
    shutil.copy2(file, other)
    altered(other)
    os.replace(other, file)


@pytest.mark.parametrize("when", [later, rebooted])
@pytest.mark.parametrize("change", [altered, replaced])
def test_22A7_a_file_that_keeps_its_size_and_time_is_found_and_fetched_again(
    node: Node, when: Callable[[Node], None], change: Callable[[Path], None]
) -> None:
    snapshot = node.snapshot()
    node.restore(snapshot)
    compile_rest(snapshot.address, node.cache)  # settles, too: after a boot nothing is read without a reason
    file = node.unit(snapshot) / "site/alpha/__init__.py"
    before = file.stat()
    change(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, MTIME_S * 10**9)
    when(node)
    restored = node.restore(snapshot)
    assert file.read_text() == SOURCE
    assert restored.units_fetched == 1
    assert golden("environment.exposure.alpha-init-py") in restored.mended
    assert node.restore(snapshot).mended == "", "told once"


def test_22A7_a_directory_that_was_made_before_the_unit_came_is_found(node: Node, tmp_path: Path) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / "more.py").write_text("x = 2\n")
    os.utime(planted / "more.py", (MTIME_S, MTIME_S))
    (planted / "more.py").chmod(0o444)
    snapshot = node.snapshot()
    node.restore(snapshot)
    compile_rest(snapshot.address, node.cache)
    sub = node.unit(snapshot) / "site/alpha/sub"
    sub.rename(tmp_path / "aside")
    planted.rename(sub)
    node.boot()
    assert golden("environment.sealing.alpha-sub-more") in node.restore(snapshot).mended
    assert (sub / "more.py").read_text() == "x = 1\n"


def test_22A7_bytecode_that_was_written_to_or_planted_is_thrown_away_and_compiled_again(node: Node) -> None:
    snapshot = node.snapshot()
    node.restore(snapshot)
    compile_rest(snapshot.address, node.cache)
    unit = node.unit(snapshot)
    (compiled,) = (unit / "site/alpha/__pycache__").iterdir()
    before = compiled.read_bytes()
    altered(compiled)
    (unit / "site/alpha/sub/__pycache__" / "planted.cpython-311.pyc").write_bytes(b"planted")
    later(node)
    assert "alpha/__pycache__" in node.restore(snapshot).mended
    assert compiled.read_bytes() == before
    assert not list(unit.rglob("planted*"))


def test_22A7_what_describes_a_unit_is_part_of_its_seal(node: Node) -> None:
    snapshot = node.snapshot()
    node.restore(snapshot)
    outline = node.unit(snapshot) / "outline"
    good, status = outline.read_bytes(), outline.stat()
    outline.write_bytes(good.replace(b"alpha/__init__.py", b"alpha/__evil__.py"))
    os.utime(outline, ns=(status.st_atime_ns, status.st_mtime_ns))
    later(node)
    assert golden("environment.sealing.describes-written") in node.restore(snapshot).mended
    assert outline.read_bytes() == good


def test_22A7_units_are_looked_at_once_in_a_while_and_not_at_each_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []

    def counted(unit: Path) -> object:
        swept.append(unit)
        return sweep_unit(unit)

    snapshot = node.snapshot()
    node.restore(snapshot)
    monkeypatch.setattr(unit_cache_module, "sweep_unit", counted)
    for _ in range(3):
        node.restore(snapshot)
    node.clock.advance(LOOK_S - 1)
    node.restore(snapshot)
    assert swept == []
    node.clock.advance(1)
    for _ in range(3):
        assert node.restore(snapshot).mended == ""
    assert len(swept) == 2
    node.boot()
    node.restore(snapshot)
    assert len(swept) == 4


def test_22A7_a_unit_of_an_earlier_version_is_read_once_and_is_no_alarm(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = node.snapshot()
    node.restore(snapshot)
    compile_rest(snapshot.address, node.cache)
    for number in (0, 1):
        address = snapshot.roots[0].members[number].address
        note = node.cache.note(address)
        assert note is not None
        unsealed = msgspec.structs.replace(note, files=b"", documents=b"", looked_ns=0)
        node.cache.write_note(address, unsealed)
        (node.cache.unit(address) / BYTECODE).unlink()
    later(node)
    restored = node.restore(snapshot)
    assert (restored.mended, restored.units_fetched) == ("", 0)
    later(node)
    with monkeypatch.context() as nothing_is_read:
        nothing_is_read.setattr(unit_cache_module, "damage", None)
        assert node.restore(snapshot).mended == ""
    address = snapshot.roots[0].members[0].address
    note = node.cache.note(address)
    assert note is not None
    node.cache.write_note(address, msgspec.structs.replace(note, files=b""))
    altered(node.unit(snapshot) / "site/alpha/__init__.py")
    later(node)
    assert "has different content" in node.restore(snapshot).mended


def test_22A7_links_bytecode_and_metadata_of_ours_are_no_change(node: Node) -> None:
    snapshot = node.snapshot()
    for way in (OVERLAY, LINKS, OVERLAY):
        node.restore(snapshot, way)
        compile_rest(snapshot.address, node.cache)
        later(node)
        assert node.restore(snapshot, way).mended == ""
    node.boot()
    restored = node.restore(snapshot)
    assert (restored.mended, restored.units_fetched) == ("", 0)


def test_22A7_a_name_that_is_not_utf_8_is_a_change(node: Node) -> None:
    snapshot = node.snapshot()
    node.restore(snapshot)
    unit = node.unit(snapshot)
    (Path(os.fsdecode(os.fsencode(unit) + b"/site/\xff.py"))).write_text("import os\n")
    later(node)
    assert golden("environment.sealing.does-belong") in node.restore(snapshot).mended


def test_22A7_a_forged_stamp_of_another_boot_is_not_believed(node: Node) -> None:
    snapshot = node.snapshot()
    node.restore(snapshot)
    compile_rest(snapshot.address, node.cache)
    altered(node.unit(snapshot) / "site/alpha/__init__.py")
    node.boot()
    stamp = node.cache.looked(snapshot.address)
    write_document(stamp, {"boot": "another", "at_ns": node.clock.boottime_ns()})
    assert read_document(stamp, dict[str, object]) is not None
    assert "has different content" in node.restore(snapshot).mended
