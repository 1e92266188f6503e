"""What comes before any tree: the snapshot, an interpreter for it, its units in the cache, first bytecode."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator

import msgspec

from serverless_gpu.environment.documents import Root, Snapshot, Unit
from serverless_gpu.environment.progress import Report
from serverless_gpu.environment.restore import bytecode
from serverless_gpu.environment.restore.bytecode import CompileJob
from serverless_gpu.environment.restore.cache.cache_directory import make_public, read_document
from serverless_gpu.environment.restore.cache.unit_cache import Cache, Ensured
from serverless_gpu.environment.restore.pythons import Python, find_python, keep, recall, trusted
from serverless_gpu.environment.rules import check_snapshot
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import mended
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, EnvironmentRejected

FEW_BYTES = 128 * 1024
"""So much source is compiled by the process that imports it, in the time that a process takes to start."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, the interpreter that stands in for its own, and what was fetched."""

    snapshot: Snapshot
    base: Python
    ensured: Ensured


def known_snapshot(cache: Cache, address: str) -> Snapshot | None:
    """Return a snapshot that was restored here before, without asking the store."""
    snapshot = read_document(cache.environment(address) / "snapshot", Snapshot)
    if snapshot is None or snapshot.address != address:
        return None
    try:
        check_snapshot(snapshot)
    except EnvironmentRejected:
        return None  # what lies here was altered; the store has it
    return snapshot


def prepare(snapshot: Snapshot, blobs: StoreBlobs, cache: Cache, python: str, report: Report) -> Prepared:
    """Have the units of a snapshot in the cache; the caller holds the environment.

    Args:
        snapshot: checked.
        blobs: where units are that are missing.
        cache: of this node.
        python: an interpreter to try first, or "".
        report: how far it is.

    Raises:
        EnvironmentCorrupt, EnvironmentMissing: the store is altered, and that was removed; or it lacks something.
        EnvironmentUnsupported, EnvironmentRejected, StorageError: as `restore`.
    """
    make_public(cache.root)
    answers = cache.root / "interpreters"
    recall(answers, cache.boot)
    base = find_python(snapshot.interpreter, _hints(snapshot, python))
    keep(answers, cache.boot)
    base = msgspec.structs.replace(base, note="; ".join(filter(None, (base.note, _glibc_note(snapshot)))))
    cache.register(snapshot)
    try:
        ensured = cache.ensure(snapshot.addresses(), blobs, report, accept=_as_listed(snapshot))
    except (EnvironmentCorrupt, EnvironmentMissing) as error:
        raise mended(error, blobs, snapshot.addresses()) from None
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


def loaded_jobs(prepared: Prepared, cache: Cache) -> dict[str, list[CompileJob]]:
    """Return what to compile, by unit: what the caller had loaded and has no bytecode.

    A few short files are left to whoever imports them, and to `compile_rest`: a process takes longer to start.
    """
    work: dict[str, list[CompileJob]] = {}
    for address, jobs in _loaded(prepared.snapshot, cache, prepared.base.tag):
        work.setdefault(address, []).extend(jobs)
    return work if sum(job.size for jobs in work.values() for job in jobs) > FEW_BYTES else {}


def _hints(snapshot: Snapshot, python: str) -> Iterator[str]:
    if python:
        yield python
    if trusted(snapshot.facts.python):
        yield snapshot.facts.python


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


def _loaded(snapshot: Snapshot, cache: Cache, tag: str) -> Iterator[tuple[str, list[CompileJob]]]:
    """Yield, for each unit, what the caller had loaded and has no bytecode for this interpreter yet."""
    for root, paths in zip(snapshot.roots, snapshot.facts.loaded, strict=False):
        for address, here in _by_unit(root, cache, paths).items():
            unit = str(cache.unit(address))
            missing = {path for path in here if not os.path.lexists(_bytecode(unit, path, tag))}
            if missing:
                yield address, bytecode.jobs(cache.unit(address), cache.document(address).rows, tag, missing)


def _by_unit(root: Root, cache: Cache, paths: Iterable[str]) -> dict[str, list[str]]:
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


def _bytecode(unit: str, path: str, tag: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{unit}/{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
