"""Fills a directory with hard links to unit files, copied files and generated files.

    1 directories of several units  filled here, one after another
    2 all directories below them    have one unit each, or generated files only; two processes fill them (`divide`)

If the kernel refuses a hard link, the module copies the file instead. In each directory, the module first creates the
generated files and generated links. After the generated entries, the module creates subdirectories, unit files and unit
links, in this order. The module never replaces an existing directory entry. Before another link to a file, the module
checks files that already have links (`unit_integrity.py`).

If several units contain a path, directories take precedence over files, and earlier units over later units. The module
opens each new directory without following links, and uses only paths relative to its descriptor. No file is therefore
created through a link from a unit. The module sets a directory's mode after all entries of the directory exist. The
kernel refuses hard links across file systems (EXDEV), to other users' files (`fs.protected_hardlinks`, EPERM), and
beyond 65,000 per file (EMLINK).

The module fills a new directory that no other process uses. The module does not depend on the final path of the
directory or on the kind of a unit.

Threads would compete for the interpreter lock at each of tens of thousands of system calls. `divide` therefore forks a
second process, and both processes read work items from a pipe. Forking is not safe in a process with several threads,
and is useless on a single core. With several threads or a single core, the original process therefore processes all
work items.

Failure cases: After an OSError in either process, the original process waits for the fork and then raises the error. If
the forked process is killed, the original process raises an `OSError`. If the original process is killed, the forked
process stops within a second, after the remaining work items. Until the forked process stops, it holds the locks of the
original process. If a file may have been modified (`LinkResult.suspect`), the caller must discard the directory. If a
path is a directory in one unit and a file in another unit, the module raises EnvironmentRejected.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from serverless_gpu.environment.restore.cache.unit_integrity import is_suspect
from serverless_gpu.environment.restore.tree_plan import TreePart
from serverless_gpu.errors import EnvironmentRejected
from serverless_gpu.json_codec import from_msgpack

_REFUSED = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY_BYTES = 8 * 1024 * 1024
_NUMBER = struct.Struct("=H")
_NUMBERS_MAX = 2048
"""Maximum number of work items in the pipe, small enough for the buffer of any pipe."""
_DONE, _FAILED = b"+", b"!"

_Result = TypeVar("_Result")


class LinkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of links and copies in a filled tree, and the reason for the first copy."""

    linked: int = 0
    why_copied: str = ""
    # Path, relative to the tree, of a file that may have been modified after an earlier link, or "".
    suspect: str = ""
    copies: tuple[str, ...] = ()  # Paths of the copied files, relative to the tree.
    directories: dict[str, int] = {}  # Modification time of each directory, by its path relative to the tree.

    @property
    def copied(self) -> int:
        """Return the number of copied files."""
        return len(self.copies)

    def __add__(self, other: LinkResult) -> LinkResult:
        return LinkResult(
            linked=self.linked + other.linked,
            why_copied=self.why_copied or other.why_copied,
            suspect=self.suspect or other.suspect,
            copies=self.copies + other.copies,
            directories=self.directories | other.directories,
        )


class ContentSource(NamedTuple):
    """The unit directories that fill one part of a tree."""

    part: TreePart
    directories: Sequence[Path]
    copies: bool = False  # True to copy the unit's files instead of linking them.
    files: Sequence[int] = ()  # Approximate number of files in each directory, or empty if unknown.
    # Time of the last check of links to each directory, or 0 for a directory that needs no check.
    since_ns: Sequence[int] = ()


class _Origin(NamedTuple):
    """A directory of a unit. The fields `number`, `files` and `since_ns` describe the whole unit."""

    number: int
    path: str
    copies: bool
    files: int
    since_ns: int


def fill(tree: Path, sources: Sequence[ContentSource], *, read_only: bool = False) -> LinkResult:
    """Fill a tree with the content of its parts.

    `tree` is an empty directory. `sources` lists the parts of the tree, outer parts first.
    """
    filler = _Filler(str(tree), _generated(sources), read_only=read_only)
    merging = _Merging(filler, sources)
    merging.run()
    below = sorted(merging.below.items(), key=lambda item: -item[1].files if item[1] else 0)

    def work(numbers: Iterator[int]) -> LinkResult:
        for number in numbers:
            path, origin = below[number]
            filler.fill_all(path, origin)
        return filler.taken()

    merged = filler.taken()
    # For a tree with only generated files, forking would take longer than writing the files.
    if not any(origin for _, origin in below):
        return merged + work(iter(range(len(below))))
    return sum(divide(len(below), work, LinkResult), merged)


