"""Provides fakes and helpers for tests of code that uses serverless-gpu.

    FakeGpus()             declared GPUs with processes, memory and telemetry that a test sets
    FakeClock()            a clock that a test moves
    agent_status(home)     the runs and warm processes of a home's agent
    stop_agent(home)       stops a home's agent and all of its warm processes
    SimulatedEngine(…)     an engine whose nodes exist only in a test

Import all fakes and helpers from `serverless_gpu.testing`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.client.agent import agent_status, stop_agent
from serverless_gpu.engines.simulated_engine import SimulatedEngine
from serverless_gpu.errors import InvalidOption
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.telemetry import GpuSample
from serverless_gpu.node.base.home import find_home
from serverless_gpu.node.devices.kernel_log import FAKE_FILE

__all__ = ["FakeClock", "FakeGpus", "SimulatedEngine", "agent_status", "stop_agent"]


class FakeGpus:
    """Controls the simulated GPUs of one installation (`SERVERLESS_GPU_FAKE`).

    Args:
        home: the home directory, created if needed. None means the home for runs of this process.
    """

    def __init__(self, home: Path | None = None) -> None:
        root = find_home(os.environ).root if home is None else home
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = root / "fake_gpus.json"
        self._state: dict[str, dict[str, object]] = {}

    def set(self, uuid: str, *, memory_used_bytes: int = 0, processes: Mapping[int, int] | None = None) -> None:
        """Set the values that NVML reports for one GPU.

        Args:
            uuid: UUID of the GPU, for example ``"FAKE-H100-0"``.
            memory_used_bytes: memory in use.
            processes: memory in bytes by pid.
        """
        listed = [{"pid": pid, "memory_bytes": held} for pid, held in (processes or {}).items()]
        self._add(uuid, {"memory_used_bytes": memory_used_bytes, "processes": listed})

    def shows(self, uuid: str, **figures: float) -> None:
        """Set the values that telemetry reports for one GPU. The rank on the GPU provides all other values.

        Args:
            uuid: UUID of the GPU, for example ``"FAKE-H100-0"``.
            figures: values by name: ``busy_percent``, ``memory_bytes``, ``power_watts``, ``power_limit_watts``,
                ``temperature_celsius``, ``sm_megahertz``, ``memory_megahertz``, ``pcie_receive_bytes_s``,
                ``pcie_transmit_bytes_s``, ``nvlink_receive_bytes_s``, ``nvlink_transmit_bytes_s``, ``throttle`` (NVML's
                bits), ``ecc_errors``.

        Raises:
            InvalidOption: a figure is unknown.
        """
        for name in figures:
            if name not in GpuSample.__struct_fields__:
                known = ", ".join(GpuSample.__struct_fields__)
                raise InvalidOption(f"GPU telemetry has no figure {name!r}", hint=f"figures: {known}")
        self._add(uuid, {"sampled": figures})

    def xid(self, uuid: str, number: int, text: str = "") -> None:
        """Write the kernel log line that the driver writes when a GPU fails.

        Args:
            uuid: UUID of a GPU that `SERVERLESS_GPU_FAKE` declares, for example ``"FAKE-H100-0"``.
            number: the Xid. 79 means that the GPU has fallen off the bus.
            text: further text of the driver.

        Raises:
            InvalidOption: no such GPU is declared.
        """
        declared = {device.uuid: device.pci for device in parse_fake(os.environ.get("SERVERLESS_GPU_FAKE", ""))}
        if uuid not in declared:
            raise InvalidOption(f"GPU {uuid} is not declared", hint=f"declared: {', '.join(declared) or 'none'}")
        microseconds = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        said = f"4,1,{microseconds},-;NVRM: Xid (PCI:{declared[uuid]}): {number}, {text}\n"
        fd = os.open(self._path.with_name(FAKE_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, said.encode())
        finally:
            os.close(fd)

    def hangs(self, hanging: bool = True) -> None:
        """Make the simulated driver hang or recover.

        While the driver hangs, the driver does not answer queries about simulated GPUs.

        Args:
            hanging: True to hang, False to recover.
        """
        for device in parse_fake(os.environ.get("SERVERLESS_GPU_FAKE", "")):
            self._state[device.uuid] = {**self._state.get(device.uuid, {}), "hangs": hanging}
        self._write()

    def clear(self, uuid: str) -> None:
        """Reset all values that tests have set for a GPU."""
        self._state.pop(uuid, None)
        self._write()

    def _add(self, uuid: str, what: Mapping[str, object]) -> None:
        self._state[uuid] = {**self._state.get(uuid, {}), **what}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(self._state))
        temporary.replace(self._path)


class FakeClock:
    """A simulated clock that tests advance."""

    def __init__(self, *, boottime_ns: int = 1_000_000_000_000, wall_ns: int = 1_800_000_000_000_000_000) -> None:
        self._boottime_ns = boottime_ns
        self._wall_ns = wall_ns

    def advance(self, seconds: float) -> None:
        """Move the monotonic and the wall clock forward."""
        self._boottime_ns += round(seconds * 1e9)
        self._wall_ns += round(seconds * 1e9)

    def step_wall(self, seconds: float) -> None:
        """Move the wall clock forward or back, but not the monotonic clock."""
        self._wall_ns += round(seconds * 1e9)

    def boottime_ns(self) -> int:
        """Return the simulated time since boot in nanoseconds."""
        return self._boottime_ns

    def wall_ns(self) -> int:
        """Return the simulated wall clock time in nanoseconds since 1970."""
        return self._wall_ns

    def boot_id(self) -> str:
        """Return a constant boot identifier."""
        return "00000000-0000-0000-0000-000000000000"
