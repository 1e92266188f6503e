"""The receipt of one run: the time of each segment, the cost, and the usage of the devices.

The node that ran the attempt creates the receipt (`node/attempt/usage_account.py`). `ledger.py` and `pricing.py`
compute the cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from serverless_gpu import units
from serverless_gpu.model import markup
from serverless_gpu.model.hardware import CPU, DeviceKind, time_unit
from serverless_gpu.model.isolation import NONE, Level

# Maximum number of characters in a receipt line, about two terminal lines.
_TEXT_LINE_MAX = 200

# Busy percentage below which the receipt reports a device as unused, and minimum number of telemetry samples for the
# report.
_IDLE_PERCENT = 0.5
_IDLE_SAMPLES_MIN = 30

_NODES_NAMED = 3

# Label for the peak host memory of all processes of a run. GPU memory has a separate label.
_PEAK = "host memory peak"

# Patterns that recognise whether a gate text reports verified free devices. `node/attempt/usage_account.py` and
# `supervisor_loss.py` write the gate text of one node. `gang_receipt.py` writes the gate text of several nodes.
_FREE = re.compile(r"\bfree\b")
_NOT_FREE = re.compile(r"\bnot free\b|\bnot known\b|\bnothing is known\b")

_WARNINGS_MAX = 8
_WARNING_MAX = 400


class Segments(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a run by segment, in milliseconds. None stands for an unknown time.

    Attributes:
        queued_ms: time that the run waited for devices.
        environment_ms: time to prepare the environment.
        start_ms: time to start the ranks.
        first_line_ms: time from the call to the first line of user code. For a later attempt, the time starts at its
            arrival on the node.
        run_ms: time in user code.
        stop_ms: time to stop the ranks.
        gate_ms: time to verify that the devices are free.
    """

    environment_ms: int | None = None
    start_ms: int | None = None
    first_line_ms: int | None = None
    run_ms: int | None = None
    stop_ms: int | None = None
    gate_ms: int | None = None
    queued_ms: int | None = None


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of one device of an attempt. None stands for an unknown value.

    Attributes:
        uuid: identifier of the device.
        samples: number of telemetry samples, about one per second.
        busy_percent: mean percentage of time in which the device was busy.
        peak_memory_bytes: peak device memory.
        energy_joules: consumed energy between the first and the last sample.
        throttled_s: seconds in which heat or a power limit slowed the device down.
    """

    uuid: str
    samples: int
    busy_percent: float | None = None
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    throttled_s: float | None = None


class SampledDevice(Protocol):
    """The fields of a `DeviceUse` that `observed` reads."""

    @property
    def samples(self) -> int: ...
    @property
    def busy_percent(self) -> float | None: ...
    @property
    def peak_memory_bytes(self) -> int | None: ...


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry of all devices of an attempt."""

    observed_ms: int = 0  # Observed device-milliseconds. `busy_ms` counts the busy device-milliseconds.
    busy_ms: int = 0
    peak_memory_bytes: int | None = None  # The highest memory peak of one device, or None if unknown.


def observed(uses: Iterable[SampledDevice]) -> Observed:
    """Return the combined telemetry of all devices, with one sample per device and second."""
    seen = list(uses)
    busy = [(use.samples, use.busy_percent) for use in seen if use.busy_percent is not None]
    peaks = [use.peak_memory_bytes for use in seen if use.peak_memory_bytes is not None]
    return Observed(
        observed_ms=1000 * sum(samples for samples, _ in busy),
        busy_ms=sum(round(10 * samples * percent) for samples, percent in busy),
        peak_memory_bytes=max(peaks, default=None),
    )


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an attempt's cost.

    Attributes:
        billed_ms: billed device-milliseconds.
        unbilled: reason why the server does not bill a part of the usage, or "" if the server bills all usage.
        core_ms: billed core-milliseconds under a limit of cores, without the cores of CPU slots.
        memory_mib_ms: billed MiB-milliseconds under a limit of memory.
        core_micros: cost of the cores in millionths of the currency unit.
        memory_micros: cost of the memory in millionths of the currency unit.
        dbu_micros: cost in millionths of a DBU.
    """

    billed_ms: int
    unbilled: str = ""
    core_ms: int = 0
    memory_mib_ms: int = 0
    core_micros: int = 0
    memory_micros: int = 0
    dbu_micros: int = 0


def nodes_text(nodes: Sequence[str]) -> str:
    """Return a run's node names, such as ``"n1, n2"``, or the number of nodes, such as ``"8 nodes"``."""
    return ", ".join(nodes) if len(nodes) <= _NODES_NAMED else f"{len(nodes)} nodes"


