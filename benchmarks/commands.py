"""CPU time of commands beside that of Python itself: what a shell, a prompt or a script pays for each of them.

User and system time of the child process and what it waited for (`RUSAGE_CHILDREN`), in turns, in one run. Time on the
wall is not compared: it depends on what else the machine does.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.report import Row, Timing
from serverless_gpu.client.remote.profile import ServerProfile, write_profile

VERSION_RATIO_MAX = 6.0
RUNS_RATIO_MAX = 14.0
ROUNDS, ROUNDS_QUICK = 40, 8
_RUNS = 20
_SGPU = ("-c", "import sys; from serverless_gpu.cli import main; main()")
_NOTHING = b'{"runs": [], "cursor": "", "costs": []}'


def version(quick: bool) -> Row:
    """`sgpu --version`, and `sgpu --help` beside it."""
    with _home() as environ:
        cases = {"nothing": ("-c", "pass"), "version": (*_SGPU, "--version"), "help": (*_SGPU, "--help")}
        found = _in_turns({name: (words, environ) for name, words in cases.items()}, quick=quick)
    return _row(
        "cli-version: CPU of `sgpu --version`",
        Timing("`sgpu --version`", found["version"]),
        Timing("`python -c pass`", found["nothing"]),
        limit=VERSION_RATIO_MAX,
        also=(Timing("`sgpu --help`", found["help"]),),
    )


def runs(quick: bool) -> Row:
    """`sgpu runs` in a home with 20 runs; beside it the same with a server that has none."""
    with _home() as environ, _home() as other, _server() as url:
        write_profile(Path(other["SERVERLESS_GPU_HOME"]), ServerProfile(url=url, token="sgpu_benchmark"))
        found = _in_turns(
            {
                "nothing": (("-c", "pass"), environ),
                "runs": ((*_SGPU, "runs"), environ),
                "server": ((*_SGPU, "runs"), other),
            },
            quick=quick,
        )
    return _row(
        f"cli-runs: CPU of `sgpu runs`, {_RUNS} runs of this machine",
        Timing("`sgpu runs`", found["runs"]),
        Timing("`python -c pass`", found["nothing"]),
        limit=RUNS_RATIO_MAX,
        also=(Timing("with a server", found["server"]),),
    )


def _row(name: str, ours: Timing, nothing: Timing, *, limit: float, also: tuple[Timing, ...]) -> Row:
    ratio = ours.median / nothing.median
    worst = max(ratio, *(each.median / nothing.median for each in also))
    beside = ", ".join(f"{each.label} {each.median / nothing.median:.1f}×" for each in also)
    return Row(
        name=name,
        ours=ours,
        against=(nothing,),
        bar=f"≤ {limit:.0f}×, each",
        met=worst <= limit,
        value=f"{ratio:.1f}× ({beside})",
        also=also,
    )


def _in_turns(
    cases: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], *, quick: bool
) -> dict[str, tuple[float, ...]]:
    """Return the CPU milliseconds of each case in each round; the first round is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(1 + (ROUNDS_QUICK if quick else ROUNDS)):
        for name, (words, environ) in cases.items():
            before = _children_s()
            subprocess.run([sys.executable, *words], env=environ, stdout=subprocess.DEVNULL, check=True)
            found[name].append((_children_s() - before) * 1000)
    return {name: tuple(values[1:]) for name, values in found.items()}


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _home() -> Iterator[dict[str, str]]:
    """Yield the variables of a home that has some runs."""
    with tempfile.TemporaryDirectory(prefix="sgpu-bench-") as directory:
        for number in range(_RUNS):
            attempt = Path(directory) / "runs" / f"01m7wtgc0mdrq1jtwz87xq{number:04d}" / "1"
            attempt.mkdir(parents=True)
            (attempt / "spec.json").write_text('{"world_size": 1, "spec": {"name": "train"}}')
        own = {name: text for name, text in os.environ.items() if not name.startswith(("SERVERLESS_GPU", "SGPU"))}
        yield {**own, "SERVERLESS_GPU_HOME": directory}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(_NOTHING)))
        self.end_headers()
        self.wfile.write(_NOTHING)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def _server() -> Iterator[str]:
    """Yield the address of a server without runs; its CPU time is this process's, and not counted."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


ROWS = {"cli-version": version, "cli-runs": runs}
