"""Account of one attempt: facts, receipt, and reserved disk space for both files.

    facts.jsonl, append-only lines ─┬─▶ charges, and replays on a server
                                    └─▶ receipt.json; both agree to the millionth
    <attempt>/.reserve/<number>    allocated, without content     ── the disk is full ─▶  overwritten, cut, renamed
    <attempt>/facts.jsonl          some space allocated behind its end, extended as the file grows

The supervisor measures the receipt's segments (queued, first line …), which are finer than the facts. On a full disk,
another process could take freed space at once. A file that is overwritten in place keeps its disk space. The final
state, the receipt, the facts and a rank's exception can therefore be written on a full disk.

Failure cases: If the file system cannot allocate space in advance, or copies on write (btrfs, ZFS), the attempt loses
these files on a full disk. If the supervisor is killed, the reserve files stay. The agent or the uplink
(`uplink/attempt_controller.py`) later uses the reserve to write `stopped.json`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.model.billing.ledger import bill_of, priced, sum_of
from serverless_gpu.model.billing.metering import Meter
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Attempt, Fact, FactKind, Phase, Reason
from serverless_gpu.model.lifecycle.attempt_lifecycle import ASKED
from serverless_gpu.model.receipt import Bill, DeviceUse, Receipt, Segments
from serverless_gpu.node.base.protocol import Launch, Stopped
from serverless_gpu.node.inside import linux

if TYPE_CHECKING:  # Most modules that import this module use no devices.
    from serverless_gpu.node.devices.gpu_gate import Verdict

ALIVE_S = 60.0
"""Longest time between two facts of a running attempt, in seconds."""
RESERVE = ".reserve"
RESERVE_SIZES = (256 << 10, 64 << 10, 64 << 10, 64 << 10)
"""Bytes reserved for a final state with output tails, a receipt, and a rank's exception as text and pickle."""
FACTS_BYTES = 64 << 10
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class AttemptAccount:
    """Facts, measurements and receipt of one attempt."""

    def __init__(self, launch: Launch, clock: Clock) -> None:
        self.runs: int | None = None  # Number of runs that used a session; None for other attempts.
        self._meter = Meter()
        self._written = 0
        self._fact_ns = 0
        self._allocated = 0  # Allocated size of the facts file, in bytes.
        self.marks: dict[str, int] = {}  # First boottime of each event in nanoseconds, by event name.
        self.peaks: dict[int, int] = {}  # Peak host memory in bytes, by rank.
        # Messages for the user in the receipt.
        self.notes: list[str] = [launch.secrets.note] if launch.secrets and launch.secrets.note else []
        self.warm = (False, "no stem arrived")
        self.environment = ""
        self.redacted: Mapping[str, int] = {}  # Number of masked occurrences by secret.
        self._uses: tuple[DeviceUse, ...] = ()
        self._tracked = ""
        # Peak memory of the whole attempt in bytes, if the memory controller reports it.
        self.peak_bytes: int | None = None
        self._launch = launch
        self._directory = Path(launch.directory)
        self._gang = f"{launch.run_id}:{launch.fence}"
        self._clock = clock
        self._boot_id = clock.boot_id()
        self.mark("called", launch.called_ns)

    def prepare(self) -> None:
        """Reserve disk space for the files that are written at the end of the attempt."""
        prepare_reserve(self._directory)

    def mark(self, name: str, at_ns: int | None = None) -> None:
        """Record the time of an event's first occurrence."""
        self.marks.setdefault(name, self._clock.boottime_ns() if at_ns is None else at_ns)

    def fact(
        self, kind: FactKind, devices: Sequence[Device], at_ns: int | None = None, *, grace_ms: int | None = None
    ) -> None:
        """Append a fact.

        `at_ns` is the boottime of the fact; None selects the current time. `grace_ms` is the grace period of the ranks.
        """
        now_ns = self._fact_ns = self._clock.boottime_ns()
        ago_ns = 0 if at_ns is None else now_ns - at_ns
        resources = self._launch.spec.resources
        slots = len(devices) if self._launch.candidates[0].kind is DeviceKind.CPU else 0
        fact = Fact(
            attempt=self._gang,
            seq=self._written,
            kind=kind,
            boot_id=self._boot_id,
            boottime_ns=now_ns - ago_ns,
            wall_ns=self._clock.wall_ns() - ago_ns,
            gpus=tuple(device.uuid for device in devices),
            cpus=resources.cpus or slots,
            memory_bytes=resources.memory_bytes or 0,
            grace_ms=grace_ms,
        )
        self._written += 1
        self._meter.add(fact)
        # The supervisor computes the receipt from memory, because a full disk must not end a run.
        with contextlib.suppress(OSError):
            line = msgspec.json.encode(fact) + b"\n"
            self._allocated = append_fact(self._directory, line, self._allocated)
        if kind is FactKind.EXEC:
            faults.reach("after_exec_before_told")

    def alive(self, devices: Sequence[Device]) -> None:
        """Append an `alive` fact if the last fact is older than `ALIVE_S`."""
        if self._clock.boottime_ns() - self._fact_ns > ALIVE_S * 1e9:
            self.fact(FactKind.ALIVE, devices)

    def starting(self, devices: Sequence[Device]) -> None:
        """Record the time at which the environment became ready."""
        ready_ns = self.marks.get(self._ready(), 0)
        self.fact(FactKind.STARTING, devices, max(ready_ns, self._fact_ns))  # Facts must be in chronological order.

    def stopping(self, attempt: Attempt, devices: Sequence[Device]) -> None:
        """Record the `stopping` fact once, with the ranks' grace period if they received SIGTERM."""
        if "stopping" in self.marks:
            return
        self.mark("stopping")
        if "exec" in self.marks:
            grace_ms = None
            if attempt.phase is Phase.TERMINATING and attempt.reason in ASKED:
                wake_ns, stop_ns = attempt.wake_ns, attempt.stop_ns
                grace_ms = 0 if wake_ns is None or stop_ns is None else max(0, wake_ns - stop_ns) // 1_000_000
            # The fact has the time of the device failure, because the user does not pay for later time.
            self.fact(FactKind.STOPPING, devices, attempt.fault_ns, grace_ms=grace_ms)

    def ended(self, stopped: Stopped) -> None:
        """Write the final state of the attempt to `stopped.json`."""
        write_json(self._directory / "stopped.json", stopped)
        faults.reach("after_ending_before_told")

    def observed(self, uses: Sequence[DeviceUse], tracked: str, notes: Sequence[str]) -> None:
        """Record the monitor's observations.

        `tracked` is the link to the run in MLflow, or "".
        """
        self._uses, self._tracked = tuple(uses), tracked
        self.notes += notes

    def receipt(
        self,
        attempt: Attempt,
        devices: Sequence[Device],
        verdicts: Mapping[str, Verdict],
        quarantined: Sequence[str],
        gate: str = "",
    ) -> Receipt:
        """Write and return the receipt of an ended attempt.

        `gate` is the evidence of the device check as text, if the verdicts do not contain it.
        """
        secrets = self._launch.secrets
        kind, gpu_type = self._launch.candidates[0].kind, self._launch.candidates[0].type
        tariff = self._launch.tariff
        gpu_ms, micros, bill = reckon(self._meter, tariff, attempt.reason)
        receipt = Receipt(
            run_id=attempt.run_id,
            fence=attempt.fence,
            state=attempt.state.value,
            reason=None if attempt.reason in (None, Reason.COMPLETED) else attempt.reason.value,
            gpu_type=gpu_type,
            gpus=tuple(device.uuid for device in devices),
            kind=kind,
            segments=self._segments(),
            gpu_ms=gpu_ms,
            micros=micros,
            currency=tariff.currency,
            peak_memory_bytes=self.peak_bytes if self.peak_bytes is not None else sum(self.peaks.values()) or None,
            warm=self.warm[0],
            warm_reason=self.warm[1],
            gate=gate or gate_text(devices, verdicts, kind),
            quarantined=tuple(quarantined),
            tags=self._launch.spec.tags,
            facts=self._written,
            world_size=attempt.world_size,
            notes=tuple(self.notes),
            runs=self.runs,
            environment=self.environment,
            uses=self._uses,
            tracked=self._tracked,
            secrets=secrets.texts if secrets is not None else (),
            policy=self._launch.spec.policy or "",
            bill=bill,
            isolation=self._launch.isolation,
            redacted=dict(self.redacted),
        )
        faults.reach("after_freed_before_receipt")
        write_json(self._directory / "receipt.json", receipt)
        give_back_reserve(self._directory)  # No file after the receipt needs the reserve.
        return receipt

    def _segments(self) -> Segments:
        return Segments(
            queued_ms=self._between("asked", "reserved"),
            environment_ms=self._between("reserved", self._ready()),
            # The environment may have been ready long before the devices were reserved.
            start_ms=self._between(self._ready(), "exec", not_before="reserved"),
            first_line_ms=self._between("called" if self._launch.fence == 1 else "asked", "enter"),
            run_ms=self._between("exec", "stopping"),
            stop_ms=self._between("stopping", "exited"),
            gate_ms=self._between("exited", "freed"),
        )

    def _ready(self) -> str:
        """Return the name of the event after which the ranks could start: "stem" or "confirmed"."""
        last = max(("stem", "confirmed"), key=lambda name: self.marks.get(name, 0))
        return last if "stem" in self.marks else "stem"

    def _between(self, start: str, end: str, *, not_before: str = "") -> int | None:
        if start not in self.marks or end not in self.marks:
            return None
        start_ns = max(self.marks[start], self.marks.get(not_before, 0))
        return max(0, self.marks[end] - start_ns) // 1_000_000


