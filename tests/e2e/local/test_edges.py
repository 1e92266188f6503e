"""What a careful reader of the code found: each of these was wrong once."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from serverless_gpu import Run, attach, distributed
from serverless_gpu.client.runs import attachment
from serverless_gpu.errors import AgentUnavailable, RunCancelled
from serverless_gpu.node.agent.agent import ATTEMPTS_MAX
from serverless_gpu.node.base.home import Home
from tests.support.golden import golden
from tests.support.local.observe import Process, ended, run_sockets, start_script, supervisor, wait_for, zygote
from tests.support.local.ranks import announce, stay


def test_a_waiting_run_says_the_same_sentence_once_and_names_the_holder(warm: Path, tmp_path: Path) -> None:
    first = distributed(gpus=8, quiet=True)(stay).submit(str(tmp_path))
    wait_for(lambda: first.status() == "RUNNING", "the first run has all devices")
    second = distributed(gpus=1, quiet=True)(len).submit("ab")
    wait_for(second.waiting_for, "it says what it waits for")
    sentence = second.waiting_for()
    assert sentence.startswith("waiting for 1 H100: ") and first.id in sentence and "since" in sentence
    seen = {second.waiting_for() for _ in range(200)}
    assert seen == {sentence}
    late = attach(second.id)
    assert late.waiting_for() == sentence, "who attaches later is told, too"
    first.cancel()
    assert second.results(timeout=60) == [2]
    assert second.waiting_for() == ""


def test_a_run_that_cannot_be_reached_is_not_said_to_be_lost(warm: Path, tmp_path: Path) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(str(tmp_path))
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    (socket,) = run_sockets(warm)
    (Home(warm).sockets() / socket).unlink()
    with pytest.raises(AgentUnavailable, match=golden("local.edges.run-out-of-reach", id=run.id)):
        attach(run.id)
    run.cancel()
    with pytest.raises(RunCancelled):
        run.results(timeout=60)
    assert attach(run.id).status() == "CANCELLED"


def test_a_run_whose_supervisor_has_no_time_is_not_said_to_wait(
    warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(str(tmp_path))
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    monkeypatch.setattr(attachment, "SNAPSHOT_S", 0.1)
    guardian = supervisor(warm, run.id)
    guardian.send(signal.SIGSTOP)
    try:
        assert attach(run.id).status() == "RUNNING"
    finally:
        guardian.send(signal.SIGCONT)
    Path(tmp_path, "go").touch()
    assert run.results(timeout=50) == [0]


def test_ranks_have_the_callers_limit_on_descriptors(warm: Path) -> None:
    def soft() -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    assert distributed(gpus=1, quiet=True)(soft).distributed() == [soft()]


def test_a_child_that_user_code_forks_keeps_its_own_end(warm: Path) -> None:
    def train() -> list[int]:
        codes = []
        for error in (ValueError("in the child"), SystemExit(7)):
            child = os.fork()
            if child == 0:
                raise error
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return codes

    run = distributed(gpus=1, quiet=True)(train).submit()
    assert run.results(timeout=60) == [[1, 7]]
    assert golden("local.edges.valueerror-child") in run.logs(0, "stderr")


def test_ranks_that_stand_by_and_are_not_needed_end(warm: Path, tmp_path: Path) -> None:
    def siblings(where: str) -> list[str]:
        announce(where, "rank0")
        parent = os.getppid()
        wait_for(lambda: len(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()) == 1, "one is left")
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 64) if os.path.lexists(f"/proc/self/fd/{fd}")]

    assert distributed(gpus=4, quiet=True)(len).distributed("abcd") == [4] * 4
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    assert distributed(gpus=4, quiet=True)(len).distributed("abcd") == [4] * 4
    (kept,) = distributed(gpus=1, quiet=True)(siblings).distributed(str(tmp_path))
    assert len([name for name in kept if name.startswith("socket:")]) == 1, kept


def test_ranks_that_stand_by_and_are_killed_do_not_fail_the_next_run(own: Path) -> None:
    """As the kernel may when memory is short; nothing of the user has run in them."""
    assert distributed(gpus=2, quiet=True)(len).distributed("ab") == [2, 2]
    for _ in range(3):
        for rank in wait_for(lambda: spare_ranks(own), "ranks stand by"):
            Process(rank).kill()
        assert distributed(gpus=2, quiet=True)(len).distributed("ab") == [2, 2]


def spare_ranks(home: Path) -> list[int]:
    """Return the ranks of stems that stand by."""
    return [rank for stem in children(zygote(home).pid) for rank in children(stem)]


def children(pid: int) -> list[int]:
    """Return the children of a process's main thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return []


