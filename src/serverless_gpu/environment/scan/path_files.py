"""Files that name directories of their machine: `.pth`, `.egg-link`, finders of editable installs.

Their text is kept with `{{sgpu:2}}` in place of the directory of root 2, and written again on restore. A line of a
`.pth` that adds a directory of no root is left out: it would add nothing there. Those that name nothing of this
machine stay ordinary files of their units.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from serverless_gpu.environment.documents import Generated
from serverless_gpu.environment.rules.limits import TEXT_BYTES_MAX
from serverless_gpu.environment.scan.directory_listing import show
from serverless_gpu.environment.scan.distributions import read_text
from serverless_gpu.environment.scan.roots import FINDER, Spot
from serverless_gpu.environment.scan.units import Draft
from serverless_gpu.errors import EnvironmentUnsupported

_ENDS = r"(?![^/\"'\s:;,)\]}\\])"  # a directory's name ends here


class Directories:
    """The directories of all roots, and what stands for them.

    Args:
        spots: of all roots, in order.
    """

    def __init__(self, spots: Sequence[Spot]) -> None:
        self._tokens: dict[str, str] = {}
        for number, spot in enumerate(spots):
            if not spot.archive:
                for directory in (spot.directory, spot.real):
                    self._tokens.setdefault(directory, f"{{{{sgpu:{number}}}}}")
        # The longest first: a root may lie in another.
        names = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile(r"(?<![\w.~/-])(" + "|".join(map(re.escape, names)) + ")" + _ENDS)

    def replace(self, text: str) -> str:
        """Return a text with directories of roots replaced."""
        return self._pattern.sub(lambda found: self._tokens[found[1]], text)

    def replace_lines(self, text: str) -> str:
        """Return a `.pth` file's text: likewise, without lines that name a directory of no root."""
        lines = []
        for line in text.splitlines(keepends=True):
            replaced = self.replace(line)
            if line.startswith("/") and replaced == line:
                continue
            lines.append(replaced)
        return "".join(lines)


def take_generated(drafts: Sequence[Draft], directories: Directories) -> tuple[Generated, ...]:
    """Take the files that name directories out of the units of a root, and return what is generated in their place.

    Raises:
        EnvironmentUnsupported: one is longer than such a file may be.
    """
    texts: dict[str, Generated] = {}
    for draft in drafts:
        for path in [path for path in draft.files if may_name_directories(path)]:
            text = read_text(draft.files[path].file)
            replaced = directories.replace_lines(text) if path.endswith(".pth") else directories.replace(text)
            if replaced == text:
                continue
            if len(replaced.encode()) > TEXT_BYTES_MAX or "\0" in replaced:
                raise EnvironmentUnsupported(
                    f"{show(draft.files[path].file)} names directories of this machine, and is no text of at most "
                    f"{TEXT_BYTES_MAX // 1024} KB",
                    hint="remove it, or install what it belongs to without -e",
                )
            del draft.files[path]
            texts[path] = Generated(path=path, text=replaced)
    return tuple(texts[path] for path in sorted(texts))


def archive_line(number: int, spot: Spot) -> Generated:
    """Return the `.pth` of root 0 that puts an archive on the path."""
    return Generated(path=f"site/_sgpu_archive_{number}.pth", text=f"{{{{sgpu:{number}}}}}/{spot.archive}\n")


def may_name_directories(path: str) -> bool:
    """Return whether a row is a file of a kind that may name directories of its machine."""
    area, _, name = path.partition("/")
    if area != "site" or "/" in name:
        return False
    return name.endswith((".pth", ".egg-link")) or FINDER.fullmatch(os.path.basename(name)) is not None
