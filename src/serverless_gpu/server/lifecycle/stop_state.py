"""The request that a run stops, as a transition: written, audited, and sent to its node by the announcement."""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu.errors import AlreadyFinished
from serverless_gpu.model.lifecycle.attempt import TERMINAL, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.runs import runs


def ask(
    connection: sa.Connection, run_id: str, *, who: Caller, why: StopReason, at_ns: int, because: str = ""
) -> TransitionResult | None:
    """Write that a run is to stop; None when it has stopped for that already.

    Args:
        run_id: a run that is there.
        who: asks; `audit.SERVER` when nobody does.
        why: any reason.
        at_ns: now, nanoseconds since 1970.
        because: what people are told beyond that, and the audit.

    Raises:
        AlreadyFinished: it has ended for something else.
    """
    run = runs.find(connection, run_id)
    if run is None or run.state in TERMINAL:
        if run is not None and run.stop is why:
            return None
        state = "gone" if run is None else run.state
        raise AlreadyFinished(f"run {run_id} has ended: it is {state}", hint="there is nothing to stop any more")
    told = transitions.tell(connection, run, StopAsked(why), note=Note(at_ns=at_ns, detail=because))
    if told.changed:
        detail = {"reason": why.value, "fence": run.fence} | ({"because": because} if because else {})
        audit.record(connection, who=who, action=Action.RUN_STOP, subject=run_id, now_ns=at_ns, detail=detail)
    return told
