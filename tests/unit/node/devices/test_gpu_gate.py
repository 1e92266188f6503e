"""The gate: what a verdict says, and that nothing unknown ever passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.devices.gpu_gate import GatePolicy, Verdict, foreign, judge, verify
from serverless_gpu.node.devices.inventory import Provider
from serverless_gpu.node.devices.nvml import IDLE_MEMORY_BYTES, MIB, GpuProcess, Usage
from tests.support.golden import golden

GIB = 1024 * MIB
IDLE = Usage(processes=(), memory_used_bytes=3 * MIB, pids_visible=True)
LEFTOVER = GpuProcess(pid=4242, memory_bytes=2 * GIB, name="python")
DISPLAY = GpuProcess(pid=900, memory_bytes=200 * MIB, name="Xorg", graphics=True)

GATE_CASES = {
    "clean": (IDLE, IDLE, True, "no process, 3 MiB used (baseline 3 MiB)"),
    "within tolerance": (IDLE, Usage((), 67 * MIB, True), True, "no process, 67 MiB used (baseline 3 MiB)"),
    "beyond tolerance": (IDLE, Usage((), 67 * MIB + 1, True), False, "no process, but 67 MiB used (baseline 3 MiB)"),
    "process": (IDLE, Usage((LEFTOVER,), 2 * GIB, True), False, "pid 4242 (python) still holds 2.0 GiB"),
    "process that frees": (IDLE, Usage((GpuProcess(7, 0),), 3 * MIB, True), False, "pid 7 still holds 0 MiB"),
    "process of unknown size": (
        IDLE,
        Usage((GpuProcess(7, None, "a"),), 3 * MIB, True),
        False,
        "pid 7 (a) still holds an unknown amount",
    ),
    "many processes": (
        IDLE,
        Usage(tuple(GpuProcess(pid, MIB) for pid in range(1, 6)), 9 * MIB, True),
        False,
        "pid 1 still holds 1 MiB, pid 2 still holds 1 MiB, pid 3 still holds 1 MiB, and 2 more",
    ),
    "hidden, clean": (
        IDLE,
        Usage((), 3 * MIB, False),
        True,
        "memory only: 3 MiB used (baseline 3 MiB), processes are not visible here",
    ),
    "hidden, held": (
        IDLE,
        Usage((), 2 * GIB, False),
        False,
        "memory only: 2.0 GiB used (baseline 3 MiB), processes are not visible here",
    ),
    "no baseline, idle": (
        None,
        IDLE,
        True,
        "no process, 3 MiB used (baseline unknown, idle is at most 256 MiB)",
    ),
    "no baseline, held": (
        None,
        Usage((), 300 * MIB, True),
        False,
        "no process, but 300 MiB used (baseline unknown, idle is at most 256 MiB)",
    ),
    "baseline not read": (
        Usage((), None, False, "NVML: x"),
        IDLE,
        True,
        "no process, 3 MiB used (baseline unknown, idle is at most 256 MiB)",
    ),
    "unknown": (IDLE, Usage((), 3 * MIB, True, "NVML: GPU is lost"), False, "NVML: GPU is lost"),
    "memory unknown": (IDLE, Usage((), None, True), False, "could not read the GPU memory in use"),
    "there before": (
        Usage((LEFTOVER,), 2 * GIB, True),
        Usage((LEFTOVER,), 2 * GIB, True),
        True,
        "no process except pid 4242 (python), 2.0 GiB used (baseline 2.0 GiB)",
    ),
    "same pid, another program": (
        Usage((GpuProcess(4242, 2 * GIB, "bash"),), 2 * GIB, True),
        Usage((LEFTOVER,), 2 * GIB, True),
        False,
        "pid 4242 (python) still holds 2.0 GiB",
    ),
    "there before, ended, memory stays": (
        Usage((DISPLAY,), 203 * MIB, True),
        Usage((), 203 * MIB, True),
        False,
        "no process, but 203 MiB used (baseline 203 MiB)",
    ),
    "display started and grew": (
        Usage((DISPLAY,), 203 * MIB, True),
        Usage((GpuProcess(900, 500 * MIB, "Xorg", True), GpuProcess(901, 300 * MIB, "firefox", True)), 803 * MIB, True),
        True,
        "no process except pid 900 (Xorg), pid 901 (firefox), 803 MiB used (baseline 203 MiB)",
    ),
    "renderer left behind": (
        IDLE,
        Usage((GpuProcess(5, 2 * GIB, "render", True),), 2 * GIB, True),
        False,
        "pid 5 (render) still holds 2.0 GiB",
    ),
}


@pytest.mark.parametrize("case", GATE_CASES)
@pytest.mark.parametrize("kind", [DeviceKind.GPU, DeviceKind.FAKE])
def test_F11_gate_states_its_evidence(case: str, kind: DeviceKind) -> None:
    before, after, ok, evidence = GATE_CASES[case]
    assert judge(before, after, kind=kind) == Verdict(ok, evidence)


def test_gate_has_nothing_to_verify_on_a_cpu_slot() -> None:
    assert judge(None, Usage((LEFTOVER,), None, False, "x"), kind=DeviceKind.CPU) == Verdict(
        True, "CPU slot: nothing to verify"
    )


PROCESSES = st.builds(
    GpuProcess,
    pid=st.integers(1, 6),
    memory_bytes=st.none() | st.integers(0, 4 * GIB),
    name=st.sampled_from(["", "python"]),
    graphics=st.booleans(),
)
USAGES = st.builds(
    Usage,
    processes=st.lists(PROCESSES, max_size=4, unique_by=lambda process: process.pid).map(tuple),
    memory_used_bytes=st.none() | st.integers(0, 80 * GIB),
    pids_visible=st.booleans(),
    problem=st.sampled_from(["", "NVML: GPU is lost"]),
)


@given(before=st.none() | USAGES, after=USAGES)
def test_what_is_not_known_never_passes_the_gate(before: Usage | None, after: Usage) -> None:
    verdict = judge(before, after, kind=DeviceKind.GPU)
    known = {process.pid for process in before.processes} if before else set()

    assert verdict.evidence
    if after.problem or after.memory_used_bytes is None:
        assert not verdict.ok
    if any(not process.graphics and process.pid not in known for process in after.processes):
        assert not verdict.ok
    if not after.pids_visible and verdict.ok:
        assert verdict.evidence.startswith("memory only: ")


FOREIGN_CASES = {
    "free": (IDLE, None),
    "fresh large card": (Usage((), 8 * MIB, False), None),
    "at the idle level": (Usage((), IDLE_MEMORY_BYTES, False), None),
    "process": (Usage((LEFTOVER,), 2 * GIB, True), "pid 4242 (python) holds 2.0 GiB"),
    "process without memory": (Usage((GpuProcess(7, 0),), 3 * MIB, True), "pid 7 holds 0 MiB"),
    "memory only": (
        Usage((), 2 * GIB, False),
        "2.0 GiB used by processes that are not visible here (memory only)",
    ),
    "display": (Usage((DISPLAY, GpuProcess(901, 300 * MIB, "firefox", True)), 510 * MIB, True), None),
    "large renderer": (Usage((GpuProcess(5, 2 * GIB, "r", True),), 2 * GIB, True), "pid 5 (r) holds 2.0 GiB"),
    "unknown": (Usage((), None, False, "NVML did not answer in 5 s"), "NVML did not answer in 5 s"),
    "memory unknown": (Usage((), None, True), "could not read the GPU memory in use"),
}


@pytest.mark.parametrize("case", FOREIGN_CASES)
def test_foreign_names_who_uses_a_device(case: str) -> None:
    usage, sentence = FOREIGN_CASES[case]
    assert foreign(usage) == sentence


class Script:
    """A provider that answers with one prepared usage per question, the last one for ever."""

    kind = DeviceKind.GPU

    def __init__(self, **answers: list[Usage]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, ...]] = []

    def devices(self) -> tuple[()]:
        return ()

    def unavailable(self) -> tuple[()]:
        return ()

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        self.asked.append(tuple(uuids))
        return {uuid: left.pop(0) if len(left) > 1 else left[0] for uuid in uuids if (left := self.answers.get(uuid))}


def test_F11_gate_asks_again_only_about_what_is_not_clean_yet() -> None:
    held = Usage((LEFTOVER,), 2 * GIB, True)
    script = Script(a=[IDLE], b=[held, IDLE], c=[held])
    provider: Provider = script
    pauses: list[float] = []

    verdicts = verify(provider, ["a", "b", "c"], {"a": IDLE, "b": IDLE, "c": IDLE}, GatePolicy(), pauses.append)

    assert [verdicts[uuid].ok for uuid in "abc"] == [True, True, False]
    assert verdicts["c"].evidence == golden("node.gate.pid-4242-python")
    assert script.asked == [("a", "b", "c"), ("b", "c"), ("c",), ("c",), ("c",), ("c",)]
    assert pauses == [0.05, 0.2, 0.75, 4.0, 10.0]


def test_gate_does_not_pause_when_everything_is_clean() -> None:
    pauses: list[float] = []
    verdicts = verify(Script(a=[IDLE]), ["a"], {}, GatePolicy(), pauses.append)

    assert verdicts["a"].ok
    assert pauses == []


def test_device_that_the_provider_forgets_is_not_clean() -> None:
    verdicts = verify(Script(), ["a"], {"a": IDLE}, GatePolicy(pauses_s=()), lambda _: None)
    assert verdicts == {"a": Verdict(False, "the driver returned no usage for this device")}


def test_a_gate_without_patience_or_with_a_negative_pause() -> None:
    with pytest.raises(InvalidValue):
        GatePolicy(pauses_s=(1.0, -1.0))
