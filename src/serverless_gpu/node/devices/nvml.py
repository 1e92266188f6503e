"""Calls NVML in a helper process, so that a hanging driver blocks only that process.

    NvmlProcess ──NvmlQuestion──▶ sgpu-nvml: NvmlReader ── may block in the kernel for ever
                ◀──NvmlAnswer───                           the client waits at most 5 s, once

`inventory.py` and the monitor use this module. `gpu_gate.py` judges the `Usage` of a GPU.

Failure cases: If the helper process does not answer in time, `ask` raises NvmlTimeout. Later queries fail immediately
until the helper process answers. After 30 seconds without an answer, the client kills the helper process and starts
another one. If three helper processes survive SIGKILL, the client starts no more helper processes. If a helper process
dies, the client starts another helper process, once per query. If the client exits, the helper process reads end of
file and exits.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NoReturn, Protocol, cast

import msgspec
from msgspec import Struct

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.processes.spawn import clean_process

MIB = 1024 * 1024
IDLE_MEMORY_BYTES = 256 * MIB
"""Maximum memory in use on an idle GPU, in bytes.

An idle GPU shows only a few MiB in use, because NVML's version 2 value excludes the driver's reserve (0.9 GB on an
A100). The limit includes a tolerance for background services. An empty CUDA context on a data-center GPU exceeds the
limit.
"""
NO_DRIVER = "no NVIDIA driver is loaded on this machine"
_PROCESS_NAME_MAX = 64
# Inode number of the kernel's initial pid namespace. In other pid namespaces, NVML may hide processes.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_ANOTHER_S = 30.0
_STUCK_MAX = 3
_END_S = 0.2
_STUCK_PAUSE_S = 0.05


class GpuProcess(Struct, frozen=True):
    """A process that uses a GPU. `graphics` is True if the process only draws (display server, browser)."""

    pid: int
    memory_bytes: int | None
    name: str = ""
    graphics: bool = False


class Usage(Struct, frozen=True):
    """Usage of one device.

    If the usage is unknown, `problem` contains the reason, and all other fields are invalid.
    """

    processes: tuple[GpuProcess, ...]
    memory_used_bytes: int | None
    pids_visible: bool
    problem: str = ""
    silent: bool = False  # True if the driver does not answer.


class Unavailable(Struct, frozen=True):
    """An unusable device, with the reason."""

    name: str
    reason: str


class VisibleGpu(Struct, frozen=True):
    """A GPU that NVML reports as usable."""

    place: tuple[int, int, int]  # PCI address: domain, bus and device.
    uuid: str
    product: str
    memory_bytes: int


def unknown_usage(problem: str, *, silent: bool = False) -> Usage:
    """Return an unknown usage for a device whose usage could not be read.

    `silent` is True if the driver did not answer the query.
    """
    return Usage(processes=(), memory_used_bytes=None, pids_visible=False, problem=problem, silent=silent)


class NvmlQuestion(Struct, frozen=True):
    """Query for the list of GPUs (`uuids` is None) or for the usage of some GPUs."""

    seq: int
    uuids: tuple[str, ...] | None = None


class NvmlAnswer(Struct, frozen=True):
    """Answer to the `NvmlQuestion` with the same `seq`."""

    seq: int
    seen: tuple[VisibleGpu, ...] = ()
    unavailable: tuple[Unavailable, ...] = ()
    usage: dict[str, Usage] = {}


_decoder = msgspec.json.Decoder(NvmlAnswer)


class NvmlTimeout(Exception):
    """Raised if NVML did not answer in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"NVML did not answer in {limit_s:g} s")


class NvmlClient(Protocol):
    """Interface of clients that query NVML about GPUs."""

    def ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        """Return the existing GPUs if `uuids` is None, else their usage. Raises NvmlTimeout."""
        ...


