"""Samples the node once a second, in a thread of its own: a driver that hangs stops only samples.

    main thread ──ask(wanted)──▶ thread: NodeReader ──▶ NodeSample, and the main thread is woken ──take()──▶ main thread

One question at a time: until it is answered the next ones are left out, so nothing piles up. A failed sample (no
descriptors, no memory, a bug of ours) is left out, too; a repeated failure is logged once.
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
    """Devices and ranks to sample."""

    devices: tuple[Device, ...] = ()  # of all attempts, each once
    ranks: Mapping[str, Mapping[int, int]] = {}  # pids by global rank, by key of the attempt
    used_by: Mapping[str, tuple[str, int]] = {}  # device to attempt and global rank
    fakes: str | None = None  # devices declared by `sgpu top`, in place of the node's own; None while it does not run


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one moment: devices by uuid, ranks by attempt."""

    at_ns: int  # nanoseconds since 1970
    devices: tuple[Device, ...]
    host: HostSample
    gpus: Mapping[str, GpuSample]
    ranks: Mapping[str, tuple[RankSample, ...]]
    problems: tuple[str, ...] = ()  # sentences about what could not be sampled; the receiver reports each once


class NodeReader(Protocol):
    """Protocol of a node's sampler."""

    def look(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        """Return what is seen now."""
        ...


class Sampler:
    """The sampling thread; makes `machine` and calls `wake` there, so that no start-up delays a loop."""

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
            except Exception as error:  # noqa: BLE001 - the next look may succeed, and no other thread would begin it
                if repr(error) != logged:
                    logged = repr(error)
                    traceback.print_exc()
            self._looks.put(look)
            self._wake()


class Bell:
    """Wakes a loop from other threads."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable after a ring

    def ring(self) -> None:
        """Wake the loop."""
        os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        """Be silent until the next ring."""
        os.eventfd_read(self.fd)
