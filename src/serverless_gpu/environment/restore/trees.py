"""Stores restored environments as overlay layers or trees of links, and detects modified trees.

    trees/<address>/overlay/parts/<n>/                                       generated files of each mount
    trees/<address>/overlay/ready                                            the document that `read_ready` returns
    trees/<address>/tree/ · tree.ready · tree.watched                        the same for links, and its original state

Each process mounts overlays at the view, a fixed path that all environments share. Paths in tracebacks are therefore
always the same. Restore reuses a tree until the next boot while its interpreter is unchanged and its units exist.
Before each start, restore finds and replaces the parts that ranks have changed:

    units that were ever linked ─ check every file ─ suspicious? read it; wrong? fetch the unit, make its trees again
    units that are mounted      ─ the same, once per boot and then every ten minutes (`UnitCache.look`)
    a tree of links             ─ check each directory's time, each generated file ─ changed? make the tree again

Restore compares a tree of links with the tree's `TreeStamp`. Replacing, removing or adding a file changes the
modification time of its directory. `unit_integrity.py` detects unit files that were modified in place. The `TreeStamp`
also covers generated and copied files, which belong to the tree itself. Python writes bytecode into a `__pycache__`
directory beside the source files. Restore therefore compares the names in each directory with a changed time, and
ignores a new `__pycache__`.

Failure cases: If restore cannot fetch a changed unit again, it raises the store's error and does not use the unit.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import posixpath
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import Report, Snapshot
from serverless_gpu.environment.restore.cache.cache_directory import (
    delete,
    exchange,
    make_public,
    read_document,
    write_document,
)
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.cache.unit_integrity import expose, exposed_since, linking, suspects
from serverless_gpu.environment.restore.cache.unit_metadata import SharedMetadata, make_layers
from serverless_gpu.environment.restore.interpreters import Python
from serverless_gpu.environment.restore.link_tree import ContentSource, divide, fill, link_new, write_generated
from serverless_gpu.environment.restore.tree_plan import AssemblyTarget, TreePart, assemble, site_of
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentCorrupt

_BYTECODE = "__pycache__"
Folders = Callable[[TreePart], Sequence[Path]]
"""Returns the directories of a part's units, in order of precedence."""
LAYERS_MAX = 480
"""Maximum number of units in one overlay mount.

The kernel accepts 500 layers, and restore adds a few layers with generated files.
"""
MAKING_S_MAX = 3600.0
"""Time limit in seconds for making a tree and its first bytecode."""
_OURS = 2  # number of extra layers: one for generated files, or an empty layer if the mount has no other layer
_NAMED_MAX = 3
Suspects = tuple[list[str], list[str]]


class UnitSuspect(EnvironmentCorrupt):
    """A rank may have modified a unit's files through hard links."""


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A read-only overlay, which `node/inside/namespaces.py` reads as JSON."""

    at: str
    layers: tuple[str, ...]
    directory: str


class ReadyTree(msgspec.Struct, frozen=True, kw_only=True):
    """A finished tree, and the conditions under which restore may reuse it."""

    tree: str
    base: str  # path of the base interpreter, outside of the environment
    stamp: tuple[int, int]
    boot: str  # boot ID of the machine when the tree was made
    mounts: tuple[Mount, ...] = ()
    note: str = ""


def most_layers(snapshot: Snapshot) -> int:
    """Return the number of layers of an environment's largest overlay."""
    return max(len(root.members) for root in snapshot.roots) + _OURS


def read_ready(cache: UnitCache, snapshot: Snapshot, mode: str) -> ReadyTree | None:
    """Return the tree of an earlier restore, or None if the tree can no longer be reused."""
    directory, name = _overlay(cache, snapshot) if mode == "overlay" else _links(cache, snapshot)
    ready = read_document(name, ReadyTree)
    if ready is None or not directory.is_dir() or ready.boot != cache.boot:
        return None
    if ready.tree != str(cache.view if mode == "overlay" else directory):
        return None  # The user has moved the unit cache to another path.
    try:
        same = ready.stamp == _stamp(ready.base)
        for address in snapshot.addresses():
            os.stat(cache.unit(address))
        for mount in ready.mounts:
            os.stat(mount.directory)
        if ready.mounts:
            os.stat(cache.view)
    except FileNotFoundError:
        return None
    return ready if same else None


