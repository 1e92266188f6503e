"""Helpers of the tests of ledger that other tests use as well."""

from __future__ import annotations

from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.model.receipt import Receipt, Segments

GPUS = ("GPU-a", "GPU-b")
FULL = Receipt(
    run_id="01jabc",
    fence=2,
    state="FAILED",
    reason="user_error",
    gpu_type="H100",
    gpus=GPUS,
    kind=DeviceKind.GPU,
    segments=Segments(
        environment_ms=12, start_ms=34, first_line_ms=50, run_ms=185_000, stop_ms=400, gate_ms=120, queued_ms=0
    ),
    gpu_ms=371_040,
    micros=308_167,
    currency="USD",
    peak_memory_bytes=1_234_567_890,
    warm=True,
    warm_reason="",
    gate="2 GPUs verified free: no process, memory at baseline",
    quarantined=("GPU-b",),
    tags={"team": "search", "job": "nightly"},
    facts=7,
    world_size=2,
    notes=("rank 1 failed as a consequence", "12 lines dropped"),
)
