"""The owner of a process that connects to the agent: of the attempt it is in, if it is in one.

    rank of a principal's run ──connect──▶ agent: pid ▸ parent ▸ … ▸ a stem the agent has made: its owner

A rank can call the local agent as any process of its uid can, and what it says of itself proves nothing. Its place in
the tree of processes does: every descendant of a stem stays below it, also after a double fork, since the stem is their
sub-reaper.

Failure cases, each answered with `UNKNOWN_OWNER`, who shares none: the process is gone before the agent looks;
it is below a stem that an earlier agent made.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.node.base.protocol import UNKNOWN_OWNER
from serverless_gpu.node.processes.process_tree import Left, look_at

_STEM = "sgpu-stem"
_STEMS_MAX = 4_096
_DEPTH_MAX = 4_096


class _Stem(NamedTuple):
    process: Left
    owner: str


class StemOwners:
    """The stems that this agent has given to runs, and whose runs those are."""

    def __init__(self) -> None:
        self._stems: dict[int, _Stem] = {}

    def note(self, pid: int, owner: str) -> None:
        """Note whose run has a stem."""
        seen = look_at(pid)
        if seen is not None:
            self._stems[pid] = _Stem(seen, owner)
        while len(self._stems) > _STEMS_MAX:
            self._stems.pop(next(iter(self._stems)))

    def owner_of(self, sock: socket.socket) -> str:
        """Return the owner of the attempt that a Unix socket's peer is in; "" for the user of this node."""
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", credentials)[0]
        if pid == 0:
            return ""  # of another pid namespace, and so no descendant of anything here
        above = _ancestors(pid)
        if above is None:
            return UNKNOWN_OWNER
        mine = set(_ancestors(os.getpid()) or ())
        for each in above:
            if each in mine:
                return ""
            stem = self._stems.get(each)
            if stem is not None and stem.process.is_there():
                return stem.owner
            seen = look_at(each)
            if seen is not None and seen.name == _STEM:
                return UNKNOWN_OWNER
        return ""


def combined(said: str, inside: str) -> str:
    """Return the owner of a run from its launch and from the attempt `inside` which it was launched."""
    if UNKNOWN_OWNER in (said, inside):
        return UNKNOWN_OWNER
    return f"{said}, inside a run of {inside}" if said and inside else said or inside


def _ancestors(pid: int) -> list[int] | None:
    """Return a process and its ancestors, nearest first; None where it is gone."""
    found: list[int] = []
    while pid > 0 and len(found) < _DEPTH_MAX:
        try:
            line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        found.append(pid)
        pid = int(line.rpartition(")")[2].split()[1])
    return found
