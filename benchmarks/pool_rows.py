"""What a call over two nodes costs, and how soon a lost node is known, beside Ray Train doing the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.contestants import ContestantFailed
from benchmarks.report import Row
from benchmarks.stage import Stage

_ROUND_S_MAX = 600.0  # the first one starts a pool, and captures and restores everything that is installed


def warm(quick: bool) -> Row:
    """A call over two nodes that have done one before, against `TorchTrainer` from a driver that is connected."""
    with _stage("warm", "`TorchTrainer.fit()`, driver connected") as stage:
        stage.play(2 if quick else 8, pause_s=1.0)
        return _called("pool-warm: call → process group of 4 ranks on 2 nodes", stage)


def cold(quick: bool) -> Row:
    """The same when no agent runs on either node, against a program that connects to a cluster that runs."""
    with _stage("cold", "a program: connect, `TorchTrainer.fit()`") as stage:
        stage.play(2 if quick else 5, pause_s=1.0)
        return _called("pool-cold: no agent, no zygote; call → process group of 4 ranks on 2 nodes", stage)


def lost(quick: bool) -> Row:
    """All processes of a node are killed at once; until the caller has an exception."""
    with _stage("lost", "`TorchTrainer.fit()` has raised") as stage:
        stage.play(1 if quick else 3, pause_s=1.0)
        ours = stage.timing(0, "a node dies → the exception is in the caller's hands")
        return Row(
            name="pool-lost: one of 2 nodes dies → the caller knows",
            ours=ours,
            against=stage.against(),
            problems=stage.problems(),
        )


def _stage(round_: str, label: str) -> Stage:
    python = Path(sys.prefix, "ray", "bin", "python")
    if not python.exists():
        raise ContestantFailed(f"there is no {python}: `make .venv/.installed-ray` makes it")
    names = (f"pools.{round_}", f"trainers.{round_}")
    return Stage(names, (label,), round_s_max=_ROUND_S_MAX, python=str(python))


def _called(name: str, stage: Stage) -> Row:
    return Row(
        name=name,
        ours=stage.timing(0, "call → all ranks in the process group"),
        against=stage.against(),
        also=(
            stage.timing(0, "ours, call → results in the caller", "returned_ms"),
            stage.timing(1, "Ray Train, call → `fit()` has returned", "returned_ms"),
        ),
        problems=stage.problems(),
    )


ROWS: dict[str, Callable[[bool], Row]] = {"pool-warm": warm, "pool-cold": cold, "pool-lost": lost}
