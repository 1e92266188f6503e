"""Supports the import path `from serverless_gpu.launcher import distributed` of existing code."""

from __future__ import annotations

from serverless_gpu.client.decorator import distributed

__all__ = ["distributed"]
