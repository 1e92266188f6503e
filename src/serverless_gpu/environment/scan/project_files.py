"""Selects the files of the user's project that a capture includes, by the rules of git.

The capture leaves out files that `.sgpuignore` or git's ignore files (`.gitignore`, `.git/info/exclude`, the user's
own) name. The capture always leaves out `.git .hg .svn __pycache__ *.pyc .ipynb_checkpoints`, virtual environments, and
the home directory of serverless-gpu. Directories with installed distributions are separate roots, and not project code.
The capture includes these ignored files, unless `.sgpuignore` names them:

    tracked    files that git tracks (`git add -f`), also in an ignored directory
    imported   files of modules that were imported
    beside     Python files and extension modules in a package, or beside an imported file: a generated `_version.py`,
               an extension module built in place. Not in an ignored directory
    egg-info   an old editable install has no metadata without this directory

The capture does not walk directories that are not projects, such as the home directory, `/` and `/tmp`. A user may also
start a script from a directory that is not a project. For a script outside of a project, the capture includes only the
Python files and packages in the script's directory.

The capture also leaves out and reports files that a restore would reject. For example, a project with the data files
`a.png` and `A.png` must still run. If two names differ only in case or Unicode form, the capture prefers the imported
file, then the first in sort order. The capture refuses invalid names in a library, because no installer creates a file
with an invalid name.

The walk counts the entries that git ignores, and reports the counts in one message. The walk does not know the size of
ignored directories, because it does not enter them. The message names ignored directories first and hidden directories
last, because hidden directories are mostly caches.

Failure case: The walk raises `EnvironmentTooLarge` for a project of more than 1 GiB or 100,000 files. The error message
names the ten largest entries of the project.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection

import msgspec

from serverless_gpu.environment.scan.directory_listing import (
    BYTECODE,
    ListedFile,
    Listing,
    is_plain,
    look,
    read_file,
    show,
)
from serverless_gpu.environment.scan.gitignore import (
    GIT,
    OURS,
    IgnoreRules,
    git_index,
    index_mtime,
    outer_ignoring,
    tracked_files,
)
from serverless_gpu.environment.snapshot_validation import DEPTH_MAX, PATH_BYTES_MAX, fold_name
from serverless_gpu.errors import EnvironmentTooLarge

MARK = " that git ignores ("
UNASKED = "; which of them it tracks is not known: "
_NAMED_MAX = 5
_NAME_CHARACTERS_MAX = 60
_CANDIDATES_MAX = 1000
_AREA = "site/"
CODE_BYTES_MAX = 1024**3
CODE_FILES_MAX = 100_000
_COUNTED_FILES_MAX = 4 * CODE_FILES_MAX
"""Number of files after which the walk of an oversized directory stops.

After this many files, the walk has usually found the largest entries.
"""
ALWAYS_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints"})
_IMPORTABLE = (".py", ".so")
_VENV_NAMES = frozenset({"bin", "lib", "lib64", "include", "share", "etc", "pyvenv.cfg"})


class CodeDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """A project directory, and the rules that select its files for the capture."""

    directory: str  # Absolute path of the project directory.
    shallow: bool = False  # True if the capture includes only the directory's own Python files and packages.
    out: tuple[str, ...] = ()  # Absolute paths of subdirectories that are never part of the project code.
    wanted: tuple[str, ...] = ()  # Relative paths of ignored files that the capture includes.
    unwanted: tuple[str, ...] = ()
    tracked: tuple[str, ...] = ()  # Relative paths of files that git both ignores and tracks.
    index: str = ""  # Path of git's index file, or "" outside of a repository.
    index_ns: int = 0  # Modification time of git's index, in nanoseconds.

    def is_stale(self) -> bool:
        """Return True if git's index has changed since the walk."""
        return bool(self.index) and index_mtime(self.index) != self.index_ns


class CodeListing(msgspec.Struct, frozen=True, kw_only=True):
    """The captured files of a project directory, and the watched ignore files."""

    listing: Listing
    # ignore files that the walk read, and missing ignore files that would take effect
    watched: tuple[str, ...]
    place: CodeDirectory


