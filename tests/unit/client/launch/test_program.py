"""The calling program: its name, its notebook, and the commit its repository's files say, without running git."""

from __future__ import annotations

import getpass
import os
import sys
import types
from pathlib import Path

import pytest

from serverless_gpu.client.mlflow_context import (
    Commit,
    Program,
    calling_program,
    commit_of,
    submitted_program,
    user_name,
)
from serverless_gpu.model.spec import Command

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("head", ["", "ref: ../../etc/passwd", "ref: refs/../../x", "nonsense", "\xff" * 10])
def test_a_strange_repository_says_nothing(tmp_path: Path, head: str) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text(head)
    assert commit_of(tmp_path) == Commit()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    assert commit_of(tmp_path) == Commit()


def test_no_repository_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path / "not" / "there") == Commit()


@pytest.mark.parametrize(
    ("file", "name"),
    [("/home/a/train.py", "train"), ("/home/a/pkg/__main__.py", "pkg"), ("/usr/bin/tool", "tool")],
)
def test_a_script_gives_its_name(file: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__file__=file))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert calling_program({}) == Program(name, file)


def test_a_prompt_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace())
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert calling_program({}) == Program("interactive")


@pytest.mark.parametrize(
    ("variables", "session", "expected"),
    [
        ({}, "/home/a/Digits.ipynb", Program("Digits", "/home/a/Digits.ipynb", "NOTEBOOK")),
        ({"__vsc_ipynb_file__": "/w/b.ipynb"}, "", Program("b", "/w/b.ipynb", "NOTEBOOK")),
        ({}, "/w/c.ipynb-jvsc-5f0e.ipynb", Program("c", "/w/c.ipynb", "NOTEBOOK")),
        ({}, "3f2b-11", Program("interactive", kind="NOTEBOOK")),
        ({"__file__": "/usr/lib/ipykernel_launcher.py"}, "", Program("interactive", kind="NOTEBOOK")),
    ],
)
def test_a_notebook_gives_its_name_where_its_front_end_says_it(
    variables: dict[str, str], session: str, expected: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(**variables))
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    assert calling_program({"JPY_SESSION_NAME": session} if session else {}) == expected


def test_a_command_is_called_after_its_script(tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text("")
    assert submitted_program(Command(argv=(sys.executable, str(script), "--x"))) == Program("fit", str(script))
    assert submitted_program(Command(argv=("torchrun", "--nproc-per-node=2", "gone.py"))) == Program("gone", "gone.py")
    assert submitted_program(Command(argv=("nvidia-smi",))) == Program("nvidia-smi", "nvidia-smi")


def test_a_user_without_a_name_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found")

    assert user_name() == getpass.getuser()
    monkeypatch.setattr(getpass, "getuser", nobody)
    assert user_name() == f"uid {os.getuid()}"
