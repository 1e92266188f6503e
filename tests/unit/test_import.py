"""What importing the package costs: nothing heavy, in a fresh process; and every public name is there."""

from __future__ import annotations

import pytest

import serverless_gpu
from tests.support.golden import golden


@pytest.mark.parametrize("name", serverless_gpu.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(serverless_gpu, name) is getattr(serverless_gpu, name)
    assert name in dir(serverless_gpu)


def test_public_names_are_sorted_and_few() -> None:
    assert serverless_gpu.__all__ == sorted(serverless_gpu.__all__)
    assert len(serverless_gpu.__all__) <= 12


@pytest.mark.parametrize("room", ["compute", "errors", "launcher", "ray", "runtime", "testing"])
def test_public_rooms_are_reached_as_attributes(room: str) -> None:
    assert getattr(serverless_gpu, room).__name__ == f"serverless_gpu.{room}"


@pytest.mark.parametrize("room", ["compute", "launcher", "ray", "runtime", "testing"])
def test_the_names_of_a_public_room_are_there(room: str) -> None:
    module = getattr(serverless_gpu, room)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match=golden("common.import.module-serverless-gpu")):
        _ = serverless_gpu.distribute


def test_the_version_is_a_string() -> None:
    assert serverless_gpu.__version__.count(".") >= 1
