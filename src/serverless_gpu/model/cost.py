"""What a run has cost, or would: values that clients show. How they come about is `ledger.py` and `pricing.py`."""

from __future__ import annotations

import msgspec


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a run used so far, over all of its attempts, and what that costs.

    Attributes:
        micros: millionths of the currency unit; None where nothing that was used has a price.
        currency: its name.
        gpu_ms: GPU-milliseconds that were used; `billed_ms` those that count: not where the platform failed.
        unpriced_ms: GPU-milliseconds among them that have no price.
        dbu_micros: millionths of a DBU.
        queued_ms: milliseconds for which the run waited; the segments after it are GPU-milliseconds.
        attempts: how many there were.
        is_final: whether nothing more will come.
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


class CostEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """What a run would cost if it were asked for now.

    Attributes:
        currency: of the money.
        micros_per_hour: of all its devices together; None where there is no price.
        at_timeout_micros: what it costs at most, at its time limit; None where it has none, or no price.
        expected_micros: at the duration that earlier runs of its name had; None where there were none, or no price.
        expected_s: that duration, in seconds.
        basis: what that rests on, or why it is unknown, in words.
    """

    currency: str
    micros_per_hour: int | None = None
    at_timeout_micros: int | None = None
    expected_micros: int | None = None
    expected_s: float | None = None
    basis: str = ""