class NvmlProcess:
    """An `NvmlClient` that calls NVML in a helper process.

    `forks` is True if this process has a single thread, so that it can fork the helper process.
    """

    def __init__(self, source: str, limit_s: float, *, forks: bool = False, clock: Clock | None = None) -> None:
        self._source = source
        self._limit_s = limit_s
        self._forks = forks
        self._clock = clock or SystemClock()
        self._turn = threading.Lock()
        self._seq = 0
        # The client sends queries to the newest helper process. The client has killed the earlier helper processes,
        # which still hang.
        self._helpers: list[_Helper] = []
        self._silent_ns: int | None = None
        weakref.finalize(self, _end, self._helpers)

    def ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        """Return the existing GPUs if `uuids` is None, else their usage.

        Raises NvmlTimeout if NVML does not answer this query, or an earlier query, in time.
        """
        if not self._turn.acquire(timeout=self._limit_s):
            raise NvmlTimeout(self._limit_s)
        try:
            if self._silent_ns is not None:
                self._look_again(uuids)
            for _ in range(2):
                answer = self._answered(uuids)
                if answer is not None:
                    return answer
            why = "the NVML helper process ended without an answer"
            if uuids is None:
                return NvmlAnswer(self._seq, unavailable=(Unavailable("NVML", why),))
            return NvmlAnswer(self._seq, usage={uuid: unknown_usage(why) for uuid in uuids})
        finally:
            self._turn.release()

    def _answered(self, uuids: Sequence[str] | None) -> NvmlAnswer | None:
        """Return the helper process's answer, or None if the helper process died."""
        if not self._send(uuids):
            return None
        deadline_ns = self._clock.boottime_ns() + int(self._limit_s * 1e9)
        while (left_ns := deadline_ns - self._clock.boottime_ns()) > 0:
            if not self._is_readable(left_ns / 1e9):
                break
            answer = self._received()
            if answer is None or answer.seq == self._seq:
                return answer
        self._silent_ns = self._clock.boottime_ns()
        raise NvmlTimeout(self._limit_s)

    def _look_again(self, uuids: Sequence[str] | None) -> None:
        """Raise NvmlTimeout unless the helper process has answered or ended since the last timeout."""
        now_ns = self._clock.boottime_ns()
        if self._helpers and self._is_readable(0.0):
            self._silent_ns = None
            return
        if self._silent_ns is not None and now_ns - self._silent_ns > _ANOTHER_S * 1e9:
            self._silent_ns = now_ns
            self._helpers[-1].kill()
            self._helpers[:] = [helper for helper in self._helpers if not helper.is_gone(_END_S)]
            if len(self._helpers) < _STUCK_MAX:
                self._helpers.append(_Helper(self._source, forks=self._forks))
                self._send(uuids)
        raise NvmlTimeout(self._limit_s)

    def _send(self, uuids: Sequence[str] | None) -> bool:
        self._seq += 1
        question = NvmlQuestion(self._seq, None if uuids is None else tuple(uuids))
        try:
            if not self._helpers:
                self._helpers.append(_Helper(self._source, forks=self._forks))
            self._helpers[-1].channel.send(msgspec.json.encode(question))
        except OSError:
            self._lose()
            return False
        return True

    def _is_readable(self, limit_s: float) -> bool:
        sock = self._helpers[-1].channel.sock
        return sock.fileno() >= 0 and bool(select.select([sock], [], [], limit_s)[0])

    def _received(self) -> NvmlAnswer | None:
        try:
            received = self._helpers[-1].channel.receive()
            if received is not None:
                return _decoder.decode(received[0])
        except (OSError, msgspec.MsgspecError):
            pass
        self._lose()
        return None

    def _lose(self) -> None:
        if self._helpers:
            helper = self._helpers.pop()
            helper.kill()
            helper.is_gone(_END_S)


