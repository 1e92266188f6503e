r"""Following `\r` and "cursor up": progress bars are one line each, everything else is lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.client.display.terminal_screen import LINE_CHARACTERS_MAX, ROWS_MAX, Screen
from tests.support.client.screen import NESTED
from tests.support.golden import golden

S = 1_000_000_000

FROM_TERMINAL = NESTED.replace("\n", "\r\n")


def lines(text: str) -> list[str]:
    made = Screen()
    return [*made.feed(text, 0), *made.end()]


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("a\nb\n", ["a", "b"]),
        ("\n\n", ["", ""]),
        ("no end", ["no end"]),
        ("DOS\r\nlines\r\n", ["DOS", "lines"]),
        ("\r10%\r20%\r30%\n", ["30%"]),
        ("10%\r20%\r30%", ["30%"]),
        ("step 1\rstep 2\r", ["step 2"]),
        ("long text\rshort\n", ["short"]),
        ("\r45%\r\x1b[Kcleared\n", ["cleared"]),
        ("45%\x1b[2K\rcleared\n", ["cleared"]),
        ("45%\x1b[1Gnext\n", ["next"]),
        ("\rbar 10%\r       \rhello\n\rbar 20%\r       \rworld\n\rbar 30%\n", ["hello", "world", "bar 30%"]),
        ("\x1b[31mred\x1b[0m\x1b[K\n", ["\x1b[31mred\x1b[0m\x1b[K"]),
        ("\x1b[5Aup from the top\n", ["up from the top"]),
        ("one\ntwo\x1b[A\x1b[Athree\n", ["one", "twothree"]),
        ("\r1\n\r2\x1b[Fone\n\x1b[Etwo\n", ["one", "two"]),
        (NESTED, ["epochs: 100%|█| 2/2 [00:00<00:00, 4894.1", "done"]),
        (FROM_TERMINAL, ["epochs: 100%|█| 2/2 [00:00<00:00, 4894.1", "done"]),
    ],
)
def test_F50_lines_are_final_states(text: str, final: list[str]) -> None:
    assert lines(text) == final
    made = Screen()
    pieces = [line for character in text for line in made.feed(character, 0)]
    assert [*pieces, *made.end()] == final, "split anywhere"


def test_ordinary_lines_are_final_at_once() -> None:
    made = Screen()
    assert made.feed("a\n\nb\nlo", 0) == ["a", "", "b"]
    assert (made.open_rows, made.held, made.moving) == (["lo"], False, False)
    assert made.feed("ss\n", 0) == ["loss"]
    assert made.open_rows == []


def test_a_bar_that_has_ended_is_final_with_the_next_newline_or_after_a_moment() -> None:
    made = Screen()
    assert made.feed("\r50%\r100%\n", 0) == []
    assert (made.open_rows, made.held) == (["100%"], True)
    assert made.feed("after\n", 0) == ["100%", "after"]
    assert made.feed("\r100%\n", S) == []
    assert made.settle(S + S // 4) == []
    assert made.settle(S + S // 2) == ["100%"]
    assert not made.held


def test_bars_below_each_other_stay_open_while_they_move() -> None:
    made = Screen()
    cut = NESTED.index("\repochs:  50%")
    assert made.feed(NESTED[: cut - 45], 0) == []
    assert [row[:12] for row in made.open_rows] == ["epochs:   0%", "steps: 100%|"]
    assert made.settle(60 * S) == [], "the cursor rests on the first: nobody has left it"
    assert made.feed(NESTED[cut - 45 :], 61 * S) == []
    assert made.settle(62 * S) == []
    assert made.settle(64 * S) == ["epochs: 100%|█| 2/2 [00:00<00:00, 4894.1", "done"]


def test_three_bars_below_each_other() -> None:
    step = "\ra{0}\n\rb{0}\x1b[A\n\n\rc{0}\x1b[A\x1b[A"
    made = Screen()
    assert [line for number in range(50) for line in made.feed(step.format(number), number)] == []
    assert made.open_rows == ["a49", "b49", "c49"]


def test_after_bars_lines_are_final_at_once_again() -> None:
    made = Screen()
    made.feed(NESTED, 0)
    made.settle(9 * S)
    assert made.feed("first\n\nsecond\n", 9 * S) == ["first", "", "second"]


def test_a_bar_may_leave_a_row_free_above_it() -> None:
    made = Screen()
    made.feed("\ra1\n\n\rc1\x1b[A\x1b[A", 0)
    assert made.feed("\ra2\n\n\rc2\x1b[A\x1b[A", 0) == []
    assert made.open_rows == ["a2", "c2"]


@pytest.mark.parametrize("end", ["\n", "\x1b[B"])
def test_bars_of_somebody_who_rests_below_them(end: str) -> None:
    made = Screen()
    printed = made.feed("\ra0\n\rb0\n", 0)
    for number in range(1, 50):
        printed += made.feed(f"\x1b[2A\r\x1b[2Ka{number}{end}\r\x1b[2Kb{number}\n", number * S)
        printed += made.settle(number * S + S // 2)
    assert printed == ["a0"], "nobody could know yet that it would be drawn again"
    assert made.open_rows[-2:] == ["a49", "b49"]
    assert made.settle(99 * S)[-2:] == ["a49", "b49"]


def test_F50_rows_are_bounded() -> None:
    made = Screen()
    made.feed("\ra\n\rb\x1b[A", 0)
    final = made.feed("".join(f"\n\r{number}" for number in range(1000)), 0)
    assert len(made.open_rows) <= ROWS_MAX
    assert [*final, *made.end()] == ["a", *map(str, range(1000))]


def test_F50_a_long_line_is_cut_for_the_view() -> None:
    made = Screen()
    for _ in range(100):
        made.feed("x" * 10_000, 0)
    (line,) = made.feed("\n", 0)
    more = 1_000_000 - LINE_CHARACTERS_MAX
    assert line == "x" * LINE_CHARACTERS_MAX + golden("client.screen.characters-more-line", more=more)


def test_a_bar_is_glimpsed_every_ten_seconds_when_it_has_moved() -> None:
    made = Screen()
    made.feed("plain\n\r10%", 0)
    assert made.glimpse(9 * S) == []
    made.feed("\r20%", 9 * S)
    assert (made.glimpse(10 * S), made.glimpse(11 * S)) == (["20%"], [])
    assert made.glimpse(20 * S) == [], "it has not moved"
    made.feed("\r30%", 21 * S)
    assert made.glimpse(30 * S) == ["30%"]
    made.feed("\r100%\nafter\nunfinished", 31 * S)
    assert made.glimpse(99 * S) == [], "an unfinished line is no bar"


@given(st.lists(st.text(st.sampled_from("\r\n\x1b[AKG21ab "), max_size=6), max_size=20))
def test_nothing_depends_on_where_the_text_is_split(pieces: list[str]) -> None:
    made = Screen()
    split = [line for piece in pieces for line in made.feed(piece, 0)]
    assert [*split, *made.end()] == lines("".join(pieces))
