"""Helpers of the tests of account that other tests use as well."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.protocol import Context, Launch

DEVICES = tuple(
    Device(uuid=f"FAKE-H100-{n}", index=n, type="H100", memory_bytes=80 << 30, kind=DeviceKind.FAKE) for n in range(2)
)
CONTEXT = Context(
    python="python", flags=(), environ={}, cwd="/", umask=0o22, argv=("",), sys_path=(), descriptors_max=1024
)
START_NS, WALL_NS = 1_000_000_000_000, 1_800_000_000_000_000_000


def launch(directory: Path, tariff: Tariff = UNPRICED) -> Launch:
    return Launch(
        run_id="r",
        fence=2,
        directory=str(directory),
        spec=RunSpec(tags={"team": "search"}),
        candidates=DEVICES,
        world_size=2,
        context=CONTEXT,
        called_ns=START_NS,
        tariff=tariff,
    )
