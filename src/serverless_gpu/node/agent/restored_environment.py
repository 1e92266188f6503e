"""A restored environment as the agent holds it: place, effect on a caller's context, users.

    restoring process ──Restored, snapshot, lock──▶ RestoredEnvironment ──▶ zygotes, stems (each with the lock's copy)

It stays on the disk while any process has a copy of the lock's descriptor: the agent while it remembers it, and every
zygote and stem in it.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.restore.assembly import moved, site_of
from serverless_gpu.environment.restore.restore import RestoredTree
from serverless_gpu.environment.restore.zygote_compatibility import Loaded, Units, changed_units, fits, row_of
from serverless_gpu.node.base.protocol import Context, original, portable
from serverless_gpu.units import format_bytes

_SHORT = 12
_PATH_LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_PATHS = ("VIRTUAL_ENV", "PYTHONUSERBASE")
_HOOK_MODULES = ("sitecustomize", "usercustomize")
_TORCH_POINTS = b"[torch.backends]"  # entry points that `import torch` loads


class RestoredEnvironment:
    """One snapshot, restored on this node; closes `lock`, the descriptor that keeps it there."""

    def __init__(self, snapshot: Snapshot, restored: RestoredTree, lock: int, environments: Path) -> None:
        self.snapshot = snapshot
        self.address = snapshot.address
        self.mode = restored.mode
        self.tree = restored.tree
        self.python = restored.python
        self.mended = restored.mended
        self.fds = (lock,)
        self.mounts: tuple[Mapping[str, object], ...] = tuple(
            {"at": mount.at, "layers": list(mount.layers), "directory": mount.directory} for mount in restored.mounts
        )
        self._restored = restored
        self._units = environments / "units"
        self._places = self._needed()
        self._identities = tuple(map(_identity, self._places))
        weakref.finalize(self, os.close, lock)

    def is_there(self) -> bool:
        """Return whether all its directories are still the ones that were restored.

        A directory that was deleted and made again is another one: mounts of running processes still show the first.
        """
        return None not in self._identities and tuple(map(_identity, self._places)) == self._identities

    def is_one_with(self, other: RestoredEnvironment) -> bool:
        """Return whether two are made of the same directories: a process of one is a process of the other."""
        return (self._places, self._identities) == (other._places, other._identities)

    @property
    def short(self) -> str:
        """Return the address as it is shown."""
        return self.address[:_SHORT]

    def text(self, *, fetched: bool) -> str:
        """Return the sentence for the receipt; `fetched` means restored for this run."""
        count = len(self.snapshot.addresses())
        parts = [f"snapshot {self.short}", f"{count} unit{'' if count == 1 else 's'}", self.mode]
        if self._restored.why:
            parts[-1] += f" ({self._restored.why})"
        if fetched and self._restored.units_fetched:
            parts.append(f"{self._restored.units_fetched} fetched ({format_bytes(self._restored.fetched_bytes)})")
        if self._restored.note:
            parts.append(self._restored.note)
        if fetched and self.mended:
            parts.append(self.mended)
        return ", ".join(parts)

    def context(self, caller: Context) -> Context:
        """Return the caller's context with paths of the restored environment."""
        cwd = original(caller.cwd)

        def there(path: str) -> str:
            """Return where a path of the caller's is now; what is not of its environment stays."""
            if not path:  # "" and an empty entry of a list are the working directory
                return moved(self.snapshot, self.tree, cwd) or path
            return moved(self.snapshot, self.tree, os.path.normpath(os.path.join(cwd, path))) or path

        environ = {name: original(value) for name, value in caller.environ.items()}
        for name in environ.keys() & {*_PATH_LISTS}:
            environ[name] = os.pathsep.join(map(there, environ[name].split(os.pathsep)))
        for name in environ.keys() & {*_PATHS}:
            environ[name] = there(environ[name])
        return msgspec.structs.replace(
            caller,
            python=self.python,
            environ={name: portable(value) for name, value in environ.items()},
            cwd=portable(cwd if os.path.isdir(cwd) and os.access(cwd, os.X_OK) else there(cwd)),
            sys_path=tuple(dict.fromkeys(portable(there(original(path))) for path in caller.sys_path)),
            packages={name: portable(there(original(file))) if file else "" for name, file in caller.packages.items()},
            copies={
                portable(f"{self.tree}/{site_of(self.snapshot, number)}"): portable(directory)
                for number, directory in enumerate(self.snapshot.facts.originals[: len(self.snapshot.roots)])
                if directory and self.snapshot.roots[number].kind == "code"
            },
        )

    def misfit(self, loaded: Loaded, older: RestoredEnvironment) -> str:
        """Return why an interpreter of an older environment cannot be used for this one, or "" when it can."""
        if self.mode != "overlay" or older.mode != "overlay":
            return "each environment made of links has an interpreter of its own"
        if not older.is_there():  # and what it has loaded of it cannot be told any more
            return "what it was started in was deleted"
        changed = changed_units(older.snapshot, self.snapshot)
        tops = {address: _tops(self._unit(address)) for address in changed}
        units = Units(
            used=self._used(loaded, older, tops),
            hooks={address: when for address in changed if (when := _runs_code(self._unit(address), tops[address]))},
            names={address: frozenset(map(_module_name, tops[address])) for address in changed},
        )
        return fits(loaded, older.snapshot, self.snapshot, units)

    def _needed(self) -> tuple[str, ...]:
        """Return the directories it consists of; a tree of links needs its units no more."""
        if not self.mounts:
            return (self.tree,)
        made = self._units.parent / "trees" / self.address / "overlay"
        layers = [str(made), *(str(mount["directory"]) for mount in self.mounts)]
        units = [str(self._unit(address)) for address in self.snapshot.addresses()]
        return (str(self.mounts[0]["at"]), *layers, *units)

    def _used(self, loaded: Loaded, older: RestoredEnvironment, tops: Mapping[str, Collection[str]]) -> frozenset[str]:
        """Return which of the changed units, given with the tops of their files, hold a file that was loaded."""
        rows = [row for file in loaded.files if (row := row_of(older.snapshot, older.tree, file)) is not None]
        return frozenset(
            member.address
            for number, root in enumerate(older.snapshot.roots)
            for member in root.members
            if member.address in tops
            and any(
                row == number
                and "/".join(path.split("/", 2)[:2]) in tops[member.address]  # looking at the disk costs more
                and os.path.lexists(self._unit(member.address) / path)
                for row, path in rows
            )
        )

    def _unit(self, address: str) -> Path:
        return self._units / address[:2] / address


