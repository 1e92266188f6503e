"""Restores a snapshot as a tree for Python processes, with mounts if possible or else with hard links.

    restore ─ hold the environment ─ made before, and still complete? return it (a few ms)
            ├ snapshot · interpreter of the same ABI on this machine · units into the cache                  (`prepare`)
            ├ bytecode of the modules that the caller had loaded
            └ overlay: layers with generated files, which the user of the tree mounts at the view
              links:   a tree of hard links to the units

Restore stores the result in `trees/<address>` and reuses it. Only one process at a time restores an environment. The
restoring process creates the tree beside its final path and then renames the tree. After the replacement of a tree,
current processes keep using the old tree. `tree_plan.py` plans the paths in the tree. `link_tree.py` and
`unit_cache.py` create the planned files and links.

Failure cases: If no interpreter fits, restore raises EnvironmentUnsupported. The unit cache raises an error if the disk
is full or the store is altered. The next restore removes the `.new-` directory that a killed process left behind.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from serverless_gpu.environment.documents import ProgressPoint, Report, Root, Snapshot, Unit, ignore_progress
from serverless_gpu.environment.restore.bytecode import CompileJob, compile_jobs
from serverless_gpu.environment.restore.cache.cache_directory import (
    full,
    is_full,
    locked,
    make_public,
    occupied_bytes,
    read_document,
)
from serverless_gpu.environment.restore.cache.unit_cache import EnsuredUnits, UnitCache
from serverless_gpu.environment.restore.interpreters import Python, ask, find_python, keep, recall, trusted
from serverless_gpu.environment.restore.tree_plan import paths_before
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
from serverless_gpu.environment.snapshot_validation import check_snapshot
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import error_after_repair, read_snapshot
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, EnvironmentRejected, StorageError

FEW_BYTES = 128 * 1024
"""Number of source bytes that Python compiles in the time that starting a compiler process takes."""
Mode = Literal["overlay", "links"]


class RestoreMethod(msgspec.Struct, frozen=True, kw_only=True):
    """Method of making a tree (mounts or links), and the reason if mounts are impossible.

    `namespaces.probe_mounts` returns the reason why mounts are impossible.
    """

    mode: Mode = "overlay"
    why: str = ""


OVERLAY = RestoreMethod()


class RestoredTree(msgspec.Struct, frozen=True, kw_only=True):
    """A restored environment that processes on this node can use."""

    address: str
    tree: str  # path of the tree, as processes in the environment see it
    python: str
    mode: Mode
    why: str = ""  # Reason for using links instead of mounts, or "".
    # Mounts, in order, that a process makes before it uses the tree. A tree of links has no mounts.
    mounts: tuple[Mount, ...] = ()
    # Lock file of the tree. Before requesting a restore, a process that uses the tree opens the lock file and takes a
    # shared flock. `UnitCache.hold` takes the same shared lock.
    lock: str = ""
    before: tuple[str, ...] = ()  # Directories that come before the standard library on `sys.path`.
    base: str = ""  # Path of the base interpreter, outside of the environment.
    fetched_bytes: int = 0  # Number of bytes that the store sent.
    units_fetched: int = 0
    ms: int = 0
    note: str = ""  # Differences between this machine and the machine of the capture, or "".
    mended: str = ""  # Message about files that a run changed and this restore repaired, or "".


def restore(
    address: str,
    blobs: StoreBlobs,
    cache: UnitCache,
    *,
    way: RestoreMethod = OVERLAY,
    python: str = "",
    report: Report = ignore_progress,
) -> RestoredTree:
    """Restore an environment on this node, and return the restored tree.

    Raises:
        EnvironmentMissing: the store lacks the snapshot or one of its units.
        EnvironmentUnsupported: this machine has no interpreter for the environment.
        EnvironmentCorrupt: the store's copy was altered.
        StorageError: the disk is full.
    """
    began_ns = cache.clock.boottime_ns()
    holding = cache.hold(address)
    try:
        ensured = EnsuredUnits(directories={})
        snapshot = known_snapshot(cache, address) or read_snapshot(blobs, address)
        way = _way_for(snapshot, way)
        ready = read_ready(cache, snapshot, way.mode)
        changes: list[str] = []

        def look() -> None:
            changes.extend(mend_units(snapshot, blobs, cache, report))

        # For a new tree of links, linking the files checks them at lower cost.
        if ready is not None or way.mode == "overlay":
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
            # The restore succeeds despite this error. The next restore evicts units.
            with contextlib.suppress(OSError, StorageError):
                cache.evict()  # Eviction never removes this environment, because the caller holds its lock.
    finally:
        os.close(holding)
    ms = (cache.clock.boottime_ns() - began_ns) // 1_000_000
    restored = _restored(snapshot, cache, ready, way, ensured, ms)
    return msgspec.structs.replace(restored, mended=repair_sentence(changes))


def compile_rest(address: str, cache: UnitCache, *, report: Report = ignore_progress) -> int:
    """Compile all modules that have no bytecode yet, link the bytecode, and sync units to disk.

    Call this function while the node is idle. The function links the bytecode only for an environment that uses a tree
    of links.
    """
    holding = cache.hold(address)
    try:
        snapshot = known_snapshot(cache, address)
        ready = snapshot and (read_ready(cache, snapshot, "overlay") or read_ready(cache, snapshot, "links"))
        python = ask(ready.base) if ready else None
        if snapshot is None or python is None:
            return 0
        made = 0
        for unit in snapshot.addresses():
            work = compile_jobs(cache.unit(unit), cache.document(unit).rows, python.tag)
            made += cache.compile({unit: work}, python.path, report) if work else 0
        link_bytecode(snapshot, cache)
        cache.settle(snapshot.addresses())
        return made
    finally:
        os.close(holding)


def _way_for(snapshot: Snapshot, way: RestoreMethod) -> RestoreMethod:
    layers = most_layers(snapshot)
    if way.mode == "overlay" and layers > LAYERS_MAX:
        return RestoreMethod(
            mode="links", why=f"one directory consists of {layers} units, and the kernel can mount at most {LAYERS_MAX}"
        )
    return way


def _make(
    prepared: Prepared, cache: UnitCache, way: RestoreMethod, look: Callable[[], None], report: Report
) -> ReadyTree:
    snapshot = prepared.snapshot
    with locked(cache.making_lock(snapshot.address), wait_s=MAKING_S_MAX):
        ready = read_ready(cache, snapshot, way.mode)
        if ready is not None:
            return ready  # Another process restored the tree while this process waited for the lock.
        if work := loaded_jobs(prepared, cache):
            look()  # Restore checks source files before compiling them, because it must not compile modified source.
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


def _with_space(cache: UnitCache, snapshot: Snapshot, make: Callable[[], ReadyTree]) -> ReadyTree:
    """Make a tree. If the disk is full, evict unused units and try the restore once more."""
    needed = occupied_bytes(0, snapshot.files // 8 + 400)  # estimated size of directories and generated files in bytes
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


def _restored(
    snapshot: Snapshot, cache: UnitCache, ready: ReadyTree, way: RestoreMethod, ensured: EnsuredUnits, ms: int
) -> RestoredTree:
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


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot with its fetched units, and the interpreter that runs the environment on this machine."""

    snapshot: Snapshot
    base: Python
    ensured: EnsuredUnits


