"""Decides which files of the user's project are captured, by the rules of git.

The capture leaves out files that git ignores (`.gitignore`, `.git/info/exclude`, the user's own pattern file) and files
that `.sgpuignore` names. The capture always leaves out `.git .hg .svn __pycache__ *.pyc .ipynb_checkpoints`, virtual
environments, and the home directory of serverless-gpu. Directories of distributions are separate roots. The capture
includes some ignored files, unless `.sgpuignore` names them:

    tracked    files that git tracks (`git add -f`), also in an ignored directory
    imported   files of modules that were imported
    beside     Python files and extension modules in a package, or beside an imported file: a generated `_version.py`,
               an extension module built in place. Not in an ignored directory
    egg-info   an old editable install has no metadata without this directory

The capture does not walk directories that are not projects, such as the home directory, `/` and `/tmp`. A directory
that is not a project may contain a script. The capture then includes only the Python files and packages of the
directory.

The capture also leaves out files that no restore would accept, and reports these files. A project may contain a data
set with `a.png` and `A.png`, and the project's code must still run. Of two names that differ only in case or Unicode
form, the capture includes the imported file, or else the file that sorts first. In a library the capture refuses
invalid names, because no installer creates a file with an invalid name.

The walk counts the entries that git ignores and reports the count in one message. The walk does not enter ignored
directories, so their size is unknown. The message names directories first, because they contain the most data, and
hidden directories (caches of tools) last.

Failure case: The walk raises `EnvironmentTooLarge` for a project of more than 1 GiB or 100,000 files. The error names
the ten largest entries.
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
"""Number of files after which the walk of a too large directory stops. The walk knows the largest entries by then."""
ALWAYS_OUT = frozenset({".git", ".hg", ".svn", "__pycache__", ".ipynb_checkpoints"})
_IMPORTABLE = (".py", ".so")
_VENV_NAMES = frozenset({"bin", "lib", "lib64", "include", "share", "etc", "pyvenv.cfg"})


class CodeDirectory(msgspec.Struct, frozen=True, kw_only=True):
    """A directory of code, and the rules that select its files."""

    directory: str  # Absolute path of the directory.
    shallow: bool = False  # True if only the directory's own Python files and packages are captured.
    out: tuple[str, ...] = ()  # Absolute paths of subdirectories that never belong to this code.
    wanted: tuple[str, ...] = ()  # Relative paths of files that are captured although git ignores them.
    unwanted: tuple[str, ...] = ()
    tracked: tuple[str, ...] = ()  # Relative paths of files that git both ignores and tracks.
    index: str = ""  # Path of git's index, or "".
    index_ns: int = 0  # Time of the last write to git's index, in nanoseconds.

    def is_stale(self) -> bool:
        """Return True if git's index has changed since the walk read the index."""
        return bool(self.index) and index_mtime(self.index) != self.index_ns


class CodeListing(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a code directory that are captured."""

    listing: Listing
    watched: tuple[str, ...]  # ignore files that the walk used, and missing files that would have an effect
    place: CodeDirectory


def list_code(place: CodeDirectory, *, ask: bool = False) -> CodeListing:
    """Return the files of a code directory that are captured.

    With `ask`, the walk reads git's index. Otherwise the walk uses the tracked files in `place`.
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
    """A walk of a code directory, with the directories to visit and their ignore rules."""

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
            # The walk reads the time before the index, so that a later change is detected.
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
        """Add imported files that only git's patterns left out."""
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
            # The set includes the path itself, because git tracks a submodule as a directory.
            above = base + path + "/"
            while above and above not in self._above_tracked:
                self._above_tracked.add(above)
                above = above[: above.rfind("/", 0, -1) + 1]

    def _holds_in(self, path: str) -> IgnoreRules:
        """Return the rules for a captured directory. An ignored directory captures only tracked files."""
        ignoring = self._ignoring
        if path in self._above_tracked and ignoring.by_ours(path) is None and ignoring.by_git(path):
            return msgspec.structs.replace(ignoring, all=True)
        return ignoring

    def _is_ignored(self, above: str, path: str) -> bool:
        """Return True to leave out an entry, and count ignored entries. Directory paths end in ``/``."""
        ours = self._ignoring.by_ours(path)
        if ours:
            return True
        if path in (self._above_tracked if path.endswith("/") else self._tracked):
            if self._ask and self._ignoring.by_git(path):
                self._ignored_and_tracked.append(path.rstrip("/"))
            return False
        # As in git, no pattern can include an entry of an ignored directory.
        ignored = self._ignoring.by_git(path) if ours is None or self._ignoring.all else False
        if not ignored or (path.endswith(_IMPORTABLE) and not self._ignoring.all and self._is_imported_from(above)):
            return False
        self.ignored.add(path)
        return True

    def _is_imported_from(self, above: str) -> bool:
        """Return True if a directory holds an imported file or is a captured package."""
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
        """Return True if `.sgpuignore` leaves out a file or a directory above it."""
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
            if self.place.shallow:  # In a shallow directory, only importable files and packages are captured.
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
    """Return the loaded files below a directory and not below a deeper root, as relative paths."""
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
        f"the project directory {show(listing.top)} has {count} and {_gigabytes(size)}; at most "
        f"{CODE_FILES_MAX:,} files and {_gigabytes(CODE_BYTES_MAX)} can be captured as code. Largest: "
        f"{_name_largest(files, by_count=many)}",
        hint="list files that the code does not need in .gitignore or .sgpuignore, for example data/ or *.ckpt",
    )


