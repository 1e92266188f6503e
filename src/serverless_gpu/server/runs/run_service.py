"""Provides the services and routes for runs, output, results and costs.

`RunQueries` reads and streams runs. `StopService` sends stop requests to runs. `submission.py` accepts runs.

The server stores the author of a stop request and sends a stop order to the nodes of the run. If a stop request and the
end of a run coincide, the database transaction that commits first decides the outcome. If the results are durable
before the stop request, the run has succeeded. The server answers a stop request after a success with the ended run.
The server answers a repeated stop request with the current state of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

import msgspec
import sqlalchemy as sa
from starlette.responses import Response

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import AlreadyFinished, InvalidValue, NotAllowed, NotFound, TooLarge
from serverless_gpu.model import access_control
from serverless_gpu.model.cost import Cost
from serverless_gpu.model.hardware import FAMILIES, canonical
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State, StopReason
from serverless_gpu.model.placement import NODES_MAX
from serverless_gpu.server.billing import run_costs
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import (
    EVENTS,
    Bytes,
    Call,
    Query,
    Routes,
    Stream,
    range_response,
    reading,
    writing,
)
from serverless_gpu.server.lifecycle import endings, metering, transitions
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.server.lifecycle.transitions import Announcer, TransitionResult
from serverless_gpu.server.records import attempts, files, run_list, runs
from serverless_gpu.server.records.run_list import RunFilter, RunListPage, Sort
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_stream import Position, RunSnapshot, RunStream, parse_offsets, parse_ranks
from serverless_gpu.server.runs.submission import SubmissionService
from serverless_gpu.server.scheduling.wait_reasons import NOTHING, WaitReasons
from serverless_gpu.server.storage.blobs import Blobs, file_source
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, PAGE_DEFAULT, PAGE_MAX
from serverless_gpu.wire.runs import (
    AcceptedMessage,
    AttemptList,
    BulkStopAnswer,
    BulkStopRequest,
    CostView,
    FileList,
    RunPage,
    RunRequest,
    RunView,
    StopOutcome,
    StopRequest,
    StreamMessage,
)

ASKED_BY_PEOPLE = (StopReason.CANCEL, StopReason.PREEMPT, StopReason.DRAIN)
"""Stop reasons that a caller may use. Only the server uses the other stop reasons, which result from limits."""


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
        """Return the view of a run, or raise `NotFound` if the caller may not see the run."""
        run = self._database.read(lambda connection: run_views.visible(connection, run_id, who=who, reach=reach))
        return self.view(run, who)

    def view(self, run: StoredRun, who: Caller) -> RunView:
        """Return the API view of a stored run with its wait reason."""
        told = self._sentences.told(run.id) if run.state is State.QUEUED else NOTHING
        told = msgspec.structs.replace(told, trouble=self._unwritable())
        return run_views.run_view(run, told=told, reader=who.name)

    async def messages(
        self,
        view: RunView,
        position: Position,
        in_thread: Callable[[Callable[[], list[StreamMessage]]], Awaitable[list[StreamMessage]]],
    ) -> AsyncIterator[StreamMessage | None]:
        """Yield the stream messages of a run after the given position, and None as a keep-alive."""
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
    """Stops runs at the request of callers."""

    def __init__(self, *, clock: Clock, database: Transactions, sentences: WaitReasons, announcer: Announcer) -> None:
        self._clock = clock
        self._database = database
        self._sentences = sentences
        self._announcer = announcer

    def request(self, who: Caller, reach: str, *, run_id: str, why: StopReason) -> RunView:
        """Send a stop request to a run."""
        if why not in ASKED_BY_PEOPLE:
            raise InvalidValue(
                f"clients cannot use the stop reason {why.value!r}", hint=f"possible: {', '.join(ASKED_BY_PEOPLE)}"
            )
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
    raise NotAllowed(
        f"{who.name} may see run {run_id}, but not stop it", hint="ask the run's owner or an operator to stop the run"
    )


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("runs")
LOG_BYTES_MAX = 4 << 20
Label = Annotated[str, msgspec.Meta(max_length=LABEL_CHARACTERS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Fence = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Moment = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
STOPS_MAX = 100
"""Maximum number of runs in one bulk stop."""


class RunsQuery(Query, frozen=True, kw_only=True):
    """Parameters of the run list.

    `state` and `tag` (``key=value``) accept comma-separated lists. `type` also selects the members of a family of
    device types. `text` is a part of the name, identifier or final sentence. `from_ns` and `to_ns` limit the submission
    time, in nanoseconds since 1970. `costs` adds costs.
    """

    state: Label = ""
    owner: Label = ""
    team: Label = ""
    name: Label = ""
    tag: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    type: Label = ""
    from_ns: Moment = 0
    to_ns: Moment | None = None
    text: Label = ""
    sort: Sort = "newest"
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = PAGE_DEFAULT
    cursor: Label = ""
    costs: bool = False


class WatchQuery(Query, frozen=True, kw_only=True):
    """Position of a reader in a run's stream. `ranks` is "all", a comma-separated list, or ""."""

    after: Count = 0
    offsets: Annotated[str, msgspec.Meta(max_length=3_500)] = ""
    ranks: Annotated[str, msgspec.Meta(max_length=3_500)] = ""


