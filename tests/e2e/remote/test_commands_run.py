"""Programs through a server: the same as on this machine, told by their exit code, stopped and resumed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import pytest

from serverless_gpu.client.launch.launch import launch_command
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import CommandFailed, InvalidValue
from serverless_gpu.model.spec import Command, Kernel, Resources, RunSpec
from tests.support.golden import golden
from tests.support.local.observe import wait_for


def spec(*argv: str, per: Literal["rank", "node"] = "rank", resume: bool = False) -> RunSpec:
    return RunSpec(
        name="command",
        remote=True,
        environment="auto",
        resources=Resources(gpus=2, gpu_type="H100"),
        payload=Command(argv=argv, per=per),
        quiet=True,
        resume=resume,
    )


def start(*argv: str, per: Literal["rank", "node"] = "rank", resume: bool = False) -> Run[None]:
    return launch_command(spec(*argv, per=per, resume=resume))


def test_a_program_runs_in_every_rank(served: Path) -> None:
    run = start("sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert run.results(60) == [None, None]
    assert [run.logs(rank) for rank in (0, 1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert run.receipt(30).state == "SUCCEEDED"


def test_or_once_per_node_with_all_of_its_devices(served: Path) -> None:
    run = start(
        "sh", "-c", "echo node $NODE_RANK of $NUM_NODES, $LOCAL_WORLD_SIZE devices, rank ${RANK-none}", per="node"
    )
    run.results(60)
    assert run.logs() == golden("remote.commands_run.node-devices-rank")


def test_its_exit_code_arrives(served: Path) -> None:
    run = start("sh", "-c", "echo why >&2; exit 3", per="node")
    with pytest.raises(CommandFailed, match=re.escape(golden("local.commands_run.rank-command-exited"))) as caught:
        run.results(60)
    assert (caught.value.exit_code, caught.value.log_tail) == (3, "why")


def test_a_program_that_makes_room_is_started_again_and_finds_what_it_saved(served: Path) -> None:
    program = (
        'mkdir -p "$SGPU_CHECKPOINT_DIR"\n'
        'if [ -n "$SGPU_RESUME_DIR" ]; then echo "saved: $(cat "$SGPU_RESUME_DIR/why")"; exit 0; fi\n'
        'trap \'cat "$SGPU_STOP_FILE" > "$SGPU_CHECKPOINT_DIR/why"; exit 0\' TERM\n'
        "echo up\nwhile :; do sleep 0.05; done\n"
    )
    run = start("sh", "-c", program, per="node", resume=True)
    wait_for(lambda: "up" in run.logs(), "the program is up")
    run.preempt()
    run.results(60)
    assert run.logs() == "saved: preempt\n"


def test_a_kernel_is_not_there_yet(served: Path) -> None:
    kernel = RunSpec(remote=True, environment="live", resources=Resources(gpus=1, gpu_type="H100"), payload=Kernel())
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.commands_run.notebook-kernels-cannot"))):
        launch_command(kernel)
