"""What an agent says of the things it looks after, one row each."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["function", "session"]
"""What an attempt's directory is of."""
Mode = Literal["", "overlay", "links"]
"""How an environment is restored; "" leaves that to the node."""


class ZygoteStatus(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter that is kept warm, or that cannot be.

    Attributes:
        python: path of the interpreter.
        state: ``"cold"`` where there is no zygote and the next run gets none.
        pid: of the zygote; None where there is none.
        reason: why there is none.
        environment: address of the snapshot it was restored from; "" for one that imports the caller's files.
        owner: whose runs it serves; "" for the user of this node.
    """

    python: str
    state: Literal["starting", "ready", "cold"]
    pid: int | None = None
    reason: str = ""
    environment: str = ""
    owner: str = ""


class EnvironmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that this node has restored, or is restoring.

    Attributes:
        snapshot: its address.
        state: what becomes of it.
        mode: how it was restored; "" while that is not known.
        sentence: how far it is.
    """

    snapshot: str
    state: Literal["restoring", "ready"]
    mode: Mode = ""
    sentence: str = ""


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run or a session that goes on.

    Attributes:
        pid: of its supervisor; 0 while that has not said it.
        adopted: whether an earlier agent started it.
        environment: address of the snapshot its ranks import from, or "".
    """

    run_id: str
    pid: int
    kind: Kind
    adopted: bool = False
    environment: str = ""
