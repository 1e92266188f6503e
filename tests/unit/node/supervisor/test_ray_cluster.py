"""What is kept of what a node's Ray wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu.model.redaction import Redactor
from serverless_gpu.node.inside.raycluster.ray_start import OUTPUT_FILE
from serverless_gpu.node.supervisor import ray_cluster
from serverless_gpu.node.supervisor.ray_cluster import save_logs
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden


def logs_of(directory: Path, number: str = "1") -> Path:
    logs = directory / number / "session_2026-11-22_07-00-00_0_1" / "logs"
    logs.mkdir(parents=True)
    (directory / number / "session_latest").symlink_to(logs.parent)
    return logs


def test_logs_are_kept_from_their_ends_the_newest_first_and_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "FILE_BYTES_MAX", 10)
    monkeypatch.setattr(ray_cluster, "BYTES_MAX", 25)
    logs = logs_of(tmp_path / "own")
    (tmp_path / "own" / "token").write_text("secret")
    (tmp_path / "own" / "1" / OUTPUT_FILE).write_text("start")
    (logs / "sub").mkdir()
    for age, name in enumerate(["new", "sub/middle", "old", "oldest"]):
        (logs / name).write_text("0123456789" + name[:2] + "abcdefgh")
        os.utime(logs / name, (1_000_000_000 - age, 1_000_000_000 - age))
    os.mkfifo(logs / "pipe")
    (logs / "link").symlink_to("/etc/passwd")
    save_logs(str(tmp_path / "own"), str(tmp_path / "kept"), FakeClock())
    kept = {str(path.relative_to(tmp_path / "kept")): path for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert {name: path.read_text() for name, path in kept.items()} == {
        OUTPUT_FILE: "start",
        "new": "neabcdefgh",
        "sub/middle": "suabcdefgh",
    }


def test_logs_of_a_second_start_lie_beside_those_of_the_first(tmp_path: Path) -> None:
    for number in ("1", "2"):
        (logs_of(tmp_path / "own", number) / "raylet.out").write_text(number)
    save_logs(str(tmp_path / "own"), str(tmp_path / "kept"), FakeClock())
    assert (tmp_path / "kept" / "raylet.out").read_text() == "1"
    assert (tmp_path / "kept" / "start-2" / "raylet.out").read_text() == "2"


def test_a_directory_of_logs_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    logs = logs_of(tmp_path / "own")
    logs.rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("another's")
    logs.symlink_to(tmp_path / "elsewhere")
    save_logs(str(tmp_path / "own"), str(tmp_path / "kept"), FakeClock())
    assert list((tmp_path / "kept").iterdir()) == []


class Slow(FakeClock):
    """A clock by which two seconds pass between two looks at it."""

    def boottime_ns(self) -> int:
        self.advance(2)
        return super().boottime_ns()


def test_a_slow_disk_holds_the_devices_for_a_bounded_time_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = logs_of(tmp_path / "own")
    for number in range(3):
        (logs / str(number)).write_text("x")
    monkeypatch.setattr(ray_cluster, "LIMIT_NS", 11_000_000_000)  # three looks for finding them, two for the first two
    said = save_logs(str(tmp_path / "own"), str(tmp_path / "kept"), Slow())
    assert said == golden("node.ray_logs.logs-ray-kept")
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_27_secrets_in_the_logs_of_ray_are_masked(tmp_path: Path) -> None:
    (logs_of(tmp_path / "own") / "worker.out").write_text("hunter2-hunter2 " * 9_000)
    save_logs(str(tmp_path / "own"), str(tmp_path / "kept"), FakeClock(), Redactor({"A": b"hunter2-hunter2"}))
    assert (tmp_path / "kept" / "worker.out").read_text() == "[secret A] " * 9_000
