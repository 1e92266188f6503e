"""Functions that ranks run; standard library only, so that a rank imports little to have them.

They travel by reference: the name goes, and each rank imports this module from the live path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_STAY_S = 100.0


def announce(where: str, name: str) -> None:
    """Leave a file that says this process's pid and its parent's; it is whole as soon as it is there."""
    directory = Path(where)
    temporary = directory / f".{name}.{os.getpid()}"
    temporary.write_text(f"{os.getpid()} {os.getppid()}")
    temporary.rename(directory / name)


def rank_number() -> int:
    """Return this rank's number."""
    return int(os.environ["RANK"])


def stay(where: str) -> int:
    """Say that this rank is there, and return its number once the file `go` is."""
    announce(where, f"rank{rank_number()}")
    wait_for_file(where, "go")
    return rank_number()


def ignore_sigterm(where: str, rank: int = -1) -> None:
    """Stay for a minute and ignore SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    announce(where, f"rank{rank}")
    threading.Event().wait(60)


def wait_for_file(where: str, name: str) -> None:
    """Wait until a file is there, not for ever."""
    limit = time.monotonic() + _STAY_S
    while not (Path(where) / name).exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{name} did not come")
        time.sleep(0.01)


_IN_CHILD = """
import os, sys, time
where, name = sys.argv[1:3]
temporary = f"{where}/.{name}.{os.getpid()}"
with open(temporary, "w") as file:
    file.write(f"{os.getpid()} {os.getppid()}")
os.rename(temporary, f"{where}/{name}")
time.sleep(600)
"""


def leave_children(where: str) -> str:
    """Start children that detach themselves in every way there is, return once all of them live."""
    command = [sys.executable, "-S", "-c", _IN_CHILD, where]
    quiet = subprocess.DEVNULL
    subprocess.Popen([*command, "new_session"], start_new_session=True, stdout=quiet, stderr=quiet)
    subprocess.Popen([*command, "no_environment"], env={}, stdout=quiet, stderr=quiet)
    subprocess.Popen([*command, "holds_stdout"])
    # Its parent is gone at once, and so is its session's leader.
    program = "import os, subprocess, sys; os.setsid(); os.fork() and os._exit(0); subprocess.Popen(sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-S", "-c", program, *command, "double_forked"], env={}, check=True, stdout=quiet, stderr=quiet
    )
    for name in CHILDREN:
        wait_for_file(where, name)
    return "left them"


CHILDREN = ("new_session", "no_environment", "holds_stdout", "double_forked")
