"""Past and estimated costs of runs, computed from ledger lines and a tariff.

    lines of each attempt ─▶ added up ─────────────────────────────▶ `Cost`            use so far, and its cost
    devices, tariff ─┬─ × the time limit ──────────────────────────┐
                     └─ × duration of earlier runs of its name ────┴▶ `CostEstimate`   maximum and expected cost

The functions round each cost up to a whole micro once, as the ledger does. For devices without a price, clients show
only the device time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from serverless_gpu import units
from serverless_gpu.model import markup
from serverless_gpu.model.billing import pricing
from serverless_gpu.model.billing.ledger import LedgerLine
from serverless_gpu.model.billing.metering import SEGMENTS
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.hardware import CPU, time_unit
from serverless_gpu.model.receipt import TextPrinter

_MICROS_MAX = 10**18  # Maximum cost: one trillion currency units, which fits in 64 bits.
_NOT_BILLED = "device time of platform failures, or after the grace period of a stop"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The device usage of a run over all attempts so far, and its cost.

    Attributes:
        micros: cost in millionths of the currency unit, or None if no used device has a price.
        currency: name of the currency.
        gpu_ms: used device-milliseconds. `billed_ms` excludes attempts that failed because of the platform.
        unpriced_ms: billed device-milliseconds that have no price.
        dbu_micros: cost in millionths of a DBU.
        queued_ms: milliseconds that the run waited. The fields of later segments are in device-milliseconds.
        attempts: number of attempts.
        is_final: True if no further device usage can follow.
        gpu_type: device type of the last attempt, or "".
    """

    micros: int | None
    currency: str
    gpu_ms: int
    billed_ms: int
    unpriced_ms: int = 0
    dbu_micros: int = 0
    queued_ms: int = 0
    environment_ms: int = 0
    start_ms: int = 0
    run_ms: int = 0
    stop_ms: int = 0
    gate_ms: int = 0
    idle_ms: int = 0
    attempts: int = 1
    is_final: bool = True
    gpu_type: str = ""

    def text(self) -> str:
        """Return the cost in one line, for example ``"23.92 USD · 8.0 GPU-hours · 2 attempts · so far"``."""
        parts = [self.amount(), self._used(self.gpu_ms) if self.gpu_ms else "", *self._remarks()]
        return " · ".join(part for part in parts if part)

    __str__ = text

    def amount(self) -> str:
        """Return the cost as text, such as ``"23.92 USD"``, ``"unpriced"`` or ``"nothing used"``."""
        if self.micros is not None:
            return units.format_micros(self.micros, self.currency)
        return "unpriced" if self.billed_ms else "nothing to pay" if self.gpu_ms else "nothing used"

    def used_text(self) -> str:
        """Return device time and cost for a table column, with ``so far`` while more usage can follow."""
        money = "" if self.micros is None else f", {self.amount()}"
        return f"{self._used(self.gpu_ms)}{money}{'' if self.is_final else ' so far'}"

    def rows(self) -> dict[str, str]:
        """Return the non-empty rows of the cost table by label."""
        not_billed_ms = self.gpu_ms - self.billed_ms
        spent = [(name.removesuffix("_ms"), getattr(self, name)) for name in SEGMENTS]
        rows = {
            "cost": self.amount(),
            "used": self._used(self.gpu_ms),
            "not billed": f"{self._used(not_billed_ms)}: {_NOT_BILLED}" if not_billed_ms else "",
            "unpriced": self._used(self.unpriced_ms) if self.unpriced_ms else "",
            "DBU": f"{self.dbu_micros / units.MICROS_PER_UNIT:,.6f}".rstrip("0").rstrip(".") if self.dbu_micros else "",
            "waited": units.format_duration_ms(self.queued_ms) if self.queued_ms else "",
            "time": " · ".join(f"{part} {self._used(ms)}" for part, ms in spent if ms),
            "attempts": str(self.attempts) if self.attempts > 1 else "",
        }
        return {label: value for label, value in rows.items() if value}

    def html(self) -> str:
        """Return the cost as an HTML table for a notebook."""
        said = (
            "the run has ended" if self.is_final else ("so far: the run is active, or its last report has not arrived")
        )
        rows = {label: value for label, value in self.rows().items() if label != "cost"}
        return markup.table(self.amount(), said, list(rows.items()))

    # IPython displays a cost with `_repr_html_`.
    _repr_html_ = html

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(self.text())

    def _remarks(self) -> list[str]:
        partly = self.unpriced_ms if self.micros is not None else 0
        not_billed_ms = self.gpu_ms - self.billed_ms
        return [
            f"{self._used(partly)} unpriced" if partly else "",
            f"{self._used(not_billed_ms)} not billed" if not_billed_ms else "",
            f"{self.attempts} attempts" if self.attempts > 1 else "",
            "" if self.is_final else "so far",
        ]

    def _used(self, gpu_ms: int) -> str:
        return units.format_gpu_ms(gpu_ms, unit=time_unit([self.gpu_type]))


