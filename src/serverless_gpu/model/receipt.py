"""The account of one run, as its owner reads it: where the time went, what it cost, what its devices did.

Made by the node that ran it (`node/attempt/usage_account.py`); `ledger.py` and `pricing.py` say what it costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from serverless_gpu import units
from serverless_gpu.model import markup
from serverless_gpu.model.hardware import CPU, DeviceKind, time_unit

# A terminal's two lines: a receipt is read, not scrolled.
_TEXT_LINE_MAX = 200

# A device below this, over so long, was asked for and not used.
_IDLE_PERCENT = 0.5
_IDLE_SAMPLES_MIN = 30

_NODES_NAMED = 3

# Of all processes of the run together. What a GPU holds is "GPU memory".
_PEAK = "host memory peak"

# Words of the sentences about the hand-back: `node/attempt/usage_account.py` of one node, `gang_receipt.py` of several.
_FREE = re.compile(r"\bfree\b")
_NOT_FREE = re.compile(r"\bnot free\b|\bnot known\b|\bnothing is known\b")

_WARNINGS_MAX = 8
_WARNING_MAX = 400


class Segments(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a run went, in milliseconds; None is "not known", which is not 0.

    Attributes:
        queued_ms: waiting for devices.
        environment_ms: making the environment ready.
        start_ms: starting the ranks.
        first_line_ms: from the call to the first line of user code; of a later attempt, since it came to its node.
        run_ms: user code.
        stop_ms: ending the ranks.
        gate_ms: proving the devices free.
    """

    environment_ms: int | None = None
    start_ms: int | None = None
    first_line_ms: int | None = None
    run_ms: int | None = None
    stop_ms: int | None = None
    gate_ms: int | None = None
    queued_ms: int | None = None


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """What telemetry saw of one device of an attempt; None is "not known".

    Attributes:
        uuid: of the device.
        samples: how many there were, about one a second.
        busy_percent: mean share of time in which it worked.
        peak_memory_bytes: most device memory used.
        energy_joules: drawn between the first and the last sample.
        throttled_s: seconds in which it ran slower than asked for, because of heat or power.
    """

    uuid: str
    samples: int
    busy_percent: float | None = None
    peak_memory_bytes: int | None = None
    energy_joules: float | None = None
    throttled_s: float | None = None


class SampledDevice(Protocol):
    """What is looked at of a `DeviceUse`."""

    @property
    def samples(self) -> int: ...
    @property
    def busy_percent(self) -> float | None: ...
    @property
    def peak_memory_bytes(self) -> int | None: ...


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """What telemetry saw of all devices of an attempt."""

    observed_ms: int = 0  # device-milliseconds that were looked at; `busy_ms` those in which a device worked
    busy_ms: int = 0
    peak_memory_bytes: int | None = None  # the most of one device; None where that is not known


def observed(uses: Iterable[SampledDevice]) -> Observed:
    """Return what telemetry saw; a sample is about one second of one device."""
    seen = list(uses)
    busy = [(use.samples, use.busy_percent) for use in seen if use.busy_percent is not None]
    peaks = [use.peak_memory_bytes for use in seen if use.peak_memory_bytes is not None]
    return Observed(
        observed_ms=1000 * sum(samples for samples, _ in busy),
        busy_ms=sum(round(10 * samples * percent) for samples, percent in busy),
        peak_memory_bytes=max(peaks, default=None),
    )


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """How the cost of a run's attempt comes about.

    Attributes:
        billed_ms: device-milliseconds that are billed.
        unbilled: why not all of those that were used are, in words; "" where they are.
        core_ms: core-milliseconds that are billed, where cores were limited; beyond those that are CPU slots.
        memory_mib_ms: MiB-milliseconds that are billed, where memory was limited.
        core_micros: what of the cost is for cores; `memory_micros` for memory.
        dbu_micros: millionths of a DBU.
    """

    billed_ms: int
    unbilled: str = ""
    core_ms: int = 0
    memory_mib_ms: int = 0
    core_micros: int = 0
    memory_micros: int = 0
    dbu_micros: int = 0


