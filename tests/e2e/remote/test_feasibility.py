"""A request that no node could ever serve, and commands without a server: what the caller reads where it was typed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.errors import NoSuitableNode, ServerNotConfigured
from serverless_gpu.model.lifecycle.attempt import State
from tests.e2e.remote.conftest import end_node
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.commands import sgpu, spawn
from tests.support.remote.fake_server import FakeServer
from tests.support.remote.server_process import ServerProcess
from tests.support.remote.stream import pickled


def test_23B1_python_reads_what_would_work_in_options_of_python(served: Path) -> None:
    wait_for(lambda: " UP " in sgpu("node", "list").stdout, "the node has said hello")
    before = set((served / "remote").glob("*"))
    with pytest.raises(NoSuitableNode) as refused:
        distributed(gpus=9, gpu_type="H100", remote=True)(len).submit("x")
    assert refused.value.message.startswith("needs 9 H100")
    assert refused.value.message.endswith("; the run was not queued")
    assert refused.value.hint.startswith("would work: gpus=8")
    assert refused.value.hint.endswith("; wait=True queues the run until a suitable node joins")
    assert set((served / "remote").glob("*")) <= before, "nothing of it stays"


def test_23B1_sgpu_submit_reads_what_would_work_in_options_of_the_command(served: Path) -> None:
    wait_for(lambda: " UP " in sgpu("node", "list").stdout, "the node has said hello")
    ended = spawn("submit", "--gpus", "2", "--gpu-type", "A10", "true")
    out, err = ended.communicate(timeout=60)
    assert (ended.returncode, out) == (1, "")
    assert golden("remote.feasibility.node-a10-h100") in err
    assert golden("remote.feasibility.hint-would-work") in err and golden("remote.feasibility.wait-queues-run") in err


def test_23B1_with_wait_the_run_is_queued_says_until_when_and_sigterm_takes_it_out_of_the_queue(served: Path) -> None:
    process = spawn("submit", "--wait", "--gpus", "2", "--gpu-type", "A10", "true")
    assert process.stderr is not None
    line = process.stderr.readline()
    while golden("remote.feasibility.waits-node-could") not in line:
        assert line, "it ended without having said that"
        line = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert golden("remote.feasibility.cancelled-started") in err
    assert sgpu("queue").stdout.count("A10") == 0


def test_23B1_a_fresh_server_of_a_machine_without_gpus_does_not_let_a_run_hang(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "CPU:2")
    server = ServerProcess(home)
    server.start()
    try:
        ended = spawn("submit", "true")  # at once: its node may not have said hello
        _, err = ended.communicate(timeout=60)
        assert ended.returncode == 1 and golden("remote.feasibility.node-gpu") in err
        again = spawn("submit", "true")
        _, err = again.communicate(timeout=60)
        assert again.returncode == 1 and golden("remote.feasibility.hint-would-work-gpu") in err
    finally:
        server.kill(signal.SIGTERM)
        end_node(home)


PROGRAM = """
from serverless_gpu import distributed

@distributed(gpus=1, gpu_type="H100", remote=True)
def train():
    return 1

train.distributed()
"""


def test_23B1_sigterm_to_a_script_that_waits_cancels_its_run(home: Path, fake: FakeServer, tmp_path: Path) -> None:
    script = fake.script()
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    script.say(State.QUEUED, "needs 1 H100")
    wait_for(lambda: fake.seen["POST runs"] == 1, "the run was asked for")
    assert process.stderr is not None and "needs 1 H100" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and script.stops == ["cancel"]


def test_23B12_without_a_server_what_was_typed_is_named_and_local_offered(home: Path) -> None:
    with pytest.raises(ServerNotConfigured) as refused:
        sgpu("submit", "train.sh")
    assert refused.value.message == golden("remote.feasibility.sgpu-submit-train")
    assert golden("remote.feasibility.sgpu-up-starts") in refused.value.hint
    assert refused.value.hint.endswith("to run without a server, use `sgpu submit --local train.sh …`")
    with pytest.raises(ServerNotConfigured, match=re.escape(golden("remote.feasibility.sgpu-queue-needs"))):
        sgpu("queue")


def test_23B12_a_caller_that_waited_for_its_server_says_once_that_it_is_back(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = fake.script()
    run = distributed(gpus=1, gpu_type="H100", remote=True)(len).submit("x")
    script.say(State.RUNNING)
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    fake.stop()
    ended = threading.Event()

    def follow() -> None:
        run.follow()
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    said: list[str] = []

    def says(words: str) -> bool:
        said.append(capsys.readouterr().err)
        return words in "".join(said)

    wait_for(lambda: says("does not answer; waiting for it"), "it says that the server is away", limit_s=60)
    fake.start()
    wait_for(lambda: says("the server answers again after"), "it says that the server is back", limit_s=60)
    script.end({"results/0.pkl": pickled(tmp_path, 1)})
    assert ended.wait(60)
    said.append(capsys.readouterr().err)
    assert "".join(said).count("the server answers again") == 1
