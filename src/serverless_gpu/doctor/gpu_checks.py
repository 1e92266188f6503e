"""Checks the GPUs: driver, NVML, torch support, foreign processes, quarantine."""

from __future__ import annotations

from serverless_gpu.doctor.facts import (
    Check,
    CheckGroup,
    Finding,
    GpuFacts,
    ImportFacts,
    MachineFacts,
    TorchFacts,
    UnknownFact,
    about,
    failed,
    ok,
    unknown,
    warning,
)
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.placement import restrict
from serverless_gpu.node.devices.gpu_gate import foreign
from serverless_gpu.node.devices.inventory import FAKE_VARIABLE

# Oldest Linux driver for each CUDA major version, according to NVIDIA's "minor version compatibility".
OLDEST_DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}


@about(lambda facts: facts.gpus)
def _driver(facts: MachineFacts, gpus: GpuFacts) -> list[Finding]:
    if gpus.binding_problem:
        mend = f"{facts.python_command} -m pip install --force-reinstall nvidia-ml-py"
        return failed(f"the doctor cannot look for GPUs: {gpus.binding_problem}", mend)
    nvml = [entry.reason for entry in gpus.unavailable if entry.name == "NVML"]
    if nvml:
        return failed(nvml[0])
    if gpus.driver:
        cuda = f", CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}" if gpus.cuda else ""
        return ok(f"{gpus.driver}{cuda}, {len(gpus.devices)} usable GPU{'' if len(gpus.devices) == 1 else 's'}")
    if gpus.device_files or gpus.on_bus:
        return failed(
            f"this machine has {gpus.on_bus or gpus.device_files} NVIDIA GPUs, but no driver answers",
            "install the driver; in a container: docker run --gpus all … (NVIDIA Container Toolkit)",
        )
    return ok("no NVIDIA GPU and no driver on this machine; runs use CPU slots or declared GPUs")


def _cuda_driver(facts: MachineFacts) -> list[Finding]:
    gpus, torch = facts.gpus, _torch(facts)
    if isinstance(gpus, UnknownFact) or not gpus.driver or not torch or not torch.cuda:
        return []
    major = _numbers(torch.cuda)[0]
    oldest = OLDEST_DRIVERS.get(major)
    named = f"torch {torch.version} is built for CUDA {torch.cuda}, the driver is {gpus.driver}"
    if oldest is None or not _numbers(gpus.driver):
        return unknown(f"{named}; the doctor does not know which driver this CUDA version needs")
    if _numbers(gpus.driver) >= oldest:
        return ok(named)
    if torch.devices:
        return ok(f"{named}, with NVIDIA's compatibility package")
    newest = max((known for known, driver in OLDEST_DRIVERS.items() if driver <= _numbers(gpus.driver)), default=11)
    mend = (
        f"install driver {_dotted(oldest)} or newer, or a torch for this driver: {facts.python_command} -m pip "
        f"install --force-reinstall torch --index-url https://download.pytorch.org/whl/{_WHEELS[newest]}"
    )
    return failed(f"{named}, and CUDA {major} needs {_dotted(oldest)}", mend)


_WHEELS = {11: "cu118", 12: "cu126", 13: "cu130"}


def _torch_cpu_only(facts: MachineFacts) -> list[Finding]:
    gpus, torch = facts.gpus, _torch(facts)
    if isinstance(gpus, UnknownFact) or not gpus.devices or not torch:
        return []
    if torch.cuda or torch.hip:
        return ok(f"torch {torch.version} is built for {'CUDA ' + torch.cuda if torch.cuda else 'ROCm ' + torch.hip}")
    wheel = _WHEELS.get(gpus.cuda[0] if gpus.cuda else 12, "cu126")
    mend = f"{facts.python_command} -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel}"
    return failed(f"torch {torch.version} is a CPU build, but this machine has {len(gpus.devices)} GPUs", mend)


