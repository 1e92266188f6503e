"""The surface of today is the recorded one: nothing that users depend on went away or became something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.stable import surface

_BROKEN = """
The surface that users depend on is another one ({file}):
{lines}

BREAKS: scripts, notebooks, nodes of another version or stored files depend on this line. Keep the old name, option or
field beside the new one. If the break is decided, announce it in CHANGELOG.md and run
    python -m tests.e2e.stable.record --breaking
Lines without it are additions: promises from now on. If they are meant to be public, record them with
    python -m tests.e2e.stable.record
"""


def test_24_6_the_public_surface_is_the_recorded_one(home: Path) -> None:
    found = surface.differences(surface.read(surface.FILE.read_text(encoding="utf-8")), surface.current())
    lines = "\n".join(f"  {'BREAKS ' if one.breaks else '       '} {one.text}" for one in found)
    if found:
        pytest.fail(_BROKEN.format(file=surface.FILE.name, lines=lines), pytrace=False)


def test_24_6_the_recorded_surface_is_in_its_canonical_form() -> None:
    text = surface.FILE.read_text(encoding="utf-8")
    assert surface.written(surface.read(text)) == text


@pytest.mark.parametrize(
    ("before", "now", "breaks"),
    [
        ({"f()": {"a": "place 0, required"}}, {"f()": {}}, True),
        ({"f()": {}}, {}, True),
        ({"f()": {"a": "place 0, default 1"}}, {"f()": {"a": "place 0, default 2"}}, True),
        ({"f()": {"a": "place 0, required"}}, {"f()": {"a": "place 0, default 2"}}, False),
        ({"f()": {"a": "place 0, default 2"}}, {"f()": {"a": "place 0, required"}}, True),
        ({"f()": {}}, {"f()": {"a": "by name, required"}}, True),
        ({"f()": {}}, {"f()": {"a": "by name, default 1"}}, False),
        ({}, {"f()": {"a": "by name, required"}}, False),
        ({"route": {"request": "object"}}, {"route": {"request": "object", "request .x": "string, required"}}, True),
        ({"route": {"answer": "object"}}, {"route": {"answer": "object", "answer .x": "string, required"}}, False),
        ({"m": {".k": 'one of "a" "b", required'}}, {"m": {".k": 'one of "a" "b" "c", required'}}, False),
        ({"m": {".k": 'one of "a" "b", required'}}, {"m": {".k": 'one of "a" "c", required'}}, True),
    ],
)
def test_24_6_what_breaks_users_is_told_from_what_is_new(
    before: surface.Sections, now: surface.Sections, breaks: bool
) -> None:
    assert [one.breaks for one in surface.differences(before, now)] == [breaks]
