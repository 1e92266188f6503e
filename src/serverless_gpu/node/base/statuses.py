"""Status rows of an agent: zygotes, environments, attempts."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["function", "session"]
"""Kind of an attempt's directory."""
Mode = Literal["", "overlay", "links"]
"""Way to restore an environment; "" leaves that to the node."""


class ZygoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter that is kept warm, or that cannot be."""

    python: str
    state: Literal["starting", "ready", "cold"]  # ``"cold"``: without a zygote, and the next run gets none
    pid: int | None = None  # of the zygote, if any
    reason: str = ""
    environment: str = ""  # snapshot address; "" for the caller's files
    owner: str = ""  # "" for the user of this node


class EnvironmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that this node has restored, or is restoring."""

    snapshot: str
    state: Literal["restoring", "ready"]
    mode: Mode = ""  # how it was restored; "" while unknown
    sentence: str = ""  # its progress


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running run or session."""

    run_id: str
    pid: int  # of its supervisor; 0 while unknown
    kind: Kind
    adopted: bool = False  # started by an earlier agent
    environment: str = ""  # snapshot address of its ranks, or ""