def make_overlay(snapshot: Snapshot, cache: UnitCache, base: Python) -> ReadyTree:
    """Create the overlay layers of an environment. The caller must hold the environment's making lock."""
    final, _ = _overlay(cache, snapshot)
    with _fresh(final) as fresh:
        ready = _write_layers(snapshot, cache, base, fresh)
        _publish(cache, snapshot, fresh, final)
    return ready


def _write_layers(snapshot: Snapshot, cache: UnitCache, base: Python, fresh: Path) -> ReadyTree:
    final, _ = _overlay(cache, snapshot)
    for directory in (fresh, fresh / "parts", cache.view):
        make_public(directory)
    make_layers(cache)
    sharing = SharedMetadata(cache)
    mounts: list[Mount] = []
    for part in _assemble(snapshot, cache, base, str(cache.view), add=True):
        number = len(mounts)
        write_generated(fresh / "parts" / str(number), part)
        own = os.path.relpath(final / "parts" / str(number), cache.layers)
        names = (own, *(sharing.layer(address, part.area) for address in part.units))
        at = f"{cache.view}/{part.at}" if part.at else str(cache.view)
        more = ("e",) if len(names) == 1 else ()  # The kernel refuses an overlay with a single layer.
        mounts.append(Mount(at=at, layers=(*names, *more), directory=str(cache.layers)))
    ready = _ready(cache, base, str(cache.view), mounts=tuple(mounts))
    write_document(fresh / "ready", ready)
    return ready


def make_links(snapshot: Snapshot, cache: UnitCache, base: Python) -> ReadyTree:
    """Create a tree of links for an environment. The caller must hold the environment's making lock.

    Raises UnitSuspect: a unit file may have been modified through an earlier link. If it raises UnitSuspect, the
    function creates no tree.
    """
    final, name = _links(cache, snapshot)
    name.unlink(missing_ok=True)
    parts = _assemble(snapshot, cache, base, str(final))
    files = {member.address: member.files for root in snapshot.roots for member in root.members}
    with _fresh(final) as fresh:
        make_public(fresh)
        with linking(cache):
            linked = fill(fresh, [_source(part, cache, files) for part in parts], read_only=True)
            if linked.suspect:
                raise UnitSuspect(f"{linked.suspect} may have been modified before it was linked into a tree")
            cache.expose(snapshot.addresses())
        own = [*(os.path.join(part.at, path) for part in parts for path in part.files), *linked.copies]
        watched = take_stamp(fresh, linked.directories, own)
        _publish(cache, snapshot, fresh, final)
    copied = f"{linked.copied} files were copied, not linked: {linked.why_copied}" if linked.copied else ""
    ready = _ready(cache, base, str(final), copied=copied)
    write_document(_watched(cache, snapshot), watched)
    write_document(name, ready)
    return ready


def tree_change(snapshot: Snapshot, cache: UnitCache, ready: ReadyTree) -> str:
    """Return a description of the first change in a tree of links, or "".

    The function does not check the content of unit files.
    """
    tree, _ = _links(cache, snapshot)
    watched = read_document(_watched(cache, snapshot), TreeStamp)
    if watched is None:
        return "the tree's original state is not known"

    def parts() -> Sequence[TreePart]:
        place = AssemblyTarget(tree=ready.tree, base=ready.base, version="")
        outlines = {address: cache.outline(address) for address in snapshot.addresses()}
        return [_with_bytecode_room(part) for part in assemble(snapshot, outlines, place)]

    return stamp_change(tree, watched, parts, lambda part: _directories(cache, part))


