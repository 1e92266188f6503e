"""Output of a server run's ranks, read by rank and offset.

When the server goes away, following waits with one notice and resumes. When the run is tried again, the former
attempt's output is shown to its end, then the next one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from serverless_gpu.cli.output import say
from serverless_gpu.cli.runs.outputs import OutputStream, RunOutput, refuse_missing_attempt
from serverless_gpu.cli.runs.run_endings import fetch_ending
from serverless_gpu.cli.server_connection import patient_server
from serverless_gpu.client.runs.outcome import failed_rank
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.node.base.home import Home

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.runs import RunView

_LOOK_S_MAX = 1.0
_ASKED_MAX = 64
_READ_BYTES = 1 << 20


@contextlib.contextmanager
def served_output(home: Home, view: RunView, attempt: int | None = None) -> Iterator[RunOutput]:
    """Yield the output of a server's run; attempt None means the last and later ones."""
    with patient_server(home.root) as connection:
        yield ServedOutput(connection, view, attempt)


class ServedOutput(RunOutput):
    """Output of a server's run; attempt None means the last and later ones."""

    look_s_max = _LOOK_S_MAX

    def __init__(self, connection: Connection, view: RunView, attempt: int | None = None) -> None:
        if attempt is not None:
            refuse_missing_attempt(view.id, attempt, view.fence)
        self.run_id = view.id
        self._connection = connection
        self._view = view
        self._fence = view.fence if attempt is None else attempt
        self._is_last = attempt is None
        self._sources: list[_Log] = []
        self._next = 0

    def ranks(self) -> int:
        """Return how many ranks there are, as far as that is known."""
        return self._view.processes or 1

    def written(self) -> list[int]:
        """Return the ranks that wrote anything."""
        ranks = range(min(self.ranks(), _ASKED_MAX))
        return [
            rank
            for rank in ranks
            if any(
                _Log(self._connection, self.run_id, self._fence, rank, stream).size() for stream in ("stdout", "stderr")
            )
        ]

    def failed_rank(self) -> int | None:
        """Return the first rank that failed; None where no rank did, or another attempt was asked for."""
        if self._view.state is not State.FAILED or self._fence != self._view.fence:
            return None
        found = fetch_ending(self._view)
        return None if found is None else failed_rank(found.stopped)

    def source(self, rank: int, stream: str) -> OutputStream:
        """Return one stream of one rank."""
        source = _Log(self._connection, self.run_id, self._fence, rank, stream)
        self._sources.append(source)
        return source

    def goes_on(self) -> bool:
        """Return whether more output may come; move to the next attempt once the former was shown."""
        if self._next:
            if self._fence:
                say(f"sgpu: attempt {self._next} of run {self.run_id}", err=True)
            self._fence, self._next = self._next, 0
            for source in self._sources:
                source.turn_to(self._fence)
        run_view = load("serverless_gpu.wire.runs").RunView
        self._view = self._connection.ask("GET", f"/runs/{self.run_id}", answer=run_view)
        if self._view.fence > self._fence:
            self._next = self._view.fence if self._is_last else 0
            return self._is_last
        return self._view.state not in TERMINAL


class _Log(OutputStream):
    def __init__(self, connection: Connection, run_id: str, fence: int, rank: int, stream: str) -> None:
        super().__init__(rank, stream)
        self._connection = connection
        self._path = f"/runs/{run_id}/logs/{rank}/{stream}"
        self._fence = fence
        self._complete = False

    def turn_to(self, fence: int) -> None:
        """Go on with the start of another attempt."""
        self._fence, self._offset, self._complete = fence, 0, False

    def pieces(self) -> Iterator[bytes]:
        """Yield new output since the last call, with as few requests as possible."""
        while self._fence and not self._complete:
            data, headers = self._fetch(self._offset, _READ_BYTES)
            self._offset += len(data)
            self._complete = headers.get("SGPU-Complete") == "1"
            if data:
                self.has_written = True
                yield data
            if len(data) < _READ_BYTES:
                return

    def size(self) -> int:
        """Return how much there is now, in bytes."""
        return int(self._fetch(0, 1)[1].get("SGPU-Size", 0)) if self._fence else 0

    def read(self, offset: int, size: int) -> bytes:
        """Return at most so many bytes from there on."""
        return self._fetch(offset, size)[0] if self._fence else b""

    def _fetch(self, offset: int, size: int) -> tuple[bytes, Mapping[str, str]]:
        query = {"fence": str(self._fence), "offset": str(offset), "limit": str(size)}
        return self._connection.fetch(self._path, query=query)