def _identity(directory: str) -> tuple[int, int] | None:
    try:
        status = os.stat(directory)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _tops(unit: Path) -> frozenset[str]:
    """Return what a unit has at the top of its areas, as paths of rows."""
    found: list[str] = []
    for area in ("site", "prefix"):
        with contextlib.suppress(FileNotFoundError):
            found += [f"{area}/{name}" for name in os.listdir(unit / area)]
    return frozenset(found)


def _module_name(top: str) -> str:
    """Return what can be imported from an entry at the top of a unit, or ""."""
    area, _, name = top.partition("/")
    stem, _, ending = name.partition(".")
    is_module = not ending or ending.endswith(("py", "pyc", "so"))
    return stem if area == "site" and is_module else ""


def _runs_code(unit: Path, tops: Collection[str]) -> str:
    """Return when code of a unit runs without being imported by anybody, or ""."""
    names = [top.partition("/")[2] for top in tops if top.startswith("site/")]
    if any(name.endswith(".pth") or name.partition(".")[0] in _HOOK_MODULES for name in names):
        return "an interpreter starts"
    for name in names:
        if name.endswith((".dist-info", ".egg-info")):
            with contextlib.suppress(OSError):
                if _TORCH_POINTS in (unit / "site" / name / "entry_points.txt").read_bytes():
                    return "torch is imported"
    return ""