def list_code(place: CodeDirectory, *, ask: bool = False) -> CodeListing:
    """Return the files of a project directory that a capture includes.

    If `ask` is true, the walk reads the tracked files from git's index. If `ask` is false, the walk uses the tracked
    files in `place`.
    """
    outer, watched = outer_ignoring(place.directory)
    walk = _CodeWalk(place, outer, ask=ask)
    walk.run()
    walk.add_wanted()
    leave_out_misfits(walk.listing, frozenset(place.wanted))
    _check_size(walk.listing)
    if ask and (said := walk.ignored.sentence(place.directory, walk.problem)):
        walk.listing.odd = {"": said} | walk.listing.odd
    inner = (f"{directory.path}/{name}" for directory in walk.listing.directories.values() for name in (GIT, OURS))
    return CodeListing(
        listing=walk.listing,
        watched=(*watched, *(path for path in inner if os.path.lexists(path))),
        place=walk.place,
    )


class _CodeWalk:
    """A walk of a project directory, with the directories to visit and their ignore rules."""

    def __init__(self, place: CodeDirectory, outer: IgnoreRules, *, ask: bool) -> None:
        self._ask = ask
        self._out = frozenset(place.out)
        self._waiting: list[tuple[str, IgnoreRules]] = [("", outer)]
        self._chains: dict[str, IgnoreRules] = {}
        self._ignoring = outer
        self._is_venv = os.path.lexists(f"{place.directory}/pyvenv.cfg")
        self._tracked: set[str] = set()
        self._ignored_and_tracked: list[str] = []
        self._above_tracked: set[str] = set()
        self._imported_from = {path.rpartition("/")[0] for path in (*place.wanted, *place.unwanted)}
        self._packages: dict[str, bool] = {}
        self.listing = Listing(top=place.directory, files={}, directories={}, odd={})
        self.ignored = IgnoredFiles()
        self.problem = ""
        self.place = place
        if ask:
            found = git_index(place.directory)
            index = found[0] if found else ""
            # The walk reads the index's modification time before its content, so that the next check detects a later
            # change.
            index_ns = index_mtime(index)
            self._read_tracked(place.directory, "")
            self.place = msgspec.structs.replace(place, index=index, index_ns=index_ns)
        else:
            self._track("", place.tracked)

    def run(self) -> None:
        top, listing = self.place.directory, self.listing
        while self._waiting and len(listing.files) <= _COUNTED_FILES_MAX:
            base, above = self._waiting.pop()
            directory = f"{top}/{base}".rstrip("/") or "/"
            begins = bool(base) and os.path.lexists(f"{directory}/.git")
            self._ignoring = self._chains[base] = above.below(directory, base, begins=begins)
            if begins and self._ask:
                self._read_tracked(directory, base)
            seen = look(directory, top, self._keep)
            listing.directories[base.rstrip("/")] = seen.directory
            for name, file in seen.files.items():
                listing.files[base + name] = file
            for name, reason in seen.odd.items():
                listing.odd[base + name] = reason
            self._waiting += [(f"{base}{name}/", self._holds_in(f"{base}{name}/")) for name in seen.directories]
        if self._ask:
            self.place = msgspec.structs.replace(self.place, tracked=tuple(self._ignored_and_tracked))

    def add_wanted(self) -> None:
        """Add imported files that git's patterns ignore, unless `.sgpuignore` names them."""
        unwanted = []
        for path in self.place.wanted:
            file = f"{self.place.directory}/{path}"
            if path in self.listing.files or self._is_out(path):
                continue
            if self._is_ours(path):
                unwanted.append(path)
            elif (found := read_file(file)) is not None:
                self.listing.files[path] = found
        self.place = msgspec.structs.replace(self.place, unwanted=(*self.place.unwanted, *unwanted))

    def _read_tracked(self, directory: str, base: str) -> None:
        found = git_index(directory)
        paths = tracked_files(*found) if found else []
        if paths is None:
            self.problem = self.problem or f"cannot read {show(found[0]) if found else ''}"
        self._track(base, paths or ())

    def _track(self, base: str, paths: Collection[str]) -> None:
        for path in paths:
            self._tracked.add(base + path)
            # `_above_tracked` includes the path itself, because git lists a submodule as a tracked directory.
            above = base + path + "/"
            while above and above not in self._above_tracked:
                self._above_tracked.add(above)
                above = above[: above.rfind("/", 0, -1) + 1]

    def _holds_in(self, path: str) -> IgnoreRules:
        """Return the ignore rules for a captured directory.

        In an ignored directory, the capture includes only tracked files.
        """
        ignoring = self._ignoring
        if path in self._above_tracked and ignoring.by_ours(path) is None and ignoring.by_git(path):
            return msgspec.structs.replace(ignoring, all=True)
        return ignoring

    def _is_ignored(self, above: str, path: str) -> bool:
        """Return True if the capture leaves out an entry, and count the entry if git ignores it.

        All directory paths end in ``/``.
        """
        ours = self._ignoring.by_ours(path)
        if ours:
            return True
        if path in (self._above_tracked if path.endswith("/") else self._tracked):
            if self._ask and self._ignoring.by_git(path):
                self._ignored_and_tracked.append(path.rstrip("/"))
            return False
        # As in git, no pattern can include an entry of a directory that git ignores.
        ignored = self._ignoring.by_git(path) if ours is None or self._ignoring.all else False
        if not ignored or (path.endswith(_IMPORTABLE) and not self._ignoring.all and self._is_imported_from(above)):
            return False
        self.ignored.add(path)
        return True

    def _is_imported_from(self, above: str) -> bool:
        """Return True if a directory contains an imported file or is a captured package."""
        known = self._packages.get(above)
        if known is None:
            own = above + "__init__.py"
            known = self._packages[above] = above.rstrip("/") in self._imported_from or (
                os.path.isfile(f"{self.place.directory}/{own}")
                and not self._ignoring.by_ours(own)
                and (own in self._tracked or not self._ignoring.by_git(own))
            )
        return known

    def _is_ours(self, path: str) -> bool:
        """Return True if `.sgpuignore` names a file or one of its parent directories."""
        names = path.split("/")
        ignoring = self._chains[""]
        for depth in range(1, len(names) + 1):
            part = "/".join(names[:depth]) + ("/" if depth < len(names) else "")
            if ignoring.by_ours(part):
                return True
            ignoring = self._chains.get(part, ignoring)
        return False

    def _keep(self, above: str, name: str, is_directory: bool) -> bool:
        if name in ALWAYS_OUT or name.endswith(BYTECODE):
            return False
        top = self.place.directory.rstrip("/")
        if is_directory and self._is_foreign(f"{top}/{above}{name}"):
            return False
        if not above:
            if self._is_venv and name in _VENV_NAMES:
                return False
            if self.place.shallow:  # In a shallow directory, the capture includes only importable files and packages.
                is_package = is_directory and os.path.lexists(f"{top}/{name}/__init__.py")
                if not is_package and (is_directory or not name.endswith(_IMPORTABLE)):
                    return False
            if is_directory and name.endswith(".egg-info"):
                return True
        elif above.endswith(".egg-info/") and above.count("/") == 1:
            return True
        return not self._is_ignored(above, f"{above}{name}/" if is_directory else above + name)

    def _is_foreign(self, directory: str) -> bool:
        return directory in self._out or os.path.lexists(f"{directory}/pyvenv.cfg")

    def _is_out(self, path: str) -> bool:
        names = path.split("/")
        directories = ("/".join(names[:depth]) for depth in range(1, len(names)))
        return (
            not ALWAYS_OUT.isdisjoint(names)
            or path.endswith(BYTECODE)
            or any(self._is_foreign(f"{self.place.directory}/{directory}") for directory in directories)
            or (self._is_venv and names[0] in _VENV_NAMES)
        )


