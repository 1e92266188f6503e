"""The calling program: its name, its notebook, and the commit its repository's files say, without running git."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from serverless_gpu.client.program import Commit, Program, calling_program, commit_of, submitted_program, user_name
from serverless_gpu.model.spec import Command

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def git(directory: Path, *arguments: str) -> str:
    environ = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(directory), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    made = tmp_path / "repository"
    made.mkdir()
    git(made, "init", "--quiet", "--initial-branch=main")
    (made / "train.py").write_text("")
    git(made, "add", ".")
    git(made, "commit", "--quiet", "-m", "first")
    return made


def test_a_commit_is_read_from_the_repositorys_files(repository: Path) -> None:
    inner = repository / "a" / "b"
    inner.mkdir(parents=True)
    assert commit_of(inner) == commit_of(repository) == Commit(git(repository, "rev-parse", "HEAD"), "main")


def test_a_branch_in_the_packed_references_is_found_and_a_newer_commit_as_well(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "-b", "feature/one")
    git(repository, "pack-refs", "--all")
    assert not (repository / ".git" / "refs" / "heads" / "feature" / "one").exists()
    assert commit_of(repository) == Commit(git(repository, "rev-parse", "HEAD"), "feature/one")
    git(repository, "commit", "--quiet", "--allow-empty", "-m", "second")
    git(repository, "pack-refs", "--all")
    assert commit_of(repository) == Commit(git(repository, "rev-parse", "HEAD"), "feature/one")


def test_a_worktree_shares_the_branches_of_its_repository(repository: Path, tmp_path: Path) -> None:
    git(repository, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "tree"))
    assert commit_of(tmp_path / "tree") == Commit(git(repository, "rev-parse", "HEAD"), "other")


def test_a_detached_head_has_a_commit_and_no_branch(repository: Path) -> None:
    git(repository, "checkout", "--quiet", "--detach")
    assert commit_of(repository) == Commit(git(repository, "rev-parse", "HEAD"))


def test_a_repository_without_a_commit_has_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    assert commit_of(tmp_path) == Commit("", "main")


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
