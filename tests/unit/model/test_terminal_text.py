"""Terminal output as plain text: nothing of it can control what shows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.terminal_text import plain_text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x1b[1;31mred\x1b[0m", "red"),
        (b"a\x1b]8;;javascript:x\x07link\x1b]8;;\x07b", "alinkb"),
        (b"a\x1b]8;;http://x\x1b\\b", "ab"),
        (b"\x1b[2Jcleared", "cleared"),
        (b"\x1b[999999999mx", "x"),
        (b"\x1b]0;title\nnext", "\nnext"),
        ("\x9b31mx".encode(), "x"),
        (b"10%\r50%\r100%\r\n", "100%\n"),
        (b"nul \x00 bell \x07", "nul ␀ bell ␇"),
        (b"bad \xff\xed\xa0\x80", "bad \ufffd\ufffd\ufffd\ufffd"),
        (b"\x1b(B<b>&amp;", "<b>&amp;"),
        (b"tab\tstays", "tab\tstays"),
        (b"ends with \x1b[3", "ends with "),
    ],
)
def test_escape_sequences_leave_and_control_characters_show(data: bytes, text: str) -> None:
    assert plain_text(data) == text


@given(st.binary(max_size=300))
def test_no_control_character_is_left(data: bytes) -> None:
    assert not [
        char for char in plain_text(data) if (ord(char) < 32 and char not in "\t\n") or 0x7F <= ord(char) < 0xA0
    ]
