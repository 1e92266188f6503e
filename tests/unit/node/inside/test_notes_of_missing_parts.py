"""Notes on errors about what a rank does not have: CUDA, `databricks.air`."""

from __future__ import annotations

import os

import pytest

from serverless_gpu.node.inside import failure

CUDA_TEXTS = (
    "Found no NVIDIA driver on your system.",
    "Torch not compiled with CUDA enabled",
    "No CUDA GPUs are available",
    "CUDA error: CUDA driver version is insufficient for CUDA runtime version",
    "Distributed package doesn't have NCCL built in",
)


def notes(error: BaseException) -> list[str]:
    failure.tell_of_torch(error, os.environ)
    return list(getattr(error, "__notes__", []))


@pytest.mark.parametrize("text", CUDA_TEXTS)
def test_23A5_cuda_is_explained_on_declared_gpus_only(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_GPU_UUIDS", "FAKE-H100-0,FAKE-H100-1")
    (note,) = notes(RuntimeError(text))
    assert note.startswith(
        "the GPUs of this run are declared by SERVERLESS_GPU_FAKE and have no CUDA. Choose the device"
    )
    assert len(notes(AssertionError(text))) == 1
    assert notes(RuntimeError("shapes differ")) == []
    monkeypatch.setenv("SGPU_GPU_UUIDS", "CPU-0")
    assert notes(RuntimeError(text))[0].startswith("this run has CPU slots, which have no CUDA. ")
    monkeypatch.setenv("SGPU_GPU_UUIDS", "GPU-9a")
    assert notes(RuntimeError(text)) == []


@pytest.mark.parametrize(
    ("line", "is_explained"),
    [
        ("import databricks.air", True),
        ("from databricks.air import distributed", True),
        ("from databricks import air", True),
        ("import databricks.air.data", True),
        ("import databricks.sdk", False),
        ("import databricks", False),
        ("import airbag_of_nobody", False),
    ],
)
def test_23A5_databricks_air_is_explained_and_other_modules_are_not(line: str, is_explained: bool) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(line, {})
    assert any("docs/how-to/from-databricks.md" in note for note in notes(caught.value)) is is_explained
