"""The calling program: its name, its notebook, and the commit its repository's files say, without running git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from serverless_gpu.client.mlflow_context import Commit, commit_of


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
