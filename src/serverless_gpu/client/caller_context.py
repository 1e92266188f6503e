"""Describes the calling process to the agent, and handles signals during blocking calls.

The caller context contains the working directory, environment variables and import paths that ranks inherit. `origins`
finds modules that a zygote may have loaded from a different file.

    sys.path, from its end:   installed packages, standard library  │  PYTHONPATH, the script's directory
                                        names so far               ∩  names here   =  names to look up

A zygote knows the files of its loaded modules but not the caller's directories. `origins` therefore searches for module
names that exist in a caller's directory and again later in `sys.path`. For example, a file `calendar.py` beside the
script shadows a standard library module. The function `origins` imports no modules. Like Python's import system, the
client rereads a directory only after a modification time change. The client treats an unreadable directory as empty and
skips zip files in `sys.path`.

Most environment variables, such as credentials and library settings, have the same meaning on another machine. The
client does not send environment variables that name local paths, processes or devices. The node sets its own values for
path, process and device variables. The client never sends the server token as an environment variable.

Blocking calls run inside `interruptible` and `terminable`. `asyncio.run` and an IPython kernel that runs an `async`
cell install their own SIGINT handler. An event loop's SIGINT handler only cancels the current task at the next await.
Ctrl-C would therefore not stop a blocking call. `interruptible` makes SIGINT raise `KeyboardInterrupt` during a
blocking call. On SIGTERM, as on Ctrl-C, the client applies the run option `on_interrupt`. After applying
`on_interrupt`, the client process exits. The client does not replace the user's signal handlers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

from serverless_gpu.errors import StorageError, UsageError
from serverless_gpu.node.base import protocol
from serverless_gpu.node.inside.process_group import ALONE_NOTE_SWITCH
from serverless_gpu.node.processes.spawn import PRELOAD_ROOTS

_INSTALLED = ("site-packages", "dist-packages")
_NO_FILE = ("built-in", "frozen")
_ENTRIES_MAX = 100_000
_DIRECTORIES_MAX = 256
_NAMES_MAX = 10_000
_State = tuple[object, ...]  # Snapshot of `sys.path` and `sys.meta_path`, which determine a module's origin.
# Modification time and importable names by directory path.
_listed: dict[str, tuple[int, frozenset[str]]] = {}
# Import settings and origin file by module name.
_resolved: dict[str, tuple[_State, str]] = {}
TOKEN = "SERVERLESS_GPU_TOKEN"
_NAMES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "DISPLAY",
        "EDITOR",
        "HOME",
        "HOST",
        "HOSTNAME",
        "INVOCATION_ID",
        "JOURNAL_STREAM",
        "LOGNAME",
        "MAIL",
        "NVIDIA_VISIBLE_DEVICES",
        "OLDPWD",
        "PATH",
        "PWD",
        "SHELL",
        "SHLVL",
        "TEMP",
        "TERM_SESSION_ID",
        "TMP",
        "TMPDIR",
        "TMUX",
        "USER",
        "VIRTUAL_ENV",
        "WAYLAND_DISPLAY",
        "WINDOWID",
        "XAUTHORITY",
        "_",
    }
)
_PREFIXES = (
    "CONDA_",
    "DBUS_",
    "DYLD_",
    "JPY_",
    "LD_",
    "MASTER_",
    "SLURM_",
    "SSH_",
    "SYSTEMD_",
    "VSCODE_",
    "XDG_",
    "SERVERLESS_GPU_",
    "SGPU_",
)


def caller_context() -> protocol.Context:
    """Return the caller context. Raise StorageError if the working directory does not exist."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise StorageError(
            "the working directory of this process no longer exists",
            hint="change to an existing directory: os.chdir(...)",
        ) from None
    if not sys.executable or protocol.portable(sys.executable) != sys.executable:
        raise UsageError(f"the path of this Python interpreter is unknown or not valid UTF-8: {sys.executable!r}")
    return protocol.Context(
        python=sys.executable,
        flags=tuple(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]  # private function
        environ={protocol.portable(name): protocol.portable(value) for name, value in os.environ.items()},
        cwd=protocol.portable(cwd),
        umask=_umask(),
        argv=tuple(protocol.portable(argument) for argument in sys.argv),
        sys_path=tuple(protocol.portable(str(path)) for path in sys.path),
        descriptors_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        packages={name: protocol.portable(origin) for name, origin in origins().items()},
    )


