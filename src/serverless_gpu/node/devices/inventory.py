"""Inventory of this node: its real GPUs, its CPU slots, and the user's own types and prices.

Refreshed after a minute, because drivers come and go. Callers declare fakes call by call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hardware import Device, DeviceKind, GpuType, parse_fake
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.configuration import Configuration, read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.gpus import CpuProvider, NvmlProvider

_FRESH_S = 60.0


class Inventory:
    """The node's devices and the user's configuration."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._clock = SystemClock()
        self._machine = NvmlProvider()
        self._cpu = CpuProvider()
        self._seen_ns: int | None = None
        self._seen_written = 0
        self._devices: tuple[Device, ...] = ()
        self._types: tuple[GpuType, ...] = ()
        self._prices: dict[str, Tariff] = {}
        self._problem = ""
        self._unavailable: tuple[str, ...] = ()
        self._checkpoints = ""

    def greeting(self, version: str) -> protocol.Greeting:
        """Return the greeting for every client."""
        return protocol.Greeting(
            protocol=protocol.PROTOCOL,
            version=version,
            pid=os.getpid(),
            devices=self._devices,
            own_types=self._types,
            prices=self._prices,
            problem=self._problem,
            unavailable=self._unavailable,
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return what this node has, as of the last look."""
        return self._devices

    @property
    def silence(self) -> str:
        """Return why the driver gave no answer at the last look, or ""."""
        return self._machine.silence

    @property
    def checkpoints(self) -> Path:
        """Return the directory of checkpoints."""
        return Path(self._checkpoints) if self._checkpoints else self._home.checkpoints

    def refresh(self) -> None:
        """Look again, if the last look is old or the configuration was written to; NVML may take its time."""
        now_ns = self._clock.boottime_ns()
        written = 0
        with contextlib.suppress(OSError):
            written = (self._home.root / "config.toml").stat().st_mtime_ns
        if self._seen_ns is None or now_ns - self._seen_ns > _FRESH_S * 1e9 or written != self._seen_written:
            self._look()
            self._seen_ns, self._seen_written = self._clock.boottime_ns(), written

    def _look(self) -> None:
        self._problem = ""
        try:
            configuration = read_configuration(self._home)
        except InvalidValue as error:
            self._problem, configuration = str(error), Configuration(prices=self._prices, checkpoints=self._checkpoints)
        types, self._prices = configuration.types, configuration.prices
        self._checkpoints = configuration.checkpoints
        if types != self._types:
            self._types, self._machine = types, NvmlProvider(own=types)
        found = self._machine.devices()
        if self._machine.silence:  # the GPUs are still there, but not lent while they cannot be verified
            found = tuple(device for device in self._devices if device.kind is DeviceKind.GPU)
        self._unavailable = tuple(f"{gpu.name}: {gpu.reason}" for gpu in self._machine.unavailable())
        self._devices = (*found, *self._cpu.devices())


def offered(greeting: protocol.Greeting, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return what a node has; devices declared in `environ` replace real ones. Raises InvalidValue."""
    if greeting.problem:
        raise InvalidValue(greeting.problem)
    fakes = environ.get("SERVERLESS_GPU_FAKE")
    if not fakes:
        return greeting.devices
    cpus = [device for device in greeting.devices if device.kind is DeviceKind.CPU]
    return (*parse_fake(fakes, greeting.own_types), *cpus)
