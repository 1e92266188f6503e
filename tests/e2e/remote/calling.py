"""A remote call in a process of its own, which outlives what is done to the server, and how often its function ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WAIT_S = 60.0
_SCRIPT = """
import os, sys, time
from serverless_gpu import distributed

@distributed(gpus=1, gpu_type="H100", remote=True)
def work(path, seconds):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    until = time.monotonic() + seconds
    while time.monotonic() < until and not os.path.exists(path + ".go"):
        time.sleep(0.01)
    return "done"

if __name__ == "__main__":
    print(*work.distributed(sys.argv[1], float(sys.argv[2])), flush=True)
"""


def called(ran: Path, seconds: float) -> subprocess.Popen[str]:
    """Return a process whose call leaves a line in a file when its function runs; that takes so long, or until `go`."""
    script = ran.with_suffix(".py")
    script.write_text(_SCRIPT)
    arguments = [sys.executable, str(script), str(ran), str(seconds)]
    return subprocess.Popen(arguments, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def go(ran: Path) -> None:
    """Have the function of a call return."""
    Path(f"{ran}.go").touch()


def answer(process: subprocess.Popen[str]) -> str:
    """Return what the call printed, once it has ended well; of a server that was away it said one line at most."""
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    assert err.count("does not answer") <= 1, err
    return out.strip()


def runs_of(path: Path) -> int:
    """Return how often user code ran."""
    return len(path.read_text().splitlines()) if path.exists() else 0
