"""`sgpu result`: copies the results of ranks into a directory.

The command copies pickled results without loading them, because unpickling executes code. The command raises an error
for a run that has not ended. The command downloads results from a server in pieces. If a download fails, the command
leaves no incomplete copy.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from serverless_gpu.cli.completion import complete_run
from serverless_gpu.cli.output import JsonType, json_option, print_json, say
from serverless_gpu.cli.runs.run_location import locate, queued_runs, this_home
from serverless_gpu.cli.server_connection import patient_server
from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import TERMINAL
from serverless_gpu.node.attempt.history import read_run
from serverless_gpu.node.base.home import Home, storage_error
from serverless_gpu.node.base.private_files import replacing_file
from serverless_gpu.units import format_bytes

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection
    from serverless_gpu.wire.runs import FileView, RunView

_PIECE_BYTES = 4 << 20
_SERVED_PIECE_BYTES = 16 << 20
_NAME = re.compile(r"results/(\d{1,9})\.pkl", re.ASCII)


class Result(NamedTuple):
    """Size and content of one rank's result."""

    size: int
    pieces: Iterator[bytes]


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
@click.option(
    "--rank", default="all", show_default=True, metavar="N|all", help="Rank whose result the command copies, or all."
)
@click.option(
    "--output",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the copies (default: a directory with the run's identifier).",
)
@json_option(JsonType("cli.json_types:ResultCopy", is_list=True))
def result(run: str | None, rank: str, directory: Path | None, as_json: bool) -> None:
    """Copy the results of ranks to files.

    Each result becomes <rank>.pkl in a directory. The command prints the paths of the copies. The command does not
    unpickle results, because unpickling executes the author's code. To load a result in Python, call
    `serverless_gpu.attach(RUN).result(rank)`. RUN is a run identifier, or the beginning or end of a run identifier.
    Without RUN, the command selects the latest run.
    """
    home = this_home()
    found = locate(home, run)
    target = Path(found.run_id) if directory is None else directory
    with contextlib.ExitStack() as stack:
        if found.view is None:
            record = read_run(home.runs, found.run_id, queued_runs(home))
            paths = [path for path in (record.directory / "results").glob("*.pkl") if path.stem.isdecimal()]
            paths.sort(key=lambda path: int(path.stem))
            state, results = record.state, {int(p.stem): Result(p.stat().st_size, _pieces(p)) for p in paths}
        else:
            state, served = found.view.state.value, stack.enter_context(served_results(home, found.view))
            results = {number: Result(each.size, each.pieces()) for number, each in served.items()}
        chosen = _select_results(found.run_id, state, results, rank)
        copied = [
            (number, write_result(result, target / f"{number}.pkl"), result.size) for number, result in chosen.items()
        ]
    if as_json:
        print_json([{"rank": number, "path": str(path), "size_bytes": size} for number, path, size in copied])
        return
    for _, path, _ in copied:
        say(str(path))
    total = format_bytes(sum(size for _, _, size in copied))
    say(f"sgpu: copied {total}. In Python, call serverless_gpu.attach({found.run_id!r}).results()", err=True)


def _select_results(run_id: str, state: str, results: dict[int, Result], rank: str) -> dict[int, Result]:
    """Return the selected results. Raise InvalidValue if the run has not ended or the rank has no result."""
    if state not in TERMINAL:
        raise InvalidValue(f"run {run_id} is {state} and has no results yet", hint=f"sgpu attach {run_id}")
    if rank == "all":
        if not results:
            raise InvalidValue(f"run {run_id} is {state} and has no results", hint=f"sgpu show {run_id}")
        return results
    if not (rank.isascii() and rank.isdigit() and int(rank) in results):
        there = f"ranks that returned: {', '.join(map(str, results))}" if results else f"sgpu show {run_id}"
        raise InvalidValue(f"run {run_id} has no result of rank {rank!r}", hint=there)
    return {int(rank): results[int(rank)]}


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_PIECE_BYTES):
            yield data


def write_result(result: Result, path: Path) -> Path:
    """Write a result atomically to a file that only the current user can read."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path, mode=0o600) as beside, beside.open("wb") as file:
            file.writelines(result.pieces)
            if file.tell() != result.size:
                raise StorageError(
                    f"{path} would contain only {file.tell()} of {result.size} bytes of the result", hint="try again"
                )
    except OSError as error:
        raise storage_error(error, path) from None
    return path


class ServedResult:
    """One rank's result on the server."""

    def __init__(self, connection: Connection, run_id: str, fence: int, file: FileView) -> None:
        self.size = file.size
        self._connection = connection
        self._run_id = run_id
        self._fence = fence
        self._file = file

    def pieces(self) -> Iterator[bytes]:
        """Yield the result's bytes in pieces."""
        if self._file.inline is not None:
            yield self._file.inline
            return
        done, path = 0, f"/runs/{self._run_id}/files/{self._file.name}"
        while done < self.size:
            wanted = min(_SERVED_PIECE_BYTES, self.size - done)
            data = self._connection.get(path, query={"fence": str(self._fence)}, start=done, length=wanted)
            if not data:
                return  # `write_result` detects missing bytes.
            yield data
            done += len(data)


@contextlib.contextmanager
def served_results(home: Home, view: RunView) -> Iterator[dict[int, ServedResult]]:
    """Yield a server run's results by rank. The results are readable until the context ends."""
    with patient_server(home.root) as connection:
        answer = load("serverless_gpu.wire.runs").FileList
        found = connection.ask("GET", f"/runs/{view.id}/results", answer=answer)
        by_rank = {
            int(match[1]): ServedResult(connection, view.id, found.fence, file)
            for file in found.files
            if (match := _NAME.fullmatch(file.name)) is not None
        }
        yield dict(sorted(by_rank.items()))
