"""What a Ray cluster of a run's own costs: until its driver has connected, beside `ray start` and a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.contestants import ContestantFailed
from benchmarks.report import Row
from benchmarks.stage import Stage

RAY_RATIO_MAX = 1.2
_ROUND_S_MAX = 120.0


def ray_ready(quick: bool) -> Row:
    """Call until `ray.init()` has returned in the driver, against `ray start --head` and a program that does it."""
    python = Path(sys.prefix, "ray", "bin", "python")
    if not python.exists():
        raise ContestantFailed(f"there is no {python}: `make .venv/.installed-ray` makes it")
    names = ("ray_clusters.ours", "ray_clusters.started", "ray_clusters.initialised")
    labels = ("`ray start --head`, then a program", "a program whose `ray.init()` makes its own cluster")
    with Stage(names, labels, round_s_max=_ROUND_S_MAX, python=str(python)) as stage:
        stage.play(2 if quick else 10, pause_s=1.0)
        ours = stage.timing(0, "call → `ray.init()` has returned in the driver")
        against = stage.against()
        ratio = ours.median / stage.timing(1, labels[0]).median
        also = [
            stage.timing(0, "ours, call → first line of the function: the cluster is there", "enter_ms"),
            stage.timing(0, "ours, call → its first task is done", "done_ms"),
            stage.timing(0, "ours, call → results in the caller", "returned_ms"),
            stage.timing(0, "ours, results → receipt: nothing of the cluster is left", "ended_ms"),
            stage.timing(1, "`ray start --head` alone", "head_ms"),
            stage.timing(1, "`ray start --head`, then a program: until its first task is done", "done_ms"),
        ]
        return Row(
            name="Ray ready: call → a driver on a cluster of its own, 1 node",
            ours=ours,
            against=against,
            bar=f"≤ {RAY_RATIO_MAX:g}× `ray start` and a program",
            met=ratio <= RAY_RATIO_MAX,
            also=tuple(also),
            problems=stage.problems(),
        )


ROWS: dict[str, Callable[[bool], Row]] = {"ray-ready": ray_ready}
