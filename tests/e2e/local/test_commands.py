"""`sgpu` as a person uses it, in processes of its own, on real runs: list, show, follow, clean, diagnose."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu import Run, attach, distributed, session
from serverless_gpu.errors import InvalidValue, ResultUnavailableHere
from serverless_gpu.node.base.home import Home
from serverless_gpu.testing import agent_status
from tests.support.golden import golden
from tests.support.local.commands import COMMAND, sgpu
from tests.support.local.observe import (
    agent,
    announced,
    ended,
    nothing_of_a_run,
    processes_of,
    run_directories,
    supervisor,
    wait_for,
)
from tests.support.local.ranks import stay


def doctor(code: int = 0, **environ: str) -> dict[str, list[dict[str, str]]]:
    """Return what the doctor found, by code of the check."""
    done = subprocess.run(
        [*COMMAND, "doctor", "--json", "--limit", "50"],  # a busy machine looks slowly
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    return {check["code"]: check["findings"] for check in json.loads(done.stdout)["checks"]}


def outcomes(found: dict[str, list[dict[str, str]]], code: str) -> list[str]:
    """Return the outcomes of one check."""
    return [finding["outcome"] for finding in found[code]]


def say(text: str) -> str:
    """Print and return a text."""
    print(text)
    print("to stderr", file=sys.stderr)
    return text


def fail() -> None:
    """Print something and fail."""
    print("before it fails")
    raise ValueError("boom")


def fail_at_rank_1(rank: int = 0) -> None:
    """Fail in one rank, silently."""
    if rank == 1:
        raise ValueError("boom")


def say_and_wait(where: str) -> None:
    """Print, and go on when a test says so."""
    print("first", flush=True)
    stay(where)
    print("last", flush=True)


# --- run directories -------------------------------------------------------------------------------------------------


def test_what_ran_is_listed_shown_and_read(own: Path) -> None:
    distributed(gpus=2, quiet=True)(say).distributed("hello")
    with pytest.raises(ValueError, match="boom"):
        distributed(gpus=1, quiet=True)(fail).distributed()
    wait_for(lambda: nothing_of_a_run(own), "both have their receipts")
    rows = [line.split() for line in sgpu("runs").splitlines()]
    assert [(row[1], row[2]) for row in rows] == [("NAME", "STATE"), ("fail", "FAILED"), ("say", "SUCCEEDED")]
    said = rows[2][0]
    assert sgpu("logs", said[-8:], "--stream", "stdout") == "hello\n"
    assert sgpu("logs", said, "--rank", "all", "--tail", "1", "--stream", "stdout") == golden(
        "local.commands.rank-hello-rank"
    )
    shown = sgpu("show")
    assert golden("local.commands.rank-valueerror-boom") in shown
    assert golden("local.commands.receipt-h100-fake") in shown and "  failures/0.json\n" in shown


def test_a_run_is_followed_to_its_end_and_listed_as_running_meanwhile(own: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(say_and_wait).submit(where)
    announced(Path(where), "rank0")
    wait_for(lambda: run.status() == "RUNNING", "its supervisor knows that it runs")
    following = subprocess.Popen([*COMMAND, "logs", "--follow"], stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline() == "first\n"
    assert "RUNNING" in sgpu("runs", "--state", "running")
    assert run.id in sgpu("cancel", code=2)
    assert golden("local.commands.run-running", id=run.id) in sgpu("clean", run.id, code=1)
    sgpu("clean", "--older-than", "0s")
    assert run_directories(own) == [run.id]
    (Path(where) / "go").touch()
    assert following.communicate(timeout=30)[0] == "last\n"
    assert following.returncode == 0


def test_23B3_submit_shows_the_rank_that_failed_once(own: Path, tmp_path: Path) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom at rank 1')\ntime.sleep(60)\n"
    (tmp_path / "train.py").write_text(text)
    words = ("submit", "--local", "--gpus", "2", "--gpu-type", "H100")
    err = sgpu(*words, str(tmp_path / "train.py"), code=1)
    assert (
        err.count("[rank 1] ValueError: boom at rank 1\n") == 1 and err.count("boom at rank 1") == 2
    )  # its source line
    hint = next(line for line in err.splitlines() if line.startswith("hint: "))
    assert hint.startswith("hint: logs: `sgpu logs ") and " --rank 1`" in hint
    all_shown = sgpu(*words, "--ranks-log", "1", str(tmp_path / "train.py"), code=1)
    assert all_shown.count("ValueError: boom at rank 1") == 1  # shown live: not again


def test_23B3_attach_shows_the_traceback_of_the_rank_that_raised(own: Path) -> None:
    run = distributed(gpus=2, quiet=True)(fail_at_rank_1).submit()
    run.wait(60)
    err = sgpu("attach", run.id, code=1)
    assert ", in fail_at_rank_1\n" in err and "\nsgpu: ValueError: boom\n" in err


def test_an_interrupt_ends_following_and_not_the_run(own: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(say_and_wait).submit(where)
    announced(Path(where), "rank0")
    following = subprocess.Popen([*COMMAND, "logs", "-f"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert following.stdout is not None and following.stdout.readline() == "first\n"
    following.send_signal(signal.SIGINT)
    code, out, err = ended(following)
    assert (code, out, err) == (130, "", "")
    wait_for(lambda: run.status() == "RUNNING", "it goes on, and its supervisor knows that it runs")
    run.cancel()
    run.wait()


def on_a_terminal(*arguments: str) -> str:
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as reading:
        with subprocess.Popen([*COMMAND, *arguments], stdout=theirs, stderr=theirs, stdin=theirs) as process:
            os.close(theirs)
            written = b""
            while True:
                try:
                    piece = reading.read(65536)
                except OSError:  # how Linux says that nobody has the other end any more
                    break
                if not piece:
                    break
                written += piece
        assert process.returncode == 0, written
    return written.decode()


def test_a_terminal_is_protected_from_what_ranks_write_and_a_pipe_gets_it(own: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[32mgreen\x1b[0m"
    distributed(gpus=1, quiet=True)(say).distributed(evil)
    assert sgpu("logs", "--stream", "stdout") == evil + "\n"
    seen = on_a_terminal("logs")
    assert "\x1b[32mgreen\x1b[0m" in seen and "title" not in seen
    assert "title" not in on_a_terminal("logs", "--follow", "--rank", "all")


def test_cancel_by_a_part_of_the_name(own: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(say_and_wait).submit(where)
    announced(Path(where), "rank0")
    assert sgpu("cancel", run.id[-8:]) == golden("local.commands.cancelled-gpu-verified")


def test_a_killed_supervisor_makes_a_lost_run(own: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(say_and_wait).submit(where)
    announced(Path(where), "rank0")
    supervisor(own, run.id).kill()
    wait_for(lambda: "LOST" in sgpu("runs"), "the run is LOST")
    assert golden("local.commands.run-supervisor-process") in sgpu("show")


def test_a_session_is_listed_as_one_and_not_deleted_while_it_is_held(own: Path) -> None:
    with session(gpus=1, quiet=True) as held:
        held.distributed(say, "hello")
        rows = [line.split()[1:3] for line in sgpu("runs").splitlines()[1:]]
        assert sorted(rows) == [["(session)", "RUNNING"], ["say", "SUCCEEDED"]]
        wait_for(lambda: sgpu("clean", "--older-than", "0s").startswith("deleted 1 run, "), "the run has let go")
        assert run_directories(own) == [held.id]
    wait_for(lambda: "(session)  SUCCEEDED" in sgpu("runs"), "the session has ended")


# --- cleaning --------------------------------------------------------------------------------------------------------


def test_results_of_a_cleaned_run_raise_what_happened(own: Path) -> None:
    run: Run[str] = distributed(gpus=1, quiet=True)(say).submit("hello")
    run.wait()
    run.receipt()
    wait_for(lambda: nothing_of_a_run(own), "the supervisor has ended")
    assert sgpu("clean", run.id).startswith("deleted 1 run, ")
    with pytest.raises(ResultUnavailableHere) as caught:
        run.results()
    assert str(caught.value) == golden("local.commands.rank-returned-value", id=run.id)
    with pytest.raises(InvalidValue) as refused:
        attach(run.id)
    assert str(refused.value) == golden("local.commands.run-hint-sgpu", id=run.id, runs=Home(own).runs)


def test_arrays_that_were_loaded_survive_the_deletion_of_their_run(own: Path) -> None:
    numpy = pytest.importorskip("numpy")
    run: Run[object] = distributed(gpus=1, quiet=True)(numpy.ones).submit(1_000_000)
    array = run.result()
    wait_for(lambda: nothing_of_a_run(own), "the supervisor has ended")
    sgpu("clean", run.id)
    assert run_directories(own) == []
    assert float(numpy.asarray(array).sum()) == 1_000_000


@pytest.mark.slow
def test_the_agent_has_old_runs_deleted_by_itself(own: Path) -> None:
    run: Run[str] = distributed(gpus=1, quiet=True)(say).submit("hello")
    run.results()
    wait_for(lambda: nothing_of_a_run(own), "the supervisor has ended")
    for path in (own / "runs").rglob("*"):
        os.utime(path, (0, 0))
    young: Run[str] = distributed(gpus=1, quiet=True)(say).submit("again")
    young.results()
    wait_for(lambda: run_directories(own) == [young.id], "the old run was deleted")
    wait_for(lambda: "retention: deleted 1 run, " in (own / "agent.log").read_text(), "it says so")
    assert agent(own).alive()


# --- the doctor ------------------------------------------------------------------------------------------------------


def test_the_doctor_starts_no_agent_and_leaves_nothing(own: Path) -> None:
    found = doctor()
    assert outcomes(found, "agent") == ["ok"]
    assert found["agent"][0]["sentence"] == golden("local.commands.none-running-next")
    assert "other-agents" not in found
    assert agent_status(own) is None
    assert sorted(os.listdir(own)) == ["checkpoints", "locks", "runs"]
    assert processes_of(own) == []


def test_the_doctor_tells_of_the_agent_and_the_last_start(own: Path) -> None:
    distributed(gpus=1, quiet=True)(say).distributed("hello")
    status = agent_status(own)
    assert status is not None
    found = doctor()
    assert found["agent"][0]["sentence"].startswith(f"pid {status.pid}, ")
    assert "ready" in found["zygote"][0]["sentence"]
    assert " started cold: " in found["last-start"][0]["sentence"]
    assert found["fake-gpus"][0]["sentence"].startswith("SERVERLESS_GPU_FAKE=H100:8")


def test_a_stopped_agent_is_found_with_what_mends_it(own: Path) -> None:
    distributed(gpus=1, quiet=True)(say).distributed("hello")
    process = agent(own)
    process.send(signal.SIGSTOP)
    try:
        (finding,) = doctor(code=1)["agent"]
    finally:
        process.send(signal.SIGCONT)
    assert finding["outcome"] == "failed"
    assert finding["sentence"].startswith(f"the agent (pid {process.pid}) does not answer")
    assert finding["mend"].startswith(f"kill -9 {process.pid} ")


def test_an_agent_of_another_version_is_found_by_its_lock(own: Path) -> None:
    path = Home(own).sockets() / "agent-0-0.0.1.lock"
    path.write_text("4711")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (finding,) = doctor()["other-agents"]
    assert finding["sentence"].endswith(": version 0.0.1, protocol 0 (pid 4711)")


def test_without_any_home_the_doctor_still_looks(own: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file")
    found = doctor(code=1, SERVERLESS_GPU_HOME=f"{nowhere}/home", TMPDIR=nowhere)
    assert outcomes(found, "home") == ["failed"]
    assert outcomes(found, "agent") == ["unknown"]
    assert outcomes(found, "interpreter") == ["ok"]


@pytest.mark.slow
def test_an_environment_that_clashes(own: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (packages / "pandas.py").write_text(
        "raise ValueError('numpy.dtype size changed, may indicate binary incompatibility. "
        "Expected 96 from C header, got 88 from PyObject')"
    )
    (packages / "pyarrow.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')")
    found = doctor(code=1, PYTHONPATH=str(packages))
    for code in ("torchvision", "numpy-abi", "cuda-libraries"):
        assert set(outcomes(found, code)) == {"failed"}
    mends = [finding["mend"] for finding in found["numpy-abi"]]
    assert golden("local.commands.pip-install-upgrade", quote=shlex.quote(sys.executable)) in mends


def test_the_report_for_people(own: Path) -> None:
    report = sgpu("doctor")
    assert "\x1b" not in report
    assert report.startswith("machine\n  ok       home              ")
    assert [line for line in report.splitlines() if line and not line.startswith(" ")][:5] == [
        "machine",
        "agent",
        "server",
        "GPUs",
        "environment",
    ]


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (("gpus",), ""),
        (("runs",), ""),
        (("runs",), "1"),
        (("show", "--json"), ""),
        (("show", "--json"), "1"),
        (("doctor", "--json"), ""),
        (("--help",), ""),
    ],
)
def test_a_full_disk_is_one_line(
    warm: Path, arguments: tuple[str, ...], unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    distributed(gpus=1, quiet=True)(len).distributed("there is a run")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "serverless_gpu.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, golden("local.commands.sgpu-errno-28"))
