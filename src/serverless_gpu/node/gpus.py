"""The devices of this machine and what uses them right now.

    NvmlProvider   NVIDIA GPUs, through NVML          usage: processes and memory
    FakeProvider   devices made up by a setting       usage: a JSON file a test or a demonstration writes
    CpuProvider    one slot per core we may run on    usage: always idle

Lives here: reading. Must not: decide whether a device is clean (`gate.py`), lend devices (`locks.py`), change a device.

Failure cases, all visible and none an exception:
- no NVIDIA driver: no devices and nothing to report;
- a GPU that fell off the bus, is closed to us, or is cut into MIG slices: listed by `unavailable()` with the reason;
- NVML hangs (a wedged driver blocks in the kernel, where no signal reaches it): the call runs in a helper thread, and
  after 5 s the answer is a `Usage` whose `problem` says so. While that thread is stuck no second one is started;
- other pid namespaces hide processes: `pids_visible` is False, and whoever judges has memory only.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar, cast

import msgspec
from msgspec import Struct

from serverless_gpu.model.hardware import Device, DeviceKind, GpuType, cpu_slots, parse_fake, recognise

MIB = 1024 * 1024

IDLE_MEMORY_BYTES = 256 * MIB
"""Memory a GPU that nobody uses may show. NVML's version 2 figure leaves out the driver's own reserve (0.9 GB on an
A100), so an idle card of any size shows some MiB (8 MB on that A100). This leaves room for resident services, and stays
below the bare CUDA context of a data-centre card."""

NVML_LIMIT_S = 5.0
FAKE_VARIABLE = "SERVERLESS_GPU_FAKE"
FAKE_STATE_FILE = "fake_gpus.json"

_FAKE_STATE_BYTES_MAX = MIB
_PROCESS_NAME_MAX = 64
# The kernel's fixed inode number of the first pid namespace; in any other one NVML may hide processes.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

T = TypeVar("T")


class GpuProcess(Struct, frozen=True):
    """A process that has a GPU open; `graphics` means it only draws (a display server, a browser)."""

    pid: int
    memory_bytes: int | None
    name: str = ""
    graphics: bool = False


class Usage(Struct, frozen=True):
    """What uses one device; `problem` says why it could not be found out, and then nothing else counts."""

    processes: tuple[GpuProcess, ...]
    memory_used_bytes: int | None
    pids_visible: bool
    problem: str = ""


class Unavailable(Struct, frozen=True):
    """A device that exists and cannot be lent."""

    name: str
    reason: str


class Provider(Protocol):
    """A source of devices of one kind."""

    @property
    def kind(self) -> DeviceKind:
        """Return the kind of every device of this provider."""
        ...

    def devices(self) -> tuple[Device, ...]:
        """Return the devices that can be lent, in index order."""
        ...

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return the devices that cannot be lent, with reasons."""
        ...

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return what uses each of these devices: one entry per uuid asked, never an exception."""
        ...


def providers(home: Path, environ: Mapping[str, str], own: Sequence[GpuType] = ()) -> tuple[Provider, ...]:
    """Return the providers of this machine: fakes instead of GPUs when `SERVERLESS_GPU_FAKE` is set, and CPU slots.

    Args:
        home: the serverless-gpu home directory; fakes read their state from `fake_gpus.json` there.
        environ: environment variables.
        own: GPU types from the configuration.

    Raises:
        InvalidValue: `SERVERLESS_GPU_FAKE` does not read like ``"H100:8"``.
    """
    fake = environ.get(FAKE_VARIABLE, "").strip()
    first: Provider = FakeProvider(fake, home / FAKE_STATE_FILE, own=own) if fake else NvmlProvider(own=own)
    return (first, CpuProvider())


def unknown_usage(problem: str) -> Usage:
    """Return the usage of a device that could not be asked."""
    return Usage(processes=(), memory_used_bytes=None, pids_visible=False, problem=problem)


class CpuProvider:
    """One slot per core this process may run on."""

    kind = DeviceKind.CPU

    def devices(self) -> tuple[Device, ...]:
        """Return one slot per core of our affinity mask."""
        return cpu_slots(len(os.sched_getaffinity(0)))

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return nothing: a core is always there."""
        return ()

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return idle for every slot: a slot is a number, nothing can stay behind on it."""
        return {uuid: Usage(processes=(), memory_used_bytes=0, pids_visible=True) for uuid in uuids}


class _FakeUsage(Struct, frozen=True):
    processes: tuple[GpuProcess, ...] = ()
    memory_used_bytes: int | None = 0
    pids_visible: bool = True
    problem: str = ""


class FakeProvider:
    """Made-up devices, idle unless the state file says otherwise.

    Args:
        text: devices, for example ``"H100:8"``.
        state_path: JSON ``{uuid: {"memory_used_bytes": n, "processes": [{"pid": n, "memory_bytes": n, "name": s}]}}``;
            ``"pids_visible"`` and ``"problem"`` are understood too.
        own: GPU types beyond the catalogue.

    Raises:
        InvalidValue: `text` does not read like ``"H100:8"``.
    """

    kind = DeviceKind.FAKE

    def __init__(self, text: str, state_path: Path, *, own: Sequence[GpuType] = ()) -> None:
        self._devices = parse_fake(text, own)
        self._state_path = state_path

    def devices(self) -> tuple[Device, ...]:
        """Return the made-up devices."""
        return self._devices

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return nothing: fakes do not break by themselves."""
        return ()

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return what the state file says; a file that cannot be read makes every answer unknown."""
        try:
            state = self._state()
        except (OSError, msgspec.MsgspecError) as error:
            problem = f"the state file of the fake GPUs, {self._state_path}, cannot be read: {error}"
            return {uuid: unknown_usage(problem) for uuid in uuids}
        known = {device.uuid for device in self._devices}
        return {uuid: _as_usage(state.get(uuid, _FakeUsage())) if uuid in known else _not_here(uuid) for uuid in uuids}

    def _state(self) -> dict[str, _FakeUsage]:
        try:
            with self._state_path.open("rb") as file:
                text = file.read(_FAKE_STATE_BYTES_MAX)
        except FileNotFoundError:
            return {}
        return msgspec.json.decode(text, type=dict[str, _FakeUsage])


def _as_usage(fake: _FakeUsage) -> Usage:
    if fake.problem:
        return unknown_usage(fake.problem)
    return Usage(fake.processes, fake.memory_used_bytes, fake.pids_visible)


def _not_here(uuid: str) -> Usage:
    return unknown_usage(f"{uuid} is not a device of this machine")


# --- NVML ----------------------------------------------------------------------------------------------------


class _PciInfo(Protocol):
    domain: int
    bus: int
    device: int


class _MemoryInfo(Protocol):
    total: int
    used: int


class _ProcessInfo(Protocol):
    pid: int
    usedGpuMemory: int | None


class Nvml(Protocol):
    """The part of `pynvml` (nvidia-ml-py) that is used; a test brings its own."""

    NVMLError: type[Exception]
    NVMLLibraryMismatchError: type[Exception]
    NVML_ERROR_LIBRARY_NOT_FOUND: int
    NVML_ERROR_DRIVER_NOT_LOADED: int
    nvmlMemory_v2: int

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object: ...
    def nvmlDeviceGetUUID(self, handle: object, /) -> str: ...
    def nvmlDeviceGetName(self, handle: object, /) -> str: ...
    def nvmlDeviceGetPciInfo(self, handle: object, /) -> _PciInfo: ...
    def nvmlDeviceGetMigMode(self, handle: object, /) -> Sequence[int]: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int, /) -> _MemoryInfo: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> Sequence[_ProcessInfo]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: object, /) -> Sequence[_ProcessInfo]: ...
    def nvmlSystemGetProcessName(self, pid: int, /) -> str: ...


class _Silent(Exception):
    """NVML did not answer in time."""


class _Seen(Struct, frozen=True):
    place: tuple[int, int, int]  # PCI domain, bus, device
    uuid: str
    product: str
    memory_bytes: int


class NvmlProvider:
    """The NVIDIA GPUs of this machine.

    `Device.index` is the position in PCI bus order among the GPUs that can be used, because that is how CUDA counts
    with `CUDA_DEVICE_ORDER=PCI_BUS_ID`: it leaves out what it cannot open.

    Args:
        nvml: the binding to use instead of `pynvml`.
        limit_s: seconds to wait for NVML before the answer is "unknown".
        own: GPU types beyond the catalogue.
        pid_namespace: what `/proc/self/ns/pid` points at; None reads it.
    """

    kind = DeviceKind.GPU

    def __init__(
        self,
        *,
        nvml: Nvml | None = None,
        limit_s: float = NVML_LIMIT_S,
        own: Sequence[GpuType] = (),
        pid_namespace: str | None = None,
    ) -> None:
        self._given = nvml
        self._ready: Nvml | None = None
        self._own = tuple(own)
        self._bounded = _Bounded(limit_s)
        self._sees_all_pids = sees_all_pids(pid_namespace)

    def devices(self) -> tuple[Device, ...]:
        """Return the GPUs that can be lent, in PCI bus order."""
        seen, _ = self._scan()
        return tuple(
            Device(
                uuid=gpu.uuid,
                index=index,
                type=recognise(gpu.product, gpu.memory_bytes, self._own),
                memory_bytes=gpu.memory_bytes,
                kind=DeviceKind.GPU,
                product=gpu.product,
            )
            for index, gpu in enumerate(sorted(seen, key=lambda gpu: gpu.place))
        )

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return the GPUs that are there and cannot be lent, or one entry for NVML itself when it does not work."""
        return tuple(self._scan()[1])

    def usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        """Return what uses each GPU; whatever NVML cannot say within the limit is unknown, with the reason."""
        try:
            return self._bounded.call(lambda: self._usage_of_all(uuids))
        except _Silent as silent:
            return {uuid: unknown_usage(str(silent)) for uuid in uuids}

    # Everything below runs in the helper thread, except what it returns.

    def _scan(self) -> tuple[list[_Seen], list[Unavailable]]:
        try:
            return self._bounded.call(self._scan_now)
        except _Silent as silent:
            return [], [Unavailable("NVML", str(silent))]

    def _scan_now(self) -> tuple[list[_Seen], list[Unavailable]]:
        try:
            nvml = self._nvml()
        except NvmlBroken as broken:
            return [], [Unavailable("NVML", str(broken))]
        if nvml is None:
            return [], []
        try:
            count = nvml.nvmlDeviceGetCount()
        except errors(nvml) as error:
            return [], [Unavailable("NVML", f"NVML cannot count the GPUs: {error}")]
        seen: list[_Seen] = []
        unavailable: list[Unavailable] = []
        for index in range(count):
            found = _look(nvml, index)
            if isinstance(found, _Seen):
                seen.append(found)
            else:
                unavailable.append(found)
        return seen, unavailable

    def _usage_of_all(self, uuids: Sequence[str]) -> dict[str, Usage]:
        try:
            nvml = self._nvml()
        except NvmlBroken as broken:
            return {uuid: unknown_usage(str(broken)) for uuid in uuids}
        if nvml is None:
            return {uuid: unknown_usage("there is no NVIDIA driver to ask") for uuid in uuids}
        return {uuid: _usage_of(nvml, uuid, self._sees_all_pids) for uuid in uuids}

    def _nvml(self) -> Nvml | None:
        """Return NVML, initialised once for the life of the process; None where there is no driver."""
        if self._ready is None:
            self._ready = initialised(self._given)
        return self._ready


