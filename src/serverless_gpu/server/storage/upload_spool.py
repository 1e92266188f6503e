"""Large bodies on their way in: taken in pieces, held on the disk, seen as memory once they are whole.

    request ── pieces ─▶ up to 1 MiB in memory ─▶ a file without a name ── whole ─▶ memoryview ─▶ check, store

A slow sender costs no memory, a killed server leaves nothing behind (the file never had a name), and no reader sees a
body that is not whole. Disks and stores are only ever waited for in threads, and those are not the ones that answer
everything else: a bucket that takes half a minute for each request must not keep a heartbeat waiting.

Failure cases: no room (ServerStorageFull: before the first byte where the size is known, else at the piece that does
not fit); the sender goes away, or sends more than the route takes (what the body raises; the file is gone with it).
"""

from __future__ import annotations

import contextlib
import mmap
import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

from anyio import CapacityLimiter, to_thread

from serverless_gpu.server.core.disk_space import (
    FULL,
    KEPT_FREE_BYTES,
    check_room,
    free_bytes,
    full_reason,
    storage_full,
)

PIECE_BYTES = 1 << 20
THREADS_MAX = 32

T = TypeVar("T")


class UploadSpool:
    """Where bodies are held until they are whole, and the threads for what is done with them."""

    def __init__(self, directory: Path, *, kept_free_bytes: int = KEPT_FREE_BYTES) -> None:
        self._directory = directory
        self._threads = CapacityLimiter(THREADS_MAX)
        self._kept_free_bytes = kept_free_bytes

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Return what work on disks or stores returns, from a thread that is there for that."""
        return await to_thread.run_sync(work, limiter=self._threads)

    @contextlib.asynccontextmanager
    async def whole(self, body: AsyncIterable[bytes], size: int | None = None) -> AsyncIterator[memoryview]:
        """Yield a body once all of it is there; it is gone afterwards."""
        if size is not None and size > PIECE_BYTES:
            await self.in_thread(lambda: self._check_room(size))
        pieces: list[bytes] = []
        held, file = 0, None
        try:
            async for piece in body:
                pieces.append(piece)
                held += len(piece)
                if held >= PIECE_BYTES:
                    file = await self._written(file, pieces)
                    pieces, held = [], 0
            if file is None:
                yield memoryview(b"".join(pieces))
                return
            await self._written(file, pieces)
            with _mapped(file) as view:
                yield view
        finally:
            if file is not None:
                file.close()

    def _check_room(self, size: int) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_room(size, free_bytes(self._directory), kept_free_bytes=self._kept_free_bytes)

    async def _written(self, file: IO[bytes] | None, pieces: list[bytes]) -> IO[bytes]:
        return await self.in_thread(lambda: self._write(file, pieces))

    def _write(self, file: IO[bytes] | None, pieces: list[bytes]) -> IO[bytes]:
        self._check_room(sum(map(len, pieces)))
        try:
            if file is None:
                file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - `whole` closes it
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            if error.errno in FULL:
                raise storage_full(full_reason(self._directory, error)) from error
            raise
        return file


@contextlib.contextmanager
def _mapped(file: IO[bytes]) -> Iterator[memoryview]:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    view = memoryview(mapped)
    try:
        yield view
    finally:
        # Now, not whenever a traceback is forgotten: the disk has room for it only when it is gone.
        with contextlib.suppress(BufferError):  # the store still holds a part of it for a moment
            view.release()
            mapped.close()