def forget_links(snapshot: Snapshot, cache: UnitCache) -> None:
    """Mark a tree of links as invalid, so that the next restore replaces the tree."""
    _links(cache, snapshot)[1].unlink(missing_ok=True)


def link_bytecode(snapshot: Snapshot, cache: UnitCache) -> None:
    """Link the new bytecode of units into a tree of links."""
    ready = read_ready(cache, snapshot, "links")
    if ready is None:
        return
    with linking(cache):
        if not tree_change(snapshot, cache, ready):
            _link_bytecode(snapshot, cache)


def _link_bytecode(snapshot: Snapshot, cache: UnitCache) -> None:
    tree, _ = _links(cache, snapshot)
    moved: list[str] = []
    for number, root in enumerate(snapshot.roots):
        for member in root.members:
            unit = cache.unit(member.address)
            folders = {
                row.path.rpartition("/")[0]
                for row in cache.document(member.address).rows
                if row.path.startswith("site/") and row.path.endswith(".py")
            }
            for folder in folders:
                source = unit / folder / "__pycache__"
                if source.is_dir() and not source.is_symlink():
                    above = os.path.join(site_of(snapshot, number), folder[len("site/") :])
                    with _writable(tree / above), _writable(tree / above / "__pycache__"):
                        link_new(source, tree / above / "__pycache__")
                    moved.append(above)
    cache.expose(snapshot.addresses())
    watched = read_document(_watched(cache, snapshot), TreeStamp) or TreeStamp()
    times = {path: os.stat(tree / path).st_mtime_ns for path in moved}
    watched = msgspec.structs.replace(watched, directories={**watched.directories, **times})
    write_document(_watched(cache, snapshot), watched)


def assembled(
    snapshot: Snapshot, cache: UnitCache, place: AssemblyTarget, *, add: bool = False
) -> tuple[TreePart, ...]:
    """Return the parts of a tree, leaving out generated files that the tree's units already contain.

    If `add` is true, first add missing metadata files to the units.
    """
    outlines = {address: cache.outline(address) for address in snapshot.addresses()}
    sharing = SharedMetadata(cache)
    parts = []
    for part in assemble(snapshot, outlines, place):
        if part.area == "site":
            if add:
                sharing.add(part.root, snapshot, part.files, outlines)
            files = sharing.without_added(part.root, snapshot, part.files, outlines)
            part = msgspec.structs.replace(part, files=files)
        parts.append(part)
    return tuple(parts)


def _assemble(
    snapshot: Snapshot, cache: UnitCache, base: Python, tree: str, *, add: bool = False
) -> tuple[TreePart, ...]:
    return assembled(snapshot, cache, AssemblyTarget(tree=tree, base=base.path, version=base.version), add=add)


def _directories(cache: UnitCache, part: TreePart) -> Sequence[Path]:
    return [cache.unit(address) / part.area for address in part.units]


def _source(part: TreePart, cache: UnitCache, files: Mapping[str, int]) -> ContentSource:
    return ContentSource(
        _with_bytecode_room(part),
        _directories(cache, part),
        files=[files[address] for address in part.units],
        since_ns=[exposed_since(cache.unit(address)) for address in part.units],
    )


def _with_bytecode_room(part: TreePart) -> TreePart:
    """Return a part that includes `__pycache__`, so that imports do not change recorded directory times."""
    if part.area != "site":
        return part
    return msgspec.structs.replace(part, directories=(*part.directories, "__pycache__"))


def _ready(
    cache: UnitCache,
    base: Python,
    tree: str,
    *,
    mounts: tuple[Mount, ...] = (),
    copied: str = "",
) -> ReadyTree:
    return ReadyTree(
        tree=tree,
        base=base.path,
        stamp=_stamp(base.path),
        boot=cache.boot,
        mounts=mounts,
        note="; ".join(filter(None, (base.note, copied))),
    )


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _overlay(cache: UnitCache, snapshot: Snapshot) -> tuple[Path, Path]:
    directory = cache.environment(snapshot.address) / "overlay"
    return directory, directory / "ready"


