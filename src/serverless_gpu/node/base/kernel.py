"""Requirements on this machine's kernel and on the Python that asks it.

Processes are followed by pidfd, so that what is waited for and ended is never another process with the same number. A
machine without it runs nothing. Failure cases: Linux before 5.3, a container's older seccomp profile, a Python built
with older kernel headers (each is a sentence that says what helps).
"""

from __future__ import annotations

import errno
import os

from serverless_gpu.errors import HardwareError

OLDEST = "5.3"
"""The first Linux on which everything that has to work does."""
_NEWER_KERNEL = (
    f"Linux {OLDEST} or newer is needed; in a container, a runtime whose seccomp profile allows pidfd_open "
    "(Docker 20.10 or newer, or --security-opt seccomp=unconfined)"
)
_NEWER_BUILD = "use a Python that was built on a newer system: your distribution's, or a new one of conda-forge or uv"


def pidfd_refusal() -> tuple[str, str]:
    """Return why processes cannot be followed by pidfd here, and what helps; two times "" where they can."""
    if not hasattr(os, "pidfd_open"):
        return "this build of Python has no os.pidfd_open", _NEWER_BUILD
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return "", ""  # it is there
        return f"Linux {os.uname().release} refuses pidfd_open here: {error.strerror}", _NEWER_KERNEL
    return "", ""


def require_pidfd() -> None:
    """Refuse (HardwareError) a machine on which processes cannot be followed."""
    refusal, hint = pidfd_refusal()
    if refusal:
        raise HardwareError(f"this machine cannot run ranks: {refusal}", hint=hint)
