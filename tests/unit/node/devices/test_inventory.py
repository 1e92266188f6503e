"""Providers: which devices there are, who uses them, and what stays unknown."""

from __future__ import annotations

import inspect
import json
import threading
from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.devices.gpu_gate import Verdict, judge
from serverless_gpu.node.devices.inventory import CpuProvider, FakeProvider, NvmlProvider, providers
from serverless_gpu.node.devices.nvml import IDLE_MEMORY_BYTES, MIB, GpuProcess, Unavailable, Usage
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.node.gpus import GIB, LOST, Card, FakeNvml, FakeNvmlError

HOST = "pid:[4026531836]"
IDLE = Usage(processes=(), memory_used_bytes=3 * MIB, pids_visible=True)
LEFTOVER = GpuProcess(pid=4242, memory_bytes=2 * GIB, name="python")
DISPLAY = GpuProcess(pid=900, memory_bytes=200 * MIB, name="Xorg", graphics=True)


FORBIDDEN = FakeNvmlError(4, "Insufficient Permissions")


def nvml_provider(*cards: Card, pid_namespace: str = HOST) -> tuple[NvmlProvider, FakeNvml]:
    nvml = FakeNvml(*cards)
    return NvmlProvider(nvml=nvml, pid_namespace=pid_namespace), nvml


# --- which devices ---


def test_gpu_indices_are_positions_in_pci_bus_order() -> None:
    cards = (Card("GPU-c", 0x9A), Card("GPU-a", 0x1B), Card("GPU-d", 0x03), Card("GPU-b", 0x3B))
    cards[2].domain = 1
    provider, _ = nvml_provider(*cards)

    assert [(device.index, device.uuid) for device in provider.devices()] == [
        (0, "GPU-a"),
        (1, "GPU-b"),
        (2, "GPU-c"),
        (3, "GPU-d"),
    ]
    assert provider.unavailable() == ()


def test_gpu_carries_type_memory_and_product() -> None:
    (device,) = nvml_provider(Card("GPU-a", 1))[0].devices()

    assert (device.type, device.kind, device.memory_bytes) == ("H100", DeviceKind.GPU, 80 * GIB)
    assert device.product == golden("node.gpus.nvidia-h100-80gb")
    assert device.pci == "0000:01:00", "as the kernel's log names it"


@pytest.mark.parametrize("error", [LOST, FORBIDDEN])
def test_F23_broken_gpu_is_listed_with_its_reason_and_the_others_stay(error: FakeNvmlError) -> None:
    provider, _ = nvml_provider(Card("GPU-a", 1), Card("GPU-b", 2, broken=error), Card("GPU-c", 3))

    assert [(device.index, device.uuid) for device in provider.devices()] == [(0, "GPU-a"), (1, "GPU-c")]
    assert provider.unavailable() == (Unavailable("GPU 1 in the driver's order", f"NVML: {error}"),)


def test_gpu_cut_into_slices_is_not_lent() -> None:
    sliced, plain = Card("GPU-a", 1), Card("GPU-b", 2)
    sliced.mig, plain.mig = 1, -1
    provider, _ = nvml_provider(sliced, plain)

    assert [device.uuid for device in provider.devices()] == ["GPU-b"]
    (unavailable,) = provider.unavailable()
    assert unavailable.name == "GPU-a"
    assert golden("node.gpus.mig-mode") in unavailable.reason