class AttemptUse(msgspec.Struct, frozen=True, kw_only=True):
    """The device usage of one attempt."""

    lines: tuple[LedgerLine, ...]  # One ledger line for each day of the attempt.
    currency: str = "USD"  # Currency of the costs in `lines`.
    gpu_type: str = ""  # Type of the attempt's devices.
    queued_ms: int = 0  # Time that the run waited for this attempt.
    is_final: bool = True  # True if no further device usage of the attempt can follow.


def together(attempts: Iterable[AttemptUse], *, waits_ms: int = 0, is_final: bool = True) -> Cost:
    """Return the device usage and cost of a run from its attempts in order.

    `waits_ms` is the time that the run has waited for the next attempt. `is_final` is True if no further attempt
    follows.
    """
    found = list(attempts)
    lines = [line for each in found for line in each.lines]
    last = found[-1] if found else AttemptUse(lines=())
    # The total cost omits amounts in a currency that the server used earlier.
    ours = [line for each in found if each.currency == last.currency for line in each.lines]
    priced = [line.micros for line in ours if line.micros is not None]
    priced_ms = sum(line.billed_ms for line in ours if line.micros is not None)
    return Cost(
        micros=sum(priced) if priced else None,
        currency=last.currency,
        gpu_ms=sum(line.gpu_ms for line in lines),
        billed_ms=sum(line.billed_ms for line in lines),
        unpriced_ms=sum(line.billed_ms for line in lines) - priced_ms,
        dbu_micros=sum(line.dbu_micros for line in lines),
        queued_ms=sum(each.queued_ms for each in found) + waits_ms,
        **{name: sum(getattr(line, name) for line in lines) for name in SEGMENTS},
        attempts=len(found),
        is_final=is_final and all(each.is_final for each in found),
        gpu_type=last.gpu_type,
    )


# --- estimates --------------------------------------------------------------------------------------------------------


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a planned attempt, and their tariff."""

    gpu_type: str  # Type of all devices.
    count: int  # Number of devices.
    cpus: int = 0  # Requested cores, or 0 if the user requested no cores.
    memory_bytes: int = 0  # Requested host memory in bytes, or 0 if the user requested no memory.
    tariff: Tariff = UNPRICED  # Prices that currently apply to the devices.

    def text(self) -> str:
        """Return the number and type of the devices, such as ``"8 H100"`` or ``"1 CPU slot"``."""
        if self.gpu_type == CPU:
            return f"{self.count} CPU slot{'' if self.count == 1 else 's'}"
        return f"{self.count} {self.gpu_type or 'GPUs'}"


class AttemptDuration(msgspec.Struct, frozen=True, kw_only=True):
    """Time limit and expected duration of an attempt, in seconds."""

    # Time limit from the first line of user code, including the grace period after the stop request.
    limit_s: float | None = None
    limit: str = "timeout"  # Name of the time limit, either ``"timeout"`` or ``"the policy's longest time"``.
    # Expected duration, the 80th percentile of the device times of earlier runs with the same name.
    expected_s: float | None = None
    tries: int = 1  # Maximum number of attempts if the run's own code fails.
    resumes: bool = False  # True if the run continues as another attempt after each preemption.


class CostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated cost of a run at current prices.

    Attributes:
        currency: currency of all amounts.
        micros_per_hour: price of all devices together for one hour, or None without a price.
        at_timeout_micros: maximum cost, at the time limit, or None without a time limit or a price.
        resumes: True if the maximum covers one attempt only. Each further attempt then has the same limit again.
        expected_micros: cost at the expected duration, or None without earlier runs of the same name or without a
            price.
        expected_s: expected duration, in seconds.
        basis: text that explains the amounts, or why the amounts are unknown.
        at_timeout_gpu_ms: device-milliseconds at the time limit, or None without a time limit.
        expected_gpu_ms: device-milliseconds at the expected duration, or None if unknown.
        gpu_type: type of the devices, or "".
    """

    currency: str
    micros_per_hour: int | None = None
    at_timeout_micros: int | None = None
    expected_micros: int | None = None
    expected_s: float | None = None
    basis: str = ""
    at_timeout_gpu_ms: int | None = None
    expected_gpu_ms: int | None = None
    resumes: bool = False
    gpu_type: str = ""

    def text(self) -> str:
        """Return the expected cost, the maximum cost and the calculation in one line."""
        about = self._amount(self.expected_micros, self.expected_gpu_ms)
        most = self._amount(self.at_timeout_micros, self.at_timeout_gpu_ms)
        rate = (
            ""
            if self.micros_per_hour is None
            else f"{units.format_micros(self.micros_per_hour, self.currency)} an hour"
        )
        amounts = [
            f"about {about}" if about else "",
            f"at most {most}{' in one go' if self.resumes else ''}" if most else "",
        ]
        said = ", ".join(amount for amount in amounts if amount) or rate or "unknown"
        return f"{said}: {self.basis}" if self.basis else said

    __str__ = text

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(self.text())

    def _amount(self, micros: int | None, gpu_ms: int | None) -> str:
        if micros is not None:
            return units.format_micros(micros, self.currency)
        return "" if gpu_ms is None else units.format_gpu_ms(gpu_ms, unit=time_unit([self.gpu_type]))


