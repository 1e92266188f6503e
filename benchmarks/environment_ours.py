"""Rounds of the environment rows through `environment/`. What is worked on is named by variables that the row sets."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec

from benchmarks import environment_sets as sets
from benchmarks.environment_neighbours import new_directory
from benchmarks.environment_sets import now_ns
from serverless_gpu.environment.capture.snapshot_capture import CaptureResult, scan_and_capture
from serverless_gpu.environment.compression import LEVEL_LOCAL
from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.scan.description import Description, read_description
from serverless_gpu.environment.scan.interpreter import describe_other
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.node.inside import namespaces


def unchanged(directory: str) -> dict[str, object]:
    """Ask whether an environment is the one known: the gate a call waits for, and the look at every file beside it."""
    description, index = _description(), _known()
    started_ns = now_ns()
    recogniser = Recogniser(index)
    same = recogniser.gate(description)
    gated_ns = now_ns()
    changes = recogniser.check()
    checked_ns = now_ns()
    if same is None or changes:
        raise RuntimeError(f"it is said to have changed: {same}, {changes[:3]}")
    return {"ms": (gated_ns - started_ns) / 1e6, "check_ms": (checked_ns - gated_ns) / 1e6}


def capture(directory: str) -> dict[str, object]:
    """Capture an environment nobody has seen into an empty store; every file is durable when it is over."""
    place, description = new_directory(), _description()
    started_ns = now_ns()
    taken = scan_and_capture(
        description, Recogniser(place / "index"), _blobs(place / "store"), level=LEVEL_LOCAL, report=ignore_progress
    )
    took_ns = now_ns() - started_ns
    return {"ms": took_ns / 1e6, "mb": taken.sent_bytes / 1e6, "memory_mb": _peak_mb()}


def restore_mounted(directory: str) -> dict[str, object]:
    """Restore with the units on the node and mount it: until a process that sees it has mounted it."""
    root = _fresh_trees()
    sets.settle()
    started_ns = now_ns()
    restored = restore(_named("SGPU_BENCH_SNAPSHOT"), _blobs(_store()), UnitCache(root))
    wanted = [msgspec.to_builtins(mount) for mount in restored.mounts]
    assembled_ns = now_ns()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            namespaces.enter_mounts(wanted)
            os.write(writing, str(now_ns()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        mounted_ns = int(answer.read() or 0)
    os.waitpid(child, 0)
    if not mounted_ns or restored.mode != "overlay":
        raise RuntimeError(f"it could not be mounted: {restored.why}")
    return {"ms": (mounted_ns - started_ns) / 1e6, "assembled_ms": (assembled_ns - started_ns) / 1e6}


def restore_linked(directory: str) -> dict[str, object]:
    """Restore with the units on the node as a tree of hard links."""
    root = _fresh_trees()
    sets.settle()
    started_ns = now_ns()
    restore(
        _named("SGPU_BENCH_SNAPSHOT"), _blobs(_store()), UnitCache(root), way=RestoreMethod(mode="links", why="asked")
    )
    return {"ms": (now_ns() - started_ns) / 1e6}


def restore_cold(directory: str) -> dict[str, object]:
    """Restore on a node that has nothing: packs of a store on this disk to files, each checked."""
    place = new_directory()
    sets.settle()
    started_ns = now_ns()
    restored = restore(_named("SGPU_BENCH_SNAPSHOT"), _blobs(_store()), UnitCache(place))
    took_ns = now_ns() - started_ns
    return {"ms": took_ns / 1e6, "mb": restored.fetched_bytes / 1e6, "memory_mb": _peak_mb()}


def sent_after_edit(directory: str) -> dict[str, object]:
    """Edit a file of torch by hand, as editors do: a new file in its place; capture into a store that has the rest."""
    tree = Path(_named("SGPU_BENCH_TREE"))
    path = sets.site_packages(tree) / "torch" / "nn" / "init.py"
    edited = path.with_suffix(".edited")
    edited.write_bytes(path.read_bytes() + f"# {now_ns()}\n".encode())
    edited.replace(path)
    return _captured_again()


def sent_after_install(directory: str) -> dict[str, object]:
    """Install another version of a small distribution (60 files, 80 kB)."""
    sets.write_distribution(sets.site_packages(Path(_named("SGPU_BENCH_TREE"))), "sgpu_small", now_ns(), files=60)
    return _captured_again()


def sent_after_upgrade(directory: str) -> dict[str, object]:
    """Replace torch by its next minor version: each round installs the wheel whose turn it is."""
    wheels = sorted(Path(_named("SGPU_BENCH_TORCH")).glob("torch-*.whl"))
    tree = Path(_named("SGPU_BENCH_TREE"))
    sets.unzip_wheel(wheels[len(_upgrades) % len(wheels)], tree)
    _upgrades.append(now_ns())
    return _captured_again()


_upgrades: list[int] = []


def _captured_again() -> dict[str, object]:
    before, started_ns = _stored_bytes(), now_ns()
    _taken()
    took_ns = now_ns() - started_ns
    return {"ms": took_ns / 1e6, "mb": (_stored_bytes() - before) / 1e6}


def _stored_bytes() -> int:
    """Return what the store holds: packs, and the lists of what is in them."""
    return sum(path.stat().st_size for path in _store().rglob("*") if path.is_file())


def _taken() -> CaptureResult:
    """Capture into the store that the row names, knowing what was captured into it before."""
    index = _store().with_name(f"{_store().name}-index")
    return scan_and_capture(_description(), Recogniser(index), _blobs(_store()), level=LEVEL_LOCAL)


def _fresh_trees() -> Path:
    """Return the node's directory, its units as they are, what the last round assembled put aside."""
    root = Path(_named("SGPU_BENCH_NODE"))
    if (root / "trees").exists():
        (root / "trees").rename(new_directory() / "trees")
    return root


@functools.cache
def _description() -> Description:
    return read_description(describe_other(str(Path(_named("SGPU_BENCH_TREE")) / "bin" / "python")))


@functools.cache
def _known() -> Path:
    """Return an index in which the environment is known."""
    index = new_directory() / "index"
    recogniser = Recogniser(index)
    recogniser.remember(recogniser.scan(_description(), ignore_progress))
    return index


def _blobs(store: Path) -> StoreBlobs:
    return StoreBlobs(open_store(str(store), os.environ))


def _store() -> Path:
    return Path(_named("SGPU_BENCH_STORE"))


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def _named(variable: str) -> str:
    return os.environ[variable]


def main() -> None:
    """Capture what is to be restored into the store that the rows have named; print the snapshot's address."""
    print(_taken().snapshot.address)


if __name__ == "__main__":
    main()
