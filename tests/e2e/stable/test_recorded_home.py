"""Runs, results, logs, samples and environments that an earlier version left in a home are read by this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import serverless_gpu
from serverless_gpu import errors
from tests.e2e.stable import recording
from tests.e2e.stable.recorded_home import STATES, TRAINED, Sgpu, same_python
from tests.support.golden import golden


@pytest.mark.usefixtures("recorded_home")
def test_24_6_a_recorded_run_is_attached(expected: Any) -> None:
    run = serverless_gpu.attach(expected["runs"]["trains"])
    assert run.wait(0) and run.status() == "SUCCEEDED"
    assert run.logs() == golden("stable.recorded_home.epoch-rank-epoch")
    assert run.logs(1, "stderr") == golden("stable.recorded_home.learning-rate-taken")
    receipt = run.receipt()
    assert (receipt.run_id, receipt.state, receipt.gpus) == (run.id, "SUCCEEDED", ("FAKE-H100-0", "FAKE-H100-1"))
    assert (receipt.world_size, receipt.tags, receipt.currency) == (2, {"project": "recorded"}, "USD")
    assert receipt.micros and receipt.bill is not None and receipt.bill.billed_ms == receipt.gpu_ms
    assert receipt.segments.run_ms and len(receipt.uses) == 2 and receipt.text() and receipt.html()
    cost = run.cost()
    assert (cost.micros, cost.gpu_ms, cost.attempts, cost.is_final) == (receipt.micros, receipt.gpu_ms, 1, True)
    series = run.metrics()["system/node_0/gpu_0_memory_usage_megabytes"]
    assert len(series.times) == len(series.values) > 1


@pytest.mark.usefixtures("recorded_home")
def test_24_6_results_and_exceptions_of_recorded_runs_are_loaded(expected: Any) -> None:
    same_python(expected)
    runs = {name: serverless_gpu.attach(run_id) for name, run_id in expected["runs"].items() if name != "session"}
    assert runs["trains"].results() == TRAINED
    assert runs["in_session"].result() == 4
    with pytest.raises(ValueError) as raised:
        runs["fails"].results()
    assert raised.value.args == (golden("stable.recorded_home.shard-rows"),) and raised.value.__cause__ is not None
    with pytest.raises(errors.InvalidValue) as refused:
        runs["refuses"].results()
    assert (refused.value.message, refused.value.hint) == ("batch size 0", "take 1")


@pytest.mark.usefixtures("recorded_home")
def test_24_6_the_reasons_of_recorded_failures_are_read(expected: Any) -> None:
    with pytest.raises(errors.RunTimedOut) as late:
        serverless_gpu.attach(expected["runs"]["takes_long"]).results()
    assert (late.value.run_id, late.value.reason) == (expected["runs"]["takes_long"], "timeout")
    with pytest.raises(errors.RankCrashed) as crashed:
        serverless_gpu.attach(expected["runs"]["crashes"]).results()
    assert (crashed.value.rank, crashed.value.reason) == (0, "rank_signal")


@pytest.mark.usefixtures("recorded_home")
def test_24_6_commands_read_recorded_runs(expected: Any, sgpu: Sgpu, tmp_path: Path) -> None:
    ids = expected["runs"]
    listed = {row["id"]: row["state"] for row in json.loads(sgpu("runs", "--json"))}
    assert listed == {ids[name]: state for name, state in STATES.items()}
    for name, state in STATES.items():
        assert json.loads(sgpu("show", ids[name], "--json"))["state"] == state
        assert state in sgpu("show", ids[name])
    assert "epoch 3 of rank 0" in sgpu("logs", ids["trains"])
    assert "reading shard 1" in sgpu("logs", ids["fails"], "--rank", "1", "--stream", "stdout")
    assert "system/node_0/gpu_0_memory_usage_megabytes" in json.loads(sgpu("metrics", ids["trains"], "--json"))
    sgpu("result", ids["trains"], "--output", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pkl", "1.pkl"]
    assert sgpu("clean", ids["crashes"]) is not None
    assert ids["crashes"] not in sgpu("runs", "--json")


@pytest.mark.usefixtures("recorded_home")
def test_24_6_a_recorded_quarantine_holds(expected: Any, sgpu: Sgpu, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = expected["runs"]["leaves_memory"]
    assert serverless_gpu.attach(run_id).receipt().quarantined == ("FAKE-H100-0",)
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:2")
    _, first, second, *_ = sgpu("gpus").splitlines()
    assert first.startswith("FAKE-H100-0 ") and run_id in first
    assert second.startswith("FAKE-H100-1 ") and "after run" not in second


@pytest.mark.usefixtures("recorded_home")
def test_24_6_json_of_commands_has_the_recorded_fields(expected: Any, sgpu: Sgpu) -> None:
    known = {**expected["runs"], "environment": expected["environment"]}
    for words, then in expected["answers"].items():
        now = recording.shape(recording.parsed(sgpu(*words.format(**known).split())))
        assert recording.lacks(now, then) == [], f"sgpu {words}"


def test_24_6_a_recorded_run_is_repeated_by_hand(date: str, expected: Any, recorded_home: Path) -> None:
    same_python(expected)
    directory = recorded_home / "runs" / expected["runs"]["in_session"] / "1"
    program = directory / "_air.py"
    # It names where it was made; the package of today is where that of then was, as after an upgrade.
    text = program.read_text(encoding="utf-8")
    for then, now in (
        ("/tmp/recorded/src", str(Path(serverless_gpu.__path__[0]).parent)),
        ("/tmp/recorded/packages", sysconfig.get_path("purelib")),
        ("/tmp/recorded/home", str(recorded_home)),
        ("/tmp/recorded/project", str(recorded_home)),
    ):
        assert then in text
        text = text.replace(then, now)
    program.write_text(text.replace("/tmp/recorded/python", sys.base_prefix), encoding="utf-8")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 0 and "4" in done.stdout, done.stderr


@pytest.mark.usefixtures("recorded_home")
def test_24_6_a_recorded_environment_is_shown_and_restored(expected: Any, sgpu: Sgpu, tmp_path: Path) -> None:
    address = expected["environment"]
    shown = sgpu("env", "show", address, "--all")
    assert address in shown and "greeting 1.0" in shown and "code of project" in shown
    assert json.loads(sgpu("env", "show", address, "--json"))["address"] == address
    same_python(expected)
    target = tmp_path / "restored"
    sgpu("env", "restore", address, str(target), "--copies")
    (module,) = target.glob("lib/python*/site-packages/greeting.py")
    assert module.read_text(encoding="utf-8") == golden("stable.recorded_home.text-hello-recorded")
    (code,) = target.glob("code/*/work.py")
    assert code.read_text(encoding="utf-8") == recording.SCRIPT
    words = [str(target / "bin" / "python"), "-c", "import greeting; print(greeting.TEXT)"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.startswith("hello")


def test_24_6_nothing_of_the_recording_machine_is_in_a_recording(date: str) -> None:
    for path in sorted((recording.HERE / "recorded" / date).iterdir()):
        files = recording.contents(path) if path.name.endswith(".tar.gz") else [(path.name, path.read_bytes())]
        for name, data in files:
            for word in (b"/root/", b"/home/"):  # this tree and the machine's name are looked for while it is recorded
                assert word not in data.replace(b"/tmp/recorded/home/", b""), f"{path.name}: {name}"
