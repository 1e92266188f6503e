"""Removes shared memory that an ended attempt left in /dev/shm.

Libraries make named segments there, and remove them at the end of their process. A killed process does not, and in the
end /dev/shm is full.

    while it runs     candidates ─▶ those that the attempt's processes have open or mapped are its own
    after its end     its own, not in use by any process ─▶ removed

A candidate has a name that a library makes (never one that a user chose: files in /dev/shm may be theirs to keep), is
owned by this user, and was made while the attempt ran. In doubt it stays: a segment that no process of the attempt was
seen with, one that any process has, and one whose maker still lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

_PLACE = Path("/dev/shm")
_PROC = Path("/proc")
_NAME = re.compile(
    r"torch_(?P<torch>\d+)_\d+_\d+"
    r"|__KMP_REGISTERED_LIB_(?P<openmp>\d+)(_\d+)?"
    r"|sem\.loky-(?P<loky>\d+)-\w+"
    r"|psm_[0-9a-f]{8}"  # multiprocessing.shared_memory
    r"|sem\.mp-[a-z0-9_]{8}"  # multiprocessing's locks
    r"|nccl-[A-Za-z0-9]{6}"
)
_LOOK_NS = 1_000_000_000
_LOOKS_MAX = 3  # at one name: no process of the attempt has it by then, so it is not the attempt's
_COARSE_NS = 50_000_000  # the clock of file systems is behind by a tick


class AttemptSegments:
    """The shared-memory segments of one attempt."""

    def __init__(self, place: Path = _PLACE) -> None:
        self._place = place
        self._own: set[str] = set()
        self._looks: dict[str, int] = {}
        self._due_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether it is time to look, once a second; `now_ns` is always of the same clock."""
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + _LOOK_NS
        return True

    def look(self, since_ns: int, pids: Callable[[], Collection[int]]) -> None:
        """Note the attempt's segments: those that its processes have, or that are named after them.

        `since_ns` is the wall time at which user code began; `pids` is called only for new segments.
        """
        there = set(self._candidates(since_ns))
        self._own &= there
        self._looks = {name: self._looks.get(name, 0) + 1 for name in there}
        names = {name for name, looks in self._looks.items() if looks <= _LOOKS_MAX} - self._own
        if not names:
            return
        known = pids()
        self._own |= {name for name in names if _maker(name) in known}
        for pid in known:
            self._own |= _used(pid, self._place, names)

    def remove(self, since_ns: int) -> tuple[str, ...]:
        """Remove the attempt's segments after its last process has ended; return their names."""
        names = self._own.intersection(self._candidates(since_ns)) if self._own else set()
        names -= {name for name in names if (maker := _maker(name)) is not None and (_PROC / str(maker)).exists()}
        in_use: set[str] = set()  # as far as processes can be looked into
        for pid in [int(name) for name in os.listdir(_PROC) if name.isdigit()] if names else ():
            in_use |= _used(pid, self._place, names)
        removed = []
        for name in sorted(names - in_use):
            with contextlib.suppress(OSError):
                (self._place / name).unlink()
                removed.append(name)
        return tuple(removed)

    def _candidates(self, since_ns: int) -> Iterable[str]:
        try:
            names = os.listdir(self._place)
        except OSError:
            return
        for name in names:
            if _NAME.fullmatch(name):
                with contextlib.suppress(OSError):
                    found = (self._place / name).lstat()
                    is_young = min(found.st_ctime_ns, found.st_mtime_ns) >= since_ns - _COARSE_NS
                    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and is_young:
                        yield name


def _used(pid: int, place: Path, names: set[str]) -> set[str]:
    """Return which segments a process has mapped or open; none where it is gone, or cannot be looked into."""
    try:
        maps = (_PROC / str(pid) / "maps").read_bytes()
        files = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return set()
    paths = {os.fsdecode(line.split(maxsplit=5)[5]) for line in maps.splitlines() if line.count(b"/")}
    for file in files:
        with contextlib.suppress(OSError):
            paths.add(os.readlink(_PROC / str(pid) / "fd" / file))
    return {name for name in names if f"{place}/{name}" in paths}


def _maker(name: str) -> int | None:
    """Return the process in a segment's name, or None where its name has none."""
    found = _NAME.fullmatch(name)
    return next((int(pid) for pid in found.groupdict().values() if pid), None) if found else None
