"""Runs a program as a rank: as a child process in its own process group, until the program ends.

    stem ──SIGTERM──▶ rank ──SIGTERM to the group──▶ sh ──▶ python train.py …
      ◀── end of the program: same exit code, same signal ──┘

The rank does not replace itself with the program by exec, because SIGTERM would kill the shell of a script at once. The
program below the shell also gets the signal. The rank waits until that program has saved its state and has ended, for
at most the run's grace period.

Failure cases: If the program is missing or not executable, the rank prints a line on stderr. The rank's exit code is
then 127 or 126, as in a shell. The stem ends processes that the program leaves behind.
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

_LOOK_S = 0.02  # Seconds between two checks for the end of the signalled process group.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def run(argv: list[str], report: protocol.Report) -> int:
    """Run a program to its end. Return the program's exit code, or end by the same signal."""
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
        # Waits until the process group is empty. The supervisor ends the wait after the run's grace period.
        with contextlib.suppress(OSError):
            while True:
                os.killpg(child.pid, 0)
                select.select([], [], [], _LOOK_S)
    return code if code >= 0 else end_of(-code)


class _Relay:
    """Passes SIGTERM on to the program's group, even if SIGTERM came before the program started."""

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
        with contextlib.suppress(OSError):  # The process group may have just ended.
            os.killpg(self._group, signal.SIGTERM)


def _start(argv: list[str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, process_group=0)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    # As a shell does, run a script without an interpreter line with /bin/sh.
    return subprocess.Popen(["/bin/sh", shutil.which(argv[0]) or argv[0], *argv[1:]], process_group=0)


def end_of(number: int) -> int:
    """End this process by the signal of its child, so that this process's parent sees the same status."""
    with contextlib.suppress(OSError, ValueError):  # Python cannot set a handler for SIGKILL, and SIGKILL needs none.
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
