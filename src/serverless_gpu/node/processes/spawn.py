"""Starts clean interpreters for this package and zygotes in the user's environment.

The agent and the supervisor run with `-I -S`, which ignores `PYTHON*` variables, the user site and `.pth` files.
Without `-S`, an interpreter executes `.pth` files at start, even with `-I`. A clean interpreter's search path contains
only the standard library, this package and its few dependencies.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from serverless_gpu import faults
from serverless_gpu.ambient import CLOCK_FAULT
from serverless_gpu.node.inside import protocol

if TYPE_CHECKING:  # Every client imports this module, and none of them makes a sandbox.
    from serverless_gpu.node.inside.sandbox import View

PACKAGE = Path(__file__).resolve().parents[2]
"""Directory of this package."""
INSIDE = PACKAGE / "node" / "inside"
"""Directory of the ranks' runtime, which programs in the user's interpreter load as `_sgpu_inside`."""

_LOAD = """\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_sgpu_inside", {init!r}, submodule_search_locations=[{directory!r}])
runtime = sys.modules["_sgpu_inside"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
"""

# Environment variables that a clean process inherits from the caller. Some libraries require HOME and similar
# variables. Captures need some of the variables to find the user's git patterns. Restores need some of the variables to
# find interpreters. Only tests set the last two variables of `_CLEAN_VARIABLES`.
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
    "SERVERLESS_GPU_PRELOAD",
    "SERVERLESS_GPU_TASKS_MAX",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "UV_PYTHON_INSTALL_DIR",
    "PYENV_ROOT",
    "SERVERLESS_GPU_UIDS",
    "SERVERLESS_GPU_PRINCIPALS",
    "SERVERLESS_GPU_SPAWNER",
    "SERVERLESS_GPU_ACCOUNTS",
    faults.VARIABLE,
    CLOCK_FAULT,
)

_DEPENDENCIES = ("msgspec", "blake3", "backports", "pathspec", "obstore", "httpx2", "psutil", "pynvml")

PRELOAD = ("numpy", "torch", "torch.distributed")
PRELOAD_ROOTS = ("numpy", "torch")

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
"""Prefixes of variables that an interpreter or a library reads only at start. A zygote's key includes these
variables."""

SET_BY_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK": ("True", "TRUE"),  # scikit-learn, threadpoolctl and torch's inductor set these values.
    "KMP_INIT_AT_FORK": ("FALSE",),  # scikit-learn and joblib set this value.
    "PYTHONBREAKPOINT": ("ray.util.rpdb.set_trace", "ray.util.rpdb._driver_set_trace"),  # Ray sets these values.
    "PYTORCH_ENABLE_MPS_FALLBACK": ("1",),  # Accelerate sets this value.
    "PYTORCH_NVML_BASED_CUDA_CHECK": ("1",),  # Lightning sets this value.
    "TORCHINDUCTOR_CACHE_DIR": (),  # Torch's inductor sets this variable to any directory.
    "TORCH_WARM_POOL": ("0",),  # Torch's inductor sets this value.
}
"""Start-up variables that libraries set on import, with the possible values; () for any value.

The value of a library's variable shows which libraries the caller has imported, not how an interpreter must start. A
warm interpreter without a library's variable therefore serves the caller too. Ranks get library variables like all
other variables of the caller.
"""


def clean_process(
    module: str, arguments: Sequence[object], *, fds: Sequence[int], log: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `main(*arguments)` of a module of this package in a clean interpreter and a new session.

    The clean process inherits `fds` under the same numbers and writes to `log`. The clean process gets only a few of
    the caller's environment variables. Raises OSError.
    """
    paths = search_path()
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


def preload(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the installed modules that zygotes import before they fork.

    `SERVERLESS_GPU_PRELOAD` is a comma-separated selection from `PRELOAD`.
    """
    wanted = environ.get("SERVERLESS_GPU_PRELOAD", "").replace(" ", "").split(",")
    return tuple(name for name in PRELOAD if name in wanted) or PRELOAD


def search_path() -> list[str]:
    """Return the directories of this package and of its few dependencies."""
    found = [str(PACKAGE.parent)]
    for name in _DEPENDENCIES:
        spec = importlib.util.find_spec(name)
        places = (spec.submodule_search_locations or [spec.origin or ""]) if spec is not None else ()
        found += [str(Path(place).parent) for place in places]
    return list(dict.fromkeys(found))


def clean_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a clean process inherits from the caller."""
    return {name: environ[name] for name in _CLEAN_VARIABLES if name in environ}


def startup_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that determine how an interpreter and its libraries start.

    The result includes a locale other than UTF-8, because Python derives the file name encoding from the locale.
    """
    found = {name: value for name, value in environ.items() if name.startswith(STARTUP_PREFIXES)}
    locale = next((environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(name)), "")
    encoding = locale.partition(".")[2].partition("@")[0]
    if encoding and encoding.replace("-", "").lower() != "utf8":
        found["LC_ALL"] = locale
    return dict(sorted(found.items()))


def separating_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the start-up variables that all callers of one zygote share, without library variables."""
    found = startup_variables(environ)
    # The values that libraries set, or an empty tuple for any value.
    libraries = {name: SET_BY_LIBRARIES.get(name) for name in found}
    return {
        name: value
        for name, value in found.items()
        if (values := libraries[name]) is None or (values and value not in values)
    }


def one_name(python: str) -> str:
    """Return one path for an interpreter's aliases in a directory, such as `python` and `python3`.

    The path keeps the interpreter's directory, because an interpreter locates its environment through that directory.
    """
    for name in ("python3", "python"):
        beside = os.path.join(os.path.dirname(python), name)
        with contextlib.suppress(OSError):
            if os.path.samefile(python, beside):
                return beside
    return python


class CallerInterpreter(NamedTuple):
    """An interpreter with a caller's options and variables."""

    python: str
    flags: Sequence[str]
    # The caller's variables. The zygote gets the caller's start-up variables and a few variables that every program
    # expects.
    environ: Mapping[str, str]
    mounts: Sequence[Mapping[str, object]] = ()  # Mounts of the interpreter's environment, for `inside/namespaces.py`.
    cgroups: Sequence[str] = ()  # Directories of the cgroups in which the interpreter starts.
    namespace: Literal["", "wanted", "required"] = ""  # User namespace: not used, used if possible, or required.
    view: View | None = None  # Files of the principal with a uid of its own, in place of the user namespace.
    level: str = ""  # Isolation level of the principal's processes.


def zygote_process(
    interpreter: CallerInterpreter, preload: Sequence[str], *, channel_fd: int, log: int
) -> subprocess.Popen[bytes]:
    """Start a zygote in the user's interpreter. Raises OSError.

    The launcher enters the zygote's cgroups and namespaces before the zygote starts. The launcher gets no environment
    variables of the user, because the dynamic loader would read them.
    """
    if not interpreter.mounts:
        # This process checks the interpreter, because the launcher could only write an error to the log.
        python = interpreter.python
        if not stat.S_ISREG(os.stat(python).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), python)
        if not os.access(python, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), python)
    arguments = [interpreter.python, *interpreter.flags, "-c", zygote_program(channel_fd, preload)]
    environ = {**clean_variables(interpreter.environ), **startup_variables(interpreter.environ)}
    plan = os.memfd_create("sgpu-plan", os.MFD_CLOEXEC)
    try:
        text = json.dumps(
            {
                "cgroups": list(interpreter.cgroups),
                "namespace": interpreter.namespace,
                "view": None if interpreter.view is None else interpreter.view._asdict(),
                "level": interpreter.level,
                "mounts": list(interpreter.mounts),
                "argv": arguments,
                "environ": environ,
            }
        )
        with open(os.dup(plan), "w", encoding="utf-8") as file:
            file.write(text)
        os.lseek(plan, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", launcher_program(plan, channel_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=clean_variables(os.environ),
            pass_fds=(plan, channel_fd),
            start_new_session=True,
        )
    finally:
        os.close(plan)


