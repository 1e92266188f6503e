"""What a process is told about stopping and checkpoints, in processes of its own that a signal may reach."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from serverless_gpu import runtime
from serverless_gpu.errors import InvalidOption, StorageError
from serverless_gpu.node.inside.checkpoints import newest_before
from tests.support.golden import golden


@pytest.fixture(autouse=True)
def outside_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SGPU_STOP_FILE", "SGPU_STOP_REASON", "SGPU_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)


# --- being asked to stop ----------------------------------------------------------------------------------------------


def test_outside_of_a_run_nobody_asks_and_sigterm_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert (runtime.should_stop(), runtime.stop_reason()) == (False, None)
    runtime.on_stop(lambda: None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_on_stop_takes_functions() -> None:
    with pytest.raises(InvalidOption, match=re.escape(golden("node.checkpoint_contract.stop-takes-function"))):
        runtime.on_stop(3)  # type: ignore[type-var]  # the point of the test


# --- checkpoints ------------------------------------------------------------------------------------------------------


def attempts(run: Path, **files: str) -> None:
    for name, file in files.items():
        (run / name[1:]).mkdir(parents=True)
        if file:
            (run / name[1:] / file).touch()


@pytest.mark.parametrize(
    ("files", "newest"),
    [
        ({}, None),
        ({"_1": "step-7"}, "1"),
        ({"_1": "step-7", "_2": "step-9"}, "2"),
        ({"_1": "step-7", "_2": ""}, "1"),
        ({"_1": "step-7", "_2": "step-9.tmp"}, "1"),
        ({"_1": "step-7", "_2": ".step-9"}, "1"),
        ({"_9": "step-7", "_10": "step-9"}, "10"),
        ({"_11": "own", "_12": "a later one's", "_notes": "a person's", "_0": "nobody's"}, None),
    ],
)
def test_the_newest_earlier_attempt_that_saved_something(
    files: dict[str, str], newest: str | None, tmp_path: Path
) -> None:
    attempts(tmp_path / "run", **files)
    found = newest_before(str(tmp_path / "run" / "11"))
    assert found == (None if newest is None else str(tmp_path / "run" / newest))


def test_ranks_make_the_same_directory_and_find_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGPU_CHECKPOINT_DIR", str(tmp_path / "run" / "1"))
    assert runtime.resume_dir() is None
    made = {runtime.checkpoint_dir() for _ in range(2)}
    assert made == {tmp_path / "run" / "1"} and (tmp_path / "run" / "1").is_dir()
    (tmp_path / "run" / "1" / "state.pt").touch()
    assert runtime.resume_dir() is None
    monkeypatch.setenv("SGPU_CHECKPOINT_DIR", str(tmp_path / "run" / "2"))
    assert runtime.resume_dir() == tmp_path / "run" / "1"
    assert not (tmp_path / "run" / "2").exists()


def test_a_place_that_is_not_mounted_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_CHECKPOINT_DIR", str(tmp_path / "not-mounted" / "run" / "1"))
    with pytest.raises(StorageError, match=re.escape(golden("node.checkpoint_contract.cannot-made-such"))):
        runtime.checkpoint_dir()
    assert not (tmp_path / "not-mounted").exists()


def test_outside_of_a_run_checkpoints_go_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (runtime.checkpoint_dir(), runtime.resume_dir()) == (tmp_path / "checkpoints", None)


@pytest.mark.parametrize(("agreed", "expected"), [(None, "2"), ("0", None), ("1", "1"), ("2", "2"), ("7", None)])
def test_a_rank_of_several_nodes_goes_on_from_the_attempt_that_all_of_them_see(
    tmp_path: Path, agreed: str | None, expected: str | None
) -> None:
    for fence in (1, 2):
        (tmp_path / "run" / str(fence)).mkdir(parents=True)
        (tmp_path / "run" / str(fence) / "weights.pt").touch()
    found = newest_before(str(tmp_path / "run" / "3"), agreed)
    assert found == (None if expected is None else str(tmp_path / "run" / expected))
