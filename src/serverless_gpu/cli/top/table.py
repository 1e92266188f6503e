"""Turns a monitor frame into a table: devices with their owners, runs with their ranks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.model.hardware import Device
from serverless_gpu.model.telemetry.samples import GpuSample, HostSample, RankSample
from serverless_gpu.node.monitor.messages import NodeFrame, WatchedAttempt


class DeviceOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Owner of a device."""

    run_id: str  # the run or session, or "" where unknown
    name: str  # or ""
    rank: int | None  # global rank that uses the device, or None
    user: str


class DeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One device now; `owner` None is free, `quarantined` is why it is not lent, or ""."""

    device: Device
    now: GpuSample
    owner: DeviceOwner | None = None
    quarantined: str = ""


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt now; `began_ns` is nanoseconds since 1970, 0 before its ranks began."""

    run_id: str
    fence: int
    name: str
    state: str
    began_ns: int
    devices: int
    tracked: str
    ranks: tuple[RankSample, ...]


class NetworkRates(msgspec.Struct, frozen=True, kw_only=True):
    """Network traffic in bytes per second; None where unknown."""

    receive: float | None = None
    transmit: float | None = None


class TopTable(msgspec.Struct, frozen=True, kw_only=True):
    """The node at `at_ns`, nanoseconds since 1970."""

    at_ns: int
    node: str
    host: HostSample
    rates: NetworkRates
    devices: tuple[DeviceRow, ...]
    runs: tuple[RunRow, ...]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """Context of a frame."""

    node: str  # the machine's name
    user: str  # owner of this home
    holders: Mapping[str, DeviceOwner] = {}  # by device, from its lock; also runs of other homes and users
    quarantined: Mapping[str, str] = {}  # reasons by device


def tabulate(frame: NodeFrame, before: NodeFrame | None, around: Around) -> TopTable:
    """Return a frame as a table; the frame before gives network rates."""
    owners = {**around.holders, **_owners(frame.attempts, around.user)}
    gpus = frame.sample.gpus
    rows = tuple(
        DeviceRow(
            device=device,
            now=gpus[place] if place < len(gpus) else GpuSample(),
            owner=owners.get(device.uuid),
            quarantined=around.quarantined.get(device.uuid, ""),
        )
        for place, device in enumerate(frame.devices)
    )
    runs = tuple(
        RunRow(
            run_id=attempt.run_id,
            fence=attempt.fence,
            name=attempt.name,
            state=attempt.state.value,
            began_ns=attempt.began_ns,
            devices=len(attempt.devices),
            tracked=attempt.tracked,
            ranks=ranks,
        )
        for attempt, ranks in zip(frame.attempts, _ranks(frame.attempts, frame.sample.ranks), strict=True)
    )
    return TopTable(
        at_ns=frame.sample.at_ns,
        node=around.node,
        host=frame.sample.host,
        rates=_rates(frame, before),
        devices=rows,
        runs=runs,
    )


def as_json(table: TopTable) -> dict[str, object]:
    """Return a table as JSON, with null for unknown values."""
    return {
        "at_ns": table.at_ns,
        "node": table.node,
        "host": _named(table.host) | {"receive_bytes_s": table.rates.receive, "transmit_bytes_s": table.rates.transmit},
        "devices": [
            {"uuid": row.device.uuid, "index": row.device.index, "type": row.device.type, "kind": row.device.kind.value}
            | _named(row.now)
            | {"owner": None if row.owner is None else msgspec.to_builtins(row.owner), "quarantined": row.quarantined}
            for row in table.devices
        ],
        "runs": [msgspec.to_builtins(row) | {"ranks": [_named(rank) for rank in row.ranks]} for row in table.runs],
    }


def _named(value: msgspec.Struct) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def _owners(attempts: Sequence[WatchedAttempt], user: str) -> dict[str, DeviceOwner]:
    """Return the owner of each device; an attempt's devices are in the order of its ranks here."""
    owners: dict[str, DeviceOwner] = {}
    for attempt in attempts:
        ranks = sorted(attempt.pids)
        for place, uuid in enumerate(attempt.devices):
            # One process for all devices of a node, as a program per node has: it has each of them.
            rank = ranks[place] if len(ranks) == len(attempt.devices) else ranks[0] if len(ranks) == 1 else None
            owners[uuid] = DeviceOwner(run_id=attempt.run_id, name=attempt.name, rank=rank, user=user)
    return owners


def _ranks(attempts: Sequence[WatchedAttempt], samples: Sequence[RankSample]) -> list[tuple[RankSample, ...]]:
    """Return the samples of each attempt's ranks; they come in order, and one that is gone is left out."""
    left = list(samples)
    found: list[tuple[RankSample, ...]] = []
    for attempt in attempts:
        own: list[RankSample] = []
        while left and left[0].rank in attempt.pids and (not own or left[0].rank > own[-1].rank):
            own.append(left.pop(0))
        found.append(tuple(own))
    return found


def _rates(frame: NodeFrame, before: NodeFrame | None) -> NetworkRates:
    if before is None or frame.sample.at_ns <= before.sample.at_ns:
        return NetworkRates()
    seconds = (frame.sample.at_ns - before.sample.at_ns) / 1e9
    now, then = frame.sample.host, before.sample.host
    return NetworkRates(
        receive=_rate(now.network_receive_bytes, then.network_receive_bytes, seconds),
        transmit=_rate(now.network_transmit_bytes, then.network_transmit_bytes, seconds),
    )


def _rate(now: int | None, then: int | None, seconds: float) -> float | None:
    return None if now is None or then is None or now < then else (now - then) / seconds
