"""The bytes of a file that an attempt left behind, wherever they are: in its row, or as a blob."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from serverless_gpu.model.spec import BlobReference
from serverless_gpu.server.records.runs.files import StoredFile
from serverless_gpu.server.storage.blobs import Blobs


def source(blobs: Blobs, file: StoredFile) -> Callable[[int, int], Iterator[bytes]]:
    """Return a function that yields so many bytes of a file from one on; it blocks.

    Args:
        file: as it is stored.
    """
    inline = file.inline
    if inline is not None:
        return lambda start, length: iter([inline[start : start + length]])
    blob = BlobReference(size=file.size, parts=file.parts)
    return lambda start, length: blobs.read(blob, start, length)