class NvmlBroken(Exception):
    """There is a driver, and NVML does not work with it."""


def initialised(given: Nvml | None) -> Nvml | None:
    """Return NVML, ready to be asked; None where there is no driver.

    Args:
        given: the binding to use instead of `pynvml`.

    Raises:
        NvmlBroken: there is a driver, and NVML does not work with it.
    """
    try:
        nvml = given if given is not None else cast(Nvml, importlib.import_module("pynvml"))
    except ImportError as error:
        raise NvmlBroken(f"GPUs cannot be looked for, nvidia-ml-py is not installed: {error}") from error
    try:
        nvml.nvmlInit()
    except errors(nvml) as error:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if getattr(error, "value", None) in absent:
            return None
        # Most often: the driver's packages were updated and the old kernel module is still loaded.
        raise NvmlBroken(f"NVML does not work with the loaded driver: {error}; reload the driver or reboot") from error
    return nvml


def errors(nvml: Nvml) -> tuple[type[Exception], ...]:
    """Return what NVML's functions raise."""
    return (nvml.NVMLError, nvml.NVMLLibraryMismatchError)


def _look(nvml: Nvml, index: int) -> _Seen | Unavailable:
    name = f"GPU {index} as the driver counts"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = uuid = nvml.nvmlDeviceGetUUID(handle)
        if _is_sliced(nvml, handle):
            return Unavailable(uuid, f"MIG mode is on, and only whole GPUs are lent (`nvidia-smi -i {uuid} -mig 0`)")
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        place = (pci.domain, pci.bus, pci.device)
        return _Seen(place, uuid, nvml.nvmlDeviceGetName(handle), memory.total)
    except errors(nvml) as error:
        return Unavailable(name, f"NVML: {error}")


