"""The database, files and backup of an earlier version's server are those of a server of this version."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serverless_gpu
from serverless_gpu import errors
from tests.e2e.stable import recording
from tests.e2e.stable.recorded_home import STATES, TRAINED, Sgpu, same_python
from tests.support.golden import golden

pytestmark = pytest.mark.slow

_REMOTE = ("trains", "fails", "refuses", "takes_long", "crashes")


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Run `sgpu up` in this process's home, on a port of its own, without this machine's devices."""
    words = [sys.executable, "-m", "serverless_gpu.cli", "up", "--port", "0", "--no-node"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert server.stdout is not None and server.stderr is not None
        line = server.stdout.readline()
        assert " at http" in line, line + server.stderr.read()
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def test_24_6_a_recorded_server_goes_on(date: str, expected: Any, home: Path, sgpu: Sgpu) -> None:
    recording.unpacked(date, "server", home)
    runs = expected["remote runs"]
    with running():
        _holds_what_was_recorded(runs, sgpu)
        for words, then in expected["server answers"].items():
            now = recording.shape(recording.parsed(sgpu(*words.format(**runs).split())))
            assert recording.lacks(now, then) == [], f"sgpu {words}"
        assert "epoch 3 of rank 1" in sgpu("logs", runs["trains"], "--rank", "1")
        assert json.loads(sgpu("server", "check", "--json"))["violations"] == []
        assert sgpu("audit", "verify")
        _is_attached(runs, expected)


def test_24_6_a_recorded_backup_is_restored(date: str, expected: Any, home: Path, tmp_path: Path, sgpu: Sgpu) -> None:
    (backup,) = (path for path in recording.unpacked(date, "backup", tmp_path / "backup").iterdir() if path.is_dir())
    sgpu("server", "verify", str(backup))
    sgpu("server", "restore", str(backup))
    with running():
        _holds_what_was_recorded(expected["remote runs"], sgpu)


def _holds_what_was_recorded(runs: dict[str, str], sgpu: Sgpu) -> None:
    listed = {row["id"]: row for row in json.loads(sgpu("runs", "--json"))}
    assert {run_id: row["state"] for run_id, row in listed.items()} == {runs[name]: STATES[name] for name in _REMOTE}
    assert {row["team"] for row in listed.values()} == {"research"}
    trained = json.loads(sgpu("show", runs["trains"], "--json"))
    assert trained["receipt"]["micros"] == trained["cost"]["micros"] > 0
    assert trained["spec"]["policy"] == "careful"
    usage = json.loads(sgpu("usage", "--last", "3650d", "--json"))
    assert sum(row["micros"] for row in usage["totals"]) >= trained["cost"]["micros"]
    budget = json.loads(sgpu("budget", "show", "research-2026", "--json"))
    assert (budget["limit_micros"], budget["period"], budget["hard"]) == (100_000_000, "month", True)
    policy = json.loads(sgpu("policy", "show", "careful", "--json"))
    assert (policy["max_run_s"], list(policy["required_tags"])) == (3600.0, ["project"])
    assert {row["name"] for row in recording.parsed(sgpu("user", "list", "--json"))} >= {"alice", "bob"}
    (team,) = recording.parsed(sgpu("team", "list", "--json"))
    assert (team["name"], team["members"]) == ("research", ["alice"])
    (secret,) = recording.parsed(sgpu("secret", "list", "--json"))
    assert (secret["name"], secret["version"]) == ("HF_TOKEN", 1)
    prices = json.loads(sgpu("price", "list", "--json"))["prices"]
    assert [(row["resource"], row["micros_per_hour"]) for row in prices] == [("H100", 2_500_000)]


def _is_attached(runs: dict[str, str], expected: Any) -> None:
    # Once alice's recorded token has ended, the server makes one for whoever starts it: another principal.
    attached = {name: serverless_gpu.attach(run_id, allow_pickle_from="alice") for name, run_id in runs.items()}
    with pytest.raises(errors.RunTimedOut):
        attached["takes_long"].results(10)
    with pytest.raises(errors.RankCrashed):
        attached["crashes"].results(10)
    assert attached["trains"].receipt(10).world_size == 2 and attached["trains"].cost().is_final
    same_python(expected)
    assert attached["trains"].results(10) == TRAINED
    with pytest.raises(ValueError) as raised:
        attached["fails"].results(10)
    assert raised.value.args == (golden("stable.recorded_home.shard-rows"),)
