"""Sources of past usage for `sgpu advise`: a server's ledger, this machine's runs, or a trace.

    ledger    GET /usage/demand, page by page      a row for each attempt and day; telemetry of the whole attempt
    history   receipts of this home                ended runs that have a receipt
    trace     what `sgpu simulate` reads           only submit times, durations and GPU counts of jobs

The demand curve moves each run's GPU time to the run's submission time. The advice therefore assumes that no run waits
in the queue. A session counts only while no run uses the session's devices, because runs count separately. The command
omits rows beyond the limit and incomplete receipts. A remark in the report lists omitted rows and receipts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from serverless_gpu.cli.runs.run_location import own_runs
from serverless_gpu.errors import InvalidValue
from serverless_gpu.lazy_import import load
from serverless_gpu.model.billing.advice import GpuUse, ObservedAttempt
from serverless_gpu.model.billing.pricing import Price, tariff
from serverless_gpu.model.hardware import FAMILIES, canonical, matches
from serverless_gpu.model.receipt import Receipt, observed
from serverless_gpu.node.attempt.history import RunRecord, read_run
from serverless_gpu.node.base.configuration import Configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.replay import Trace
from serverless_gpu.units import format_gpu_ms

if TYPE_CHECKING:
    from serverless_gpu.wire.billing import DemandRow, PriceList
    from serverless_gpu.wire.connection import Connection

ROWS_MAX = 200_000
_PAGE = 1000
_RUNS_MAX = 20_000
_MS_NS = 1_000_000
_SECOND_NS = 1_000_000_000


class UseFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of past usage by time, team, pool and GPU type. An empty filter field matches all usage."""

    start_ns: int  # Inclusive start of the time range; `end_ns` is the exclusive end.
    end_ns: int
    team: str = ""
    pool: str = ""
    gpu_type: str = ""


class GpuTypeUses(msgspec.Struct, kw_only=True):
    """Past usage and cost of one GPU type."""

    uses: list[GpuUse] = []  # Usage periods, which start at the submission time.
    waited_ns: int = 0  # Queue time in GPU-nanoseconds.
    gpu_ms: int = 0  # Used GPU-milliseconds; `unpriced_ms` is the unpriced part.
    unpriced_ms: int = 0
    lent_ms: int = 0  # Held GPU-milliseconds; `billed_ms` is the billed part.
    billed_ms: int = 0
    micros: int = 0  # Total charge in millionths of the currency.

    @property
    def billed(self) -> Fraction:
        """Return the billed fraction of held GPU time, or 1 if no run held a GPU."""
        return Fraction(self.billed_ms, self.lent_ms) if self.lent_ms else Fraction(1)


class PastUse(msgspec.Struct, kw_only=True):
    """Past GPU usage from one source."""

    source: str  # Name of the usage source in messages.
    start_ns: int
    end_ns: int
    kinds: dict[str, GpuTypeUses] = {}  # Past usage by GPU type.
    ran: list[ObservedAttempt] = []  # Attempts with their telemetry summary.
    attempts: int = 0  # Number of attempts or trace jobs.
    remarks: list[str] = []

    def kind(self, gpu_type: str) -> GpuTypeUses:
        """Return the mutable usage record of one GPU type."""
        return self.kinds.setdefault(gpu_type or "GPU", GpuTypeUses())


class PriceBook(msgspec.Struct, frozen=True, kw_only=True):
    """The current prices."""

    rows: tuple[Price, ...] = ()
    currency: str = "USD"

    def price(self, gpu_type: str, pool: str = "") -> int | None:
        """Return the hourly price of one device in a pool, or the price for all pools for ""."""
        own = [row for row in self.rows if row.pool == pool]
        paid = tariff(own, gpu_type=canonical(gpu_type), pool=pool, at_ns=0, currency=self.currency)
        return paid.gpu_micros_per_hour

    def any_pool(self) -> dict[str, int]:
        """Return the prices for all pools, by GPU type."""
        names = {row.resource for row in self.rows}.union(*FAMILIES.values())
        prices = {name: self.price(name) for name in sorted(names)}
        return {name: micros for name, micros in prices.items() if micros is not None}


# --- a server's ledger ------------------------------------------------------------------------------------------------


def of_server(connection: Connection, wanted: UseFilter) -> PastUse:
    """Return the past usage in a server's ledger that the caller may see.

    Raise ServerProblem if the server is unreachable.
    """
    rows, is_cut = _rows(connection, wanted)
    past = of_rows(rows, wanted)
    if is_cut:
        past.remarks.append(f"rows after the first {ROWS_MAX:,} (choose a shorter time with --last)")
    return past