def _is_sliced(nvml: Nvml, handle: object) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except errors(nvml):  # most cards cannot do MIG and answer with an error
        return False


def _usage_of(nvml: Nvml, uuid: str, sees_all_pids: bool) -> Usage:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory_used = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used
    except errors(nvml) as error:
        return unknown_usage(f"NVML: {error}")
    try:
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    except errors(nvml):
        return Usage(processes=(), memory_used_bytes=memory_used, pids_visible=False)
    processes = _merge(nvml, compute, graphics)
    # Memory without a process has an owner all the same: one that we are not shown.
    hidden = not processes and memory_used > IDLE_MEMORY_BYTES
    return Usage(processes, memory_used, pids_visible=sees_all_pids and not hidden)


def _merge(nvml: Nvml, compute: Iterable[_ProcessInfo], graphics: Iterable[_ProcessInfo]) -> tuple[GpuProcess, ...]:
    """Return one entry per pid; a process that both computes and draws counts as one that computes."""
    merged: dict[int, GpuProcess] = {}
    for draws, infos in ((True, graphics), (False, compute)):
        for info in infos:
            merged[info.pid] = GpuProcess(info.pid, info.usedGpuMemory, _process_name(nvml, info.pid), draws)
    return tuple(merged[pid] for pid in sorted(merged))


