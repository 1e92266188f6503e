"""What `sgpu submit` makes of a line: usage errors before anything is queued, and the program that is meant."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from serverless_gpu.cli import submit as submit_module
from serverless_gpu.cli.submit import command_of
from serverless_gpu.client.mlflow_context import Program, submitted_program
from serverless_gpu.model.spec import Command, RunSpec
from tests.support.golden import golden


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pkg" / "train.py").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "job.sh").write_text("echo job")
    return tmp_path


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """Return the list of runs that the command asked for."""
    asked: list[RunSpec] = []

    def launch(spec: RunSpec, *, watch: bool = False) -> object:
        asked.append(spec)
        return type("Handle", (), {"id": "run"})

    monkeypatch.setattr(submit_module, "launch_command", launch)
    return asked


def submit(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(submit_module.submit, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--gpu", "1", "train.py"], "--gpus"),
        (["--gpsu=2", "train.py"], "--gpus"),
        (["--nproc-per-node", "2", "train.py"], "--gpus"),
        (["--nproc_per_node=2", "train.py"], "--gpus"),
        (["--gpus", "2", "--partition", "x", "train.py"], "--pool"),
        (["--tags", "a=b", "train.py"], "--tag"),
    ],
)
def test_23B2_a_mistyped_option_is_a_usage_error_that_names_the_one_that_was_meant(
    words: list[str], meant: str, launched: list[RunSpec]
) -> None:
    code, said = submit(*words)
    assert code == 2 and golden("cli.submit_command_line.did-you-mean", meant=meant) in said
    assert launched == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-x", "train.py"], "sgpu submit has no option -x"),
        (["--", "-c", "print(1)"], "the program -c must not begin with a dash"),
        (["-m"], "-m requires a module name"),
        (["-m", "--gpus"], "-m requires a module name"),
        (["-m", "nope"], "cannot find the module 'nope'"),
        (["-m", "pkg.nope"], "cannot find the module 'pkg.nope'"),
        (["-m", "pkg"], "cannot find the module 'pkg'"),  # it has no __main__
        (["-m", "pkg..train"], "cannot find the module"),
        (["nope.py"], "the file 'nope.py' does not exist"),
        (["python3", "nope.py"], "the file 'nope.py' does not exist"),
        (["./nope.sh"], "the program './nope.sh' exists neither in PATH nor in"),
        (["--local", "nope"], "the program 'nope' exists neither in PATH nor in"),
        (["--env-var", "X", "train.py"], "'X' does not have the form KEY=VALUE"),
        (["--env-var", "PATH=/x", "train.py"], "PATH cannot be passed to other machines"),
        (["--workdir", "nowhere", "train.py"], "'nowhere' does not exist"),
    ],
)
def test_23A4_what_cannot_be_run_is_a_usage_error_and_nothing_is_queued(
    words: list[str], why: str, launched: list[RunSpec]
) -> None:
    code, said = submit("--detach", *words)
    assert (code, launched) == (2, []) and why in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "argv", "name"),
    [
        (["-m", "pkg.train", "--gpus", "3"], (sys.executable, "-m", "pkg.train", "--gpus", "3"), "pkg.train"),
        (["--gpus", "1", "-m", "json.tool"], (sys.executable, "-m", "json.tool"), "json.tool"),
        (["--name", "-m", "-m", "pkg.train"], (sys.executable, "-m", "pkg.train"), "-m"),
        (["train.py", "--lr", "1"], (sys.executable, "train.py", "--lr", "1"), "train.py"),
        (["train.py", "-m", "x"], (sys.executable, "train.py", "-m", "x"), "train.py"),
        (["job.sh", "a"], ("/bin/sh", "./job.sh", "a"), "job.sh"),
        (["true", "--", "x"], ("true", "x"), "true"),
        (["nvidia-smi-of-the-node"], ("nvidia-smi-of-the-node",), "nvidia-smi-of-the-node"),
    ],
)
def test_23A4_modules_and_files_of_the_working_directory_are_programs(
    words: list[str], argv: tuple[str, ...], name: str, launched: list[RunSpec]
) -> None:
    assert submit("--detach", *words) == (0, "run\n")
    assert (launched[0].payload, launched[0].name) == (Command(argv=argv), name)


def test_23A4_a_script_that_is_not_executable_is_run_by_what_its_first_line_names(project: Path) -> None:
    (project / "job.sh").write_text("#!/usr/bin/env -S bash -e\n")
    assert command_of("job.sh", (), is_here=True)[0] == ("/usr/bin/env", "-S", "bash", "-e", "./job.sh")
    (project / "job.sh").chmod(0o755)
    assert command_of("job.sh", (), is_here=True)[0] == ("./job.sh",)
    (project / "tool").write_bytes(b"\x7fELF")
    with pytest.raises(click.UsageError, match=r"chmod \+x \./tool"):
        command_of("tool", (), is_here=True)


def test_23A4_tracking_names_a_module_by_its_own_name() -> None:
    assert submitted_program(Command(argv=(sys.executable, "-m", "pkg.train", "x.py"))) == Program("pkg.train")


def test_23A4_programs_of_an_environment_that_is_not_activated_are_found(
    monkeypatch: pytest.MonkeyPatch, project: Path
) -> None:
    (project / "environment").mkdir()
    (project / "environment" / "torchrun").write_text("#!/bin/sh\n")
    (project / "environment" / "torchrun").chmod(0o755)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(project / "environment" / "python"))
    assert command_of("torchrun", ["train.py"], is_here=True) == (("torchrun", "train.py"), "torchrun")
