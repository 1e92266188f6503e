"""Exports an environment as a standalone directory: `sgpu env restore ADDRESS DIR`.

An exported environment works without serverless-gpu. The export fills a temporary directory beside the destination and
then renames the directory. The destination therefore never contains a half-finished export. Where possible, the export
creates read-only hard links to files in the cache. The export copies project code, because users edit it. The linked
cache files stay unchanged, because installers replace files instead of modifying them. A user who wants to edit an
installed package in place must export copies of all files.

Failure cases: The export raises InvalidValue if the destination is not empty, and StorageError if the disk is full. A
failed export leaves no files behind.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import Report, ignore_progress
from serverless_gpu.environment.restore.cache.cache_directory import (
    delete,
    free_bytes,
    full,
    is_full,
    locked,
    make_public,
    occupied_bytes,
)
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.cache.unit_integrity import linking
from serverless_gpu.environment.restore.link_tree import ContentSource, LinkResult, fill
from serverless_gpu.environment.restore.restore import Prepared, known_snapshot, loaded_jobs, prepare
from serverless_gpu.environment.restore.tree_plan import AssemblyTarget
from serverless_gpu.environment.restore.trees import MAKING_S_MAX, assembled
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.repair import read_snapshot
from serverless_gpu.errors import InvalidValue, StorageError

_ACTIVATE = """\
# Source this file: . {name}
deactivate () {{
    PATH="$_SGPU_PATH"; export PATH
    PS1="${{_SGPU_PS1-}}"
    unset VIRTUAL_ENV _SGPU_PATH _SGPU_PS1
    unset -f deactivate
    hash -r 2>/dev/null
}}
VIRTUAL_ENV={tree}; export VIRTUAL_ENV
_SGPU_PATH="$PATH"; _SGPU_PS1="${{PS1-}}"
PATH="$VIRTUAL_ENV/bin:$PATH"; export PATH
PS1="($(basename "$VIRTUAL_ENV")) ${{PS1-}}"
hash -r 2>/dev/null
"""


class ExportedTree(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an export: the directory, and the numbers of linked and copied files."""

    address: str
    tree: str
    python: str
    linked: int  # Number of files that share their bytes with the cache.
    copied: int  # Number of files that are separate copies.
    fetched_bytes: int
    units_fetched: int
    ms: int
    note: str = ""  # differences between this machine and the machine of the capture, or ""


class ExportRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options of an export: the destination, a preferred interpreter, and whether to copy every file."""

    target: Path
    python: str = ""
    copies: bool = False


def export(
    address: str, blobs: StoreBlobs, cache: UnitCache, order: ExportRequest, *, report: Report = ignore_progress
) -> ExportedTree:
    """Export an environment as a standalone directory tree.

    Raises:
        InvalidValue: the directory exists and is not empty.
        EnvironmentMissing, EnvironmentUnsupported, EnvironmentCorrupt, StorageError: as `restore`.
    """
    began_ns = cache.clock.boottime_ns()
    target = Path(os.path.abspath(order.target))
    _check_target(target)
    holding = cache.hold(address)
    try:
        snapshot = known_snapshot(cache, address) or read_snapshot(blobs, address)
        prepared = prepare(snapshot, blobs, cache, order.python, report)
        with locked(cache.making_lock(address), wait_s=MAKING_S_MAX):
            cache.compile(loaded_jobs(prepared, cache), prepared.base.path, report)
        try:
            linked = _make(prepared, cache, target, copies=order.copies)
        except OSError as error:
            if is_full(error):
                raise full(target.parent, snapshot.size, 0) from error
            raise StorageError(f"{error.filename or target} cannot be written: {error.strerror}.") from error
    finally:
        os.close(holding)
    return ExportedTree(
        address=address,
        tree=str(target),
        python=str(target / "bin" / "python"),
        linked=linked.linked,
        copied=linked.copied,
        fetched_bytes=prepared.ensured.fetched_bytes,
        units_fetched=prepared.ensured.fetched,
        ms=(cache.clock.boottime_ns() - began_ns) // 1_000_000,
        note=prepared.base.note,
    )


def _check_target(target: Path) -> None:
    try:
        if any(target.iterdir()):
            raise InvalidValue(
                f"{target} is not empty, and an environment needs a new or empty directory.",
                hint="choose a destination directory that does not exist yet",
            )
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise InvalidValue(
            f"{target} is a file, or one of its parent directories is a file.",
            hint="choose a destination directory that does not exist yet",
        ) from None


def _make(prepared: Prepared, cache: UnitCache, target: Path, *, copies: bool) -> LinkResult:
    snapshot, base = prepared.snapshot, prepared.base
    target.parent.mkdir(parents=True, exist_ok=True)
    if copies or target.parent.stat().st_dev != cache.units.stat().st_dev:
        needed = occupied_bytes(snapshot.size, snapshot.files)
        if needed > free_bytes(target.parent):
            raise full(target.parent, needed, 0)
    place = AssemblyTarget(tree=str(target), base=base.path, version=base.version, alone=True)
    parts = assembled(snapshot, cache, place)
    fresh = target.with_name(f".{target.name}.new-{os.urandom(4).hex()}")
    try:
        make_public(fresh)
        with linking(cache):
            linked = fill(
                fresh,
                [
                    ContentSource(
                        part,
                        [cache.unit(address) / part.area for address in part.units],
                        copies or snapshot.roots[part.root].kind == "code",
                    )
                    for part in parts
                ],
            )
            if linked.linked:
                cache.expose(snapshot.addresses())
        activate = fresh / "bin" / "activate"
        if not activate.exists():
            name = shlex.quote(str(target / "bin" / "activate"))
            activate.write_text(_ACTIVATE.format(name=name, tree=shlex.quote(str(target))))
            activate.chmod(0o644)
        fresh.rename(target)  # `os.rename` also replaces an empty directory.
    except BaseException:
        delete(fresh)
        raise
    return linked
