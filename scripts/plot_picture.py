"""Draws docs/images/plot.png for the how-to page about watching: `python -m scripts.plot_picture`.

The samples are made up, so that one picture shows all features. It has eight GPUs, a failure, a second attempt, and one
GPU that is less busy than the others.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

from PIL import Image

from serverless_gpu.client.metrics import Series
from serverless_gpu.client.runs import run_figure, timeline
from serverless_gpu.client.runs.timeline import CurveMark

TARGET = Path(__file__).parents[1] / "docs" / "images" / "plot.png"
BEGAN = 1_800_000_000
FAILED_S, AGAIN_S, ENDED_S = 1500, 1620, 3000
SLOW = 3


def main() -> None:
    """Draw the picture."""
    metrics = {name: series for gpu in range(8) for name, series in _gpu(gpu).items()}
    marks = [
        CurveMark(BEGAN + FAILED_S - 2, "failure", "FAILED (rank_signal, rank 5): a signal ended a rank"),
        CurveMark(BEGAN + AGAIN_S, "attempt", "attempt 2 began"),
    ]
    titles = run_figure.Titles("train · run 01kaqw3e5r7t9y2u4i6o8p0a1s", "8 H100 · 50 min 00 s · SUCCEEDED")
    totals = {(0, gpu): 81_559 << 20 for gpu in range(8)}
    run_figure.draw(timeline.lanes(metrics, totals), marks, titles, TARGET)
    with Image.open(TARGET) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(TARGET, optimize=True)
    print(TARGET)


def _gpu(gpu: int) -> dict[str, Series]:
    chance = random.Random(gpu)
    times = [float(BEGAN + at) for at in range(0, ENDED_S, 2) if not FAILED_S < at < AGAIN_S]
    busy, memory = [], []
    for time in times:
        age = (time - BEGAN) % AGAIN_S
        loading = age < 60
        level = 4 if loading else 45 if gpu == SLOW else 93
        wave = 0 if loading else 7 * math.sin(age / 40 + gpu)
        busy.append(min(100.0, max(0.0, level + wave + chance.gauss(0, 3))))
        memory.append(1_000.0 if loading else min(61_000.0 + 300 * gpu, 1_000 + 900 * (age - 60)))
    name = f"system/node_0/gpu_{gpu}_"
    return {
        f"{name}utilization_percentage": Series(times, busy),
        f"{name}memory_usage_megabytes": Series(times, memory),
    }


if __name__ == "__main__":
    main()
