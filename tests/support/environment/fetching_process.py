"""A process that ensures units from a store in a directory, logs what it asks for, and can be made to stop half-way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from serverless_gpu.environment.documents import ProgressPoint
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore


class Logged(DirectoryStore):
    """A store that logs the packs it is asked for, and stops for ever at one of them."""

    def __init__(self, directory: Path, log: Path, stop_at: str) -> None:
        super().__init__(directory)
        self._log = log
        self._stop_at = stop_at

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object, unless it is the one to stop at."""
        if key.startswith("packs/"):
            with open(self._log, "a") as log:
                log.write(f"{os.getpid()} {key}\n")
        if key == self._stop_at:
            os.read(os.pipe()[0], 1)  # nobody ever writes
        return super().get(key, start, length)


def start(
    store: Path, cache: Path, log: Path, addresses: list[str], *, stop_at: str = "", stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    """Start such a process; it prints how many units it fetched."""
    arguments = [str(store), str(cache), str(log), stop_at, *addresses]
    command = [sys.executable, "-m", "tests.support.environment.fetching_process", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def main(store: str, cache: str, log: str, stop_at: str, *addresses: str) -> None:
    """Ensure the units, once standard input ends; say what is waited for, and how many this process fetched."""

    def report(progress: ProgressPoint) -> None:
        if progress.waits_for and progress.waits_for not in said:
            said.append(progress.waits_for)
            print(f"waits for {progress.waits_for}", file=sys.stderr, flush=True)

    said: list[str] = []
    sys.stdin.read()
    ensured = UnitCache(Path(cache)).ensure(addresses, StoreBlobs(Logged(Path(store), Path(log), stop_at)), report)
    print(ensured.fetched)


if __name__ == "__main__":
    main(*sys.argv[1:])
