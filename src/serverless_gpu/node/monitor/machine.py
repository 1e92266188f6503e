"""The node at one moment: host, devices and ranks, put together; one sample a second serves all attempts.

    Host ────────────┐
    RankProcesses ───┼─▶ Machine.sample() ─▶ NodeSample ─┬─ .of(tenant) ─▶ Sample of one attempt
    NvmlSampler ─────┤                                   └─ everything, for who looks at the node
    fake_gpus.json ──┘

It never waits longer than some tens of milliseconds and never raises: what cannot be known is None, and `problem` says
why GPUs cannot be asked, so that it can be said once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.telemetry import GpuSample, HostSample, RankSample, Sample
from serverless_gpu.node.monitor.devices import FakeGpu, NvmlSampler, Reading, fake_state, from_rank
from serverless_gpu.node.monitor.host import Host
from serverless_gpu.node.monitor.ranks import Key, RankLook, RankProcesses


class Tenant(NamedTuple):
    """One attempt: its devices in order of local rank, its processes by global rank; both may not be known yet."""

    devices: tuple[Device, ...] = ()
    pids: Mapping[int, int] = {}


class NodeSample(NamedTuple):
    """The node at one moment.

    Attributes:
        at_ns: nanoseconds since 1970.
        gpus: devices by uuid.
        ranks: of each attempt, by its key, in order of global rank.
        problem: why GPUs could not be asked, else "".
    """

    at_ns: int
    host: HostSample
    gpus: dict[str, GpuSample]
    ranks: dict[str, tuple[RankSample, ...]]
    problem: str = ""

    def of(self, key: str, devices: Sequence[Device]) -> Sample:
        """Return the sample of one attempt."""
        gpus = tuple(self.gpus.get(device.uuid, GpuSample()) for device in devices)
        return Sample(self.at_ns, self.host, gpus, self.ranks.get(key, ()))

    def whole(self, devices: Sequence[Device], keys: Sequence[str]) -> Sample:
        """Return the sample of everything: these devices, and the ranks of these attempts one after the other."""
        gpus = tuple(self.gpus.get(device.uuid, GpuSample()) for device in devices)
        return Sample(self.at_ns, self.host, gpus, tuple(rank for key in keys for rank in self.ranks.get(key, ())))


class Machine:
    """Samples this machine.

    Args:
        home: the home directory: its disk is watched, and fakes read their state from `fake_gpus.json` there.
        nvml: what samples NVIDIA GPUs; None makes one.
        clock: tells the time.
    """

    def __init__(self, home: Path, *, nvml: NvmlSampler | None = None, clock: Clock | None = None) -> None:
        self._home = home
        self._host = Host(home)
        self._processes = RankProcesses()
        self._clock = clock or SystemClock()
        self._nvml = nvml or NvmlSampler(clock=self._clock)

    def sample(self, tenants: Mapping[str, Tenant], others: Sequence[Device] = ()) -> NodeSample:
        """Return the node now.

        Args:
            tenants: the attempts, by any key.
            others: devices that are sampled, too, whoever has them.
        """
        boottime_ns = self._clock.boottime_ns()
        roots = {pid: (key, rank) for key, tenant in tenants.items() for rank, pid in tenant.pids.items()}
        looks = self._processes.look(boottime_ns, roots)
        devices = {device.uuid: device for device in others}
        devices |= {device.uuid: device for tenant in tenants.values() for device in tenant.devices}
        real = [uuid for uuid, device in devices.items() if device.kind is DeviceKind.GPU]
        reading = self._nvml.sample(real) if real else Reading({}, None)
        ranks = {key: _ranks(key, tenant, looks, reading) for key, tenant in tenants.items()}
        gpus = {**reading.gpus, **self._made_up(devices, tenants, ranks)}
        return NodeSample(self._clock.wall_ns(), self._host.sample(boottime_ns), gpus, ranks, reading.problem)

    def _made_up(
        self,
        devices: Mapping[str, Device],
        tenants: Mapping[str, Tenant],
        ranks: Mapping[str, tuple[RankSample, ...]],
    ) -> dict[str, GpuSample]:
        """Return the samples of fakes and CPU slots."""
        made_up = {uuid: device for uuid, device in devices.items() if device.kind is not DeviceKind.GPU}
        if not made_up:
            return {}
        has: dict[str, tuple[RankSample | None, int]] = {}
        for key, tenant in tenants.items():
            has.update(_who_has(tenant.devices, ranks[key]))
        fakes = any(device.kind is DeviceKind.FAKE for device in made_up.values())
        state: dict[str, FakeGpu] = fake_state(self._home) if fakes else {}
        return {uuid: from_rank(device, *has.get(uuid, (None, 1)), state) for uuid, device in made_up.items()}


def _ranks(key: str, tenant: Tenant, looks: Mapping[Key, RankLook], reading: Reading) -> tuple[RankSample, ...]:
    samples: list[RankSample] = []
    real = any(device.kind is DeviceKind.GPU for device in tenant.devices)
    for rank in sorted(tenant.pids):
        look = looks.get((key, rank))
        if look is None:
            samples.append(RankSample(rank))
            continue
        memory = None
        if real and reading.memory_by_pid is not None:
            memory = sum(reading.memory_by_pid.get(pid, 0) for pid in look.pids)
        samples.append(RankSample(rank, look.cpu_percent, look.memory_bytes, memory))
    return tuple(samples)


def _who_has(devices: Sequence[Device], ranks: Sequence[RankSample]) -> dict[str, tuple[RankSample | None, int]]:
    """Return which rank has a device and how many it has: one each, or all of them one process."""
    if len(ranks) == 1:
        return {device.uuid: (ranks[0], len(devices)) for device in devices}
    return {device.uuid: (rank, 1) for device, rank in zip(devices, ranks, strict=False)}
