"""The files of an attempt that go into its MLflow run: small ones, of bounded number and size.

    with the run       spec.json, environment.json, _air.py
    when it has ended  failures/<rank>.txt, hang.txt, logs/<rank>.stdout.txt and .stderr.txt of ranks that failed
    in the end         receipt.json

Failure cases: a file that is not there or cannot be read is left out; what is too long is cut, logs and failures at
their beginning; invalid UTF-8 gets replacement characters. A result is never sent: it may be anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.tracking_rules import cut

FILE_BYTES_MAX = 1 << 20
LOG_BYTES_MAX = 64 << 10
RANKS_MAX = 8
"""Of so many ranks that failed, the first by number and the one that is the cause."""

_EARLY = ("spec.json", "environment.json", "_air.py")


class _Cause(msgspec.Struct):
    rank: int | None = None


class _Stopped(msgspec.Struct):
    cause: _Cause | None = None


class _Record(msgspec.Struct):
    type: str = ""
    message: str = ""
    traceback: str = ""


def early(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and files that are there from the beginning."""
    for name in _EARLY:
        if (directory / name).exists():
            yield name, directory / name


def failures(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and texts of the failed ranks' files."""
    for rank in _failed(directory):
        text = _failure_text(directory, rank)
        if text:
            yield f"failures/{rank}.txt", text.encode(errors="replace")
        for stream in ("stdout", "stderr"):
            tail = _tail(directory / "logs" / f"{rank}.{stream}", LOG_BYTES_MAX)
            if tail:
                yield f"logs/{rank}.{stream}.txt", tail
    for path in sorted(directory.glob("hang-*.txt"))[-1:]:  # the last one has most
        yield "failures/hang.txt", _head(path)


def read(path: Path) -> bytes:
    """Return a file, cut at `FILE_BYTES_MAX`; nothing where it cannot be read."""
    return _head(path)


def _failed(directory: Path) -> list[int]:
    """Return ranks that failed: the cause first, then by number, not all of a thousand."""
    ranks: set[int] = set()
    with contextlib.suppress(OSError):
        for path in (directory / "failures").iterdir():
            if path.stem.isdigit() and path.suffix in (".json", ".stack") and path.stat().st_size:
                ranks.add(int(path.stem))
    cause: int | None = None
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        stopped = from_json(_head(directory / "stopped.json"), _Stopped)
        cause = stopped.cause.rank if stopped.cause is not None else None
    first = [] if cause is None else [cause]
    return (first + sorted(ranks - set(first)))[:RANKS_MAX]


def _failure_text(directory: Path, rank: int) -> str:
    parts: list[str] = []
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        record = from_json(_head(directory / "failures" / f"{rank}.json"), _Record)
        parts.append(record.traceback.strip() or f"{record.type}: {record.message}")
    stack = _head(directory / "failures" / f"{rank}.stack").decode(errors="replace").strip()
    if stack:
        parts.append(stack)
    return cut("\n\n".join(parts), FILE_BYTES_MAX // 4, keep_end=True)


def _head(path: Path) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(FILE_BYTES_MAX)
    return b""


def _tail(path: Path, limit: int) -> bytes:
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - limit))
        data = file.read(limit)
        # Begin with a whole line where something is left out.
        return data if size <= limit else data.partition(b"\n")[2] or data
    return b""
