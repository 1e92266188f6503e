"""A snapshot becomes a tree that Python can be started in: by mounts where the machine can, else by links.

    restore ─ hold the environment ─ made before, and all of it still there? that is it (a few ms)
            ├ snapshot · interpreter of the same ABI on this machine · units into the cache
            ├ bytecode of what the caller had loaded
            └ overlay: layers with generated files, to be mounted at the view by its user
              links:   a tree of hard links to the units

What is made is kept in `trees/<address>` and found again. It is made beside its place and comes there by a rename, by
one process at a time; when something replaces it, who uses the old one keeps it.

Lives here: the order of things. `assembly.py` says what goes where, `link_tree.py` and `unit_cache.py` do it.

Failure cases: no such interpreter (EnvironmentUnsupported), what the cache raises (disk full, store altered), a killed
process (its `.new-` directory is removed by the next).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Literal

import msgspec

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.progress import ProgressPoint, Report, nobody
from serverless_gpu.environment.restore.assembly import paths_before
from serverless_gpu.environment.restore.bytecode import jobs
from serverless_gpu.environment.restore.cache.cache_directory import full, is_full, locked, occupied_bytes
from serverless_gpu.environment.restore.cache.unit_cache import Cache, Ensured
from serverless_gpu.environment.restore.preparation import Prepared, known_snapshot, loaded_jobs, prepare
from serverless_gpu.environment.restore.pythons import ask
from serverless_gpu.environment.restore.trees import (
    LAYERS_MAX,
    MAKING_S_MAX,
    Mount,
    ReadyTree,
    UnitSuspect,
    changed_units,
    forget_links,
    link_bytecode,
    make_links,
    make_overlay,
    mend_units,
    most_layers,
    read_ready,
    repair_sentence,
    tree_change,
)
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import read_snapshot
from serverless_gpu.errors import StorageError

Mode = Literal["overlay", "links"]


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How a tree is to be made, and why not by mounts: what `mounts.probe` said, for example."""

    mode: Mode = "overlay"
    why: str = ""


OVERLAY = Way()