class _Helper:
    """A helper process that calls NVML."""

    def __init__(self, source: str, *, forks: bool) -> None:
        self.channel, theirs = pair()
        self.process: subprocess.Popen[bytes] | None = None
        try:
            if forks:
                self.pid = _forked(theirs, source)
            else:
                self.process = _started(theirs, source)
                self.pid = self.process.pid
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.channel.sock.setblocking(False)

    def kill(self) -> None:
        """Send SIGKILL. A helper process that hangs in the kernel survives the signal."""
        self.channel.close()
        with contextlib.suppress(OSError):
            # The kernel cannot reuse the pid of the helper process before the process is reaped.
            os.kill(self.pid, signal.SIGKILL)

    def is_gone(self, wait_s: float = 0.0) -> bool:
        """Return True if the helper process has ended."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(wait_s) is not None
            return False
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True


def _end(helpers: list[_Helper]) -> None:
    for helper in helpers:
        helper.kill()
        if not helper.is_gone(_END_S) and helper.process is not None:
            helper.process.returncode = 0  # The finalizer must not wait for a hanging helper process.


def _started(theirs: Channel, source: str) -> subprocess.Popen[bytes]:
    log = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        fd = theirs.fileno()
        return clean_process("serverless_gpu.node.devices.nvml", (fd, source), fds=(fd,), log=log, environ=os.environ)
    finally:
        os.close(log)


def _forked(theirs: Channel, source: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    # The helper process closes all inherited descriptors, because it could hang in the driver and keep a lock held.
    channel = os.dup2(theirs.fileno(), 3) if theirs.fileno() != 3 else 3
    last = 65_535
    with contextlib.suppress(OSError):
        last = max(int(name) for name in os.listdir("/proc/self/fd"))
    os.closerange(4, last + 1)
    os.setsid()
    main(channel, source)


def main(fd: int, source: str) -> NoReturn:
    """Answer NVML queries until the client exits.

    `source` is "" for NVML, or the path of the fakes' state file.
    """
    linux.set_name("sgpu-nvml")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.adopt(fd)
    reader = _StuckReader(Path(source)) if source else NvmlReader()
    questions = msgspec.json.Decoder(NvmlQuestion)
    with contextlib.suppress(OSError):
        while (received := channel.receive()) is not None:
            channel.send(msgspec.json.encode(reader.answer(questions.decode(received[0]))))
    os._exit(0)


class _StuckReader:
    """A fake driver that hangs while the state file requests a hang."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def answer(self, question: NvmlQuestion) -> NvmlAnswer:
        with contextlib.suppress(OSError):  # Without a state file, the fake driver does not hang.
            while b'"hangs":true' in self._state.read_bytes():
                time.sleep(_STUCK_PAUSE_S)
        return NvmlAnswer(question.seq)


class NvmlThread:
    """An `NvmlClient` that calls NVML in a thread. A hanging driver blocks the thread permanently."""

    def __init__(self, reader: NvmlReader, limit_s: float) -> None:
        self._reader = reader
        self._limit_s = limit_s
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, uuids: Sequence[str] | None) -> NvmlAnswer:
        """Return the answer to a query, as `NvmlClient.ask` does."""
        question = NvmlQuestion(0, None if uuids is None else tuple(uuids))
        if not self._turn.acquire(timeout=self._limit_s):
            raise NvmlTimeout(self._limit_s)
        try:
            return self._call(lambda: self._reader.answer(question))
        finally:
            self._turn.release()

    def _call(self, work: Callable[[], NvmlAnswer]) -> NvmlAnswer:
        if self._thread is not None and self._thread.is_alive():  # An earlier NVML call still hangs in the driver.
            raise NvmlTimeout(self._limit_s)
        answer: Future[NvmlAnswer] = Future()
        self._thread = threading.Thread(target=_settle, args=(answer, work), name="sgpu-nvml", daemon=True)
        self._thread.start()
        try:
            value = answer.result(timeout=self._limit_s)
        except TimeoutError:
            raise NvmlTimeout(self._limit_s) from None
        self._thread.join(timeout=self._limit_s)  # The thread has set its result and is exiting.
        return value


def _settle(answer: Future[NvmlAnswer], work: Callable[[], NvmlAnswer]) -> None:
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001 - the waiting thread raises this error
        answer.set_exception(error)


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
    """The part of `pynvml` (nvidia-ml-py) that this module uses. Tests substitute another implementation."""

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
    """Calls NVML, initialized once per process. A test may pass `given` to replace `pynvml`."""

    def __init__(self, given: Nvml | None = None, pid_namespace: str | None = None) -> None:
        self._given = given
        self._ready: Nvml | None = None
        self._sees_all_pids = sees_all_pids(pid_namespace)

    def answer(self, question: NvmlQuestion) -> NvmlAnswer:
        """Return NVML's answer to a query."""
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
        except nvml_errors(nvml) as error:
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
            self._ready = initialised_nvml(self._given)
        return self._ready


