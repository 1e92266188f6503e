"""What a process is told about stopping and checkpoints, in processes of its own that a signal may reach."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import UsageError
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.attempt.server_attempt_record import ServerAttempt
from serverless_gpu.node.uplink.reporter import CheckpointProbe
from tests.support.golden import golden

_FIRST = "import os, signal, sys\nfrom serverless_gpu import runtime as rt\n"


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGPU_STOP_FILE", "SGPU_STOP_REASON", "SGPU_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)


def in_a_run(program: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a rank would, with `stop(word)` to be asked to stop by."""
    stop = (
        "def stop(word):\n"
        "    open(os.environ['SGPU_STOP_FILE'], 'w').write(word + '\\n')\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    environ = {**os.environ, "SGPU_STOP_FILE": str(directory / "stop_reason"), **variables}
    return subprocess.run(
        [sys.executable, "-c", _FIRST + stop + program], env=environ, capture_output=True, text=True, timeout=60
    )


def test_without_the_contract_sigterm_ends_the_process(tmp_path: Path) -> None:
    done = in_a_run("print(rt.get_global_rank(), flush=True)\nstop('preempt')\nprint('not reached')", tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "0\n")


@pytest.mark.parametrize("first", ["rt.should_stop()", "rt.stop_reason()", "rt.on_stop(lambda: None)"])
def test_with_it_the_process_goes_on_and_knows_why(first: str, tmp_path: Path) -> None:
    program = f"{first}\nprint(rt.should_stop())\nstop('preempt')\n"
    program += "print(os.environ['SGPU_STOP_REASON'], rt.should_stop(), rt.stop_reason())"
    done = in_a_run(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, golden("node.checkpoint_contract.false-preempt-true"), "")


def test_a_signal_from_somebody_else_is_a_cancel(tmp_path: Path) -> None:
    program = "rt.should_stop()\nos.kill(os.getpid(), signal.SIGTERM)\nprint(rt.should_stop(), rt.stop_reason())"
    assert in_a_run(program, tmp_path).stdout == "True cancel\n"


def test_callbacks_are_called_once_and_in_order_and_at_once_when_it_is_late(tmp_path: Path) -> None:
    program = (
        "rt.on_stop(lambda: print('one', rt.stop_reason()))\n"
        "@rt.on_stop\ndef two(): print('two')\n"
        "stop('drain')\nstop('drain')\nrt.on_stop(lambda: print('late'))"
    )
    assert in_a_run(program, tmp_path).stdout == golden("node.checkpoint_contract.one-drain-two")


def test_what_a_callback_raises_is_raised_after_the_others(tmp_path: Path) -> None:
    program = (
        "@rt.on_stop\ndef one(): sys.exit(5)\nrt.on_stop(lambda: print('two'))\nstop('cancel')\nprint('not reached')"
    )
    done = in_a_run(program, tmp_path)
    assert (done.returncode, done.stdout) == (5, "two\n")


def test_a_handler_that_was_there_before_is_called_too(tmp_path: Path) -> None:
    program = (
        "signal.signal(signal.SIGTERM, lambda *_: print('mine'))\nrt.on_stop(lambda: print('ours'))\nstop('drain')"
    )
    assert in_a_run(program, tmp_path).stdout == "ours\nmine\n"


def test_a_forked_child_keeps_the_usual_sigterm_and_may_look(tmp_path: Path) -> None:
    program = (
        "rt.should_stop()\nread, write = os.pipe()\nchild = os.fork()\n"
        "if child == 0:\n"
        "    os.write(write, str(rt.should_stop()).encode())\n"
        "    signal.pause()\n"
        "print(os.read(read, 9).decode())\nos.kill(child, signal.SIGTERM)\n"
        "print(-os.WTERMSIG(os.waitpid(child, 0)[1]))\n"
        "print(rt.should_stop())"
    )
    assert in_a_run(program, tmp_path).stdout == "False\n-15\nFalse\n"


def test_workers_of_multiprocessing_look_without_taking_the_signal_over(tmp_path: Path) -> None:
    program = (
        "import multiprocessing\n"
        "def work(queue):\n    queue.put((rt.should_stop(), rt.stop_reason()))\n    signal.pause()\n"
        "rt.should_stop()\nstop('timeout')\n"
        "context = multiprocessing.get_context('fork')\nqueue = context.SimpleQueue()\n"
        "worker = context.Process(target=work, args=(queue,))\nworker.start()\nprint(queue.get())\n"
        "worker.terminate()\nworker.join()\nprint(worker.exitcode)"
    )
    assert in_a_run(program, tmp_path).stdout == "(True, 'timeout')\n-15\n"


def test_only_the_main_thread_may_ask_first(tmp_path: Path) -> None:
    program = (
        "import threading\n"
        "def ask():\n    try: rt.should_stop()\n    except Exception as error: print(type(error).__name__)\n"
        "    else: print('fine')\n"
        "def in_thread():\n    thread = threading.Thread(target=ask)\n    thread.start()\n    thread.join()\n"
        "in_thread()\nrt.should_stop()\nin_thread()"
    )
    assert in_a_run(program, tmp_path).stdout == f"{UsageError.__name__}\nfine\n"


@pytest.mark.parametrize(("fence", "rank", "says"), [("1", "0", 0), ("2", "0", 1), ("2", "1", 0)])
def test_a_later_attempt_that_finds_nothing_says_so_once(fence: str, rank: str, says: int, tmp_path: Path) -> None:
    given = {"SGPU_CHECKPOINT_DIR": str(tmp_path / "run" / fence), "SGPU_FENCE": fence, "RANK": rank}
    done = in_a_run("print(rt.resume_dir(), rt.resume_dir())", tmp_path, **given)
    assert done.stdout == "None None\n"
    assert done.stderr.count(f"no earlier attempt left checkpoints in {tmp_path / 'run'}") == says


def given(run_id: str, fence: int) -> ServerAttempt:
    """Return an attempt that a server gave to this node."""
    return ServerAttempt(
        run_id=run_id, fence=fence, profile="p", token="t", gpu_type="CPU", world_size=1, partition_grace_s=1.0
    )


def asks(directory: Path, spec: RunSpec) -> None:
    """Write what was asked for."""
    (directory / "spec.json").write_bytes(msgspec.json.encode({"spec": spec}))


def test_22D2_the_probe_of_a_node_sees_what_an_attempt_and_those_before_it_saved(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "r" / "3"
    directory.mkdir(parents=True)
    saved = tmp_path / "checkpoints" / "r"
    probe = CheckpointProbe(directory, given("r", 3))
    assert probe.newest() == 0  # no spec: not known
    asks(directory, RunSpec(resume=True))
    assert probe.newest() == 0
    for name, newest in (("1/a.pt", 1), ("2/.b", 1), ("3/c.tmp", 1), ("4/later", 1), ("3/c", 3)):
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).touch()
        assert probe.newest() == newest
    asks(directory, RunSpec())
    assert probe.newest() == 0  # nobody asks


def test_22D2_a_file_system_that_hangs_is_waited_for_a_bounded_time(tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    directory = tmp_path / "runs" / "r" / "1"
    directory.mkdir(parents=True)
    asks(directory, RunSpec(resume=True))
    assert CheckpointProbe(directory, given("r", 1), program=slow, limit_s=0.05).newest() == 0