def test_a_run_is_cancelled_from_the_command_line(warm: Path, tmp_path: Path) -> None:
    run = distributed(gpus=2, quiet=True)(stay).submit(str(tmp_path))
    wait_for(lambda: run.status() == "RUNNING", "it runs")
    done = subprocess.run(
        [sys.executable, "-c", "from serverless_gpu.cli import main; main()", "cancel", run.id],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == golden("local.edges.cancelled-gpus-verified")
    with pytest.raises(RunCancelled):
        run.results(timeout=50)


def test_F61_ctrl_c_on_a_handle_says_that_the_run_goes_on(warm: Path, tmp_path: Path) -> None:
    script = tmp_path / "handle.py"
    script.write_text(
        "from serverless_gpu import distributed\n"
        "@distributed(gpus=1)\n"
        "def work():\n"
        "    import time; time.sleep(600)\n"
        "run = work.submit()\n"
        "print(run.id, flush=True)\n"
        "run.results()\n"
    )
    caller = start_script(script)
    assert caller.stdout is not None
    run_id = caller.stdout.readline().strip()
    wait_for(lambda: attach(run_id).status() == "RUNNING", "it runs")
    caller.send_signal(signal.SIGINT)
    _, _, errors = ended(caller)
    assert golden("local.edges.serverless-gpu-run", run_id=run_id) in errors
    run = attach(run_id)
    assert run.status() == "RUNNING"
    run.cancel()
    assert run.wait(50)


def test_output_into_a_pipe_that_nobody_reads_does_not_end_the_run(warm: Path, tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text(
        "from pathlib import Path\n"
        "from serverless_gpu import distributed\n"
        "@distributed(gpus=1)\n"
        "def talk():\n"
        "    for number in range(20000):\n"
        "        print('line', number)\n"
        f"    Path({str(tmp_path)!r}, 'done').touch()\n"
        "talk.distributed()\n"
    )
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "[rank 0] line 0\n"
    assert (tmp_path / "done").exists()


@pytest.mark.slow
@pytest.mark.heavy  # it is said after a minute
@pytest.mark.timeout(180)
def test_F05_a_rank_that_returned_long_before_the_others_is_named(warm: Path, tmp_path: Path) -> None:
    def train(where: str, rank: int = -1) -> int:
        while rank == 0 and not Path(where, "go on").exists():
            threading.Event().wait(0.05)
        return rank

    run = distributed(gpus=3, quiet=True)(train).submit(str(tmp_path))
    told = wait_for(lambda: run.status() == "RUNNING" and run.last_sentence(), "it is said", limit_s=100)
    assert re.fullmatch(r"ranks 1, 2 returned \(the first at \d\d:\d\d:\d\d\), rank 0 still running", str(told)), told
    Path(tmp_path, "go on").touch()
    assert run.results(timeout=60) == [0, 1, 2], "what the early ones returned was kept"
    assert told in run.receipt(timeout=50).notes


@pytest.mark.slow
def test_runs_beyond_the_agents_bound_wait_in_the_agent_and_can_be_cancelled(own: Path, tmp_path: Path) -> None:
    first = distributed(gpus=8, quiet=True)(stay).submit(str(tmp_path))
    wait_for(lambda: first.status() == "RUNNING", "the first run has all devices")
    waiting = distributed(gpus=1, quiet=True)(len).map(["ab"] * (ATTEMPTS_MAX + 1))
    last = waiting[-1]
    wait_for(lambda: golden("local.edges.ahead-one") in last.waiting_for(), "the last one waits in the agent")
    with pytest.raises(AgentUnavailable, match="is still queued behind"):
        attach(last.id)
    last.cancel()
    with pytest.raises(RunCancelled):
        last.results(timeout=50)
    first.cancel()
    assert [run.results(timeout=100) for run in waiting[:-1]] == [[2]] * ATTEMPTS_MAX


def test_the_facts_say_when_devices_waited_for_the_environment(own: Path) -> None:
    def kinds(run: Run[int]) -> list[str]:
        assert run.results(timeout=60) == [2]
        run.receipt(timeout=50)
        lines = (run.directory / "facts.jsonl").read_text().splitlines()
        return [str(json.loads(line)["kind"]) for line in lines if '"alive"' not in line]

    count = distributed(gpus=1, quiet=True)(len)
    whole = ["reserved", "hydrating", "starting", "exec", "stopping", "exited", "freed"]
    assert kinds(count.submit("ab")) == whole
