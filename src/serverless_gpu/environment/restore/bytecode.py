"""Compiles bytecode for units on each node, because captures never contain bytecode.

    modules that the caller had loaded ─ compiled before the first use of an environment
    all other modules                  ─ compiled while the node is idle (`compile_rest`)

Two compiler processes (`compiler_process.py`) run the environment's interpreter and compile verified source files. The
bytecode goes to `__pycache__` directories, with the interpreter's tag in the file name. Interpreters of different
versions can therefore share a unit. A mounted environment includes the bytecode. Compiler processes run without an
environment and never execute code of a unit, not even `.pth` files.

Failure cases: A file gets no bytecode if it does not compile, exceeds the time limit or crashes the compiler process.
After a crash, a new compiler process compiles the remaining files. Remaining files get no bytecode if the disk is full
or the interpreter does not start.
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
_DEATHS_MAX = 20  # Maximum number of crashed compiler processes.
_MEMORY_BYTES = 4 * 1024**3
_PROGRAM = str(Path(compiler_process.__file__))


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """A source file to compile: source path, bytecode path, and recorded source size."""

    source: str
    target: str
    size: int


def compile_jobs(
    directory: Path, rows: Sequence[FileRow], tag: str, only: Collection[str] | None = None
) -> list[CompileJob]:
    """Return a compile job for each file of a unit without bytecode.

    `tag` names the interpreter, for example ``cpython-311``. If `only` is not None, the result contains only files with
    these row paths.
    """
    taken = {row.path for row in rows if row.kind != "d"}
    found = []
    for row in rows:
        if not (row.path.startswith("site/") and row.path.endswith(".py") and row.has_content):
            continue
        folder, _, name = row.path.rpartition("/")
        target = f"{folder}/__pycache__/{name[:-3]}.{tag}.pyc"
        # The compiler never replaces a unit's file, even if the file has the bytecode's name.
        if (only is None or row.path in only) and target not in taken and f"{folder}/__pycache__" not in taken:
            found.append(CompileJob(source=f"{directory}/{row.path}", target=f"{directory}/{target}", size=row.size))
    return [job for job in found if not os.path.lexists(job.target)]


def compile_all(
    work: Sequence[CompileJob], python: str, *, report: Report = ignore_progress, patience_s: float = FILE_S_MAX
) -> int:
    """Compile files in two processes, and return the number of files with bytecode afterwards.

    `python` is the environment's base interpreter. `patience_s` is the time limit for one file in seconds.
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
    """Controls a compiler process that compiles one batch of files after another."""

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
        """Send a batch of files to the compiler process."""
        self.jobs, self._next = batch, 0
        self._deadline = time.monotonic() + patience_s
        lines = "".join(json.dumps([job.source, job.target, job.size]) + "\n" for job in batch)
        if self._process is None or self._process.stdin is None:
            self.over = True
            return
        with contextlib.suppress(BrokenPipeError):  # If the process has exited, `look` detects the missing answers.
            self._process.stdin.write(lines.encode())

    def fileno(self) -> int:
        """Return the file descriptor of the compiler process's answers."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def look(self, patience_s: float) -> tuple[int, int]:
        """Read answers of the compiler process, and return the numbers of finished and compiled files."""
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
        """Return the unfinished files, except the file that the process was compiling at its end."""
        return self.jobs[self._next + 1 :]

    def end(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
