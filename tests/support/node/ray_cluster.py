"""Helpers of the tests of ray cluster that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from tests.support.ray.node_tasks import share

SHARE = share(Path("/tmp/sgpu-ray-0"))