class LogQuery(Query, frozen=True, kw_only=True):
    """The requested byte range of a log. A `fence` of 0 selects the current attempt."""

    fence: Fence = 0
    offset: Count = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=LOG_BYTES_MAX)] = 1 << 20


class FenceQuery(Query, frozen=True, kw_only=True):
    """Selects an attempt by its fence, or the current attempt by 0."""

    fence: Fence = 0


class ReceiptQuery(FenceQuery, frozen=True, kw_only=True):
    """Selects the receipt of an attempt, or of one node (NODE_RANK) of the attempt."""

    crew: Annotated[int, msgspec.Meta(ge=0, lt=NODES_MAX)] | None = None


@routes.post("/runs", needs=writing("runs"))
async def create_run(
    call: Call, submissions: SubmissionService, queries: RunQueries, body: RunRequest
) -> RunView | Stream[StreamMessage]:
    """Submit a run. With `Accept: text/event-stream`, return the event stream of the run."""
    view = await call.in_thread(lambda: submissions.submit(call.who, body))
    if EVENTS not in call.headers.get("accept", ""):
        return view
    return _stream(call, queries, view, Position())


@routes.get("/runs", needs=reading("runs"))
def list_runs(
    call: Call, clock: Clock, leases: Leases, database: Transactions, queries: RunQueries, query: RunsQuery
) -> RunPage:
    """List runs, newest first unless `sort` is set."""
    wished = RunFilter(
        states=_states(query.state),
        owner=query.owner,
        team=query.team,
        name=query.name,
        tags=_tags(query.tag),
        gpu_types=_types(query.type),
        from_ns=query.from_ns,
        to_ns=query.to_ns,
        text=query.text,
        seen_by=None if call.reach == access_control.AccessReach.ALL else call.who.name,
        teams=call.who.teams if call.reach == access_control.AccessReach.TEAM else (),
    )
    at = metering.now(clock, leases)

    def work(db: sa.Connection) -> tuple[RunListPage, dict[str, Cost]]:
        found = run_list.page(db, wished, limit=query.limit, cursor=query.cursor, sort=query.sort)
        return found, run_costs.costs_of(db, found.runs, at) if query.costs else {}

    found, costs = database.read(work)
    return RunPage(
        runs=tuple(queries.view(run, call.who) for run in found.runs),
        cursor=found.following,
        previous=found.previous,
        costs=tuple(CostView(id=run_id, cost=cost) for run_id, cost in costs.items()),
    )


@routes.post("/runs/stop", needs=writing("runs"))
def stop_runs(call: Call, stops: StopService, body: BulkStopRequest) -> BulkStopAnswer:
    """Send stop requests to several runs, and return the outcome of each run."""
    wanted = tuple(dict.fromkeys(body.runs))
    if len(wanted) > STOPS_MAX:
        raise TooLarge(f"a request to stop {len(wanted)} runs is too large", hint=f"stop at most {STOPS_MAX} at once")
    return BulkStopAnswer(outcomes=tuple(_outcome(call, stops, run, body.reason) for run in wanted))


def _outcome(call: Call, stops: StopService, run: str, why: StopReason) -> StopOutcome:
    try:
        return StopOutcome(id=run, state=stops.request(call.who, call.reach, run_id=run, why=why).state)
    except (AlreadyFinished, NotAllowed, NotFound) as error:
        return StopOutcome(id=run, code=error.code, message=error.message)


@routes.get("/runs/{run}", needs=reading("runs"))
def read_run(call: Call, queries: RunQueries, run: str) -> RunView:
    """Return a run."""
    return queries.read(run, call.who, call.reach)


@routes.get("/runs/{run}/events", needs=reading("runs"))
async def watch_run(call: Call, queries: RunQueries, run: str, query: WatchQuery) -> Stream[StreamMessage]:
    """Stream the events and output of a run from the reader's position."""
    position = Position(after=query.after, offsets=parse_offsets(query.offsets), ranks=parse_ranks(query.ranks))
    view = await call.in_thread(lambda: queries.read(run, call.who, call.reach))
    return _stream(call, queries, view, position)


@routes.post("/runs/{run}/stop", needs=writing("runs"))
def stop_run(call: Call, stops: StopService, run: str, body: StopRequest) -> RunView:
    """Send a stop request to a run."""
    return stops.request(call.who, call.reach, run_id=run, why=body.reason)


@routes.get("/runs/{run}/attempts", needs=reading("runs"))
def list_attempts(call: Call, database: Transactions, run: str) -> AttemptList:
    """List all attempts of a run, in order."""

    def work(db: sa.Connection) -> AttemptList:
        _visible(call, db, run)
        return AttemptList(attempts=tuple(run_views.attempt_view(attempt) for attempt in attempts.of_run(db, run)))

    return database.read(work)


