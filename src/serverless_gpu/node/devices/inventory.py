"""Inventory of this node: devices, their current usage, and user-defined GPU types and prices.

    NvmlProvider   NVIDIA GPUs, through NVML          usage: processes and memory
    FakeProvider   devices declared by a setting      usage: a JSON file that a test or a demonstration writes
    CpuProvider    one slot per usable core           usage: always idle
    Inventory      the agent's offer: GPUs, CPU slots, types, prices; refreshed after a minute, because drivers can be
                   loaded and unloaded. Callers declare fakes per call (`offered`).

This module only reads the state of devices. `gpu_gate.py` checks devices. `locks.py` lends devices. Device failures do
not raise exceptions. Without an NVIDIA driver, the inventory contains no GPUs. `unavailable()` returns each unusable
GPU with a reason, such as denied access, MIG slices, or a GPU that fell off the bus. If the driver hangs, `nvml.py`
waits 5 s for its helper process and returns a `Usage` with a `problem`. If processes in another pid namespace are
hidden, `pids_visible` is False and the gate checks only memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hardware import Device, DeviceKind, GpuType, cpu_slots, parse_fake, recognise
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.configuration import Configuration, read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.nvml import (
    MIB,
    NO_DRIVER,
    GpuProcess,
    Nvml,
    NvmlAnswer,
    NvmlClient,
    NvmlProcess,
    NvmlReader,
    NvmlThread,
    NvmlTimeout,
    Unavailable,
    Usage,
    unknown_usage,
)

NVML_LIMIT_S = 5.0
FAKE_VARIABLE = "SERVERLESS_GPU_FAKE"
FAKE_STATE_FILE = "fake_gpus.json"
_FAKE_STATE_BYTES_MAX = MIB
_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
"""Paths of the NVIDIA driver. If none of these paths exists, the inventory does not call NVML."""
_FRESH_S = 60.0


class Inventory:
    """Devices of the node, with the user's configuration."""

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
        """Return the agent's greeting for clients."""
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
        """Return the node's devices as of the last refresh."""
        return self._devices

    @property
    def silence(self) -> str:
        """Return the reason why the driver did not answer at the last refresh, or "" if it answered."""
        return self._machine.silence

    @property
    def checkpoints(self) -> Path:
        """Return the checkpoint directory of all runs."""
        return Path(self._checkpoints) if self._checkpoints else self._home.checkpoints

    def refresh(self) -> None:
        """Read the devices again if the last refresh is old or the configuration has changed."""
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
        # While NVML does not answer, the agent keeps the known GPUs in the inventory but does not lend them.
        if self._machine.silence:
            found = tuple(device for device in self._devices if device.kind is DeviceKind.GPU)
        self._unavailable = tuple(f"{gpu.name}: {gpu.reason}" for gpu in self._machine.unavailable())
        self._devices = (*found, *self._cpu.devices())


