"""Output files at user-given paths: a report, a picture, a result, a copy of the audit.

A path that is no regular file (a device, a pipe, a directory) is left alone. A link stays, and its target is written.
The old file stays if the new one cannot be completed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from serverless_gpu.errors import InvalidValue


def refuse_irregular(path: Path) -> None:
    """Raise InvalidValue if a path exists and is no regular file."""
    if os.path.exists(path) and not os.path.isfile(path):
        hint = "give the path of a file, or one at which there is nothing yet"
        raise InvalidValue(f"{path} is there and is no file: it is left as it is", hint=hint)


@contextlib.contextmanager
def replacing_file(path: Path, *, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new, empty file that replaces `path` after a complete write; `mode` is subject to the umask."""
    refuse_irregular(path)
    place = path.resolve()
    beside = place.with_name(f".part-{secrets.token_hex(8)}")
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
    try:
        yield beside
        beside.replace(place)
    finally:
        beside.unlink(missing_ok=True)