class RestoredTree(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that is ready on this node.

    Attributes:
        address: of the snapshot.
        tree: its directory, as processes that use it see it.
        python: its interpreter.
        mode: by mounts or by links.
        why: why by links, or "".
        mounts: what a process has to mount before it sees the tree, in order; none with links.
        lock: a file to hold shared with flock while the tree is used; open it before asking for the restore, or hold
            it by `Cache.hold`.
        before: directories that come before the standard library on `sys.path`.
        base: the interpreter without an environment.
        fetched_bytes: what came from the store.
        units_fetched: how many units.
        ms: how long it took.
        note: what is different from where it was captured, or "".
        mended: what a run had changed in it, and was put right by this call, a sentence, or "".
    """

    address: str
    tree: str
    python: str
    mode: Mode
    why: str = ""
    mounts: tuple[Mount, ...] = ()
    lock: str = ""
    before: tuple[str, ...] = ()
    base: str = ""
    fetched_bytes: int = 0
    units_fetched: int = 0
    ms: int = 0
    note: str = ""
    mended: str = ""


def restore(
    address: str,
    blobs: StoreBlobs,
    cache: Cache,
    *,
    way: Way = OVERLAY,
    python: str = "",
    report: Report = nobody,
) -> RestoredTree:
    """Have an environment ready on this node.

    Args:
        address: of the snapshot.
        blobs: where it is, when it is not here.
        cache: of this node.
        way: by mounts, or by links and why.
        python: an interpreter to try first.
        report: how far it is.

    Raises:
        EnvironmentMissing: the store does not have the snapshot, or a unit of it.
        EnvironmentUnsupported: this machine has no interpreter for it.
        EnvironmentCorrupt: the store is altered.
        StorageError: the disk is full.
    """
    began_ns = cache.clock.boottime_ns()
    holding = cache.hold(address)
    try:
        ensured = Ensured(directories={})
        snapshot = known_snapshot(cache, address) or read_snapshot(blobs, address)
        way = _way_for(snapshot, way)
        ready = read_ready(cache, snapshot, way.mode)
        changes: list[str] = []

        def look() -> None:
            changes.extend(mend_units(snapshot, blobs, cache, report))

        if ready is not None or way.mode == "overlay":  # else whoever makes the links looks, which costs less
            look()
        changes += changed_units(snapshot, cache)
        ready = read_ready(cache, snapshot, way.mode) if changes else ready
        if ready is not None and not ready.mounts and (what := tree_change(snapshot, cache, ready)):
            changes.append(what)
            forget_links(snapshot, cache)
            ready = None
        if ready is None:
            prepared = prepare(snapshot, blobs, cache, python, report)
            ensured = prepared.ensured
            try:
                ready = _make(prepared, cache, way, look, report)
            except UnitSuspect:
                look()
                ready = _make(prepared, cache, way, look, report)
        cache.touch(address)
        if ensured.fetched:
            with contextlib.suppress(OSError, StorageError):  # it is restored; the next restore evicts
                cache.evict()  # while it is held: never what has just been made
    finally:
        os.close(holding)
    ms = (cache.clock.boottime_ns() - began_ns) // 1_000_000
    restored = _restored(snapshot, cache, ready, way, ensured, ms)
    return msgspec.structs.replace(restored, mended=repair_sentence(changes))


def compile_rest(address: str, cache: Cache, *, report: Report = nobody) -> int:
    """Compile what the caller had not loaded, link it into a tree of links, and write units to the disk; at idle."""
    holding = cache.hold(address)
    try:
        snapshot = known_snapshot(cache, address)
        ready = snapshot and (read_ready(cache, snapshot, "overlay") or read_ready(cache, snapshot, "links"))
        python = ask(ready.base) if ready else None
        if snapshot is None or python is None:
            return 0
        made = 0
        for unit in snapshot.addresses():
            work = jobs(cache.unit(unit), cache.document(unit).rows, python.tag)
            made += cache.compile({unit: work}, python.path, report) if work else 0
        link_bytecode(snapshot, cache)
        cache.settle(snapshot.addresses())
        return made
    finally:
        os.close(holding)


def _way_for(snapshot: Snapshot, way: Way) -> Way:
    layers = most_layers(snapshot)
    if way.mode == "overlay" and layers > LAYERS_MAX:
        return Way(mode="links", why=f"one directory is made of {layers} units, and {LAYERS_MAX} can be mounted")
    return way


def _make(prepared: Prepared, cache: Cache, way: Way, look: Callable[[], None], report: Report) -> ReadyTree:
    snapshot = prepared.snapshot
    with locked(cache.making_lock(snapshot.address), wait_s=MAKING_S_MAX):
        ready = read_ready(cache, snapshot, way.mode)
        if ready is not None:
            return ready  # somebody else has just made it
        if work := loaded_jobs(prepared, cache):
            look()  # no source that was written to is compiled
            cache.compile(work, prepared.base.path, report)
        report(ProgressPoint(phase="restore", files_total=snapshot.files, bytes_total=snapshot.size))
        make = make_overlay if way.mode == "overlay" else make_links
        ready = _with_space(cache, snapshot, lambda: make(snapshot, cache, prepared.base))
        report(
            ProgressPoint(
                phase="restore",
                files_done=snapshot.files,
                files_total=snapshot.files,
                bytes_done=snapshot.size,
                bytes_total=snapshot.size,
            )
        )
        return ready


def _with_space(cache: Cache, snapshot: Snapshot, make: Callable[[], ReadyTree]) -> ReadyTree:
    """Make a tree; when the disk is full, once more after what was not used for longest has gone."""
    needed = occupied_bytes(0, snapshot.files // 8 + 400)  # directories, and generated files
    try:
        return make()
    except OSError as error:
        if not is_full(error):
            raise StorageError(f"{error.filename or cache.trees} cannot be written: {error.strerror}.") from error
    cache.make_space(needed, keep=snapshot.addresses())
    try:
        return make()
    except OSError as error:
        raise full(cache.trees, needed, 0) from error


def _restored(snapshot: Snapshot, cache: Cache, ready: ReadyTree, way: Way, ensured: Ensured, ms: int) -> RestoredTree:
    tree = ready.tree
    return RestoredTree(
        address=snapshot.address,
        tree=tree,
        python=f"{tree}/bin/python",
        mode=way.mode,
        why=way.why if way.mode == "links" else "",
        mounts=ready.mounts,
        lock=str(cache.use_lock(snapshot.address)),
        before=paths_before(snapshot, tree),
        base=ready.base,
        fetched_bytes=ensured.fetched_bytes,
        units_fetched=ensured.fetched,
        ms=ms,
        note=ready.note,
    )
