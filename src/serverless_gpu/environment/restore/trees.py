"""What restore makes of a snapshot and keeps: layers of an overlay, or a tree of links; and whether it is still good.

    trees/<address>/overlay/layers/0 → ../parts/0 · 1 → units/…/site · …   short names, see mounts.py
    trees/<address>/overlay/parts/<n>/                                       generated files of each mount
    trees/<address>/overlay/ready                                            what `read_ready` returns
    trees/<address>/tree/ · tree.ready                                       the same with links

Overlays are mounted at the view, one place for all environments: every process has its own mounts, and paths in
tracebacks are the same for all.

What was made is used again in the same boot of the machine, as long as its interpreter has not changed and its units
are there; a tree of links also only while nobody has installed anything into it, which shows in the times of its
directories."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.restore.assembly import Part, Place, assemble, site_of
from serverless_gpu.environment.restore.cache import Cache
from serverless_gpu.environment.restore.linking import Source, fill, link_new, write_generated
from serverless_gpu.environment.restore.places import delete, exchange, make_public, read_document, write_document
from serverless_gpu.environment.restore.pythons import Python

LAYERS_MAX = 480
"""The kernel takes 500 layers; some are ours."""
MAKING_S_MAX = 3600.0
"""Nobody makes a tree, and its first bytecode, for longer."""
_OURS = 2  # generated files, and an empty directory where there is nothing else


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A read-only overlay, as `node/inside/mounts.py` takes it once it is JSON.

    Attributes:
        at: where.
        layers: names in the directory, the top one first.
        directory: where the names are.
    """

    at: str
    layers: tuple[str, ...]
    directory: str


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """What was made, and what it relies on.

    Attributes:
        tree: where processes see it.
        base: the interpreter without an environment.
        stamp: time and size of that interpreter's file.
        boot: of this machine, when it was made.
        mounts: for an overlay.
        note: what is different from where it was captured.
        times: of directories that change when somebody installs something.
    """

    tree: str
    base: str
    stamp: tuple[int, int]
    boot: str
    mounts: tuple[Mount, ...] = ()
    note: str = ""
    times: dict[str, int] = {}


def most_layers(snapshot: Snapshot) -> int:
    """Return how many layers the largest overlay of an environment would have."""
    return max(len(root.members) for root in snapshot.roots) + _OURS


def read_ready(cache: Cache, snapshot: Snapshot, mode: str) -> Ready | None:
    """Return what was made before, or None when it cannot be used any more."""
    directory, name = _overlay(cache, snapshot) if mode == "overlay" else _links(cache, snapshot)
    ready = read_document(name, Ready)
    if ready is None or not directory.is_dir() or ready.boot != cache.boot:
        return None
    if ready.tree != str(cache.view if mode == "overlay" else directory):
        return None  # the whole cache was moved
    try:
        same = ready.stamp == _stamp(ready.base)
        same = same and all(os.stat(path).st_mtime_ns == time for path, time in ready.times.items())
        for address in snapshot.addresses():
            os.stat(cache.unit(address))
        for mount in ready.mounts:
            os.stat(mount.directory)
        if ready.mounts:
            os.stat(cache.view)
    except FileNotFoundError:
        return None
    return ready if same else None


def make_overlay(snapshot: Snapshot, cache: Cache, base: Python) -> Ready:
    """Make the layers of an environment; the caller holds its making lock."""
    final, _ = _overlay(cache, snapshot)
    with _fresh(final) as fresh:
        ready = _write_layers(snapshot, cache, base, fresh)
        _publish(cache, snapshot, fresh, final)
    return ready


def _write_layers(snapshot: Snapshot, cache: Cache, base: Python, fresh: Path) -> Ready:
    final, _ = _overlay(cache, snapshot)
    layers = fresh / "layers"
    for directory in (fresh, layers, fresh / "parts", fresh / "empty", cache.view):
        make_public(directory)
    (layers / "e").symlink_to("../empty")
    mounts: list[Mount] = []
    count = 0
    for part in _assemble(snapshot, cache, base, str(cache.view)):
        write_generated(fresh / "parts" / str(len(mounts)), part)
        targets = [f"../parts/{len(mounts)}", *(str(path) for path in _directories(cache, part))]
        names = [str(count + index) for index in range(len(targets))]
        count += len(targets)
        for name, target in zip(names, targets, strict=True):
            (layers / name).symlink_to(target)
        at = f"{cache.view}/{part.at}" if part.at else str(cache.view)
        more = ("e",) if len(names) == 1 else ()  # an overlay of one layer is refused
        mounts.append(Mount(at=at, layers=(*names, *more), directory=str(final / "layers")))
    ready = _ready(cache, base, str(cache.view), mounts=tuple(mounts))
    write_document(fresh / "ready", ready)
    return ready