def write_generated(directory: Path, part: TreePart) -> None:
    """Write the generated files, links and directories of one part of a tree."""
    os.mkdir(directory, 0o755)
    fill(directory, [ContentSource(msgspec.structs.replace(part, at=""), ())])


def link_new(source: Path, target: Path) -> None:
    """Link a unit's new bytecode into a tree that already links the unit's other files.

    The function creates the target directory if it does not exist.
    """
    try:
        target.mkdir()
        target.chmod(0o755)  # Other users must be able to read the tree, regardless of this process's umask.
    except FileExistsError:
        if target.is_symlink() or not target.is_dir():
            raise _mixed(str(target)) from None
    with os.scandir(source) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    # A file with another suffix is an unfinished file of a compiler process.
    files = [name for name in names if name.endswith(".pyc")]
    with _opened(str(source)) as here, _opened(str(target)) as there:
        _link(files, here, there, copies=False)


def divide(count: int, work: Callable[[Iterator[int]], _Result], kind: type[_Result]) -> list[_Result]:
    """Process work items in two processes if forking is safe and useful.

    `work` processes the items with the given numbers, and may raise `OSError` or `EnvironmentRejected`. `kind` is the
    return type of `work`, for msgspec.
    """
    if count < 2 or len(os.sched_getaffinity(0)) < 2 or len(os.listdir("/proc/self/task")) > 1:
        return [work(iter(range(count)))]
    numbers, writing = os.pipe()
    answer, answering = os.pipe()
    step = -(-count // _NUMBERS_MAX)
    os.write(writing, b"".join(_NUMBER.pack(number) for number in range(-(-count // step))))
    os.close(writing)
    try:
        pid = os.fork()
    except OSError:  # The operating system cannot fork another process.
        for fd in (numbers, answer, answering):
            os.close(fd)
        return [work(iter(range(count)))]
    mine = _next_pieces(numbers, step, count)
    if pid == 0:
        _be_fork(work, mine, answering)
    os.close(answering)
    try:
        ours = work(mine)
    finally:
        # After an error, the forked process must not start the remaining work items.
        while os.read(numbers, _NUMBERS_MAX):
            pass
        os.close(numbers)
        with open(answer, "rb") as file:
            said = file.read()
        status = os.waitpid(pid, 0)[1]
    return [ours, _result(said, status, kind)]


class _Folder(msgspec.Struct):
    """Generated entries of one directory: files with modes, links with targets, and directory names."""

    files: dict[str, tuple[bytes, int]] = {}
    links: dict[str, str] = {}
    directories: set[str] = set()


_NOTHING = _Folder()


def _generated(sources: Sequence[ContentSource]) -> dict[str, _Folder]:
    """Return the generated entries of all parts, grouped by directory.

    If two parts contain the same path, the inner part takes precedence.
    """
    folders: dict[str, _Folder] = {}

    def folder(path: str) -> _Folder:
        if path not in folders:
            folders[path] = _Folder()
            if path:
                above, _, name = path.rpartition("/")
                folder(above).directories.add(name)
        return folders[path]

    for source in sources:
        part = source.part
        for below in ("", *part.directories):
            folder(posixpath.join(part.at, below).rstrip("/"))
        for path, content in part.files.items():
            above, _, name = posixpath.join(part.at, path).rpartition("/")
            folder(above).files[name] = (content, 0o555 if path in part.executable else 0o444)
        for path, target in part.links.items():
            above, _, name = posixpath.join(part.at, path).rpartition("/")
            folder(above).links[name] = target
    return folders


class _Listing(NamedTuple):
    """The entry names of a directory, grouped by kind of entry."""

    directories: list[str]
    files: list[str]
    links: list[str]
    suspects: list[str]


class _Merging:
    """Fills the directories that several units share or that contain other parts of the tree.

    `below` contains the directories that remain to be filled, each from at most one unit.
    """

    def __init__(self, filler: _Filler, sources: Sequence[ContentSource]) -> None:
        self._filler = filler
        self._parts: dict[str, list[_Origin]] = {}
        self.below: dict[str, _Origin | None] = {}
        number = 0
        for source in sources:
            origins = self._parts.setdefault(source.part.at, [])
            for index, directory in enumerate(source.directories):
                files = source.files[index] if source.files else 0
                since_ns = source.since_ns[index] if source.since_ns else 0
                origins.append(_Origin(number, str(directory), source.copies, files, since_ns))
                number += 1
        # The path of each part of the tree, and all parent directories of this path.
        self._shared = {above for at in self._parts for above in itertools.accumulate(at.split("/"), posixpath.join)}

    def run(self) -> None:
        while self._parts:
            at = next(iter(self._parts))
            self._merge(at, self._parts.pop(at))

    def _merge(self, path: str, origins: Sequence[_Origin]) -> None:
        inside = self._filler.merge(path, sorted(origins))
        for name, found in inside.items():
            below = posixpath.join(path, name)
            found += self._parts.pop(below, [])
            if len(found) <= 1 and below not in self._shared:
                self.below[below] = found[0] if found else None
            else:
                self._merge(below, found)


class _Filler:
    """Fills directories of one tree, and counts the links and copies."""

    def __init__(self, tree: str, generated: Mapping[str, _Folder], *, read_only: bool) -> None:
        self._tree = tree
        self._generated = generated
        self._mode = 0o555 if read_only else 0o755
        self._begin()

    def taken(self) -> LinkResult:
        """Return the numbers of links and copies since the previous call."""
        linked = LinkResult(
            linked=self._linked,
            why_copied=self._why,
            suspect=self._suspect,
            copies=tuple(self._copies),
            directories=self._directories,
        )
        self._begin()
        return linked

    def _begin(self) -> None:
        self._linked = 0
        self._why = ""
        self._suspect = ""
        self._copies: list[str] = []
        self._directories: dict[str, int] = {}

    def merge(self, path: str, origins: Sequence[_Origin]) -> dict[str, list[_Origin]]:
        """Fill a directory, create its subdirectories, and return the source directories of each subdirectory."""
        inside: dict[str, list[_Origin]] = {}
        with contextlib.ExitStack() as opened:
            directory = opened.enter_context(_opened(os.path.join(self._tree, path)))
            listed = []
            for origin in origins:
                source = opened.enter_context(_opened(origin.path))
                listing = _list(source, path, origin.since_ns)
                listed.append((source, listing, origin.copies))
                for name in listing.directories:
                    inside.setdefault(name, []).append(origin._replace(path=f"{origin.path}/{name}"))
            for name in self._generated.get(path, _NOTHING).directories:
                inside.setdefault(name, [])
            self._fill(directory, path, listed)
        return inside

    def fill_all(self, path: str, origin: _Origin | None) -> None:
        """Fill a directory and all directories below it, from one unit or with generated entries only."""
        with _opened(os.path.join(self._tree, path)) as directory:
            if origin is None:
                self._fill_generated(directory, path)
                return
            with _opened(origin.path) as source:
                self._fill_all(directory, source, path, origin)

    def _fill_generated(self, directory: int, path: str) -> None:
        self._fill(directory, path, [])
        for name in self._generated[path].directories:
            with _opened(name, directory) as inner:
                self._fill_generated(inner, f"{path}/{name}")

    def _fill_all(self, directory: int, source: int, path: str, origin: _Origin) -> None:
        listing = _list(source, path, origin.since_ns)
        self._fill(directory, path, [(source, listing, origin.copies)])
        for name in listing.directories:
            # Opening a file by its path is slow, because the kernel resolves every name in the path. Using the context
            # manager `_opened` would be equally slow.
            inner = os.open(name, _DIRECTORY, dir_fd=directory)
            try:
                below = os.open(name, _DIRECTORY, dir_fd=source)
                try:
                    self._fill_all(inner, below, f"{path}/{name}", origin)
                finally:
                    os.close(below)
            finally:
                os.close(inner)
        if (generated := self._generated.get(path)) is not None:
            for name in generated.directories.difference(listing.directories):
                with _opened(name, directory) as inner:
                    self._fill_generated(inner, f"{path}/{name}")

    def _fill(self, directory: int, path: str, listed: Sequence[tuple[int, _Listing, bool]]) -> None:
        if (generated := self._generated.get(path)) is not None:
            for name, (content, mode) in generated.files.items():
                with open(os.open(name, _MAKE, 0o600, dir_fd=directory), "wb") as file:
                    file.write(content)
                    os.fchmod(file.fileno(), mode)
            for name, target in generated.links.items():
                os.symlink(target, name, dir_fd=directory)
            for name in generated.directories:
                self._make(directory, path, name)
        for _, listing, _ in listed:
            for name in listing.directories:
                self._make(directory, path, name)
        for source, listing, copies in listed:
            if listing.suspects and not self._suspect:
                self._suspect = posixpath.join(path, listing.suspects[0])
            linked = _link(listing.files, source, directory, copies=copies)
            self._linked += linked.linked
            self._why = self._why or linked.why_copied
            self._copies += [posixpath.join(path, name) for name in linked.copies]
        for source, listing, _ in listed:
            for name in listing.links:
                with contextlib.suppress(FileExistsError):
                    os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=directory)
        # Other users must be able to read the tree, regardless of this process's umask.
        os.fchmod(directory, self._mode)
        self._directories[path] = os.fstat(directory).st_mtime_ns

    def _make(self, directory: int, path: str, name: str) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=directory)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise _mixed(os.path.join(self._tree, path, name)) from None


@contextlib.contextmanager
def _opened(path: str, above: int | None = None) -> Iterator[int]:
    directory = os.open(path, _DIRECTORY, dir_fd=above)
    try:
        yield directory
    finally:
        os.close(directory)


def _link(names: Sequence[str], source: int, target: int, *, copies: bool) -> LinkResult:
    """Link or copy files into another directory, without replacing existing files."""
    linked, link = 0, os.link
    copied: list[str] = []
    why = ""
    for name in names:
        refusal = "users may edit the linked files"
        if not copies:
            try:
                link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                refusal = error.strerror or "the file system refuses links"
            else:
                linked += 1
                continue
        if _copy(name, source, target, writable=copies):
            copied.append(name)
            why = why or refusal
    return LinkResult(linked=linked, why_copied=why, copies=tuple(copied))


def _list(directory: int, path: str, since_ns: int) -> _Listing:
    listing = _Listing([], [], [], [])
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_symlink():
                listing.links.append(entry.name)
            elif entry.is_dir(follow_symlinks=False):
                listing.directories.append(entry.name)
            else:
                listing.files.append(entry.name)
                if since_ns and is_suspect(path, entry.name, entry.stat(follow_symlinks=False), since_ns):
                    listing.suspects.append(entry.name)
    return listing


def _copy(name: str, source: int, target: int, *, writable: bool) -> bool:
    reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
    try:
        status = os.fstat(reading)
        try:
            writing = os.open(name, _MAKE, 0o600, dir_fd=target)
        except FileExistsError:
            return False
        try:
            while os.sendfile(writing, reading, None, _COPY_BYTES):
                pass
            os.fchmod(writing, status.st_mode & 0o555 | (0o200 if writable else 0))
            os.utime(writing, ns=(status.st_mtime_ns, status.st_mtime_ns))
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return True


def _mixed(path: str) -> EnvironmentRejected:
    return EnvironmentRejected(f"{path} is a file in one unit, and a directory in another unit")


class _Problem(msgspec.Struct, frozen=True):
    """An error of the forked process: an `OSError`, or, with number 0, a rejected environment."""

    number: int
    text: str
    file: str = ""


def _next_pieces(numbers: int, step: int, count: int) -> Iterator[int]:
    while data := os.read(numbers, _NUMBER.size):
        first = _NUMBER.unpack(data)[0] * step
        yield from range(first, min(first + step, count))


def _be_fork(work: Callable[[Iterator[int]], object], numbers: Iterator[int], answering: int) -> NoReturn:
    code = 1
    try:
        try:
            said = _DONE + msgspec.msgpack.encode(work(numbers))
        except OSError as error:
            problem = _Problem(error.errno or 0, error.strerror or str(error), str(error.filename or ""))
            said = _FAILED + msgspec.msgpack.encode(problem)
        except EnvironmentRejected as error:
            said = _FAILED + msgspec.msgpack.encode(_Problem(0, error.message))
        with open(answering, "wb") as file:
            file.write(said)
        code = 0
    except Exception:  # noqa: BLE001 - the forked process ends here
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _result(said: bytes, status: int, kind: type[_Result]) -> _Result:
    if status or not said:
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ChildProcessError(0, f"a forked process of the restore {how}")
    if said.startswith(_DONE):
        return from_msgpack(said[1:], kind)
    problem = from_msgpack(said[1:], _Problem)
    if not problem.number:
        raise EnvironmentRejected(problem.text)
    raise OSError(problem.number, problem.text, problem.file or None)
