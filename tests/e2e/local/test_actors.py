"""Actors: one object per rank, made once; its methods called many times; ends that are named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.errors import NotDistributable, NotPicklable, RankCrashed, SessionEnded
from tests.support.golden import golden
from tests.support.local.observe import wait_for

pytestmark = pytest.mark.usefixtures("warm")


def where_am_i() -> int:
    return os.getpid()


class Counter:
    """Counts the calls of its process."""

    def __init__(self, start: int, world_size: int = 0) -> None:
        self.value = start
        self.world_size = world_size
        self.set_up = 0

    def setup(self, rank: int) -> None:
        self.set_up += 1
        self.value += 100 * rank

    def add(self, amount: int = 1) -> tuple[int, int, int, int]:
        self.value += amount
        return self.value, self.set_up, self.world_size, os.getpid()

    def fail(self, rank: int) -> None:
        if rank == 1:
            raise LookupError("own")

    def fail_alone(self, rank: int) -> None:
        if rank == 0:
            raise LookupError("own")
        signal.pause()

    def die(self, rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def unpicklable(self) -> Callable[[], object]:
        return (number for number in [1]).__next__


class Broken:
    def setup(self) -> None:
        raise LookupError("no weights")


def test_23A5_setup_runs_once_and_calls_reach_the_same_processes() -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        with session.actors(Counter, 7) as counter:
            first, second = counter.add.distributed(), counter.add.distributed(amount=2)
        with pytest.raises(SessionEnded, match="closed"):
            counter.add.distributed()
        assert len(counter.run.receipt().gpus) == 2
        assert len(session.distributed(where_am_i)) == 2  # the devices are free again
    assert [entry[:3] for entry in first] == [(8, 1, 2), (108, 1, 2)]
    assert [entry[:3] for entry in second] == [(10, 1, 2), (110, 1, 2)]
    assert [entry[3] for entry in first] == [entry[3] for entry in second]


def test_23A5_an_exception_of_one_call_leaves_the_ranks_alive() -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        counter = session.actors(Counter, 0)
        with pytest.raises(LookupError, match="own") as caught:
            counter.fail.distributed()
        assert any("rank 1" in note for note in caught.value.__notes__)
        with pytest.raises(Exception, match="pickle"):
            counter.unpicklable.distributed()
        with pytest.raises(NotPicklable, match=r"Counter\.add"):
            counter.add.distributed(number for number in [1])
        assert [entry[0] for entry in counter.add.distributed()] == [1, 101]


def test_23A5_ranks_that_wait_for_one_that_failed_are_ended_after_the_grace() -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True, grace=1) as session:
        counter = session.actors(Counter, 0)
        with pytest.raises(LookupError, match="own") as caught:
            counter.fail_alone.distributed()
        assert any("did not answer" in note for note in caught.value.__notes__)
        with pytest.raises(SessionEnded, match=re.escape(golden("local.actors.others-did-return"))):
            counter.add.distributed()


def test_23A5_a_dead_rank_is_named_and_the_session_goes_on() -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        counter = session.actors(Counter, 0)
        with pytest.raises(RankCrashed, match="rank 1"):
            counter.die.distributed()
        with pytest.raises(SessionEnded, match=re.escape(golden("local.actors.rank-ended"))):
            counter.add.distributed()
        with session.actors(Counter, 1) as again:
            assert [entry[0] for entry in again.add.distributed()] == [2, 102]


def test_23A5_setup_that_raises_raises_here() -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        with pytest.raises(LookupError, match="no weights"):
            session.actors(Broken)
        with pytest.raises(NotDistributable, match="takes a class"):
            session.actors(len)


def test_23A5_actors_end_when_no_call_comes() -> None:
    with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True, idle_timeout=2) as session:
        counter = session.actors(Counter, 0)
        wait_for(lambda: counter.run.wait(0), "the actors have ended")
        with pytest.raises(SessionEnded, match="idle_timeout"):
            counter.add.distributed()


def test_23A5_a_decorated_class_has_its_own_number_of_gpus() -> None:
    decorated = distributed(gpus=1, gpu_type="H100", quiet=True)(Counter)
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        counter = session.actors(decorated, 0)
        assert len(counter.add.distributed()) == 1
        with pytest.raises(AttributeError, match="no method"):
            counter.nothing.distributed()
