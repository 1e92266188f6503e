"""The examples with Ray, run as a user runs them: on CPU slots, on real input, until they print their outcome."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray.user_scripts import LIMIT_S, run_script
from tests.support.local.observe import cancel_all, run_directories
from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(LIMIT_S + 30)]

EXAMPLES = REPOSITORY / "examples"


@pytest.fixture
def slots(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a home of two CPU slots, on a machine whose GPUs nobody sees."""
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "CPU:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield home
    cancel_all(home)


def percentages(line: str) -> list[float]:
    """Return the percentages a line has."""
    return [float(number) for number in re.findall(r"([\d.]+)%", line)]


def test_ray_tune_finds_settings_and_stops_trials_early(slots: Path) -> None:
    out, _ = run_script(EXAMPLES / "ray_tune_digits.py")
    rows = re.findall(r"^ +(0\.\d{5}) +(\d+) +(\d+) +([\d.]+)%$", out, re.MULTILINE)
    assert len(rows) == 12
    assert float(rows[0][3]) > 90 > float(rows[-1][3]), "the best comes first"
    epochs = {int(row[2]) for row in rows}
    assert 27 in epochs and min(epochs) < 27, "those that lag behind are stopped"
    assert len(run_directories(slots)) == 1


def test_ray_data_classifies_every_image_nine_times(slots: Path) -> None:
    out, _ = run_script(EXAMPLES / "ray_data_inference.py")
    said, *rows = out[out.index("images; recognized") - 5 :].splitlines()
    assert said.startswith("7173 "), out
    (_, above, _), (left, centre, right), (_, below, _) = (percentages(row) for row in rows)
    assert centre > 90 > max(above, left, right, below)
    assert len(run_directories(slots)) == 2, "the training had a run, too"


def test_ray_train_has_two_workers_and_hands_the_model_out(slots: Path) -> None:
    out, err = run_script(EXAMPLES / "ray_train_digits.py")
    found = re.search(r"^2 workers, loss [\d.]+; test accuracy ([\d.]+)%$", out, re.MULTILINE)
    assert found and float(found[1]) > 88, out
    assert "world_rank=1, local_rank=1" in err, "what Ray's workers print is relayed"
    assert "State API" not in err, "nobody has asked for the dashboard, and it is not missed once a second"