def _torch_sees_fewer(facts: MachineFacts) -> list[Finding]:
    gpus, torch = facts.gpus, _torch(facts)
    if isinstance(gpus, UnknownFact) or not gpus.devices or not torch or not (torch.cuda or torch.hip):
        return []
    if torch.devices is None:
        return unknown(f"torch did not report its number of GPUs: {torch.problem}")
    visible = facts.environ.get("CUDA_VISIBLE_DEVICES")
    expected = len(gpus.devices)
    if visible is not None:
        try:
            expected = len(restrict(gpus.devices, visible))
        except ServerlessGpuError:
            expected = 0
    sentence = f"torch sees {torch.devices} of {len(gpus.devices)} GPUs"
    if visible is not None:
        sentence += f" (CUDA_VISIBLE_DEVICES={visible})"
    if torch.devices >= expected:
        return ok(sentence)
    return failed(f"{sentence}{'; ' + torch.problem if torch.problem else ''}")


def _architectures(facts: MachineFacts) -> list[Finding]:
    gpus, torch = facts.gpus, _torch(facts)
    if isinstance(gpus, UnknownFact) or not torch or not torch.architectures:
        return []
    found = []
    for device in gpus.devices:
        health = gpus.health.get(device.uuid)
        if health is not None and health.capability and not _runs(health.capability, torch.architectures):
            wanted = f"sm_{health.capability[0]}{health.capability[1]}"
            found += failed(
                f"{device.type} needs {wanted}, but torch {torch.version} has {', '.join(torch.architectures)}"
            )
    return found or ok(f"torch has code for these GPUs: {', '.join(torch.architectures)}")


def _visible_devices(facts: MachineFacts) -> list[Finding]:
    visible, gpus = facts.environ.get("CUDA_VISIBLE_DEVICES"), facts.gpus
    if visible is None or isinstance(gpus, UnknownFact) or not gpus.devices:
        return []
    try:
        left = restrict(gpus.devices, visible)
    except ServerlessGpuError as error:
        return failed(f"CUDA_VISIBLE_DEVICES={visible}: {error.message}", "unset CUDA_VISIBLE_DEVICES")
    sentence = f"CUDA_VISIBLE_DEVICES={visible} leaves {len(left)} of {len(gpus.devices)} GPUs"
    return ok(sentence) if left else warning(sentence, "unset CUDA_VISIBLE_DEVICES")


def _unusable(facts: MachineFacts) -> list[Finding]:
    gpus = facts.gpus
    if isinstance(gpus, UnknownFact):
        return []
    return [
        finding
        for entry in gpus.unavailable
        if entry.name != "NVML"
        for finding in warning(f"runs cannot use {entry.name}: {entry.reason}")
    ]


def _busy(facts: MachineFacts) -> list[Finding]:
    gpus = facts.gpus
    if isinstance(gpus, UnknownFact) or not gpus.devices:
        return []
    found: list[Finding] = []
    for device in gpus.devices:
        usage, run = gpus.usage.get(device.uuid), gpus.held.get(device.uuid)
        if usage is None or usage.problem:
            found += unknown(f"{device.uuid}: {usage.problem if usage else 'NVML reported no usage for this GPU'}")
        elif run is None and (by := foreign(usage)) is not None:
            pids = " ".join(str(process.pid) for process in usage.processes)
            mend = (
                f"if these processes are yours, end them: kill {pids}"
                if pids
                else "end the foreign process, which may run in another container"
            )
            found += warning(f"{device.uuid} ({device.type}): {by}", f"{mend}; or use the GPU with ignore_busy=True")
    held = f", {len(gpus.held)} held by runs" if gpus.held else ""
    return found or ok(f"no foreign process on {len(gpus.devices)} GPUs{held}")


def _quarantine(facts: MachineFacts) -> list[Finding]:
    gpus = facts.gpus
    if isinstance(gpus, UnknownFact):
        return []
    found = []
    for uuid, (reason, file) in gpus.quarantined.items():
        found += warning(f"runs cannot use {uuid}: {reason}", f"truncate -s 0 {file}   (when no process uses the GPU)")
    return found or (ok("no GPU") if gpus.devices else [])


