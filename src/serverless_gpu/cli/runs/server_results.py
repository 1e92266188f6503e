"""Results of a run of the server, as files to be fetched in pieces; their bytes are opaque here."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from serverless_gpu.cli.server_connection import patient_server
from serverless_gpu.lazy_import import load
from serverless_gpu.node.base.home import Home

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.runs import FileView, RunView

_PIECE_BYTES = 16 << 20
_NAME = re.compile(r"results/(\d{1,9})\.pkl", re.ASCII)


class ServedResult:
    """Result of one rank."""

    def __init__(self, connection: Connection, run_id: str, fence: int, file: FileView) -> None:
        self.size = file.size
        self._connection = connection
        self._run_id = run_id
        self._fence = fence
        self._file = file

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes."""
        if self._file.inline is not None:
            yield self._file.inline
            return
        done, path = 0, f"/runs/{self._run_id}/files/{self._file.name}"
        while done < self.size:
            wanted = min(_PIECE_BYTES, self.size - done)
            data = self._connection.get(path, query={"fence": str(self._fence)}, start=done, length=wanted)
            if not data:
                return  # the writer notices that something is missing
            yield data
            done += len(data)


@contextlib.contextmanager
def served_results(home: Home, view: RunView) -> Iterator[dict[int, ServedResult]]:
    """Yield a run's results by rank, readable while the context is open."""
    with patient_server(home.root) as connection:
        answer = load("serverless_gpu.wire.runs").FileList
        found = connection.ask("GET", f"/runs/{view.id}/results", answer=answer)
        by_rank = {
            int(match[1]): ServedResult(connection, view.id, found.fence, file)
            for file in found.files
            if (match := _NAME.fullmatch(file.name)) is not None
        }
        yield dict(sorted(by_rank.items()))
