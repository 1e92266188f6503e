"""Views of single runs, and their streams, for the callers that may see them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.server.records.runs.runs import StoredRun
from serverless_gpu.server.runs import views
from serverless_gpu.server.runs.run_stream import Look, Position, Watch
from serverless_gpu.server.scheduling.wait_reasons import NOTHING, Sentences
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.wire.runs import AcceptedMessage, RunView, StreamMessage


class RunQueries:
    """Reads runs, and streams what happens to them."""

    def __init__(
        self,
        *,
        clock: Clock,
        database: Transactions,
        hub: Hub,
        logs: Logs,
        sentences: Sentences,
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
        """Return the view of a run.

        Raises:
            NotFound: there is no such run, or it is out of reach.
        """
        run = self._database.read(lambda connection: views.visible(connection, run_id, who=who, reach=reach))
        return self.view(run, who)

    def view(self, run: StoredRun, who: Caller) -> RunView:
        """Return the view of a stored run, with the reason for which it waits."""
        told = self._sentences.told(run.id) if run.state is State.QUEUED else NOTHING
        told = msgspec.structs.replace(told, trouble=self._unwritable())
        return views.run_view(run, told=told, reader=who.name)

    async def messages(
        self,
        view: RunView,
        position: Position,
        in_thread: Callable[[Callable[[], list[StreamMessage]]], Awaitable[list[StreamMessage]]],
    ) -> AsyncIterator[StreamMessage | None]:
        """Yield the messages about a run from a position on; None keeps the stream alive."""
        yield AcceptedMessage(run=view)
        watch = Watch(
            view.id, position, look=lambda after: self._look(view.id, after), files=self._logs, clock=self._clock
        )
        async for message in watch.messages(self._hub, in_thread):
            yield message

    def _look(self, run_id: str, after: int) -> Look:
        told = msgspec.structs.replace(self._sentences.told(run_id), trouble=self._unwritable())
        quiet = self._reports.quiet_s
        return self._database.read(lambda db: views.look(db, run_id, after, told=told, quiet=quiet))
