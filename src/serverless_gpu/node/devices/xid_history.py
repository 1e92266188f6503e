"""Failures of users' code by GPU, for the whole machine: `<uuid>.xids` beside the GPU's lock.

The files only; `model/xid.py` says what follows.

Failure cases: as those of locks (`lock_files.py`); what is not written by us counts as nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from serverless_gpu.json_codec import from_json
from serverless_gpu.model.xid import Hit
from serverless_gpu.node.base.lock_files import OPEN, opened, opened_directory, read_note

_HITS_MAX = 16
_PRINCIPAL_MAX = 100  # so many of so long names fit into what is read of a note


def note_hit(directory: Path, uuid: str, hit: Hit) -> None:
    """Note that a principal's own code failed on a GPU, keeping each one's last; raises StorageError."""
    own = msgspec.structs.replace(hit, principal=_plain(hit.principal))
    with opened_directory(directory) as opened_at, opened(opened_at, f"{uuid}.xids") as fd:
        others = [other for other in _read(fd) if other.principal != own.principal]
        text = msgspec.json.encode((*others[1 - _HITS_MAX :], own))
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))


def read_hits(directory: Path, uuids: Iterable[str]) -> dict[str, tuple[Hit, ...]]:
    """Return whose own code failed on GPUs lately, by uuid; raises StorageError."""
    found: dict[str, tuple[Hit, ...]] = {}
    with opened_directory(directory) as opened_at:
        for uuid in uuids:
            with contextlib.suppress(OSError):
                fd = os.open(f"{uuid}.xids", os.O_RDONLY | OPEN, dir_fd=opened_at)
                try:
                    found[uuid] = _read(fd)
                finally:
                    os.close(fd)
    return found


def _read(fd: int) -> tuple[Hit, ...]:
    try:
        hits = from_json(read_note(fd), tuple[Hit, ...])
    except msgspec.MsgspecError:
        return ()
    return tuple(msgspec.structs.replace(hit, principal=_plain(hit.principal)) for hit in hits)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_PRINCIPAL_MAX]
