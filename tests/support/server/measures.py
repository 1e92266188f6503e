"""Helpers of the tests of measures that other tests use as well."""

from __future__ import annotations

from serverless_gpu.server.core.server_metrics import ServerMetrics


def value(measures: ServerMetrics, name: str, **labels: str) -> float:
    return measures.registry.get_sample_value(name, labels) or 0.0
