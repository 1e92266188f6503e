"""Which interpreter a client may name, and which options."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.uplink.attempt_launch import FLAGS_MAX, check_flags, check_python, check_reachable
from tests.support.golden import golden


def program(path: Path, mode: int = 0o755) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return str(path)


def test_22A11_this_interpreter_and_links_to_it_may_be_named(tmp_path: Path) -> None:
    check_python(sys.executable)
    (tmp_path / "bin").mkdir(mode=0o755)
    for name in ("python", "python3.12", "python3.13t", "pypy3", "python3-dbg", "mine"):
        (tmp_path / "bin" / name).symlink_to(sys.executable)
        check_python(str(tmp_path / "bin" / name))


def test_22A11_what_is_no_python_of_a_trusted_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    good = program(tmp_path / "shut" / "python")
    (tmp_path / "open" / "python").symlink_to(good)
    program(tmp_path / "open" / "python3")
    for python, sentence in (
        ("python", "not an absolute path"),
        (f"{tmp_path}/shut/../shut/python", "without `..`"),
        (f"{tmp_path}/none/python", "No such file"),
        (str(tmp_path / "shut"), "is not the name of a Python"),
        (program(tmp_path / "shut" / "bash"), "is not the name of a Python"),
        (program(tmp_path / "shut" / "python3.9", 0o644), "is not a program that"),
        (program(tmp_path / "shut" / "python3.8", 0o757), "python3.8 is writable by others"),
        (str(tmp_path / "open" / "python3"), "open is writable by others"),
        (str(tmp_path / "open" / "python"), "open is writable by others"),
    ):
        with pytest.raises(InvalidValue) as caught:
            check_python(python)
        assert sentence in caught.value.message
    check_python(good)
    os.chmod(tmp_path / "open", 0o1777)
    check_python(str(tmp_path / "open" / "python"))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-OO", "-B", "-bb", "-s", "-E", "-I", "-u", "-vv"),
        ("-Werror", "-Wignore::DeprecationWarning", "-X", "utf8", "-X", "dev", "-Xpycache_prefix=/tmp/x"),
    ],
)
def test_22A11_options_that_change_how_it_behaves_are_taken(flags: tuple[str, ...]) -> None:
    check_flags(flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("-c", "print(1)"),
        ("-cprint(1)",),
        ("-m", "http.server"),
        ("-Bc", "1"),
        ("script.py",),
        ("-",),
        ("--",),
        ("-X",),
        ("-X", "presite=this"),
        ("-i",),
        ("-W", "error"),
        ("-W\0",),
        ("-B",) * (FLAGS_MAX + 1),
    ],
)
def test_22A11_options_that_name_code_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(InvalidValue, match=golden("node.interpreters.started-option-takes")):
        check_flags(flags)


def test_27_an_interpreter_in_a_private_directory_starts_in_no_sandbox(tmp_path: Path) -> None:
    for place in (tmp_path, *tmp_path.parents):
        if not place.stat().st_mode & 0o001:
            place.chmod(place.stat().st_mode | 0o011)
    good = program(tmp_path / "public" / "bin" / "python3")
    (tmp_path / "public").chmod(0o755)
    (tmp_path / "public" / "bin").chmod(0o755)
    check_reachable(good)
    hidden = program(tmp_path / "private" / "bin" / "python3")
    (tmp_path / "private" / "bin").chmod(0o755)
    (tmp_path / "private").chmod(0o700)
    with pytest.raises(InvalidValue, match=re.escape(str(tmp_path / "private"))):
        check_reachable(hidden)
    with pytest.raises(InvalidValue):
        check_reachable(f"/proc/self/root{good}")
    check_reachable(sys.executable)


def test_27_a_path_with_two_slashes_is_refused() -> None:
    with pytest.raises(InvalidValue):
        check_python(f"/{sys.executable}")