def reckon(meter: Meter, tariff: Tariff, reason: Reason | None) -> tuple[int, int | None, Bill]:
    """Return device-milliseconds, price in millionths of the currency, and price terms of an attempt."""
    is_billed = reason is None or MEANINGS[reason].is_billed
    whole = sum_of(priced(meter.used(), tariff, is_billed=is_billed), tariff)
    return whole.gpu_ms, whole.micros, bill_of(whole, reason)


def gate_text(devices: Sequence[Device], verdicts: Mapping[str, Verdict], kind: DeviceKind) -> str:
    """Return the evidence that the devices are free as one sentence."""
    if not devices:
        return "no device was reserved"
    noun = "CPU slot" if kind is DeviceKind.CPU else "GPU"
    plural = f"{len(devices)} {noun}{'' if len(devices) == 1 else 's'}"
    bad = [f"{uuid}: {verdict.evidence}" for uuid, verdict in verdicts.items() if not verdict.ok]
    if bad:
        return f"{len(bad)} of {plural} not free: " + "; ".join(bad)
    if kind is DeviceKind.CPU:
        return f"{plural} free: no process of the run is left"
    evidence = sorted({verdict.evidence for verdict in verdicts.values()})
    return f"{plural} verified free: " + "; ".join(evidence[:3])


