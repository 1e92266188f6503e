"""Keeps a rank from signalling any process but its own descendants, on a machine shared with others.

A Ray that makes a pool of several machines runs as the same user as ranks do, and `ray stop` ends every Ray it finds.
From Linux 6.12 on, Landlock confines signals and debuggers to a domain; the supervisor's SIGTERM still arrives from
outside. Files, sockets and mounts stay as they are.

    root                        enters as it is
    in a user namespace         enters; setuid programs, which do nothing for it any more, are given up for good
    any other user              would have to give up setuid programs, such as the one that makes NVIDIA's devices: it
                                does not enter, and `sgpu doctor` says so

Failure cases: an older kernel, or Landlock switched off (the reason is returned, the rank runs).
"""

from __future__ import annotations

import ctypes
import os

SIGNALS_SINCE_ABI = 6
_CREATE_RULESET, _RESTRICT_SELF = 444, 446  # the same number on every architecture
_VERSION = 1
_SCOPE_SIGNAL = 2
_PR_SET_NO_NEW_PRIVS = 38
_WHOLE = ["0", "0", "4294967295"]


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_fs", ctypes.c_uint64), ("handled_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


def keep_signals_in() -> str:
    """Keep this process and its descendants from signalling others; return "", or why not."""
    why = refused()
    if why:
        return why
    libc = ctypes.CDLL(None, use_errno=True)
    ruleset = _Ruleset(0, 0, _SCOPE_SIGNAL)
    fd = libc.syscall(_CREATE_RULESET, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0)
    if fd < 0:
        return os.strerror(ctypes.get_errno())
    try:
        if os.geteuid() != 0 or _in_user_namespace():
            libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return os.strerror(ctypes.get_errno()) if libc.syscall(_RESTRICT_SELF, fd, 0) else ""
    finally:
        os.close(fd)


def refused() -> str:
    """Return why this process cannot keep its signals in, or ""; nothing is changed."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(_CREATE_RULESET, None, 0, _VERSION)
    if abi < SIGNALS_SINCE_ABI:
        return "Linux 6.12 or newer is needed, with Landlock"
    if os.geteuid() != 0 and not _in_user_namespace():
        return "who is not root would have to do without setuid programs"
    return ""


def _in_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() != _WHOLE
    except OSError:
        return False