def _umask() -> int:
    # `os.umask` would set a temporary mask, which another thread could use to create a file.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077


def origins() -> dict[str, str]:
    """Return the origin files of modules that a zygote may have loaded from a different file."""
    entries: Sequence[object] = sys.path
    path = [
        (entry, _importable_names(entry)) for entry in entries if isinstance(entry, str)
    ]  # Python's import system also ignores `sys.path` entries that are not strings.
    state = (*map(id, sys.meta_path), *path)
    return {
        name: origin for name in sorted({*PRELOAD_ROOTS, *_shadowed_names(path)}) if (origin := _origin(name, state))
    }


def _shadowed_names(path: Sequence[tuple[str, frozenset[str]]]) -> set[str]:
    """Return the module names in the caller's directories that also exist later in `sys.path`."""
    library = os.path.dirname(os.__file__)
    further = set(sys.stdlib_module_names)
    found: set[str] = set()
    # True for `sys.path` entries before the standard library. A site-packages directory before the standard library is
    # a user's addition.
    in_front = False
    for entry, names in reversed(path):
        if entry == library:
            in_front = True
        elif in_front or not (entry.startswith(library) or os.path.basename(entry) in _INSTALLED):
            found |= names & further
        further |= names
    return found


def _importable_names(entry: str) -> frozenset[str]:
    """Return the names of importable modules in a directory of `sys.path`."""
    try:
        directory = os.path.abspath(entry)  # An empty `sys.path` entry means the working directory.
        changed_ns = os.stat(directory).st_mtime_ns
        known = _listed.get(directory)
        if known is None or known[0] != changed_ns:
            with os.scandir(directory) as entries:
                names = {found.name.partition(".")[0] for found in itertools.islice(entries, _ENTRIES_MAX)}
            if len(_listed) >= _DIRECTORIES_MAX:
                _listed.clear()
            known = _listed[directory] = (changed_ns, frozenset(filter(str.isidentifier, names - {"__pycache__"})))
    except OSError:
        return frozenset()
    return known[1]


def _origin(name: str, state: _State) -> str:
    """Return a module's origin file in this process, or "" if the module or the file does not exist."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return str(getattr(loaded, "__file__", None) or "")
    known = _resolved.get(name)
    if known is not None and known[0] == state and os.path.exists(known[1]):
        return known[1]
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # A user's import finder may raise an exception.
        return ""
    if spec is None or not spec.origin or spec.origin in _NO_FILE:
        return ""
    if len(_resolved) >= _NAMES_MAX:
        _resolved.clear()
    _resolved[name] = (state, str(spec.origin))
    return str(spec.origin)


def variables_elsewhere(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that have the same meaning on another machine."""
    return {
        name: value
        for name, value in environ.items()
        if name == ALONE_NOTE_SWITCH or (name not in _NAMES and not name.startswith(_PREFIXES))
    }


def variables_here(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for local ranks, without the server token."""
    return {name: value for name, value in environ.items() if name != TOKEN}


_LOOPS = ("asyncio", "ipykernel", "IPython", "tornado")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise `KeyboardInterrupt` in the block, even if an event loop handles SIGINT."""
    handler: object = signal.getsignal(signal.SIGINT)
    while isinstance(handler, functools.partial):
        handler = handler.func
    is_of_loop = str(getattr(handler, "__module__", "")).partition(".")[0] in _LOOPS
    if threading.current_thread() is not threading.main_thread() or not is_of_loop:
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM raise `KeyboardInterrupt` in the block and then end the process. Keep user handlers."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    received: list[int] = []

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # User code may have closed or replaced the stream.
                    stream.flush()
            os.kill(os.getpid(), signal.SIGTERM)
