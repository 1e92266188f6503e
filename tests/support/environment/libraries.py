"""A library of a few files, captured, for tests of the watches on it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.scan import watcher
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.interpreter import describe
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.scan.watcher import LibraryWatcher, Unwatchable
from tests.support.environment.scans import wait_for_ticks, write

FILES = {"a/one.py": "one = 1\n", "a/deep/two.py": "two = 2\n", "a/data.bin": "0" * 5000, "b.py": "b = 1\n"}


def write_in_place(path: Path) -> None:
    with path.open("r+") as opened:
        opened.write("#")


class Library:
    """A library in a directory of its own, and what recognises it.

    Attributes:
        site: its directory, as `sys.path` says it.
        outside: a directory that is no part of it; a file of the library is a link to one in it.
    """

    def __init__(self, directory: Path, *, links: bool = True) -> None:
        self.real = write(directory / "real" / "lib" / "python3" / "site-packages", FILES)
        (directory / "venv").symlink_to("real")
        self.site = directory / "venv" / "lib" / "python3" / "site-packages"
        self.outside = write(directory / "outside", {"linked/three.py": "three = 3\n", "other/three.py": "three = 4\n"})
        (self.outside / "current").symlink_to("linked")
        if links:
            (self.real / "three.py").symlink_to(self.outside / "current" / "three.py")
        self.other_name = self.outside / "one.py"
        os.link(self.real / "a" / "one.py", self.other_name)
        wait_for_ticks()
        self._placed: list[LibraryWatcher] = []
        self.recogniser = Recogniser(directory / "index")
        self.recogniser.remember(self.recogniser.scan(self.description(), ignore_progress))

    def description(self) -> Description:
        described = msgspec.convert(describe(), Description)
        return msgspec.structs.replace(
            described,
            prefix=str(self.site.parents[2]),
            purelib=str(self.site),
            platlib=str(self.site),
            sys_path=(str(self.site),),
            site_directories=(str(self.site),),
            loaded=(),
        )

    def watch(self) -> LibraryWatcher:
        """Place watches; skip the test where this file system cannot be watched."""
        if watcher.file_system(str(self.real)) not in watcher.LOCAL_FILE_SYSTEMS:
            pytest.skip("temporary files lie on a file system that cannot be watched")
        placed, _ = self.recogniser.watch(self.description())
        self._placed.append(placed)
        return placed

    def close(self) -> None:
        """Remove the watches: a user has few queues."""
        for placed in self._placed:
            placed.close()

    def is_changed(self) -> bool:
        """Return whether a full look finds a change."""
        return self.recogniser.gate(self.description()) is None or bool(self.recogniser.check())

    def refusal(self) -> str:
        """Return why watches cannot be had."""
        with pytest.raises(Unwatchable) as caught:
            self.recogniser.watch(self.description())
        return str(caught.value)
