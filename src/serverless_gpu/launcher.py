"""The import path `from serverless_gpu.launcher import distributed`, as existing code writes it."""

from __future__ import annotations

from serverless_gpu.client.decorator import distributed

__all__ = ["distributed"]