class TextPrinter(Protocol):
    """The printer that IPython passes to `_repr_pretty_`."""

    def text(self, text: str) -> None: ...


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of one run: its result, used devices, times and cost.

    Attributes:
        run_id: identifier of the run.
        fence: number of the run's last attempt.
        state: final state.
        reason: reason for the final state, or None if the state is self-explanatory.
        gpu_type: type of the devices.
        gpus: identifiers of the devices.
        kind: kind of the devices.
        segments: time of the run by segment.
        gpu_ms: used device-milliseconds, from the start of user code until the devices were free.
        micros: cost in millionths of the currency unit, or None without a price.
        currency: name of the currency.
        peak_memory_bytes: peak host memory, or None if unknown. On several nodes, the highest peak of one node.
        warm: True if the ranks started from a warm interpreter.
        warm_reason: reason for a cold start, or the warm interpreter that was used.
        gate: result of the check that the devices are free after the run.
        quarantined: identifiers of devices that the node could not prove free.
        tags: tags of the run.
        facts: number of recorded facts from which the node computed this receipt.
        world_size: number of ranks.
        notes: further notes for the user.
        runs: number of a session's runs. The receipt's time is then the session's idle time.
        environment: source of the ranks' imports: ``"live"``, or the snapshot and the method of its restore.
        uses: telemetry of the devices.
        tracked: link to the run in MLflow, or "".
        secrets: names and versions of the run's secrets.
        policy: usage policy of the run, or "".
        bill: parts of the cost, or None if the node did not report the parts.
        nodes: names of the nodes by NODE_RANK, for a run on several nodes. Segment times are then the times of the
            slowest node, and amounts are sums. `Run.receipts` has one receipt per node.
        isolation: isolation level of the ranks.
        redacted: number of masked occurrences in output and exceptions, by the name of the secret.
    """

    run_id: str
    fence: int
    state: str
    reason: str | None
    gpu_type: str
    gpus: tuple[str, ...]
    kind: DeviceKind
    segments: Segments
    gpu_ms: int
    micros: int | None
    currency: str
    peak_memory_bytes: int | None
    warm: bool
    warm_reason: str
    gate: str
    quarantined: tuple[str, ...]
    tags: dict[str, str]
    facts: int
    world_size: int
    notes: tuple[str, ...] = ()
    runs: int | None = None
    environment: str = ""
    uses: tuple[DeviceUse, ...] = ()
    tracked: str = ""
    secrets: tuple[str, ...] = ()
    policy: str = ""
    bill: Bill | None = None
    nodes: tuple[str, ...] = ()
    isolation: Level = NONE
    redacted: dict[str, int] = {}

    def rows(self) -> dict[str, str]:
        """Return the receipt's rows by label, without unknown or empty rows."""
        is_run = self.runs is None
        start = "warm start" if self.warm else "cold start"
        if self.warm_reason:
            start = f"{start} ({self.warm_reason})"
        peak = "" if self.peak_memory_bytes is None else units.format_bytes(self.peak_memory_bytes)
        rows = {
            "devices": _joined(self.devices_text(), _size_text(self)),
            "cost": self.used_text() + (_parts_text(self) if self.micros is not None else ", unpriced"),
            "not billed": self.unbilled_text(),
            "use": _use_text(self.uses, self.kind),
            "time": _segments_text(self.segments),
            "start": start if is_run else "",
            "environment": self.environment if is_run else "",
            "isolation": "" if self.isolation == NONE else self.isolation,
            "secrets": ", ".join(self.secrets),
            "redacted": counted(self.redacted),
            _PEAK: peak if is_run else "",
            "gate": self.gate,
            "quarantined": ", ".join(self.quarantined),
            "tracked": self.tracked,
            "policy": self.policy,
            "tags": ", ".join(f"{key}={value}" for key, value in sorted(self.tags.items())),
            "notes": "; ".join(self.notes),
        }
        return {label: value for label, value in rows.items() if value}

    def devices_text(self) -> str:
        """Return the count and type of the devices, such as ``8 H100`` or ``1 CPU slot``."""
        count = len(self.gpus)
        if self.kind is DeviceKind.CPU:
            return f"{count} CPU slot{'' if count == 1 else 's'}"
        return f"{count} {self.gpu_type}" + (" (fake)" if self.kind is DeviceKind.FAKE else "")

    def used_text(self) -> str:
        """Return the used device time as text, and the cost if the device has a price."""
        idle = "" if self.runs is None else " idle"
        cost = "" if self.micros is None else f", {units.format_micros(self.micros, self.currency)}"
        return f"{self._used(self.gpu_ms)}{idle}{cost}"

    def unbilled_text(self) -> str:
        """Return the unbilled device time and the reason as text, or "" if the server bills all time."""
        if self.bill is None or not self.bill.unbilled:
            return ""
        return f"{self._used(self.gpu_ms - self.bill.billed_ms)}: {self.bill.unbilled}"

    def _used(self, gpu_ms: int) -> str:
        gpu_type = CPU if self.kind is DeviceKind.CPU else self.gpu_type
        return units.format_gpu_ms(gpu_ms, unit=time_unit([gpu_type]))

    def brief(self) -> tuple[str, ...]:
        """Return the lines that a call prints: a summary, and one line for each warning."""
        return tuple(_printable(line, _WARNING_MAX) for line in (_summary(self), *_warnings(self)))

    def text(self) -> str:
        """Return the whole receipt for a terminal: at most 8 lines and no empty line."""
        rows = self.rows()
        peak = rows.get(_PEAK)
        copied = self.environment not in ("", "live")
        lines = (
            _joined(*_names(self), self.state, self.reason or ""),
            _joined(rows["devices"], rows["cost"], rows.get("use", "")),
            rows.get("time", ""),
            _joined(
                rows.get("start", ""),
                f"environment: {rows['environment']}" if copied and "environment" in rows else "",
                f"isolation: {rows['isolation']}" if "isolation" in rows else "",
                f"{_PEAK} {peak}" if peak else "",
            ),
            _joined(*(f"{label}: {rows[label]}" for label in ("not billed", "gate") if label in rows)),
            f"quarantined: {rows['quarantined']}" if "quarantined" in rows else "",
            # The tracking link comes first, because clients truncate the end of a long line.
            _joined(
                *(
                    f"{label}: {rows[label]}"
                    for label in ("tracked", "secrets", "redacted", "policy", "tags")
                    if label in rows
                )
            ),
            f"notes: {rows['notes']}" if "notes" in rows else "",
        )
        return "\n".join(_printable(line) for line in lines if line)

    __str__ = text

    def brief_html(self) -> str:
        """Return the lines of `brief` for a notebook, with the whole receipt in an expandable section."""
        return markup.unfolding(self.state, self.brief(), self.html())

    def html(self) -> str:
        """Return the whole receipt as an HTML table for a notebook, with all text escaped."""
        shown = [(label, _printable(value)) for label, value in self.rows().items()]
        return markup.table(self.state, _printable(_joined(self.reason or "", *_names(self))), shown)

    # IPython displays a receipt with `_repr_html_`.
    _repr_html_ = html

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(self.text())


