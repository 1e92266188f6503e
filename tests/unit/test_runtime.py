"""Where a process stands in its gang, as torch's variables say, and GPU types by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serverless_gpu import compute, launcher, runtime
from serverless_gpu.client.decorator import distributed
from serverless_gpu.model.hardware import find_type

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
FUNCTIONS: dict[str, Callable[[], int]] = {
    "RANK": runtime.get_global_rank,
    "LOCAL_RANK": runtime.get_local_rank,
    "WORLD_SIZE": runtime.get_world_size,
    "LOCAL_WORLD_SIZE": runtime.get_local_world_size,
    "NODE_RANK": runtime.get_node_rank,
}


@pytest.fixture(autouse=True)
def outside_of_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def everything() -> dict[str, int]:
    return {name: function() for name, function in FUNCTIONS.items()}


def test_outside_of_a_gang_a_process_is_rank_0_of_1() -> None:
    assert everything() == {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0}


def test_inside_the_variables_of_torch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": 11, "LOCAL_RANK": 3, "WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8, "NODE_RANK": 1}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    assert everything() == given


def test_torchruns_group_rank_is_the_node_where_nothing_better_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "2")
    assert runtime.get_node_rank() == 2
    monkeypatch.setenv("NODE_RANK", "1")
    assert runtime.get_node_rank() == 1


@pytest.mark.parametrize("value", ["", "one", "-1", "1.5", " 1", "²", "٣"])
def test_what_is_no_number_is_as_if_it_were_not_there(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, value)
    assert everything() == {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": 0}


def test_all_names_are_there() -> None:
    contract = ["checkpoint_dir", "on_stop", "resume_dir", "secret", "should_stop", "stop_reason"]
    assert sorted(runtime.__all__) == sorted([*(function.__name__ for function in FUNCTIONS.values()), *contract])


@pytest.mark.parametrize("member", compute.GPUType)
def test_every_gpu_type_is_in_the_catalogue_and_found_in_any_case(member: compute.GPUType) -> None:
    assert find_type(member).name == member.value
    assert compute.GPUType(member.value.lower()) is member


def test_a_gpu_type_that_is_not_there_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="H1000"):
        compute.GPUType("H1000")


def test_the_launcher_of_existing_code_is_ours() -> None:
    assert launcher.distributed is distributed
