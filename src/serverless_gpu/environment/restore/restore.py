"""A snapshot becomes a tree that Python can be started in: by mounts where the machine can, else by links.

    restore ─ hold the environment ─ made before, and all of it still there? that is it (a few ms)
            ├ snapshot · interpreter of the same ABI on this machine · units into the cache                  (`prepare`)
            ├ bytecode of what the caller had loaded
            └ overlay: layers with generated files, to be mounted at the view by its user
              links:   a tree of hard links to the units

What is made is kept in `trees/<address>` and found again. It is made beside its place and comes there by a rename, by
one process at a time; when something replaces it, a process that uses the old one keeps it. `tree_plan.py` says what
goes where, `link_tree.py` and `unit_cache.py` do it.

Failure cases: no such interpreter (EnvironmentUnsupported), what the cache raises (disk full, store altered), a killed
process (its `.new-` directory is removed by the next).
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
from serverless_gpu.environment.snapshot_rules import check_snapshot
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import error_after_repair, read_snapshot
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, EnvironmentRejected, StorageError

FEW_BYTES = 128 * 1024
"""So much source is compiled by the process that imports it, in the time that a process takes to start."""
Mode = Literal["overlay", "links"]


class RestoreMethod(msgspec.Struct, frozen=True, kw_only=True):
    """How a tree is to be made, and why not by mounts: what `namespaces.probe_mounts` said, for example."""

    mode: Mode = "overlay"
    why: str = ""


OVERLAY = RestoreMethod()


class RestoredTree(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that is ready on this node."""

    address: str
    tree: str  # its directory, as processes that use it see it
    python: str
    mode: Mode
    why: str = ""  # why by links, or ""
    mounts: tuple[Mount, ...] = ()  # what a process has to mount before it sees the tree, in order; none with links
    # a file to hold shared with flock while the tree is used; open it before asking for the restore, or hold it by
    # `UnitCache.hold`
    lock: str = ""
    before: tuple[str, ...] = ()  # directories that come before the standard library on `sys.path`
    base: str = ""  # the interpreter without an environment
    fetched_bytes: int = 0  # what came from the store
    units_fetched: int = 0
    ms: int = 0
    note: str = ""  # what is different from where it was captured, or ""
    mended: str = ""  # what a run had changed in it, and was put right by this call, a sentence, or ""


def restore(
    address: str,
    blobs: StoreBlobs,
    cache: UnitCache,
    *,
    way: RestoreMethod = OVERLAY,
    python: str = "",
    report: Report = ignore_progress,
) -> RestoredTree:
    """Have an environment ready on this node.

    Raises:
        EnvironmentMissing: the store does not have the snapshot, or a unit of it.
        EnvironmentUnsupported: this machine has no interpreter for it.
        EnvironmentCorrupt: the store is altered.
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

        if ready is not None or way.mode == "overlay":  # else making the links looks, which costs less
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


def compile_rest(address: str, cache: UnitCache, *, report: Report = ignore_progress) -> int:
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
            mode="links", why=f"one directory is made of {layers} units, and {LAYERS_MAX} can be mounted"
        )
    return way


def _make(
    prepared: Prepared, cache: UnitCache, way: RestoreMethod, look: Callable[[], None], report: Report
) -> ReadyTree:
    snapshot = prepared.snapshot
    with locked(cache.making_lock(snapshot.address), wait_s=MAKING_S_MAX):
        ready = read_ready(cache, snapshot, way.mode)
        if ready is not None:
            return ready  # another process has just made it
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


def _with_space(cache: UnitCache, snapshot: Snapshot, make: Callable[[], ReadyTree]) -> ReadyTree:
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
    """A snapshot, the interpreter that stands in for its own, and what was fetched."""

    snapshot: Snapshot
    base: Python
    ensured: EnsuredUnits


def known_snapshot(cache: UnitCache, address: str) -> Snapshot | None:
    """Return a snapshot that was restored here before, without asking the store."""
    snapshot = read_document(cache.environment(address) / "snapshot", Snapshot)
    if snapshot is None or snapshot.address != address:
        return None
    try:
        check_snapshot(snapshot)
    except EnvironmentRejected:
        return None  # what lies here was altered; the store has it
    return snapshot


def prepare(snapshot: Snapshot, blobs: StoreBlobs, cache: UnitCache, python: str, report: Report) -> Prepared:
    """Have the units of a snapshot in the cache; the caller holds the environment.

    Raises:
        EnvironmentCorrupt, EnvironmentMissing: the store is altered, and that was removed; or it lacks something.
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
    """Return what refuses a unit larger or smaller than the snapshot says: its limits would mean nothing (F41)."""
    listed = {member.address: (member.size, member.files) for root in snapshot.roots for member in root.members}

    def accept(unit: Unit) -> None:
        content = [row.size for row in unit.rows if row.has_content]
        if (sum(content), len(content)) != listed[unit.address]:
            raise EnvironmentRejected(
                f"snapshot {snapshot.address[:12]}: unit {unit.address[:12]} holds {sum(content)} bytes in "
                f"{len(content)} files, and the snapshot lists it with {listed[unit.address][0]} in "
                f"{listed[unit.address][1]}"
            )

    return accept


def loaded_jobs(prepared: Prepared, cache: UnitCache) -> dict[str, list[CompileJob]]:
    """Return what to compile, by unit: what the caller had loaded and has no bytecode.

    A few short files are left to the process that imports them, and to `compile_rest`: a process takes longer to start.
    """
    work: dict[str, list[CompileJob]] = {}
    for address, missing in _loaded(prepared.snapshot, cache, prepared.base.tag):
        work.setdefault(address, []).extend(missing)
    return work if sum(job.size for each in work.values() for job in each) > FEW_BYTES else {}


def _glibc_note(snapshot: Snapshot) -> str:
    """Return that libraries may not load here: they were used with a newer C library than this machine has."""
    theirs, ours = snapshot.interpreter.glibc, glibc()
    if theirs and ours and _numbers(theirs) > _numbers(ours):
        return f"captured with glibc {theirs}, and this machine has {ours}"
    return ""


def glibc() -> str:
    """Return the version of this machine's C library, for example ``2.36``; "" where it is another one."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return ""
    return version if name == "glibc" else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _loaded(snapshot: Snapshot, cache: UnitCache, tag: str) -> Iterator[tuple[str, list[CompileJob]]]:
    """Yield, for each unit, what the caller had loaded and has no bytecode for this interpreter yet."""
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
    """Return which unit each path is in: by the names units add, and by looking where several add one."""
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