def _process_name(nvml: Nvml, pid: int) -> str:
    try:
        command = nvml.nvmlSystemGetProcessName(pid)
    except UnicodeDecodeError:
        return ""
    except errors(nvml):  # gone meanwhile, or not ours to see
        return ""
    program = command.partition(" ")[0].rpartition("/")[2]
    # The name is the process's own choice and ends up on terminals.
    return "".join(letter for letter in program if letter.isprintable())[:_PROCESS_NAME_MAX]


def sees_all_pids(pid_namespace: str | None = None) -> bool:
    """Return whether NVML's pids are all processes of ours to see, and the same numbers here.

    Args:
        pid_namespace: what `/proc/self/ns/pid` points at; None reads it.
    """
    if pid_namespace is None:
        try:
            pid_namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            return False
    return pid_namespace == _FIRST_PID_NAMESPACE


class _Bounded:
    """Runs one blocking call at a time in a helper thread and stops waiting after a limit."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, work: Callable[[], T]) -> T:
        if not self._turn.acquire(timeout=self._limit_s):
            raise self._silent()
        try:
            return self._call(work)
        finally:
            self._turn.release()

    def _call(self, work: Callable[[], T]) -> T:
        if self._thread is not None and self._thread.is_alive():  # a call from before is still stuck in the driver
            raise self._silent()
        answer: Future[T] = Future()
        self._thread = threading.Thread(target=_settle, args=(answer, work), name="sgpu-nvml", daemon=True)
        self._thread.start()
        try:
            value = answer.result(timeout=self._limit_s)
        except TimeoutError:
            raise self._silent() from None
        self._thread.join(timeout=self._limit_s)  # it has only its own end left to do
        return value

    def _silent(self) -> _Silent:
        return _Silent(f"NVML did not answer in {self._limit_s:g} s")


def _settle(answer: Future[T], work: Callable[[], T]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
        answer.set_exception(error)
