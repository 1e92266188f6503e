"""Helpers of the tests of recorded home that other tests use as well."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import serverless_gpu

Sgpu = Callable[..., str]
TRAINED = [{"rank": rank, "of": 2, "type": serverless_gpu.GPUType.H100, "loss": [1.5, 0.25]} for rank in (0, 1)]
STATES = {
    "trains": "SUCCEEDED",
    "in_session": "SUCCEEDED",
    "session": "SUCCEEDED",
    "fails": "FAILED",
    "refuses": "FAILED",
    "takes_long": "TIMED_OUT",
    "crashes": "FAILED",
    "leaves_memory": "SUCCEEDED",
}


def same_python(expected: Any) -> None:
    """Skip where results cannot be loaded: they are pickles of one minor version of Python."""
    recorded = tuple(expected["python"])
    if sys.version_info[:2] != recorded:
        pytest.skip(f"results were recorded with Python {recorded[0]}.{recorded[1]}, which alone loads them")
