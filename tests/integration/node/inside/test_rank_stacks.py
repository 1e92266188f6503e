"""What a rank offers to those who look at it: where it is, by a signal, into a memfd that is still its own."""

from __future__ import annotations

from tests.support.golden import golden
from tests.support.node.rank_process import run_rank

OFFER = """
import os, signal, threading
from _sgpu_inside import linux, protocol, rank
fd = rank._offer_stacks()
def ask(number):
    linux.signal_main_thread(os.getpid(), number)
def answer():
    return os.pread(fd, 1 << 16, 0).decode()
"""


def test_the_stacks_come_where_the_signal_finds_it_and_the_word_when_it_is_back_in_python() -> None:
    said = run_rank(
        OFFER
        + """
ask(protocol.STACK_SIGNAL)
print("in ask" in answer(), "passed" in answer(), os.readlink(f"/proc/self/fd/{fd}"), os.get_inheritable(fd))
os.ftruncate(fd, 0)
ask(protocol.PASS_SIGNAL)
print("in ask" in answer(), answer().encode().endswith(protocol.PASSED))
"""
    )
    assert said == golden("node.rank_stacks.true-false-memfd")


def test_a_main_thread_in_a_call_that_does_not_come_back_says_nothing() -> None:
    said = run_rank(
        OFFER
        + """
import ctypes, sys, time
libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
sys.setswitchinterval(1000)  # the other thread runs only while the main thread waits in C
def ask_and_let_go():
    time.sleep(0.05)
    ask(protocol.PASS_SIGNAL)
    ask(protocol.STACK_SIGNAL)
    while "Stack (most recent call first):" not in answer():
        pass
    print("passed" in answer(), flush=True)
    libc.sem_post(semaphore)
threading.Thread(target=ask_and_let_go).start()
print(libc.sem_wait(semaphore), "passed" in answer())
"""
    )
    assert said == "False\n0 True\n"


def test_a_file_that_took_the_number_of_the_memfd_is_left_alone() -> None:
    said = run_rank(
        OFFER
        + """
os.close(fd)
other = os.memfd_create("the user's")
assert other == fd
ask(protocol.PASS_SIGNAL)
print(os.fstat(other).st_size)
os.close(other)
ask(protocol.PASS_SIGNAL)
"""
    )
    assert said == "0\n"
