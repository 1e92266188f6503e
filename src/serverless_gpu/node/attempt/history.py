"""Reads run directories: existing runs, running runs, and the final states of ended runs.

    runs/<run>/<fence>/   spec.json · supervisor.lock (flock held = alive) · stopped.json · receipt.json   →   Record

This module only reads run directories. `retention.py` deletes run directories. Functions of this module never raise an
exception for a damaged directory. A run is NOT_STARTED while its client still writes the directory. A directory of
another program or version is UNREADABLE, and `problem` contains the reason. A run whose supervisor was killed is LOST.
The functions tolerate huge files, unreadable files, links, and files that vanish. If a lock cannot be tested, the
module treats the lock as held, because retention deletes runs without a held lock.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterator
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import created_wall_ns
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.metering import Meter
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind, State, Stopped
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.lock_files import is_held

NOT_STARTED = "NOT_STARTED"
UNREADABLE = "UNREADABLE"
FUNCTION = "function"
REMOTE_FILE = "remote.json"
"""File name of a server's record in an attempt directory (`server_attempt_record.py`)."""

_FILE_BYTES_MAX = 8 << 20
_FACTS_BYTES = 64 << 10  # Number of bytes of a facts file to read.
ENTRIES_MAX = 100_000

T = TypeVar("T")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one run, read from the run's directory."""

    run_id: str
    directory: Path  # Directory of the run's last attempt, or of the run before its first attempt.
    state: str  # A `State`, `NOT_STARTED` or `UNREADABLE`.
    live: bool
    created_ns: int  # Creation time in nanoseconds since 1970, like all times in this module.
    kind: str = FUNCTION  # ``"function"`` or ``"session"``.
    session: str = ""  # Name of the session whose devices the run uses, or "".
    world_size: int = 0
    version: str = ""
    began_ns: int | None = None  # Wall-clock time at which user code began; None if unknown.
    ended_ns: int | None = None  # Wall-clock time at which the run ended; None while the run continues.
    spec: RunSpec | None = None
    stopped: Stopped | None = None
    receipt: Receipt | None = None
    problem: str = ""


class SpecFile(msgspec.Struct):
    """Fields of `spec.json` that every version of this package can read."""

    world_size: int = 0
    version: str = ""
    kind: str = FUNCTION
    session: str = ""
    spec: msgspec.Raw = msgspec.Raw(b"")
    gpu_type: str = ""
    tariff: Tariff | None = None


def run_ids(runs: Path) -> list[str]:
    """Return the names of all run directories: newest first, foreign names last, no hidden names."""
    try:
        with os.scandir(runs) as entries:
            names = [entry.name for entry in entries if not entry.name.startswith(".") and not _is_file(entry)]
    except OSError:
        return []
    return sorted(names, key=lambda name: (created_wall_ns(name) is not None, name), reverse=True)


def read_run(runs: Path, run_id: str, queued: Collection[str] = ()) -> RunRecord:
    """Return the record of one run.

    `queued` contains the ids of the runs in the agent's queue, because the agent writes its queue to no file.
    """
    fences = [child for child in _children(runs / run_id) if child.name.isascii() and child.name.isdigit()]
    directory = max(fences, key=lambda child: int(child.name), default=None)
    created_ns = created_wall_ns(run_id) or touched_ns(runs / run_id)
    if directory is None:
        bare = RunRecord(run_id=run_id, directory=runs / run_id, state=UNREADABLE, live=False, created_ns=created_ns)
        return msgspec.structs.replace(
            bare, ended_ns=touched_ns(runs / run_id), problem="the directory contains no attempt"
        )
    written, spec, problem = _read_spec(directory)
    live = is_live(directory)
    stopped, receipt = read_ending(directory), read_receipt(directory)
    facts = first_facts(directory)
    begun = next((fact.wall_ns for fact in facts if fact.kind is FactKind.EXEC), None)
    state = _state(directory, stopped, facts, live=live, queued=run_id in queued)
    ended = stopped is not None or (not live and run_id not in queued)
    return RunRecord(
        run_id=run_id,
        directory=directory,
        state=UNREADABLE if problem and stopped is None and not live else state,
        live=live,
        created_ns=created_ns,
        kind=written.kind,
        session=written.session,
        world_size=written.world_size,
        version=written.version,
        began_ns=begun,
        ended_ns=_ended_ns(directory) if ended else None,
        spec=spec,
        stopped=stopped,
        receipt=receipt,
        problem=problem,
    )


def read_ending(directory: Path) -> Stopped | None:
    """Return the final state of an attempt from its directory, or None."""
    return _decoded(directory / "stopped.json", Stopped)


def read_receipt(directory: Path) -> Receipt | None:
    """Return the receipt of an attempt from its directory, or None."""
    return _decoded(directory / "receipt.json", Receipt)


