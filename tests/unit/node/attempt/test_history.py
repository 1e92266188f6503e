"""Reading run directories: whatever lies there, there is an answer and no exception."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from serverless_gpu.ambient import created_wall_ns, format_moment, format_utc, new_run_id
from serverless_gpu.node.attempt import history
from serverless_gpu.node.attempt.history import (
    NOT_STARTED,
    UNREADABLE,
    read_run,
    run_ids,
    size_on_disk,
    touched_ns,
    walk,
)
from tests.support.golden import golden

SPEC = (
    b'{"run_id": "r", "fence": 1, "world_size": 2, "spec": {"name": "train", "resources": {"gpus": 2}}, "version": "0"}'
)
EXEC = (
    b'{"attempt": "r:1", "seq": 1, "kind": "exec", "boot_id": "b", "boottime_ns": 1, "wall_ns": 77, "gpus": ["G"],'
    b' "cpus": 0, "memory_bytes": 0}\n'
)
HELD = EXEC.replace(b"exec", b"held")
RESERVED = EXEC.replace(b"exec", b"reserved")
STOPPED = b'{"type": "stopped", "state": "SUCCEEDED", "reason": "completed", "cause": null, "consequences": []}'


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return an empty directory of runs."""
    return tmp_path


def make(runs: Path, run_id: str, **files: bytes) -> Path:
    """Make an attempt's directory with these files (`spec` for `spec.json` and so on)."""
    directory = runs / run_id / "1"
    directory.mkdir(parents=True)
    names = {"facts": "facts.jsonl", "lock": "supervisor.lock"}
    for name, data in files.items():
        (directory / names.get(name, f"{name}.json")).write_bytes(data)
    return directory


def test_an_ended_run(runs: Path) -> None:
    run_id = new_run_id()
    directory = make(runs, run_id, spec=SPEC, stopped=STOPPED, facts=RESERVED + EXEC, lock=b"")
    record = read_run(runs, run_id)
    assert (record.state, record.live, record.kind, record.world_size) == ("SUCCEEDED", False, "function", 2)
    assert record.spec is not None and record.spec.name == "train"
    assert record.began_ns == 77
    assert record.ended_ns == (directory / "stopped.json").stat().st_mtime_ns
    assert record.created_ns == created_wall_ns(run_id)


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (b"", "QUEUED"),
        (RESERVED, "STARTING"),
        (RESERVED + EXEC, "RUNNING"),
        (RESERVED + HELD, "RUNNING"),
        (b"{half", "QUEUED"),
    ],
)
def test_a_run_whose_supervisor_lives(runs: Path, facts: bytes, state: str) -> None:
    directory = make(runs, "a", spec=SPEC, facts=facts, lock=b"")
    with (directory / "supervisor.lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        record = read_run(runs, "a")
    assert (record.state, record.live, record.ended_ns) == (state, True, None)


def test_a_run_whose_supervisor_was_killed_is_lost(runs: Path) -> None:
    make(runs, "a", spec=SPEC, lock=b"")
    record = read_run(runs, "a")
    assert (record.state, record.live) == ("LOST", False)
    assert record.ended_ns == touched_ns(runs / "a" / "1")


def test_a_run_that_waits_in_the_agent(runs: Path) -> None:
    make(runs, "a", spec=SPEC)
    record = read_run(runs, "a", ["a"])
    assert (record.state, record.live, record.ended_ns) == ("QUEUED", False, None)


def test_a_run_whose_client_was_killed_before_it_was_launched(runs: Path) -> None:
    make(runs, "a", spec=SPEC)
    assert read_run(runs, "a").state == NOT_STARTED


def test_a_session_is_called_so(runs: Path) -> None:
    make(runs, "a", spec=b'{"kind": "session", "spec": {"spec_version": 1}, "later": [1]}', stopped=STOPPED)
    record = read_run(runs, "a")
    assert (record.kind, record.state, record.problem) == ("session", "SUCCEEDED", "")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (b"", "spec.json cannot be read: Input data was truncated"),
        (b"{", "spec.json cannot be read: Input data was truncated"),
        (b'"text"', "spec.json cannot be read: Expected `object`, got `str`"),
        (None, "spec.json cannot be read: No such file or directory"),
    ],
)
def test_a_directory_of_something_else(runs: Path, spec: bytes | None, problem: str) -> None:
    make(runs, "a", **({} if spec is None else {"spec": spec}))
    record = read_run(runs, "a")
    assert (record.state, record.problem) == (UNREADABLE, problem)


def test_a_directory_without_an_attempt(runs: Path) -> None:
    (runs / "a" / "logs").mkdir(parents=True)
    record = read_run(runs, "a")
    assert (record.state, record.problem, record.live) == (UNREADABLE, golden("cli.cli.holds-attempt"), False)


def test_one_that_is_gone_meanwhile(runs: Path) -> None:
    assert read_run(runs, "a").state == UNREADABLE


def test_a_spec_of_a_newer_version_still_says_how_it_ended(runs: Path) -> None:
    make(runs, "a", spec=b'{"world_size": 3, "spec": {"grace_s": "long"}}', stopped=STOPPED)
    record = read_run(runs, "a")
    assert (record.state, record.spec, record.world_size) == ("SUCCEEDED", None, 3)


def test_the_last_attempt_counts(runs: Path) -> None:
    make(runs, "a", spec=SPEC, stopped=STOPPED)
    for fence in ("2", "10", "tmp"):
        (runs / "a" / fence).mkdir()
    assert read_run(runs, "a").directory == runs / "a" / "10"


def test_a_pipe_in_place_of_a_file_does_not_hang(runs: Path) -> None:
    directory = make(runs, "a", spec=SPEC)
    os.mkfifo(directory / "stopped.json")
    os.mkfifo(directory / "receipt.json")
    assert read_run(runs, "a").state == NOT_STARTED


def test_a_lock_that_cannot_be_asked_counts_as_held(runs: Path) -> None:
    directory = make(runs, "a", spec=SPEC)
    (directory / "supervisor.lock").symlink_to("/nowhere/at/all")
    assert read_run(runs, "a").live


def test_newest_first_foreign_ones_last_hidden_ones_and_files_not_at_all(runs: Path) -> None:
    first, second = "01m7wtgc0mdrq1jtwz87xq3ma4", "01m7wtgcvn7dzamkbw6x08yjqb"
    for name in (first, "zebra", second, ".trash-x"):
        (runs / name).mkdir()
    (runs / "file").touch()
    assert run_ids(runs) == [second, first, "zebra"]


def test_no_directory_of_runs_is_no_runs(runs: Path) -> None:
    assert run_ids(runs / "missing") == []


def test_a_tree_without_end_is_read_up_to_a_bound(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "ENTRIES_MAX", 5)
    (runs / "loop").symlink_to(runs)
    for number in range(10):
        (runs / str(number)).write_bytes(b"x" * 5000)
    assert len(list(walk(runs))) <= 11
    assert 0 < size_on_disk(runs) < 200_000


def test_when_an_identifier_was_made() -> None:
    assert created_wall_ns("01m7wtgc0mdrq1jtwz87xq3ma4") == 1_795_189_911_572 * 1_000_000
    assert created_wall_ns("zebra") is None
    assert created_wall_ns("01m7wtgc0mdrq1jtwz87xq3mau") is None


def test_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert format_utc(1_795_189_911_000_000_000) == "2026-11-20T15:51:51Z"
    assert len(format_moment(1_795_189_911_000_000_000)) == len("2026-11-20 15:51:51")
