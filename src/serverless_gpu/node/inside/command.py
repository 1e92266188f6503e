"""A rank that runs a program: a child in a process group of its own, whose end is the rank's end.

    stem ──SIGTERM──▶ rank ──SIGTERM to the group──▶ sh ──▶ python train.py …
      ◀── how it ended: the same exit code, the same signal ──┘

The rank stays beside its program instead of becoming it, because a script's shell dies of SIGTERM at once: the program
below it gets the signal too, and has the run's grace to save and to end, before the rank ends.

Failure cases: the program is missing or cannot be run (127 or 126, as in a shell, and a line on stderr); it leaves
processes behind (they end with the run).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import types

from . import checkpoints, protocol

_LOOK_S = 0.02  # between two looks whether a group that is being ended has ended
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def run(argv: list[str], report: protocol.Report) -> int:
    """Run a program to its end; return its exit code, or end of the signal that ended it."""
    earlier = checkpoints.newest_before(os.environ.get("SGPU_CHECKPOINT_DIR", ""), os.environ.get(checkpoints.AGREED))
    if earlier is not None:
        os.environ["SGPU_RESUME_DIR"] = earlier
    relay = _Relay()
    signal.signal(signal.SIGTERM, relay.pass_on)
    report({"event": "exec", "stack": -1})
    try:
        child = _start(argv)
    except OSError as error:
        sys.stderr.write(f"serverless-gpu: {argv[0]!r} cannot be run: {error.strerror}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUNNABLE
    report({"event": "enter"})
    relay.begin(child.pid)
    code = child.wait()
    if relay.asked:
        with contextlib.suppress(OSError):  # until none of the group is left; the supervisor's grace bounds that
            while True:
                os.killpg(child.pid, 0)
                select.select([], [], [], _LOOK_S)
    return code if code >= 0 else end_of(-code)


class _Relay:
    """Passes SIGTERM on to the program's group, also one that came before there was a program."""

    def __init__(self) -> None:
        self.asked = False
        self._group = 0

    def begin(self, group: int) -> None:
        self._group = group
        if self.asked:
            self._send()

    def pass_on(self, _number: int, _frame: types.FrameType | None) -> None:
        self.asked = True
        if self._group:
            self._send()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # it has just ended
            os.killpg(self._group, signal.SIGTERM)


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, process_group=0)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    # A script without a first line that says by what it is to be run: by the shell, as a shell does it.
    return subprocess.Popen(["/bin/sh", shutil.which(argv[0]) or argv[0], *argv[1:]], process_group=0)


def end_of(number: int) -> int:
    """End of a signal as a child did, so that this process's parent sees the same."""
    with contextlib.suppress(OSError, ValueError):  # SIGKILL cannot be set, and need not be
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
