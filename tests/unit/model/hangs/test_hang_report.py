"""The words about a run that stands still, whole."""

from __future__ import annotations

import msgspec
import pytest

from serverless_gpu.model.hangs.hang_detection import RankInspection
from serverless_gpu.model.hangs.hang_report import (
    RANK_CHARACTERS_MAX,
    HangFinding,
    ranks_text,
    report,
    sentence,
    stacks,
)
from serverless_gpu.model.hangs.stacks import Stack, StackFrame, Thread
from tests.support.golden import golden

C10D = StackFrame("/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce")
TRAIN, LOAD = StackFrame("/home/me/train.py", 30, "train"), StackFrame("/home/me/train.py", 41, "load_batch")
FEEDER = Thread("Thread 0x2 (most recent call first):", (StackFrame("/usr/lib/python3.11/threading.py", 327, "wait"),))
NATIVE = Thread("Thread 0x3 (most recent call first):", ())


def look(rank: int, *frames: StackFrame, **fields: object) -> RankInspection:
    made = RankInspection(
        rank=rank,
        pid=100 + rank,
        state="S",
        channel="futex_do_wait",
        cpu_ms=250,
        stack=Stack(Thread("Current thread 0x1 (most recent call first):", frames)),
    )
    return msgspec.structs.replace(made, **fields)


def finding(
    *looks: RankInspection, waiting: tuple[int, ...], elsewhere: tuple[int, ...], moving: tuple[int, ...] = ()
) -> HangFinding:
    return HangFinding(
        waiting=waiting,
        elsewhere=elsewhere,
        looks={look.rank: look for look in looks},
        first={look.rank: msgspec.structs.replace(look, cpu_ms=look.cpu_ms - 50) for look in looks},
        moving=frozenset(moving),
        silent_ms=600_000,
        watched_ms=300_000,
    )


WAITING = [look(rank, C10D, TRAIN) for rank in (0, 2, 3)]
SENTENCES: dict[str, tuple[HangFinding, str]] = {
    "one is elsewhere": (
        finding(*WAITING, look(1, LOAD, TRAIN), waiting=(0, 2, 3), elsewhere=(1,)),
        "ranks 0, 2, 3 wait in train.py:30 train: rank 1 is elsewhere, in train.py:41 load_batch",
    ),
    "one is busy": (
        finding(*WAITING[:1], look(1, LOAD, TRAIN), waiting=(0,), elsewhere=(1,), moving=(1,)),
        "rank 0 waits in train.py:30 train: rank 1 is busy, in train.py:41 load_batch",
    ),
    "one is stopped": (
        finding(*WAITING[:1], look(1, state="T"), waiting=(0,), elsewhere=(1,)),
        "rank 0 waits in train.py:30 train: rank 1 is stopped (SIGSTOP)",
    ),
    "two are under a debugger": (
        finding(*WAITING[:1], look(1, state="t"), look(4, state="t"), waiting=(0,), elsewhere=(1, 4)),
        "rank 0 waits in train.py:30 train: ranks 1, 4 are stopped by a debugger",
    ),
    "F05 one has returned": (
        finding(*WAITING, waiting=(0, 2, 3), elsewhere=(1,)),
        "ranks 0, 2, 3 wait in train.py:30 train: rank 1 has returned",
    ),
    "F05 two have, one is elsewhere in an unknown place": (
        finding(*WAITING[:1], look(1), waiting=(0,), elsewhere=(1, 2, 3)),
        "rank 0 waits in train.py:30 train: rank 1 is elsewhere, ranks 2, 3 have returned",
    ),
    "those that wait do so in two places": (
        finding(look(0, C10D, TRAIN), look(1, C10D, LOAD), look(2, TRAIN), waiting=(0, 1), elsewhere=(2,)),
        "ranks 0, 1 wait: rank 2 is elsewhere, in train.py:30 train",
    ),
    "all wait": (
        finding(look(0, C10D, TRAIN), look(1, C10D, LOAD), look(2), waiting=(0, 1, 2), elsewhere=()),
        "every rank waits (rank 0 in train.py:30 train, rank 1 in train.py:41 load_batch, rank 2 in an unknown place)",
    ),
    "none waits": (
        finding(look(0, state="T"), look(1, state="T"), waiting=(), elsewhere=(0, 1)),
        "ranks 0, 1 are stopped (SIGSTOP)",
    ),
    "many places": (
        finding(
            look(0, TRAIN),
            *(look(rank, StackFrame("/home/me/a.py", rank, "f")) for rank in range(1, 7)),
            waiting=(0,),
            elsewhere=(1, 2, 3, 4, 5, 6),
        ),
        "rank 0 waits in train.py:30 train: rank 1 is elsewhere, in a.py:1 f, rank 2 is elsewhere, in a.py:2 f, "
        "rank 3 is elsewhere, in a.py:3 f, and more",
    ),
}


@pytest.mark.parametrize(("found", "expected"), SENTENCES.values(), ids=SENTENCES)
def test_the_sentence(found: HangFinding, expected: str) -> None:
    assert sentence(found) == golden("model.hang_report.output-10-min", expected=expected)


def test_many_ranks_are_not_all_listed() -> None:
    assert ranks_text([3]) == "rank 3" and ranks_text(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert ranks_text(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_the_file_whole() -> None:
    found = finding(
        look(0, C10D, TRAIN, stack=Stack(Thread("Current", (C10D, TRAIN)), (FEEDER, NATIVE))),
        look(1, state="T", channel="", note="kill -CONT 101 lets it go on"),
        look(3, LOAD, state="R", channel=""),
        waiting=(0,),
        elsewhere=(1, 2, 3),
    )
    assert report(found, "run 01k, attempt 1, at 14:03:22", range(4)) == golden(
        "model.hang_report.run-01k-attempt", file=C10D.file
    )


def test_the_stacks_of_one_rank_are_bounded() -> None:
    deep = tuple(StackFrame("/home/me/" + "a" * 1000 + ".py", line, "f") for line in range(400))
    found = finding(look(0, *deep), look(1, TRAIN), waiting=(0,), elsewhere=(1,))
    text = report(found, "run", range(2))
    assert RANK_CHARACTERS_MAX < len(text) < RANK_CHARACTERS_MAX + 5_000
    assert golden("model.hang_report.characters-left-out") in text
    assert len(stacks(finding(look(0, *deep), waiting=(0,), elsewhere=()))[0]) == 4_000


def test_whose_stacks_the_exception_carries() -> None:
    load, train = '  File "/home/me/train.py", line 41 in load_batch', '  File "/home/me/train.py", line 30 in train'
    assert stacks(finding(look(0, TRAIN), look(1, LOAD), waiting=(0,), elsewhere=(1, 2))) == {1: load}
    assert stacks(finding(look(0, TRAIN), look(1, TRAIN), waiting=(0, 1), elsewhere=(2,))) == {0: train, 1: train}
    many = [look(rank, LOAD) for rank in range(9)]
    assert list(stacks(finding(*many, waiting=(), elsewhere=tuple(range(9))))) == [0, 1, 2, 3]


def test_a_counter_that_went_back_is_no_time() -> None:
    found = finding(look(0, TRAIN), waiting=(0,), elsewhere=())
    found = msgspec.structs.replace(found, first={0: look(0, TRAIN, cpu_ms=900)}, looks={0: look(0, TRAIN, state="?")})
    assert "\n0     100        unknown, futex_do_wait, 0 ms\n" in report(found, "run", range(1))