def _health(facts: MachineFacts) -> list[Finding]:
    gpus = facts.gpus
    if isinstance(gpus, UnknownFact) or not gpus.devices:
        return []
    found = []
    for device in gpus.devices:
        health = gpus.health.get(device.uuid)
        if health is None:
            continue
        if health.uncorrected_errors:
            found += warning(f"{device.uuid} has had {health.uncorrected_errors} uncorrected memory errors since boot")
        if health.remap_failed:
            found += failed(f"{device.uuid} could not replace broken memory rows", "replace the card")
        elif health.remap_pending:
            found += warning(f"{device.uuid} will replace memory rows at its next reset")
    silent = all(health.uncorrected_errors is None for health in gpus.health.values())
    return found or (unknown("the GPUs do not report memory errors") if silent else ok("no errors"))


def _kernel_log(facts: MachineFacts) -> list[Finding]:
    gpus = facts.gpus
    if isinstance(gpus, UnknownFact) or not gpus.devices:
        return []
    if gpus.kernel_log:
        return unknown(f"the doctor cannot see failures of GPUs: {gpus.kernel_log}")
    return ok("the kernel log with the driver's GPU errors is readable")


def _suspects(facts: MachineFacts) -> list[Finding]:
    gpus = facts.gpus
    if isinstance(gpus, UnknownFact) or not gpus.devices:
        return []
    return [finding for said in gpus.suspects for finding in warning(said)] or ok("none")


def _fakes(facts: MachineFacts) -> list[Finding]:
    fakes, gpus = facts.environ.get(FAKE_VARIABLE), facts.gpus
    if not fakes:
        return []
    sentence = f"{FAKE_VARIABLE}={fakes}: runs use declared GPUs"
    if not isinstance(gpus, UnknownFact) and gpus.devices:
        return warning(f"{sentence} instead of the {len(gpus.devices)} real ones")
    return ok(sentence)


def _torch(facts: MachineFacts) -> TorchFacts | None:
    return facts.imports.torch if isinstance(facts.imports, ImportFacts) else None


