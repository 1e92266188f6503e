"""Text of a rank as lines and the progress line being redrawn, whatever the pieces it comes in."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from serverless_gpu.client.progress import RankText


def test_lines_come_when_they_are_whole() -> None:
    text = RankText()
    assert text.feed("a\nb") == ["a"]
    assert text.feed("c\n\n") == ["bc", ""]
    assert text.feed("end") == []
    assert text.finish() == ["end"]
    assert text.finish() == []


def test_F49_a_redrawn_line_is_progress_until_its_newline() -> None:
    text = RankText()
    assert text.feed("start\n\r 10%") == ["start"]
    assert text.progress == "10%"
    assert text.feed("\r 20%") == []
    assert text.progress == "20%"
    assert text.feed("\r100%\nnext") == ["100%"]
    assert text.progress == ""
    assert text.finish() == ["next"]


def test_a_bar_that_was_cleared_leaves_nothing() -> None:
    text = RankText()
    assert text.feed("\r 10%\r     \r") == []
    assert text.progress == ""
    assert text.finish() == []


def test_carriage_returns_before_newlines_are_line_ends() -> None:
    text = RankText()
    assert text.feed("one\r\ntwo\r") == ["one"]
    assert text.feed("\n") == ["two"]
    assert text.progress == ""


def test_a_line_without_end_is_cut() -> None:
    text = RankText()
    lines = text.feed("x" * 200_000)
    assert [len(line) for line in lines] == [65_536] * 3
    assert text.finish() == ["x" * (200_000 - 3 * 65_536)]


class Pieces(io.StringIO):
    """Keeps what was written in the pieces it was written in."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return len(text)


def bars() -> list[str]:
    """Return what two nested bars of tqdm write."""
    sink = Pieces()
    for _ in tqdm(range(3), desc="epoch", file=sink, mininterval=0, ascii=True, ncols=60):
        for _ in tqdm(range(50), desc="batch", file=sink, mininterval=0, ascii=True, ncols=60, leave=False):
            pass
    return sink.pieces


def test_F49_nested_bars_are_progress_and_only_the_finished_one_is_a_line() -> None:
    text = RankText()
    lines: list[str] = []
    seen: list[str] = []
    for piece in bars():
        lines += text.feed(piece)
        seen.append(text.progress)
    lines += text.finish()
    # Before the first move up nobody can know that the outer bar will be redrawn.
    assert [line.partition(":")[0].strip() for line in lines] == ["epoch", "epoch"]
    assert "3/3" in lines[-1]
    assert any("epoch" in both and "batch" in both for both in seen)


def test_lines_above_nested_bars_are_printed_when_nothing_has_come_for_a_while() -> None:
    text = RankText()
    text.feed("\router\n\rinner\x1b[A")
    text.feed("\rsaid\n\router")
    assert text.settle() == []
    assert text.settle() == ["said"]
    assert text.settle() == []


@given(
    st.lists(st.sampled_from(["a", "b\n", "\r", "\n", "\x1b", "[", "A", "\x1b[A", "\x1b[2A"]), max_size=40), st.data()
)
def test_the_pieces_it_comes_in_do_not_matter(tokens: list[str], data: st.DataObject) -> None:
    whole = "".join(tokens)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    if "\x1b" in whole:  # whether the cursor moves up at all is not known before it does
        whole, pieces = "\x1b[A" + whole, ["\x1b[A", *pieces]
    one, many = RankText(), RankText()
    in_one = [*one.feed(whole), *one.finish()]
    in_many = [line for piece in pieces for line in many.feed(piece)] + many.finish()
    assert in_one == in_many


@pytest.mark.parametrize("text", ["", "\x1b[A\x1b[A", "\x1b", "\x1b[31mred\x1b[0m"])
def test_odd_pieces_do_no_harm(text: str) -> None:
    rank = RankText()
    assert rank.feed(text) == []
    rank.settle()
    rank.finish()
