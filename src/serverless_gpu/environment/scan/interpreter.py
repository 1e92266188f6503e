"""Describes an interpreter: its module search path, its loaded modules, and its build.

This module uses only the standard library and syntax that old Python versions accept. `describe_other` runs this
module's source code in interpreters that do not have serverless-gpu installed. The description contains the names of
start-up variables, never their values.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import threading
from importlib.machinery import EXTENSION_SUFFIXES

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
"""Environment variables that interpreters and libraries read only at start-up."""

LOADED_MAX = 50_000
_ANSWER = "serverless-gpu interpreter: "  # A .pth file may print text at start-up before this marker.
_ANSWER_BYTES_MAX = 32 * 1024 * 1024
ANSWER_TIMEOUT_S = 60

_turn = threading.Lock()


def _renew_turn() -> None:
    """Replace the lock in a forked child process, which does not have the thread that held the lock."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_renew_turn)


def describe() -> dict[str, object]:
    """Return the description of this process as JSON-compatible values.

    A lock serializes concurrent callers of `describe`.
    """
    with _turn:  # In older Python versions, a second thread may read incomplete sysconfig variables.
        return _describe()


def _describe() -> dict[str, object]:
    paths = sysconfig.get_paths()
    return {
        "implementation": sys.implementation.name,
        "version": ".".join(str(number) for number in sys.version_info[:3]),
        "abi": _abi(),
        "platform": sysconfig.get_platform(),
        "glibc": _glibc(),
        "executable": sys.executable or "",
        "base_executable": getattr(sys, "_base_executable", "") or sys.executable or "",
        "prefix": sys.prefix,
        "base_prefix": sys.base_prefix,
        "purelib": paths["purelib"],
        "platlib": paths["platlib"],
        "stdlib": paths["stdlib"],
        "platstdlib": paths["platstdlib"],
        "site_directories": _site_directories(),
        "sys_path": [str(entry) for entry in sys.path],
        "cwd": _cwd(),
        "flags": {name: int(getattr(sys.flags, name, 0) or 0) for name in ("isolated", "no_site", "no_user_site")},
        "loaded": _loaded(),
        "variables": sorted(name for name in os.environ if name.startswith(STARTUP_PREFIXES)),
        "home": os.path.expanduser("~"),
        "own_home": os.path.abspath(
            os.path.expanduser(os.environ.get("SERVERLESS_GPU_HOME") or os.path.join("~", ".serverless_gpu"))
        ),
    }


def describe_other(python: str) -> dict[str, object]:
    """Run another interpreter with `python -c` in the current directory, and return its description.

    Raises:
        OSError: the interpreter cannot be started.
        RuntimeError: the interpreter times out or prints no description. The error quotes the output.
    """
    with open(__file__, encoding="utf-8") as file:
        program = file.read() + "\n\nprint('\\n' + _ANSWER + json.dumps(describe()))\n"
    try:
        done = subprocess.run(
            [python, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{python} did not answer within {ANSWER_TIMEOUT_S} s") from None
    _, found, answer = done.stdout.rpartition(_ANSWER.encode())
    if done.returncode or not found or len(answer) > _ANSWER_BYTES_MAX:
        said = done.stderr[-2000:].decode(errors="replace").strip()
        raise RuntimeError(f"{python} did not describe itself (exit status {done.returncode}): {said or 'no message'}")
    described: dict[str, object] = json.loads(answer)
    return described


def _abi() -> str:
    """Return the interpreter's ABI tag for extension modules, for CPython from module file suffixes."""
    if sys.implementation.name == "cpython":
        tagged = [ending for ending in EXTENSION_SUFFIXES if ending.startswith(".cpython-")]
        return tagged[0].split(".")[1] if tagged else ""
    return str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag or "")


def _site_directories() -> list[str]:
    """Return the directories whose .pth files Python read at start-up."""
    if sys.flags.no_site:
        return []
    directories = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        directories.append(site.getusersitepackages())
    return directories


def _loaded() -> list[str]:
    """Return the files of all imported modules, without importing lazy modules."""
    files = []
    for module in list(sys.modules.values()):
        try:
            file = object.__getattribute__(module, "__dict__").get("__file__")
        except AttributeError:  # A library has replaced a module in `sys.modules` with another object.
            continue
        if isinstance(file, str) and os.path.isabs(file):
            files.append(file)
    return sorted(set(files))[:LOADED_MAX]


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:  # The process's current directory no longer exists.
        return ""


def _glibc() -> str:
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, ValueError, OSError):  # The system does not use glibc.
        return ""
    return version if name == "glibc" else ""
