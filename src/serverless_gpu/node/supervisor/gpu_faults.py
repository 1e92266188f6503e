"""Reacts to failing GPUs of this node as soon as the kernel log reports them.

    kernel_log ─▶ model/xid ─▶ Fault ─┬─ ends the attempt that uses the GPU (AttemptFaults, in its supervisor)
                                      ├─ quarantines the GPU until the next boot, also across restarts of the agent
                                      └─ counts a hit in `<uuid>.xids` beside the GPU's lock if user code caused it;
                                         hits are counted per principal, for the whole machine

`NodeFaults` runs in the agent and in the uplink. `NodeFaults` reads the whole kernel log and therefore also quarantines
unused GPUs. `NodeFaults` and `AttemptFaults` may read the same log line. The second reader of a log line leaves the
first reader's quarantine note unchanged. If an operator lifted the quarantine after the log line, for example after a
GPU reset, the quarantine stays lifted.

Failure cases: If the kernel log is unreadable, `sgpu doctor` reports the reason. If the lock directory is not writable,
a GPU fault still ends the attempt. The next device check refuses a GPU that does not answer. The node treats an invalid
`.xids` file as empty.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.json_codec import from_json
from serverless_gpu.model import xid
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Attempt, GpuFailed, Reason, State
from serverless_gpu.model.xid import ENDS_A_RUN, QUARANTINES, Fault, UserFault, XidKind
from serverless_gpu.node.attempt.server_attempt_record import read_remote
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import OPEN, opened, opened_directory, read_note
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.devices.gpu_gate import Verdict
from serverless_gpu.node.devices.kernel_log import AGAIN_S, KernelLog, KernelLogLine, log_of
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
from serverless_gpu.node.devices.reservation import user_name
from serverless_gpu.node.spawner.client import find_spawner

_USERS_OWN = frozenset(
    {Reason.RANK_RAISED, Reason.RANK_SIGNAL, Reason.NO_RESULT, Reason.COMMAND_FAILED, Reason.GPU_OOM}
)
_HITS_MAX = 16
# Maximum length of a principal's name in a hit. Sixteen hits with names of this length fit into a file of hits.
_PRINCIPAL_MAX = 100


class AttemptFaults:
    """Reads driver reports about the GPUs of one attempt and adds them to the receipt's `notes`."""

    def __init__(self, launch: Launch, home: Home, clock: Clock, notes: list[str]) -> None:
        self.hint = ""  # Probable cause of a user code failure, or "".
        self._launch = launch
        self._home = home
        self._clock = clock
        self._notes = notes
        kind = launch.candidates[0].kind
        watched = kind is not DeviceKind.CPU
        self._kind = kind
        self._log = KernelLog(log_of(kind, home.root), clock, opener=_open_kernel_log) if watched else None
        self._told: dict[tuple[str, int], Fault] = {}

    @property
    def fd(self) -> int | None:
        """Return a descriptor that becomes readable when the kernel log has new lines."""
        return None if self._log is None else self._log.fd

    @property
    def pause_s(self) -> float:
        """Return the maximum number of seconds between two reads of the kernel log."""
        return AGAIN_S if self._kind is DeviceKind.FAKE else math.inf

    def hear(self, attempt: Attempt, devices: Sequence[Device]) -> list[GpuFailed]:
        """Read new driver reports about the attempt's devices. Return the events that end the attempt."""
        if self._log is None:
            return []
        events: list[GpuFailed] = []
        for line, fault in faults_of(self._log.lines(), devices, self._home):
            if (fault.uuid, fault.number) in self._told:
                continue  # The supervisor skips known faults, because the driver repeats its reports.
            self._told[fault.uuid, fault.number] = fault
            if fault.kind is XidKind.USER:
                self._hit(attempt, fault)
            elif fault.kind is not XidKind.OTHER:
                self._notes.append(fault.sentence)
                quarantine(self._kind, self._home, fault, line, self._clock)
            if fault.kind in ENDS_A_RUN:
                events.append(GpuFailed(fault.sentence))
        return events

    def verdicts(self, devices: Iterable[Device]) -> dict[str, Verdict]:
        """Return verdicts for the devices that the driver has reported as broken."""
        broken = {fault.uuid: fault for fault in self._told.values() if fault.kind in QUARANTINES}
        return {device.uuid: Verdict(False, broken[device.uuid].what) for device in devices if device.uuid in broken}

    def close(self) -> None:
        """Close the kernel log."""
        if self._log is not None:
            self._log.close()

    def _hit(self, attempt: Attempt, fault: Fault) -> None:
        """Record that user code failed on a GPU, unless the attempt is already stopping for another reason."""
        if attempt.state is not State.RUNNING and attempt.reason not in _USERS_OWN:
            return
        self.hint = self.hint or f"{fault.sentence}: {xid.HINT}"
        self._notes.append(f"{fault.sentence}: {xid.HINT}")
        remote = read_remote(Path(self._launch.directory))
        who = (remote.owner if remote is not None else "") or user_name()
        with contextlib.suppress(StorageError):
            hit = UserFault(principal=who, number=fault.number, at_ns=self._clock.wall_ns())
            note_hit(lock_directory(self._kind, self._home.root), fault.uuid, hit)