def known_snapshot(cache: UnitCache, address: str) -> Snapshot | None:
    """Return a snapshot that this node has already restored, without querying the store."""
    snapshot = read_document(cache.environment(address) / "snapshot", Snapshot)
    if snapshot is None or snapshot.address != address:
        return None
    try:
        check_snapshot(snapshot)
    except EnvironmentRejected:
        return None  # The local copy was altered. The store still has the original unit.
    return snapshot


def prepare(snapshot: Snapshot, blobs: StoreBlobs, cache: UnitCache, python: str, report: Report) -> Prepared:
    """Fetch the units of a snapshot into the cache. The caller must hold the environment's lock.

    Raises:
        EnvironmentCorrupt, EnvironmentMissing: the store has no valid copy of an object. Altered copies were removed.
        EnvironmentUnsupported, EnvironmentRejected, StorageError: as `restore`.
    """
    make_public(cache.root)
    answers = cache.root / "interpreters"
    recall(answers, cache.boot)
    hints = [python] if python else []
    if trusted(snapshot.facts.python):
        hints.append(snapshot.facts.python)
    base = find_python(snapshot.interpreter, hints)
    keep(answers, cache.boot)
    base = msgspec.structs.replace(base, note="; ".join(filter(None, (base.note, _glibc_note(snapshot)))))
    cache.register(snapshot)
    try:
        ensured = cache.ensure(snapshot.addresses(), blobs, report, accept=_as_listed(snapshot))
    except (EnvironmentCorrupt, EnvironmentMissing) as error:
        raise error_after_repair(error, blobs, snapshot.addresses()) from None
    return Prepared(snapshot=snapshot, base=base, ensured=ensured)