def wanted_files(directory: str, loaded: Collection[str], deeper: Collection[str]) -> tuple[str, ...]:
    """Return the relative paths of loaded files that belong to a directory and not to a deeper root."""
    start = directory.rstrip("/") + "/"
    others = tuple(other.rstrip("/") + "/" for other in deeper if other.startswith(start))
    return tuple(
        file[len(start) :] for file in loaded if file.startswith(start) and not (others and file.startswith(others))
    )


def _check_size(listing: Listing) -> None:
    files = listing.files
    size = sum(file.size for file in files.values())
    if size <= CODE_BYTES_MAX and len(files) <= CODE_FILES_MAX:
        return
    many = len(files) > CODE_FILES_MAX
    count = f"{len(files):,}{' or more' if len(files) > _COUNTED_FILES_MAX else ''} files"
    raise EnvironmentTooLarge(
        f"the project directory {show(listing.top)} has {count} and {_gigabytes(size)}, but at most "
        f"{CODE_FILES_MAX:,} files and {_gigabytes(CODE_BYTES_MAX)} can be captured as code. Largest: "
        f"{_name_largest(files, by_count=many)}",
        hint="list files that the code does not need in .gitignore or .sgpuignore, for example data/ or *.ckpt",
    )


def _name_largest(files: dict[str, ListedFile], *, by_count: bool) -> str:
    weights: Counter[str] = Counter()
    for path, file in files.items():
        first, separator, _ = path.partition("/")
        # The message names large files by their own path, and small files by their top-level directory.
        name = path if not by_count and file.size > CODE_BYTES_MAX // 20 else first + separator
        weights[name] += 1 if by_count else file.size
    largest = weights.most_common(10)
    if by_count:
        return ", ".join(f"{show(name)} ({count:,} files)" for name, count in largest)
    return ", ".join(f"{show(name)} ({_gigabytes(size)})" for name, size in largest)