def zygote_program(channel_fd: int, preload: Sequence[str], inside: Path = INSIDE) -> str:
    """Return the `python -c` program that becomes a zygote.

    `inside` is the directory of the ranks' runtime.
    """
    call = f"zygote.main({channel_fd}, {protocol.VERSION}, {list(preload)!r})"
    return load_inside(inside) + "from _sgpu_inside import zygote\n" + call + "\n"


def launcher_program(plan_fd: int, channel_fd: int, inside: Path = INSIDE) -> str:
    """Return the program that enters a zygote's cgroups and becomes the zygote (`inside/launcher.py`)."""
    return load_inside(inside) + f"from _sgpu_inside import launcher\nlauncher.main({plan_fd}, {channel_fd})\n"


def load_inside(inside: Path = INSIDE) -> str:
    """Return the program lines that load the ranks' runtime from its directory."""
    return _LOAD.format(init=str(inside / "__init__.py"), directory=str(inside))


def open_log(path: Path) -> int:
    """Return a descriptor that appends to a log file of limited size."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    bound_log(fd)
    return fd


def bound_log(fd: int) -> None:
    """Truncate a log file that is larger than 10 MB."""
    if os.fstat(fd).st_size > LOG_BYTES_MAX:
        os.ftruncate(fd, 0)
