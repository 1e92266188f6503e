"""Alias module for existing code that imports `distributed` from `serverless_gpu.launcher`."""

from __future__ import annotations

from serverless_gpu.client.decorator import distributed

__all__ = ["distributed"]
