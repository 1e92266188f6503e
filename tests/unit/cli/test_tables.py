"""Tables fit the terminal: what is cut, what is never cut, and what a file gets."""

from __future__ import annotations

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.cli.output import CELL_CHARACTERS_MIN, columns, fit_table, print_table

RUN = "01m7wtgc0mdrq1jtwz87xq3ma4"
HEAD = ["RUN", "NAME", "STATE", "STARTED", "USED"]
ROW = [RUN, "train", "SUCCEEDED", "2026-11-29 22:02:10", "0.070 GPU-seconds, 1.20 USD"]
cells = st.text(st.characters(categories=("L", "N", "Zs")), max_size=40)


def test_identifiers_are_short_even_where_everything_fits() -> None:
    assert fit_table(HEAD, [ROW], 200) == [[RUN[-8:], *ROW[1:]]]


def test_identifiers_of_other_things_stay_whole() -> None:
    assert fit_table(["ID", "STATE"], [[RUN, "good"]], 80) == [[RUN, "good"]]


def test_a_terminal_gets_colours_unless_the_user_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = columns([["STATE", "NAME"], ["FAILED", "train"]])
    printed: list[str] = []
    monkeypatch.setattr("click.echo", printed.append)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_table(["STATE", "NAME"], [["FAILED", "train"]])
    assert [click.unstyle(line) for line in printed] == plain
    assert "\x1b[31mFAILED\x1b[0m" in printed[1]
    monkeypatch.setenv("NO_COLOR", "1")
    printed.clear()
    print_table(["STATE", "NAME"], [["FAILED", "train"]])
    assert printed == plain


def test_moments_lose_year_and_seconds_before_text_is_cut() -> None:
    assert fit_table(HEAD, [ROW], 75) == [[RUN[-8:], "train", "SUCCEEDED", "11-29 22:02", ROW[4]]]


def test_the_widest_column_is_cut_first() -> None:
    (row,) = fit_table(HEAD, [ROW], 60)
    assert row[:4] == [RUN[-8:], "train", "SUCCEEDED", "11-29 22:02"]
    assert row[4].endswith("…") and ROW[4].startswith(row[4][:-1])


@given(rows=st.lists(st.lists(cells, min_size=4, max_size=4), min_size=1, max_size=5), width=st.integers(50, 200))
def test_lines_fit_the_width_and_no_cell_is_cut_below_the_least(rows: list[list[str]], width: int) -> None:
    head = ["ONE", "TWO", "THREE", "FOUR"]
    fitted = fit_table(head, rows, width)
    assert max(map(len, columns([head, *fitted]))) <= width
    for row, cut in zip(rows, fitted, strict=True):
        for cell, short in zip(row, cut, strict=True):
            assert short == cell or len(short) >= CELL_CHARACTERS_MIN


def test_a_pipe_gets_whole_cells(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(HEAD, [ROW])
    assert capsys.readouterr().out.splitlines()[1].split()[0] == RUN
