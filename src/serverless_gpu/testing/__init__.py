"""Fakes and helpers for testing code that uses serverless-gpu, and for our own tests.

FakeGpus()             declared GPUs whose processes, memory and figures a test decides
FakeClock()            a clock that a test moves
agent_status(home)     what the agent of a home looks after
stop_agent(home)       end that agent, and everything it keeps warm
SimulatedEngine(…)     an engine whose nodes exist only in a test
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
    """Declared GPUs of one home, as `SERVERLESS_GPU_FAKE` names them, in a state that a test decides.

    Args:
        home: the home directory, made if needed; None for the one that runs of this process have.
    """

    def __init__(self, home: Path | None = None) -> None:
        root = find_home(os.environ).root if home is None else home
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = root / "fake_gpus.json"
        self._state: dict[str, dict[str, object]] = {}

    def set(self, uuid: str, *, memory_used_bytes: int = 0, processes: Mapping[int, int] | None = None) -> None:
        """Say what NVML would say about one GPU from now on.

        Args:
            uuid: for example ``"FAKE-H100-0"``.
            memory_used_bytes: memory in use.
            processes: bytes held, by pid.
        """
        listed = [{"pid": pid, "memory_bytes": held} for pid, held in (processes or {}).items()]
        self._add(uuid, {"memory_used_bytes": memory_used_bytes, "processes": listed})

    def shows(self, uuid: str, **figures: float) -> None:
        """Say what telemetry sees of one GPU from now on; what is not said is taken from its rank.

        Args:
            uuid: for example ``"FAKE-H100-0"``.
            figures: by name: ``busy_percent``, ``memory_bytes``, ``power_watts``, ``power_limit_watts``,
                ``temperature_celsius``, ``sm_megahertz``, ``memory_megahertz``, ``pcie_receive_bytes_s``,
                ``pcie_transmit_bytes_s``, ``nvlink_receive_bytes_s``, ``nvlink_transmit_bytes_s``, ``throttle`` (NVML's
                bits), ``ecc_errors``.

        Raises:
            InvalidOption: there is no such figure.
        """
        for name in figures:
            if name not in GpuSample.__struct_fields__:
                known = ", ".join(GpuSample.__struct_fields__)
                raise InvalidOption(f"telemetry has no figure {name!r} of a GPU", hint=f"figures: {known}")
        self._add(uuid, {"sampled": figures})

    def xid(self, uuid: str, number: int, text: str = "") -> None:
        """Have the driver tell of a GPU what it does when one fails: a line in the kernel's log.

        Args:
            uuid: for example ``"FAKE-H100-0"``, one of those that `SERVERLESS_GPU_FAKE` declares.
            number: the Xid; 79 for one that has fallen off the bus.
            text: what the driver says beyond that.

        Raises:
            InvalidOption: no such GPU is declared.
        """
        declared = {device.uuid: device.pci for device in parse_fake(os.environ.get("SERVERLESS_GPU_FAKE", ""))}
        if uuid not in declared:
            raise InvalidOption(f"{uuid} is not declared", hint=f"declared: {', '.join(declared) or 'none'}")
        microseconds = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
        said = f"4,1,{microseconds},-;NVRM: Xid (PCI:{declared[uuid]}): {number}, {text}\n"
        fd = os.open(self._path.with_name(FAKE_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(fd, said.encode())
        finally:
            os.close(fd)

    def hangs(self, hanging: bool = True) -> None:
        """Have the driver hang: questions about a declared GPU get no answer, until that is over.

        Args:
            hanging: whether it does from now on.
        """
        for device in parse_fake(os.environ.get("SERVERLESS_GPU_FAKE", "")):
            self._state[device.uuid] = {**self._state.get(device.uuid, {}), "hangs": hanging}
        self._write()

    def clear(self, uuid: str) -> None:
        """Let a GPU be idle again."""
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
    """A clock that stands still until a test moves it."""

    def __init__(self, *, boottime_ns: int = 1_000_000_000_000, wall_ns: int = 1_800_000_000_000_000_000) -> None:
        self._boottime_ns = boottime_ns
        self._wall_ns = wall_ns

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._boottime_ns += round(seconds * 1e9)
        self._wall_ns += round(seconds * 1e9)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock alone: forward, or back."""
        self._wall_ns += round(seconds * 1e9)

    def boottime_ns(self) -> int:
        """Return nanoseconds since a boot that never was."""
        return self._boottime_ns

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970."""
        return self._wall_ns

    def boot_id(self) -> str:
        """Return the same identifier always."""
        return "00000000-0000-0000-0000-000000000000"
