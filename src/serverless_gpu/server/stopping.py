"""A run is asked to stop: written with who asked, and sent to its node.

A stop and an end may cross. What was written first counts: a run whose results were durable before the stop arrived has
succeeded, and whoever asked is told that it has ended. Asking again for the same is answered with what came of it.
"""

from __future__ import annotations

import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.errors import AlreadyFinished, InvalidValue, NotAllowed
from serverless_gpu.model.access import roles
from serverless_gpu.model.lifecycle.attempt import TERMINAL, StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.server import audit, runs, transitions, views
from serverless_gpu.server.audit import Action
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.services import Services
from serverless_gpu.server.transitions import Note, Told
from serverless_gpu.wire.runs import RunView

ASKED_BY_PEOPLE = (StopReason.CANCEL, StopReason.PREEMPT, StopReason.DRAIN)
"""The others follow from limits, and nobody can claim them."""


def stop(services: Services, who: Caller, reach: str, *, run_id: str, why: StopReason) -> RunView:
    """Ask a run to stop.

    Args:
        services: the server's.
        who: asks.
        reach: how far they may change runs.
        run_id: the run.
        why: what its ranks are told.

    Raises:
        NotFound: there is no such run, or they may not see it.
        NotAllowed: they may see it, and not stop it.
        AlreadyFinished: it has ended, and not because of such a request.
    """
    if why not in ASKED_BY_PEOPLE:
        raise InvalidValue(f"nobody can ask for {why.value!r}", hint=f"possible: {', '.join(ASKED_BY_PEOPLE)}")
    at_ns = services.clock.wall_ns()

    def work(connection: sa.Connection) -> Told | None:
        _check_reach(connection, who, reach, run_id)
        return ask(connection, run_id, who=who, why=why, at_ns=at_ns)

    told = services.database.write(work)
    faults.reach("after_stop_before_answer")
    if told is not None:
        told.announce(services)
    run = services.database.read(lambda connection: views.visible(connection, run_id, who=who, reach=reach))
    return views.run_view(run, told=services.sentences.told(run_id), reader=who.name)


def ask(
    connection: sa.Connection, run_id: str, *, who: Caller, why: StopReason, at_ns: int, because: str = ""
) -> Told | None:
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


def _check_reach(connection: sa.Connection, who: Caller, reach: str, run_id: str) -> None:
    to_see = roles.reach(who.role, "runs", write=False, scopes=who.scopes)
    run = runs.find(connection, run_id)
    if run is not None and views.in_reach(run, who=who, reach=reach):
        return
    views.visible(connection, run_id, who=who, reach=to_see)
    raise NotAllowed(f"{who.name} may see run {run_id}, and not stop it", hint="its owner can, or an operator")
