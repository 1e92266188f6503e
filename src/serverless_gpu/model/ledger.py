"""Facts, charges and receipts: what happened on GPUs, what follows in time and money, and the account of a run.

A fact is never changed; a charge is a pure function of facts and a price, so that facts may arrive late, twice and in
any order. Writing facts down and sending them is the node's work and must not be here.

                 reserved   hydrating   exec   alive ... alive   exited   freed
    billable                              ├──────────────────────────────────┤
    no freed yet (provisional end)        ├──────────────┤ (or exited, if that came)

A session holds devices between runs: `held` starts what `freed` ends, once for each set of devices that stood idle, so
that no device is ever counted twice.

                 reserved   held    freed ─ a run has them, and its own facts ─ held    freed
    billable                ├─────────┤                                          ├────────┤

Failure cases: a silent node or a reboot ends the billable time at the last sign of life, in the user's favour;
boottimes of two boots are never compared. Facts of several attempts, or two different facts under one number, are a
fault of the caller and raise `InvalidValue`: any sum of them would depend on the order they came in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.model import markup
from serverless_gpu.model.hardware import FAMILIES, DeviceKind, canonical

# A terminal's two lines: a receipt is read, not scrolled.
_TEXT_LINE_MAX = 200

# A device below this, over so long, was asked for and not used.
_IDLE_PERCENT = 0.5
_IDLE_SAMPLES_MIN = 30

_PRICE_MAX_PER_GPU_HOUR = 1_000_000

_PRICE_HINT = 'write the price of one GPU for one hour in USD, for example {"H100": 2.99}'


class FactKind(StrEnum):
    """What a fact says happened."""

    RESERVED = "reserved"
    HYDRATING = "hydrating"
    EXEC = "exec"
    HELD = "held"
    ALIVE = "alive"
    EXITED = "exited"
    FREED = "freed"


_STARTS = frozenset({FactKind.EXEC, FactKind.HELD})


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """One record of what happened to an attempt on a node.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        seq: number within the attempt; ``(attempt, seq)`` names the fact.
        kind: what happened.
        boot_id: the boot in which `boottime_ns` counts.
        boottime_ns: nanoseconds since boot; all durations come from it.
        wall_ns: nanoseconds since 1970; only places the fact on a calendar.
        gpus: identifiers of the devices held.
        cpus: cores held; 0 when they were not limited.
        memory_bytes: host memory held; 0 when it was not limited.
    """

    attempt: str
    seq: int
    kind: FactKind
    boot_id: str
    boottime_ns: int
    wall_ns: int
    gpus: tuple[str, ...]
    cpus: int
    memory_bytes: int


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU of a type costs for one hour.

    Attributes:
        gpu_type: the type.
        micros_per_gpu_hour: millionths of the currency unit.
        currency: the currency's name.
    """

    gpu_type: str
    micros_per_gpu_hour: int
    currency: str = "USD"

    def __post_init__(self) -> None:
        if self.micros_per_gpu_hour < 0:
            raise InvalidValue(f"the price of {self.gpu_type} cannot be {self.micros_per_gpu_hour} micros per GPU-hour")


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt used and costs.

    Attributes:
        attempt: the attempt, as ``run:fence``.
        gpu_type: type of its devices.
        gpus: the most devices it held at once.
        gpu_ms: billable GPU-milliseconds.
        micros: cost in millionths of the currency unit; None when there is no price.
    """

    attempt: str
    gpu_type: str
    gpus: int
    gpu_ms: int
    micros: int | None


class Segments(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of a run went, in milliseconds; None is "not known", which is not 0.

    Attributes:
        queued_ms: waiting for devices.
        environment_ms: making the environment ready.
        start_ms: starting the ranks.
        first_line_ms: from the call to the first line of user code.
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
        gpu_ms: billable GPU-milliseconds.
        micros: cost in millionths of the currency unit; None when there is no price.
        currency: the currency's name.
        peak_memory_bytes: most host memory used; None when not known.
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

    def rows(self) -> dict[str, str]:
        """Return what there is to say, by label; what is not known, or nothing worth saying, is left out."""
        is_run = self.runs is None
        unpriced = ", unpriced" if self.micros is None else ""
        peak = "" if self.peak_memory_bytes is None else units.format_bytes(self.peak_memory_bytes)
        rows = {
            "devices": _joined(self.devices_text(), _size_text(self)),
            "cost": f"{self.used_text()}{unpriced}",
            "use": _use_text(self.uses, self.kind),
            "time": _segments_text(self.segments),
            "start": _start_text(self) if is_run else "",
            "environment": self.environment if is_run else "",
            "secrets": ", ".join(self.secrets),
            "peak memory": peak if is_run else "",
            "gate": self.gate,
            "quarantined": ", ".join(self.quarantined),
            "tracked": self.tracked,
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
        unit = "slot" if self.kind is DeviceKind.CPU else "GPU"
        idle = "" if self.runs is None else " idle"
        cost = "" if self.micros is None else f", {units.format_micros(self.micros, self.currency)}"
        return f"{units.format_gpu_ms(self.gpu_ms, unit=unit)}{idle}{cost}"

    def text(self) -> str:
        """Return the receipt for a terminal: at most 8 lines, none of them empty."""
        rows = self.rows()
        peak = rows.get("peak memory")
        copied = self.environment not in ("", "live")
        lines = (
            _joined(*_names(self), self.state, self.reason or ""),
            _joined(rows["devices"], rows["cost"], rows.get("use", "")),
            rows.get("time", ""),
            _joined(
                rows.get("start", ""),
                f"environment: {rows['environment']}" if copied and "environment" in rows else "",
                f"peak memory {peak}" if peak else "",
            ),
            *(f"{label}: {rows[label]}" for label in ("gate", "quarantined") if label in rows),
            # The link first: it must stay whole, and 8 lines have room for one of the two.
            _joined(*(f"{label}: {rows[label]}" for label in ("tracked", "secrets", "tags") if label in rows)),
            f"notes: {rows['notes']}" if "notes" in rows else "",
        )
        return "\n".join(_printable(line) for line in lines if line)

    __str__ = text

    def html(self) -> str:
        """Return the receipt for a notebook: the same as a table, everything in it escaped."""
        shown = [(label, _printable(value)) for label, value in self.rows().items()]
        return markup.table(self.state, _printable(_joined(self.reason or "", *_names(self))), shown)

    # What IPython shows for a receipt that a cell ends with.
    _repr_html_ = html

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(self.text())


def charge(facts: Iterable[Fact], *, gpu_type: str, price: Price | None) -> Charge:
    """Return what an attempt used and costs.

    Billable time goes from the start of user code, or of holding idle devices, until the devices are free. While they
    are not, it ends provisionally at the last sign of life; the same call with the later facts gives the final charge.

    Args:
        facts: facts of one attempt, in any order, with any repetition.
        gpu_type: type of its devices.
        price: the price in force when the devices were reserved; None when there is none.

    Raises:
        InvalidValue: the facts are of several attempts, or two different ones carry the same number.
    """
    ordered = _distinct(facts)
    gpus, gpu_ms, place = 0, 0, 0
    while place < len(ordered):
        if ordered[place].kind not in _STARTS:
            place += 1
            continue
        held = len(set(ordered[place].gpus))
        billable_ms, place = _billable_ms(ordered, place)
        gpus, gpu_ms = max(gpus, held), gpu_ms + units.gpu_milliseconds(held, billable_ms)
    return Charge(
        attempt=ordered[0].attempt if ordered else "",
        gpu_type=gpu_type,
        gpus=gpus,
        gpu_ms=gpu_ms,
        micros=None if price is None else units.micros_for(gpu_ms, price.micros_per_gpu_hour),
    )


def parse_prices(table: Mapping[str, float]) -> dict[str, Price]:
    """Return prices by type name.

    A price for a family holds for each member that has none of its own. Names that no catalogue knows are kept: cards
    with own or product names have prices too.

    Args:
        table: USD per GPU-hour by type name, in any spelling.

    Raises:
        InvalidOption: a price is not a number.
        InvalidValue: a price is negative, not finite or absurd, or a type is priced twice.
    """
    prices: dict[str, Price] = {}
    for written, amount in table.items():
        name = canonical(written)
        if name in prices:
            raise InvalidValue(f"the price of {name} is given twice", hint=_PRICE_HINT)
        prices[name] = Price(gpu_type=name, micros_per_gpu_hour=_price_micros(name, amount))
    for family, members in FAMILIES.items():
        if family in prices:
            for member in members:
                prices.setdefault(member, msgspec.structs.replace(prices[family], gpu_type=member))
    return prices


def _distinct(facts: Iterable[Fact]) -> list[Fact]:
    """Return each fact once, by number."""
    ordered = sorted(set(facts), key=lambda fact: fact.seq)
    attempts = sorted({fact.attempt for fact in ordered})
    if len(attempts) > 1:
        raise InvalidValue(f"a charge is for one attempt, these facts are of {', '.join(attempts)}")
    for fact, following in pairwise(ordered):
        if fact.seq == following.seq:
            raise InvalidValue(f"two different facts of attempt {fact.attempt} carry the number {fact.seq}")
    return ordered


def _billable_ms(ordered: list[Fact], at: int) -> tuple[int, int]:
    """Return the billable time of the interval that starts at a place of the list, and the place after its end."""
    start, end = ordered[at], ordered[at].boottime_ns
    for place in range(at + 1, len(ordered)):
        fact = ordered[place]
        if fact.boot_id != start.boot_id:
            continue  # a later boot proves the attempt dead, but its boottime says nothing about when
        if fact.kind is FactKind.FREED:
            return max(0, fact.boottime_ns - start.boottime_ns) // 1_000_000, place + 1
        if fact.kind in (FactKind.ALIVE, FactKind.EXITED):
            end = max(end, fact.boottime_ns)
    return (end - start.boottime_ns) // 1_000_000, len(ordered)


def _price_micros(name: str, amount: float) -> int:
    # bool is an int to Python, and True USD is a mistake.
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        raise InvalidOption(f"the price of {name} is {amount!r}, not a number", hint=_PRICE_HINT)
    if not math.isfinite(amount) or not 0 <= amount <= _PRICE_MAX_PER_GPU_HOUR:
        raise InvalidValue(
            f"the price of {name} is {amount!r}, not between 0 and {_PRICE_MAX_PER_GPU_HOUR}", hint=_PRICE_HINT
        )
    return round(amount * units.MICROS_PER_UNIT)


def _names(receipt: Receipt) -> tuple[str, ...]:
    if receipt.runs is not None:
        return (f"session {receipt.run_id}",)
    return (f"run {receipt.run_id}", f"attempt {receipt.fence}")


def _size_text(receipt: Receipt) -> str:
    if receipt.runs is not None:
        return f"{receipt.runs} run{'' if receipt.runs == 1 else 's'}"
    return f"{receipt.world_size} rank{'' if receipt.world_size == 1 else 's'}"


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
    peaks = [use.peak_memory_bytes for use in uses if use.peak_memory_bytes is not None]
    joules = sum(use.energy_joules or 0 for use in uses)
    throttled_s = max((use.throttled_s or 0 for use in uses), default=0)
    mean = sum(percent * count for percent, count in busy) / max(1, sum(count for _, count in busy))
    idle = sum(percent < _IDLE_PERCENT for percent, count in busy if count >= _IDLE_SAMPLES_MIN)
    is_cpu = kind is DeviceKind.CPU
    form = units.format_bytes if is_cpu else units.format_gpu_memory
    return _joined(
        f"{'CPU' if is_cpu else 'GPU'} {mean:.0f} % busy" if busy else "",
        f"{idle} of {len(uses)} did nothing" if 0 < idle < len(uses) else "",
        f"{'' if is_cpu else 'GPU '}memory peak {form(max(peaks))}" if max(peaks, default=0) else "",
        units.format_joules(joules) if joules else "",
        f"throttled for {units.format_duration_ms(round(throttled_s * 1000))}" if throttled_s >= 1 else "",
    )


def _start_text(receipt: Receipt) -> str:
    start = "warm start" if receipt.warm else "cold start"
    return f"{start} ({receipt.warm_reason})" if receipt.warm_reason else start


def _joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def _printable(line: str) -> str:
    """Return the line without control characters (tags and notes may hold any) and not over the limit."""
    clean = "".join(char if char.isprintable() else " " for char in line)
    return clean if len(clean) <= _TEXT_LINE_MAX else clean[: _TEXT_LINE_MAX - 1] + "…"
