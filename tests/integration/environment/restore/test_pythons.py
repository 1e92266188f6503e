"""Which interpreter of a machine stands in for the one that was captured."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.restore import pythons
from serverless_gpu.environment.restore.pythons import ask, find_python, keep, recall
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.made_environments import interpreter
from tests.support.environment.pythons import wrapper
from tests.support.golden import golden


def test_the_exact_version_is_preferred_and_another_patch_is_noted(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(interpreter(), version=f"{interpreter().minor}.99")
    near = wrapper(tmp_path / "near" / "python")
    exact = wrapper(tmp_path / "exact" / "python", version=wanted.version)
    assert find_python(wanted, [str(near), str(exact)], {}).path == str(exact)
    found = find_python(wanted, [str(near)], {})
    assert (found.path, found.note) == (
        str(near),
        golden("unit.pythons.python-stands", version=interpreter().version, version_2=wanted.version),
    )


def test_another_abi_does_not_fit_and_is_named(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(interpreter(), abi="cpython-311d-x86_64-linux-gnu")
    other = wrapper(tmp_path / "python")
    with pytest.raises(EnvironmentUnsupported) as caught:
        find_python(wanted, [str(other)], {})
    assert golden("unit.pythons.cpython-311d-x86", other=other) in caught.value.message
    assert caught.value.hint == golden("unit.pythons.install-example-uv", minor=interpreter().minor)
    fitting = wrapper(tmp_path / "fitting", abi=wanted.abi)
    assert find_python(wanted, [str(other), str(fitting)], {}).path == str(fitting)


def test_an_interpreter_is_asked_once_until_it_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    python = wrapper(tmp_path / "python", log=log)
    assert ask(str(python)) == ask(str(python)) is not None
    assert log.read_text() == "asked\n"
    wrapper(python, version="3.1.0", log=log)
    changed = ask(str(python))
    assert changed is not None and changed.version == "3.1.0"


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nonsense\n", "#!/bin/sh\necho '[1, 2]'\n", "x"]
)
def test_what_is_no_interpreter_is_passed_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755)
    assert ask(str(path)) is None
    assert find_python(interpreter(), [str(path)], {}).path != str(path)


def test_an_interpreter_is_asked_once_in_a_boot_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    program = str(wrapper(tmp_path / "python", log=log))
    answer = ask(program)
    keep(kept, "this boot")

    def ask_elsewhere(boot: str) -> object:
        monkeypatch.setattr(pythons, "_answers", {})  # another process
        recall(kept, boot)
        return ask(program)

    assert (ask_elsewhere("this boot"), log.read_text()) == (answer, "asked\n")
    assert (ask_elsewhere("the next boot"), log.read_text()) == (answer, "asked\n" * 2)
    os.utime(program, ns=(1, 1))
    assert (ask_elsewhere("this boot"), log.read_text()) == (answer, "asked\n" * 3)
