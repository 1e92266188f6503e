"""Helpers of the tests of gpus that other tests use as well."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from serverless_gpu.node.devices.nvml import MIB

GIB = 1024 * MIB


class FakeNvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


LOST = FakeNvmlError(15, "GPU is lost")


class Card:
    """One card of the fake driver; `broken` is what every question about it is answered with."""

    def __init__(self, uuid: str, bus: int, *, used: int = 3 * MIB, broken: Exception | None = None) -> None:
        self.uuid = uuid
        self.bus = bus
        self.domain = 0
        self.used = used
        self.broken = broken
        self.mig = 0
        self.compute: list[tuple[int, int | None]] = []
        self.graphics: list[tuple[int, int | None]] = []
        self.processes_error: Exception | None = None


class FakeNvml:
    """Speaks like pynvml about made-up cards."""

    NVMLError: type[Exception] = FakeNvmlError
    NVMLLibraryMismatchError: type[Exception] = KeyError
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    nvmlMemory_v2 = 2

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.init_error: Exception | None = None
        self.count_error: Exception | None = None
        self.stuck: threading.Event | None = None
        self.names = {4242: "/opt/conda/bin/python train.py", 900: "/usr/lib/xorg/Xorg"}

    def nvmlInit(self) -> None:
        if self.init_error:
            raise self.init_error

    def nvmlDeviceGetCount(self) -> int:
        if self.stuck:
            self.stuck.wait()
        if self.count_error:
            raise self.count_error
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> object:
        return self._working(self.cards[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> object:
        if self.stuck:
            self.stuck.wait()
        for card in self.cards:
            if card.uuid == uuid:
                return self._working(card)
        raise FakeNvmlError(6, "Not Found")

    def nvmlDeviceGetUUID(self, handle: object, /) -> str:
        return self._card(handle).uuid

    def nvmlDeviceGetName(self, handle: object, /) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetPciInfo(self, handle: object, /) -> SimpleNamespace:
        return SimpleNamespace(domain=self._card(handle).domain, bus=self._card(handle).bus, device=0)

    def nvmlDeviceGetMigMode(self, handle: object, /) -> list[int]:
        if self._card(handle).mig < 0:
            raise FakeNvmlError(3, "Not Supported")
        return [self._card(handle).mig, 0]

    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int, /) -> SimpleNamespace:
        assert version == self.nvmlMemory_v2  # the first version counts the driver's reserve as used
        return SimpleNamespace(total=80 * GIB, used=self._card(handle).used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object, /) -> list[SimpleNamespace]:
        error = self._card(handle).processes_error
        if error:
            raise error
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self._card(handle).compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: object, /) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in self._card(handle).graphics]

    def nvmlSystemGetProcessName(self, pid: int, /) -> str:
        if pid not in self.names:
            raise FakeNvmlError(6, "Not Found")
        return self.names[pid]

    def _working(self, card: Card) -> Card:
        if card.broken:
            raise card.broken
        return card

    def _card(self, handle: object) -> Card:
        assert isinstance(handle, Card)
        return handle
