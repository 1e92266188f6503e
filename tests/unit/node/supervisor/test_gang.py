"""What a rank says reaches whoever watches, bounded; what it says of a lost cluster is the failure's text."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.lifecycle.attempt import RankExited, RankFailed, Reason
from serverless_gpu.node.processes.process_tree import MemoryWatch
from serverless_gpu.node.supervisor.ray_cluster import memory_bytes
from tests.support.golden import golden
from tests.support.node.gang import Line


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    """Yield a line to a gang."""
    made = Line(tmp_path)
    yield made
    made.rank.close()
    made.gang.close()


def test_a_sentence_is_told_and_with_a_note_it_is_in_the_receipt_too(line: Line) -> None:
    assert line.hear(event="say", text="starting") == []
    assert line.hear(event="say", text="Ray 2.60.0: 1 node", note=True) == []
    assert (line.said, line.account.notes) == (["starting", "Ray 2.60.0: 1 node"], ["Ray 2.60.0: 1 node"])


def test_a_sentence_is_one_line_of_bounded_length(line: Line) -> None:
    line.hear(event="say", text="a\x1b[31m\nb" + 2_000 * "x")
    [sentence] = line.said
    assert sentence.startswith("a [31m bxxx") and len(sentence) == 1_000 and sentence.isprintable()


def test_a_run_says_no_more_than_fifty_sentences(line: Line) -> None:
    for number in range(60):
        line.hear(event="say", text=str(number), note=True)
    assert line.said == line.account.notes == [str(number) for number in range(50)]


def test_a_sentence_without_text_is_no_event(line: Line) -> None:
    with pytest.raises(ValueError, match=re.escape(golden("node.gang.field-text-must"))):
        line.hear(event="say")


def test_F45_a_lost_cluster_is_a_failure_of_its_node_in_the_tasks_own_words(line: Line) -> None:
    record = {"kind": "engine_head_lost", "type": "EngineHeadLost", "message": "Ray on node n1 is gone"}
    [event] = line.hear(event="failed", failure=record)
    assert isinstance(event, RankFailed)
    failure = event.failure
    assert (failure.reason, failure.rank, failure.detail) == (
        Reason.ENGINE_HEAD_LOST,
        0,
        golden("node.gang.ray-node-n1"),
    )


def test_F45_a_cluster_that_never_came_up_is_a_failed_start_while_user_code_has_not_begun(line: Line) -> None:
    record = {"kind": "start_failed", "type": "RunError", "message": "Ray could not be started on node n1: no room"}
    [event] = line.hear(event="failed", failure=record)
    assert isinstance(event, RankFailed)
    assert (event.failure.reason, event.failure.detail) == (Reason.START_FAILED, record["message"])
    line.hear(event="exec", stack=-1)
    [event] = line.hear(event="failed", failure=record)
    assert isinstance(event, RankFailed)
    assert event.failure.reason is Reason.ENGINE_HEAD_LOST, "it may not say so then"


@pytest.mark.parametrize("kind", ["engine_head_lost", "start_failed"])
def test_F45_a_cluster_that_memory_ended_is_told_as_that(
    line: Line, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryWatch, "out_of_memory", lambda _: True)
    lost = {"kind": kind, "message": "Ray on node n1 is gone"}
    line.gang.memory = MemoryWatch(None, 1, None)
    [event] = line.hear(event="failed", failure=lost)
    assert isinstance(event, RankFailed)
    assert event.failure.reason == kind, "another process of the machine may have been killed"
    monkeypatch.setattr(MemoryWatch, "is_exact", True)
    [event] = line.hear(event="failed", failure=lost)
    assert isinstance(event, RankFailed)
    assert event.failure.reason is Reason.HOST_OOM
    assert event.failure.detail.startswith("killed by the kernel because host memory ran out")
    [event] = line.hear(event="failed", failure={"kind": "exception", "type": "E", "message": "m"})
    assert isinstance(event, RankFailed)
    assert event.failure.reason is Reason.RANK_RAISED


@pytest.mark.parametrize(("share", "reason"), [(100, False), (4, True)])
def test_F02_a_small_rank_that_somebody_kills_did_not_lack_memory(
    line: Line, share: int, reason: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel killed a process of another run in the meantime, and only the machine has a counter."""
    monkeypatch.setattr(MemoryWatch, "out_of_memory", lambda _: True)
    line.gang.memory = MemoryWatch(None, 1, None)
    [event] = line.hear(event="exited", status=int(signal.SIGKILL), peak=memory_bytes()[0] // share)
    assert isinstance(event, RankExited)
    assert event.out_of_memory is reason


def test_there_is_one_process_whatever_the_number_of_devices(line: Line) -> None:
    assert line.gang.numbers == range(1)
