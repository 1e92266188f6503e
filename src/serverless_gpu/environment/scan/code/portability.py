"""Code that cannot travel: two names that are one on some machines, names that are too long, and control characters.

A restore refuses such trees, wherever they come from. In a library they are refused at the capture, too: nobody
installed them. A project may hold a data set with `a.png` and `A.png`, and its code must run nevertheless: of two names
that differ only in case or Unicode form the one that was imported travels, else the first in order, and the other is
left out and said.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from serverless_gpu.environment.rules.limits import DEPTH_MAX, PATH_BYTES_MAX
from serverless_gpu.environment.rules.rows import fold_name
from serverless_gpu.environment.scan.directory_listing import Listing, is_plain, show

_AREA = "site/"


def leave_out_misfits(listing: Listing, imported: Collection[str]) -> None:
    """Take out of a listing of code what no restore would accept, and say why under `odd`.

    Args:
        listing: is altered.
        imported: files that go before others.
    """
    misfits = _Misfits()
    for path in sorted(listing.files, key=lambda path: (path not in imported, path)):
        found = misfits.find(path)
        if found is not None:
            odd, reason = found
            del listing.files[path]
            listing.odd[odd] = reason


class _Misfits:
    """Names that were taken so far, as machines see them that do not tell case."""

    def __init__(self) -> None:
        self._folded: dict[str, str] = {"": ""}  # directory → its form that must be unique
        self._taken: dict[str, str] = {}  # and back, for files, too
        self._odd: dict[str, tuple[str, str]] = {}  # directory → the one that is odd, and why

    def find(self, path: str) -> tuple[str, str] | None:
        """Return which part of a path is odd, and why; None where nothing is."""
        if not is_plain(path):
            return path, "its name has control characters, or bytes that are not UTF-8"
        if path.count("/") + 2 > DEPTH_MAX or len(os.fsencode(_AREA + path)) > PATH_BYTES_MAX:
            return path, f"its path is too long: at most {PATH_BYTES_MAX} bytes and {DEPTH_MAX} names travel"
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
        return path, f"where case or Unicode forms do not count it is the same name as {show(os.path.basename(other))}"
