"""A small environment for tests of `env="snapshot"`: a virtual environment with this package, what it needs, and wheels
that a test makes itself. Capturing all that a developer has installed would take seconds, and this takes 0.2.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

import serverless_gpu
from serverless_gpu.testing import agent_status
from tests.support.local.observe import Process

NEEDED = ("msgspec", "blake3", "backports.zstd", "pathspec", "click")
SOURCE = Path(serverless_gpu.__file__).parents[1]
WORK = """
import os

def code():
    return "first"

def touch(path):
    open(path, "w").close()

def value():
    import toy
    return toy.VALUE
"""
"""A module of the caller's project."""


class SmallEnvironment:
    """A virtual environment of this interpreter or of another one of its version, and a project beside it.

    Attributes:
        python: its interpreter.
        site: its site-packages.
        project: where scripts and modules of the test lie.
        before: what to put before each command, as `tests.support.odd_environments` has it.
    """

    before: tuple[str, ...] = ()

    def __init__(self, directory: Path, *also: str, python: str = "") -> None:
        if python:
            subprocess.run([python, "-m", "venv", "--without-pip", str(directory / "venv")], check=True)
        else:
            venv.create(directory / "venv", symlinks=True, with_pip=False)
        self.python = directory / "venv" / "bin" / "python"
        (self.site,) = (directory / "venv" / "lib").glob("python*/site-packages")
        self.project = directory / "project"
        self.project.mkdir(exist_ok=True)
        for name in with_requirements(*NEEDED, *also):
            self._copy(name)
        (self.site / "source.pth").write_text(f"{SOURCE}\n")  # as an editable installation does

    def _copy(self, name: str) -> None:
        """Install what this interpreter has, file by file."""
        for file in importlib.metadata.files(name) or ():
            source = Path(str(file.locate()))
            if file.suffix == ".pyc" or ".." in file.parts or not source.exists():
                continue
            target = self.site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)

    def install(self, name: str, version: str, files: Mapping[str, str]) -> None:
        """Install a version of a distribution as pip does, in place of the one that is there."""
        self.uninstall(name)
        notes = self.site / f"{name}-{version}.dist-info"
        texts = {
            **files,
            f"{notes.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{notes.name}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{notes.name}/INSTALLER": "pip\n",
        }
        for path, text in texts.items():
            (self.site / path).parent.mkdir(parents=True, exist_ok=True)
            (self.site / path).write_text(text)
        record = [f"{path},{_digest(text)},{len(text.encode())}" for path, text in texts.items()]
        (notes / "RECORD").write_text("\n".join([*record, f"{notes.name}/RECORD,,"]) + "\n")

    def uninstall(self, name: str) -> None:
        """Remove every version of a distribution."""
        for notes in self.site.glob(f"{name}-*.dist-info"):
            for line in (notes / "RECORD").read_text().splitlines():
                (self.site / line.split(",")[0]).unlink(missing_ok=True)
            shutil.rmtree(notes)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the project."""
        path = self.project / name
        path.write_text(text)
        return path

    def start(self, script: Path | str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        """Start a script of the project, as a person would, in a session of its own."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.Popen(
            [*self.before, str(self.python), str(self.project / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.project,
            env={**variables, **environ},
            start_new_session=True,
        )

    def run(self, script: Path | str, *arguments: str, **environ: str) -> tuple[str, str]:
        """Run a script of the project; return what it wrote to stdout and stderr."""
        process = self.start(script, *arguments, **environ)
        try:
            out, err = process.communicate(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        assert process.returncode == 0, err
        return out, err


def with_requirements(*names: str) -> list[str]:
    """Return distributions of this interpreter with all that they need and that is installed, extras left out."""
    found: list[str] = []
    queue = list(names)
    while queue:
        name = re.split(r"[^A-Za-z0-9._-]", queue.pop())[0].lower().replace("_", "-")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            needed = importlib.metadata.distribution(name).requires or []
            if name not in found:
                found.append(name)
                queue += [line for line in needed if "extra ==" not in line]
    return found


class Dialogue:
    """A script that does what it is told, line by line: `print(eval(line))`, errors as their type and text."""

    PROGRAM = """
import importlib, os, sys, threading
import {modules}
from serverless_gpu import distributed, session
from serverless_gpu.errors import ServerlessGpuError

def snapshot(function, *args, **options):
    options = {{"gpus": 1, "gpu_type": "CPU", "env": "snapshot", **options}}
    return distributed(**options)(function).submit(*args)

def call(function, *args, **options):
    run = snapshot(function, *args, **options)
    return run.results(60)[0]

for line in sys.stdin:
    try:
        answer = repr(eval(line))
    except KeyboardInterrupt as error:
        answer = "KeyboardInterrupt"
    except Exception as error:
        answer = type(error).__name__ + ": " + str(error).replace("\\n", " | ")
    print(answer, flush=True)
"""

    def __init__(self, environment: SmallEnvironment, modules: str, **environ: str) -> None:
        environment.write("dialogue.py", self.PROGRAM.format(modules=modules))
        self.process = environment.start("dialogue.py", **environ)
        self._said: str | None = None

    def say(self, line: str) -> None:
        """Give it something to do."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Return its answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.close()
        return line.rstrip("\n")

    def ask(self, line: str) -> str:
        """Have it do something and return its answer."""
        self.say(line)
        return self.hear()

    def close(self) -> str:
        """Let it end; return what it wrote to stderr."""
        if self._said is None:
            try:
                _, self._said = self.process.communicate("", timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                _, self._said = self.process.communicate()
                raise AssertionError(f"it did not end\n{self._said}") from None
        return self._said


def named(name: str, home: Path) -> list[Process]:
    """Return the processes of a home that call themselves so (`ps -o comm`), by what they were started with."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            comm = (entry / "comm").read_text().strip()
            line = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if comm == name and str(home) in line:
            found.append(Process(int(entry.name)))
    return found


def zygote_pids(home: Path) -> list[int]:
    """Return the pids of a home's zygotes."""
    status = agent_status(home)
    return sorted(zygote.pid for zygote in status.zygotes if zygote.pid) if status is not None else []


def describe(environment: SmallEnvironment) -> str:
    """Return what the environment is, for messages of failed tests."""
    return json.dumps(sorted(os.listdir(environment.site))) + sys.version


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def restorer(home: Path) -> Process:
    """Return the restoring process of a home, not one of its children."""
    found = named("sgpu-restore", home)
    parents = [process for process in found if parent_of(process) not in {other.pid for other in found}]
    assert len(parents) == 1
    return parents[0]


def parent_of(process: Process) -> int:
    """Return the pid of a process's parent."""
    try:
        return int((Path("/proc") / str(process.pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return 0


def restoring(home: Path) -> bool:
    """Return whether the agent is waiting for an environment."""
    status = agent_status(home)
    return status is not None and any(each.state == "restoring" for each in status.environments)


def directories(home: Path) -> list[Path]:
    """Return the attempts' directories, oldest first."""
    return sorted(path for path in (home / "runs").glob("*/1"))