def _links(cache: UnitCache, snapshot: Snapshot) -> tuple[Path, Path]:
    directory = cache.environment(snapshot.address) / "tree"
    return directory, directory.with_name("tree.ready")


def _watched(cache: UnitCache, snapshot: Snapshot) -> Path:
    return cache.environment(snapshot.address) / "tree.watched"


@contextlib.contextmanager
def _writable(directory: Path) -> Iterator[None]:
    """Make a directory of a tree writable while the `with` block runs. The block may create the directory."""
    with contextlib.suppress(FileNotFoundError):
        os.chmod(directory, 0o755)
    try:
        yield
    finally:
        os.chmod(directory, 0o555)


@contextlib.contextmanager
def _fresh(final: Path) -> Iterator[Path]:
    """Yield a temporary path beside the final path, and delete leftovers after the `with` block."""
    fresh = final.with_name(f".new-{final.name}")
    delete(fresh)
    try:
        yield fresh
    finally:
        delete(fresh)


def _publish(cache: UnitCache, snapshot: Snapshot, fresh: Path, final: Path) -> None:
    if not final.exists():
        fresh.rename(final)
        return
    exchange(fresh, final)
    fresh.chmod(0o755)  # Moving a directory to another parent requires write permission on the directory.
    # Running processes may still use the old tree. A later sweep deletes the old tree when no process holds the
    # environment's lock.
    fresh.rename(cache.trees / f".old-{snapshot.address}-{os.urandom(4).hex()}")


def mend_units(snapshot: Snapshot, blobs: StoreBlobs, cache: UnitCache, report: Report) -> tuple[str, ...]:
    """Check the linked units of an environment, and fetch modified units again.

    The caller must hold the environment's lock.
    """
    files = {member.address: member.files for root in snapshot.roots for member in root.members}
    # Starting with the largest unit balances the load of the processes.
    addresses = sorted(files, key=lambda address: -files[address])
    if not any(exposed_since(cache.unit(address)) for address in addresses):
        return ()
    with linking(cache):
        found = _suspects([cache.unit(address) for address in addresses])
        wrong = [_mend(addresses[number], *found[number], blobs, cache, report) for number in sorted(found)]
    return tuple(filter(None, wrong))


def changed_units(snapshot: Snapshot, cache: UnitCache) -> tuple[str, ...]:
    """Check the mounted units of an environment, and move modified units aside.

    The caller must hold the environment's lock.
    """
    return tuple(what.partition("/")[2] or what for what in cache.look(snapshot))


def repair_sentence(changes: Sequence[str]) -> str:
    """Return a message about repaired files for receipts and logs, or ""."""
    if not changes:
        return ""
    more = f" and {len(changes) - _NAMED_MAX} more" if len(changes) > _NAMED_MAX else ""
    which = "; ".join(changes[:_NAMED_MAX])
    return f"files of the restored environment were changed by a run: {which}{more}; restored again"


def _suspects(units: Sequence[Path]) -> dict[int, Suspects]:
    """Return the possibly modified files of each unit, by unit number."""

    def work(numbers: Iterator[int]) -> dict[int, Suspects]:
        found = {}
        for number in numbers:
            since_ns = exposed_since(units[number])
            if since_ns and any(here := suspects(units[number], since_ns)):
                found[number] = here
        return found

    return functools.reduce(operator.or_, divide(len(units), work, dict[int, Suspects]))


def _mend(
    address: str, own: list[str], bytecode: list[str], blobs: StoreBlobs, cache: UnitCache, report: Report
) -> str:
    unit = cache.unit(address)
    for path in bytecode:
        Path(path).unlink(missing_ok=True)  # The node compiles missing bytecode again.
    wrong = cache.verify(address, blobs, report) if own else ""
    if bytecode and not wrong:
        wrong = f"{os.path.relpath(bytecode[0], unit)} was modified"
        cache.forget_made_of(address)
    expose(unit)
    return wrong.partition("/")[2]  # first component of a row path: the unit's area


