"""Lists, searches and downloads the output of an attempt.

    GET /runs/{run}/logs                           sizes of all streams
    GET /runs/{run}/log-matches?q=…                lines with a text, in the whole output, part by part
    GET /runs/{run}/logs/{rank}/{stream}/download  a whole stream as a gzip file

The search finds plain text. Regular expressions are not supported, because a pattern can take unlimited time.

Failure cases:

* A long output: a request searches at most `SEARCH_BYTES_MAX` bytes. Its cursor continues the search.

* A line longer than a chunk: the search divides the line into pieces that overlap by the length of the text.

* A running attempt: the search ends at the current end of the output. A download has the size from its start.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, cast

import msgspec
import sqlalchemy as sa
from starlette.responses import Response, StreamingResponse

from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.model.spec import RANKS_MAX
from serverless_gpu.model.terminal_text import plain_text
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_service import Fence, FenceQuery
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.wire.runs import LogFile, LogList, LogMatch, LogMatches

LISTED_MAX = 1_000
SEARCH_BYTES_MAX = 64 << 20
"""Maximum bytes that one request searches, which takes about 0.1 s."""
SEARCH_FILES_MAX = 2_000
MATCHES_MAX = 200
CHUNK_BYTES = 1 << 20
_EXCERPT_BYTES = 160
"""Maximum bytes of an excerpt on each side of a match."""
_CONTEXT_BYTES = 240
_DOWNLOAD_BYTES = 256 << 10
_GZIP = 31
"""Window bits of zlib for the gzip format."""
_CURSOR = re.compile(r"([0-9]{1,7})\.(stdout|stderr)\.([0-9]{1,16})\.([0-9]{1,16})", re.ASCII)

Stream = Literal["stdout", "stderr", "telemetry"]


class LogSearchQuery(Query, frozen=True, kw_only=True):
    """The searched text and the searched output.

    The search ignores the case of ASCII letters. `rank` and `stream` select a part of the output. A `fence` of 0
    selects the current attempt.
    """

    q: Annotated[str, msgspec.Meta(max_length=200)] = ""
    fence: Fence = 0
    rank: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)] | None = None
    stream: Literal["", "stdout", "stderr"] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MATCHES_MAX)] = 50
    cursor: Annotated[str, msgspec.Meta(max_length=64)] = ""


class SearchPosition(NamedTuple):
    """Position of a search: a stream, an offset, and the number of line feeds before the offset."""

    rank: int = 0
    stream: str = ""
    offset: int = 0
    lines: int = 0


class LogListQuery(FenceQuery, frozen=True, kw_only=True):
    """Selects an attempt, and the output of one rank."""

    rank: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)] | None = None


routes = Routes("runs")


@routes.get("/runs/{run}/logs", needs=reading("runs"))
def list_logs(call: Call, logs: Logs, database: Transactions, run: str, query: LogListQuery) -> LogList:
    """List the output streams of an attempt, or of one rank, with their sizes."""
    fence, complete = _attempt(call, database, run, query.fence)
    sizes = logs.sizes(run, fence) if fence else {}
    sizes = {log: size for log, size in sizes.items() if query.rank in (None, log[0])}
    # Errors follow the output of their rank.
    listed = sorted(sizes.items(), key=lambda log: (log[0][0], log[0][1] != "stdout", log[0][1]))[:LISTED_MAX]
    found = tuple(
        LogFile(rank=rank, stream=cast(Stream, stream), size=size)  # `Logs` validates the names.
        for (rank, stream), size in listed
    )
    return LogList(fence=fence, complete=complete, count=len(sizes), logs=found)


@routes.get("/runs/{run}/log-matches", needs=reading("runs"))
def search_logs(call: Call, logs: Logs, database: Transactions, run: str, query: LogSearchQuery) -> LogMatches:
    """Search the output of an attempt for a text. Each line with the text is one match."""
    needle = query.q.encode("utf-8", "surrogateescape") if query.q.isprintable() else b""
    if not needle:
        raise InvalidValue("the search has no printable text", hint="write the text as q=TEXT")
    fence, _ = _attempt(call, database, run, query.fence)
    sizes = logs.sizes(run, fence) if fence else {}
    names = sorted(
        (rank, stream)
        for rank, stream in sizes
        if stream != "telemetry" and query.rank in (None, rank) and query.stream in ("", stream)
    )
    search = _Search(logs, run, fence, needle.lower(), query.limit)
    cursor = search.run(names, sizes, _position(query.cursor))
    return LogMatches(fence=fence, matches=tuple(search.matches), cursor=cursor, scanned=search.scanned)


@routes.get("/runs/{run}/logs/{rank}/{stream}/download", needs=reading("runs"))
def download_log(
    call: Call, logs: Logs, database: Transactions, run: str, rank: int, stream: str, query: FenceQuery
) -> Response:
    """Return a whole output stream as a gzip file."""
    fence, _ = _attempt(call, database, run, query.fence)
    size = logs.size(run, fence, rank=rank, stream=stream) if fence else 0
    if not size:
        raise NotFound(f"rank {rank} of run {run} has no {stream[:40]}", hint="list the streams with `sgpu logs`")

    def pieces() -> Iterator[bytes]:
        packer, at = zlib.compressobj(wbits=_GZIP), 0
        while at < size:
            data = logs.read(run, fence, rank=rank, stream=stream, offset=at, limit=min(_DOWNLOAD_BYTES, size - at))
            if not data:
                break  # Retention has deleted the run.
            at += len(data)
            if packed := packer.compress(data):
                yield packed
        yield packer.flush()

    headers = {
        # `Logs` has validated all parts of the name.
        "Content-Disposition": f'attachment; filename="{run}-{fence}-{rank}-{stream}.log.gz"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return StreamingResponse(pieces(), media_type="application/gzip", headers=headers)


class _Search:
    """One request's part of a search."""

    def __init__(self, logs: Logs, run: str, fence: int, needle: bytes, limit: int) -> None:
        self._logs = logs
        self._run, self._fence = run, fence
        self._needle = needle  # In lower case.
        self._limit = limit
        self.matches: list[LogMatch] = []
        self.scanned = 0

    def run(self, names: list[tuple[int, str]], sizes: dict[tuple[int, str], int], start: SearchPosition | None) -> str:
        """Search streams in order, and return the cursor of the next part, or ""."""
        if start is not None:
            names = [name for name in names if name >= (start.rank, start.stream)]
        for number, (rank, stream) in enumerate(names):
            begins = start is not None and (rank, stream) == (start.rank, start.stream)
            offset, lines = (start.offset, start.lines) if begins and start is not None else (0, 0)
            if number >= SEARCH_FILES_MAX:
                return f"{rank}.{stream}.0.0"
            stopped = self._search(rank, stream, offset, lines, sizes[rank, stream])
            if stopped is not None:
                return f"{rank}.{stream}.{stopped[0]}.{stopped[1]}"
        return ""

    def _search(self, rank: int, stream: str, at: int, lines: int, size: int) -> tuple[int, int] | None:
        """Search a stream. Return the position at which a limit ends the search, or None at the end."""
        while at < size:
            if self.scanned >= SEARCH_BYTES_MAX:
                return at, lines
            data = self._read(rank, stream, at, min(CHUNK_BYTES, size - at))
            if not data:
                return None
            whole = data.rfind(b"\n") + 1
            is_last = at + len(data) >= size
            # Without a line feed, the next chunk repeats the end of this one, which may contain half a match.
            used = len(data) if is_last else whole or max(1, len(data) - len(self._needle) + 1)
            until = used if is_last or whole else len(data)
            low, place, counted = data.lower(), 0, 0
            while (found := low.find(self._needle, place, until)) >= 0:
                start = data.rfind(b"\n", 0, found) + 1
                lines += data.count(b"\n", counted, start)
                counted = start
                if len(self.matches) >= self._limit:
                    self.scanned += start
                    return at + start, lines
                self._note(rank, stream, data, (at, start, found), lines)
                place = data.find(b"\n", found) + 1
                if not place:
                    break
            lines += data.count(b"\n", counted, used)
            self.scanned += used
            at += used
        return None

    def _note(self, rank: int, stream: str, data: bytes, places: tuple[int, int, int], lines: int) -> None:
        at, start, found = places
        after = found + len(self._needle)
        end = data.find(b"\n", after)
        end = len(data) if end < 0 else end
        head = plain_text(data[max(start, found - _EXCERPT_BYTES) : found])
        middle = plain_text(data[found:after])
        tail = plain_text(data[after : min(end, after + _EXCERPT_BYTES)])
        previous = data[max(0, data.rfind(b"\n", 0, start - 1) + 1) : start - 1] if start > 0 else b""
        following = data[end + 1 : end + 1 + _CONTEXT_BYTES].partition(b"\n")[0]
        self.matches.append(
            LogMatch(
                rank=rank,
                stream="stderr" if stream == "stderr" else "stdout",
                line=lines + 1,
                offset=at + start,
                text=head + middle + tail,
                start=len(head),
                end=len(head) + len(middle),
                before=plain_text(previous[:_CONTEXT_BYTES]),
                after=plain_text(following),
            )
        )

    def _read(self, rank: int, stream: str, offset: int, limit: int) -> bytes:
        return self._logs.read(self._run, self._fence, rank=rank, stream=stream, offset=offset, limit=limit)


def _position(cursor: str) -> SearchPosition | None:
    if not cursor:
        return None
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidValue(f"{cursor[:64]!r} is not a cursor", hint="use the cursor of the previous part")
    return SearchPosition(int(match[1]), match[2], int(match[3]), int(match[4]))


def _attempt(call: Call, database: Transactions, run: str, fence: int) -> tuple[int, bool]:
    """Return the requested attempt's number, and True if the attempt writes no more output."""

    def work(db: sa.Connection) -> tuple[int, bool]:
        stored = run_views.visible(db, run, who=call.who, reach=call.reach)
        return fence or stored.fence, stored.state in TERMINAL or 0 < fence < stored.fence

    return database.read(work)