def make_links(snapshot: Snapshot, cache: Cache, base: Python) -> Ready:
    """Make a tree of links of an environment; the caller holds its making lock."""
    final, name = _links(cache, snapshot)
    name.unlink(missing_ok=True)
    parts = _assemble(snapshot, cache, base, str(final))
    with _fresh(final) as fresh:
        make_public(fresh)
        linked = fill(fresh, [Source(_with_bytecode_room(part), _directories(cache, part)) for part in parts])
        _publish(cache, snapshot, fresh, final)
    watched = [final, final / "bin", *(final / part.at for part in parts if part.area == "site")]
    ready = _ready(
        cache,
        base,
        str(final),
        copied=f"{linked.copied} files were copied, not linked: {linked.why_copied}" if linked.copied else "",
        times={str(path): path.stat().st_mtime_ns for path in watched},
    )
    write_document(name, ready)
    return ready


def link_bytecode(snapshot: Snapshot, cache: Cache) -> None:
    """Link bytecode that came to the units since into a tree of links."""
    if read_ready(cache, snapshot, "links") is None:
        return
    tree, _ = _links(cache, snapshot)
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
                    link_new(source, tree / site_of(snapshot, number) / folder[len("site/") :] / "__pycache__")


def assembled(snapshot: Snapshot, cache: Cache, place: Place) -> tuple[Part, ...]:
    """Return the parts of a tree, from the outlines in a cache."""
    outlines = {address: cache.outline(address) for address in snapshot.addresses()}
    return assemble(snapshot, outlines, place)


def _assemble(snapshot: Snapshot, cache: Cache, base: Python, tree: str) -> tuple[Part, ...]:
    return assembled(snapshot, cache, Place(tree=tree, base=base.path, version=base.version))


def _directories(cache: Cache, part: Part) -> Sequence[Path]:
    return [cache.unit(address) / part.area for address in part.units]


def _with_bytecode_room(part: Part) -> Part:
    """Return a part whose `__pycache__` is there, so that importing a module beside it changes no time we look at."""
    if part.area != "site":
        return part
    return msgspec.structs.replace(part, directories=(*part.directories, "__pycache__"))


def _ready(
    cache: Cache,
    base: Python,
    tree: str,
    *,
    mounts: tuple[Mount, ...] = (),
    copied: str = "",
    times: dict[str, int] | None = None,
) -> Ready:
    return Ready(
        tree=tree,
        base=base.path,
        stamp=_stamp(base.path),
        boot=cache.boot,
        mounts=mounts,
        note="; ".join(filter(None, (base.note, copied))),
        times=times or {},
    )


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size


def _overlay(cache: Cache, snapshot: Snapshot) -> tuple[Path, Path]:
    directory = cache.environment(snapshot.address) / "overlay"
    return directory, directory / "ready"


def _links(cache: Cache, snapshot: Snapshot) -> tuple[Path, Path]:
    directory = cache.environment(snapshot.address) / "tree"
    return directory, directory.with_name("tree.ready")


@contextlib.contextmanager
def _fresh(final: Path) -> Iterator[Path]:
    """Yield where something is made, beside its place; what is left there afterwards is deleted."""
    fresh = final.with_name(f".new-{final.name}")
    delete(fresh)
    try:
        yield fresh
    finally:
        delete(fresh)


def _publish(cache: Cache, snapshot: Snapshot, fresh: Path, final: Path) -> None:
    if not final.exists():
        fresh.rename(final)
        return
    exchange(fresh, final)
    # Somebody may be using it: it goes when nobody holds the environment.
    fresh.rename(cache.trees / f".old-{snapshot.address}-{os.urandom(4).hex()}")
