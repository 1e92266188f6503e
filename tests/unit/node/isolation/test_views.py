"""The device nodes of an attempt's GPUs, from a recorded tree of the driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.node.isolation.views import gpu_nodes
from tests.support.golden import golden


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """Return the driver's directory of a machine with two GPUs, whose numbers differ from their order on the bus."""
    for bus, uuid, minor in (("0000:17:00.0", "GPU-a", 1), ("0000:65:00.0", "GPU-b", 0)):
        place = tmp_path / "gpus" / bus
        place.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 52\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (place / "information").write_text(text)
    return tmp_path


def test_each_gpu_has_the_node_with_its_minor_number(driver: Path) -> None:
    assert gpu_nodes(["GPU-a"], driver)[:1] == ["/dev/nvidia1"]
    assert gpu_nodes(["GPU-a", "GPU-b"], driver)[:2] == ["/dev/nvidia1", "/dev/nvidia0"]


def test_an_attempt_without_gpus_gets_no_control_nodes(driver: Path) -> None:
    assert gpu_nodes([], driver) == []


def test_a_device_that_the_driver_does_not_list_is_refused(driver: Path) -> None:
    with pytest.raises(OSError, match=golden("node.isolation.no-device-node")):
        gpu_nodes(["GPU-a", "MIG-x"], driver)
