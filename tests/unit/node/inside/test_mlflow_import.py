"""Which import the hook of MLflow listens to."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from serverless_gpu.node.inside.mlflow import hook
from serverless_gpu.node.inside.mlflow.job import MlflowJob


def test_only_mlflow_is_taken_over_of_what_one_loader_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in ("mlflow", "sgpu_beside_it"):
            archive.writestr(f"{name}.py", "")
    attached: list[str] = []
    monkeypatch.setattr(hook, "attach", lambda job, module: attached.append(module.__name__))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "all.zip"), *sys.path])
    monkeypatch.setattr(sys, "meta_path", [hook.Finder(MlflowJob(str(tmp_path), 0)), *sys.meta_path])
    try:
        for _ in range(2):  # whoever asks whether it is there does not import it
            assert importlib.util.find_spec("mlflow") is not None
        importlib.import_module("sgpu_beside_it")
        assert attached == []
        importlib.import_module("mlflow")
        assert attached == ["mlflow"]
    finally:
        for name in ("mlflow", "sgpu_beside_it"):
            sys.modules.pop(name, None)
