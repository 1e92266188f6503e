"""The device nodes of an attempt's GPUs and network adapters, from trees like those of the drivers.

No machine with MIG devices or InfiniBand has run these functions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.node.isolation.views import gpu_nodes, network_nodes
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


@pytest.fixture
def divided(driver: Path) -> Path:
    """Return the driver's directory where the GPU with the minor number 1 is divided into two instances."""
    mig = driver / "capabilities" / "gpu1" / "mig"
    for place, minor in (("gi1", 21), ("gi1/ci0", 22), ("gi2", 30), ("gi2/ci0", 31)):
        (mig / place).mkdir(parents=True)
        (mig / place / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    return driver


def test_a_mig_device_has_the_nodes_of_its_gpu_and_of_its_two_instances(divided: Path, tmp_path: Path) -> None:
    devices = tmp_path / "dev"
    (devices / "nvidia-caps").mkdir(parents=True)
    (devices / "nvidiactl").touch()
    nodes = gpu_nodes(["MIG-GPU-a/1/0", "MIG-GPU-a/2/0"], divided, devices)
    caps = [f"nvidia-caps/nvidia-cap{number}" for number in (21, 22, 30, 31)]
    assert nodes == [str(devices / name) for name in ("nvidia1", *caps, "nvidiactl")]


def test_an_instance_that_the_driver_does_not_have_is_refused(divided: Path) -> None:
    with pytest.raises(OSError, match="gi3"):
        gpu_nodes(["MIG-GPU-a/3/0"], divided)
    (divided / "capabilities/gpu1/mig/gi1/ci0/access").write_text("")
    with pytest.raises(OSError, match="node for MIG-GPU-a/1/0"):
        gpu_nodes(["MIG-GPU-a/1/0"], divided)


def test_the_network_has_the_nodes_for_transfers_and_none_that_administer_it(tmp_path: Path) -> None:
    (tmp_path / "infiniband" / "by-path").mkdir(parents=True)
    for name in ("uverbs0", "uverbs11", "rdma_cm", "umad0", "issm0"):
        (tmp_path / "infiniband" / name).touch()
    assert network_nodes(tmp_path) == [
        str(tmp_path / "infiniband" / name) for name in ("rdma_cm", "uverbs0", "uverbs11")
    ]
    assert network_nodes(tmp_path / "other") == []
