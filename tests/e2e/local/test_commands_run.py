"""Programs instead of functions: what they are told, how they are stopped, and how their end is the run's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from serverless_gpu.client.launch.launch import launch_command
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import CommandFailed, InvalidValue, RankCrashed, RunCancelled, RunTimedOut
from serverless_gpu.model.lifecycle.attempt import STOPPED_BY, StopReason
from serverless_gpu.model.spec import Command, Resources, RunSpec
from tests.support.golden import golden
from tests.support.local.observe import ask_to_stop, wait_for

STOPPED = """
import os, signal, sys, time
def stop(*_):
    time.sleep(0.3)  # saving takes its time
    print("told to", open(os.environ["SGPU_STOP_FILE"]).read().strip(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"up\\n")  # in one piece: the signal may come at once
while True:
    time.sleep(60)
"""


def start(
    *argv: str,
    gpus: int = 1,
    per: Literal["rank", "node"] = "rank",
    grace_s: float = 30.0,
    timeout_s: float | None = None,
) -> Run[None]:
    return launch_command(
        RunSpec(
            name="command",
            resources=Resources(gpus=gpus, gpu_type="H100"),
            payload=Command(argv=argv, per=per),
            quiet=True,
            grace_s=grace_s,
            timeout_s=timeout_s,
        )
    )


def python(program: str) -> Sequence[str]:
    return (sys.executable, "-c", program)


def shown(names: Sequence[str]) -> Sequence[str]:
    return ("sh", "-c", "; ".join(f'echo "{name}=${{{name}-absent}}"' for name in names))


def told(run: Run[None], rank: int = 0) -> dict[str, str]:
    return dict(line.split("=", 1) for line in run.logs(rank).splitlines())


def test_each_rank_runs_the_program_and_knows_its_place(warm: Path) -> None:
    run = start(*shown(["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_ADDR"]), gpus=2)
    assert run.results(50) == [None, None]
    for rank in (0, 1):
        assert told(run, rank) == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "LOCAL_ADDR": "absent",
        }


def test_once_per_node_it_gets_all_devices_and_the_variables_of_the_command_line(
    warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "19")
    names = ["NUM_NODES", "NODE_RANK", "POD_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_ADDR"]
    presets = ["NCCL_DEBUG", "NCCL_IB_TIMEOUT", "NCCL_CUMEM_ENABLE", "PYTHONUNBUFFERED", "CODE_SOURCE_PATH"]
    absent = ["RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "SGPU_RESUME_DIR", "HYPERPARAMETERS_PATH"]
    run = start(*shown([*names, *presets, *absent, "CUDA_VISIBLE_DEVICES"]), gpus=2, per="node")
    run.results(50)
    variables = told(run)
    assert [variables[name] for name in names] == ["1", "0", "0", "2", "2", "127.0.0.1", "127.0.0.1"]
    assert [variables[name] for name in presets] == ["INFO", "19", "0", "1", os.getcwd()]
    assert {variables[name] for name in absent} == {"absent"}
    assert variables["CUDA_VISIBLE_DEVICES"].count(",") == 1
    with pytest.raises(InvalidValue, match="has only rank 0"):
        run.logs(1)


def test_an_exit_code_is_the_failure(warm: Path) -> None:
    run = start("sh", "-c", "echo why >&2; exit 3")
    with pytest.raises(CommandFailed, match=re.escape(golden("local.commands_run.rank-command-exited"))) as caught:
        run.results(50)
    assert (caught.value.exit_code, caught.value.rank, caught.value.reason) == (3, 0, "command_failed")
    assert caught.value.log_tail == "why"
    assert run.status() == "FAILED"


def test_F01_a_signal_that_ends_the_program_is_named(warm: Path) -> None:
    run = start("sh", "-c", "kill -SEGV $$")
    with pytest.raises(RankCrashed, match=re.escape(golden("local.commands_run.rank-ended-sigsegv"))):
        run.results(50)


@pytest.mark.parametrize(
    ("program", "code", "why"),
    [("./is-not-there", 127, "No such file or directory"), ("/etc/passwd", 126, "Permission denied")],
)
def test_a_program_that_cannot_be_run_ends_as_in_a_shell(warm: Path, program: str, code: int, why: str) -> None:
    with pytest.raises(CommandFailed) as caught:
        start(program).results(50)
    assert caught.value.exit_code == code
    assert caught.value.log_tail == golden("local.commands_run.serverless-gpu-cannot", program=program, why=why)


def test_a_script_without_a_first_line_is_the_shells(warm: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text('echo "got $1"\n')
    script.chmod(0o700)
    run = start(str(script), "this")
    run.results(50)
    assert run.logs() == "got this\n"


def test_the_first_that_fails_ends_the_others(warm: Path, where: str) -> None:
    run = start("sh", "-c", '[ "$RANK" = 1 ] && exit 7; sleep 600', gpus=2)
    with pytest.raises(CommandFailed, match=re.escape(golden("local.commands_run.rank-command-exited-code"))):
        run.results(50)


@pytest.mark.parametrize("reason", StopReason)
def test_a_program_below_a_shell_is_told_to_stop_and_why_and_may_save(warm: Path, reason: StopReason) -> None:
    # The shell, which has more to do after it, dies of the signal at once.
    run = start("sh", "-c", f"'{sys.executable}' -c '{STOPPED.replace(chr(39), chr(34))}'; echo after")
    wait_for(lambda: "up" in run.logs(), "the program is up")
    ask_to_stop(warm, run.id, reason)
    assert run.wait(50)
    assert run.logs() == golden("local.commands_run.up-told", value=reason.value)
    assert run.receipt(50).reason == STOPPED_BY[reason]


def test_F73_the_time_limit_says_so(warm: Path) -> None:
    run = start(*python(STOPPED), timeout_s=6.0)  # told after 3 s; an interpreter has started by then
    with pytest.raises(RunTimedOut):
        run.results(50)
    assert run.logs() == golden("local.commands_run.up-told-timeout")


def test_F08_a_program_that_ignores_the_stop_is_killed_after_the_grace_and_leaves_nothing(warm: Path) -> None:
    run = start("sh", "-c", "trap '' TERM; echo up; sleep 600 & sleep 600", grace_s=0.5)
    wait_for(lambda: "up" in run.logs(), "the program is up")
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(50)
    assert golden("local.commands_run.rank-did-stop") in run.receipt(50).notes


def test_programs_of_the_callers_environment_are_found_also_when_it_is_not_activated(
    warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    run = start("python", "-c", "import sys; print(sys.prefix)")
    run.results(50)
    assert run.logs().strip() == sys.prefix
    own = os.path.dirname(sys.executable)
    monkeypatch.setenv("PATH", f"/usr/bin:{own}:/bin")
    run = start(*shown(["PATH"]))
    run.results(50)
    assert told(run) == {"PATH": f"/usr/bin:{own}:/bin"}


@pytest.mark.torch
def test_torchrun_once_per_node_makes_one_gang(warm: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(total)\n"
        "print(f'{dist.get_world_size()} ranks: {total}\\n', end='')\n"
        "dist.destroy_process_group()\n"
    )
    line = (
        "exec python -m torch.distributed.run --nnodes=$NUM_NODES --node-rank=$NODE_RANK "
        "--nproc-per-node=$LOCAL_WORLD_SIZE --master-addr=$MASTER_ADDR --master-port=$MASTER_PORT " + str(script)
    )
    run = start("sh", "-c", line, gpus=2, per="node")
    run.results(60)
    assert run.logs() == "2 ranks: 3\n" * 2


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ((), "a command needs a program"),
        (("",), "a command needs a program"),
        (("echo", "a\0b"), "contains a zero byte"),
        (("echo", "\udcff"), "is not UTF-8"),
        (("echo",) * 10_001, "up to 10000 arguments, not 10001"),
    ],
)
def test_what_no_node_can_start_is_refused_before_anything_starts(argv: tuple[str, ...], why: str) -> None:
    with pytest.raises(InvalidValue, match=why):
        start(*argv)


@pytest.mark.usefixtures("warm")
def test_23A4_a_module_of_another_directory_runs_with_its_variables(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text("import os, sys; print(os.environ['LR'], os.getcwd(), sys.argv[1:])")
    words = ["submit", "--local", "--gpu-type", "H100", "--workdir", str(tmp_path), "--env-var", "LR=1=2"]
    command = [sys.executable, "-m", "serverless_gpu.cli", *words, "-m", "pkg.train", "--gpus", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"1=2 {tmp_path} ['--gpus', '9']" in done.stdout
