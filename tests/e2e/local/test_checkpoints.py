"""The checkpoint contract with real ranks: every stop says why, what is saved stays, the next attempt finds it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.caller_context import caller_context
from serverless_gpu.client.launch.launch import launch_command
from serverless_gpu.client.runs.run import Run
from serverless_gpu.errors import RunCancelled, RunTimedOut
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.lifecycle.retention import Policy
from serverless_gpu.model.placement import candidates
from serverless_gpu.model.spec import Command, Resources, RunSpec
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt.retention import clean
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.inventory import offered
from tests.support.local.observe import ask_to_stop, wait_for


def count_until_stopped(limit: int = 10_000) -> int:
    """Count, from where the attempt before got to; save the number and why when asked to stop."""
    earlier = rt.resume_dir()
    start = json.loads((earlier / f"{rt.get_global_rank()}.json").read_text())["step"] if earlier else 0
    rt.should_stop()  # from now on SIGTERM does not end it
    print("from", start, flush=True)
    for step in range(start, start + limit):
        if rt.should_stop():
            file = rt.checkpoint_dir() / f"{rt.get_global_rank()}.json"
            temporary = file.with_name(f"{file.name}.tmp")
            temporary.write_text(json.dumps({"step": step, "why": rt.stop_reason()}))
            temporary.rename(file)
            return step
        time.sleep(0.01)
    return start + limit


def saved(home: Path, run_id: str, fence: int = 1) -> dict[str, dict[str, object]]:
    directory = home / "checkpoints" / run_id / str(fence)
    return {file.name: json.loads(file.read_text()) for file in sorted(directory.iterdir())}


@pytest.mark.parametrize("reason", StopReason)
def test_every_stop_says_why_and_leaves_the_grace_to_save(warm: Path, reason: StopReason) -> None:
    run = distributed(gpus=2, gpu_type="H100", quiet=True)(count_until_stopped).submit()
    wait_for(lambda: run.logs(0) and run.logs(1), "both ranks count")
    ask_to_stop(warm, run.id, reason)
    assert run.wait(50)
    files = saved(warm, run.id)
    assert {name: file["why"] for name, file in files.items()} == {"0.json": reason.value, "1.json": reason.value}
    receipt = run.receipt(50)
    assert receipt.notes == ()
    assert receipt.reason == {"cancel": "cancelled", "preempt": "preempted", "drain": "drained"}.get(
        reason.value, reason.value
    )


def test_F73_the_time_limit_says_so_to_the_ranks(warm: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", quiet=True, timeout=4.0)(count_until_stopped).submit()
    with pytest.raises(RunTimedOut):
        run.results(50)
    assert saved(warm, run.id)["0.json"]["why"] == "timeout"


def test_when_another_rank_fails_the_reason_is_its_failure(warm: Path) -> None:
    def one_fails() -> int:
        if rt.get_global_rank() == 1:
            raise ValueError("enough")
        return count_until_stopped()

    run = distributed(gpus=2, gpu_type="H100", quiet=True)(one_fails).submit()
    with pytest.raises(ValueError, match="enough"):
        run.results(50)
    assert {name: file["why"] for name, file in saved(warm, run.id).items()} in ({}, {"0.json": "failure"})


def test_the_next_attempt_of_a_run_goes_on_where_it_was_stopped(warm: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", quiet=True)(count_until_stopped).submit()
    wait_for(lambda: run.logs(0), "it counts")
    run.preempt()
    with pytest.raises(RunCancelled) as caught:
        run.results(50)
    assert caught.value.reason == "preempted"
    reached = saved(warm, run.id)["0.json"]["step"]
    run.receipt(50)
    second = next_attempt(warm, run)
    assert (second / "logs" / "0.stdout").read_text() == f"from {reached}\n"


def next_attempt(home: Path, run: Run[int]) -> Path:
    """Launch the same run with the next fence, as a node does for a server; return its directory when it has ended."""
    directory = Home(home).make_attempt(run.id, 2)
    (directory / "call.pkl").write_bytes((run.directory / "call.pkl").read_bytes())
    channel, greeting = connect(Home(home))
    context = caller_context()
    devices = offered(greeting, context.environ)
    chosen = candidates(gpus=1, gpu_type="H100", devices=devices, own=greeting.own_types)
    launch = protocol.Launch(
        run_id=run.id,
        fence=2,
        directory=str(directory),
        spec=RunSpec(resources=Resources(gpus=1, gpu_type="H100")),
        candidates=chosen.devices,
        world_size=1,
        context=context,
        called_ns=SystemClock().boottime_ns(),
    )
    protocol.send(channel, launch)
    log = directory / "logs" / "0.stdout"
    wait_for(lambda: log.exists() and log.read_text(), "the second attempt counts")
    protocol.send(channel, protocol.Cancel())
    wait_for(lambda: (directory / "receipt.json").exists(), "the second attempt has ended")
    channel.close()
    return directory


def test_retention_leaves_checkpoints(warm: Path) -> None:
    run = distributed(gpus=1, gpu_type="H100", quiet=True)(count_until_stopped).submit()
    wait_for(lambda: run.logs(0), "it counts")
    run.cancel()
    run.receipt(50)
    policy = Policy(age_ns=1, spared_ns=0)
    wait_for(lambda: run.id in clean(warm / "runs", policy, (), SystemClock()).deleted, "it has ended and is deleted")
    assert saved(warm, run.id)


def test_a_directory_of_ones_own_for_checkpoints_and_for_commands(own: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (own / "config.toml").write_text(f'[checkpoints]\ndirectory = "{shared}"\n')
    program = 'mkdir -p "$SGPU_CHECKPOINT_DIR"; echo "$SGPU_CHECKPOINT_DIR ${SGPU_RESUME_DIR-none}"'
    payload = Command(argv=("sh", "-c", program))
    run = launch_command(RunSpec(resources=Resources(gpus=1, gpu_type="H100"), payload=payload, quiet=True))
    run.results(60)
    assert run.logs() == f"{shared}/{run.id}/1 none\n"
    assert (shared / run.id / "1").is_dir()
