"""Every command against a real server: for people and for machines, with its exit codes, and with the server away."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from serverless_gpu import attach, distributed
from serverless_gpu.cli.runs import run_location
from serverless_gpu.errors import AlreadyFinished, InvalidValue
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.remote.commands import sgpu, spawn, start
from tests.support.remote.server_process import ServerProcess

FAILS_AT_RANK_1 = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom at rank 1')\ntime.sleep(60)\n"
FOLLOWED = "echo one; echo two >&2; for i in $(seq 2000); do [ -e {gate} ] && break; sleep 0.05; done; echo three"


# --- logs ------------------------------------------------------------------------------------------------------------


def test_logs_of_a_run_of_the_server(served: Path) -> None:
    run = start("sh", "-c", "echo one $RANK; echo two; echo three $RANK >&2", gpus=2)
    run.receipt(60)
    here = sgpu("logs", run.id)
    assert (here.stdout, here.stderr) == ("one 0\ntwo\n", "three 0\n")
    assert sgpu("logs", run.id[-8:], "--rank", "1", "--stream", "stdout", "--tail", "1").stdout == "two\n"
    assert sgpu("logs", run.id, "--rank", "1", "--raw").stdout_bytes == b"one 1\ntwo\nthree 1\n"
    everybody = sgpu("logs", run.id, "--rank", "all", "--follow")
    assert everybody.stdout == golden("remote.commands.rank-one-rank")
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.commands.ranks"))):
        sgpu("logs", run.id, "--rank", "2")


def test_logs_of_a_rank_that_said_nothing_name_those_that_did(served: Path) -> None:
    run = start("sh", "-c", "[ $RANK = 0 ] || echo here", gpus=2)
    run.receipt(60)
    assert sgpu("logs", run.id).stderr == golden("remote.commands.sgpu-rank-run", id=run.id)


def test_23B3_submit_through_a_server_shows_the_rank_that_failed(served: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILS_AT_RANK_1)
    done = spawn("submit", "--gpus", "2", "--gpu-type", "H100", str(tmp_path / "train.py"))
    _, err = done.communicate(timeout=60)
    lines = err.splitlines()
    assert done.returncode == 1 and lines.count("[rank 1] ValueError: boom at rank 1") == 1, err
    hint = next(line for line in lines if line.startswith("hint: "))
    assert hint.startswith("hint: logs: `sgpu logs ") and hint.endswith(" --rank 1`")
    run_id = hint.split()[4]
    assert golden("remote.commands.serverless-gpu-last", run_id=run_id) in lines
    shown = sgpu("logs", run_id)
    assert shown.stderr.startswith(f"sgpu: rank 1 of run {run_id} failed (--rank N or --rank all prints other ranks)\n")
    assert shown.stderr.endswith("ValueError: boom at rank 1\n")


def test_logs_are_followed_until_the_run_ends(served: Path, tmp_path: Path) -> None:
    run = start("sh", "-c", FOLLOWED.format(gate=tmp_path / "gate"))
    with spawn("logs", "-f", run.id) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "one\n"
        (tmp_path / "gate").touch()
        out, err = following.communicate(timeout=60)
    assert (out, err, following.returncode) == ("three\n", "two\n", 0)


def test_logs_go_on_with_the_next_attempt(served: Path) -> None:
    saves = '[ -n "$SGPU_RESUME_DIR" ] && { echo again; exit 0; }; mkdir -p "$SGPU_CHECKPOINT_DIR"; '
    waits = "trap 'echo 1 > \"$SGPU_CHECKPOINT_DIR/at\"; exit 0' TERM; echo first; while :; do sleep 0.05; done"
    run = start("sh", "-c", saves + waits, resume=True)
    with spawn("logs", "-f", run.id) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "first\n"
        said = sgpu("run", "preempt", run.id)
        assert said.stdout == golden("remote.commands.run-asked-make", id=run.id)
        out, err = following.communicate(timeout=60)
    assert (out, following.returncode) == ("again\n", 0)
    assert err.endswith(f"sgpu: attempt 2 of run {run.id}\n")  # the shell may have its own word about a signal
    with pytest.raises(AlreadyFinished, match="SUCCEEDED"):
        sgpu("run", "preempt", run.id)


def test_22D7_logs_of_one_attempt_are_those_of_that_one_alone(served: Path, tmp_path: Path) -> None:
    program = f"[ -e {tmp_path}/was ] && {{ echo second; exit 0; }}; touch {tmp_path}/was; echo first; exit 1"
    words = ("--gpu-type", "H100", "--retries", "1", "--env", "live", "--detach", "sh", "-c", program)
    run_id = sgpu("submit", *words).stdout.strip()
    attach(run_id).wait(60)
    said = [sgpu("logs", run_id, *words).stdout for words in ((), ("--attempt", "1"), ("--attempt", "2", "--follow"))]
    assert said == ["second\n", "first\n", "second\n"]
    assert sgpu("logs", run_id, "--attempt", "1", "--follow").stdout == "first\n"
    with pytest.raises(InvalidValue, match=golden("remote.commands.run-attempts", run_id=run_id)):
        sgpu("logs", run_id, "--attempt", "3")


# --- attach, result, show, cancel ------------------------------------------------------------------------------------


def test_attach_shows_a_run_until_it_ends_and_exits_as_it_ended(served: Path, tmp_path: Path) -> None:
    run = start("sh", "-c", FOLLOWED.format(gate=tmp_path / "gate") + "; exit 3")
    with spawn("attach", run.id) as attached:
        assert attached.stdout is not None
        assert attached.stdout.readline() == "[rank 0] one\n"
        (tmp_path / "gate").touch()
        out, err = attached.communicate(timeout=60)
    assert (out, attached.returncode) == ("[rank 0] three\n", 3)
    assert golden("local.commands_run.rank-command-exited") in err


def test_ctrl_c_leaves_an_attached_run_to_itself(served: Path, tmp_path: Path) -> None:
    run = start("sh", "-c", FOLLOWED.format(gate=tmp_path / "gate"))
    with spawn("attach", run.id) as attached:
        assert attached.stdout is not None
        assert attached.stdout.readline() == "[rank 0] one\n"
        attached.send_signal(signal.SIGINT)
        _, err = attached.communicate(timeout=60)
    assert attached.returncode == 130
    assert golden("local.edges.run-goes", id=run.id) in err
    (tmp_path / "gate").touch()
    assert run.results(60) == [None]


def test_ctrl_c_of_submit_cancels_the_run_and_is_exit_code_130(served: Path) -> None:
    with spawn("submit", "--gpu-type", "H100", "sh", "-c", "echo up; exec sleep 600") as submitted:
        assert submitted.stdout is not None
        assert submitted.stdout.readline() == "[rank 0] up\n"
        submitted.send_signal(signal.SIGINT)
        _, err = submitted.communicate(timeout=60)
    assert submitted.returncode == 130
    assert err.splitlines()[-1].startswith("serverless-gpu: cancelled; 1 GPU verified free: ")


def test_results_are_copied_and_never_loaded(served: Path, tmp_path: Path) -> None:
    run = distributed(gpus=2, gpu_type="H100", remote=True, quiet=True)(str.upper).submit("a")
    assert run.results(60) == ["A", "A"]
    copied = sgpu("result", run.id, "--output", str(tmp_path / "out"))
    assert copied.stdout.splitlines() == [str(tmp_path / "out" / f"{rank}.pkl") for rank in (0, 1)]
    as_json = json.loads(sgpu("result", run.id, "--rank", "1", "--output", str(tmp_path), "--json").stdout)
    path = tmp_path / "1.pkl"
    assert as_json == [{"rank": 1, "path": str(path), "size_bytes": path.stat().st_size}]
    assert path.read_bytes().startswith(b"SGPU")
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.commands.result-rank"))):
        sgpu("result", run.id, "--rank", "7")


def test_a_run_that_goes_on_has_no_results_and_cancel_ends_it(served: Path, tmp_path: Path) -> None:
    run = start("sh", "-c", "echo up; exec sleep 600")
    wait_for(lambda: "up" in run.logs() and run.status() == "RUNNING", "it is up")
    with pytest.raises(InvalidValue, match=golden("remote.commands.run-running-returned", id=run.id)):
        sgpu("result", run.id)
    listed = sgpu("cancel")
    assert listed.exit_code == 2 and run.id in listed.stderr
    ended = sgpu("run", "cancel", run.id)
    assert (ended.exit_code, ended.stdout.partition(":")[0]) == (0, "CANCELLED")
    assert sgpu("attach", run.id).exit_code == 130
    with pytest.raises(InvalidValue, match=re.escape(golden("remote.commands.cancelled-results"))):
        sgpu("result", run.id)


def test_one_run_and_the_list_for_people_and_machines(served: Path) -> None:
    run = start("sh", "-c", "exit 4", name="fails")
    run.wait(60)
    assert golden("remote.commands.run-fails-failed", id=run.id) in sgpu("show", run.id).stdout
    shown = json.loads(sgpu("run", "show", run.id, "--json").stdout)
    assert (shown["id"], shown["state"], shown["server"]) == (run.id, "FAILED", True)
    assert run.id in sgpu("runs", "--state", "FAILED").stdout
    assert run.id in {each["id"] for each in json.loads(sgpu("runs", "--json").stdout)}


def test_a_run_that_is_not_among_the_latest_is_found_by_its_whole_identifier(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("true")
    run.receipt(60)
    start("true").receipt(60)
    monkeypatch.setattr(run_location, "PAGE", 1)
    assert f"run {run.id} · " in sgpu("show", run.id).stdout
    with pytest.raises(InvalidValue, match=re.escape(golden("local.results.run"))):
        sgpu("show", run.id[-8:])


# --- submit, and a server that dies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "program", "code"),
    [
        ((), "true", 0),
        ((), "exit 3", 3),
        ((), "kill -9 $$", 137),
        (("--timeout", "2", "--grace", "1"), "exec sleep 60", 124),
    ],
)
def test_submit_exits_as_the_run_ended(served: Path, options: tuple[str, ...], program: str, code: int) -> None:
    arguments = ("--gpu-type", "H100", *options, "sh", "-c", f"echo said; {program}")
    with spawn("submit", *arguments) as submitted:
        out, err = submitted.communicate(timeout=60)
    assert (submitted.returncode, out) == (code, "[rank 0] said\n"), err


def test_submit_detached_prints_the_identifier_alone(served: Path) -> None:
    done = sgpu("submit", "--detach", "--gpu-type", "H100", "--name", "later", "--tag", "a=b", "true")
    run_id = done.stdout.strip()
    assert sgpu("attach", run_id).exit_code == 0
    assert json.loads(sgpu("show", run_id, "--json").stdout)["spec"]["tags"] == {"a": "b"}


@pytest.mark.parametrize(
    "wrong",
    [
        ("no.py",),
        ("--tag", "a", "true"),
        ("--ranks-log", "x", "true"),
        ("--ranks-log", "7", "true"),
        ("--gpus", "0", "true"),
    ],
)
def test_submit_refuses_a_wrong_command_line(home: Path, wrong: tuple[str, ...]) -> None:
    assert sgpu("submit", *wrong).exit_code == 2


def test_logs_that_are_followed_outlive_the_server(own_server: ServerProcess, tmp_path: Path) -> None:
    run = start("sh", "-c", FOLLOWED.format(gate=tmp_path / "gate"))
    with spawn("logs", "-f", "--stream", "stdout", run.id) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "one\n"
        own_server.kill()
        (tmp_path / "gate").touch()
        own_server.start()
        out, _ = following.communicate(timeout=60)
    assert (out, following.returncode) == ("three\n", 0)