@pytest.mark.parametrize("value", [FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_without_a_driver_there_are_no_gpus_and_nothing_is_wrong(value: int) -> None:
    provider, nvml = nvml_provider(Card("GPU-a", 1))
    nvml.init_error = FakeNvmlError(value, "absent")

    assert provider.devices() == ()
    assert provider.unavailable() == ()
    assert provider.usage(["GPU-a"])["GPU-a"].problem == golden("node.gpus.nvidia-driver-ask")


def test_driver_that_does_not_fit_its_library_is_visible_until_it_does() -> None:
    provider, nvml = nvml_provider(Card("GPU-a", 1))
    nvml.init_error = FakeNvmlError(18, "version mismatch")

    assert provider.devices() == ()
    (unavailable,) = provider.unavailable()
    assert unavailable.name == "NVML"
    assert golden("node.gpus.version-mismatch-reload") in unavailable.reason
    assert "version mismatch" in provider.usage(["GPU-a"])["GPU-a"].problem
    nvml.init_error = None
    assert len(provider.devices()) == 1


def test_gpus_that_cannot_be_counted_are_visible() -> None:
    provider, nvml = nvml_provider(Card("GPU-a", 1))
    nvml.count_error = FakeNvmlError(999, "Unknown Error")

    assert provider.devices() == ()
    assert provider.unavailable() == (Unavailable("NVML", "NVML cannot count the GPUs: Unknown Error"),)


def test_the_real_binding_has_every_name_that_is_used() -> None:
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML"))]

    assert [name for name in used if not hasattr(pynvml, name)] == []
    assert NvmlProvider().usage(["GPU-no-such"])["GPU-no-such"].problem  # with or without a driver: unknown, no crash


# --- what uses them ---


def test_usage_lists_each_process_once_with_a_short_name() -> None:
    card = Card("GPU-a", 1, used=3 * GIB)
    card.compute = [(4242, 2 * GIB), (77, None)]
    card.graphics = [(900, 200 * MIB), (4242, 2 * GIB)]
    provider, _ = nvml_provider(card)

    assert provider.usage(["GPU-a"]) == {
        "GPU-a": Usage(
            processes=(GpuProcess(77, None), DISPLAY, LEFTOVER), memory_used_bytes=3 * GIB, pids_visible=True
        )
    }


def test_process_name_cannot_write_on_a_terminal() -> None:
    card = Card("GPU-a", 1)
    card.compute = [(66, 0)]
    provider, nvml = nvml_provider(card)
    nvml.names[66] = "/tmp/\x1b[2Jevil" + "x" * 500

    (process,) = provider.usage(["GPU-a"])["GPU-a"].processes
    assert process.name == "[2Jevil" + "x" * 57


def test_memory_without_a_process_means_that_processes_are_hidden() -> None:
    provider, _ = nvml_provider(Card("GPU-a", 1, used=IDLE_MEMORY_BYTES + 1), Card("GPU-b", 2, used=IDLE_MEMORY_BYTES))

    usage = provider.usage(["GPU-a", "GPU-b"])
    assert [usage["GPU-a"].pids_visible, usage["GPU-b"].pids_visible] == [False, True]


def test_in_another_pid_namespace_processes_may_be_hidden() -> None:
    provider, _ = nvml_provider(Card("GPU-a", 1), pid_namespace="pid:[4026532999]")

    assert not provider.usage(["GPU-a"])["GPU-a"].pids_visible


def test_forbidden_process_list_leaves_memory_only() -> None:
    card = Card("GPU-a", 1)
    card.processes_error = FORBIDDEN
    provider, _ = nvml_provider(card)

    assert provider.usage(["GPU-a"])["GPU-a"] == Usage((), 3 * MIB, pids_visible=False)


def test_F23_lost_gpu_has_unknown_usage_and_the_others_an_answer() -> None:
    provider, _ = nvml_provider(Card("GPU-a", 1), Card("GPU-b", 2, broken=LOST))

    usage = provider.usage(["GPU-a", "GPU-b", "GPU-gone"])
    assert usage["GPU-a"] == IDLE
    assert usage["GPU-b"].problem == golden("node.gpus.nvml-gpu-lost")
    assert usage["GPU-gone"].problem == "NVML: Not Found"


def test_F26_hanging_driver_is_unknown_after_the_limit_and_starts_one_thread_only() -> None:
    nvml = FakeNvml(Card("GPU-a", 1))
    nvml.stuck = threading.Event()
    provider = NvmlProvider(nvml=nvml, limit_s=0.05, pid_namespace=HOST)
    before = set(threading.enumerate())
    try:
        for _ in range(5):
            usage = provider.usage(["GPU-a"])["GPU-a"]
            assert usage.problem == golden("node.gpus.nvml-did-answer")
            assert judge(IDLE, usage, kind=DeviceKind.GPU) == Verdict(False, "NVML did not answer in 0.05 s")
        assert provider.devices() == ()
        assert provider.unavailable() == (Unavailable("NVML", "NVML did not answer in 0.05 s"),)
        assert len(set(threading.enumerate()) - before) == 1
    finally:
        nvml.stuck.set()
    wait_for(lambda: provider.usage(["GPU-a"]) == {"GPU-a": IDLE}, "a driver that recovers is believed again")


def test_F26_the_limit_is_five_seconds_unless_told_otherwise() -> None:
    assert inspect.signature(NvmlProvider).parameters["limit_s"].default == 5.0


def test_defect_in_a_call_reaches_the_caller() -> None:
    provider, nvml = nvml_provider(Card("GPU-a", 1))
    nvml.count_error = ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        provider.devices()


# --- fakes, CPU slots, choice ---


def test_fake_gpus_are_idle_until_the_state_file_says_otherwise(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    provider = FakeProvider("H100:2", state)
    first, second = (device.uuid for device in provider.devices())
    idle = Usage((), 0, pids_visible=True)
    assert provider.usage([first, second]) == {first: idle, second: idle}

    process = {"pid": 4242, "memory_bytes": 2 * GIB, "name": "python"}
    state.write_text(json.dumps({first: {"memory_used_bytes": 2 * GIB, "processes": [process]}}))
    assert provider.usage([first, second]) == {first: Usage((LEFTOVER,), 2 * GIB, pids_visible=True), second: idle}
    assert provider.unavailable() == ()


@pytest.mark.parametrize("text", ["not json", '{"FAKE-H100-0": {"memory_used_bytes": "many"}}', "[]"])
def test_fake_state_that_cannot_be_read_is_unknown_not_idle(tmp_path: Path, text: str) -> None:
    state = tmp_path / "state.json"
    state.write_text(text)
    provider = FakeProvider("H100:1", state)

    usage = provider.usage(["FAKE-H100-0"])["FAKE-H100-0"]
    assert "cannot be read" in usage.problem
    assert not judge(None, usage, kind=provider.kind).ok


def test_fake_problem_and_hidden_processes_can_be_staged(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text('{"FAKE-H100-0": {"problem": "NVML: GPU is lost"}, "FAKE-H100-1": {"pids_visible": false}}')
    usage = FakeProvider("H100:2", state).usage(["FAKE-H100-0", "FAKE-H100-1", "FAKE-H100-2"])

    assert usage["FAKE-H100-0"].problem == golden("node.gpus.nvml-gpu-lost")
    assert usage["FAKE-H100-1"] == Usage((), 0, pids_visible=False)
    assert usage["FAKE-H100-2"].problem == golden("node.gpus.fake-h100-device")


def test_cpu_slots_are_the_cores_we_may_run_on_and_always_idle() -> None:
    provider = CpuProvider()
    devices = provider.devices()

    assert len(devices) >= 1
    assert {device.kind for device in devices} == {DeviceKind.CPU}
    assert provider.usage([devices[0].uuid]) == {devices[0].uuid: Usage((), 0, pids_visible=True)}
    assert provider.unavailable() == ()


def test_providers_are_fakes_or_nvml_and_always_cpu_slots(tmp_path: Path) -> None:
    fakes = providers(tmp_path, {"SERVERLESS_GPU_FAKE": "H100:8"})
    assert [provider.kind for provider in fakes] == [DeviceKind.FAKE, DeviceKind.CPU]
    assert len(fakes[0].devices()) == 8
    for environ in ({}, {"SERVERLESS_GPU_FAKE": " "}):
        assert [provider.kind for provider in providers(tmp_path, environ)] == [DeviceKind.GPU, DeviceKind.CPU]
    (tmp_path / "fake_gpus.json").write_text('{"FAKE-H100-3": {"memory_used_bytes": 5}}')
    assert fakes[0].usage(["FAKE-H100-3"])["FAKE-H100-3"].memory_used_bytes == 5


def test_fake_setting_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue):
        providers(tmp_path, {"SERVERLESS_GPU_FAKE": "eight"})
