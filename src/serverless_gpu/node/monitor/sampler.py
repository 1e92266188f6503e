"""Looking at the node once a second, in a thread of its own: a driver that hangs stops samples, and nothing else.

    main thread ──ask(wanted)──▶ thread: Machine.sample ──▶ Look, and the main thread is woken ──take()──▶ main thread

One question at a time: while one is not answered the next ones are left out, so nothing piles up. A look that fails
(no descriptors, no memory, a mistake of ours) is left out, too, and logged once as long as it fails alike.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.telemetry.samples import GpuSample, HostSample, RankSample


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be looked at.

    Attributes:
        devices: of all attempts, each once.
        ranks: pids by global rank, for each attempt by its key.
        used_by: which rank, as attempt and global rank, has a device.
        fakes: what declares devices in place of the node's own, where somebody looks; None where nobody does.
    """

    devices: tuple[Device, ...] = ()
    ranks: Mapping[str, Mapping[int, int]] = {}
    used_by: Mapping[str, tuple[str, int]] = {}
    fakes: str | None = None


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one moment: devices by uuid, ranks by attempt.

    Attributes:
        at_ns: nanoseconds since 1970.
        problems: what could not be looked at, in words; said once each by whoever gets this.
    """

    at_ns: int
    devices: tuple[Device, ...]
    host: HostSample
    gpus: Mapping[str, GpuSample]
    ranks: Mapping[str, tuple[RankSample, ...]]
    problems: tuple[str, ...] = ()


class NodeReader(Protocol):
    """What looks at a node."""

    def look(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        """Return what is seen now."""
        ...


class Sampler:
    """The thread that looks.

    Args:
        machine: called for the first time in the thread, so that its own start keeps nobody waiting.
        clock: where time comes from.
        wake: called in the thread when a look is there.
    """

    def __init__(self, machine: Callable[[], NodeReader], clock: Clock, wake: Callable[[], None]) -> None:
        self._make = machine
        self._clock = clock
        self._wake = wake
        self._asked: queue.SimpleQueue[SampleRequest] = queue.SimpleQueue()
        self._looks: queue.SimpleQueue[NodeSample | None] = queue.SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None

    def ask(self, wanted: SampleRequest) -> bool:
        """Have the node looked at; return False while the last look is not there yet."""
        if self._busy:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="sampler", daemon=True)
            self._thread.start()
        self._busy = True
        self._asked.put(wanted)
        return True

    def take(self) -> NodeSample | None:
        """Return the look that was asked for, once; None where it is not there yet, or has failed."""
        try:
            look = self._looks.get_nowait()
        except queue.Empty:
            return None
        self._busy = False
        return look

    def _serve(self) -> None:
        machine: NodeReader | None = None
        logged = ""
        while True:
            wanted = self._asked.get()
            look = None
            try:
                machine = machine or self._make()
                look = machine.look(wanted, self._clock.wall_ns())
                logged = ""
            except Exception as error:  # noqa: BLE001 - the next look may succeed, and nobody else would begin it
                if repr(error) != logged:
                    logged = repr(error)
                    traceback.print_exc()
            self._looks.put(look)
            self._wake()


class Bell:
    """Wakes a loop from other threads.

    Attributes:
        fd: readable while somebody has rung.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def ring(self) -> None:
        """Wake the loop."""
        os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        """Be silent until somebody rings again."""
        os.eventfd_read(self.fd)