def offered(greeting: protocol.Greeting, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return a node's devices. Fake devices declared in `environ` replace real GPUs. Raises InvalidValue."""
    if greeting.problem:
        raise InvalidValue(greeting.problem)
    fakes = environ.get("SERVERLESS_GPU_FAKE")
    if not fakes:
        return greeting.devices
    cpus = [device for device in greeting.devices if device.kind is DeviceKind.CPU]
    return (*parse_fake(fakes, greeting.own_types), *cpus)


class Provider(Protocol):
    """A source of devices of one kind (GPUs, fakes or CPU slots)."""

    @property
    def kind(self) -> DeviceKind:
        """Return the device kind of this provider."""
        ...

    def devices(self) -> tuple[Device, ...]:
        """Return the usable devices in index order."""
        ...

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return the unusable devices, each with a reason."""
        ...

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return the usage of each device by uuid. Never raise an exception."""
        ...


def providers(home: Path, environ: Mapping[str, str], own: Sequence[GpuType] = ()) -> tuple[Provider, ...]:
    """Return the providers of GPUs (or of fakes by `SERVERLESS_GPU_FAKE`) and of CPU slots.

    Fakes read their state from `fake_gpus.json` in the home. Raises InvalidValue unless `SERVERLESS_GPU_FAKE` has the
    form ``"H100:8"``.
    """
    fake = environ.get(FAKE_VARIABLE, "").strip()
    first: Provider = FakeProvider(fake, home / FAKE_STATE_FILE, own=own) if fake else NvmlProvider(own=own)
    return (first, CpuProvider())


class CpuProvider:
    """Provides one slot per CPU core that this process may use."""

    kind = DeviceKind.CPU

    def devices(self) -> tuple[Device, ...]:
        """Return one slot per CPU core of this process's affinity mask."""
        return cpu_slots(len(os.sched_getaffinity(0)))

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return an empty tuple, because CPU cores do not fail."""
        return ()

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return an idle usage for every CPU slot."""
        return {uuid: Usage(processes=(), memory_used_bytes=0, pids_visible=True) for uuid in uuids}


class _FakeUsage(Struct, frozen=True):
    processes: tuple[GpuProcess, ...] = ()
    memory_used_bytes: int | None = 0
    pids_visible: bool = True
    problem: str = ""
    hangs: bool = False


class FakeProvider:
    """Fake devices declared by a text such as ``"H100:8"``. Raises InvalidValue for an invalid text.

    A JSON file contains the usage of the devices: ``{uuid: {"memory_used_bytes": n, "processes": [{"pid": n,
    "memory_bytes": n, "name": s}]}}``. The keys ``"pids_visible"``, ``"problem"`` and ``"hangs"`` are optional.
    """

    kind = DeviceKind.FAKE

    def __init__(self, text: str, state_path: Path, *, own: Sequence[GpuType] = ()) -> None:
        self._devices = parse_fake(text, own)
        self._state_path = state_path

    def devices(self) -> tuple[Device, ...]:
        """Return the declared fake devices."""
        return self._devices

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return an empty tuple, because fake devices are always usable."""
        return ()

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return the devices' usage from the state file, or an unknown usage if the file is unreadable."""
        try:
            state = self._state()
        except (OSError, msgspec.MsgspecError) as error:
            problem = f"the state file of the fake GPUs, {self._state_path}, cannot be read: {error}"
            return {uuid: unknown_usage(problem) for uuid in uuids}
        if any(fake.hangs for fake in state.values()):
            try:
                _hanging(self._state_path).ask(uuids)  # Fake drivers hang in a helper process, like real drivers.
            except NvmlTimeout as silent:
                return {uuid: unknown_usage(str(silent), silent=True) for uuid in uuids}
        known = {device.uuid for device in self._devices}
        usage: dict[str, Usage] = {}
        for uuid in uuids:
            fake = state.get(uuid, _FakeUsage())
            problem = fake.problem if uuid in known else f"{uuid} is not a device of this machine"
            used = Usage(fake.processes, fake.memory_used_bytes, fake.pids_visible)
            usage[uuid] = unknown_usage(problem) if problem else used
        return usage

    def _state(self) -> dict[str, _FakeUsage]:
        try:
            with self._state_path.open("rb") as file:
                text = file.read(_FAKE_STATE_BYTES_MAX)
        except FileNotFoundError:
            return {}
        return from_json(text, dict[str, _FakeUsage])


@functools.cache
def _hanging(state_path: Path) -> NvmlProcess:
    return NvmlProcess(str(state_path), NVML_LIMIT_S)


class NvmlProvider:
    """The NVIDIA GPUs of this machine.

    `Device.index` is a GPU's position among the usable GPUs in PCI bus order. CUDA uses the same index with
    `CUDA_DEVICE_ORDER=PCI_BUS_ID`, because CUDA also omits unusable GPUs.

    If a caller passes `nvml`, the provider calls the passed binding instead of the helper process. `forks` is True if
    this process has a single thread, so that it can fork the helper process.
    """

    kind = DeviceKind.GPU

    def __init__(
        self,
        *,
        nvml: Nvml | None = None,
        limit_s: float = NVML_LIMIT_S,
        own: Sequence[GpuType] = (),
        pid_namespace: str | None = None,
        forks: bool = False,
    ) -> None:
        self.silence = ""  # Reason why NVML did not answer the last query, or "".
        self._own = tuple(own)
        self._is_direct = nvml is not None
        self._asker: NvmlClient = NvmlProcess("", limit_s, forks=forks)
        if nvml is not None:
            self._asker = NvmlThread(NvmlReader(nvml, pid_namespace), limit_s)

    def devices(self) -> tuple[Device, ...]:
        """Return the usable GPUs in PCI bus order."""
        return tuple(
            Device(
                uuid=gpu.uuid,
                index=index,
                type=recognise(gpu.product, gpu.memory_bytes, self._own),
                memory_bytes=gpu.memory_bytes,
                kind=DeviceKind.GPU,
                product=gpu.product,
                pci="{:04x}:{:02x}:{:02x}".format(*gpu.place),
            )
            for index, gpu in enumerate(sorted(self._scan().seen, key=lambda gpu: gpu.place))
        )

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return the unusable GPUs, or a single entry for NVML if NVML does not work."""
        return self._scan().unavailable

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return the usage of each GPU.

        If NVML does not answer in time, return an unknown usage with the reason.
        """
        if not self._has_driver():
            return {uuid: unknown_usage(NO_DRIVER) for uuid in uuids}
        try:
            found = self._ask(uuids).usage
        except NvmlTimeout as silent:
            return {uuid: unknown_usage(str(silent), silent=True) for uuid in uuids}
        return {uuid: found.get(uuid) or unknown_usage("NVML returned no usage for this GPU") for uuid in uuids}

    def _scan(self) -> NvmlAnswer:
        if not self._has_driver():
            return NvmlAnswer(0)
        try:
            return self._ask(None)
        except NvmlTimeout as silent:
            return NvmlAnswer(0, unavailable=(Unavailable("NVML", str(silent)),))

    def _ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        try:
            answer = self._asker.ask(uuids)
        except NvmlTimeout as silent:
            self.silence = str(silent)
            raise
        self.silence = ""
        return answer

    def _has_driver(self) -> bool:
        return self._is_direct or any(map(os.path.exists, _DRIVER))
