"""Work is divided between a process and its fork: all of it is done once, and what goes wrong in either is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from serverless_gpu.environment.restore.link_tree import divide
from tests.support.golden import golden

# A program of its own: the process of the tests may have threads, and then nothing is forked.
PROGRAM = """
import os, signal, sys
from serverless_gpu.environment.restore.link_tree import divide
from serverless_gpu.errors import EnvironmentRejected
os.sched_getaffinity = lambda pid: {{0, 1}}
us = os.getpid()
def work(numbers):
    {body}
try:
    print(*sorted(map(sorted, divide({count}, work, list[int]))), sep="\\n")
except (OSError, EnvironmentRejected) as error:
    print(type(error).__name__, getattr(error, "errno", None), getattr(error, "filename", None), error)
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child is left")
"""


def run(body: str, count: int = 5) -> list[str]:
    program = PROGRAM.format(body=body, count=count)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    *said, last = done.stdout.splitlines()
    assert last == golden("environment.forking.child-left"), done
    return said


@pytest.mark.parametrize("count", [2, 2048, 5000])
def test_22C2_each_piece_is_done_once(count: int) -> None:
    said = run("return [number for number in numbers]", count)
    numbers = [int(number) for line in said for number in line.strip("[]").split(",") if number.strip()]
    assert len(said) == 2
    assert sorted(numbers) == list(range(count))


def test_22C2_two_processes_work() -> None:
    one, other = run("return [os.getpid()]")
    assert one != other


@pytest.mark.parametrize("who", ["==", "!="])
def test_22C2_an_error_of_either_process_is_raised(who: str) -> None:
    body = f"if os.getpid() {who} us: raise FileExistsError(17, 'File exists', '/there')\n    return list(numbers)"
    assert run(body) == [golden("environment.forking.fileexistserror-17-errno")]


def test_22C2_what_the_rules_refuse_in_the_fork_is_raised() -> None:
    body = "if os.getpid() != us: raise EnvironmentRejected('a file in one unit')\n    return list(numbers)"
    (said,) = run(body)
    assert said.startswith("EnvironmentRejected") and golden("environment.forking.file-one-unit") in said


def test_22C2_a_fork_that_is_killed_is_said() -> None:
    body = "if os.getpid() != us: os.kill(os.getpid(), signal.SIGKILL)\n    return list(numbers)"
    (said,) = run(body)
    assert golden("environment.forking.ended-signal", int=int(signal.SIGKILL)) in said


def test_22C2_a_process_with_threads_does_all_of_it_itself() -> None:
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        assert divide(3, lambda numbers: [os.getpid(), *numbers], list[int]) == [[os.getpid(), 0, 1, 2]]
    finally:
        stop.set()
        other.join()
