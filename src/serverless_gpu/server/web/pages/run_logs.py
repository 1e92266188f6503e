"""Shows the output of a run: live, part by part, searched, and as a download.

Routes:

    GET /ui/runs/{run}/logs             the page; without scripts, a part of 64 KB with links to the other parts
    GET /ui/runs/{run}/stream           the run's event stream, for `assets/log.js`
    GET /ui/runs/{run}/logs/sizes       sizes of the streams
    GET /ui/runs/{run}/logs/part        bytes of a stream
    GET /ui/runs/{run}/logs/download    a whole stream
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, cast

import msgspec
from starlette.responses import Response

from serverless_gpu.model.spec import RANKS_MAX
from serverless_gpu.model.terminal_text import plain_text
from serverless_gpu.server.http.routing import Bytes, Call, Query, Routes, Stream, reading
from serverless_gpu.server.runs import log_search, run_service
from serverless_gpu.server.runs.log_search import LogListQuery, LogSearchQuery
from serverless_gpu.server.runs.run_service import LOG_BYTES_MAX, Count, Fence, FenceQuery, LogQuery, WatchQuery
from serverless_gpu.server.web.pages import run_frame
from serverless_gpu.server.web.site import WEB, Page, Site
from serverless_gpu.wire.runs import LogFile, LogList, StreamMessage

PART_BYTES = 64 << 10
RANKS_LISTED_MAX = 64
"""Maximum number of ranks that the page offers in a list. More ranks need a text field."""
Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Output = Literal["", "stdout", "stderr"]

routes = Routes("run-log-pages", mount=WEB)


class LogsQuery(Query, frozen=True, kw_only=True):
    """The shown part of the output, and the searched text.

    An empty `rank` or `stream` selects all. `at` is the offset of a line. `before` is the end of a part for readers
    without scripts.
    """

    fence: Fence = 0
    rank: Literal[""] | Rank = ""
    stream: Output = ""
    at: Count | None = None
    before: Count | None = None
    q: Annotated[str, msgspec.Meta(max_length=200)] = ""
    cursor: Annotated[str, msgspec.Meta(max_length=64)] = ""


class PartQuery(LogQuery, frozen=True, kw_only=True):
    """A byte range of one output stream."""

    rank: Rank = 0
    stream: Literal["stdout", "stderr"] = "stdout"
    limit: Annotated[int, msgspec.Meta(ge=1, le=LOG_BYTES_MAX)] = PART_BYTES


class DownloadQuery(FenceQuery, frozen=True, kw_only=True):
    """The downloaded output stream."""

    rank: Rank = 0
    stream: Literal["stdout", "stderr"] = "stdout"


class LogPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of one output stream as plain text. Offsets are in bytes."""

    rank: int
    stream: str
    text: str
    start: int
    end: int
    size: int


@routes.get("/runs/{run}/logs", needs=reading("runs"))
def show_logs(call: Call, site: Site, run: str, query: LogsQuery) -> Page:
    """Show the output of a run."""
    view = run_frame.read(call, site, run)
    rank = None if query.rank == "" else query.rank
    listed = site.ask(call, log_search.list_logs, run=run, query=LogListQuery(fence=query.fence, rank=rank))
    output = [log for log in listed.logs if log.stream != "telemetry"]
    wanted = [log for log in output if query.rank in ("", log.rank) and query.stream in ("", log.stream)]
    is_script = "hx-request" in call.headers
    shown = [] if is_script else [log for log in wanted if log.size and log.rank == wanted[0].rank]
    matches = None
    if query.q and query.q.isprintable():
        searched = LogSearchQuery(
            q=query.q,
            fence=listed.fence,
            rank=rank,
            stream=query.stream,
            cursor=query.cursor,
        )
        matches = site.ask(call, log_search.search_logs, run=run, query=searched)

    def read(log: LogFile, span: LogQuery) -> bytes:
        asked = {"run": run, "rank": log.rank, "stream": log.stream}
        return bytes(site.ask(call, run_service.read_log, query=span, **asked).body)

    return run_frame.page(
        call,
        site,
        view,
        "run_logs.html",
        tab="logs",
        is_live=False,
        query=query,
        listed=listed,
        ranks=_ranks(output, view.processes),
        parts=[_part(read, listed, log, query, PART_BYTES // len(shown)) for log in shown],
        downloads=[log for log in wanted if log.size][: 2 * RANKS_LISTED_MAX],
        matches=matches,
    )


@routes.get("/runs/{run}/stream", needs=reading("runs"))
async def stream_run(call: Call, site: Site, run: str, query: WatchQuery) -> Stream[StreamMessage]:
    """Stream the events and output of a run from the reader's position."""
    found = await cast("Awaitable[Stream[StreamMessage]]", site.ask(call, run_service.watch_run, run=run, query=query))
    call.look = lambda: site.ask(call, run_service.read_run, run=run)
    return found


@routes.get("/runs/{run}/logs/sizes", needs=reading("runs"))
def list_sizes(call: Call, site: Site, run: str, query: LogListQuery) -> LogList:
    """List the output streams of an attempt with their sizes."""
    return site.ask(call, log_search.list_logs, run=run, query=query)


@routes.get("/runs/{run}/logs/part", needs=reading("runs"))
def read_part(call: Call, site: Site, run: str, query: PartQuery) -> Bytes:
    """Return a byte range of an output stream."""
    asked = LogQuery(fence=query.fence, offset=query.offset, limit=query.limit)
    found = site.ask(call, run_service.read_log, run=run, rank=query.rank, stream=query.stream, query=asked)
    found.headers["Content-Disposition"] = "attachment"
    found.headers["Cache-Control"] = "no-store"
    return found


@routes.get("/runs/{run}/logs/download", needs=reading("runs"))
def download(call: Call, site: Site, run: str, query: DownloadQuery) -> Response:
    """Return a whole output stream as a gzip file."""
    asked = FenceQuery(fence=query.fence)
    return site.ask(call, log_search.download_log, run=run, rank=query.rank, stream=query.stream, query=asked)


def _ranks(output: list[LogFile], processes: int | None) -> list[int]:
    """Return the ranks to choose from: those with output, and those that the run will have."""
    return sorted({log.rank for log in output} | set(range(min(processes or 0, RANKS_LISTED_MAX + 1))))


def _part(
    read: Callable[[LogFile, LogQuery], bytes], listed: LogList, log: LogFile, query: LogsQuery, limit: int
) -> LogPart:
    """Return the requested part of a stream in whole lines, with at most `limit` bytes."""
    if query.at is not None:
        start = min(query.at, log.size)
        end = min(log.size, start + limit)
    else:
        end = log.size if query.before is None else min(query.before, log.size)
        start = max(0, end - limit)
    span = LogQuery(fence=listed.fence, offset=start, limit=max(1, end - start))
    data = read(log, span)[: end - start]
    if start and query.at is None:
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    return LogPart(
        rank=log.rank, stream=log.stream, text=plain_text(data), start=start, end=start + len(data), size=log.size
    )
