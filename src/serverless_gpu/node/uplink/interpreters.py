"""Rules for interpreters that a client of a server may name, and for their options.

A node starts the interpreter before the run's ranks exist. So a client names an existing one that others cannot
replace. Options change how it behaves; those that name code or a file (`-c`, `-m`) are refused.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence

from serverless_gpu.errors import InvalidValue

FLAGS_MAX = 64
FLAG_CHARACTERS_MAX = 1_000
_NAME = re.compile(r"(python|pypy)[0-9.]*(t|d|-dbg|-debug|-intel64)?")
_LETTERS = re.compile(r"-[bBdEIOPqRsSuv]+")
_WARNING = re.compile(r"-W[^\0]+")
_X_OPTIONS = frozenset(
    {
        "context_aware_warnings",
        "cpu_count",
        "dev",
        "disable_remote_debug",
        "faulthandler",
        "frozen_modules",
        "gil",
        "importtime",
        "int_max_str_digits",
        "no_debug_ranges",
        "perf",
        "perf_jit",
        "pycache_prefix",
        "showrefcount",
        "thread_inherit_context",
        "tracemalloc",
        "utf8",
        "warn_default_encoding",
    }
)
_MEND = "start the client with an interpreter like that, or use env='snapshot'"


def check_python(python: str) -> None:
    """Refuse (InvalidValue) all but the absolute path of a Python that others cannot replace."""
    shown = python[:FLAG_CHARACTERS_MAX]
    if not python.startswith("/") or "\0" in python or os.path.normpath(python) != python:
        raise InvalidValue(f"the interpreter {shown!r} is not an absolute path without `..`", hint=_MEND)
    try:
        real = os.path.realpath(python, strict=True)
        mode = os.stat(real).st_mode
    except OSError as error:
        raise InvalidValue(f"the interpreter {shown!r} cannot be used: {error.strerror}", hint=_MEND) from None
    if not _NAME.fullmatch(os.path.basename(python)) and not _NAME.fullmatch(os.path.basename(real)):
        raise InvalidValue(f"{shown!r} is not the name of a Python", hint="python, python3, python3.12, pypy3")
    if not stat.S_ISREG(mode) or not os.access(real, os.X_OK):
        raise InvalidValue(f"the interpreter {shown!r} is no program that this node may start", hint=_MEND)
    for path in dict.fromkeys((*_places(python), *_places(real))):
        if _anybody_may_change(path):
            raise InvalidValue(
                f"the interpreter {shown!r} could be replaced by anybody: {path} is writable by others",
                hint=f"chmod o-w {path}",
            )


def check_flags(flags: Sequence[str]) -> None:
    """Refuse (InvalidValue) options that name code to run, or are unknown."""
    if len(flags) > FLAGS_MAX or any(len(flag) > FLAG_CHARACTERS_MAX for flag in flags):
        raise InvalidValue(f"an interpreter takes at most {FLAGS_MAX} options of {FLAG_CHARACTERS_MAX} characters")
    rest = iter(flags)
    for flag in rest:
        if _LETTERS.fullmatch(flag) or _WARNING.fullmatch(flag):
            continue
        value = next(rest, "") if flag == "-X" else flag[2:] if flag.startswith("-X") else ""
        if value.partition("=")[0] not in _X_OPTIONS or "\0" in value:
            raise InvalidValue(
                f"an interpreter is not started with the option {flag!r}{f' {value!r}' if flag == '-X' else ''}",
                hint="options that change how it behaves are taken (-O, -u, -W, -X utf8); those that name code are not",
            )


def _places(path: str) -> list[str]:
    """Return a path and the directories above it."""
    found = [path]
    while path != "/":
        path = os.path.dirname(path)
        found.append(path)
    return found


def _anybody_may_change(path: str) -> bool:
    """Return whether others may replace a path; targets of links are checked by their own names."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & stat.S_IWOTH:
        return False
    return not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)  # a sticky one protects its entries
