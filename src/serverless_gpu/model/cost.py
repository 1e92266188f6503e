"""Costs of runs, past and estimated: values that clients show, made of ledger lines and a tariff.

    lines of each attempt ─▶ added up ─────────────────────────────▶ `Cost`            what it used, and what that costs
    devices, tariff ─┬─ × its time limit ──────────────────────────┐
                     └─ × how long earlier runs of its name took ──┴▶ `CostEstimate`   at most, and about

Each cost is rounded up to a whole micro once, as a charge is. Without a price there is no cost, and the time is shown.
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

_MICROS_MAX = 10**18  # a million million units of money: it has to travel in 64 bits
_NOT_BILLED = "what the platform lost, or what came after the grace of a stop"


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a run used so far, over all of its attempts, and what that costs.

    Attributes:
        micros: millionths of the currency unit; None where nothing that was used has a price.
        currency: its name.
        gpu_ms: device-milliseconds that were used; `billed_ms` those that count: not where the platform failed.
        unpriced_ms: device-milliseconds among them that have no price.
        dbu_micros: millionths of a DBU.
        queued_ms: milliseconds for which the run waited; the segments after it are device-milliseconds.
        attempts: how many there were.
        is_final: whether nothing more will come.
        gpu_type: of the devices of the last attempt, or "".
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
        """Return it in one line, for example ``"23.92 USD · 8.0 GPU-hours · 2 attempts · so far"``."""
        parts = [self.amount(), self._used(self.gpu_ms) if self.gpu_ms else "", *self._remarks()]
        return " · ".join(part for part in parts if part)

    __str__ = text

    def amount(self) -> str:
        """Return the money, or that there is none to say: ``"23.92 USD"``, ``"unpriced"``, ``"nothing used"``."""
        if self.micros is not None:
            return units.format_micros(self.micros, self.currency)
        return "unpriced" if self.billed_ms else "nothing to pay" if self.gpu_ms else "nothing used"

    def used_text(self) -> str:
        """Return the time and the money as a receipt does, and whether more may come: for a column of a table."""
        money = "" if self.micros is None else f", {self.amount()}"
        return f"{self._used(self.gpu_ms)}{money}{'' if self.is_final else ' so far'}"

    def rows(self) -> dict[str, str]:
        """Return the rows by label, without empty ones."""
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
        """Return it for a notebook: the same as a table."""
        said = "the run has ended" if self.is_final else "so far: the run goes on, or its last word has not come"
        rows = {label: value for label, value in self.rows().items() if label != "cost"}
        return markup.table(self.amount(), said, list(rows.items()))

    # What IPython shows for a cost that a cell ends with.
    _repr_html_ = html

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(self.text())

    def _remarks(self) -> list[str]:
        partly = self.unpriced_ms if self.micros is not None else 0
        not_billed_ms = self.gpu_ms - self.billed_ms
        return [
            f"{self._used(partly)} of it unpriced" if partly else "",
            f"{self._used(not_billed_ms)} of it not billed" if not_billed_ms else "",
            f"{self.attempts} attempts" if self.attempts > 1 else "",
            "" if self.is_final else "so far",
        ]

    def _used(self, gpu_ms: int) -> str:
        return units.format_gpu_ms(gpu_ms, unit=time_unit([self.gpu_type]))


class AttemptUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt used."""

    lines: tuple[LedgerLine, ...]  # of its days
    currency: str = "USD"  # of their costs
    gpu_type: str = ""  # of its devices
    queued_ms: int = 0  # for how long the run waited for it
    is_final: bool = True  # whether nothing more of it will come


def together(attempts: Iterable[AttemptUse], *, waits_ms: int = 0, is_final: bool = True) -> Cost:
    """Return what a run used over all of its attempts, which are in order.

    `waits_ms` is for how long it has waited by now for the next one; `is_final` when there will be no other attempt.
    """
    found = list(attempts)
    lines = [line for each in found for line in each.lines]
    last = found[-1] if found else AttemptUse(lines=())
    # What was paid in another currency, before the server's was changed, is no money here.
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


# --- before it runs ---------------------------------------------------------------------------------------------------


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt would have, and what that costs."""

    gpu_type: str  # of all its devices
    count: int  # how many
    cpus: int = 0  # cores that it asks for, 0 where it asks for no number of them
    memory_bytes: int = 0  # host memory that it asks for, 0 where it asks for no amount
    tariff: Tariff = UNPRICED  # as it is in force now

    def text(self) -> str:
        """Return how many of what: ``"8 H100"``, ``"1 CPU slot"``."""
        if self.gpu_type == CPU:
            return f"{self.count} CPU slot{'' if self.count == 1 else 's'}"
        return f"{self.count} {self.gpu_type or 'GPUs'}"


class AttemptDuration(msgspec.Struct, frozen=True, kw_only=True):
    """How long an attempt would take, in seconds; None where that is not known."""

    # At most, from its first line on: it is stopped before, so that its grace is over by then.
    limit_s: float | None = None
    limit: str = "timeout"  # what limits it: ``"timeout"``, ``"the policy's longest time"``
    expected_s: float | None = None  # how long 4 of 5 earlier runs of its name had their devices, or less
    tries: int = 1  # how many attempts it asks for at most, where something of its own fails
    resumes: bool = False  # whether it goes on as another attempt, as often as it has to make room


class CostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would cost if it were asked for now.

    Attributes:
        currency: of the money.
        micros_per_hour: of all its devices together; None where there is no price.
        at_timeout_micros: what it costs at most, at its time limit; None where it has none, or no price.
        resumes: whether that is of one go: it goes on as another attempt, which has as long again.
        expected_micros: at the duration that earlier runs of its name had; None where there were none, or no price.
        expected_s: that duration, in seconds.
        basis: what that rests on, or why it is unknown, in words.
        at_timeout_gpu_ms: device-milliseconds at its time limit; None where it has none.
        expected_gpu_ms: those at the expected duration; None where that is not known.
        gpu_type: of the devices, or "".
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
        """Return it in words, for example ``"about 7.97 USD, at most 23.92 USD: 8 H100 × 2.99 USD = …"``."""
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
    """Return what a run would cost.

        rate     = devices × price of one + cores × price of one + GiB × price of one      an hour, each if it is priced
        at most  = rate × time limit × attempts                                            about = rate × expected time

    `advice` names what sets a price, for those who find none.
    """
    tariff = devices.tariff
    most_ms = None if lasting.limit_s is None else round(lasting.limit_s * 1000) * lasting.tries
    about_ms = None if lasting.expected_s is None else round(lasting.expected_s * 1000)
    past = "of its name too few runs have ended well to say how long it takes"
    if lasting.expected_s is not None:
        past = f"4 of 5 earlier runs of its name took {_duration(lasting.expected_s)} or less"
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
    """Return what the devices cost for a while, rounded up once; None without a price, or beyond what can be paid."""
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
    """Return what an hour costs, as the sum that it is."""
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
    return f"{' + '.join(parts)} = {'too much to say' if rate is None else f'{price(rate)} an hour'}"


def _length_text(lasting: AttemptDuration) -> str:
    if lasting.limit_s is None:
        return "it has no time limit"
    times = "" if lasting.tries == 1 else f" in each of up to {lasting.tries} attempts"
    more = ", and as long again each time it goes on (resume)" if lasting.resumes else ""
    return f"{lasting.limit} {_duration(lasting.limit_s)}{times}{more}"


def _duration(seconds: float) -> str:
    ms = round(seconds * 1000)
    return units.format_duration_ms(ms) if ms % units.MS_PER_DAY else units.format_days_ms(ms)
