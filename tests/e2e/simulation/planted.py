"""Bugs that are put into the server or the node on purpose. The simulation is worth what it finds of them.

Each is a thing that somebody could do by mistake and that all is well without, until something breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec
import sqlalchemy as sa

from serverless_gpu.errors import ServerStorageFull
from serverless_gpu.model.billing.ledger import LedgerEntry, LedgerLine, post
from serverless_gpu.model.lifecycle.attempt import ACTIVE, Reason
from serverless_gpu.model.lifecycle.run_lifecycle import GivenUp
from serverless_gpu.server.billing import charging
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.lifecycle import liveness, reports, requeue
from serverless_gpu.server.nodes import agent_service
from serverless_gpu.server.policies import PolicyInputs
from serverless_gpu.server.records import attempts, audit, crews, events, facts, files, orders, policies, runs
from serverless_gpu.server.records.active_runs import ActiveCrew, ActiveRun
from serverless_gpu.server.records.runs import NewRun, StoredRun
from serverless_gpu.server.runs import retention, run_views
from serverless_gpu.server.runs.submission import SubmissionService
from serverless_gpu.server.scheduling import reconciler
from serverless_gpu.server.storage import logs
from serverless_gpu.wire.runs import RunRequest, RunView
from tests.e2e.simulation import crew, node
from tests.e2e.simulation.timeline import S

Planted = Callable[[], AbstractContextManager[Any]]


def _late_reports_count() -> AbstractContextManager[Any]:
    """A report is taken for the run that it names, whichever attempt it is of."""
    return _both(
        mock.patch.object(crews.StoredCrew, "given_up", property(lambda self: False)),
        mock.patch.object(reports._Found, "is_current", property(lambda self: self.run.state in ACTIVE)),
    )


def _repeated_submit_is_another_run() -> AbstractContextManager[Any]:
    """A request that comes again makes a run again."""
    create = SubmissionService._create

    def again(
        service: SubmissionService,
        connection: sa.Connection,
        new: NewRun,
        who: Caller,
        at_ns: int,
        brought: PolicyInputs,
    ) -> tuple[StoredRun, bool]:
        if runs.exists(connection, new.id):
            copy = msgspec.structs.replace(new, id=new.id[:-4] + "zzzz")
            if not runs.exists(connection, copy.id):
                create(service, connection, copy, who, at_ns, brought)
        return create(service, connection, new, who, at_ns, brought)

    return mock.patch.object(SubmissionService, "_create", again)


def _acknowledged_before_it_is_durable() -> AbstractContextManager[Any]:
    """A full disk is no reason to refuse a run."""
    submit = SubmissionService.submit

    def optimistic(service: SubmissionService, who: Caller, request: RunRequest) -> RunView:
        try:
            return submit(service, who, request)
        except ServerStorageFull:
            new = NewRun(
                id=request.id,
                owner=who.name,
                spec=request.spec,
                target=request.target,
                request_sha256="",
                context_sealed=b"",
            )
            return service._database.read(lambda connection: run_views.run_view(_unwritten(connection, new)))

    return mock.patch.object(SubmissionService, "submit", optimistic)


def _unwritten(connection: sa.Connection, new: NewRun) -> StoredRun:
    with connection.begin_nested() as savepoint:
        run = runs.insert(connection, new, at_ns=0)
        savepoint.rollback()
    return run


def _lease_from_the_answer() -> AbstractContextManager[Any]:
    """A node counts its lease from when the answer came."""
    return mock.patch.object(node, "lease_end_ns", lambda _asked, answered, grace_s: answered + round(grace_s * S))


def _orders_go_to_any_node() -> AbstractContextManager[Any]:
    """A node that asks gets what waits, whoever it is for."""
    return mock.patch.object(orders, "waiting", lambda connection, _node_id: orders._open(connection, sa.true()))


def _silence_is_proof() -> AbstractContextManager[Any]:
    """A run whose node is silent is given up at once."""
    return mock.patch.object(liveness, "Silent", lambda: GivenUp(reason=Reason.NODE_GONE))


def _grace_of_today() -> AbstractContextManager[Any]:
    """A server waits as long as it grants itself, and not as long as was granted."""
    look = liveness.LivenessMonitor._look

    def forgetful(self: liveness.LivenessMonitor, run: ActiveRun, crew: ActiveCrew, now_ns: int) -> None:
        look(self, run, msgspec.structs.replace(crew, grace_s=self._grace_s), now_ns)

    return mock.patch.object(liveness.LivenessMonitor, "_look", forgetful)


def _taken_back_though_it_left() -> AbstractContextManager[Any]:
    """An order is taken back whether or not it has left."""
    return mock.patch.object(requeue.OrderDeliveries, "hold", lambda self, run_id, fence: True)


def _output_twice() -> AbstractContextManager[Any]:
    """Output is appended as it comes."""
    append = logs.Logs.append

    def careless(self: logs.Logs, run_id: str, fence: int, *, offset: int, **piece: Any) -> int:
        size = self.size(run_id, fence, rank=piece["rank"], stream=piece["stream"])
        append(self, run_id, fence, offset=size, **piece)
        return offset + len(piece["data"])

    return mock.patch.object(logs.Logs, "append", careless)


def _results_without_the_last() -> AbstractContextManager[Any]:
    """Of many results the last is not written, and nobody counts."""
    put = files.put

    def short(connection: sa.Connection, run_id: str, fence: int, new: Any, **how: Any) -> list[str]:
        return put(connection, run_id, fence, new[:-1] if len(new) > 1 else new, **how)

    return _both(mock.patch.object(files, "put", short), mock.patch.object(reports, "_check_results", lambda *_: None))


def _facts_of_the_end_are_dropped() -> AbstractContextManager[Any]:
    """Facts that come with an ending are not kept."""
    add = facts.add

    def lossy(connection: sa.Connection, crew: Any, new: Any) -> list[int]:
        return add(connection, crew, new[:1] if len(new) > 2 else new)

    return mock.patch.object(facts, "add", lossy)


def _stops_are_of_nobody() -> AbstractContextManager[Any]:
    """Who asked a run to stop is not written down."""
    record = audit.record

    def forgetful(connection: sa.Connection, **row: Any) -> None:
        if row["action"] is not audit.Action.RUN_STOP:
            record(connection, **row)

    return mock.patch.object(audit, "record", forgetful)


def _removed_without_a_word() -> AbstractContextManager[Any]:
    """Old runs are removed, and nobody can know that."""

    def silent(connection: sa.Connection, run_id: str, *, at_ns: int) -> None:
        for room in (events, files, facts, orders, attempts):
            room.remove(connection, run_id)
        runs.remove(connection, run_id)

    return mock.patch.object(retention, "_remove_rows", silent)


def _never_settled() -> AbstractContextManager[Any]:
    """A receipt that never comes is waited for for ever."""
    return mock.patch.object(liveness.LivenessMonitor, "settle_overdue", lambda *_: None)


def _reservations_stay() -> AbstractContextManager[Any]:
    """What an engine has reserved is given back by whoever placed it, and not by the next server."""
    return mock.patch.object(reconciler.Reconciler, "_release", lambda *_: None)


def _hello_proves_nothing() -> AbstractContextManager[Any]:
    """What a node still has is not looked at when it says hello, nor later."""
    return _both(
        mock.patch.object(agent_service, "_stale", lambda *_: ()),
        mock.patch.object(crews.StoredCrew, "is_stale", lambda *_: False),
    )


def _charged_twice() -> AbstractContextManager[Any]:
    """What is missing in the ledger is written once more."""

    def twice(posted: Sequence[LedgerEntry], target: Sequence[LedgerLine], *, final: bool) -> tuple[LedgerEntry, ...]:
        new = post(posted, target, final=final)
        return (*new, *(msgspec.structs.replace(entry, number=entry.number + len(new)) for entry in new))

    return mock.patch.object(charging, "post", twice)


def _the_last_day_is_lost() -> AbstractContextManager[Any]:
    """An attempt is charged as if it still went on."""

    def without_the_last(
        posted: Sequence[LedgerEntry], target: Sequence[LedgerLine], *, final: bool
    ) -> tuple[LedgerEntry, ...]:
        return post(posted, target[:-1], final=final)

    return mock.patch.object(charging, "post", without_the_last)


def _late_facts_are_free() -> AbstractContextManager[Any]:
    """Facts that come after the end are kept, and nobody charges again."""
    note = crews.note

    def silent(connection: sa.Connection, crew: crews.CrewId, **values: object) -> None:
        values.pop("uncharged", None)
        if values:
            note(connection, crew, **values)

    return mock.patch.object(crews, "note", silent)


def _caps_are_for_show() -> AbstractContextManager[Any]:
    """What a user has at once is not looked at."""
    return mock.patch.object(policies, "caps", lambda connection: {})


def _they_begin_before_they_have_met() -> AbstractContextManager[Any]:
    """A crew does not wait to be told how all meet."""

    def hasty(self: crew.Crew) -> bool:
        may, self._has_begun = not self._has_begun, True
        return may

    return mock.patch.object(crew.Crew, "may_begin", hasty)


class _Both:
    def __init__(self, *managers: AbstractContextManager[Any]) -> None:
        self._managers = managers

    def __enter__(self) -> None:
        for manager in self._managers:
            manager.__enter__()

    def __exit__(self, *error: Any) -> None:
        for manager in reversed(self._managers):
            manager.__exit__(*error)


def _both(*managers: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    return _Both(*managers)


BUGS: dict[str, Planted] = {
    "late reports count": _late_reports_count,
    "a repeated submit is another run": _repeated_submit_is_another_run,
    "acknowledged before it is durable": _acknowledged_before_it_is_durable,
    "the lease counts from the answer": _lease_from_the_answer,
    "orders go to any node": _orders_go_to_any_node,
    "silence is proof": _silence_is_proof,
    "grace of today": _grace_of_today,
    "taken back though it left": _taken_back_though_it_left,
    "output twice": _output_twice,
    "results without the last": _results_without_the_last,
    "facts of the end are dropped": _facts_of_the_end_are_dropped,
    "stops are of nobody": _stops_are_of_nobody,
    "removed without a word": _removed_without_a_word,
    "never settled": _never_settled,
    "reservations stay": _reservations_stay,
    "hello proves nothing": _hello_proves_nothing,
    "charged twice": _charged_twice,
    "the last day is lost": _the_last_day_is_lost,
    "late facts are free": _late_facts_are_free,
    "caps are for show": _caps_are_for_show,
    "they begin before they have met": _they_begin_before_they_have_met,
}
FOUND_AS: dict[str, str] = {
    "late reports count": "I6",
    "a repeated submit is another run": "ends",
    "acknowledged before it is durable": "I1",
    "orders go to any node": "I3",
    "silence is proof": "I3",
    "output twice": "told",
    "results without the last": "told",
    "facts of the end are dropped": "I7",
    "stops are of nobody": "I8",
    "removed without a word": "I1",
    "reservations stay": "ends",
    "the lease counts from the answer": "I3",
    "grace of today": "I3",
    "taken back though it left": "I3",
    "never settled": "ends",
    "hello proves nothing": "I3",
    "charged twice": "I7",
    "the last day is lost": "I7",
    "late facts are free": "I7",
    "caps are for show": "caps",
    "they begin before they have met": "I3",
}
"""Bug → the invariant that finds it."""
