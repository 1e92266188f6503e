"""What a node makes of what the kernel's log says of its GPUs: F23 to F25, without processes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.hardware import Device, DeviceKind, parse_fake
from serverless_gpu.model.lifecycle.attempt import Attempt, GpuFailed, Limits, Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.model.xid import UserFault, XidKind
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.protocol import Context, Launch
from serverless_gpu.node.devices import kernel_log
from serverless_gpu.node.devices.gpu_gate import Verdict
from serverless_gpu.node.devices.inventory import FakeProvider
from serverless_gpu.node.devices.kernel_log import KernelLog
from serverless_gpu.node.devices.locks import DeviceLocks
from serverless_gpu.node.devices.reservation import quarantine, retest_quarantined
from serverless_gpu.node.supervisor import gpu_faults
from serverless_gpu.node.supervisor.gpu_faults import AttemptFaults, NodeFaults, note_hit, read_hits
from serverless_gpu.testing import FakeClock, FakeGpus
from tests.support.golden import golden

GPUS = parse_fake("H100:2")
FIRST, SECOND = (device.uuid for device in GPUS)
RUNNING = Attempt(run_id="r", fence=1, world_size=1, limits=Limits(), state=State.RUNNING)


class OtherBoot(FakeClock):
    """A clock after a restart of the machine."""

    def boot_id(self) -> str:
        return "11111111-1111-1111-1111-111111111111"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:2")
    return FakeGpus(tmp_path)


def launch_in(directory: Path, candidates: tuple[Device, ...]) -> Launch:
    return Launch(
        run_id="r",
        fence=1,
        directory=str(directory),
        spec=RunSpec(),
        candidates=candidates,
        world_size=1,
        context=Context(python="/usr/bin/python", flags=(), environ={}, cwd="/", umask=0, argv=("",), sys_path=()),
        called_ns=7,
    )


# --- the log --------------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / kernel_log.FAKE_FILE
    path.write_text("4,1,1000,-;before\n")
    log, whole = KernelLog(path, FakeClock()), KernelLog(path, FakeClock(), past=True)
    with path.open("a") as file:
        file.write("4,2,2000,-;NVRM: one\n SUBSYSTEM=pci\n4,3,3000,-;NVRM: t")
    assert [line.text for line in log.lines()] == ["NVRM: one"]
    assert [line.text for line in whole.lines()] == ["before", "NVRM: one"]
    with path.open("a") as file:
        file.write("wo\n")
    assert [line.text for line in log.lines()] == ["NVRM: two"]
    assert log.lines() == []
    log.close()
    whole.close()


@pytest.mark.parametrize(
    ("prefix", "is_kernels"),
    [
        ("0", True),
        ("3", True),
        ("7", True),
        ("8", False),
        ("12", False),  # what `echo NVRM: … > /dev/kmsg` becomes: facility user, level warning
        ("14", False),
        ("2047", False),
        ("-4", False),
        ("4 ", False),
        ("", False),
    ],
)
def test_22A10_a_record_that_a_process_wrote_is_not_the_kernels(
    tmp_path: Path, gpus: FakeGpus, prefix: str, is_kernels: bool
) -> None:
    path = tmp_path / kernel_log.FAKE_FILE
    path.write_text(f"{prefix},900,1000000,-;NVRM: Xid (PCI:{GPUS[0].pci}): 79, pid=1, fallen off the bus\n")
    log = KernelLog(path, FakeClock(), past=True)
    faults = list(gpu_faults.faults_of(log.lines(), GPUS, Home(tmp_path)))
    assert [fault.uuid for _, fault in faults] == [GPUS[0].uuid] * is_kernels
    log.close()


def test_22A10_what_is_written_to_dev_kmsg_is_no_fault(tmp_path: Path) -> None:
    log = KernelLog(kernel_log.KERNEL, FakeClock())
    if log.problem or not os.access(kernel_log.KERNEL, os.W_OK):
        pytest.skip(f"{kernel_log.KERNEL} cannot be written here")
    kernel_log.KERNEL.write_text("<3>NVRM: Xid (PCI:ffff:1f:1f): 79, a test of serverless-gpu wrote this\n")
    assert not [line for line in log.lines() if golden("node.node_faults.test-serverless-gpu") in line.text]
    log.close()


def test_a_file_that_is_made_later_is_new_as_a_whole(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / kernel_log.FAKE_FILE, FakeClock())
    assert (log.lines(), log.problem, log.fd) == ([], "", None)
    (tmp_path / kernel_log.FAKE_FILE).write_text("4,1,1000,-;first\n")
    assert [line.text for line in log.lines()] == ["first"]
    log.close()


def test_a_log_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "kmsg"
    monkeypatch.setattr(kernel_log, "KERNEL", closed)
    log = KernelLog(closed, FakeClock())
    assert (log.problem, log.lines(), log.fd) == (
        golden("node.node_faults.such-file-directory", closed=closed),
        [],
        None,
    )
    (tmp_path / "loop").symlink_to("loop")
    assert golden("node.node_faults.cannot-read-too") in KernelLog(tmp_path / "loop", FakeClock()).problem


# --- an attempt -----------------------------------------------------------------------------------------------------


def faults_of(tmp_path: Path, clock: FakeClock) -> tuple[AttemptFaults, list[str]]:
    notes: list[str] = []
    return AttemptFaults(launch_in(tmp_path, GPUS), Home(tmp_path), clock, notes), notes


def test_F23_a_fault_is_told_once_and_only_of_the_attempts_own(tmp_path: Path, gpus: FakeGpus) -> None:
    faults, notes = faults_of(tmp_path, FakeClock())
    for number in (79, 79, 45):
        gpus.xid(FIRST, number)
    gpus.xid(SECOND, 79)
    told = faults.hear(RUNNING, GPUS[:1])
    assert told == [GpuFailed(f"{FIRST}: Xid 79, the GPU has fallen off the bus")]
    assert notes == [told[0].detail]
    assert faults.verdicts(GPUS) == {FIRST: Verdict(False, "Xid 79, the GPU has fallen off the bus")}
    assert faults.hear(RUNNING, GPUS[:1]) == []
    faults.close()


def test_F25_a_hit_is_noted_with_its_principal_unless_ranks_are_ended_for_something_else(
    tmp_path: Path, gpus: FakeGpus
) -> None:
    faults, notes = faults_of(tmp_path, FakeClock())
    gpus.xid(FIRST, 43)
    cancelled = msgspec.structs.replace(RUNNING, state=State.STOPPING, reason=Reason.CANCELLED)
    assert faults.hear(cancelled, GPUS) == [] and faults.hint == "" and notes == []
    gpus.xid(SECOND, 31)
    assert faults.hear(RUNNING, GPUS) == []
    assert faults.hint == golden("node.node_faults.xid-31-gpu", SECOND=SECOND)
    assert list(read_hits(tmp_path / "locks", [FIRST, SECOND])) == [SECOND]
    assert DeviceLocks(tmp_path / "locks").quarantined() == {}
    faults.close()


# --- the node -------------------------------------------------------------------------------------------------------


def noted(home: Path) -> dict[str, str]:
    return {uuid: note.fault for uuid, note in DeviceLocks(home / "locks").quarantined().items()}


def test_F24_what_fails_while_nobody_has_it_is_not_lent(tmp_path: Path, gpus: FakeGpus) -> None:
    gpus.xid(FIRST, 95)  # before anybody looks
    NodeFaults(Home(tmp_path), FakeClock()).look(GPUS)
    assert noted(tmp_path) == {FIRST: XidKind.UNCORRECTABLE}


def test_a_gpu_that_fell_off_the_bus_is_known_by_what_it_was(tmp_path: Path, gpus: FakeGpus) -> None:
    node = NodeFaults(Home(tmp_path), FakeClock())
    node.look(GPUS)
    gpus.xid(SECOND, 79)
    node.look(GPUS[:1])
    assert noted(tmp_path) == {SECOND: XidKind.LOST}


def test_F23_a_look_does_not_lift_it_in_the_same_boot_and_a_restart_does(tmp_path: Path) -> None:
    provider = FakeProvider("H100:2", tmp_path / "fake_gpus.json")
    locks = DeviceLocks(tmp_path / "locks", clock=FakeClock())
    locks.quarantine(FIRST, "Xid 79", fault=XidKind.LOST)
    locks.quarantine(SECOND, "after run r: pid 1")
    assert list(retest_quarantined(locks, provider, [FIRST, SECOND])) == [FIRST]
    quarantine(locks, {FIRST: Verdict(False, "it does not answer")}, "r")
    assert locks.quarantined()[FIRST].reason == "Xid 79", "what the driver said stays"
    after = DeviceLocks(tmp_path / "locks", clock=OtherBoot())
    assert retest_quarantined(after, provider, [FIRST]) == {}


def test_what_somebody_lifted_is_not_noted_again_for_the_same_line(tmp_path: Path, gpus: FakeGpus) -> None:
    gpus.xid(FIRST, 48)
    clock = SystemClock()
    NodeFaults(Home(tmp_path), clock).look(GPUS)
    assert noted(tmp_path) == {FIRST: XidKind.UNCORRECTABLE}
    DeviceLocks(tmp_path / "locks").lift(FIRST)
    later_ns = clock.wall_ns() + 10**9  # a file's time is that of the last tick, which may be a moment ago
    os.utime(tmp_path / "locks" / f"{FIRST}.quarantine", ns=(later_ns, later_ns))
    NodeFaults(Home(tmp_path), clock).look(GPUS)  # after a restart of the agent, which reads the whole log
    assert noted(tmp_path) == {}


def test_F25_more_than_three_principals_make_a_finding(tmp_path: Path) -> None:
    clock = FakeClock()
    node = NodeFaults(Home(tmp_path), clock)
    node.look(GPUS)
    for name in ("ada", "bob", "cyd"):
        note_hit(tmp_path / "locks", FIRST, UserFault(principal=name, number=31, at_ns=clock.wall_ns()))
        note_hit(tmp_path / "locks", FIRST, UserFault(principal=name, number=13, at_ns=clock.wall_ns()))
    assert node.findings() == ()
    note_hit(tmp_path / "locks", FIRST, UserFault(principal="d\x1b[31m" * 100, number=31, at_ns=clock.wall_ns()))
    (said,) = node.findings()
    assert said == golden("node.node_faults.illegal-memory-accesses", FIRST=FIRST)
    clock.advance(25 * 3600)
    assert node.findings() == ()


def test_of_many_principals_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(40):
        note_hit(tmp_path, FIRST, UserFault(principal=f"p{number}" + "x" * 200, number=31, at_ns=number))
    kept = read_hits(tmp_path, [FIRST])[FIRST]
    assert [hit.at_ns for hit in kept] == list(range(24, 40))
    (tmp_path / f"{FIRST}.xids").write_text("nonsense")
    assert read_hits(tmp_path, [FIRST, SECOND]) == {FIRST: ()}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('63 = "none"', "63 is 'none'"),
        ('x = "other"', "'x' is not a valid Xid number"),
        ("63 = 1", "Expected `str`"),
    ],
)
def test_a_table_of_xids_that_cannot_be_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.toml").write_text(f"[xids]\n{text}\n")
    with pytest.raises(InvalidValue, match=told):
        read_configuration(Home(tmp_path))


def test_F24_a_node_may_decide_otherwise(tmp_path: Path, gpus: FakeGpus) -> None:
    (tmp_path / "config.toml").write_text('[xids]\n48 = "other"\n')
    gpus.xid(FIRST, 48)
    NodeFaults(Home(tmp_path), FakeClock()).look(GPUS)
    assert noted(tmp_path) == {}


def test_slots_of_a_cpu_have_no_driver(tmp_path: Path) -> None:
    slot = Device(uuid="CPU-0", index=0, type="CPU", memory_bytes=0, kind=DeviceKind.CPU)
    faults = AttemptFaults(launch_in(tmp_path, (slot,)), Home(tmp_path), FakeClock(), [])
    assert (faults.fd, faults.hear(RUNNING, (slot,))) == (None, [])
