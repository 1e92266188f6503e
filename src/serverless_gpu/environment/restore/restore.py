"""Restores a snapshot as a tree that Python can start in: by mounts where possible, else by links.

    restore ─ hold the environment ─ made before, and still complete? return it (a few ms)
            ├ snapshot · interpreter of the same ABI on this machine · units into the cache                  (`prepare`)
            ├ bytecode of the modules that the caller had loaded
            └ overlay: layers with generated files, which the user of the tree mounts at the view
              links:   a tree of hard links to the units

Restore stores the result in `trees/<address>` and reuses it. Only one process at a time makes a tree. The process makes
the tree beside its final path and then renames the tree. A process that already uses a replaced tree continues to use
the old tree. `tree_plan.py` plans the paths. `link_tree.py` and `unit_cache.py` carry out the plan.

Failure cases: If no interpreter fits, restore raises EnvironmentUnsupported. The cache raises an error for a full disk
or an altered store. The next process removes the `.new-` directory of a killed process.
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
"""Number of source bytes that a process compiles on import in the time in which a compiler process starts."""
Mode = Literal["overlay", "links"]


class RestoreMethod(msgspec.Struct, frozen=True, kw_only=True):
    """The method to make a tree: mounts or links, and the reason if mounts are not possible.

    `namespaces.probe_mounts` returns this reason.
    """

    mode: Mode = "overlay"
    why: str = ""


OVERLAY = RestoreMethod()


class RestoredTree(msgspec.Struct, frozen=True, kw_only=True):
    """A restored environment that is ready for use on this node."""

    address: str
    tree: str  # path of the tree, as its users see it
    python: str
    mode: Mode
    why: str = ""  # Reason for links instead of mounts, or "".
    mounts: tuple[Mount, ...] = ()  # Mounts that a process makes before it uses the tree, in order; empty with links.
    # Lock file of the tree. A user of the tree opens this file and locks it shared with flock before the restore
    # request.
    # `UnitCache.hold` does the same.
    lock: str = ""
    before: tuple[str, ...] = ()  # directories that come before the standard library on `sys.path`
    base: str = ""  # path of the interpreter without an environment
    fetched_bytes: int = 0  # number of bytes that the store sent
    units_fetched: int = 0
    ms: int = 0
    note: str = ""  # differences from the machine of the capture, or ""
    mended: str = ""  # text about changes by a run that this call repaired, or ""


def restore(
    address: str,
    blobs: StoreBlobs,
    cache: UnitCache,
    *,
    way: RestoreMethod = OVERLAY,
    python: str = "",
    report: Report = ignore_progress,
) -> RestoredTree:
    """Prepare an environment on this node, and return its tree.

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

        # If this check is skipped, the later creation of links checks the files at less cost.
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
            # The restore succeeds despite this error, and the next restore evicts units.
            with contextlib.suppress(OSError, StorageError):
                cache.evict()  # The eviction never removes this environment, because the caller holds it.
    finally:
        os.close(holding)
    ms = (cache.clock.boottime_ns() - began_ns) // 1_000_000
    restored = _restored(snapshot, cache, ready, way, ensured, ms)
    return msgspec.structs.replace(restored, mended=repair_sentence(changes))


def compile_rest(address: str, cache: UnitCache, *, report: Report = ignore_progress) -> int:
    """Compile the modules that the caller had not loaded, link their bytecode, and sync units to disk.

    Call this function while the node is idle. The function links the bytecode only if the environment has a tree of
    links.
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
            return ready  # Another process made the tree while this process waited for the lock.
        if work := loaded_jobs(prepared, cache):
            look()  # Modified source must not be compiled, so the sources are checked first.
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
    """Make a tree. On a full disk, evict unused units and try once more."""
    needed = occupied_bytes(0, snapshot.files // 8 + 400)  # estimated bytes of directories and generated files
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
    """A snapshot, the interpreter that runs it on this machine, and the fetched units."""

    snapshot: Snapshot
    base: Python
    ensured: EnsuredUnits


def known_snapshot(cache: UnitCache, address: str) -> Snapshot | None:
    """Return a snapshot that this node has restored before, without querying the store."""
    snapshot = read_document(cache.environment(address) / "snapshot", Snapshot)
    if snapshot is None or snapshot.address != address:
        return None
    try:
        check_snapshot(snapshot)
    except EnvironmentRejected:
        return None  # The local copy was altered; the store has the original.
    return snapshot


def prepare(snapshot: Snapshot, blobs: StoreBlobs, cache: UnitCache, python: str, report: Report) -> Prepared:
    """Fetch the units of a snapshot into the cache. The caller holds the environment's lock.

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
    """Return a check that rejects a unit of another size than the snapshot lists (F41).

    Without this check, limits on the listed sizes would have no effect.
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
    """Return the files that the caller had loaded and that have no bytecode, by unit.

    For a few short files the result is empty, because starting a compiler process takes longer than compiling on
    import. `compile_rest` compiles these files later.
    """
    work: dict[str, list[CompileJob]] = {}
    for address, missing in _loaded(prepared.snapshot, cache, prepared.base.tag):
        work.setdefault(address, []).extend(missing)
    return work if sum(job.size for each in work.values() for job in each) > FEW_BYTES else {}


def _glibc_note(snapshot: Snapshot) -> str:
    """Return a warning if the capture used a newer glibc than this machine has, or ""."""
    theirs, ours = snapshot.interpreter.glibc, glibc()
    if theirs and ours and _numbers(theirs) > _numbers(ours):
        return f"captured with glibc {theirs}, and this machine has {ours}"
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
    """Yield each unit with its files that the caller had loaded and that have no bytecode yet."""
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
    """Group the paths by unit, using module names. If several units have the name, check the disk."""
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