class TreeStamp(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a tree at the time of its creation, by paths below the tree."""

    directories: dict[str, int] = {}  # Path → modification time, without `__pycache__`.
    # Path → inode, size, modification time and change time, for files that are not links to units.
    files: dict[str, tuple[int, int, int, int]] = {}


def take_stamp(tree: Path, directories: Mapping[str, int], own_files: Iterable[str]) -> TreeStamp:
    """Return the current `TreeStamp` of a tree."""
    return TreeStamp(
        directories={path: time for path, time in directories.items() if not path.endswith(_BYTECODE)},
        files={path: signature(tree / path) for path in own_files},
    )


def signature(path: Path) -> tuple[int, int, int, int]:
    """Return file metadata that changes whenever the file is modified or replaced."""
    status = os.lstat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def stamp_change(tree: Path, watched: TreeStamp, parts: Callable[[], Sequence[TreePart]], folders: Folders) -> str:
    """Return a short description of the first change in a tree, or "".

    The function calls the `parts` callback only if a directory has changed.
    """
    for path, known in watched.files.items():
        try:
            if signature(tree / path) != known:
                return f"{path} was modified"
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
    moved = []
    root = str(tree)
    for path, time in watched.directories.items():
        try:
            if os.stat(f"{root}/{path}", follow_symlinks=False).st_mtime_ns != time:
                moved.append(path)
        except (FileNotFoundError, NotADirectoryError):
            return f"{path} is missing"
    if not moved:
        return ""
    assembled = parts()
    return next(filter(None, (_difference(tree, path, assembled, folders) for path in moved)), "")


def _difference(tree: Path, path: str, parts: Sequence[TreePart], folders: Folders) -> str:
    """Return a description of the first difference between a directory and its original content, or ""."""
    expected = _expected(path, parts, folders)
    present = set(os.listdir(tree / path)) - {_BYTECODE}
    if surplus := sorted(present - expected.keys()):
        return f"{posixpath.join(path, surplus[0])} was added"
    if missing := sorted(expected.keys() - present - {_BYTECODE}):
        return f"{posixpath.join(path, missing[0])} is missing"
    for name, source in expected.items():
        if source is not None and name in present and not _is_same(tree / path / name, source):
            return f"{posixpath.join(path, name)} was replaced"
    return ""


def _expected(path: str, parts: Sequence[TreePart], folders: Folders) -> dict[str, Path | None]:
    """Return the expected names in a directory, each with the linked unit file or None."""
    found: dict[str, Path | None] = {}
    for part in parts:
        below = _below(part.at, path)
        if below is None:
            if (inner := _below(path, part.at)) is not None:
                found[inner.partition("/")[0]] = None
            continue
        for own in (*part.files, *part.links, *part.directories):
            if (inner := _below(below, own)) is not None and inner:
                found[inner.partition("/")[0]] = None
        for folder in folders(part):
            place = folder / below
            if place.is_dir() and not place.is_symlink():
                for name in os.listdir(place):
                    found.setdefault(name, place / name)
    return found


def _below(above: str, path: str) -> str | None:
    """Return `path` relative to `above`, or "" for the same path, or None for a path outside of `above`."""
    if not above or path == above:
        return path if not above else ""
    return path[len(above) + 1 :] if path.startswith(f"{above}/") else None


def _is_same(path: Path, source: Path) -> bool:
    here, there = os.lstat(path), os.lstat(source)
    if stat.S_ISDIR(here.st_mode) or stat.S_ISDIR(there.st_mode):
        return stat.S_IFMT(here.st_mode) == stat.S_IFMT(there.st_mode)
    if stat.S_ISLNK(there.st_mode):
        return stat.S_ISLNK(here.st_mode) and os.readlink(path) == os.readlink(source)
    if here.st_nlink == 1:  # a copy
        return (here.st_size, here.st_mtime_ns) == (there.st_size, there.st_mtime_ns)
    return here.st_ino == there.st_ino