def counted(counts: Mapping[str, int]) -> str:
    """Describe a number of occurrences by name, such as ``HF_TOKEN twice, KEY 3 times``."""
    times = {1: "once", 2: "twice"}
    return ", ".join(f"{name} {times.get(count, f'{count} times')}" for name, count in sorted(counts.items()))


def _parts_text(receipt: Receipt) -> str:
    """Return the cost of cores, memory and DBUs as text, or "" if all three are zero."""
    parts = []
    bill = receipt.bill or Bill(billed_ms=receipt.gpu_ms)
    for name, micros in (("cores", bill.core_micros), ("memory", bill.memory_micros)):
        if micros:
            parts.append(f"{name} {units.format_micros(micros, receipt.currency)}")
    if bill.dbu_micros:
        parts.append(units.format_micros(bill.dbu_micros, "DBU"))
    return f" ({', '.join(parts)})" if parts else ""


def _names(receipt: Receipt) -> tuple[str, ...]:
    if receipt.runs is not None:
        return (f"session {receipt.run_id}",)
    return (f"run {receipt.run_id}", f"attempt {receipt.fence}")


def _size_text(receipt: Receipt) -> str:
    if receipt.runs is not None:
        return f"{receipt.runs} run{'' if receipt.runs == 1 else 's'}"
    where = f" on {nodes_text(receipt.nodes)}" if receipt.nodes else ""
    return f"{receipt.world_size} rank{'' if receipt.world_size == 1 else 's'}{where}"


def _segments_text(segments: Segments) -> str:
    named = (
        ("queued", segments.queued_ms),
        ("environment", segments.environment_ms),
        ("start", segments.start_ms),
        ("first line", segments.first_line_ms),
        ("run", segments.run_ms),
        ("stop", segments.stop_ms),
        ("gate", segments.gate_ms),
    )
    return _joined(*(f"{name} {units.format_duration_ms(ms)}" for name, ms in named if ms is not None))


