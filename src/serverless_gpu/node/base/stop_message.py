"""The message with which a run ends; `stopped.json` in a run directory holds it, too.

It is apart from the other messages (`protocol.py`) because readers of run directories need only this one.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.model.lifecycle.attempt import Failure, Hang, Reason, State


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stopped"):
    """No rank runs any more; results and failures are in the run directory. The GPU gate comes next."""

    state: State
    reason: Reason
    cause: Failure | None
    consequences: tuple[Failure, ...]
    log_tail: str = ""  # of the rank that is the cause
    tails: dict[int, str] = {}  # last lines of ranks that were not shown live, the cause first
    hang: Hang | None = None  # the ranks that waited, and for which
    proven: bool = True  # whether the kernel says that no process of it is left; else one could not be ended
    hint: str = ""  # probable cause of a failure of user code
