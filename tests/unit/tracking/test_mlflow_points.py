"""How many points the ranks of a run may write to MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.node.inside.mlflow import writes
from serverless_gpu.node.inside.mlflow.job import MlflowJob
from serverless_gpu.node.inside.mlflow.writes import PointCount


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    """Return an attempt's directory."""
    directory = tmp_path / "runs" / "a" / "1"
    directory.mkdir(parents=True)
    return directory


def test_points_are_bounded_over_ranks_and_attempts(attempt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = attempt.parent / "2"
    second.mkdir()
    taken = []
    for directory, rank in ((attempt, 0), (attempt, 1), (second, 0), (second, 1)):
        points = PointCount(MlflowJob(str(directory), rank), limit=1000)
        taken.append(sum(points.admit(10) for _ in range(50)) * 10)
    assert sum(taken) == pytest.approx(1000, abs=40), "each may miss what others wrote since it last looked"
    assert taken[0] == 500 and taken[2:] == [0, 0]
    said = capsys.readouterr().err
    assert said.count("this run has 800 points in MLflow") == 1
    assert said.count("are not written to MLflow") == 2, "by the second attempt's first rank, and one of its others"


def test_the_bound_leaves_room_for_the_nodes_own_points() -> None:
    assert writes.POINTS_MAX == 8_000_000, "of MLflow's ten million"