class NodeFaults:
    """Reads driver reports about all GPUs of this node since its boot."""

    def __init__(self, home: Home, clock: Clock) -> None:
        self._home = home
        self._clock = clock
        self._logs: dict[DeviceKind, KernelLog] = {}
        self._known: dict[str, Device] = {}

    def look(self, devices: Iterable[Device]) -> None:
        """Quarantine GPUs that failed, including known GPUs that fell off the bus."""
        self._known |= {device.uuid: device for device in devices if device.kind is not DeviceKind.CPU}
        for kind in {device.kind for device in self._known.values()}:
            if kind not in self._logs:
                self._logs[kind] = KernelLog(
                    log_of(kind, self._home.root), self._clock, past=True, opener=_open_kernel_log
                )
            own = [device for device in self._known.values() if device.kind is kind]
            for line, fault in faults_of(self._logs[kind].lines(), own, self._home):
                quarantine(kind, self._home, fault, line, self._clock)

    def findings(self) -> tuple[str, ...]:
        """Return the findings about GPUs for the operator, one message each."""
        found: list[str] = []
        for kind in {device.kind for device in self._known.values()}:
            with contextlib.suppress(StorageError):
                found += suspects(lock_directory(kind, self._home.root), self._known, self._clock.wall_ns())
        return tuple(found)


def suspects(directory: Path, uuids: Iterable[str], now_ns: int) -> list[str]:
    """Return a message for each possibly broken GPU on which only user code has failed.

    `now_ns` is the number of nanoseconds since 1970. Raises StorageError if the lock directory is unusable.
    """
    hits = read_hits(directory, uuids)
    said = {uuid: xid.suspicion(of_one, now_ns) for uuid, of_one in hits.items()}
    return [f"{uuid}: {why}" for uuid, why in said.items() if why]


def faults_of(
    lines: Iterable[KernelLogLine], devices: Sequence[Device], home: Home
) -> Iterable[tuple[KernelLogLine, Fault]]:
    """Yield the Xid faults of the given devices, classified by this node's configuration."""
    by_address = {device.pci: device.uuid for device in devices if device.pci}
    own: Mapping[int, XidKind] | None = None
    for line in lines:
        said = xid.read(line.text)
        if said is None or said.pci not in by_address:
            continue
        if own is None:
            own = {}
            # `faults_of` ignores an invalid configuration, because device requests report the error.
            with contextlib.suppress(InvalidValue):
                own = read_configuration(home).xids
        yield line, xid.fault(said, by_address[said.pci], own)


def quarantine(kind: DeviceKind, home: Home, fault: Fault, line: KernelLogLine, clock: Clock) -> None:
    """Quarantine a failed GPU, unless its quarantine note changed after the log line."""
    if fault.kind not in QUARANTINES:
        return
    with contextlib.suppress(StorageError):
        locks = DeviceLocks(lock_directory(kind, home.root), clock=clock)
        if locks.noted_ns(fault.uuid) < line.at_ns:
            locks.quarantine(fault.uuid, fault.what, fault=fault.kind)


def _open_kernel_log() -> int:
    return find_spawner(os.environ).open_kernel_log()


def note_hit(directory: Path, uuid: str, hit: UserFault) -> None:
    """Record that a principal's code failed on a GPU, one hit per principal. Raises StorageError."""
    own = msgspec.structs.replace(hit, principal=_plain(hit.principal))
    with opened_directory(directory) as opened_at, opened(opened_at, f"{uuid}.xids") as fd:
        others = [other for other in _read(fd) if other.principal != own.principal]
        text = msgspec.json.encode((*others[1 - _HITS_MAX :], own))
        os.pwrite(fd, text, 0)
        os.ftruncate(fd, len(text))


def read_hits(directory: Path, uuids: Iterable[str]) -> dict[str, tuple[UserFault, ...]]:
    """Return recent failures of user code by GPU uuid. Raises StorageError."""
    found: dict[str, tuple[UserFault, ...]] = {}
    with opened_directory(directory) as opened_at:
        for uuid in uuids:
            with contextlib.suppress(OSError):
                fd = os.open(f"{uuid}.xids", os.O_RDONLY | OPEN, dir_fd=opened_at)
                try:
                    found[uuid] = _read(fd)
                finally:
                    os.close(fd)
    return found


def _read(fd: int) -> tuple[UserFault, ...]:
    try:
        hits = from_json(read_note(fd), tuple[UserFault, ...])
    except msgspec.MsgspecError:
        return ()
    return tuple(msgspec.structs.replace(hit, principal=_plain(hit.principal)) for hit in hits)


def _plain(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:_PRINCIPAL_MAX]
