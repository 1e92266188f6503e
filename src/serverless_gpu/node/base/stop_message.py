"""The message with which a run ends; `stopped.json` in a run directory holds it, too.

It is apart from the other messages (`protocol.py`) because readers of run directories need only this one.
"""

from __future__ import annotations

import msgspec

from serverless_gpu.model.lifecycle.attempt import Failure, Hang, Reason, State


class Stopped(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stopped"):
    """No rank runs any more; results and failures are in the run directory. The GPU gate comes next.

    Attributes:
        log_tail: last lines of the rank that is the cause.
        tails: if the run failed, last lines of ranks that were not shown live, the cause first.
        hang: who waited for whom, of a run that was ended because it stood still.
        proven: whether the kernel says that no process of it is left; else one could not be ended.
        hint: what a failure of user code is most likely about.
    """

    state: State
    reason: Reason
    cause: Failure | None
    consequences: tuple[Failure, ...]
    log_tail: str = ""
    tails: dict[int, str] = {}
    hang: Hang | None = None
    proven: bool = True
    hint: str = ""