def write_json(path: Path, value: msgspec.Struct) -> None:
    """Write a value to a JSON file of an attempt, completely or not at all. Ignore write errors."""
    with contextlib.suppress(OSError):
        write_text(path, msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file completely or not at all, on a full disk from the reserve. Raises OSError."""
    write_bytes(path, text.encode(), path.parent)


def prepare_reserve(directory: Path) -> None:
    """Allocate the reserve of an attempt, if the file system supports it."""
    with contextlib.suppress(OSError):
        place = directory / RESERVE
        place.mkdir(mode=0o700, exist_ok=True)
        for number, size in enumerate(RESERVE_SIZES):
            fd = os.open(place / str(number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
            finally:
                os.close(fd)


def give_back_reserve(directory: Path) -> None:
    """Free the unused reserve files of an attempt."""
    shutil.rmtree(directory / RESERVE, ignore_errors=True)
    with contextlib.suppress(OSError):
        facts = directory / "facts.jsonl"
        os.truncate(facts, facts.stat().st_size)  # `truncate` frees the disk space allocated after the end of the file.


def write_bytes(path: Path, data: bytes, directory: Path) -> None:
    """Write a file of an attempt completely or not at all. On a full disk, use the attempt's reserve.

    Raises OSError if the write fails and no reserve file is large enough.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        # This process follows no links, because ranks may have created entries in the attempt directory.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if error.errno not in _FULL or not _write_in_place(path, data, directory / RESERVE):
            raise


def append_fact(directory: Path, line: bytes, allocated: int) -> int:
    """Append a line to an attempt's facts and allocate space behind the line. Raises OSError.

    `allocated` is the result of the previous call (0 at first): the end of the allocated disk space.
    """
    fd = os.open(directory / "facts.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        if size + FACTS_BYTES // 2 > allocated:
            with contextlib.suppress(OSError):
                linux.allocate_behind(fd, size, FACTS_BYTES)
                allocated = size + FACTS_BYTES
        if os.write(fd, line) < len(line):
            os.ftruncate(fd, size)  # An incomplete fact would also make the next fact unreadable.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)
    return allocated


def _write_in_place(path: Path, data: bytes, place: Path) -> bool:
    """Write data into the smallest reserve file that is large enough, and rename the file.

    Return False if no reserve file is large enough.
    """
    sizes = {}
    with contextlib.suppress(OSError):
        sizes = {entry: entry.stat().st_size for entry in place.iterdir()}
    fitting = sorted((size, entry) for entry, size in sizes.items() if size >= len(data))
    for _, entry in fitting[:1]:
        with contextlib.suppress(OSError):
            fd = os.open(entry, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.pwrite(fd, data, 0)
                os.ftruncate(fd, len(data))
            finally:
                os.close(fd)
            entry.replace(path)
            return True
    return False
