"""Scripts of entry points are what pip writes, and run whatever the path of their interpreter is."""

from __future__ import annotations

import pytest

from serverless_gpu.environment.restore.cache.unit_metadata import entry_points, is_generic, script, shebang, specific
from tests.support.golden import golden


def test_a_script_is_what_pip_writes() -> None:
    assert script("pkg.cli:Group.main", "/env/bin/python") == golden("environment.scripts.env-bin-python")


def test_console_and_gui_scripts_are_read_and_other_groups_are_not() -> None:
    text = """
# a comment
[console_scripts]
one = pkg:main
Two.x = pkg.sub:obj.attr [extra1,extra2]
three=pkg:main
[gui_scripts]
window = pkg:gui
[other]
four = pkg:main
"""
    assert entry_points(text) == {
        "one": "pkg:main",
        "Two.x": "pkg.sub:obj.attr [extra1,extra2]",
        "three": "pkg:main",
        "window": "pkg:gui",
    }


@pytest.mark.parametrize(
    "line",
    [
        "../../evil = pkg:main",
        "a/b = pkg:main",
        "python = pkg:main",
        "python3.11 = pkg:main",
        "Python = pkg:main",
        ".. = pkg:main",
        "x = pkg",
        "x = pkg:main; import os",
        "x = pkg:main()",
        "x = pkg:main\n  os.system('evil')",
        "x = os:system('evil')",
        "x" * 300 + " = pkg:main",
        "x =",
    ],
)
def test_what_is_no_script_is_left_out(line: str) -> None:
    assert entry_points(f"[console_scripts]\ngood = pkg:main\n{line}\n") == {"good": "pkg:main"}


@pytest.mark.parametrize("text", ["no section", "[console_scripts", "\x00\x01", ""])
def test_entry_points_that_are_none_give_no_scripts(text: str) -> None:
    assert entry_points(text) == {}


@pytest.mark.parametrize("length", [124, 125, 126])
def test_a_first_line_is_as_long_as_the_kernel_takes(length: int) -> None:
    python = "/" + "x" * (length - 1)
    expected = f"#!{python}\n" if length <= 124 else f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"
    assert shebang(python) == expected


@pytest.mark.parametrize(
    ("content", "generic"),
    [
        (b"#!python\nx", True),
        (b"#!pythonw\nx", True),
        (b"#!python\r\nx", True),
        (b"#!python3\nx", False),
        (b"#!/usr/bin/python\nx", False),
        (b"#! python\nx", False),
        (b"\x7fELF", False),
        (b"", False),
    ],
)
def test_a_generic_first_line_is_known(content: bytes, generic: bool) -> None:
    assert is_generic(content) is generic
    if generic:
        assert specific(content, "/env/bin/python") == b"#!/env/bin/python\nx"
