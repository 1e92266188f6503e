"""When GPUs were had, and by whom: rows of the ledger as `sgpu advise` reads them.

GET    /usage/demand?from_ns&to_ns&team&pool&gpu_type&limit&cursor   → DemandPage
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer


class DemandRow(Answer, frozen=True, kw_only=True):
    """What one attempt used on one day (UTC), as it holds now.

    Attributes:
        day: days since 1970-01-01.
        name: of the run.
        owner: whose run it was.
        reserved: whether the pool was.
        start_ns: nanoseconds since 1970; `end_ns` likewise.
        gpus: the most devices lent at once.
        queued_ms: for which the attempt waited; 0 but on its first day.
        gpu_ms: device-milliseconds that count as use; `billed_ms` those that cost something, or would.
        lent_ms: device-milliseconds for which devices were lent, all segments together.
        micros: millionths of the currency unit; None where there is no price.
        used_ms: device-milliseconds of the whole attempt, on each of its days; so are the next three.
        observed_ms: device-milliseconds that telemetry saw; `busy_ms` those in which a device worked.
        peak_memory_bytes: the most of one device; None where that is not known.
    """

    run_id: str
    fence: int
    day: int
    name: str
    owner: str
    team: str
    pool: str
    reserved: bool
    gpu_type: str
    start_ns: int
    end_ns: int
    gpus: int
    queued_ms: int
    gpu_ms: int
    billed_ms: int
    lent_ms: int
    currency: str
    micros: int | None = None
    used_ms: int = 0
    observed_ms: int = 0
    busy_ms: int = 0
    peak_memory_bytes: int | None = None


class DemandPage(Answer, frozen=True, kw_only=True):
    """A page of rows; those of one attempt are in the order of their days.

    Attributes:
        cursor: what the next page is asked for with; "" when there is none.
    """

    rows: tuple[DemandRow, ...]
    cursor: str = ""
