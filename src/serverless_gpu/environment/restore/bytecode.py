"""Compiles the bytecode of units on each node, because captures never contain bytecode.

    modules that the caller had loaded ─ compiled before the first use of an environment
    all other modules                  ─ compiled while the node is idle (`compile_rest`)

The interpreter of the environment compiles verified source. The bytecode goes to `__pycache__` beside the sources,
under names with the interpreter's tag. Several interpreters can therefore share a unit. A mounted environment contains
its bytecode. Two compiler processes (`compiler_process.py`) share the files, and use the environment's interpreter. The
compiler processes run without an environment and never execute code of a unit, not even `.pth` files.

Failure cases: A file stays without bytecode if the file does not compile, takes too long or crashes its compiler
process. All remaining files stay without bytecode if the disk is full or the interpreter does not start. After a crash,
a new compiler process compiles the remaining files.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.environment.documents import FileRow, ProgressPoint, Report, ignore_progress
from serverless_gpu.environment.restore import compiler_process

PROCESSES = 2
FILE_S_MAX = 60.0
_BATCH = 64
_DEATHS_MAX = 20  # After this number of crashed compiler processes, the remaining files stay uncompiled.
_MEMORY_BYTES = 4 * 1024**3
_PROGRAM = str(Path(compiler_process.__file__))


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """A file to compile: the source, the path of the bytecode, and the size recorded in the unit."""

    source: str
    target: str
    size: int


def compile_jobs(
    directory: Path, rows: Sequence[FileRow], tag: str, only: Collection[str] | None = None
) -> list[CompileJob]:
    """Return the files of a unit that have no bytecode.

    `tag` names the interpreter, for example ``cpython-311``. `only` restricts the result to some row paths. None
    selects all files.
    """
    taken = {row.path for row in rows if row.kind != "d"}
    found = []
    for row in rows:
        if not (row.path.startswith("site/") and row.path.endswith(".py") and row.has_content):
            continue
        folder, _, name = row.path.rpartition("/")
        target = f"{folder}/__pycache__/{name[:-3]}.{tag}.pyc"
        # A unit may itself contain a file with the name of the bytecode. The compiler never replaces a file of a unit.
        if (only is None or row.path in only) and target not in taken and f"{folder}/__pycache__" not in taken:
            found.append(CompileJob(source=f"{directory}/{row.path}", target=f"{directory}/{target}", size=row.size))
    return [job for job in found if not os.path.lexists(job.target)]


def compile_all(
    work: Sequence[CompileJob], python: str, *, report: Report = ignore_progress, patience_s: float = FILE_S_MAX
) -> int:
    """Compile files in two processes and return the number of files that have bytecode now.

    `python` is the interpreter without an environment. `patience_s` limits the seconds for one file.
    """
    waiting = list(reversed(work))
    crew: list[_Worker] = []
    deaths = made = done = 0
    try:
        while waiting or any(worker.jobs for worker in crew):
            while len(waiting) > _BATCH * len(crew) and len(crew) < PROCESSES and deaths < _DEATHS_MAX:
                crew.append(_Worker(python))
            for worker in crew:
                if waiting and not worker.jobs:
                    worker.take([waiting.pop() for _ in range(min(_BATCH, len(waiting)))], patience_s)
            if not crew:
                break
            if running := [worker for worker in crew if not worker.over]:
                select.select(running, [], [], 0.2)
            for worker in list(crew):
                finished, compiled = worker.look(patience_s)
                done += finished
                made += compiled
                if worker.over:
                    crew.remove(worker)
                    deaths += 1
                    waiting += reversed(worker.rest())
            report(ProgressPoint(phase="compile", files_done=done, files_total=len(work)))
    finally:
        for worker in crew:
            worker.end()
    return made


class _Worker:
    """A process that compiles one batch of files after another."""

    def __init__(self, python: str) -> None:
        self.jobs: list[CompileJob] = []
        self._next = 0
        self._deadline = 0.0
        self._buffer = b""
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [python, "-I", "-S", "-B", "-X", "utf8", _PROGRAM, str(_MEMORY_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                bufsize=0,
            )
        self.over = self._process is None

    def take(self, batch: list[CompileJob], patience_s: float) -> None:
        """Send a batch of files. The pipe buffers the batch, or the process reads the batch during the write."""
        self.jobs, self._next = batch, 0
        self._deadline = time.monotonic() + patience_s
        lines = "".join(json.dumps([job.source, job.target, job.size]) + "\n" for job in batch)
        if self._process is None or self._process.stdin is None:
            self.over = True
            return
        with contextlib.suppress(BrokenPipeError):  # The process has exited; `look` notices the missing answers.
            self._process.stdin.write(lines.encode())

    def fileno(self) -> int:
        """Return the descriptor that delivers the answers of the process."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def look(self, patience_s: float) -> tuple[int, int]:
        """Read the process's answers, and return the numbers of finished files and of compiled files."""
        if self.over or self._process is None:
            return 0, 0
        finished = compiled = 0
        if select.select([self], [], [], 0)[0]:
            data = os.read(self.fileno(), 65536)
            self.over = not data
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            finished = len(lines)
            compiled = sum(line.endswith(b" 1") for line in lines)
            self._next += finished
            self._deadline = time.monotonic() + patience_s
        if self._next >= len(self.jobs):
            self.jobs = []
        elif time.monotonic() > self._deadline:
            self.over = True
        if self.over:
            self.end()
        return finished, compiled

    def rest(self) -> list[CompileJob]:
        """Return the unfinished files, without the file that the terminated process was compiling."""
        return self.jobs[self._next + 1 :]

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
