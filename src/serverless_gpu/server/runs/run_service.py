"""Services of single runs: `RunQueries` reads and streams them, `StopService` asks them to stop.

A stop request is written with its author and sent to the run's node. A stop and an end may cross, and the first one
written counts: a run whose results were durable before the stop has succeeded, and the caller hears that it has ended.
Repeating a request returns its outcome.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import sqlalchemy as sa

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.model import access_control
from serverless_gpu.model.lifecycle.attempt import State, StopReason
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.records import runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_stream import Position, RunSnapshot, RunStream
from serverless_gpu.server.scheduling.wait_reasons import NOTHING, WaitReasons
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.wire.runs import AcceptedMessage, RunView, StreamMessage

ASKED_BY_PEOPLE = (StopReason.CANCEL, StopReason.PREEMPT, StopReason.DRAIN)
"""The other reasons follow from limits, and callers cannot claim them."""


class RunQueries:
    """Reads and streams runs."""

    def __init__(
        self,
        *,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        logs: Logs,
        sentences: WaitReasons,
        unwritable: Callable[[], str],
        reports: ReportService,
    ) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._logs = logs
        self._sentences = sentences
        self._unwritable = unwritable
        self._reports = reports

    def read(self, run_id: str, who: Caller, reach: str) -> RunView:
        """Return the view of a run."""
        run = self._database.read(lambda connection: run_views.visible(connection, run_id, who=who, reach=reach))
        return self.view(run, who)

    def view(self, run: StoredRun, who: Caller) -> RunView:
        """Return the view of a stored run, with the reason for which it waits."""
        told = self._sentences.told(run.id) if run.state is State.QUEUED else NOTHING
        told = msgspec.structs.replace(told, trouble=self._unwritable())
        return run_views.run_view(run, told=told, reader=who.name)

    async def messages(
        self,
        view: RunView,
        position: Position,
        in_thread: Callable[[Callable[[], list[StreamMessage]]], Awaitable[list[StreamMessage]]],
    ) -> AsyncIterator[StreamMessage | None]:
        """Yield the messages about a run from a position on; None keeps the stream alive."""
        yield AcceptedMessage(run=view)
        watch = RunStream(
            view.id, position, look=lambda after: self._look(view.id, after), files=self._logs, clock=self._clock
        )
        async for message in watch.messages(self._hub, in_thread):
            yield message

    def _look(self, run_id: str, after: int) -> RunSnapshot:
        told = msgspec.structs.replace(self._sentences.told(run_id), trouble=self._unwritable())
        quiet = self._reports.quiet_s
        return self._database.read(lambda db: run_views.look(db, run_id, after, told=told, quiet=quiet))


class StopService:
    """Stops runs on request of callers."""

    def __init__(self, *, clock: Clock, database: Transactions, sentences: WaitReasons, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._sentences = sentences
        self._announcer = announcer

    def request(self, who: Caller, reach: str, *, run_id: str, why: StopReason) -> RunView:
        """Ask a run to stop."""
        if why not in ASKED_BY_PEOPLE:
            raise InvalidValue(f"nobody can ask for {why.value!r}", hint=f"possible: {', '.join(ASKED_BY_PEOPLE)}")
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> TransitionResult | None:
            _check_reach(connection, who, reach, run_id)
            return transitions.ask_to_stop(connection, run_id, who=who, why=why, at_ns=at_ns)

        told = self._database.write(work)
        faults.reach("after_stop_before_answer")
        if told is not None:
            self._announcer.announce(told)
        run = self._database.read(lambda connection: run_views.visible(connection, run_id, who=who, reach=reach))
        return run_views.run_view(run, told=self._sentences.told(run_id), reader=who.name)


def _check_reach(connection: sa.Connection, who: Caller, reach: str, run_id: str) -> None:
    to_see = access_control.reach(who.role, "runs", write=False, scopes=who.scopes)
    run = runs.find(connection, run_id)
    if run is not None and run_views.in_reach(run, who=who, reach=reach):
        return
    run_views.visible(connection, run_id, who=who, reach=to_see)
    raise NotAllowed(f"{who.name} may see run {run_id}, and not stop it", hint="its owner can, or an operator")
