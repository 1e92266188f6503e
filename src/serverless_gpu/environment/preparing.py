"""What comes before any tree: the snapshot, an interpreter for it, its units in the cache, first bytecode."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import msgspec

from serverless_gpu.environment.blobs import Blobs
from serverless_gpu.environment.bytecode import Job, compile_all, jobs
from serverless_gpu.environment.cache import Cache, Ensured
from serverless_gpu.environment.documents import Root, Snapshot
from serverless_gpu.environment.places import read_document
from serverless_gpu.environment.progress import Report
from serverless_gpu.environment.pythons import Python, find_python, trusted
from serverless_gpu.environment.rules import check_snapshot


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
    check_snapshot(snapshot)
    return snapshot


def prepare(snapshot: Snapshot, blobs: Blobs, cache: Cache, python: str, report: Report) -> Prepared:
    """Have the units of a snapshot in the cache; the caller holds the environment.

    Args:
        snapshot: checked.
        blobs: where units are that are missing.
        cache: of this node.
        python: an interpreter to try first, or "".
        report: how far it is.
    """
    base = find_python(snapshot.interpreter, _hints(snapshot, python))
    cache.register(snapshot)
    ensured = cache.ensure(snapshot.addresses(), blobs, report)
    return Prepared(snapshot=snapshot, base=base, ensured=ensured)


def compile_loaded(prepared: Prepared, cache: Cache, report: Report) -> int:
    """Compile what the caller had loaded, as far as it has no bytecode; the caller holds the making lock."""
    work = list(_loaded(prepared.snapshot, cache, prepared.base.tag))
    return compile_all(work, prepared.base.path, report=report) if work else 0


def _hints(snapshot: Snapshot, python: str) -> Iterator[str]:
    if python:
        yield python
    if trusted(snapshot.facts.python):
        yield snapshot.facts.python


def _loaded(snapshot: Snapshot, cache: Cache, tag: str) -> Iterator[Job]:
    """Yield what the caller had loaded and has no bytecode for this interpreter yet."""
    for root, paths in zip(snapshot.roots, snapshot.facts.loaded, strict=False):
        for address, here in _by_unit(root, cache, paths).items():
            missing = {path for path in here if not os.path.lexists(_bytecode(cache, address, path, tag))}
            if missing:
                yield from jobs(cache.unit(address), cache.document(address).rows, tag, missing)


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


def _bytecode(cache: Cache, address: str, path: str, tag: str) -> str:
    folder, _, name = path.rpartition("/")
    return f"{cache.unit(address)}/{folder}/__pycache__/{name.removesuffix('.py')}.{tag}.pyc"
