"""What a rank is told that runs a program: in which interpreter, where, and with which words of the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from serverless_gpu.cli import submit
from serverless_gpu.model.spec import Command, RunSpec
from serverless_gpu.node.attempt.usage_account import AttemptAccount
from serverless_gpu.node.inside.channel import pair
from serverless_gpu.node.supervisor.attempt_files import attempt_files
from serverless_gpu.node.supervisor.gang import LocalGang
from serverless_gpu.node.supervisor.rank_environment import Network
from serverless_gpu.testing import FakeClock
from tests.support.node.account import CONTEXT, DEVICES, launch


class Nobody:
    """A viewer who looks at nothing."""

    def output(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("program", "runs"),
    [("/caller/bin/python", "/restored/bin/python"), ("python", "python"), ("/caller/bin/tool", "/caller/bin/tool")],
)
def test_the_callers_interpreter_is_that_of_the_restored_environment(program: str, runs: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    context = msgspec.structs.replace(CONTEXT, python="/caller/bin/python", environ={"PATH": "/usr/bin:/caller/bin"})
    there = msgspec.structs.replace(context, python="/restored/bin/python", environ={"PATH": "/usr/bin"})
    spec = RunSpec(payload=Command(argv=(program, "train.py"), per="node"), ranks_log=())
    message = msgspec.structs.replace(launch(tmp_path), spec=spec, context=context)
    ours, theirs = pair()
    files = attempt_files(message, "/shared")
    gang = LocalGang(message, ours, AttemptAccount(message, FakeClock()), there, files=files)
    gang.start(DEVICES, Network(("127.0.0.1", 29500)), (), Nobody())  # type: ignore[arg-type]  # nothing is shown
    rank, go = (json.loads(received[0]) for received in (theirs.receive(), theirs.receive()) if received is not None)
    for log in gang.logs.values():
        log.close()
    ours.close()
    theirs.close()
    assert go["command"] == [runs, "train.py"]
    assert rank["env"]["PATH"] == f"/restored/bin{os.pathsep}/usr/bin"
    assert rank["env"]["SGPU_CHECKPOINT_DIR"] == "/shared/r/2"


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["echo", "a"], ("echo", "a")),
        (["echo", "--", "--lr", "3"], ("echo", "--lr", "3")),
        (["echo", "--", "--", "x"], ("echo", "--", "x")),
    ],
)
def test_two_dashes_before_the_arguments_are_for_sgpu(
    words: list[str], argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[RunSpec] = []

    class Launched:
        id = "r"

    def record(spec: RunSpec, **_: object) -> Launched:
        seen.append(spec)
        return Launched()

    monkeypatch.setattr(submit, "launch_command", record)
    done = CliRunner().invoke(submit.submit, ["--detach", *words])
    assert (done.exit_code, done.output) == (0, "r\n")
    assert isinstance(seen[0].payload, Command) and seen[0].payload.argv == argv


def test_22D7_submit_takes_an_idle_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunSpec] = []

    class Launched:
        id = "r"

    def record(spec: RunSpec, **_: object) -> Launched:
        seen.append(spec)
        return Launched()

    monkeypatch.setattr(submit, "launch_command", record)
    done = CliRunner().invoke(submit.submit, ["--detach", "--idle-timeout", "600", "true"])
    assert (done.exit_code, seen[0].idle_timeout_s) == (0, 600.0)
