"""Stacks as faulthandler wrote them in real ranks (gloo, DDP, data loaders, sockets), and where they stand.

Captured with Python 3.11 and torch 2.13; only the paths were shortened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from serverless_gpu.model.hangs.stacks import delegates, is_whole, parse
from tests.support.model.stacks import OWN

PROGRAM = """
import faulthandler, os, threading
def wait_for_ever():
    threading.Event().wait()
threading.Thread(target=wait_for_ever, daemon=True).start()
faulthandler.register(int({number}), file=2, all_threads=True, chain=False)
print("ready", flush=True)
os.read(0, 1)
"""


def test_what_this_python_writes_is_understood() -> None:
    number = int(signal.SIGUSR1)
    command = [sys.executable, "-c", PROGRAM.format(number=number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None and process.stderr is not None
        process.stdout.readline()
        process.send_signal(number)
        text = ""
        while not is_whole(text):
            text += os.read(process.stderr.fileno(), 1 << 16).decode()
        process.stdin.close()
    stack = parse(text, OWN)
    assert stack.main is not None and stack.main.current
    assert stack.frames == ()  # what `python -c` runs is the zygote's, in a rank
    assert "wait_for_ever" in [frame.function for frame in stack.others[0].frames]
    assert delegates(stack.others[0].frames) and Path(stack.others[0].frames[0].file).name == "threading.py"