def of_rows(rows: Iterable[DemandRow], wanted: UseFilter) -> PastUse:
    """Return the past usage in ledger rows. One attempt can have several ledger rows."""
    attempts: dict[tuple[str, int], list[DemandRow]] = {}
    for row in rows:
        attempts.setdefault((row.run_id, row.fence), []).append(row)
    past = PastUse(source="the server's ledger", start_ns=wanted.start_ns, end_ns=wanted.end_ns, attempts=len(attempts))
    for days in attempts.values():
        first = days[0]
        kind = past.kind(first.gpu_type)
        waited_ns = sum(row.queued_ms for row in days) * _MS_NS
        kind.waited_ns += waited_ns * first.gpus
        for row in days:
            kind.uses.append(_use(row.start_ns, row.end_ns, row.gpus, row.lent_ms, waited_ns))
            kind.gpu_ms += row.gpu_ms
            kind.lent_ms += row.lent_ms
            kind.billed_ms += row.billed_ms
            kind.micros += row.micros or 0
            kind.unpriced_ms += row.gpu_ms if row.micros is None else 0
        past.ran.append(
            ObservedAttempt(
                owner=first.owner,
                name=first.name,
                gpu_type=first.gpu_type,
                gpu_ms=first.used_ms,
                observed_ms=first.observed_ms,
                busy_ms=first.busy_ms,
                peak_memory_bytes=first.peak_memory_bytes,
            )
        )
    return _since_first_use(past)


def book_of_server(connection: Connection) -> PriceBook:
    """Return a server's current prices. Raise ServerProblem if the server is unreachable."""
    answer: PriceList = connection.ask("GET", "/prices", answer=load("serverless_gpu.wire.billing").PriceList)
    rows = (
        Price(resource=canonical(row.resource), micros_per_hour=row.micros_per_hour, pool=row.pool)
        for row in answer.prices
        if row.in_force
    )
    return PriceBook(rows=tuple(rows), currency=answer.currency)


def _rows(connection: Connection, wanted: UseFilter) -> tuple[list[DemandRow], bool]:
    wire = load("serverless_gpu.wire.billing")
    query = {"from_ns": str(wanted.start_ns), "to_ns": str(wanted.end_ns), "limit": str(_PAGE)}
    query |= {name: value for name in ("team", "pool", "gpu_type") if (value := getattr(wanted, name))}
    rows: list[DemandRow] = []
    cursor = ""
    while len(rows) < ROWS_MAX:
        asked = query | ({"cursor": cursor} if cursor else {})
        page = connection.ask("GET", "/usage/demand", answer=wire.DemandPage, query=asked)
        rows += page.rows
        cursor = page.cursor
        if not cursor:
            return rows, False
    return rows, True


# --- this machine -----------------------------------------------------------------------------------------------------


def of_home(home: Home, wanted: UseFilter) -> PastUse:
    """Return the past usage in the run directories of a home directory."""
    ids = own_runs(home)
    past = PastUse(source="the runs of this machine", start_ns=wanted.start_ns, end_ns=wanted.end_ns)
    untold = 0
    for run_id in ids[:_RUNS_MAX]:
        record = read_run(home.runs, run_id)
        if record.ended_ns is not None and record.ended_ns <= wanted.start_ns:
            continue
        team, pool = (record.spec.team, record.spec.pool) if record.spec is not None else ("", "")
        if (wanted.team and team != wanted.team) or (wanted.pool and pool != wanted.pool):
            continue
        if not _add(past, record):
            untold += 1
    if untold:
        past.remarks.append(f"{untold:,} runs that are still running or have no receipt")
    if len(ids) > _RUNS_MAX:
        past.remarks.append(f"{len(ids) - _RUNS_MAX:,} older runs")
    return _since_first_use(past)


def book_of_home(configuration: Configuration) -> PriceBook:
    """Return the prices in this machine's configuration."""
    priced = {name: paid.gpu_micros_per_hour for name, paid in configuration.prices.items()}
    rows = (Price(resource=name, micros_per_hour=micros) for name, micros in priced.items() if micros is not None)
    return PriceBook(rows=tuple(rows))


def _add(past: PastUse, record: RunRecord) -> bool:
    """Add a run's usage. Return False if the run's receipt is missing or incomplete."""
    receipt, ended_ns = record.receipt, record.ended_ns
    if receipt is None or ended_ns is None:
        return False
    is_session = receipt.runs is not None
    waited_ns = (receipt.segments.queued_ms or 0) * _MS_NS
    began_ns = record.created_ns + waited_ns if is_session else record.began_ns
    if began_ns is None:
        return False
    past.attempts += 1
    kind, gpus = past.kind(receipt.gpu_type), len(receipt.gpus)
    kind.waited_ns += waited_ns * gpus
    lent_ms = receipt.gpu_ms if is_session else (ended_ns - began_ns) // _MS_NS * gpus
    kind.uses.append(_use(began_ns, ended_ns, gpus, lent_ms, waited_ns))
    kind.gpu_ms += receipt.gpu_ms
    kind.lent_ms += lent_ms
    kind.billed_ms += receipt.gpu_ms if receipt.bill is None else receipt.bill.billed_ms
    kind.micros += receipt.micros or 0
    kind.unpriced_ms += receipt.gpu_ms if receipt.micros is None else 0
    past.ran.append(_ran_of(record, receipt))
    return True


