"""What of a rank's text reaches a terminal, row 2.34: a corpus of what must not, and a property for everything else."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.client.display.terminal_screen import fit, safe

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_FORBIDDEN = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_HOSTILE = st.text(
    st.sampled_from("\x1b[]0;8m?AKJHhln\x07\\\x9b\x9c\x9d\x00\r\n\t\x7f\x85\u202e\u2066aä█ ()BPX_^:c"), max_size=40
)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain text, ä, ☃, 日本, tab\tstays", "plain text, ä, ☃, 日本, tab\tstays"),
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[38;5;8;1mbright", "\x1b[38;5;8;1mbright\x1b[0m"),
        ("\x1b[38:2::1:2:3mcolons\x1b[m", "\x1b[38:2::1:2:3mcolons\x1b[m"),
        ("\x1b]52;c;cm0gLXJmIH4K\x07clipboard", "clipboard"),
        ("\x1b]0;title\x1b\\after", "after"),
        ("\x9d2;C1 title\x9cafter", "after"),
        ("\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;never ended", "\\x1b]52;c;never ended"),
        ("\x9b31mC1 colour", "\\x9b31mC1 colour"),
        ("\x9b2J", "\\x9b2J"),
        ("innocent\rharmful", "innocent\\x0dharmful"),
        ("user\u202etxt.exe", "user\\u202etxt.exe"),
        ("\u2066isolate\u2069", "\\u2066isolate\\u2069"),
        ("\x1b[2J\x1b[Hcleared\x1b[K\x1b[3A\x1b[1;1f", "cleared"),
        ("\x1b[?25lhidden cursor\x1b[?25h", "hidden cursor"),
        ("\x1b(B\x1b[mtput sgr0", "\x1b[mtput sgr0"),
        ("\x1b[6nreport", "\\x1b[6nreport"),
        ("\x1b[?1049halternate", "\\x1b[?1049halternate"),
        ("\x1bPq#0sixel\x1b\\", "\\x1bPq#0sixel\\x1b\\"),
        ("\x1bcreset", "\\x1bcreset"),
        ("\x1b\x1b[A[31mput together", "\\x1b[31mput together"),
        ("\x1b[", "\\x1b["),
        ("bell\x07 null\x00 delete\x7f newline\x85", "bell\\x07 null\\x00 delete\\x7f newline\\x85"),
        ("forged\n[rank 1] line", "forged\\x0a[rank 1] line"),
    ],
)
def test_F50_the_corpus_on_a_terminal(line: str, shown: str) -> None:
    assert safe(line, tty=True) == shown
    assert safe(line, tty=False) == line


@given(_HOSTILE | st.text())
def test_no_control_but_colours_survives(line: str) -> None:
    shown = safe(line, tty=True)
    assert not _FORBIDDEN.search(_COLOUR.sub("", shown)), shown
    assert safe(shown, tty=True) == shown, "what is safe stays as it is"
    colours = _COLOUR.findall(shown)
    assert not colours or colours[-1] in ("\x1b[m", "\x1b[0m")


@given(st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs"))))
def test_ordinary_text_is_not_touched(line: str) -> None:
    assert safe(line, tty=True) == line


@pytest.mark.parametrize(
    ("line", "columns", "cut"),
    [
        ("12345", 5, "12345"),
        ("123456", 5, "12345"),
        ("日本語", 5, "日本"),
        ("日本語", 6, "日本語"),
        ("e\u0301e\u0301e\u0301", 2, "e\u0301e\u0301"),
        ("a\tb", 3, "a b"),
        ("\x1b[32m12345\x1b[0m", 5, "\x1b[32m12345\x1b[0m"),
        ("\x1b[32m123456\x1b[0m", 5, "\x1b[32m12345\x1b[0m"),
        ("███", 2, "██"),
        ("x", 0, ""),
    ],
)
def test_a_line_is_cut_to_the_columns_it_takes(line: str, columns: int, cut: str) -> None:
    assert fit(line, columns) == cut
