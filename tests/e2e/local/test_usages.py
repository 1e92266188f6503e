"""Code written for the public `serverless_gpu` surface runs unchanged, on declared fakes (gloo instead of nccl).

Each numbered test follows one documented or published way of use; the code is our own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu import distributed, launcher
from serverless_gpu import ray as ray_door
from serverless_gpu import runtime as rt
from serverless_gpu.compute import GPUType
from serverless_gpu.errors import (
    GpuTypeMismatch,
    NotEnoughGpus,
)
from serverless_gpu.launcher import distributed as launcher_distributed
from serverless_gpu.ray import ray_launch
from tests.support.golden import golden
from tests.support.local import usages

pytestmark = pytest.mark.usefixtures("warm")


# --- import paths -----------------------------------------------------------------------------------------------------


def test_every_import_path_leads_to_the_same_names() -> None:
    assert serverless_gpu.distributed is distributed is launcher_distributed is launcher.distributed
    assert serverless_gpu.runtime is rt and serverless_gpu.compute.GPUType is GPUType is serverless_gpu.GPUType
    assert serverless_gpu.ray is ray_door
    assert {"distributed", "attach", "runtime", "compute", "launcher", "ray"} <= set(dir(serverless_gpu))


def test_ray_launch_without_ray_says_what_to_install() -> None:
    @ray_launch(gpus=8, gpu_type="A10")
    def drive() -> None: ...

    with pytest.raises(ImportError, match=golden("local.usages.needs-ray-nhint")):
        drive.distributed()


def test_gpu_types_are_strings_in_any_case() -> None:
    assert GPUType.H100 == "H100" and GPUType("h100") is GPUType.H100 and GPUType.A10 == "A10"


def test_outside_of_a_run_this_process_is_rank_0_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert (rt.get_global_rank(), rt.get_local_rank(), rt.get_node_rank()) == (0, 0, 0)
    assert (rt.get_world_size(), rt.get_local_world_size()) == (1, 1)
    monkeypatch.setenv("RANK", "3")  # as under torchrun
    assert rt.get_global_rank() == 3


# --- usages -----------------------------------------------------------------------------------------------------------


def test_usage_1_starter(capsys: pytest.CaptureFixture[str]) -> None:
    usages.usage_1_starter(capsys)


def test_usage_2_ddp_with_keywords_and_module_level_helpers() -> None:
    usages.usage_2_ddp_with_keywords_and_module_level_helpers()


def test_usage_3_fsdp_with_a_default_from_a_constant_and_a_checkpoint(tmp_path: Path) -> None:
    usages.usage_3_fsdp_with_a_default_from_a_constant_and_a_checkpoint(tmp_path)


def test_usage_4_everything_imported_inside_and_the_result_ignored(tmp_path: Path) -> None:
    usages.usage_4_everything_imported_inside_and_the_result_ignored(tmp_path)


def test_usage_5_objects_captured_from_the_notebook() -> None:
    usages.usage_5_objects_captured_from_the_notebook()


def test_usage_6_a_config_object_that_the_function_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    usages.usage_6_a_config_object_that_the_function_changes(monkeypatch)


def test_without_arguments_every_gpu_is_used() -> None:
    usages.without_arguments_every_gpu_is_used()


# --- wrong use in the wild --------------------------------------------------------------------------------------------


def test_the_negative_corpus_gets_a_clear_type_error() -> None:
    usages.the_negative_corpus_gets_a_clear_type_error()


def test_what_this_machine_has_not_is_refused() -> None:
    def train(lr: float) -> float:
        return lr

    with pytest.raises(GpuTypeMismatch, match="A10"):
        distributed(gpus=2, gpu_type="a10")(train).distributed(0.1)
    with pytest.raises(NotEnoughGpus, match="16"):
        distributed(gpus=16, gpu_type="H100")(train).distributed(0.1)