def _ran_of(record: RunRecord, receipt: Receipt) -> ObservedAttempt:
    seen = observed(receipt.uses)
    return ObservedAttempt(
        owner="",
        name=record.spec.name if record.spec is not None else "",
        gpu_type=receipt.gpu_type,
        gpu_ms=receipt.gpu_ms,
        observed_ms=seen.observed_ms,
        busy_ms=seen.busy_ms,
        peak_memory_bytes=seen.peak_memory_bytes,
    )


# --- traces -----------------------------------------------------------------------------------------------------------


def of_trace(trace: Trace, wanted: UseFilter) -> PastUse:
    """Return the past usage between a trace's first and last submissions.

    The filter's time range does not apply to traces.
    """
    jobs = [
        job
        for job in trace.jobs
        if (not wanted.team or job.team == wanted.team) and (not wanted.pool or job.pool == wanted.pool)
    ]
    if not jobs:
        raise InvalidValue(
            f"{trace.source} has no jobs that match the filter", hint="check the options --team and --pool"
        )
    start_s, last_s = jobs[0].submit_s, jobs[-1].submit_s
    end_s = last_s if last_s > start_s else max(job.submit_s + job.duration_s for job in jobs)
    past = PastUse(source=trace.source, start_ns=_ns(start_s), end_ns=_ns(end_s), attempts=len(jobs))
    later_ms = 0
    for job in jobs:
        whole_ms = round(1000 * job.duration_s) * job.gpus
        gpu_ms = min(whole_ms, round(1000 * (end_s - job.submit_s)) * job.gpus)
        later_ms += whole_ms - gpu_ms
        if not gpu_ms:
            continue
        kind = past.kind(job.gpu_type)
        kind.uses.append(GpuUse(start_ns=_ns(job.submit_s), end_ns=_ns(job.submit_s + job.duration_s), gpus=job.gpus))
        kind.gpu_ms += gpu_ms
        kind.unpriced_ms += gpu_ms
    past.remarks = [f"{count:,} {why}" for why, count in trace.left_out.items()]
    if later_ms:
        past.remarks.append(
            f"{format_gpu_ms(later_ms)} of usage after the last submission, because later submissions are unknown"
        )
    return past


def chosen(past: PastUse, wanted: UseFilter) -> tuple[str, GpuTypeUses]:
    """Return the requested GPU type and its past usage, by default the most used GPU type."""
    gpu_type = wanted.gpu_type
    found = {name: kind for name, kind in past.kinds.items() if not gpu_type or matches(gpu_type, name)}
    if not found:
        asked = (("of", gpu_type), ("by team", wanted.team), ("in pool", wanted.pool))
        said = "".join(f" {of} {name}" for of, name in asked if name)
        there = (
            f"GPU types with usage: {', '.join(sorted(past.kinds))}"
            if past.kinds
            else "choose a longer time range, for example --last 90d"
        )
        raise InvalidValue(f"{past.source}: no usage found{said}", hint=there)
    if gpu_type:  # A GPU family includes all GPU types in the family.
        together = GpuTypeUses()
        for kind in found.values():
            together.uses += kind.uses
            for name in ("waited_ns", "gpu_ms", "unpriced_ms", "lent_ms", "billed_ms", "micros"):
                setattr(together, name, getattr(together, name) + getattr(kind, name))
        return canonical(gpu_type), together
    name = max(found, key=lambda name: (found[name].gpu_ms, name))
    return name, found[name]


def _since_first_use(past: PastUse) -> PastUse:
    """Return the past usage with a time range that starts at the first usage."""
    starts = [use.start_ns for kind in past.kinds.values() for use in kind.uses]
    past.start_ns = min(past.end_ns - 1, max(past.start_ns, min(starts, default=past.start_ns)))
    return past


def _use(start_ns: int, end_ns: int, gpus: int, lent_ms: int, waited_ns: int) -> GpuUse:
    """Return a run's usage period, moved to the run's submission time."""
    lent_ns = lent_ms * _MS_NS // gpus if gpus else 0
    start_ns, end_ns = start_ns - waited_ns, min(end_ns, start_ns + lent_ns) - waited_ns
    return GpuUse(start_ns=start_ns, end_ns=max(start_ns, end_ns), gpus=gpus)


def _ns(seconds: float) -> int:
    return round(seconds * _SECOND_NS)


def remarks(past: PastUse) -> Iterator[str]:
    """Yield the omissions as lines of text."""
    yield from (f"left out: {remark}" for remark in past.remarks)
