"""The queue of a slow watcher: fair between ranks, bounded, true about what is missing and how it ended."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.node.base import protocol
from serverless_gpu.node.output import attached_clients
from serverless_gpu.node.output.attached_clients import Outbox

SHARE = 50_000
STARTED = protocol.Started(at_ns=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached_clients, "QUEUED_CHARACTERS_MAX", 4 * SHARE)
    monkeypatch.setattr(attached_clients, "RANK_CHARACTERS_MAX", SHARE)


def show(box: Outbox, rank: int, text: str, *, stream: str = "stdout", lost: bool = False) -> None:
    box.show(protocol.Output(rank=rank, stream=stream, text=text), len(text), lost)


def take(box: Outbox, count: int | None = None) -> list[protocol.Sendable]:
    """Read so many messages, or all."""
    taken: list[protocol.Sendable] = []
    while (message := box.first()) is not None and (count is None or len(taken) < count):
        taken.append(message)
        box.sent()
    return taken


def text(messages: list[protocol.Sendable], rank: int, stream: str = "stdout") -> str:
    """Return what a rank wrote, with the numbers of bytes that are missing."""
    found = ""
    for message in messages:
        if isinstance(message, protocol.Output) and (message.rank, message.stream) == (rank, stream):
            found += message.text
        elif isinstance(message, protocol.Skipped) and (message.rank, message.stream) == (rank, stream):
            found += f"<{message.bytes}{' lost' if message.lost else ''}>"
    return found


def test_pieces_of_one_stream_become_one_message_also_between_those_of_other_ranks() -> None:
    box = Outbox()
    for number in range(100):
        for rank in range(8):
            show(box, rank, f"line {number}\n")
    assert len(box) == 8
    messages = take(box)
    assert all(text(messages, rank) == "".join(f"line {number}\n" for number in range(100)) for rank in range(8))


def test_streams_of_a_rank_and_sentences_keep_their_places() -> None:
    box = Outbox()
    show(box, 0, "1\n")
    show(box, 0, "2\n", stream="stderr")
    show(box, 0, "3\n")
    box.put(STARTED)
    show(box, 0, "4\n")
    assert [message.text if isinstance(message, protocol.Output) else message for message in take(box)] == [
        "1\n",
        "2\n",
        "3\n",
        STARTED,
        "4\n",
    ]


def test_what_is_being_sent_does_not_grow_afterwards() -> None:
    box = Outbox()
    show(box, 0, "1\n")
    assert text(take(box, 1), 0) == "1\n"
    show(box, 0, "2\n")
    assert text(take(box), 0) == "2\n"


def test_F49_a_flood_of_one_rank_takes_nothing_from_the_others() -> None:
    box = Outbox()
    for _ in range(1_000):
        show(box, 0, "y\n" * 500)
    for number in range(1_000):
        show(box, 1, f"line {number}\n")
    messages = take(box)
    assert text(messages, 1) == "".join(f"line {number}\n" for number in range(1_000))
    assert len(text(messages, 0)) < SHARE + 2_000


def test_F49_the_end_of_every_rank_is_there_when_the_last_word_is_said() -> None:
    box = Outbox()
    for number in range(200):
        for rank in range(8):
            show(box, rank, f"{number:06} {'x' * 992}\n")
    for rank in range(8):
        show(box, rank, "END\n")
    box.put(STARTED)
    messages = take(box)
    assert messages[-1] == STARTED
    for rank in range(8):
        told = text(messages, rank)
        before, missing, end = told.replace(">", "<").split("<")
        assert end.endswith(f"{'x' * 992}\nEND\n") and end.startswith("000")
        assert len(before) + int(missing) + len(end) == 200_000 + 4, "every byte is shown or counted"
    told_missing = sum(message.bytes for message in messages if isinstance(message, protocol.Skipped))
    assert told_missing == box.dropped_bytes > 0


def test_F49_lost_and_kept_output_is_counted_apart() -> None:
    box = Outbox()
    show(box, 0, "x" * SHARE)
    show(box, 0, "a" * 10_000)
    show(box, 0, "b" * 10_000, lost=True)
    box.put(STARTED)
    told = text(take(box), 0).lstrip("x")
    assert told == "<10000><5904 lost>" + "b" * 4096


def test_F49_who_reads_again_is_told_how_much_is_missing_and_how_that_ended() -> None:
    box = Outbox()
    for _ in range(10):
        show(box, 0, "x" * 8_000)
    assert box.dropped_bytes > 0
    show(box, 0, "\nEND\n")
    first = take(box, 2)
    assert text(first, 0) == "x" * 16_000
    show(box, 0, "more\n")
    rest = take(box, 2)
    show(box, 0, "at last\n")
    told = text(rest + take(box), 0)
    assert told.endswith(">END\nmore\nat last\n")
    assert told.count("<") == 1


def test_F49_notices_of_missing_output_do_not_pile_up() -> None:
    box = Outbox()
    for _ in range(10_000):
        box.skip(0, "stdout", 1, lost=False)
    assert len(box) <= SHARE // 512 + 1
    assert sum(message.bytes for message in take(box) if isinstance(message, protocol.Skipped)) == 10_000


def test_F49_what_came_before_a_gap_is_not_its_end() -> None:
    box = Outbox()
    show(box, 0, "x" * SHARE)
    show(box, 0, "old\n")
    box.skip(0, "stdout", 1_000, lost=False)
    show(box, 0, "END\n")
    box.put(STARTED)
    assert text(take(box), 0).lstrip("x") == "<1004>END\n"


def test_reasons_for_waiting_are_bounded() -> None:
    box = Outbox()
    for number in range(attached_clients.WAITING_MAX + 10):
        box.put(protocol.WaitingNote(sentence=str(number)))
    box.put(STARTED)
    messages = take(box)
    assert (len(messages), messages[-1]) == (attached_clients.WAITING_MAX + 1, STARTED)


_STEP = st.tuples(st.integers(0, 5), st.sampled_from(["stdout", "stderr"]), st.integers(1, 9_000), st.integers(0, 3))


@given(st.lists(_STEP, max_size=200))
def test_F49_every_byte_is_shown_or_counted_and_the_queue_is_bounded(steps: list[tuple[int, str, int, int]]) -> None:
    box = Outbox()
    written: dict[tuple[int, str], int] = {}
    messages: list[protocol.Sendable] = []
    for rank, stream, size, read in steps:
        show(box, rank, "x" * (size - 1) + "\n", stream=stream)
        written[rank, stream] = written.get((rank, stream), 0) + size
        messages += take(box, read)
    box.put(STARTED)
    left = take(box)
    assert sum(len(one.text) for one in left if isinstance(one, protocol.Output)) < 6 * (SHARE + 20_000)
    messages += left
    told: dict[tuple[int, str], int] = {}
    for message in messages:
        if isinstance(message, (protocol.Output, protocol.Skipped)):
            size = len(message.text) if isinstance(message, protocol.Output) else message.bytes
            told[message.rank, message.stream] = told.get((message.rank, message.stream), 0) + size
    assert told == written
    assert len(box) == 0
    for rank in range(6):  # nothing of before counts any more: there is room for half a share of each rank
        for _ in range(2):
            show(box, rank, "x" * 8_999 + "\n")
        assert not any(isinstance(message, protocol.Skipped) for message in take(box))
