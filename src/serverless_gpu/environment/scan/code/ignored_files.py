"""What of a directory of code stays behind because git ignores it: counted during the walk, told in one sentence.

Ignored directories are not looked into, so their size is unknown; they are named first, as they hold the most. Caches
of tools, which are hidden, come after what a person made.
"""

from __future__ import annotations

import contextlib
import os

from serverless_gpu.environment.scan.directory_listing import show

MARK = " that git ignores ("
UNASKED = "; which of them it tracks is not known: "
_NAMED_MAX = 5
_NAME_CHARACTERS_MAX = 60
_CANDIDATES_MAX = 1000


class Staying:
    """What git ignores below a directory, as far as the walk met it."""

    def __init__(self) -> None:
        self._files = 0
        self._directories = 0
        self._candidates: list[str] = []

    def add(self, path: str) -> None:
        """Count an ignored entry; a directory's path ends in ``/``."""
        if path.endswith("/"):
            self._directories += 1
        else:
            self._files += 1
        if len(self._candidates) < _CANDIDATES_MAX:
            self._candidates.append(path)

    def sentence(self, top: str, problem: str = "") -> str:
        """Return what is to be said, or "" when nothing was ignored.

        Args:
            top: the directory that was walked.
            problem: why it is not known which files git tracks.
        """
        if not self._candidates:
            return ""
        counts = [(self._files, "file", "files"), (self._directories, "directory", "directories")]
        said = " and ".join(f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count)
        largest = sorted(self._candidates, key=lambda path: _weight(top, path))[:_NAMED_MAX]
        named = ", ".join(show(_cut(path)) for path in largest)
        more = ", …" if self._files + self._directories > len(largest) else ""
        unasked = f"{UNASKED}{problem}" if problem else ""
        return f"{said}{MARK}{named}{more}){unasked}"


def same_matter(sentence: str) -> str:
    """Return what of a sentence under "left out" is the same as long as it need not be said again: not the counts."""
    head, mark, rest = sentence.partition(MARK)
    return f"{head.partition(': ')[0]}{mark}{rest.partition(UNASKED)[2]}" if mark else sentence


def _weight(top: str, path: str) -> tuple[int, bool, bool, int, str]:
    is_directory = path.endswith("/")
    name = path.rstrip("/").rpartition("/")[2]
    size = 0
    if not is_directory:
        with contextlib.suppress(OSError):  # gone meanwhile
            size = os.lstat(f"{top}/{path}").st_size
    return path.rstrip("/").count("/"), is_directory and name.startswith("."), not is_directory, -size, path


def _cut(path: str) -> str:
    return path if len(path) <= _NAME_CHARACTERS_MAX else f"…{path[-_NAME_CHARACTERS_MAX:]}"
