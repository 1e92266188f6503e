"""Decides if an environment is unchanged since its capture.

    level A, `recognise`   directories' mtimes, RECORD and other small files, every file of the project
    level B, `find_edits`  the stat of every file

A file's `stat` values may differ although the file is unchanged. If a directory's mtime differs, the check lists the
directory again and compares its mark, which ignores bytecode. If a file's `stat` differs or its times are too recent,
the check compares the file's content. Therefore `touch`, a checkout of another branch and back, a new hard link, or
most chmods do not count as changes. The compared `stat` values include the ctime, which no system call can set. The
check therefore detects a same-size edit even if a program restores the mtime. The caller stores the new `stat` values
for the next check.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.digests import digest_file
from serverless_gpu.environment.scan.directory_listing import look
from serverless_gpu.environment.scan.index import GatePart, Stats, known_mtime
from serverless_gpu.environment.scan.project_files import CodeDirectory, list_code, wanted_files
from serverless_gpu.environment.scan.roots import keep_for
from serverless_gpu.errors import EnvironmentProblem

_FORK_FROM_FILES = 4000
"""Number of files below which a single process checks all files, because a fork takes longer."""
_WORKERS = 2

RowPath = Callable[[int], str]


class Recognised(msgspec.Struct, frozen=True):
    """Current `stat` values of an unchanged environment, and a flag for values newer than the stored ones."""

    gate: GatePart
    fresher: bool


def recognise(gate: GatePart, description: Description, seen_ns: int, *, watched: bool = False) -> Recognised | None:
    """Return the current `stat` values of an unchanged environment, or None if it may have changed.

    `seen_ns` is a time just before the check starts. `watched` is True if inotify watches have just proved that the
    library directories are unchanged.
    """
    if gate.absent and any(os.path.lexists(path) for path in gate.absent.split("\0")):
        return None
    small = _compare_all(gate.small, seen_ns)
    code = small and _compare_all(gate.code, seen_ns)
    if small is None or code is None:
        return None
    try:
        mtimes = _compare_directories(gate, description, seen_ns, watched)
    # A directory of the environment is missing or unreadable. If the environment needs the missing directory, the next
    # scan reports an error.
    except EnvironmentProblem:
        return None
    if mtimes is None:
        return None
    fresher = small is not gate.small or code is not gate.code or mtimes is not gate.mtimes
    return Recognised(msgspec.structs.replace(gate, small=small, code=code, mtimes=mtimes), fresher)


def find_edits(stats: Stats, row_path: RowPath, seen_ns: int) -> tuple[list[int], Stats]:
    """Return the numbers of missing or changed files, and the current `stat` values of all other files.

    `row_path` returns the row path of a file from its number. `seen_ns` is a time just before the check starts.
    """
    names = stats.names()
    suspects = _find_differences(names, stats)
    edited, same = _read_suspects(names, stats, suspects, row_path)
    return edited, _renew(stats, same, seen_ns)


def differing(stats: Stats) -> list[int]:
    """Return the numbers of files with changed `stat` values, without reading the files."""
    names = stats.names()
    return _differences(names, stats, 0, len(names))


def is_single_threaded() -> bool:
    """Return True if this process may fork, because no Python or library thread is running."""
    try:
        return threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
    except OSError:  # Without /proc, the process cannot count its threads.
        return False


def _compare_all(stats: Stats, seen_ns: int) -> Stats | None:
    """Return the current `stat` values of files if all files have their old content, else None."""
    names = stats.names()
    suspects = differing(stats)
    if not suspects:
        return stats
    edited, same = _read_suspects(names, stats, suspects, lambda number: "site/")
    return None if edited else _renew(stats, same, seen_ns)


def _differences(names: Sequence[str], stats: Stats, start: int, end: int) -> list[int]:
    """Return the numbers of the files in a range whose `stat` values have changed."""
    sizes, mtimes, inodes, ctimes = stats.columns()
    kinds, look_at, look_at_link = stats.kinds, os.stat, os.lstat
    found = []
    for number in range(start, end):
        kind = kinds[number]
        try:
            seen = look_at(names[number]) if kind != "l" else look_at_link(names[number])
        except OSError:
            if kind != "-":
                found.append(number)
            continue
        if (
            seen.st_mtime_ns != mtimes[number]
            or seen.st_ctime_ns != ctimes[number]
            or seen.st_ino != inodes[number]
            or (kind != "l" and seen.st_size != sizes[number])
            or (kind == "f") == bool(seen.st_mode & stat.S_IXUSR)
        ):
            found.append(number)
    return found


def _find_differences(names: Sequence[str], stats: Stats) -> list[int]:
    if len(names) < _FORK_FROM_FILES or not is_single_threaded():
        return _differences(names, stats, 0, len(names))
    size = -(-len(names) // _WORKERS)
    shares = [(start, min(start + size, len(names))) for start in range(0, len(names), size)]
    workers = [_Worker(names, stats, share) for share in shares[1:]]
    found = _differences(names, stats, *shares[0])
    for worker in workers:
        found += worker.finish()
    return found


class _Worker:
    """A forked process that checks some of the files.

    The check uses a process, because Python threads would wait for the interpreter lock.
    """

    def __init__(self, names: Sequence[str], stats: Stats, share: tuple[int, int]) -> None:
        self._work = (names, stats, *share)
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._run(writing)
        os.close(writing)

    def finish(self) -> list[int]:
        """Return the changed files of the forked process's share.

        If the forked process failed, the calling process checks the share instead.
        """
        with open(self._reading, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        if status or len(answer) % 8:
            return _differences(*self._work)
        return array("q", answer).tolist()

    def _run(self, writing: int) -> None:
        status = 1
        try:
            with open(writing, "wb") as pipe:
                pipe.write(array("q", _differences(*self._work)).tobytes())
            status = 0
        finally:
            os._exit(status)  # The forked process must never return into the caller's code.


def _read_suspects(
    names: Sequence[str], stats: Stats, suspects: Sequence[int], row_path: RowPath
) -> tuple[list[int], dict[int, os.stat_result]]:
    """Return the files with changed content, and the earlier `stat` values of the unchanged files."""

    def read(number: int) -> os.stat_result | None:
        return _read_suspect(names[number], stats, number, row_path(number))

    with ThreadPoolExecutor(_WORKERS, thread_name_prefix="suspects") as pool:
        seen = list(pool.map(read, suspects)) if len(suspects) > 1 else [read(number) for number in suspects]
    edited = [number for number, found in zip(suspects, seen, strict=True) if found is None]
    return edited, {number: found for number, found in zip(suspects, seen, strict=True) if found is not None}


def _read_suspect(name: str, stats: Stats, number: int, row_path: str) -> os.stat_result | None:
    kind, digest = stats.kinds[number], stats.digests[32 * number : 32 * number + 32]
    try:
        if kind == "-":
            return None
        if kind == "l":
            own = os.lstat(name)
            said = hashlib.sha256(os.fsencode(os.readlink(name))).digest()
            return own if said == digest else None
        found = os.stat(name)
        if not stat.S_ISREG(found.st_mode) or (kind == "x") != bool(found.st_mode & stat.S_IXUSR):
            return None
        return found if digest_file(name, row_path).sha256 == digest else None
    except (OSError, EnvironmentProblem):  # The checked file is missing or no longer readable.
        return None


def _renew(stats: Stats, seen: Mapping[int, os.stat_result], seen_ns: int) -> Stats:
    """Return `stat` values updated with the files that the check read and found unchanged."""
    if not seen:
        return stats
    numbers = array("q", stats.numbers)
    for number, found in seen.items():
        size = 0 if stats.kinds[number] == "l" else found.st_size
        times = known_mtime(found.st_mtime_ns, seen_ns), known_mtime(found.st_ctime_ns, seen_ns)
        numbers[4 * number : 4 * number + 4] = array("q", (size, times[0], found.st_ino, times[1]))
    return msgspec.structs.replace(stats, numbers=numbers.tobytes())


def _compare_directories(gate: GatePart, description: Description, seen_ns: int, watched: bool) -> bytes | None:
    """Return the current mtimes of the directories if their marks are unchanged, else None."""
    names = gate.directory_names()
    mtimes = array("q", gate.mtimes)
    areas_of = memoryview(gate.areas_of).cast("H").tolist()
    numbers: Sequence[int] = range(len(names))
    if watched:
        is_code = [area.place is not None for area in gate.areas]
        numbers = [number for number, area in enumerate(areas_of) if is_code[area]]
    look_at = os.stat
    try:
        moved = [number for number in numbers if look_at(names[number]).st_mtime_ns != mtimes[number]]
    except OSError:
        return None
    again = _newly_loaded(gate, description)
    for number in moved:
        area = gate.areas[areas_of[number]]
        if area.place is not None:
            again.setdefault(areas_of[number], area.place)
            continue
        directory = look(names[number], area.top, keep_for(area)).directory
        if directory.mark != gate.marks[8 * number : 8 * number + 8]:
            return None
        mtimes[number] = known_mtime(directory.mtime_ns, seen_ns)
    for area_number, place in again.items():
        if not _compare_code(gate, area_number, place, mtimes, seen_ns):
            return None
    return mtimes.tobytes() if moved else gate.mtimes


def _newly_loaded(gate: GatePart, description: Description) -> dict[int, CodeDirectory]:
    """Return the code areas that do not list all files that Python loaded from them."""
    known = set(gate.code.names())
    again = {}
    for number, area in enumerate(gate.areas):
        if area.place is not None:
            place = area.place
            loaded = wanted_files(place.directory, description.loaded, place.out)
            unwanted = frozenset(place.unwanted)
            new = tuple(path for path in loaded if f"{place.directory}/{path}" not in known and path not in unwanted)
            if new:
                again[number] = msgspec.structs.replace(place, wanted=place.wanted + new)
    return again


def _compare_code(gate: GatePart, number: int, place: CodeDirectory, mtimes: array[int], seen_ns: int) -> bool:
    """Return True if a new walk of a code area finds the same directories and files."""
    if place.is_stale():  # Git may track different files by now. Only a full scan reads git's index.
        return False
    listing = list_code(place).listing
    names, areas_of = gate.directory_names(), memoryview(gate.areas_of).cast("H")
    mine = {names[index]: index for index in range(len(names)) if areas_of[index] == number}
    if len(mine) != len(listing.directories):
        return False
    for directory in listing.directories.values():
        index = mine.get(directory.path)
        if index is None or directory.mark != gate.marks[8 * index : 8 * index + 8]:
            return False
        mtimes[index] = known_mtime(directory.mtime_ns, seen_ns)
    known = set(gate.code.names())
    return all(file.file in known for path, file in listing.files.items() if path in place.wanted)