@routes.get("/runs/{run}/cost", needs=reading("runs"))
def read_cost(call: Call, clock: Clock, leases: Leases, database: Transactions, run: str) -> CostView:
    """Return the current usage and cost of all attempts of a run."""
    at = metering.now(clock, leases)

    def work(db: sa.Connection) -> Cost:
        return run_costs.cost_of(db, _visible(call, db, run), at)

    return CostView(id=run, cost=database.read(work))


@routes.get("/runs/{run}/logs/{rank}/{stream}", needs=reading("runs"))
def read_log(
    call: Call, logs: Logs, database: Transactions, run: str, rank: int, stream: str, query: LogQuery
) -> Bytes:
    """Return a part of a rank's output. The header `SGPU-Complete` is 1 at the end of the output."""
    stored = database.read(lambda db: _visible(call, db, run))
    fence = query.fence or stored.fence
    # Read the run's state before the size of the output, so that the reader misses no concurrent output.
    complete = stored.state in TERMINAL or fence < stored.fence
    data, size = b"", 0
    if fence:
        size = logs.size(run, fence, rank=rank, stream=stream)
        data = logs.read(run, fence, rank=rank, stream=stream, offset=query.offset, limit=query.limit)
    following = query.offset + len(data)
    headers = {"SGPU-Next-Offset": str(following), "SGPU-Fence": str(fence), "SGPU-Size": str(size)}
    return Bytes(data, headers={**headers, "SGPU-Complete": "1" if complete and following >= size else "0"})


@routes.get("/runs/{run}/results", needs=reading("runs"))
def list_results(call: Call, database: Transactions, run: str) -> FileList:
    """List the result files of a run by rank."""
    return _files(call, database, run, 0, prefix="results/")


@routes.get("/runs/{run}/files", needs=reading("runs"))
def list_files(call: Call, database: Transactions, run: str, query: FenceQuery) -> FileList:
    """List the output files of an attempt."""
    return _files(call, database, run, query.fence)


@routes.get("/runs/{run}/files/{name:path}", needs=reading("runs"))
def read_file(
    call: Call, blobs: Blobs, database: Transactions, run: str, name: str, query: FenceQuery
) -> Bytes | Response:
    """Return a file of an attempt, or the requested byte range of the file."""

    def work(db: sa.Connection) -> files.StoredFile:
        stored = _visible(call, db, run)
        files.check_name(name)
        found = files.find(db, run, query.fence or stored.fence, name)
        if found is None:
            raise NotFound(f"run {run} has no file {name!r}", hint="list the files with `sgpu run show`")
        return found

    found = database.read(work)
    response = range_response(file_source(blobs, found), found.size, call.headers.get("range", ""))
    # Browsers must never show a file of a user in the origin of the server. Names of files contain no special letters.
    response.headers["Content-Disposition"] = f'attachment; filename="{run}-{name.replace("/", "-")}"'
    return response


@routes.get("/runs/{run}/receipt", needs=reading("runs"))
def read_receipt(call: Call, database: Transactions, run: str, query: ReceiptQuery) -> Response:
    """Return the receipt of one node, or the combined receipt of all nodes of an attempt."""

    def work(db: sa.Connection) -> str | None:
        stored = _visible(call, db, run)
        attempt = attempts.find(db, run, query.fence or stored.fence)
        if attempt is None or query.crew is None:
            return endings.outcome(db, attempt).receipt
        return endings.receipt_of_crew(db, attempt, query.crew)

    receipt = database.read(work)
    if receipt is None:
        raise NotFound(
            f"run {run} has no receipt yet",
            hint="wait until the node has checked and released the devices",
        )
    return Response(receipt, media_type="application/json")


def _stream(call: Call, queries: RunQueries, view: RunView, position: Position) -> Stream[StreamMessage]:
    call.look = lambda: queries.read(view.id, call.who, call.reach)
    return Stream(queries.messages(view, position, call.in_thread))


def _files(call: Call, database: Transactions, run: str, fence: int, *, prefix: str = "") -> FileList:
    def work(db: sa.Connection) -> FileList:
        stored = _visible(call, db, run)
        wanted = fence or stored.fence
        found = files.of_attempt(db, run, wanted, prefix=prefix)
        return FileList(fence=wanted, files=run_views.file_views(found))

    return database.read(work)


def _visible(call: Call, db: sa.Connection, run: str) -> StoredRun:
    return run_views.visible(db, run, who=call.who, reach=call.reach)


def _states(text: str) -> tuple[State, ...]:
    try:
        return tuple(State(word.strip().upper()) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise InvalidValue(f"{error}", hint=f"states: {', '.join(State)}") from error


def _types(text: str) -> tuple[str, ...]:
    """Return a device type and the members of its family."""
    name = canonical(text)
    return (name, *FAMILIES.get(name, ())) if text else ()


def _tags(text: str) -> dict[str, str]:
    pairs = [item.partition("=") for item in text.split(",") if item]
    if not all(equals for _, equals, _ in pairs):
        raise InvalidValue(f"{text[:80]!r} is not a list of tags", hint="write the filter as tag=key=value,key=value")
    return {key: value for key, _, value in pairs}