def first_facts(directory: Path) -> list[Fact]:
    """Return the first facts of an attempt, without an incomplete last line."""
    facts: list[Fact] = []
    # The last line of a facts file may be incomplete.
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        for line in _read(directory / "facts.jsonl", _FACTS_BYTES).splitlines():
            facts.append(from_json(line, Fact))
    return facts


def last_fact(directory: Path) -> Fact | None:
    """Return the last complete fact of an attempt."""
    with contextlib.suppress(OSError), _opened(directory / "facts.jsonl") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _FACTS_BYTES))
        for line in reversed(file.read(_FACTS_BYTES).splitlines(keepends=True)):
            with contextlib.suppress(msgspec.MsgspecError):
                return from_json(line, Fact)
    return None


def read_launch(directory: Path) -> SpecFile:
    """Return the contents of an attempt's `spec.json`, or default values if the file cannot be read."""
    return _decoded(directory / "spec.json", SpecFile) or SpecFile()


def read_price(directory: Path) -> tuple[str, Tariff | None]:
    """Return the device type and tariff of an attempt, or "" and None if `spec.json` cannot be read."""
    written = _decoded(directory / "spec.json", SpecFile)
    return ("", None) if written is None else (written.gpu_type, written.tariff)


def meter_of(directory: Path) -> tuple[Meter, int]:
    """Return a meter of an attempt's complete facts, and their number."""
    meter, count = Meter(), 0
    with contextlib.suppress(OSError, msgspec.MsgspecError), _opened(directory / "facts.jsonl") as file:
        for line in file:
            meter.add(from_json(line, Fact))
            count += 1
    return meter, count


def spec_of(directory: Path) -> RunSpec | None:
    """Return the run's specification from an attempt's directory, or None."""
    return _read_spec(directory)[1]


def is_live(directory: Path) -> bool:
    """Return True if a process holds a lock of this attempt."""
    return any(is_held(path) for path in _locks(directory))


def touched_ns(directory: Path) -> int:
    """Return the latest modification time of a directory and its entries, in nanoseconds since 1970."""
    newest = 0
    for path in (directory, *_children(directory)):
        with contextlib.suppress(OSError):
            newest = max(newest, path.lstat().st_mtime_ns)
    return newest


def size_on_disk(directory: Path) -> int:
    """Return the number of bytes that deleting a directory frees, from at most 100,000 entries."""
    if directory.is_symlink():
        return 0
    return sum(status.st_blocks * 512 for _, status in walk(directory))


def walk(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield at most 100,000 entries of a tree with each entry's status, without following links."""
    waiting, count = [directory], 0
    while waiting and count < ENTRIES_MAX:
        for path in _children(waiting.pop(), sort=True):
            try:
                status = path.lstat()
            except OSError:  # Another process deleted the entry during the walk.
                continue
            count += 1
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                waiting.append(path)


def _children(directory: Path, *, sort: bool = False) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            children = [Path(entry.path) for entry in entries]
    except OSError:
        return []
    return sorted(children) if sort else children


def _locks(directory: Path) -> list[Path]:
    return [path for path in _children(directory) if path.suffix == ".lock"]


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def _read_spec(directory: Path) -> tuple[SpecFile, RunSpec | None, str]:
    try:
        written = from_json(_read(directory / "spec.json"), SpecFile)
    except (OSError, msgspec.MsgspecError) as error:
        return SpecFile(), None, f"spec.json cannot be read: {getattr(error, 'strerror', None) or error}"
    try:
        return written, from_json(bytes(written.spec), RunSpec), ""
    except msgspec.MsgspecError:  # `spec.json` describes a session, or a run of another version.
        return written, None, ""


def _state(directory: Path, stopped: Stopped | None, facts: list[Fact], *, live: bool, queued: bool) -> str:
    kinds = {fact.kind for fact in facts}
    if stopped is not None:
        return stopped.state.value
    if live and kinds & {FactKind.EXEC, FactKind.HELD}:
        return State.RUNNING.value
    if live and FactKind.RESERVED in kinds:
        return State.STARTING.value
    if live or queued:
        return State.QUEUED.value
    return State.LOST.value if _locks(directory) else NOT_STARTED


def _ended_ns(directory: Path) -> int:
    for name in ("receipt.json", "stopped.json"):
        with contextlib.suppress(OSError):
            return (directory / name).lstat().st_mtime_ns
    return touched_ns(directory)


def _decoded(path: Path, kind: type[T]) -> T | None:
    try:
        return from_json(_read(path), kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _read(path: Path, limit: int = _FILE_BYTES_MAX) -> bytes:
    """Return the first bytes of a regular file. Raises OSError for pipes and other irregular files."""
    with _opened(path) as file:
        return file.read(limit)


def _opened(path: Path) -> BufferedReader:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file