def nodes_text(nodes: Sequence[str]) -> str:
    """Return the names of a run's nodes; of many how many there are: ``"n1, n2"``, ``"8 nodes"``."""
    return ", ".join(nodes) if len(nodes) <= _NODES_NAMED else f"{len(nodes)} nodes"


class TextPrinter(Protocol):
    """What IPython gives `_repr_pretty_` to write to."""

    def text(self, text: str) -> None: ...


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """The account of one run.

    Attributes:
        run_id: the run.
        fence: the number of its last attempt.
        state: the final state.
        reason: why it ended so; None when nothing needs saying.
        gpu_type: type of the devices.
        gpus: identifiers of the devices.
        kind: what the devices were.
        segments: where the time went.
        gpu_ms: device-milliseconds that were used, from the start of user code until the devices were free.
        micros: cost in millionths of the currency unit; None when there is no price.
        currency: the currency's name.
        peak_memory_bytes: most host memory used, of several nodes on one of them; None when not known.
        warm: whether the ranks came from a warm interpreter.
        warm_reason: why not, or which one.
        gate: the evidence that the devices were handed back.
        quarantined: identifiers of devices that could not be proven free.
        tags: the run's tags.
        facts: how many facts stand behind this.
        world_size: ranks of the run.
        notes: anything else the user should know.
        runs: for a session, how many runs used it; its time is what no run used.
        environment: what the ranks imported: ``"live"``, or which snapshot and how it was restored.
        uses: what its devices did, as far as telemetry saw it.
        tracked: link to its run in MLflow, or "".
        secrets: names and versions of the secrets it had.
        policy: the usage policy that it was under, or "".
        bill: how its cost comes about; None where its node did not say.
        nodes: names of its nodes, by NODE_RANK, where it was on several: times are those of the slowest then, amounts
            those of all; `Run.receipts` has one for each.
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

    def rows(self) -> dict[str, str]:
        """Return the rows by label, without those that are unknown or say nothing."""
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
            "secrets": ", ".join(self.secrets),
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
        """Return how many devices of what kind: ``8 H100``, ``1 CPU slot``."""
        count = len(self.gpus)
        if self.kind is DeviceKind.CPU:
            return f"{count} CPU slot{'' if count == 1 else 's'}"
        return f"{count} {self.gpu_type}" + (" (fake)" if self.kind is DeviceKind.FAKE else "")

    def used_text(self) -> str:
        """Return the time the devices were held, and what it costs where there is a price."""
        idle = "" if self.runs is None else " idle"
        cost = "" if self.micros is None else f", {units.format_micros(self.micros, self.currency)}"
        return f"{self._used(self.gpu_ms)}{idle}{cost}"

    def unbilled_text(self) -> str:
        """Return how much of the time is not billed, and why; "" where all of it is."""
        if self.bill is None or not self.bill.unbilled:
            return ""
        return f"{self._used(self.gpu_ms - self.bill.billed_ms)}: {self.bill.unbilled}"

    def _used(self, gpu_ms: int) -> str:
        gpu_type = CPU if self.kind is DeviceKind.CPU else self.gpu_type
        return units.format_gpu_ms(gpu_ms, unit=time_unit([gpu_type]))

    def brief(self) -> tuple[str, ...]:
        """Return what a call prints: one line, and one more for each thing that its user must see."""
        return tuple(_printable(line, _WARNING_MAX) for line in (_summary(self), *_warnings(self)))

    def text(self) -> str:
        """Return the whole receipt for a terminal: at most 8 lines, none of them empty."""
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
                f"{_PEAK} {peak}" if peak else "",
            ),
            _joined(*(f"{label}: {rows[label]}" for label in ("not billed", "gate") if label in rows)),
            f"quarantined: {rows['quarantined']}" if "quarantined" in rows else "",
            # The link first: it must stay whole, and 8 lines have room for one of the two.
            _joined(
                *(f"{label}: {rows[label]}" for label in ("tracked", "secrets", "policy", "tags") if label in rows)
            ),
            f"notes: {rows['notes']}" if "notes" in rows else "",
        )
        return "\n".join(_printable(line) for line in lines if line)

    __str__ = text

    def brief_html(self) -> str:
        """Return what a call shows in a notebook: the lines of `brief`, and the whole receipt to unfold below them."""
        return markup.unfolding(self.state, self.brief(), self.html())

    def html(self) -> str:
        """Return the whole receipt for a notebook: the same as a table, everything in it escaped."""
        shown = [(label, _printable(value)) for label, value in self.rows().items()]
        return markup.table(self.state, _printable(_joined(self.reason or "", *_names(self))), shown)

    # What IPython shows for a receipt that a cell ends with.
    _repr_html_ = html

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(self.text())


def _parts_text(receipt: Receipt) -> str:
    """Return what of the cost is for cores and memory, and what it is in DBUs; "" where there is no such thing."""
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
    # In the order a run goes through them; what is not known is left out.
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
    """Return what devices did: how busy, how full, how much it drew; and what a person should wonder about."""
    busy = [(use.busy_percent, max(1, use.samples)) for use in uses if use.busy_percent is not None]
    idle = _idle_count(uses)
    peaks = [use.peak_memory_bytes for use in uses if use.peak_memory_bytes is not None]
    joules = sum(use.energy_joules or 0 for use in uses)
    throttled_s = max((use.throttled_s or 0 for use in uses), default=0)
    mean = sum(percent * count for percent, count in busy) / max(1, sum(count for _, count in busy))
    is_cpu = kind is DeviceKind.CPU
    peak = 0 if is_cpu else max(peaks, default=0)  # a slot's memory is the host's, which has a row of its own
    return _joined(
        f"{'CPU' if is_cpu else 'GPU'} {mean:.0f} % busy" if busy else "",
        f"{idle} of {len(uses)} did nothing" if 0 < idle < len(uses) else "",
        f"GPU memory peak {units.format_gpu_memory(peak)}" if peak else "",
        units.format_joules(joules) if joules else "",
        f"throttled for {units.format_duration_ms(round(throttled_s * 1000))}" if throttled_s >= 1 else "",
    )


def _idle_count(uses: Sequence[DeviceUse]) -> int:
    """Return how many devices did nothing, of those that were seen for long enough."""
    seen = [use.busy_percent for use in uses if use.busy_percent is not None and use.samples >= _IDLE_SAMPLES_MIN]
    return sum(percent < _IDLE_PERCENT for percent in seen)


def _summary(receipt: Receipt) -> str:
    """Return the one line of a call: ``2 × H100 · 41 s · 0.02 USD · verified free in 21 ms``.

    One that did not succeed begins with how it ended, and a session with its name.
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
    """Return that the devices were handed back, and how long the proof took; "" where that is not so."""
    if not receipt.gpus:
        return receipt.gate  # why there is nothing to hand back
    if not _is_freed(receipt):
        return ""
    verified = "free" if receipt.kind is DeviceKind.CPU else "verified free"
    gate_ms = receipt.segments.gate_ms
    return verified if gate_ms is None else f"{verified} in {units.format_duration_ms(gate_ms)}"


def _is_freed(receipt: Receipt) -> bool:
    return not receipt.quarantined and bool(_FREE.search(receipt.gate)) and not _NOT_FREE.search(receipt.gate)


def _warnings(receipt: Receipt) -> list[str]:
    """Return what the user of a run must see, one line each; what does not apply is left out."""
    idle, reason = _idle_count(receipt.uses), receipt.warm_reason
    throttled_s = max((use.throttled_s or 0 for use in receipt.uses), default=0)
    first_ms = receipt.segments.first_line_ms
    is_cold = receipt.runs is None and not receipt.warm and bool(reason) and first_ms is not None
    is_unproven = bool(receipt.gpus and receipt.gate) and not _is_freed(receipt)
    lines = [
        f"devices not verified free: {receipt.gate}" if is_unproven else "",
        f"quarantined: {', '.join(receipt.quarantined)}" if receipt.quarantined else "",
        f"not billed: {receipt.unbilled_text()}" if receipt.unbilled_text() else "",
        f"cold start: your code began after {units.format_duration_ms(first_ms or 0)}; no Python with its "
        f"packages loaded was ready ({reason})"
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
    """Return the line without control characters (tags and notes may hold any) and not over the limit."""
    clean = "".join(char if char.isprintable() else " " for char in line)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
