"""Starts processes of this package: clean interpreters, and zygotes in the user's environment.

Agent and supervisor run with `-I -S`: without `PYTHON*` variables, user site and `.pth` files. `.pth` files execute
code at start even with `-I`. The search path contains only the standard library and the directories of this package's
few dependencies.
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
from typing import Literal, NamedTuple

from serverless_gpu import faults
from serverless_gpu.ambient import CLOCK_FAULT
from serverless_gpu.node.inside import protocol
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

# Variables of the caller that a clean process gets. Some libraries require HOME and similar variables. Other variables
# locate the user's git patterns (for captures) and interpreters (for restores). Only tests use the last two variables.
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
"""Prefixes of variables that an interpreter or a library reads once at its start; part of a zygote's key."""

SET_BY_LIBRARIES = {
    "KMP_DUPLICATE_LIB_OK": ("True", "TRUE"),  # Scikit-learn and threadpoolctl; torch's inductor.
    "KMP_INIT_AT_FORK": ("FALSE",),  # Scikit-learn and joblib.
    "PYTHONBREAKPOINT": ("ray.util.rpdb.set_trace", "ray.util.rpdb._driver_set_trace"),  # ray
    "PYTORCH_ENABLE_MPS_FALLBACK": ("1",),  # accelerate
    "PYTORCH_NVML_BASED_CUDA_CHECK": ("1",),  # Lightning
    "TORCHINDUCTOR_CACHE_DIR": (),  # Torch's inductor: any directory is possible.
    "TORCH_WARM_POOL": ("0",),  # Torch's inductor.
}
"""Start-up variables that libraries set in their own process on import, with the values; () for any value.

The value of a library's variable shows which libraries the caller has imported, not how an interpreter must start. A
warm interpreter without the variable therefore serves the caller too. Ranks get the variable like all other variables
of the caller.
"""


def clean_process(
    module: str, arguments: Sequence[object], *, fds: Sequence[int], log: int, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `main(*arguments)` of a module of this package in a clean interpreter and a new session.

    The process inherits `fds` under the same numbers, writes to `log`, and gets a few of the caller's variables. Raises
    OSError.
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

    `SERVERLESS_GPU_PRELOAD` selects from `PRELOAD`, separated by commas.
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
    """Return the few variables that clean processes get."""
    return {name: environ[name] for name in _CLEAN_VARIABLES if name in environ}


def startup_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that determine how an interpreter and its libraries start.

    Python takes the encoding of file names from the locale at start, so a locale that is not UTF-8 is included.
    """
    found = {name: value for name, value in environ.items() if name.startswith(STARTUP_PREFIXES)}
    locale = next((environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if environ.get(name)), "")
    encoding = locale.partition(".")[2].partition("@")[0]
    if encoding and encoding.replace("-", "").lower() != "utf8":
        found["LC_ALL"] = locale
    return dict(sorted(found.items()))


def separating_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the start-up variables that callers of one zygote share: all except those of libraries."""
    found = startup_variables(environ)
    libraries = {name: SET_BY_LIBRARIES.get(name) for name in found}  # An empty tuple allows any value.
    return {
        name: value
        for name, value in found.items()
        if (values := libraries[name]) is None or (values and value not in values)
    }


def one_name(python: str) -> str:
    """Return one name for all names of an interpreter in its directory, where `python` may be `python3`.

    The directory in the name stays unchanged, because an interpreter finds its environment by its directory.
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
    # The caller's variables. The zygote gets the start-up variables and a few that every program expects.
    environ: Mapping[str, str]
    mounts: Sequence[Mapping[str, object]] = ()  # Mounts of the interpreter's environment, for `inside/namespaces.py`.
    cgroups: Sequence[str] = ()  # Directories of the cgroups in which the interpreter starts.
    namespace: Literal["", "wanted", "required"] = ""  # User namespace: not used, used if possible, or required.
    sandbox: View | None = None  # Files of the principal's sandbox, in place of the user namespace.


def zygote_process(
    interpreter: CallerInterpreter, preload: Sequence[str], *, channel_fd: int, log: int
) -> subprocess.Popen[bytes]:
    """Start a zygote in the user's interpreter. Raises OSError.

    The launcher enters the containment before the zygote starts. The launcher gets none of the user's variables,
    because the dynamic loader would read them.
    """
    if not interpreter.mounts:
        # Checked in this process, because the launcher could only write the error to the log.
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
                "sandbox": None if interpreter.sandbox is None else interpreter.sandbox._asdict(),
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
    """Return the program for `python -c` that becomes a zygote.

    `inside` is the directory of the runtime.
    """
    call = f"zygote.main({channel_fd}, {protocol.VERSION}, {list(preload)!r})"
    return load_inside(inside) + "from _sgpu_inside import zygote\n" + call + "\n"


def launcher_program(plan_fd: int, channel_fd: int, inside: Path = INSIDE) -> str:
    """Return the program that enters a zygote's containment and becomes the zygote (`inside/launcher.py`)."""
    return load_inside(inside) + f"from _sgpu_inside import launcher\nlauncher.main({plan_fd}, {channel_fd})\n"


def load_inside(inside: Path = INSIDE) -> str:
    """Return the lines of a program that load the ranks' runtime from its directory."""
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
