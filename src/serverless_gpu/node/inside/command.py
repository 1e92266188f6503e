"""Runs a program as a rank, in a child process with a separate process group.

    stem ──SIGTERM──▶ rank ──SIGTERM to the group──▶ sh ──▶ python train.py …
      ◀── end of the program: same exit code, same signal ──┘

The rank does not exec the program, because SIGTERM to an executed script would end the script's shell immediately.
Programs that the shell started also get SIGTERM. The rank waits until the shell's programs have saved their state and
ended, for at most the run's grace period.

Failure cases: If the program is missing or not executable, the rank prints an error and exits with code 127 or 126, as
a shell does. The stem kills processes that the program leaves behind.
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

from . import checkpoints, protocol, terminal

_LOOK_S = 0.02  # Seconds between two checks whether the process group has ended.
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def run(argv: list[str], report: protocol.Report, work: str | None = None) -> int:
    """Run a program until it ends. Return the program's exit code, or end this process by the same signal.

    With `work`, run the program on a pseudo-terminal whose users connect to a socket in the directory `work`.
    """
    earlier = checkpoints.newest_before(os.environ.get("SGPU_CHECKPOINT_DIR", ""), os.environ.get(checkpoints.AGREED))
    if earlier is not None:
        os.environ["SGPU_RESUME_DIR"] = earlier
    relay = _Relay()
    signal.signal(signal.SIGTERM, relay.pass_on)
    report({"event": "exec", "stack": -1})
    try:
        if work is not None:
            host = terminal.open_host(argv, work)
            report({"event": "enter"})
            relay.begin(host.pid)
            code = host.serve()
            return code if code >= 0 else end_of(-code)
        child = _start(argv)
    except OSError as error:
        sys.stderr.write(f"serverless-gpu: {argv[0]!r} cannot be run: {error.strerror}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUNNABLE
    report({"event": "enter"})
    relay.begin(child.pid)
    code = child.wait()
    if relay.asked:
        # The rank waits until the process group is empty. The supervisor kills the rank after the run's grace period.
        with contextlib.suppress(OSError):
            while True:
                os.killpg(child.pid, 0)
                select.select([], [], [], _LOOK_S)
    return code if code >= 0 else end_of(-code)


class _Relay:
    """Forwards SIGTERM to the program's process group, even if SIGTERM arrived before the program started."""

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
    # Run a script without an interpreter line with /bin/sh, as a shell does.
    return subprocess.Popen(["/bin/sh", shutil.which(argv[0]) or argv[0], *argv[1:]], process_group=0)


def end_of(number: int) -> int:
    """End this process by the signal that ended its child, so that the parent sees the same exit status."""
    with contextlib.suppress(OSError, ValueError):  # Python raises an error for SIGKILL, which has no handler.
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
