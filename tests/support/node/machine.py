"""Helpers of the tests of machine that other tests use as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from serverless_gpu.model.hardware import Device
from serverless_gpu.node.monitor.sampler import NvmlSampler, SampleRequest
from serverless_gpu.testing import FakeClock
from tests.support.node.gpus import Card, FakeNvml, FakeNvmlError


class SampledCard(Card):
    """A card with everything a sample asks for."""

    watts = 345_600
    throttle = 0x4
    temperature = 61
    kib = 1000
    link_error = 0
    pcie = 50


class SampledNvml(FakeNvml):
    """A driver that also answers what a sample asks; `unknown` are functions this driver does not have."""

    def __init__(self, *cards: Card) -> None:
        super().__init__(*cards)
        self.unknown: set[str] = set()
        self.pcie_asked: list[str] = []

    def nvmlDeviceGetUtilizationRates(self, handle: object, /) -> SimpleNamespace:
        return SimpleNamespace(gpu=87, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: SampledCard, /) -> int:
        if "power" in self.unknown:
            raise FakeNvmlError(3, "Not Supported")
        return handle.watts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object, /) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, handle: SampledCard, sensor: int, /) -> int:
        assert sensor == 0
        return handle.temperature

    def nvmlDeviceGetClockInfo(self, handle: object, clock: int, /) -> int:
        return {1: 1980, 2: 2619}[clock]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: SampledCard, /) -> int:
        return handle.throttle

    def nvmlDeviceGetFieldValues(self, handle: SampledCard, fields: list[tuple[int, int]], /) -> list[SimpleNamespace]:
        assert fields[0][1] == 0xFFFFFFFF
        kib = handle.kib * (2 if fields[0][0] == 138 else 1)
        return [SimpleNamespace(nvmlReturn=handle.link_error, value=SimpleNamespace(ullVal=kib))]

    def nvmlDeviceGetPcieThroughput(self, handle: SampledCard, way: int, /) -> int:
        self.pcie_asked.append(handle.uuid)
        return handle.pcie * (2 if way == 0 else 1)


def sampler(
    *cards: Card, clock: FakeClock | None = None, pids_visible: bool = True, wait_s: float = 20
) -> tuple[NvmlSampler, SampledNvml]:
    nvml = SampledNvml(*cards)
    return NvmlSampler(nvml=nvml, clock=clock or FakeClock(), wait_s=wait_s, pids_visible=pids_visible), nvml


def wanted(
    attempts: Mapping[str, tuple[Sequence[Device], Mapping[int, int]]], fakes: str | None = None
) -> SampleRequest:
    """Return what a monitor asks about these attempts: their devices, and pids by rank."""
    used_by = {
        device.uuid: (key, rank)
        for key, (devices, pids) in attempts.items()
        for device, rank in zip(devices, list(pids) * (len(devices) if len(pids) == 1 else 1), strict=False)
    }
    return SampleRequest(
        devices=tuple(device for devices, _ in attempts.values() for device in devices),
        ranks={key: pids for key, (_, pids) in attempts.items()},
        used_by=used_by,
        fakes=fakes,
    )
