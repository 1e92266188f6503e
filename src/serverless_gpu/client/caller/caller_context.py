"""Describes the calling process to the agent: the context that ranks inherit."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys

from serverless_gpu.client.caller.module_origins import origins
from serverless_gpu.errors import StorageError, UsageError
from serverless_gpu.node.base import protocol


def caller_context() -> protocol.Context:
    """Return the context of this process; raise StorageError when its working directory is gone."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:
        raise StorageError(
            "the working directory of this process does not exist any more",
            hint="change to one that does: os.chdir(...)",
        ) from None
    if not sys.executable or protocol.portable(sys.executable) != sys.executable:
        raise UsageError(f"this interpreter's own path is not known, or not UTF-8: {sys.executable!r}")
    return protocol.Context(
        python=sys.executable,
        flags=tuple(subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]  # what multiprocessing uses, too
        environ={protocol.portable(name): protocol.portable(value) for name, value in os.environ.items()},
        cwd=protocol.portable(cwd),
        umask=_umask(),
        argv=tuple(protocol.portable(argument) for argument in sys.argv),
        sys_path=tuple(protocol.portable(str(path)) for path in sys.path),
        descriptors_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        packages={name: protocol.portable(origin) for name, origin in origins().items()},
    )


def _umask() -> int:
    # `os.umask` can only be read by setting it, which another thread could notice.
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o077
