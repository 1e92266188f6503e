"""What the kernel is asked for beside the standard library: each in a process of its own, as it changes the process."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from serverless_gpu.node.inside.linux import descendants, kill_descendants, signal_main_thread
from tests.support.golden import golden
from tests.support.node.rank_process import run_rank

# A family of three generations; the youngest says its pid and waits for ever.
FAMILY = """
import os, signal, sys
middle = os.fork()
if middle == 0:
    young = os.fork()
    if young == 0:
        signal.pause()
    print(os.getpid(), young, flush=True)
    signal.pause()
signal.pause()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    process = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    middle, young = (int(word) for word in process.stdout.readline().split())
    yield process.pid, middle, young
    process.kill()
    for pid in (middle, young):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def test_descendants_are_found_parents_first(family: tuple[int, int, int]) -> None:
    old, middle, young = family
    assert descendants(old) == [middle, young]
    assert descendants(middle) == [young]
    assert descendants(young) == []


def test_somebody_who_is_gone_has_no_descendants() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert descendants(process.pid) == []


def test_F10_killing_descendants_spares_the_parent(family: tuple[int, int, int]) -> None:
    old, middle, young = family
    watched = [os.pidfd_open(pid) for pid in (middle, young)]
    assert kill_descendants(old) == 2
    for fd in watched:
        assert has_ended(fd)
        os.close(fd)
    os.kill(old, 0)


def has_ended(fd: int) -> bool:
    return bool(select.select([fd], [], [], 10)[0])


def test_children_of_other_threads_are_descendants_too() -> None:
    code = """
import os, signal, threading
from _sgpu_inside import linux
born, done = threading.Event(), threading.Event()
pids = []
def bear():
    pid = os.fork()
    if pid == 0:
        signal.pause()
    pids.append(pid)
    born.set()
    done.wait()
thread = threading.Thread(target=bear)
thread.start()
born.wait()
print(linux.descendants(os.getpid()) == pids, linux.kill_descendants(os.getpid()))
os.waitpid(pids[0], 0)
done.set()
thread.join()
"""
    assert run_rank(code) == "True 1\n"


def test_a_process_dies_with_its_parent() -> None:
    code = """
import os, select, signal
from _sgpu_inside import linux
read, write = os.pipe()
parent = os.fork()
if parent == 0:
    child = os.fork()
    if child == 0:
        linux.die_with_parent(os.getppid())
        os.write(write, b"x")
        signal.pause()
    os.write(write, str(child).encode().rjust(9))
    signal.pause()
said = b""
while len(said) < 10:
    said += os.read(read, 10)
child = os.pidfd_open(int(said.replace(b"x", b" ")))
os.kill(parent, signal.SIGKILL)
print(bool(select.select([child], [], [], 10)[0]))
"""
    assert run_rank(code) == "True\n"


def test_a_process_whose_parent_is_gone_already_ends_itself() -> None:
    code = """
import os
from _sgpu_inside import linux
pid = os.fork()
if pid == 0:
    linux.die_with_parent(1 if os.getppid() != 1 else 2)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run_rank(code) == "1\n"


def test_F10_a_subreaper_inherits_orphans_that_detached_themselves() -> None:
    code = """
import os, signal
from _sgpu_inside import linux
linux.become_subreaper()
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    orphan = os.fork()
    if orphan == 0:
        signal.pause()
    os.write(write, str(orphan).encode())
    os._exit(0)
os.waitpid(pid, 0)
orphan = int(os.read(read, 20))
print(linux.descendants(os.getpid()) == [orphan])
while linux.kill_descendants(os.getpid()):
    print(os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]))
"""
    assert run_rank(code) == "True\n-9\n"


def test_the_name_that_ps_shows_is_cut() -> None:
    code = """
from _sgpu_inside import linux
linux.set_name("sgpu-rank-with-a-long-name")
print(open("/proc/self/comm").read(), end="")
"""
    assert run_rank(code) == "sgpu-rank-with-\n"


def test_F03_no_core_dumps_and_first_in_line_when_memory_runs_out() -> None:
    code = """
import resource
from _sgpu_inside import linux
def score():
    return int(open("/proc/self/oom_score_adj").read())
before = score()
linux.limit_harm()
print(resource.getrlimit(resource.RLIMIT_CORE)[0], score() == min(1000, max(0, before) + 500))
linux.limit_harm()
linux.limit_harm()
print(score())
"""
    assert run_rank(code) == "0 True\n1000\n"


def test_F03_who_looks_after_ranks_goes_last_and_a_rank_below_it_first_all_the_same() -> None:
    code = """
from _sgpu_inside import linux
def score():
    return int(open("/proc/self/oom_score_adj").read())
before = score()
linux.outlive_ranks()
may = score() == -900  # only root may lower it
print(may or score() == before)
linux.limit_harm()
print(score() == 500 if may else score() == min(1000, max(0, before) + 500))
linux.be_ordinary()
print(score() >= 500)
linux.outlive_ranks()
linux.be_ordinary()
print(score() == 0 if may else score() >= 500)
"""
    assert run_rank(code) == golden("node.linux.true-true-true")


def test_a_signal_for_the_main_thread_arrives_and_a_process_that_is_gone_is_said() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        signal_main_thread(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        signal_main_thread(process.pid, signal.SIGTERM)
