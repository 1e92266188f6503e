"""The node at one moment: host, devices and ranks; one sample a second serves all attempts.

    Host ────────────┐
    RankProcesses ───┼─▶ ThisMachine.look(wanted) ─▶ NodeSample ─▶ a sample for each attempt, a frame for `sgpu top`
    NvmlSampler ─────┤
    fake_gpus.json ──┘

It waits at most some tens of milliseconds, except for a list of GPUs (`sgpu top`) while the driver hangs. It never
raises: an unknown is None, and `NodeSample.problems` says why, so that it is reported once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.hardware import Device, DeviceKind, GpuType
from serverless_gpu.model.telemetry.samples import SECOND_NS, GpuSample, RankSample
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.gpus import FAKE_VARIABLE, Provider, providers
from serverless_gpu.node.monitor.devices import FakeGpu, GpuReading, NvmlSampler, fake_state, from_rank
from serverless_gpu.node.monitor.sampler import Host, Key, NodeSample, RankLook, RankProcesses, SampleRequest

_LIST_EVERY_NS = 30 * SECOND_NS


class ThisMachine:
    """Samples this machine; used by one thread. `nvml` of None makes a sampler."""

    def __init__(self, home: Path, *, nvml: NvmlSampler | None = None, clock: Clock | None = None) -> None:
        self._home = home
        self._host = Host(home)
        self._processes = RankProcesses()
        self._clock = clock or SystemClock()
        self._nvml = nvml or NvmlSampler(clock=self._clock)
        self._listed: tuple[str, int, tuple[Device, ...], str] | None = None
        self._sources: tuple[str, tuple[GpuType, ...], tuple[Provider, ...]] | None = None

    def look(self, wanted: SampleRequest, at_ns: int) -> NodeSample:
        """Return a sample (nanoseconds since 1970); an unused made-up device is idle."""
        boottime_ns = self._clock.boottime_ns()
        own, problem = ((), "") if wanted.fakes is None else self._list(wanted.fakes, boottime_ns)
        devices = {device.uuid: device for device in (*own, *wanted.devices)}
        real = [uuid for uuid, device in devices.items() if device.kind is DeviceKind.GPU]
        roots = {pid: (key, rank) for key, pids in wanted.ranks.items() for rank, pid in pids.items()}
        looks = self._processes.look(boottime_ns, roots)
        reading = self._nvml.sample(real) if real else GpuReading({}, None)
        on_gpus = {key for uuid, (key, _) in wanted.used_by.items() if uuid in real}
        ranks = {
            key: _ranks(key, pids, looks, reading if key in on_gpus else GpuReading({}, None))
            for key, pids in wanted.ranks.items()
        }
        return NodeSample(
            at_ns=at_ns,
            devices=tuple(devices.values()),
            host=self._host.sample(boottime_ns),
            gpus={**reading.gpus, **self._made_up(devices, wanted, ranks)},
            ranks=ranks,
            problems=tuple(text for text in (problem, reading.problem) if text),
        )

    def _list(self, fakes: str, now_ns: int) -> tuple[tuple[Device, ...], str]:
        """Return the devices of this node, and what is wrong with the list; CPU slots where there is no GPU."""
        if self._listed is None or self._listed[0] != fakes or now_ns - self._listed[1] >= _LIST_EVERY_NS:
            devices: tuple[Device, ...] = ()
            problem = ""
            try:
                own = read_configuration(Home(self._home)).types
                if self._sources is None or self._sources[:2] != (fakes, own):
                    self._sources = (fakes, own, providers(self._home, {FAKE_VARIABLE: fakes}, own))
                devices = next(filter(None, (source.devices() for source in self._sources[2])), ())
            except ServerlessGpuError as error:
                problem = str(error)
            self._listed = (fakes, now_ns, devices, problem)
        return self._listed[2:]

    def _made_up(
        self, devices: Mapping[str, Device], wanted: SampleRequest, ranks: Mapping[str, Sequence[RankSample]]
    ) -> dict[str, GpuSample]:
        """Return the samples of fakes and CPU slots: what their ranks use."""
        made_up = {uuid: device for uuid, device in devices.items() if device.kind is not DeviceKind.GPU}
        fakes = any(device.kind is DeviceKind.FAKE for device in made_up.values())
        state: dict[str, FakeGpu] = fake_state(self._home) if fakes else {}
        by_key = {(key, rank.rank): rank for key, samples in ranks.items() for rank in samples}
        shares = Counter(wanted.used_by.values())
        gpus: dict[str, GpuSample] = {}
        for uuid, device in made_up.items():
            user = wanted.used_by.get(uuid)
            rank = None if user is None else by_key.get(user, RankSample(user[1]))
            gpus[uuid] = from_rank(device, rank, 1 if user is None else shares[user], state)
        return gpus


def _ranks(
    key: str, pids: Mapping[int, int], looks: Mapping[Key, RankLook], reading: GpuReading
) -> tuple[RankSample, ...]:
    samples: list[RankSample] = []
    for rank in sorted(pids):
        look = looks.get((key, rank))
        if look is None:
            samples.append(RankSample(rank))
            continue
        used = reading.memory_by_pid
        memory = None if used is None else sum(used.get(pid, 0) for pid in look.pids)
        samples.append(RankSample(rank, look.cpu_percent, look.memory_bytes, memory))
    return tuple(samples)
