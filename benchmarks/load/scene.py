"""One server and whoever uses it: probed while it has nothing else to do, then again while it has a great deal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmarks.contestants import ContestantFailed, environment
from benchmarks.load.probe import Probe, Probed, request
from benchmarks.load.servers import MeasuredServer, measured_server
from benchmarks.report import Timing
from serverless_gpu.wire.runs import RunView

T = TypeVar("T")
QUICK = 0.05
LEFT_FREE_BYTES = 8 << 30
KINDS = ("health", "list", "show", "submit", "heartbeat")


def scale(quick: bool) -> float:
    """Return how much of the full load is made."""
    return float(os.environ.get("SGPU_BENCH_SCALE", QUICK if quick else 1.0))


class Scene:
    """A server that answers, a run to look at, and the token of a node to be.

    Attributes:
        server: it.
        directory: scratch space.
        problems: what a reader must know.
    """

    def __init__(self, server: MeasuredServer, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.problems: list[str] = []
        self._node_token = server.node_token("probe")
        asked = request("machine-nowhere", gpu_type="B200")
        self._run = server.asker().get("POST", "/runs", asked, answer=RunView).id

    @contextlib.contextmanager
    def probing(self, seconds: float, *, kinds: Sequence[str] = KINDS) -> Iterator[Callable[[], Probed]]:
        """Probe beside what the block does; what is yielded waits for the end and returns what came."""
        asked = Probe(
            url=self.server.url,
            token=self.server.token,
            seconds=seconds,
            run=self._run,
            node_token=self._node_token,
            kinds=tuple(kinds),
        )
        with child("benchmarks.load.probe", asked, answer=Probed) as finished:

            def probed() -> Probed:
                found = finished()
                if sum(found.failed.values()):
                    self.problems.append(f"refused or not answered: {found.failed}, the first: {found.first_failure}")
                return found

            yield probed

    def probe(self, seconds: float, *, kinds: Sequence[str] = KINDS) -> Probed:
        """Probe for a while."""
        with self.probing(seconds, kinds=kinds) as probed:
            return probed()


@contextlib.contextmanager
def scene(
    *options: str, node: bool = False, needs_bytes: int = 0, place: str | None = None, **variables: str
) -> Iterator[Scene]:
    """Start a server in a fresh directory; both are gone afterwards.

    Args:
        options: of `sgpu up`.
        node: whether this machine is a node of it.
        needs_bytes: what will be written.
        place: directory to make the directory in.
        variables: of the server's environment.

    Raises:
        ContestantFailed: the disk lacks room, or the server did not start.
    """
    directory = Path(tempfile.mkdtemp(prefix="sgpu-load-", dir=place))
    try:
        free = shutil.disk_usage(directory).free
        if free < needs_bytes + LEFT_FREE_BYTES:
            raise ContestantFailed(
                f"{needs_bytes / 1e9:.0f} GB would be written to {directory.parent}, which has {free / 1e9:.0f} GB"
                " free; SGPU_BENCH_SCALE=0.1 writes a tenth"
            )
        with measured_server(directory / "home", *options, node=node, **variables) as server:
            yield Scene(server, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def child(module: str, said: Any, *, answer: type[T], **variables: str) -> Iterator[Callable[[], T]]:
    """Run a module in a process that is given one line; what is yielded returns the line that it ends with."""
    command = [sys.executable, "-m", module]
    environ = {**environment(), **variables}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(said) + b"\n")
        process.stdin.flush()

        def finished() -> T:
            line = process.communicate()[0].strip().rpartition(b"\n")[2]
            if not line:
                raise ContestantFailed(f"{module} ended without a word")
            return msgspec.json.decode(line, type=answer)

        try:
            yield finished
        finally:
            if process.poll() is None:
                process.kill()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that so many are not above; the largest of few."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def everything(label: str, probed: Probed) -> Timing:
    """Return all requests of all kinds as one timing."""
    return Timing(label, tuple(ms for values in probed.ms.values() for ms in values))


def p99(label: str, probed: Probed) -> tuple[Timing, ...]:
    """Return the 99th percentile of each kind of request."""
    return tuple(Timing(f"{label}: {kind}, p99", (percentile(ms, 0.99),)) for kind, ms in probed.ms.items() if ms)


def worst_p99(probed: Probed) -> float:
    """Return the highest of the kinds' 99th percentiles."""
    return max(percentile(ms, 0.99) for ms in probed.ms.values() if ms)