def estimated(devices: Devices, lasting: AttemptDuration, *, advice: str = "") -> CostEstimate:
    """Return the estimated cost of a run.

        rate     = devices × price of one + cores × price of one + GiB × price of one      per hour; priced parts only
        at most  = rate × time limit × attempts                                            about = rate × expected time

    `advice` names the command that sets a price for unpriced devices.
    """
    tariff = devices.tariff
    most_ms = None if lasting.limit_s is None else round(lasting.limit_s * 1000) * lasting.tries
    about_ms = None if lasting.expected_s is None else round(lasting.expected_s * 1000)
    past = "too few earlier runs of the same name succeeded to estimate the duration"
    if lasting.expected_s is not None:
        past = f"4 of 5 earlier runs of the same name took {_duration(lasting.expected_s)} or less"
    return CostEstimate(
        currency=tariff.currency,
        micros_per_hour=_micros(devices, units.MS_PER_HOUR),
        at_timeout_micros=None if most_ms is None else _micros(devices, most_ms),
        expected_micros=None if about_ms is None else _micros(devices, about_ms),
        expected_s=lasting.expected_s,
        basis="; ".join(filter(None, (_rate_text(devices, advice), _length_text(lasting), past))),
        at_timeout_gpu_ms=None if most_ms is None else devices.count * most_ms,
        expected_gpu_ms=None if about_ms is None else devices.count * about_ms,
        resumes=lasting.resumes,
        gpu_type=devices.gpu_type,
    )


def _micros(devices: Devices, ms: int) -> int | None:
    """Return the cost of the devices for a duration, rounded up once.

    Returns None if the devices have no price or the cost exceeds `_MICROS_MAX`.
    """
    found = pricing.cost_of(
        devices.tariff,
        ms,
        gpu_type=devices.gpu_type,
        gpus=devices.count,
        cpus=devices.cpus,
        memory_bytes=devices.memory_bytes,
    )
    return None if found is None or found > _MICROS_MAX else found


def _rate_text(devices: Devices, advice: str) -> str:
    """Return the price per hour as text, as the sum of devices, cores and memory."""
    tariff = devices.tariff
    rate = _micros(devices, units.MS_PER_HOUR)
    if tariff.gpu_micros_per_hour is None:
        hint = f" ({advice})" if advice else ""
        return f"{devices.text()}, unpriced{hint}"

    def price(micros: int) -> str:
        return units.format_micros(micros, tariff.currency)

    parts = [f"{devices.text()} × {price(tariff.gpu_micros_per_hour)}"]
    cores = pricing.cores_beside(devices.gpu_type, devices.count, devices.cpus)
    if cores and tariff.core_micros_per_hour:
        parts.append(f"{cores} cores × {price(tariff.core_micros_per_hour)}")
    if devices.memory_bytes and tariff.memory_micros_per_hour:
        parts.append(f"{devices.memory_bytes / (1 << 30):g} GiB × {price(tariff.memory_micros_per_hour)}")
    return f"{' + '.join(parts)} = {'more than the maximum amount' if rate is None else f'{price(rate)} an hour'}"


def _length_text(lasting: AttemptDuration) -> str:
    if lasting.limit_s is None:
        return "the run has no time limit"
    times = "" if lasting.tries == 1 else f" in each of up to {lasting.tries} attempts"
    more = ", and the same again each time the run resumes" if lasting.resumes else ""
    return f"{lasting.limit} {_duration(lasting.limit_s)}{times}{more}"


def _duration(seconds: float) -> str:
    ms = round(seconds * 1000)
    return units.format_duration_ms(ms) if ms % units.MS_PER_DAY else units.format_days_ms(ms)
