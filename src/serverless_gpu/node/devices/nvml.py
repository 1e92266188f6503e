"""NVML asked in this process, where it may hang for ever in the kernel: `NvmlReader`.

`nvml_process.py` waits for it from another process, and `gpu_gate.py` judges.

Usage of a GPU: values that cross between processes.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, cast

from msgspec import Struct

MIB = 1024 * 1024

IDLE_MEMORY_BYTES = 256 * MIB
"""Memory an idle GPU may show. NVML's version 2 figure leaves out the driver's own reserve (0.9 GB on an
A100), so an idle card of any size shows some MiB (8 MB on that A100). This leaves room for resident services, and stays
below the bare CUDA context of a data-centre card."""


class GpuProcess(Struct, frozen=True):
    """A process that has a GPU open; `graphics` means it only draws (a display server, a browser)."""

    pid: int
    memory_bytes: int | None
    name: str = ""
    graphics: bool = False


class Usage(Struct, frozen=True):
    """Usage of one device; `problem` says why it is unknown, and then nothing else counts."""

    processes: tuple[GpuProcess, ...]
    memory_used_bytes: int | None
    pids_visible: bool
    problem: str = ""
    silent: bool = False  # the driver does not answer


class Unavailable(Struct, frozen=True):
    """A device that exists and cannot be lent."""

    name: str
    reason: str


class VisibleGpu(Struct, frozen=True):
    """A GPU that NVML can see."""

    place: tuple[int, int, int]  # PCI domain, bus, device
    uuid: str
    product: str
    memory_bytes: int


def unknown_usage(problem: str, *, silent: bool = False) -> Usage:
    """Return the usage of a device that could not be asked; `silent` if the driver does not answer."""
    return Usage(processes=(), memory_used_bytes=None, pids_visible=False, problem=problem, silent=silent)


_PROCESS_NAME_MAX = 64
# The kernel's fixed inode number of the first pid namespace; in any other one NVML may hide processes.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
NO_DRIVER = "there is no NVIDIA driver to ask"


class Question(Struct, frozen=True):
    """Question about which GPUs there are (`uuids` None), or what uses some of them."""

    seq: int
    uuids: tuple[str, ...] | None = None


class NvmlAnswer(Struct, frozen=True):
    """Answer to the question of that number."""

    seq: int
    seen: tuple[VisibleGpu, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    usage: dict[str, Usage] = {}


class NvmlTimeout(Exception):
    """There was no answer in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"NVML did not answer in {limit_s:g} s")


class NvmlClient(Protocol):
    """Has questions answered."""

    def ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        """Return which GPUs there are, for None, or what uses some of them; raises NvmlTimeout."""
        ...


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


class NvmlReader:
    """Asks NVML, which is initialised once for the life of the process; `given` replaces `pynvml`."""

    def __init__(self, given: Nvml | None = None, pid_namespace: str | None = None) -> None:
        self._given = given
        self._ready: Nvml | None = None
        self._sees_all_pids = sees_all_pids(pid_namespace)

    def answer(self, question: Question) -> NvmlAnswer:
        """Return the answer to a question."""
        if question.uuids is not None:
            return NvmlAnswer(question.seq, usage=self._usage(question.uuids))
        seen, unavailable = self._scan()
        return NvmlAnswer(question.seq, seen=tuple(seen), unavailable=tuple(unavailable))

    def _scan(self) -> tuple[list[VisibleGpu], list[Unavailable]]:
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
        found = [_look(nvml, index) for index in range(count)]
        seen = [gpu for gpu in found if isinstance(gpu, VisibleGpu)]
        return seen, [gpu for gpu in found if isinstance(gpu, Unavailable)]

    def _usage(self, uuids: Sequence[str]) -> dict[str, Usage]:
        try:
            nvml = self._nvml()
        except NvmlBroken as broken:
            return {uuid: unknown_usage(str(broken)) for uuid in uuids}
        if nvml is None:
            return {uuid: unknown_usage(NO_DRIVER) for uuid in uuids}
        return {uuid: _usage_of(nvml, uuid, self._sees_all_pids) for uuid in uuids}

    def _nvml(self) -> Nvml | None:
        if self._ready is None:
            self._ready = initialised(self._given)
        return self._ready


class NvmlBroken(Exception):
    """There is a driver, and NVML does not work with it."""


def initialised(given: Nvml | None) -> Nvml | None:
    """Return NVML, ready to be asked; None without a driver. Raises NvmlBroken if it does not work."""
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


def _look(nvml: Nvml, index: int) -> VisibleGpu | Unavailable:
    name = f"GPU {index} as the driver counts"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = uuid = nvml.nvmlDeviceGetUUID(handle)
        if _is_sliced(nvml, handle):
            return Unavailable(uuid, f"MIG mode is on, and only whole GPUs are lent (`nvidia-smi -i {uuid} -mig 0`)")
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        place = (pci.domain, pci.bus, pci.device)
        return VisibleGpu(place, uuid, nvml.nvmlDeviceGetName(handle), memory.total)
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
    merged: dict[int, GpuProcess] = {}
    for draws, infos in ((True, graphics), (False, compute)):  # one that computes and draws counts as computing
        for info in infos:
            merged[info.pid] = GpuProcess(info.pid, info.usedGpuMemory, _process_name(nvml, info.pid), draws)
    processes = tuple(merged[pid] for pid in sorted(merged))
    # Memory without a process has an owner all the same: one that we are not shown.
    hidden = not processes and memory_used > IDLE_MEMORY_BYTES
    return Usage(processes, memory_used, pids_visible=sees_all_pids and not hidden)


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
    """Return whether NVML's pids are all processes of ours to see, and the same numbers here."""
    if pid_namespace is None:
        try:
            pid_namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            return False
    return pid_namespace == _FIRST_PID_NAMESPACE


class Bounded:
    """Asks in a helper thread, one question at a time, for at most `limit_s`; the process may be lost."""

    def __init__(self, reader: NvmlReader, limit_s: float) -> None:
        self._reader = reader
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        """Return what was asked for; as `NvmlClient`."""
        question = Question(0, None if uuids is None else tuple(uuids))
        if not self._turn.acquire(timeout=self._limit_s):
            raise NvmlTimeout(self._limit_s)
        try:
            return self._call(lambda: self._reader.answer(question))
        finally:
            self._turn.release()

    def _call(self, work: Callable[[], NvmlAnswer]) -> NvmlAnswer:
        if self._thread is not None and self._thread.is_alive():  # a call from before is still stuck in the driver
            raise NvmlTimeout(self._limit_s)
        answer: Future[NvmlAnswer] = Future()
        self._thread = threading.Thread(target=_settle, args=(answer, work), name="sgpu-nvml", daemon=True)
        self._thread.start()
        try:
            value = answer.result(timeout=self._limit_s)
        except TimeoutError:
            raise NvmlTimeout(self._limit_s) from None
        self._thread.join(timeout=self._limit_s)  # it has only its own end left to do
        return value


def _settle(answer: Future[NvmlAnswer], work: Callable[[], NvmlAnswer]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001 - handed to the thread that waits, which raises it
        answer.set_exception(error)