def _gigabytes(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 // 100 else f"{size / 1024**2:.2f} MiB"


def leave_out_misfits(listing: Listing, imported: Collection[str]) -> None:
    """Remove files that no restore would accept from a code listing, and store the reasons in `odd`.

    When two paths collide, an imported file takes precedence.
    """
    misfits = _Misfits()
    for path in sorted(listing.files, key=lambda path: (path not in imported, path)):
        found = misfits.find(path)
        if found is not None:
            odd, reason = found
            del listing.files[path]
            listing.odd[odd] = reason


class _Misfits:
    """Finds invalid paths, and paths that collide on machines that ignore case."""

    def __init__(self) -> None:
        self._folded: dict[str, str] = {"": ""}  # Directory → case-folded path, which must be unique.
        self._taken: dict[str, str] = {}  # Case-folded path → original path, for files and directories.
        self._odd: dict[str, tuple[str, str]] = {}  # Directory → the invalid part of its path, with the reason.

    def find(self, path: str) -> tuple[str, str] | None:
        """Return the invalid part of a path with the reason, or None for a valid path."""
        if not is_plain(path):
            return path, "the name has control characters, or bytes that are not UTF-8"
        if path.count("/") + 2 > DEPTH_MAX or len(os.fsencode(_AREA + path)) > PATH_BYTES_MAX:
            return path, f"the path is too long: at most {PATH_BYTES_MAX} bytes and {DEPTH_MAX} names are allowed"
        directory, separator, name = path.rpartition("/")
        if separator and (found := self._enter(directory)) is not None:
            return found
        return self._take(path, f"{self._folded[directory]}/{fold_name(name)}")

    def _enter(self, directory: str) -> tuple[str, str] | None:
        if directory in self._odd:
            return self._odd[directory]
        if directory in self._folded:
            return None
        above, separator, name = directory.rpartition("/")
        found = self._enter(above) if separator else None
        if found is None:
            folded = f"{self._folded[above]}/{fold_name(name)}"
            found = self._take(directory, folded)
        if found is None:
            self._folded[directory] = folded
        else:
            self._odd[directory] = found
        return found

    def _take(self, path: str, folded: str) -> tuple[str, str] | None:
        other = self._taken.setdefault(folded, path)
        if other == path:
            return None
        return path, (
            f"on a system that ignores case or Unicode forms, the name equals {show(os.path.basename(other))}"
        )


class IgnoredFiles:
    """Counts of the ignored entries below a directory, without the content of ignored directories."""

    def __init__(self) -> None:
        self._files = 0
        self._directories = 0
        self._candidates: list[str] = []

    def add(self, path: str) -> None:
        """Count an entry that git ignores. The path of a directory must end in ``/``."""
        if path.endswith("/"):
            self._directories += 1
        else:
            self._files += 1
        if len(self._candidates) < _CANDIDATES_MAX:
            self._candidates.append(path)

    def sentence(self, top: str, problem: str = "") -> str:
        """Return the message about ignored entries, or "" without ignored entries.

        `problem` is the reason why git's tracked files are unknown.
        """
        if not self._candidates:
            return ""
        counts = [(self._files, "file", "files"), (self._directories, "directory", "directories")]
        said = " and ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count)
        largest = sorted(self._candidates, key=lambda path: _weight(top, path))[:_NAMED_MAX]
        named = ", ".join(
            show(path if len(path) <= _NAME_CHARACTERS_MAX else f"…{path[-_NAME_CHARACTERS_MAX:]}") for path in largest
        )
        more = ", …" if self._files + self._directories > len(largest) else ""
        unasked = f"{UNASKED}{problem}" if problem else ""
        return f"{said}{MARK}{named}{more}){unasked}"


def same_matter(sentence: str) -> str:
    """Return the part of an ignored-files message that stays the same when the counts change."""
    head, mark, rest = sentence.partition(MARK)
    return f"{head.partition(': ')[0]}{mark}{rest.partition(UNASKED)[2]}" if mark else sentence


def _weight(top: str, path: str) -> tuple[int, bool, bool, int, str]:
    is_directory = path.endswith("/")
    name = path.rstrip("/").rpartition("/")[2]
    size = 0
    if not is_directory:
        with contextlib.suppress(OSError):  # A user or program deleted the file after the walk.
            size = os.lstat(f"{top}/{path}").st_size
    return path.rstrip("/").count("/"), is_directory and name.startswith("."), not is_directory, -size, path