def _runs(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return True if a torch build has code for a GPU's compute capability.

    Binary code requires a GPU of the same major version and the same or a newer minor version. The driver can also
    compile older PTX code for the GPU.
    """
    for name in architectures:
        kind, _, digits = name.partition("_")
        number = "".join(letter for letter in digits if letter.isdigit())
        if not number:
            continue
        built = (int(number[:-1] or 0), int(number[-1]))
        if (kind == "sm" and built[0] == capability[0] and built <= capability) or (
            kind == "compute" and built <= capability
        ):
            return True
    return False


def _numbers(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        if not (part.isascii() and part.isdigit()):
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(f"{number:02d}" if index == 2 else str(number) for index, number in enumerate(numbers))


CHECKS = (
    Check(
        code="driver",
        group=CheckGroup.GPUS,
        title="The NVIDIA driver",
        symptoms=("NoGpu: this machine has no usable GPU", "NVML: Driver/library version mismatch"),
        cause="The agent finds GPUs through NVML. NVML comes with the driver and must have the version of the "
        "loaded driver.",
        mend="reload the driver, or reboot after a driver update; in a container pass the GPUs in (--gpus all)",
        probe=_driver,
    ),
    Check(
        code="cuda-driver",
        group=CheckGroup.GPUS,
        title="Driver and CUDA version of torch",
        symptoms=(
            "RuntimeError: The NVIDIA driver on your system is too old (found version …)",
            "CUDA driver version is insufficient for CUDA runtime version",
        ),
        cause="A torch build for a CUDA major version needs a driver that supports that version.",
        mend="update the driver, or install a torch build for an older CUDA version",
        probe=_cuda_driver,
    ),
    Check(
        code="torch-cpu-only",
        group=CheckGroup.GPUS,
        title="A CPU build of torch on a machine with GPUs",
        symptoms=("AssertionError: Torch not compiled with CUDA enabled",),
        cause="The installed torch wheel contains no CUDA code (its version ends in +cpu).",
        mend="python -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
        probe=_torch_cpu_only,
    ),
    Check(
        code="torch-sees-fewer",
        group=CheckGroup.GPUS,
        title="torch sees fewer GPUs than the machine has",
        symptoms=("RuntimeError: CUDA error: invalid device ordinal", "torch.cuda.device_count() is too small"),
        cause="CUDA_VISIBLE_DEVICES omits some GPUs, torch counts MIG slices differently, or torch cannot open a GPU.",
        mend="unset CUDA_VISIBLE_DEVICES; compare `nvidia-smi -L` with `sgpu gpus`",
        probe=_torch_sees_fewer,
    ),
    Check(
        code="architectures",
        group=CheckGroup.GPUS,
        title="A GPU that torch has no code for",
        symptoms=("CUDA error: no kernel image is available for execution on the device",),
        cause="The installed torch contains no code for the generation of this GPU.",
        mend="install a torch build whose torch.cuda.get_arch_list() contains the GPU's generation",
        probe=_architectures,
    ),
    Check(
        code="visible-devices",
        group=CheckGroup.GPUS,
        title="CUDA_VISIBLE_DEVICES",
        symptoms=("NotEnoughGpus: …",),
        cause="A run uses only GPUs that the caller's CUDA_VISIBLE_DEVICES names.",
        mend="unset CUDA_VISIBLE_DEVICES, or add the GPUs to the variable",
        probe=_visible_devices,
    ),
    Check(
        code="gpu-unusable",
        group=CheckGroup.GPUS,
        title="A GPU that runs cannot use",
        symptoms=("not usable: … in `sgpu gpus`",),
        cause="The GPU is divided into MIG slices, this user may not open the GPU, or the GPU does not answer.",
        mend="run the command that the reason in `sgpu gpus` names",
        probe=_unusable,
    ),
    Check(
        code="gpu-busy",
        group=CheckGroup.GPUS,
        title="Foreign processes on a GPU",
        symptoms=("waiting for 1 H100: GPU-…: pid … (python) holds 40.0 GiB",),
        cause="Runs cannot use the GPU, because a process outside of serverless-gpu uses it.",
        mend="end the foreign process, or use the GPU anyway with ignore_busy=True",
        probe=_busy,
    ),
    Check(
        code="quarantine",
        group=CheckGroup.GPUS,
        title="GPUs in quarantine",
        symptoms=("quarantined: … in a receipt or in `sgpu gpus`",),
        cause="After a run, the supervisor could not prove that the GPU was free. The next run checks the GPU "
        "again and lifts the quarantine if the GPU is free. If the driver reported a failure (Xid …), the "
        "quarantine lasts until a reboot or until an operator clears it.",
        mend="end the processes that use the GPU; after a failure, reset the GPU (`nvidia-smi --gpu-reset -i …`) "
        "and empty the quarantine note",
        probe=_quarantine,
    ),
    Check(
        code="gpu-health",
        group=CheckGroup.GPUS,
        title="Memory errors of a GPU",
        symptoms=("CUDA error: uncorrectable ECC error encountered", "Xid 48, 63, 64 or 79 in `dmesg`"),
        cause="The GPU's memory fails, or the GPU has lost its PCI connection.",
        mend="nvidia-smi -q -d ECC,ROW_REMAPPER; reset the idle GPU, and replace it if the errors return",
        probe=_health,
    ),
    Check(
        code="kernel-log",
        group=CheckGroup.GPUS,
        title="Access to the kernel log",
        symptoms=("a run whose GPU failed ends as rank_raised or rank_signal instead of gpu_lost",),
        cause="The driver reports failing GPUs (Xid) in the kernel log, which often only root may read.",
        mend="as root: sysctl kernel.dmesg_restrict=0; or give the node's processes CAP_SYSLOG",
        probe=_kernel_log,
    ),
    Check(
        code="gpu-suspect",
        group=CheckGroup.GPUS,
        title="A GPU on which several users' code fails",
        symptoms=("illegal memory accesses in runs of 4 principals within 24 h: suspect hardware",),
        cause="User code usually causes illegal memory accesses (Xid 13, 31, 43). If the code of several users "
        "fails on one GPU, the hardware may be the cause.",
        mend="take the GPU out of use (`sgpu node quarantine NODE GPU`) and test it: dcgmi diag -r 3",
        probe=_suspects,
    ),
    Check(
        code="fake-gpus",
        group=CheckGroup.GPUS,
        title="Declared GPUs",
        symptoms=("torch.cuda.is_available() is False in a run on `H100 (fake)`",),
        cause="SERVERLESS_GPU_FAKE declares simulated GPUs, which do not support CUDA.",
        mend="unset SERVERLESS_GPU_FAKE",
        probe=_fakes,
    ),
)
