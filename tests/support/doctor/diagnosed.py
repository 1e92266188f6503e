"""A machine written down by hand, and asking one check of the doctor about it."""

from __future__ import annotations

from msgspec.structs import replace

from serverless_gpu.doctor.examination import TABLE
from serverless_gpu.doctor.facts import (
    CheckOutcome,
    Finding,
    GpuFacts,
    GpuHealth,
    Imported,
    ImportFacts,
    InterpreterFacts,
    MachineFacts,
    TorchFacts,
)
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.devices.nvml import Usage

GIB = 2**30
PYTHON = "/env/bin/python"
BY_CODE = {check.code: check for check in TABLE}
OK, WARNING, FAILED, UNKNOWN = CheckOutcome.OK, CheckOutcome.WARNING, CheckOutcome.FAILED, CheckOutcome.UNKNOWN

DEVICES = tuple(
    Device(uuid=f"GPU-{index}", index=index, type="H100", memory_bytes=80 * GIB, kind=DeviceKind.GPU)
    for index in range(2)
)
IDLE = Usage(processes=(), memory_used_bytes=0, pids_visible=True)
GPUS = GpuFacts(
    on_bus=2,
    device_files=2,
    driver="570.124.06",
    cuda=(12, 8),
    devices=DEVICES,
    usage={"GPU-0": IDLE, "GPU-1": IDLE},
    health={device.uuid: GpuHealth(capability=(9, 0), uncorrected_errors=0) for device in DEVICES},
)
TORCH = TorchFacts(version="2.9.0", cuda="12.8", devices=2, architectures=("sm_80", "sm_90"))
FINE = Imported(outcome="ok")
IMPORTS = ImportFacts(modules={"torch": FINE, "numpy": FINE}, torch=TORCH)
INTERPRETER = InterpreterFacts(
    executable=PYTHON,
    version="3.11.7",
    prefix="/env",
    base_prefix="/usr",
    packages={"torch": "2.9.0", "numpy": "2.4.6"},
)


def found(code: str, facts: MachineFacts) -> list[Finding]:
    """Return what one check says about these facts."""
    probe = BY_CODE[code].probe
    assert probe is not None
    return list(probe(facts))


def one(code: str, facts: MachineFacts) -> tuple[CheckOutcome, str, str]:
    """Return the one finding of a check."""
    (finding,) = found(code, replace(facts, python=PYTHON, cwd="/work"))
    return finding.outcome, finding.sentence, finding.mend