def _as_listed(snapshot: Snapshot) -> Callable[[Unit], None]:
    """Return a function that rejects a unit if its size differs from the size in the snapshot (F41).

    Without the size comparison, a snapshot could evade size limits by listing smaller sizes.
    """
    listed = {member.address: (member.size, member.files) for root in snapshot.roots for member in root.members}

    def accept(unit: Unit) -> None:
        content = [row.size for row in unit.rows if row.has_content]
        if (sum(content), len(content)) != listed[unit.address]:
            raise EnvironmentRejected(
                f"snapshot {snapshot.address[:12]}: unit {unit.address[:12]} holds {sum(content)} bytes in "
                f"{len(content)} files, and the snapshot lists {listed[unit.address][0]} bytes in "
                f"{listed[unit.address][1]} files"
            )

    return accept


def loaded_jobs(prepared: Prepared, cache: UnitCache) -> dict[str, list[CompileJob]]:
    """Return the source files, by unit, that the caller had loaded and that have no bytecode.

    The function returns no files if compiling them on import is faster than starting a compiler process. `compile_rest`
    later compiles all files without bytecode.
    """
    work: dict[str, list[CompileJob]] = {}
    for address, missing in _loaded(prepared.snapshot, cache, prepared.base.tag):
        work.setdefault(address, []).extend(missing)
    return work if sum(job.size for each in work.values() for job in each) > FEW_BYTES else {}


def _glibc_note(snapshot: Snapshot) -> str:
    """Return a warning if the capture used a newer glibc than this machine has, or ""."""
    theirs, ours = snapshot.interpreter.glibc, glibc()
    if theirs and ours and _numbers(theirs) > _numbers(ours):
        return f"captured with glibc {theirs}, but this machine has {ours}"
    return ""


def glibc() -> str:
    """Return this machine's glibc version, for example ``2.36``, or "" for another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return ""
    return version if name == "glibc" else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _loaded(snapshot: Snapshot, cache: UnitCache, tag: str) -> Iterator[tuple[str, list[CompileJob]]]:
    """Yield each unit with its loaded source files that have no bytecode yet."""
    for root, paths in zip(snapshot.roots, snapshot.facts.loaded, strict=False):
        for address, here in _by_unit(root, cache, paths).items():
            unit = str(cache.unit(address))
            missing = set()
            for path in here:
                folder, _, name = path.rpartition("/")
                if not os.path.lexists(f"{unit}/{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"):
                    missing.add(path)
            if missing:
                yield address, compile_jobs(cache.unit(address), cache.document(address).rows, tag, missing)


def _by_unit(root: Root, cache: UnitCache, paths: Iterable[str]) -> dict[str, list[str]]:
    """Group module files by unit, using the units' module names.

    If several units provide a module name, check which unit contains the file.
    """
    owners: dict[str, list[str]] = {}
    for member in root.members:
        for name in member.modules:
            owners.setdefault(name, []).append(member.address)
    found: dict[str, list[str]] = {}
    for path in paths:
        name = path.split("/", 2)[1].removesuffix(".py") if path.startswith("site/") else ""
        candidates = owners.get(name, [])
        if len(candidates) > 1:
            candidates = [address for address in candidates if os.path.lexists(cache.unit(address) / path)]
        for address in candidates[:1]:
            found.setdefault(address, []).append(path)
    return found
