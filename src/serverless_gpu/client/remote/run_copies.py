"""Copies of a run's files on the caller's disk, laid out as in a run directory: outcomes are read from both alike.

    $SERVERLESS_GPU_HOME/remote/<run>/<fence>/    spec.json · stopped.json · receipt.json · results/ · failures/

Small files come with the run's end, large ones in pieces at their first use; each is written atomically. Names outside
a run's files are never written.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.remote.server import RemoteServer
from serverless_gpu.errors import HardwareError, ServerlessGpuError, ServerProblem
from serverless_gpu.node.attempt.retention import clean
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home, storage_error
from serverless_gpu.operating_system import start_thread
from serverless_gpu.wire.runs import FileView

_NAME = re.compile(
    r"results/\d{1,9}\.pkl|failures/\d{1,9}\.(?:json|pkl|stack)|hang-(?:\d{1,9}-)?\d{1,9}\.txt", re.ASCII
)
_PIECE_BYTES = 16 << 20
_CLEANED = ".cleaned"
_CLEANED_EVERY_S = 86_400.0


class RunCopies:
    """The files of one attempt on a server, copied into a directory."""

    def __init__(
        self, server: RemoteServer, run_id: str, fence: int, directory: Path, files: Iterable[FileView]
    ) -> None:
        self._server = server
        self._run_id = run_id
        self._fence = fence
        self._directory = directory
        self._files = {file.name: file for file in files if _NAME.fullmatch(file.name)}

    def names(self) -> list[str]:
        """Return the names of all files that a run can have."""
        return list(self._files)

    def bring(self, name: str) -> None:
        """Fetch a file into the directory; skip one that the run does not have."""
        file = self._files.get(name)
        path = self._directory / name
        if file is None or _is_there(path, file.size):
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _whole(path) as descriptor:
                if file.inline is not None:
                    _write(descriptor, file.inline)
                else:
                    self._fetch(file, descriptor)
        except OSError as error:
            raise storage_error(error, path) from None

    def _fetch(self, file: FileView, descriptor: int) -> None:
        done = 0
        while done < file.size:
            wanted = min(_PIECE_BYTES, file.size - done)
            data = self._server.read_file(self._run_id, self._fence, file.name, done, wanted)
            if not data or len(data) > wanted:
                raise ServerProblem(
                    f"{file.name} of run {self._run_id} has {file.size} bytes; the server gave {len(data)} at {done}",
                    hint="ask again; if it comes back, the server's log says more",
                )
            _write(descriptor, data)
            done += len(data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically; raise StorageError when the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _whole(path) as descriptor:
            _write(descriptor, data)
    except OSError as error:
        raise storage_error(error, path) from None


def clean_now_and_then(home: Home) -> None:
    """Delete old copies by the `[retention]` rules, once a day at most and in the background."""
    marker = home.remote / _CLEANED
    with contextlib.suppress(OSError):
        if SystemClock().wall_ns() - marker.stat().st_mtime_ns < _CLEANED_EVERY_S * 1e9:
            return

    def work() -> None:
        with contextlib.suppress(OSError, ServerlessGpuError):
            marker.touch()
            clean(home.remote, read_configuration(home).retention, (), SystemClock())

    with contextlib.suppress(HardwareError):  # no thread: another day
        start_thread(work, "serverless-gpu-clean")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[int]:
    descriptor, temporary = tempfile.mkstemp(prefix=".part-", dir=path.parent)
    try:
        yield descriptor
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
