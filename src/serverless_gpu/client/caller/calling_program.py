"""The calling program: its name, its user and the commit of its code.

Reads files and this process, starts no process and imports nothing. What is unknown is "".
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from serverless_gpu.model.spec import Command

INTERACTIVE = "interactive"
_SESSION = "JPY_SESSION_NAME"  # of Jupyter: the notebook a kernel belongs to
_EDITOR = "__vsc_ipynb_file__"  # VS Code's variable in the notebook, with its path
_NOTEBOOK = ".ipynb"
_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_ABOVE_MAX = 64
_SMALL_BYTES = 4_096
_PACKED_BYTES_MAX = 4_000_000

_packed: dict[Path, tuple[tuple[int, int], str]] = {}  # file of packed references → what it was, and its text


class Program(NamedTuple):
    """The calling program."""

    name: str  # without directory and ending; `INTERACTIVE` without a file
    path: str = ""  # or ""
    kind: Literal["LOCAL", "NOTEBOOK"] = "LOCAL"  # MLflow's name for it


class Commit(NamedTuple):
    """Commit and branch of a repository; "" where unknown."""

    commit: str = ""
    branch: str = ""


def calling_program(environ: Mapping[str, str]) -> Program:
    """Return the script or notebook this process runs."""
    main = sys.modules.get("__main__")
    if "ipykernel" in sys.modules:
        path = str(getattr(main, _EDITOR, "") or environ.get(_SESSION, ""))
        name, ending, _ = os.path.basename(path).partition(_NOTEBOOK)  # VS Code adds something of its own after it
        if name and ending:
            return Program(name, os.path.join(os.path.dirname(path), name + ending), "NOTEBOOK")
        return Program(INTERACTIVE, kind="NOTEBOOK")
    path = str(getattr(main, "__file__", None) or "")
    if not path:
        return Program(INTERACTIVE)
    path = os.path.abspath(path)
    name = Path(path).stem
    if name == "__main__":  # python -m package
        name = os.path.basename(os.path.dirname(path))
    return Program(name, path)


def submitted_program(command: Command) -> Program:
    """Return the script or module that a command runs, or the program where it names none."""
    if command.argv[1:2] == ("-m",) and len(command.argv) > 2:
        return Program(command.argv[2])
    script = next((argument for argument in command.argv if argument.endswith(".py")), command.argv[0])
    path = os.path.abspath(script) if os.path.exists(script) else script
    return Program(Path(script).stem or INTERACTIVE, path)


def user_name() -> str:
    """Return the user's name, or the number without one."""
    try:
        return getpass.getuser()
    except (ImportError, KeyError, OSError):  # by version of Python
        return f"uid {os.getuid()}"


def commit_of(directory: Path) -> Commit:
    """Return the commit that is checked out where a directory is, as the files of its repository say."""
    try:
        for above in (directory, *directory.parents)[:_ABOVE_MAX]:
            git = above / ".git"
            if os.path.lexists(git):
                # In a worktree or a submodule `.git` is a file that names the repository's own directory.
                return _head(git if git.is_dir() else above / _read(git).removeprefix("gitdir:").strip())
    except (OSError, ValueError):
        pass
    return Commit()


def _head(git: Path) -> Commit:
    text = _read(git / "HEAD").strip()
    if not text.startswith("ref:"):
        return Commit(text) if _COMMIT.fullmatch(text) else Commit()
    reference = text.removeprefix("ref:").strip()
    if not reference.startswith("refs/") or ".." in reference:
        return Commit()
    common = git
    with contextlib.suppress(OSError):  # a worktree has branches in common with its repository
        common = git / _read(git / "commondir").strip()
    branch = reference.removeprefix("refs/heads/")
    with contextlib.suppress(OSError):
        commit = _read(common / reference).strip()
        if _COMMIT.fullmatch(commit):
            return Commit(commit, branch)
    return Commit(_in_packed(common / "packed-refs", reference), branch)


def _in_packed(file: Path, reference: str) -> str:
    try:
        found = file.stat()
    except OSError:
        return ""
    if found.st_size > _PACKED_BYTES_MAX:
        return ""
    state = (found.st_mtime_ns, found.st_size)
    known = _packed.get(file)
    if known is None or known[0] != state:
        _packed.clear()
        known = _packed[file] = (state, _read(file, _PACKED_BYTES_MAX))
    for line in known[1].splitlines():
        commit, _, name = line.partition(" ")
        if name == reference and _COMMIT.fullmatch(commit):
            return commit
    return ""


def _read(file: Path, most: int = _SMALL_BYTES) -> str:
    # Never a pipe or a device, which would be waited for.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, encoding="utf-8", errors="replace") as opened:
        return opened.read(most)
