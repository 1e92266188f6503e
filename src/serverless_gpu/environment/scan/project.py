"""The project's code: what of a directory travels, as git would have it.

Left out: what git ignores (`.gitignore`, `.git/info/exclude`, the user's own file) or `.sgpuignore` names; always
`.git .hg .svn __pycache__ *.pyc .ipynb_checkpoints`, virtual environments, directories of distributions (they are roots
of their own) and our home. Kept although ignored: files of modules that were imported (a generated `_version.py`, an
extension module built in place), files that git tracks all the same (`git add -f`, `tracked.py`), and `*.egg-info`,
without which an old editable install has no metadata. What patterns leave out is said.

A directory that is nobody's project (the home directory, `/`, `/tmp`: a script may lie there) is not walked: only
Python files in it, and packages in it, count.

Left out, too, and said: what no restore would accept (`travelling.py`).

Failures, `EnvironmentTooLarge`: more than 1 GiB or 100,000 files, naming the ten largest.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection

import msgspec

from serverless_gpu.environment.scan.ignoring import GIT, OURS, Ignoring, git_index, outer_ignoring
from serverless_gpu.environment.scan.listing import BYTECODE, File, Listing, look, read_file, show
from serverless_gpu.environment.scan.tracked import tracked_files
from serverless_gpu.environment.scan.travelling import leave_out_misfits
from serverless_gpu.errors import EnvironmentTooLarge

CODE_BYTES_MAX = 1024**3
CODE_FILES_MAX = 100_000
_COUNTED_FILES_MAX = 4 * CODE_FILES_MAX
"""So far a directory that is too large is walked, to say what is large in it."""

_IGNORED_NAMED_MAX = 8

ALWAYS_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints"})
_VENV_NAMES = frozenset({"bin", "lib", "lib64", "include", "share", "etc", "pyvenv.cfg"})


class CodePlace(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of code, and what decides what of it counts.

    Attributes:
        directory: absolute path.
        shallow: whether only Python files and packages in it count.
        out: absolute paths of directories below it that are never part of it.
        wanted: files below it, relative, that count although they are ignored.
    """

    directory: str
    shallow: bool = False
    out: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """What of a directory of code travels.

    Attributes:
        listing: its files and the directories that were looked at.
        watched: files of patterns that decided, or would if they were there.
    """

    listing: Listing
    watched: tuple[str, ...]


def list_code(place: CodePlace) -> Code:
    """Return what of a directory of code travels.

    Raises:
        EnvironmentTooLarge: it is more than a project may be.
        EnvironmentUnsupported: a directory cannot be read.
    """
    outer, watched = outer_ignoring(place.directory)
    walk = _CodeWalk(place, outer)
    walk.run()
    walk.add_wanted()
    index = None if place.shallow else git_index(place.directory)
    if index is not None:
        walk.add_tracked(tracked_files(*index))
        watched = (*watched, index[0])
    walk.say_ignored()
    leave_out_misfits(walk.listing, frozenset(place.wanted))
    _check_size(walk.listing)
    inner = (f"{directory.path}/{name}" for directory in walk.listing.directories.values() for name in (GIT, OURS))
    return Code(listing=walk.listing, watched=(*watched, *(path for path in inner if os.path.lexists(path))))


