"""Values that users keep, and what has to come back from a pickle of them."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec

import serverless_gpu
from serverless_gpu import GPUType, errors
from tests.e2e.stable import names, places

_EXAMPLES: dict[str, Any] = {
    "Receipt": {
        **{"run_id": "01", "fence": 2, "state": "FAILED", "reason": "rank_raised", "gpu_type": "H100", "gpus": ["a"]},
        **{"kind": "fake", "segments": {"run_ms": 5}, "gpu_ms": 10, "micros": 7, "currency": "USD"},
        **{"peak_memory_bytes": 9, "warm": True, "warm_reason": "", "gate": "free", "quarantined": [], "facts": 8},
        **{"tags": {"a": "b"}, "world_size": 1, "uses": [{"uuid": "a", "samples": 3}], "bill": {"billed_ms": 10}},
    },
    "Bill": {"billed_ms": 10, "unbilled": "lost", "core_micros": 3},
    "Cost": {
        **{"micros": 7, "currency": "USD", "gpu_ms": 10, "billed_ms": 9, "unpriced_ms": 1, "queued_ms": 2},
        **{"environment_ms": 1, "start_ms": 1, "run_ms": 6, "stop_ms": 1, "gate_ms": 1, "idle_ms": 0},
        **{"attempts": 2, "gpu_type": "H100", "is_final": True, "dbu_micros": 0},
    },
    "CostEstimate": {"currency": "USD", "micros_per_hour": 2_500_000, "basis": "2.5 USD an hour"},
    "DeviceUse": {"uuid": "a", "samples": 3, "busy_percent": 50.0},
    "Estimate": {"start": "2026-11-28T12:00:00Z", "seconds": 4.0, "basis": "free", "cost": {"currency": "USD"}},
    "Segments": {"run_ms": 5, "queued_ms": 1},
    "Series": [[1.0, 2.0], [50.0, 60.0]],
    "TrackedRun": ["r", "http://127.0.0.1/#/experiments/1/runs/r", "http://127.0.0.1", "1"],
}


def recorded() -> dict[str, dict[str, Any]]:
    """Return the pickle of one value of each public class, as `pickle.dumps` makes it, and what is in the value."""
    return {
        name: {"pickle": base64.b64encode(pickle.dumps(value)).decode(), "holds": held(value)}
        for name, value in _values()
    }


def held(value: object) -> Any:
    """Return what is in a value, as JSON has it."""
    if isinstance(value, serverless_gpu.DistributedFunction):
        return {"calls": value.__wrapped__.__qualname__, "spec": msgspec.to_builtins(value.spec)}
    if isinstance(value, BaseException):
        return {"class": type(value).__name__, "text": str(value), "args": list(value.args), **vars(value)}
    return msgspec.to_builtins(value)


def loaded(text: str) -> Any:
    """Return the value in a recorded pickle."""
    return pickle.loads(base64.b64decode(text))


def _values() -> Iterator[tuple[str, object]]:
    for cls in names.exceptions():
        yield f"error {cls.__name__}", _error(cls)
    yield "DistributedFunction", serverless_gpu.distributed(gpus=2, gpu_type="CPU", tags={"a": "b"})(math.hypot)
    yield "GPUType", GPUType.H100
    for cls in (serverless_gpu.Receipt, *places.VALUES):
        yield cls.__name__, msgspec.convert(_EXAMPLES[cls.__name__], cls)


def _error(cls: type[errors.ServerlessGpuError]) -> errors.ServerlessGpuError:
    if not issubclass(cls, errors.RunError):
        return cls("what happened", hint="what to do next")
    error = cls("what happened", hint="what to do next", run_id="01", rank=3, reason="r", log_tail="last line\n")
    if isinstance(error, errors.CollectiveHang):
        error.ranks_waiting, error.ranks_elsewhere = [0, 2], [1]
    if isinstance(error, errors.CommandFailed):
        error.exit_code = 7
    return error
