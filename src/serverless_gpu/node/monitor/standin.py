"""Until the real ones land: a machine that is always idle, and a file of samples without a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from serverless_gpu.model.ledger import DeviceUse
from serverless_gpu.model.telemetry import GpuSample, Header, HostSample, RankSample, Sample
from serverless_gpu.node.monitor.sampling import Look, Wanted


class IdleMachine:
    """A machine on which nothing happens."""

    def look(self, wanted: Wanted, at_ns: int) -> Look:
        """Return zeros."""
        return Look(
            at_ns=at_ns,
            devices=wanted.devices,
            host=HostSample(cpu_percent=0.0),
            gpus={device.uuid: GpuSample(busy_percent=0.0, memory_bytes=0) for device in wanted.devices},
            ranks={key: tuple(RankSample(rank, 0.0, 0) for rank in pids) for key, pids in wanted.ranks.items()},
        )


class PlainRecording:
    """Appends every sample."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._header = header
        self._samples = 0
        self._write(msgspec.json.encode(header))

    def append(self, sample: Sample) -> bool:
        """Write a sample."""
        self._samples += 1
        self._write(msgspec.json.encode(sample))
        return True

    def uses(self) -> tuple[DeviceUse, ...]:
        """Return the devices."""
        return tuple(DeviceUse(uuid=device.uuid, samples=self._samples) for device in self._header.devices)

    def busy(self, sample: Sample) -> bool:
        """Return that something worked."""
        return bool(sample)

    def close(self) -> None:
        """Do nothing."""

    def _write(self, *lines: bytes) -> None:
        with self._path.open("ab") as file:
            file.writelines(_ended(lines))


def _ended(lines: Sequence[bytes]) -> list[bytes]:
    return [line + b"\n" for line in lines]
