"""Helpers of the tests of plot that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu import Run
from serverless_gpu.client.runs.run_source import LocalRun
from serverless_gpu.model.spec import RunSpec


def handle(directory: Path, name: str = "train", world_size: int = 2) -> Run[object]:
    run: Run[object] = Run(LocalRun("r", directory, world_size, None), RunSpec(name=name))
    run._nothing_more()
    return run