def _use_text(uses: Sequence[DeviceUse], kind: DeviceKind) -> str:
    """Return the device telemetry as text: busy time, memory, energy, idle devices and throttling."""
    busy = [(use.busy_percent, max(1, use.samples)) for use in uses if use.busy_percent is not None]
    idle = _idle_count(uses)
    peaks = [use.peak_memory_bytes for use in uses if use.peak_memory_bytes is not None]
    joules = sum(use.energy_joules or 0 for use in uses)
    throttled_s = max((use.throttled_s or 0 for use in uses), default=0)
    mean = sum(percent * count for percent, count in busy) / max(1, sum(count for _, count in busy))
    is_cpu = kind is DeviceKind.CPU
    peak = 0 if is_cpu else max(peaks, default=0)  # A CPU slot uses host memory, which has a separate row.
    return _joined(
        f"{'CPU' if is_cpu else 'GPU'} {mean:.0f} % busy" if busy else "",
        f"{idle} of {len(uses)} devices did nothing" if 0 < idle < len(uses) else "",
        f"GPU memory peak {units.format_gpu_memory(peak)}" if peak else "",
        units.format_joules(joules) if joules else "",
        f"throttled for {units.format_duration_ms(round(throttled_s * 1000))}" if throttled_s >= 1 else "",
    )


def _idle_count(uses: Sequence[DeviceUse]) -> int:
    """Return the number of idle devices, ignoring devices with too few telemetry samples."""
    seen = [use.busy_percent for use in uses if use.busy_percent is not None and use.samples >= _IDLE_SAMPLES_MIN]
    return sum(percent < _IDLE_PERCENT for percent in seen)


def _summary(receipt: Receipt) -> str:
    """Return a call's summary, such as ``2 × H100 · 41 s · 0.02 USD · verified free in 21 ms``.

    The summary of an unsuccessful run begins with the run's state. The summary of a session begins with the session's
    name.
    """
    session = f"session {receipt.run_id}" if receipt.runs is not None else ""
    state = "" if receipt.state == "SUCCEEDED" else _joined(receipt.state, receipt.reason or "")
    run_ms = receipt.segments.run_ms
    return _joined(
        session or (f"run {receipt.run_id}" if state else ""),
        state,
        _count_text(receipt),
        "" if receipt.runs is None else _size_text(receipt),
        "" if run_ms is None or receipt.runs is not None else units.format_duration_ms(run_ms),
        "" if receipt.micros is None else units.format_micros(receipt.micros, receipt.currency),
        _freed_text(receipt),
    )


def _count_text(receipt: Receipt) -> str:
    if not receipt.gpus:
        return ""
    where = f" on {nodes_text(receipt.nodes)}" if receipt.nodes else ""
    devices = receipt.devices_text()
    if receipt.kind is not DeviceKind.CPU:
        count, _, rest = devices.partition(" ")
        devices = f"{count} × {rest}"
    return devices + where


def _freed_text(receipt: Receipt) -> str:
    """Return a note that the devices are verified free and the verification time, or ""."""
    if not receipt.gpus:
        return receipt.gate  # The text states why the run had no devices to release.
    if not _is_freed(receipt):
        return ""
    verified = "free" if receipt.kind is DeviceKind.CPU else "verified free"
    gate_ms = receipt.segments.gate_ms
    return verified if gate_ms is None else f"{verified} in {units.format_duration_ms(gate_ms)}"


def _is_freed(receipt: Receipt) -> bool:
    return not receipt.quarantined and bool(_FREE.search(receipt.gate)) and not _NOT_FREE.search(receipt.gate)


def _warnings(receipt: Receipt) -> list[str]:
    """Return the warnings that a user must see, one line each."""
    idle, reason = _idle_count(receipt.uses), receipt.warm_reason
    throttled_s = max((use.throttled_s or 0 for use in receipt.uses), default=0)
    first_ms = receipt.segments.first_line_ms
    is_cold = receipt.runs is None and not receipt.warm and bool(reason) and first_ms is not None
    is_unproven = bool(receipt.gpus and receipt.gate) and not _is_freed(receipt)
    lines = [
        f"devices not verified free: {receipt.gate}" if is_unproven else "",
        f"quarantined: {', '.join(receipt.quarantined)}" if receipt.quarantined else "",
        f"not billed: {receipt.unbilled_text()}" if receipt.unbilled_text() else "",
        f"cold start: user code began after {units.format_duration_ms(first_ms or 0)}, because no interpreter with "
        f"its packages was ready ({reason})"
        if is_cold
        else "",
        f"{idle} of {len(receipt.uses)} devices did nothing" if 0 < idle < len(receipt.uses) else "",
        f"throttled for {units.format_duration_ms(round(throttled_s * 1000))}" if throttled_s >= 1 else "",
        *receipt.notes,
    ]
    shown = [line for line in lines if line]
    more = len(shown) - _WARNINGS_MAX
    return [*shown[:_WARNINGS_MAX], *([f"and {more} more: sgpu show {receipt.run_id}"] if more > 0 else [])]


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _printable(line: str, limit: int = _TEXT_LINE_MAX) -> str:
    """Return a line without control characters from tags and notes, truncated at the limit."""
    clean = "".join(char if char.isprintable() else " " for char in line)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