def _name_largest(files: dict[str, ListedFile], *, by_count: bool) -> str:
    weights: Counter[str] = Counter()
    for path, file in files.items():
        first, separator, _ = path.partition("/")
        # The message names a large file by its own path, and many small files by their directory.
        name = path if not by_count and file.size > CODE_BYTES_MAX // 20 else first + separator
        weights[name] += 1 if by_count else file.size
    largest = weights.most_common(10)
    if by_count:
        return ", ".join(f"{show(name)} ({count:,} files)" for name, count in largest)
    return ", ".join(f"{show(name)} ({_gigabytes(size)})" for name, size in largest)


def _gigabytes(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB" if size >= 1024**3 // 100 else f"{size / 1024**2:.2f} MiB"


def leave_out_misfits(listing: Listing, imported: Collection[str]) -> None:
    """Remove files from a code listing that no restore would accept, and store the reason in `odd`.

    Imported files take precedence over other files.
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
        self._folded: dict[str, str] = {"": ""}  # Directory → its case-folded path, which must be unique.
        self._taken: dict[str, str] = {}  # Case-folded path → path, also for files.
        self._odd: dict[str, tuple[str, str]] = {}  # Directory → the invalid part of its path, and the reason.

    def find(self, path: str) -> tuple[str, str] | None:
        """Return the invalid part of a path and the reason, or None for a valid path."""
        if not is_plain(path):
            return path, "its name has control characters, or bytes that are not UTF-8"
        if path.count("/") + 2 > DEPTH_MAX or len(os.fsencode(_AREA + path)) > PATH_BYTES_MAX:
            return path, f"its path is too long: at most {PATH_BYTES_MAX} bytes and {DEPTH_MAX} names are allowed"
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
            f"on a system that ignores case or Unicode forms, its name equals {show(os.path.basename(other))}"
        )


class IgnoredFiles:
    """Ignored entries below a directory. The walk does not enter ignored directories."""

    def __init__(self) -> None:
        self._files = 0
        self._directories = 0
        self._candidates: list[str] = []

    def add(self, path: str) -> None:
        """Count an ignored entry. A directory's path ends in ``/``."""
        if path.endswith("/"):
            self._directories += 1
        else:
            self._files += 1
        if len(self._candidates) < _CANDIDATES_MAX:
            self._candidates.append(path)

    def sentence(self, top: str, problem: str = "") -> str:
        """Return the message about ignored entries, or "" without any.

        `problem` is the reason why the files that git tracks are not known.
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
    """Return the part of a message about left-out files that does not change with the counts."""
    head, mark, rest = sentence.partition(MARK)
    return f"{head.partition(': ')[0]}{mark}{rest.partition(UNASKED)[2]}" if mark else sentence


def _weight(top: str, path: str) -> tuple[int, bool, bool, int, str]:
    is_directory = path.endswith("/")
    name = path.rstrip("/").rpartition("/")[2]
    size = 0
    if not is_directory:
        with contextlib.suppress(OSError):  # The file disappeared after the walk.
            size = os.lstat(f"{top}/{path}").st_size
    return path.rstrip("/").count("/"), is_directory and name.startswith("."), not is_directory, -size, path
