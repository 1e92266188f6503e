"""The doctor's checks of GPUs: driver, torch, who uses them, what is not lent."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from serverless_gpu.doctor.facts import (
    CheckOutcome,
    Finding,
    GpuFacts,
    GpuHealth,
    ImportFacts,
    MachineFacts,
    TorchFacts,
)
from serverless_gpu.node.devices.nvml import GpuProcess, Unavailable, Usage
from tests.support.doctor.diagnosed import (
    DEVICES,
    FAILED,
    GIB,
    GPUS,
    IMPORTS,
    OK,
    PYTHON,
    TORCH,
    UNKNOWN,
    WARNING,
    found,
    one,
)
from tests.support.golden import golden


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (GPUS, (OK, "570.124.06, CUDA up to 12.8, 2 usable GPUs", "")),
        (GpuFacts(), (OK, "no NVIDIA GPU and no driver on this machine; runs use CPU slots or declared GPUs", "")),
        (
            GpuFacts(on_bus=4),
            (
                FAILED,
                "this machine has 4 NVIDIA GPUs, but no driver answers",
                "install the driver; in a container: docker run --gpus all … (NVIDIA Container Toolkit)",
            ),
        ),
        (GpuFacts(unavailable=(Unavailable("NVML", "mismatch"),)), (FAILED, "mismatch", "")),
        (
            GpuFacts(binding_problem="no pynvml"),
            (
                FAILED,
                "the doctor cannot look for GPUs: no pynvml",
                f"{PYTHON} -m pip install --force-reinstall nvidia-ml-py",
            ),
        ),
    ],
)
def test_the_driver(gpus: GpuFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("driver", MachineFacts(gpus=gpus)) == expected


@pytest.mark.parametrize(
    ("driver", "cuda", "devices", "outcome"),
    [
        ("570.124.06", "12.8", 2, OK),
        ("525.60.13", "12.8", 2, OK),
        ("525.60.11", "12.8", 0, FAILED),
        ("570.124.06", "13.0", 0, FAILED),
        ("580.65.06", "13.0", 2, OK),
        ("450.80.02", "11.8", 2, OK),
        ("570.124.06", "13.0", 2, OK),  # NVIDIA's compatibility package: what works is believed
        ("570.124.06", "14.1", None, UNKNOWN),
        ("strange", "12.8", None, UNKNOWN),
    ],
)
def test_driver_against_cuda(driver: str, cuda: str, devices: int | None, outcome: CheckOutcome) -> None:
    torch = TorchFacts(version="2.9.0", cuda=cuda, devices=devices)
    facts = MachineFacts(gpus=replace(GPUS, driver=driver), imports=ImportFacts(torch=torch))
    assert one("cuda-driver", facts)[0] is outcome


def test_a_driver_that_is_too_old_is_told_with_what_it_takes() -> None:
    torch = TorchFacts(version="2.9.0", cuda="13.0", devices=0)
    assert one("cuda-driver", MachineFacts(gpus=GPUS, imports=ImportFacts(torch=torch))) == (
        FAILED,
        golden("doctor.doctor_gpus.torch-built-cuda"),
        golden("doctor.doctor_gpus.install-driver-least", PYTHON=PYTHON),
    )


def test_a_cpu_build_on_a_machine_with_gpus() -> None:
    torch = TorchFacts(version="2.9.0+cpu")
    assert one("torch-cpu-only", MachineFacts(gpus=GPUS, imports=ImportFacts(torch=torch))) == (
        FAILED,
        golden("doctor.doctor_gpus.torch-cpu-cpu"),
        golden("doctor.doctor_gpus.pip-install-force", PYTHON=PYTHON),
    )
    assert found("torch-cpu-only", MachineFacts(gpus=GpuFacts(), imports=ImportFacts(torch=torch))) == []
    assert one("torch-cpu-only", MachineFacts(gpus=GPUS, imports=IMPORTS))[0] is OK


@pytest.mark.parametrize(
    ("sees", "visible", "outcome", "sentence"),
    [
        (2, None, OK, "torch sees 2 of 2 GPUs"),
        (1, None, FAILED, "torch sees 1 of 2 GPUs"),
        (1, "1", OK, "torch sees 1 of 2 GPUs (CUDA_VISIBLE_DEVICES=1)"),
        (0, "", OK, "torch sees 0 of 2 GPUs (CUDA_VISIBLE_DEVICES=)"),
        (0, "0,1", FAILED, "torch sees 0 of 2 GPUs (CUDA_VISIBLE_DEVICES=0,1)"),
    ],
)
def test_torch_sees_fewer(sees: int, visible: str | None, outcome: CheckOutcome, sentence: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    imports = ImportFacts(torch=replace(TORCH, devices=sees))
    assert one("torch-sees-fewer", MachineFacts(environ=environ, gpus=GPUS, imports=imports))[:2] == (outcome, sentence)


def test_a_torch_that_hangs_when_it_is_asked_is_unknown() -> None:
    imports = ImportFacts(torch=replace(TORCH, devices=None, problem="the process took too long"))
    assert one("torch-sees-fewer", MachineFacts(gpus=GPUS, imports=imports)) == (
        UNKNOWN,
        golden("doctor.doctor_gpus.torch-could-asked"),
        "",
    )


@pytest.mark.parametrize(
    ("capability", "architectures", "outcome"),
    [
        ((9, 0), ("sm_80", "sm_90"), OK),
        ((8, 9), ("sm_80", "sm_90"), OK),
        ((8, 0), ("sm_86", "sm_90"), FAILED),
        ((7, 0), ("sm_75", "sm_80"), FAILED),
        ((12, 0), ("sm_90", "compute_90"), OK),
        ((12, 0), ("sm_80", "sm_90a"), FAILED),
    ],
)
def test_cards_that_torch_has_no_code_for(
    capability: tuple[int, int], architectures: tuple[str, ...], outcome: CheckOutcome
) -> None:
    gpus = replace(GPUS, devices=DEVICES[:1], health={"GPU-0": GpuHealth(capability=capability)})
    imports = ImportFacts(torch=replace(TORCH, architectures=architectures))
    assert one("architectures", MachineFacts(gpus=gpus, imports=imports))[0] is outcome


def test_visible_devices() -> None:
    def look(value: str) -> tuple[CheckOutcome, str, str]:
        return one("visible-devices", MachineFacts(environ={"CUDA_VISIBLE_DEVICES": value}, gpus=GPUS))

    assert look("0") == (OK, golden("doctor.doctor_gpus.cuda-visible-devices"), "")
    assert look("") == (WARNING, golden("doctor.doctor_gpus.cuda-visible-devices-leaves"), "unset CUDA_VISIBLE_DEVICES")
    assert found("visible-devices", MachineFacts(gpus=GPUS)) == []


def test_foreign_processes_are_named_those_of_runs_are_not() -> None:
    used = Usage(processes=(GpuProcess(41, 40 * GIB, "python"),), memory_used_bytes=40 * GIB, pids_visible=True)
    gpus = replace(GPUS, usage={"GPU-0": used, "GPU-1": used}, held={"GPU-1": "01abc"})
    assert one("gpu-busy", MachineFacts(gpus=gpus)) == (
        WARNING,
        golden("doctor.doctor_gpus.gpu-h100-pid"),
        golden("doctor.doctor_gpus.end-if-yours"),
    )
    assert one("gpu-busy", MachineFacts(gpus=GPUS))[:2] == (OK, golden("doctor.doctor_gpus.foreign-process-gpus"))


def test_processes_that_are_not_visible() -> None:
    used = Usage(processes=(), memory_used_bytes=9 * GIB, pids_visible=False)
    gpus = replace(GPUS, devices=DEVICES[:1], usage={"GPU-0": used})
    assert one("gpu-busy", MachineFacts(gpus=gpus)) == (
        WARNING,
        golden("doctor.doctor_gpus.gpu-h100-gib"),
        golden("doctor.doctor_gpus.end-runs-another"),
    )


def test_usage_that_nvml_cannot_tell_is_unknown() -> None:
    usage = {"GPU-0": Usage(processes=(), memory_used_bytes=None, pids_visible=False, problem="NVML: lost")}
    assert found("gpu-busy", MachineFacts(gpus=replace(GPUS, usage=usage))) == [
        Finding(UNKNOWN, "GPU-0: NVML: lost"),
        Finding(UNKNOWN, "GPU-1: NVML reported no usage for this GPU"),
    ]


def test_quarantine_with_how_to_lift_it() -> None:
    gpus = replace(GPUS, quarantined={"GPU-1": ("after run 01a: pid 4 still holds 1 GiB", "/l/GPU-1.quarantine")})
    assert one("quarantine", MachineFacts(gpus=gpus)) == (
        WARNING,
        golden("doctor.doctor_gpus.gpu-lent-after"),
        golden("doctor.doctor_gpus.truncate-gpu-quarantine"),
    )


def test_cards_that_are_not_lent() -> None:
    gpus = replace(GPUS, unavailable=(Unavailable("GPU-3", "MIG mode is on"),))
    assert one("gpu-unusable", MachineFacts(gpus=gpus)) == (WARNING, golden("doctor.doctor_gpus.gpu-lent-mig"), "")


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (GpuHealth(uncorrected_errors=0), (OK, "no errors", "")),
        (GpuHealth(), (UNKNOWN, "the GPUs do not report memory errors", "")),
        (
            GpuHealth(uncorrected_errors=3),
            (WARNING, "GPU-0 has had 3 uncorrected memory errors since boot", ""),
        ),
        (
            GpuHealth(uncorrected_errors=0, remap_pending=True, remap_failed=False),
            (WARNING, "GPU-0 will replace memory rows at its next reset", ""),
        ),
        (
            GpuHealth(uncorrected_errors=0, remap_pending=True, remap_failed=True),
            (FAILED, "GPU-0 could not replace broken memory rows", "replace the card"),
        ),
    ],
)
def test_health(health: GpuHealth, expected: tuple[CheckOutcome, str, str]) -> None:
    gpus = replace(GPUS, devices=DEVICES[:1], health={"GPU-0": health})
    assert one("gpu-health", MachineFacts(gpus=gpus)) == expected


def test_F23_a_log_that_cannot_be_read_is_no_good_news() -> None:
    assert one("kernel-log", MachineFacts(gpus=GPUS))[0] is OK
    closed = replace(GPUS, kernel_log="/dev/kmsg cannot be read: Operation not permitted")
    outcome, sentence, _ = one("kernel-log", MachineFacts(gpus=closed))
    assert outcome is UNKNOWN and sentence.endswith("/dev/kmsg cannot be read: Operation not permitted")
    assert found("kernel-log", MachineFacts(gpus=GpuFacts())) == []


def test_F25_a_gpu_on_which_everybodys_code_fails() -> None:
    assert one("gpu-suspect", MachineFacts(gpus=GPUS))[:2] == (OK, "none")
    assert one("gpu-suspect", MachineFacts(gpus=replace(GPUS, suspects=("GPU-0: suspect hardware",))))[:2] == (
        WARNING,
        "GPU-0: suspect hardware",
    )


def test_declared_gpus() -> None:
    fakes = {"SERVERLESS_GPU_FAKE": "H100:8"}
    assert one("fake-gpus", MachineFacts(environ=fakes, gpus=GpuFacts()))[0] is OK
    assert one("fake-gpus", MachineFacts(environ=fakes, gpus=GPUS))[:2] == (
        WARNING,
        golden("doctor.doctor_gpus.serverless-gpu-fake"),
    )
    assert found("fake-gpus", MachineFacts(gpus=GPUS)) == []