class NvmlBroken(Exception):
    """Raised if a driver is loaded but NVML does not work with it."""


def initialised_nvml(given: Nvml | None) -> Nvml | None:
    """Return initialized NVML, or None if no driver is loaded. Raises NvmlBroken if NVML does not work."""
    try:
        nvml = given if given is not None else cast(Nvml, importlib.import_module("pynvml"))
    except ImportError as error:
        raise NvmlBroken(f"cannot detect GPUs because nvidia-ml-py is not installed: {error}") from error
    try:
        nvml.nvmlInit()
    except nvml_errors(nvml) as error:
        absent = (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if getattr(error, "value", None) in absent:
            return None
        # A common cause is a driver update while the old kernel module is still loaded.
        raise NvmlBroken(f"NVML does not work with the loaded driver ({error}). Reload the driver or reboot") from error
    return nvml


def nvml_errors(nvml: Nvml) -> tuple[type[Exception], ...]:
    """Return the exceptions that NVML's functions raise."""
    return (nvml.NVMLError, nvml.NVMLLibraryMismatchError)


def _look(nvml: Nvml, index: int) -> VisibleGpu | Unavailable:
    name = f"GPU {index} in the driver's order"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = uuid = nvml.nvmlDeviceGetUUID(handle)
        with contextlib.suppress(*nvml_errors(nvml)):  # Most cards do not support MIG and return an error.
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                problem = f"MIG mode is on, but only whole GPUs can be lent (`nvidia-smi -i {uuid} -mig 0`)"
                return Unavailable(uuid, problem)
        pci = nvml.nvmlDeviceGetPciInfo(handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
        place = (pci.domain, pci.bus, pci.device)
        return VisibleGpu(place, uuid, nvml.nvmlDeviceGetName(handle), memory.total)
    except nvml_errors(nvml) as error:
        return Unavailable(name, f"NVML: {error}")


def _usage_of(nvml: Nvml, uuid: str, sees_all_pids: bool) -> Usage:
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        memory_used = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2).used
    except nvml_errors(nvml) as error:
        return unknown_usage(f"NVML: {error}")
    try:
        compute = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        graphics = nvml.nvmlDeviceGetGraphicsRunningProcesses(handle)
    except nvml_errors(nvml):
        return Usage(processes=(), memory_used_bytes=memory_used, pids_visible=False)
    merged: dict[int, GpuProcess] = {}
    # A process that both computes and draws counts as a computing process.
    for draws, infos in ((True, graphics), (False, compute)):
        for info in infos:
            merged[info.pid] = GpuProcess(info.pid, info.usedGpuMemory, _process_name(nvml, info.pid), draws)
    processes = tuple(merged[pid] for pid in sorted(merged))
    # If no process is visible, hidden processes hold the GPU memory.
    hidden = not processes and memory_used > IDLE_MEMORY_BYTES
    return Usage(processes, memory_used, pids_visible=sees_all_pids and not hidden)


def _process_name(nvml: Nvml, pid: int) -> str:
    try:
        command = nvml.nvmlSystemGetProcessName(pid)
    except UnicodeDecodeError:
        return ""
    except nvml_errors(nvml):  # The process has ended, or this user cannot see the process.
        return ""
    program = command.partition(" ")[0].rpartition("/")[2]
    # A process name may contain control characters for terminals, because each process chooses its own name.
    return "".join(letter for letter in program if letter.isprintable())[:_PROCESS_NAME_MAX]


def sees_all_pids(pid_namespace: str | None = None) -> bool:
    """Return True if pids in this pid namespace are equal to NVML's pids."""
    if pid_namespace is None:
        try:
            pid_namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            return False
    return pid_namespace == _FIRST_PID_NAMESPACE
