"""Starting our own processes: clean interpreters that see nothing of the user's environment, and zygotes that see all
of it.

Agent and supervisor run under `-I -S`: no `PYTHON*` variables, no user site, and no `.pth` files, which execute code at
start even under `-I`. Their search path is the standard library, then the directories our own few dependencies lie in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.node.entrypoint import zygote_program

_PACKAGE = Path(__file__).resolve().parent.parent

# What a clean process gets of the caller's environment. HOME and the like are for libraries that insist on a home
# directory.
_CLEAN_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "SERVERLESS_GPU_SOCKETS",
    "LD_LIBRARY_PATH",
    "SERVERLESS_GPU_CGROUPS",
    "SERVERLESS_GPU_TASKS_MAX",
)

LOG_BYTES_MAX = 10_000_000

STARTUP_PREFIXES = (
    "LD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "GOMP_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "TORCH",
    "PYTORCH",
)
"""Variables that are read once, when an interpreter or a library starts: they are part of what a zygote is."""


def clean_process(
    module: str, arguments: Sequence[object], *, fds: Sequence[int], log: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `main(*arguments)` of one of our modules in a clean interpreter and a session of its own.

    Args:
        module: full name of the module.
        arguments: literals passed to its `main`.
        fds: descriptors it inherits under the same numbers.
        log: descriptor for its stdout and stderr.
        environ: the caller's variables, of which a few are passed on.

    Raises:
        OSError: no process can be started.
    """
    paths = [str(_PACKAGE.parent), str(Path(msgspec.__file__).parent.parent)]
    program = f"import sys; sys.path += {paths!r}; from {module} import main; main(*{list(arguments)!r})"
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env=clean_variables(environ),
        pass_fds=tuple(fds),
        start_new_session=True,
    )


def clean_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the few variables that our own processes get."""
    return {name: environ[name] for name in _CLEAN_VARIABLES if name in environ}


def startup_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that decide how an interpreter and its libraries start."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(STARTUP_PREFIXES)}


def zygote_process(
    python: str, flags: Sequence[str], environ: Mapping[str, str], preload: Sequence[str], *, channel_fd: int, log: int
) -> subprocess.Popen[bytes]:
    """Start a zygote in the user's interpreter.

    Args:
        python: the user's interpreter.
        flags: the interpreter options of the caller.
        environ: the caller's variables; those read at start, and a few every program expects, are passed on.
        preload: modules to import ahead.
        channel_fd: its end of the channel to the agent.
        log: descriptor for its stdout and stderr.

    Raises:
        OSError: the interpreter cannot be started.
    """
    return subprocess.Popen(
        [python, *flags, "-c", zygote_program(channel_fd, preload)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        env={**clean_variables(environ), **startup_variables(environ)},
        pass_fds=(channel_fd,),
        start_new_session=True,
    )


def open_log(path: Path) -> int:
    """Return a descriptor that appends to a log file of bounded size."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    bound_log(fd)
    return fd


def bound_log(fd: int) -> None:
    """Start a log file anew when it has grown over 10 MB."""
    if os.fstat(fd).st_size > LOG_BYTES_MAX:
        os.ftruncate(fd, 0)