class _CodeWalk:
    """One walk: which directories are still to be looked at, with what is ignored in each."""

    def __init__(self, place: CodePlace, outer: Ignoring) -> None:
        self._place = place
        self._out = frozenset(place.out)
        self._waiting: list[tuple[str, Ignoring]] = [("", outer)]
        self._ignoring = outer
        self._ignoring_in: dict[str, Ignoring] = {}
        self._ignored: list[str] = []
        self._is_venv = os.path.lexists(f"{place.directory}/pyvenv.cfg")
        self.listing = Listing(top=place.directory, files={}, directories={}, odd={})

    def run(self) -> None:
        top, listing = self._place.directory, self.listing
        while self._waiting and len(listing.files) <= _COUNTED_FILES_MAX:
            base, above = self._waiting.pop()
            directory = f"{top}/{base}".rstrip("/") or "/"
            self._ignoring = self._ignoring_in[base] = above.below(directory, base)
            seen = look(directory, top, self._keep)
            listing.directories[base.rstrip("/")] = seen.directory
            for name, file in seen.files.items():
                listing.files[base + name] = file
            for name, reason in seen.odd.items():
                listing.odd[base + name] = reason
            self._waiting += [(f"{base}{name}/", self._ignoring) for name in seen.directories]

    def add_wanted(self) -> None:
        """Add files that are ignored and were imported, where nothing but patterns kept them out."""
        for path in self._place.wanted:
            file = f"{self._place.directory}/{path}"
            if path not in self.listing.files and not self._is_out(path) and (found := read_file(file)) is not None:
                self.listing.files[path] = found

    def add_tracked(self, tracked: Collection[str]) -> None:
        """Add files that git tracks although its patterns ignore them, where `.sgpuignore` does not."""
        for path in tracked:
            if path in self.listing.files or self._is_out(path) or self._is_ours(path):
                continue
            file = f"{self._place.directory}/{path}"
            if not os.path.islink(file) and (found := read_file(file)) is not None:
                self.listing.files[path] = found

    def say_ignored(self) -> None:
        """Say what patterns leave out: a function that needs it finds nothing in a rank."""
        if names := [name for name in self._ignored if name not in self.listing.files]:
            more = len(names) - _IGNORED_NAMED_MAX
            listed = ", ".join(show(name) for name in names[:_IGNORED_NAMED_MAX])
            self.listing.odd[""] = f"{GIT} or {OURS} name {listed}{f' and {more} more' if more > 0 else ''}"

    def _is_ours(self, path: str) -> bool:
        """Return whether `.sgpuignore` leaves out a file, or a directory above it."""
        names, ours = path.split("/"), Ignoring()
        for depth in range(len(names)):
            base = "".join(f"{name}/" for name in names[:depth])
            ours = Ignoring((), self._ignoring_in[base].ours) if base in self._ignoring_in else ours
            if ours.ignores(base + names[depth] + ("/" if depth < len(names) - 1 else "")):
                return True
        return False

    def _keep(self, above: str, name: str, is_directory: bool) -> bool:
        if name in ALWAYS_OUT or name.endswith(BYTECODE):
            return False
        top = self._place.directory.rstrip("/")
        if is_directory and self._is_foreign(f"{top}/{above}{name}"):
            return False
        if not above:
            if self._is_venv and name in _VENV_NAMES:
                return False
            if self._place.shallow and not _is_python(f"{top}/{name}", is_directory):
                return False
            if is_directory and name.endswith(".egg-info"):
                return True
        elif above.endswith(".egg-info/") and above.count("/") == 1:
            return True
        path = f"{above}{name}/" if is_directory else above + name
        ignored = self._ignoring.ignores(path)
        if ignored:
            self._ignored.append(path)
        return not ignored

    def _is_foreign(self, directory: str) -> bool:
        return directory in self._out or os.path.lexists(f"{directory}/pyvenv.cfg")

    def _is_out(self, path: str) -> bool:
        names = path.split("/")
        directories = ("/".join(names[:depth]) for depth in range(1, len(names)))
        return (
            not ALWAYS_OUT.isdisjoint(names)
            or path.endswith(BYTECODE)
            or any(self._is_foreign(f"{self._place.directory}/{directory}") for directory in directories)
            or (self._is_venv and names[0] in _VENV_NAMES)
        )


def wanted_files(directory: str, loaded: Collection[str], deeper: Collection[str]) -> tuple[str, ...]:
    """Return the loaded files that lie below a directory and below none of the roots deeper in it, relative to it.

    Args:
        directory: of code.
        loaded: absolute paths.
        deeper: directories of other roots; only those below it count.
    """
    start = directory.rstrip("/") + "/"
    others = tuple(other.rstrip("/") + "/" for other in deeper if other.startswith(start))
    return tuple(
        file[len(start) :] for file in loaded if file.startswith(start) and not (others and file.startswith(others))
    )


def _is_python(path: str, is_directory: bool) -> bool:
    if is_directory:
        return os.path.lexists(f"{path}/__init__.py")
    return path.endswith((".py", ".so"))


def _check_size(listing: Listing) -> None:
    files = listing.files
    size = sum(file.size for file in files.values())
    if size <= CODE_BYTES_MAX and len(files) <= CODE_FILES_MAX:
        return
    many = len(files) > CODE_FILES_MAX
    count = f"{len(files):,}{' or more' if len(files) > _COUNTED_FILES_MAX else ''} files"
    raise EnvironmentTooLarge(
        f"the project directory {show(listing.top)} has {count} and {_gigabytes(size)}; at most "
        f"{CODE_FILES_MAX:,} files and {_gigabytes(CODE_BYTES_MAX)} travel as code. Largest: "
        f"{_name_largest(files, by_count=many)}",
        hint="name what the code does not need in .gitignore or .sgpuignore, for example data/ or *.ckpt",
    )


def _name_largest(files: dict[str, File], *, by_count: bool) -> str:
    weights: Counter[str] = Counter()
    for path, file in files.items():
        first, separator, _ = path.partition("/")
        # A large file deep down is named itself, many small ones by their directory.
        name = path if not by_count and file.size > CODE_BYTES_MAX // 20 else first + separator
        weights[name] += 1 if by_count else file.size
    largest = weights.most_common(10)
    if by_count:
        return ", ".join(f"{show(name)} ({count:,} files)" for name, count in largest)
    return ", ".join(f"{show(name)} ({_gigabytes(size)})" for name, size in largest)


def _gigabytes(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 // 100 else f"{size / 1024**2:.2f} MiB"
