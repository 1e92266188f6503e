"""The doctor's judgement over facts written down by hand: what is fine, what is not, what is unknown."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from scripts import troubleshooting
from serverless_gpu.doctor.facts import (
    AgentFacts,
    Broken,
    CgroupFacts,
    Disk,
    Facts,
    GpuFacts,
    Health,
    HomeFacts,
    Imported,
    ImportFacts,
    InterpreterFacts,
    LimitFacts,
    NetworkFacts,
    RunsFacts,
    Shadow,
    TorchFacts,
)
from serverless_gpu.doctor.findings import Check, Finding, Group, Outcome
from serverless_gpu.doctor.report import as_builtins, has_failed, lines
from serverless_gpu.doctor.table import TABLE, judge
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.gpus import GpuProcess, Unavailable, Usage

GIB = 2**30
PYTHON = "/env/bin/python"
BY_CODE = {check.code: check for check in TABLE}
OK, WARNING, FAILED, UNKNOWN = Outcome.OK, Outcome.WARNING, Outcome.FAILED, Outcome.UNKNOWN

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
    health={device.uuid: Health(capability=(9, 0), uncorrected_errors=0) for device in DEVICES},
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


def found(code: str, facts: Facts) -> list[Finding]:
    """Return what one check says about these facts."""
    probe = BY_CODE[code].probe
    assert probe is not None
    return list(probe(facts))


def one(code: str, facts: Facts) -> tuple[Outcome, str, str]:
    """Return the one finding of a check."""
    (finding,) = found(code, replace(facts, python=PYTHON, cwd="/work"))
    return finding.outcome, finding.sentence, finding.mend


def test_what_nobody_looked_at_is_unknown_or_does_not_apply_and_never_fine() -> None:
    judged = judge(Facts())
    states = {finding.outcome for _, findings in judged for finding in findings}
    assert {check.code for check, findings in judged if findings[0].outcome is OK} <= {"pythonpath"}
    assert states <= {OK, UNKNOWN}
    assert not has_failed(judged)


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "home", "expected"),
    [
        ("home", HomeFacts(root="/h"), (OK, "/h, writable", "")),
        ("home", HomeFacts(problem="no space", hint="free some"), (FAILED, "no space", "free some")),
        ("home", HomeFacts(root="/t", note="/h cannot be written to"), (WARNING, "/h cannot be written to", "")),
        ("home-filesystem", HomeFacts(root="/h", filesystem="ext4"), (OK, "ext4", "")),
        (
            "home-filesystem",
            HomeFacts(root="/h", filesystem="nfs4"),
            (WARNING, "/h is on nfs4, a network file system", ""),
        ),
        ("home-filesystem", HomeFacts(root="/h"), (UNKNOWN, "the file system of /h is not known", "")),
        ("home-filesystem", HomeFacts(problem="x"), (UNKNOWN, "there is no home to look at", "")),
        ("disk-space", HomeFacts(root="/h", disks=(Disk("/h", 100 * GIB, 50 * GIB),)), (OK, "53.7 GB in /h free", "")),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 1000 * GIB, 4 * GIB),)),
            (WARNING, "/h has 4.3 GB free of 1.1 TB", ""),
        ),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 10 * GIB, 1000),)),
            (FAILED, "/h has 1.0 kB free of 10.7 GB", ""),
        ),
        ("disk-space", HomeFacts(root="/h"), (UNKNOWN, "no file system could be asked", "")),
        ("sockets", HomeFacts(root="/h", sockets="/s"), (OK, "/s", "")),
        ("sockets", HomeFacts(root="/h", sockets_problem="/s is a link"), (FAILED, "/s is a link", "")),
        ("configuration", HomeFacts(root="/h"), (OK, "config.toml is fine, or not there", "")),
        ("configuration", HomeFacts(root="/h", configuration_problem="bad"), (FAILED, "bad", "")),
    ],
)
def test_the_home(code: str, home: HomeFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one(code, Facts(home=home)) == expected


@pytest.mark.parametrize(
    ("code", "limits", "expected"),
    [
        (
            "shared-memory",
            LimitFacts(shared_memory=Disk("/dev/shm", 8 * GIB, 8 * GIB)),
            (OK, "/dev/shm has 8.6 GB free", ""),
        ),
        (
            "shared-memory",
            LimitFacts(shared_memory=Disk("/dev/shm", 64 << 20, 64 << 20)),
            (WARNING, "/dev/shm has 67.1 MB free", ""),
        ),
        ("shared-memory", LimitFacts(), (FAILED, "/dev/shm does not exist", "")),
        ("limits", LimitFacts(descriptors=4096, processes=None), (OK, "4096 open files, any number of processes", "")),
        (
            "limits",
            LimitFacts(descriptors=256, descriptors_hard=4096),
            (WARNING, "a process may open 256 files", "ulimit -n 4096"),
        ),
        (
            "limits",
            LimitFacts(processes=100),
            (WARNING, "this user may have 100 processes and threads", "ulimit -u 65536"),
        ),
        (
            "limits",
            LimitFacts(address_space_bytes=GIB),
            (WARNING, "the address space is limited to 1.1 GB", "ulimit -v unlimited"),
        ),
    ],
)
def test_limits(code: str, limits: LimitFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one(code, Facts(limits=limits)) == expected


@pytest.mark.parametrize(
    ("code", "network", "expected"),
    [
        ("ports", NetworkFacts(ports=28_000, sockets_used=12), (OK, "12 TCP sockets, 28000 ports to give out", "")),
        ("ports", NetworkFacts(ports=1000, sockets_used=900), (WARNING, "900 TCP sockets, 1000 ports to give out", "")),
        ("ports", NetworkFacts(), (UNKNOWN, "how many ports the kernel may give out is not known", "")),
        ("ports", NetworkFacts(port_problem="none"), (FAILED, "none", "")),
        (
            "ports",
            NetworkFacts(loopback_problem="down"),
            (FAILED, "127.0.0.1 cannot be used: down", "ip link set lo up"),
        ),
        ("hostname", NetworkFacts(hostname="box"), (OK, "box", "")),
        (
            "hostname",
            NetworkFacts(hostname="box", hostname_problem="no answer"),
            (
                WARNING,
                "box does not resolve: no answer",
                "echo 127.0.1.1 box | sudo tee -a /etc/hosts   (or: export GLOO_SOCKET_IFNAME=lo)",
            ),
        ),
    ],
)
def test_the_network(code: str, network: NetworkFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one(code, Facts(network=network)) == expected


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (
            RunsFacts(count=1, size_bytes=2000, days=30.0, size_bytes_max=20 * GIB),
            (OK, "1 run, 2.0 kB; kept 30 days, ended ones at most 20 GiB", ""),
        ),
        (RunsFacts(count=2, days=0.5), (OK, "2 runs, 0 B; kept 0.5 days", "")),
        (RunsFacts(), (WARNING, "0 runs, 0 B; kept for ever", "")),
    ],
)
def test_retention(runs: RunsFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one("retention", Facts(runs=runs)) == expected


# --- the agent -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (AgentFacts(), (OK, "none is running; the next run starts one", "")),
        (AgentFacts(pid=7, version="0.1", attempts=2, queued=1), (OK, "pid 7, version 0.1, 2 running, 1 queued", "")),
        (AgentFacts(problem="it does not answer", hint="kill -9 7"), (FAILED, "it does not answer", "kill -9 7")),
    ],
)
def test_the_agent(agent: AgentFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one("agent", Facts(agent=agent)) == expected


def test_agents_of_other_versions() -> None:
    agent = AgentFacts(others={"9": "0.0, protocol 1", "12": "0.2, protocol 2"})
    assert one("other-agents", Facts(agent=agent)) == (
        WARNING,
        "there are others beside that of this version: "
        "version 0.0, protocol 1 (pid 9), version 0.2, protocol 2 (pid 12)",
        "kill 9 12",
    )
    assert found("other-agents", Facts(agent=AgentFacts(pid=1))) == []


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (CgroupFacts(path="/c", controllers=("memory", "pids")), (OK, "v2, kill, limits: memory, pids", "")),
        (CgroupFacts(path="/c", controllers=("pids",)), (OK, "v2, kill, limits: pids, no memory controller", "")),
        (CgroupFacts(path="/c"), (OK, "v2, kill, limits: none, no memory controller", "")),
        (
            CgroupFacts(problem="no cgroup v2 directory is ours to write", controllers=("memory (v1)",)),
            (WARNING, "none: no cgroup v2 directory is ours to write; limits: memory (v1)", ""),
        ),
    ],
)
def test_cgroups(cgroups: CgroupFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one("cgroups", Facts(cgroups=cgroups)) == expected


@pytest.mark.parametrize(
    ("zygotes", "expected"),
    [
        ((), (OK, "none for this interpreter; its next run starts cold and leaves one", "")),
        ((f"pid 5 · {PYTHON} · ready",), (OK, f"pid 5 · {PYTHON} · ready", "")),
        (
            ("pid 5 · /other/python · ready", f"none · {PYTHON} · cold: it has 3 threads"),
            (WARNING, "runs of this interpreter start cold: it has 3 threads", ""),
        ),
    ],
)
def test_zygotes(zygotes: tuple[str, ...], expected: tuple[Outcome, str, str]) -> None:
    assert one("zygote", Facts(agent=AgentFacts(pid=1, zygotes=zygotes))) == expected


def test_how_the_last_run_started() -> None:
    cold = RunsFacts(last_run="01a", warm_reason="first run with this interpreter")
    assert one("last-start", Facts(runs=cold))[1] == "run 01a started cold: first run with this interpreter"
    assert one("last-start", Facts(runs=RunsFacts(last_run="01a", warm=True)))[1] == "run 01a started warm"
    assert one("last-start", Facts(runs=RunsFacts()))[1] == "no run yet"


# --- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (GPUS, (OK, "570.124.06, CUDA up to 12.8, 2 usable GPUs", "")),
        (GpuFacts(), (OK, "no NVIDIA GPU and no driver here; runs use CPU slots or declared GPUs", "")),
        (
            GpuFacts(on_bus=4),
            (
                FAILED,
                "4 NVIDIA GPUs are in this machine, and no driver answers",
                "install the driver; in a container: docker run --gpus all … (NVIDIA Container Toolkit)",
            ),
        ),
        (GpuFacts(unavailable=(Unavailable("NVML", "mismatch"),)), (FAILED, "mismatch", "")),
        (
            GpuFacts(binding_problem="no pynvml"),
            (
                FAILED,
                "GPUs cannot be looked for: no pynvml",
                f"{PYTHON} -m pip install --force-reinstall nvidia-ml-py",
            ),
        ),
    ],
)
def test_the_driver(gpus: GpuFacts, expected: tuple[Outcome, str, str]) -> None:
    assert one("driver", Facts(gpus=gpus)) == expected


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
def test_driver_against_cuda(driver: str, cuda: str, devices: int | None, outcome: Outcome) -> None:
    torch = TorchFacts(version="2.9.0", cuda=cuda, devices=devices)
    facts = Facts(gpus=replace(GPUS, driver=driver), imports=ImportFacts(torch=torch))
    assert one("cuda-driver", facts)[0] is outcome


def test_a_driver_that_is_too_old_is_told_with_what_it_takes() -> None:
    torch = TorchFacts(version="2.9.0", cuda="13.0", devices=0)
    assert one("cuda-driver", Facts(gpus=GPUS, imports=ImportFacts(torch=torch))) == (
        FAILED,
        "torch 2.9.0 is built for CUDA 13.0, the driver is 570.124.06, and CUDA 13 needs 580",
        f"install a driver of at least 580, or a torch for this one: {PYTHON} -m pip install --force-reinstall torch "
        "--index-url https://download.pytorch.org/whl/cu126",
    )


def test_a_cpu_build_on_a_machine_with_gpus() -> None:
    torch = TorchFacts(version="2.9.0+cpu")
    assert one("torch-cpu-only", Facts(gpus=GPUS, imports=ImportFacts(torch=torch))) == (
        FAILED,
        "torch 2.9.0+cpu is a CPU build, and this machine has 2 GPUs",
        f"{PYTHON} -m pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126",
    )
    assert found("torch-cpu-only", Facts(gpus=GpuFacts(), imports=ImportFacts(torch=torch))) == []
    assert one("torch-cpu-only", Facts(gpus=GPUS, imports=IMPORTS))[0] is OK


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
def test_torch_sees_fewer(sees: int, visible: str | None, outcome: Outcome, sentence: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    imports = ImportFacts(torch=replace(TORCH, devices=sees))
    assert one("torch-sees-fewer", Facts(environ=environ, gpus=GPUS, imports=imports))[:2] == (outcome, sentence)


def test_a_torch_that_hangs_when_it_is_asked_is_unknown() -> None:
    imports = ImportFacts(torch=replace(TORCH, devices=None, problem="it took too long"))
    assert one("torch-sees-fewer", Facts(gpus=GPUS, imports=imports)) == (
        UNKNOWN,
        "torch could not be asked how many GPUs it sees: it took too long",
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
    capability: tuple[int, int], architectures: tuple[str, ...], outcome: Outcome
) -> None:
    gpus = replace(GPUS, devices=DEVICES[:1], health={"GPU-0": Health(capability=capability)})
    imports = ImportFacts(torch=replace(TORCH, architectures=architectures))
    assert one("architectures", Facts(gpus=gpus, imports=imports))[0] is outcome


def test_visible_devices() -> None:
    def look(value: str) -> tuple[Outcome, str, str]:
        return one("visible-devices", Facts(environ={"CUDA_VISIBLE_DEVICES": value}, gpus=GPUS))

    assert look("0") == (OK, "CUDA_VISIBLE_DEVICES=0 leaves 1 of 2 GPUs", "")
    assert look("") == (WARNING, "CUDA_VISIBLE_DEVICES= leaves 0 of 2 GPUs", "unset CUDA_VISIBLE_DEVICES")
    assert found("visible-devices", Facts(gpus=GPUS)) == []


def test_foreign_processes_are_named_those_of_runs_are_not() -> None:
    used = Usage(processes=(GpuProcess(41, 40 * GIB, "python"),), memory_used_bytes=40 * GIB, pids_visible=True)
    gpus = replace(GPUS, usage={"GPU-0": used, "GPU-1": used}, held={"GPU-1": "01abc"})
    assert one("gpu-busy", Facts(gpus=gpus)) == (
        WARNING,
        "GPU-0 (H100): pid 41 (python) holds 40.0 GiB",
        "end it if it is yours: kill 41; or take it: ignore_busy=True",
    )
    assert one("gpu-busy", Facts(gpus=GPUS))[:2] == (OK, "no foreign process on 2 GPUs")


def test_processes_that_are_not_visible() -> None:
    used = Usage(processes=(), memory_used_bytes=9 * GIB, pids_visible=False)
    gpus = replace(GPUS, devices=DEVICES[:1], usage={"GPU-0": used})
    assert one("gpu-busy", Facts(gpus=gpus)) == (
        WARNING,
        "GPU-0 (H100): 9.0 GiB used by processes that are not visible from here (memory only)",
        "end it where it runs (another container?); or take it: ignore_busy=True",
    )


def test_usage_that_nvml_cannot_tell_is_unknown() -> None:
    usage = {"GPU-0": Usage(processes=(), memory_used_bytes=None, pids_visible=False, problem="NVML: lost")}
    assert found("gpu-busy", Facts(gpus=replace(GPUS, usage=usage))) == [
        Finding(UNKNOWN, "GPU-0: NVML: lost"),
        Finding(UNKNOWN, "GPU-1: NVML said nothing about it"),
    ]


def test_quarantine_with_how_to_lift_it() -> None:
    gpus = replace(GPUS, quarantined={"GPU-1": ("after run 01a: pid 4 still holds 1 GiB", "/l/GPU-1.quarantine")})
    assert one("quarantine", Facts(gpus=gpus)) == (
        WARNING,
        "GPU-1 is not lent: after run 01a: pid 4 still holds 1 GiB",
        "truncate -s 0 /l/GPU-1.quarantine   (once nothing uses it)",
    )


def test_cards_that_are_not_lent() -> None:
    gpus = replace(GPUS, unavailable=(Unavailable("GPU-3", "MIG mode is on"),))
    assert one("gpu-unusable", Facts(gpus=gpus)) == (WARNING, "GPU-3 is not lent: MIG mode is on", "")


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        (Health(uncorrected_errors=0), (OK, "no errors", "")),
        (Health(), (UNKNOWN, "the cards do not say whether they had memory errors", "")),
        (
            Health(uncorrected_errors=3),
            (WARNING, "GPU-0 has had 3 uncorrected memory errors since boot", ""),
        ),
        (
            Health(uncorrected_errors=0, remap_pending=True, remap_failed=False),
            (WARNING, "GPU-0 will replace memory rows at its next reset", ""),
        ),
        (
            Health(uncorrected_errors=0, remap_pending=True, remap_failed=True),
            (FAILED, "GPU-0 could not replace broken memory rows", "have the card replaced"),
        ),
    ],
)
def test_health(health: Health, expected: tuple[Outcome, str, str]) -> None:
    gpus = replace(GPUS, devices=DEVICES[:1], health={"GPU-0": health})
    assert one("gpu-health", Facts(gpus=gpus)) == expected


def test_declared_gpus() -> None:
    fakes = {"SERVERLESS_GPU_FAKE": "H100:8"}
    assert one("fake-gpus", Facts(environ=fakes, gpus=GpuFacts()))[0] is OK
    assert one("fake-gpus", Facts(environ=fakes, gpus=GPUS))[:2] == (
        WARNING,
        "SERVERLESS_GPU_FAKE=H100:8: declared GPUs are used instead of the 2 real ones",
    )
    assert found("fake-gpus", Facts(gpus=GPUS)) == []


# --- the environment -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "outcome", "ending"),
    [
        ({}, OK, "virtual environment"),
        ({"VIRTUAL_ENV": "/env"}, OK, "virtual environment"),
        ({"CONDA_PREFIX": "/usr"}, OK, "virtual environment"),
        ({"VIRTUAL_ENV": "/other"}, WARNING, "but the active environment is /other (VIRTUAL_ENV)"),
        ({"PYTHONHOME": "/x"}, WARNING, "PYTHONHOME=/x"),
    ],
)
def test_the_interpreter(environ: dict[str, str], outcome: Outcome, ending: str) -> None:
    got, sentence, _ = one("interpreter", Facts(environ=environ, interpreter=INTERPRETER))
    assert got is outcome
    assert sentence.startswith(f"Python 3.11.7, {PYTHON}, ") and sentence.endswith(ending)


NUMPY_ABI = (
    "ValueError: numpy.dtype size changed, may indicate binary incompatibility. "
    "Expected 96 from C header, got 88 from PyObject"
)
NMS = "RuntimeError: operator torchvision::nms does not exist"
CUDNN = "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory"
GLIBCXX = "ImportError: /usr/lib/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by x.so)"
NUMPY_1 = "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.0.2 as it may crash.\n"
PIP = f"{PYTHON} -m pip install"


@pytest.mark.parametrize(
    ("module", "error", "code", "mend"),
    [
        ("pandas", NUMPY_ABI, "numpy-abi", f"{PIP} --upgrade --force-reinstall numpy pandas"),
        (
            "torchvision",
            NMS,
            "torchvision",
            f"{PIP} --upgrade --force-reinstall torch torchvision   (both, from the same index)",
        ),
        ("torch", CUDNN, "cuda-libraries", f"{PIP} --force-reinstall torch"),
        (
            "sklearn",
            GLIBCXX,
            "libstdcxx",
            f"{PIP} --force-reinstall scikit-learn   "
            "(or unset LD_LIBRARY_PATH; with conda: conda install -c conda-forge libstdcxx-ng)",
        ),
        ("numba", "ImportError: undefined symbol: x", "imports", f"{PIP} --force-reinstall numba"),
    ],
)
def test_an_import_that_fails_belongs_to_one_check(module: str, error: str, code: str, mend: str) -> None:
    imports = ImportFacts(modules={"torch": FINE, module: Imported(outcome="raised", error=error)})
    facts = Facts(imports=imports, interpreter=INTERPRETER)
    assert one(code, facts) == (FAILED, f"import {module}: {error}", mend)
    others = {"numpy-abi", "torchvision", "cuda-libraries", "libstdcxx", "imports"} - {code}
    assert [finding for other in others for finding in found(other, facts) if finding.outcome is FAILED] == []


def test_numpy_1_is_only_written_and_still_told() -> None:
    imports = ImportFacts(modules={"numpy": FINE, "cv2": Imported(outcome="ok", written=NUMPY_1)})
    assert one("numpy-abi", Facts(imports=imports)) == (
        WARNING,
        "import cv2 complains: A module that was compiled using NumPy 1.x cannot be run in",
        f"{PIP} --upgrade --force-reinstall numpy opencv-python   "
        f"(or, while there is no newer one: {PYTHON} -m pip install 'numpy<2')",
    )


def test_a_crash_a_hang_and_what_was_not_tried() -> None:
    modules = {
        "numpy": Imported(outcome="crashed", error="the process was ended by SIGSEGV", written="a\ncannot load it\n"),
        "scipy": Imported(outcome="hung", error="it took too long"),
        "pandas": Imported(outcome="untried", error="no time was left of 8 s"),
        "cv2": Imported(outcome="untried", error="no time was left of 8 s"),
        "numba": Imported(outcome="absent"),
    }
    findings = found("imports", Facts(imports=ImportFacts(modules=modules), interpreter=INTERPRETER))
    assert [(finding.outcome, finding.sentence) for finding in findings] == [
        (FAILED, "import numpy: the process was ended by SIGSEGV; it wrote: cannot load it"),
        (UNKNOWN, "import scipy did not end: it took too long"),
        (UNKNOWN, "not tried: pandas, cv2 (no time was left of 8 s)"),
    ]
    assert findings[2].mend == "sgpu doctor --limit 60"


def test_what_is_installed_is_told() -> None:
    assert one("imports", Facts(imports=IMPORTS, interpreter=INTERPRETER))[:2] == (OK, "torch 2.9.0, numpy 2.4.6")
    absent = ImportFacts(modules={"torch": Imported(outcome="absent")})
    assert one("imports", Facts(imports=absent))[:2] == (OK, "none of the usual packages is installed")
    assert found("cuda-libraries", Facts(imports=absent)) == []
    assert found("torchvision", Facts(imports=absent)) == []


def test_a_working_directory_that_is_gone() -> None:
    finding = found("shadowed-modules", Facts(interpreter=INTERPRETER))[0]
    assert (finding.outcome, finding.mend) == (WARNING, "cd")


def test_requirements() -> None:
    broken = (
        Broken(package="torchvision", version="0.20", requirement="torch==2.5.0", found="2.9.0"),
        Broken(package="peft", version="0.21", requirement="accelerate>=1"),
    )
    findings = found("requirements", Facts(python=PYTHON, interpreter=replace(INTERPRETER, broken=broken)))
    assert [(finding.sentence, finding.mend) for finding in findings] == [
        ("torchvision 0.20 requires torch==2.5.0, and 2.9.0 is installed", f"{PIP} 'torch==2.5.0'"),
        ("peft 0.21 requires accelerate>=1, and it is not installed", f"{PIP} 'accelerate>=1'"),
    ]
    unclear = replace(INTERPRETER, broken_problem="neither packaging nor pip")
    assert one("requirements", Facts(interpreter=unclear)) == (
        UNKNOWN,
        "neither packaging nor pip",
        f"{PYTHON} -m pip check",
    )


@pytest.mark.parametrize(
    ("shadow", "outcome", "sentence"),
    [
        (
            Shadow(name="random", file="/work/random.py", other="random", is_stdlib=True),
            WARNING,
            "/work/random.py hides the standard library's random",
        ),
        (
            Shadow(name="torch", file="/work/torch.py", other="/s/torch/__init__.py"),
            FAILED,
            "/work/torch.py hides /s/torch/__init__.py",
        ),
        (Shadow(name="utils", file="/work/utils.py", other="/s/utils.py"), WARNING, "/work/utils.py hides /s/utils.py"),
    ],
)
def test_files_that_hide_modules(shadow: Shadow, outcome: Outcome, sentence: str) -> None:
    expected = (outcome, sentence, f"give {shadow.file} another name")
    assert one("shadowed-modules", Facts(interpreter=replace(INTERPRETER, shadows=(shadow,)))) == expected


@pytest.mark.parametrize(
    ("libraries", "outcome"),
    [
        ((), OK),
        (("/t/libgomp-1.so", "/s/libgomp-2.so"), OK),
        (("/t/libgomp-1.so", "/m/libiomp5.so"), WARNING),
        (("/t/libomp.so", "/m/libiomp5.so"), WARNING),
        (("/m/libiomp5.so",), OK),
    ],
)
def test_openmp_runtimes(libraries: tuple[str, ...], outcome: Outcome) -> None:
    assert one("openmp", Facts(imports=ImportFacts(openmp=libraries)))[0] is outcome


@pytest.mark.parametrize(
    ("value", "outcome"),
    [
        ("", OK),
        ("/my/project", OK),
        ("/my/project:/usr/lib/python3/dist-packages", WARNING),
        ("/usr/lib/python3.9/site-packages", FAILED),
        ("/usr/lib/python3.11/site-packages", WARNING),
    ],
)
def test_pythonpath(value: str, outcome: Outcome) -> None:
    assert one("pythonpath", Facts(environ={"PYTHONPATH": value}, interpreter=INTERPRETER))[0] is outcome


def test_downloads_from_the_hub() -> None:
    facts = Facts(environ={"HF_HUB_ENABLE_HF_TRANSFER": "1"}, interpreter=INTERPRETER)
    assert one("hf-transfer", facts) == (
        FAILED,
        "HF_HUB_ENABLE_HF_TRANSFER=1, and the package hf_transfer is not installed",
        f"{PIP} hf_transfer   (or: export HF_HUB_ENABLE_HF_TRANSFER=0)",
    )
    there = replace(INTERPRETER, packages={"hf-transfer": "0.1"})
    assert one("hf-transfer", replace(facts, interpreter=there))[0] is OK
    assert found("hf-transfer", Facts(interpreter=INTERPRETER)) == []


# --- the table, the report, the page ---------------------------------------------------------------------------------


def test_the_table_is_complete_and_its_names_are_stable_ones() -> None:
    assert len(BY_CODE) == len(TABLE)
    for check in TABLE:
        assert check.code == check.code.lower() and check.code.replace("-", "").isalnum()
        assert check.symptoms and all(check.symptoms) and check.title and check.cause and check.mend
        assert (check.probe is None) == (check.group is Group.RUNS)


def test_the_page_on_troubleshooting_is_what_the_table_says() -> None:
    assert troubleshooting.PAGE.read_text(encoding="utf-8") == troubleshooting.page(), "run `make docs`"


def test_every_check_is_on_the_page() -> None:
    page = troubleshooting.page()
    assert [code for code in BY_CODE if f'<a id="{code}"></a>' not in page] == []


REPORT = [
    (BY_CODE["home"], [Finding(OK, "/h, writable")]),
    (BY_CODE["shared-memory"], [Finding(WARNING, "/dev/shm has 64 MB")]),
    (BY_CODE["agent"], [Finding(FAILED, "two\n lines", "sgpu stop"), Finding(UNKNOWN, "not seen\x1b[31m")]),
]


def test_the_report() -> None:
    assert list(lines(REPORT, lambda word, outcome: word)) == [
        "machine",
        "  ok       home              /h, writable",
        "  warning  shared-memory     /dev/shm has 64 MB",
        f"           cause: {BY_CODE['shared-memory'].cause}",
        f"           mend:  {BY_CODE['shared-memory'].mend}",
        "",
        "agent",
        "  failed   agent             two; lines",
        f"           cause: {BY_CODE['agent'].cause}",
        "           mend:  sgpu stop",
        "  unknown  agent             not seen?[31m",
        "",
        "1 failed, 1 warning, 1 unknown, 1 ok",
    ]


def test_a_report_without_trouble() -> None:
    assert list(lines(REPORT[:1], lambda word, outcome: word))[-1] == "all 1 checks are ok"


def test_the_report_for_machines() -> None:
    report = as_builtins(REPORT, PYTHON)
    assert sorted(report) == ["checks", "failed", "python", "version"]
    assert report["failed"] is True
    assert json.loads(json.dumps(report))["checks"][2]["findings"] == [
        {"outcome": "failed", "sentence": "two\n lines", "mend": "sgpu stop"},
        {"outcome": "unknown", "sentence": "not seen\x1b[31m", "mend": ""},
    ]


def test_codes_fit_their_column() -> None:
    longest: Check = max(TABLE, key=lambda check: len(check.code) if check.probe else 0)
    assert len(longest.code) <= 16
