"""The import path `from serverless_gpu.ray import ray_launch`; the launcher itself is not in this version."""

from __future__ import annotations

from typing import NoReturn

from serverless_gpu.errors import ServerlessGpuError

__all__ = ["ray_launch"]


def ray_launch(*args: object, **kwargs: object) -> NoReturn:
    """Refuse: a private Ray cluster per run is not in this version yet.

    Raises:
        ServerlessGpuError: always.
    """
    raise ServerlessGpuError(
        "ray_launch is not available yet in this version of serverless-gpu",
        hint="run a Ray driver yourself inside @distributed, or use @distributed without Ray",
    )
