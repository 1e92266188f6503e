"""F29: what is written through links to units is found by a look at each file, also when its time was put back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.cache.unit_integrity import exposed_since, suspects
from serverless_gpu.environment.restore.export import ExportRequest, export
from serverless_gpu.environment.restore.restore import RestoreMethod, compile_rest, restore
from serverless_gpu.environment.restore.trees import mend_units
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentCorrupt
from tests.support.environment.made_environments import Counting, Made, interpreter
from tests.support.golden import golden

_LATER_NS = 50_000_000
LINKS = RestoreMethod(mode="links", why="asked")


@pytest.fixture
def made() -> Made:
    return Made(StoreBlobs(Counting()))


@pytest.fixture
def cache(tmp_path: Path) -> UnitCache:
    return UnitCache(tmp_path / "environments")


def module(tree: str) -> Path:
    return Path(tree) / "lib" / f"python{interpreter().minor}" / "site-packages" / "alpha" / "__init__.py"


def spoil(path: Path) -> None:
    """Change a byte, and put the file's time and mode back."""
    status = path.stat()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b"alpha", b"ALPHA"))
    path.chmod(status.st_mode)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    while path.stat().st_ctime_ns < status.st_ctime_ns + _LATER_NS:  # some file systems count in ticks of 4 ms
        path.chmod(status.st_mode)


def found(snapshot: Snapshot, cache: UnitCache) -> list[tuple[list[str], list[str]]]:
    units = [cache.unit(address) for address in snapshot.addresses()]
    return [suspects(unit, exposed_since(unit)) for unit in units]


def test_F29_a_change_that_puts_size_and_time_back_is_found(made: Made, cache: UnitCache) -> None:
    snapshot = made.simple("alpha", "beta")
    first = restore(snapshot.address, made.blobs, cache, way=LINKS)
    spoil(module(first.tree))
    second = restore(snapshot.address, made.blobs, cache, way=LINKS)
    assert golden("environment.exposure.changed-run-alpha") in second.mended
    assert module(second.tree).read_text() == "name = 'alpha'\n"
    assert not restore(snapshot.address, made.blobs, cache, way=LINKS).mended


def test_F29_a_change_through_an_exported_tree_is_found_by_another_snapshot(
    made: Made, cache: UnitCache, tmp_path: Path
) -> None:
    exported = export(made.simple("alpha").address, made.blobs, cache, ExportRequest(target=tmp_path / "there"))
    spoil(module(exported.tree))
    other = restore(made.simple("alpha", "beta").address, made.blobs, cache)
    assert golden("environment.exposure.alpha-init-py") in other.mended


def test_links_made_and_removed_by_us_and_bytecode_are_no_change(made: Made, cache: UnitCache) -> None:
    snapshot = made.simple("alpha")
    restore(snapshot.address, made.blobs, cache, way=LINKS)
    compile_rest(snapshot.address, cache)
    for name in ("beta", "gamma"):
        restore(made.simple("alpha", name).address, made.blobs, cache, way=LINKS)
        assert found(snapshot, cache) == [([], [])]
    held = cache.hold(snapshot.address)
    monkey = made.simple("alpha", "beta").address
    (cache.trees / monkey).rename(cache.trees / f".old-{monkey}-00000000")
    cache.evict()
    os.close(held)
    assert not list(cache.trees.glob(".old-*"))
    assert found(snapshot, cache) == [([], [])]
    assert not restore(snapshot.address, made.blobs, cache, way=LINKS).mended


def test_bytecode_that_was_written_to_is_thrown_away(made: Made, cache: UnitCache) -> None:
    snapshot = made.simple("alpha")
    first = restore(snapshot.address, made.blobs, cache, way=LINKS)
    compile_rest(snapshot.address, cache)
    (bytecode,) = (module(first.tree).parent / "__pycache__").iterdir()
    bytecode.chmod(0o644)
    with bytecode.open("ab") as file:
        file.write(b"more")
    later_ns = bytecode.stat().st_mtime_ns + _LATER_NS
    os.utime(bytecode, ns=(later_ns, later_ns))
    assert golden("environment.exposure.pyc-written") in restore(snapshot.address, made.blobs, cache, way=LINKS).mended
    assert not restore(snapshot.address, made.blobs, cache, way=LINKS).mended


def test_22C2_a_change_through_links_is_found_where_another_tree_of_links_is_made(made: Made, cache: UnitCache) -> None:
    first = restore(made.simple("alpha").address, made.blobs, cache, way=LINKS)
    spoil(module(first.tree))
    other = restore(made.simple("alpha", "beta").address, made.blobs, cache, way=LINKS)
    assert "alpha/__init__.py" in other.mended
    assert module(other.tree).read_text() == "name = 'alpha'\n"
    assert not restore(made.simple("alpha", "gamma").address, made.blobs, cache, way=LINKS).mended


def test_22C2_no_tree_is_made_of_a_unit_that_is_written_to_again_and_again(
    made: Made, cache: UnitCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = restore(made.simple("alpha").address, made.blobs, cache, way=LINKS)
    other = made.simple("alpha", "beta")
    written = module(first.tree)

    def mended_and_written_to(*asked: Any) -> tuple[str, ...]:
        found = mend_units(*asked)
        spoil(cache.unit(other.addresses()[0]) / "site" / "alpha" / "__init__.py")
        return found

    monkeypatch.setattr("serverless_gpu.environment.restore.restore.mend_units", mended_and_written_to)
    spoil(written)
    with pytest.raises(EnvironmentCorrupt, match=r"alpha/__init__\.py"):
        restore(other.address, made.blobs, cache, way=LINKS)
    monkeypatch.undo()
    assert module(restore(other.address, made.blobs, cache, way=LINKS).tree).read_text() == "name = 'alpha'\n"
