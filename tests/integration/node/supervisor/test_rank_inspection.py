"""A look at a rank: who runs Python is asked in Python alone, who is in a call is asked in C."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from typing import cast

import pytest

from serverless_gpu.model.hangs.hang_detection import RankInspection
from serverless_gpu.node.inside import linux, protocol
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.rank_inspection import RankInspector
from tests.support.node.rank_process import INSIDE, PREAMBLE

_LIMIT_S = 30.0
OFFER = f"""
{PREAMBLE}
from _sgpu_inside import rank
STACK = rank._offer_stacks()
"""
CHANGES_ITS_FRAMES = """
def key(number):
    return number
def train():
    print(STACK, flush=True)
    while True:
        sorted(range(50), key=key)
train()
"""
IN_A_CALL = """
import ctypes
libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
def train():
    print(STACK, flush=True)
    libc.sem_wait(semaphore)
train()
"""
BUSY_IN_A_CALL = """
import hashlib
def train():
    print(STACK, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
train()
"""


class OneRank:
    """A gang of one rank that is no child of a stem.

    Attributes:
        signals: what was sent to it.
    """

    def __init__(self, process: subprocess.Popen[str], stack: int) -> None:
        self.pids, self.stacks = {0: process.pid}, {0: stack}
        self.signals: list[int] = []
        self._process = process

    def signal(self, number: int, ranks: Collection[int]) -> None:
        for _ in ranks:
            self.signals.append(number)
            linux.signal_main_thread(self._process.pid, number)

    def look(self) -> RankInspection:
        """Look once."""
        looking = RankInspector(cast(LocalGang, self), [0], False, time.monotonic_ns())
        until = time.monotonic() + _LIMIT_S
        while (found := looking.poll(time.monotonic_ns())) is None:
            assert time.monotonic() < until
            time.sleep(0.002)
        assert self._process.poll() is None, "it was ended by the look"
        return found[0]


@contextlib.contextmanager
def one_rank(code: str) -> Iterator[OneRank]:
    command = [sys.executable, "-c", OFFER + code, str(INSIDE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:  # it says its number from inside of `train`
            yield OneRank(process, int(process.stdout.readline()))
        finally:
            process.kill()


def test_a_rank_that_runs_python_is_never_read_from_c() -> None:
    with one_rank(CHANGES_ITS_FRAMES) as rank:
        looks = [rank.look() for _ in range(300)]
    assert set(rank.signals) == {protocol.PASS_SIGNAL}
    assert not [look for look in looks if "train" not in [frame.function for frame in look.stack.frames]]
    assert [look.passed for look in looks] == [False] + [True] * 299


@pytest.mark.parametrize("code", [IN_A_CALL, BUSY_IN_A_CALL])
def test_a_rank_in_a_call_is_asked_in_c_and_does_not_pass(code: str) -> None:
    with one_rank(code) as rank:
        while protocol.STACK_SIGNAL not in rank.signals:
            rank.look()  # it may be on its way into the call still
        rank.signals.clear()
        looks = [rank.look(), rank.look()]
    assert rank.signals == [protocol.PASS_SIGNAL, protocol.STACK_SIGNAL] * 2
    assert [look.stack.frames[0].function for look in looks] == ["train"] * 2
    assert not any(look.passed for look in looks)
