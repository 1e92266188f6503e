"""Estimates the start and the cost of a call for `fn.estimate(*args)`, without starting a run.

    local: devices of this machine (`outlook`)                    ─▶ Estimate, with the price (`model/cost.py`)
    remote: POST /estimates of the server (`remote/estimate.py`)  ─▶

An estimate runs the same checks as a call and raises the same errors. If the start time is unknown, the estimate
contains the reason. For a local run, the client computes the start time from the runs that hold the devices:

    locks: holder of each device ─┬─ of this home ─▶ time limit ────────────────────────────▶ latest end
    tickets: waiting runs ────────┤              └─▶ durations of earlier runs of its name ─▶ expected end
    processes, quarantine ────────┘  of other users, sessions ──────────────────────────────▶ unknown

The queue of a machine without a server is first come, first served. While other runs wait, the start time of a new run
is unknown.

An unusable lock directory raises `StorageError`. The client treats a device that does not answer as busy.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec

from serverless_gpu.ambient import SystemClock, format_soon
from serverless_gpu.client.launch.launch import check_call, check_nccl, check_shown, home_with_notice
from serverless_gpu.client.launch.preflight import check_travels, refusing_reducer
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.cost import AttemptDuration, CostEstimate, Devices, estimated
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.placement import Candidates, candidates, restrict
from serverless_gpu.model.receipt import TextPrinter
from serverless_gpu.model.scheduling import duration_estimates, values, wait_messages
from serverless_gpu.model.scheduling.values import DeviceHolder, StartEstimate, Wait, WaitReason
from serverless_gpu.model.spec import Command, RunSpec, check_command
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.attempt.history import FUNCTION, RunRecord, read_run, run_ids
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.gpu_gate import foreign
from serverless_gpu.node.devices.inventory import Provider, offered
from serverless_gpu.node.devices.locks import DeviceLocks, LockHolder, lock_directory
from serverless_gpu.node.devices.nvml import unknown_usage
from serverless_gpu.node.devices.reservation import find_provider, retest_quarantined

HERE = "this machine"
_PAST_MAX = 200
_Past = Mapping[str, Sequence[float]]
_BY_THEMSELVES = (State.SUCCEEDED.value, State.TIMED_OUT.value)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The estimated start and cost of a run. `print` shows the estimate as a sentence.

    Attributes:
        start: expected start time with its time zone, or None if unknown.
        seconds: seconds until the start. 0 means an immediate start, None means an unknown start.
        is_bound: True if `start` is the latest possible time, because all earlier runs have a time limit.
        basis: the facts behind the estimate, or the reason why the start is unknown.
        node: name of the node on which the run would start, or "" if unknown.
        nodes: names of the nodes, for a gang that spans several nodes.
        place: position in the queue for devices of this type. 0 means that the run would start immediately.
        impossible: True if no existing node can ever serve the run.
        cost: expected and maximum cost of the run. None if the server gives no cost.
        policy: the server's usage policy for the run, or "".
        budgets: sentences about the remaining amount of each budget that the run counts toward.
    """

    start: datetime | None
    seconds: float | None
    is_bound: bool = False
    basis: str = ""
    node: str = ""
    nodes: tuple[str, ...] = ()
    place: int = 0
    impossible: bool = False
    cost: CostEstimate | None = None
    policy: str = ""
    budgets: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the start time as a sentence. If a price is known, add a line with the cost."""
        is_priced = self.cost is not None and self.cost.micros_per_hour is not None
        return f"{self.start_text()}\n{self.cost}" if is_priced else self.start_text()

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(str(self))

    def start_text(self) -> str:
        """Return the start time as a sentence, for example ``"at 14:20 at the latest on n3: …; 2nd in line"``."""
        estimate = values.StartEstimate(
            at_ns=None if self.start is None else round(self.start.timestamp() * 1e9),
            is_bound=self.is_bound,
            node=self.node,
            nodes=self.nodes,
            basis=self.basis,
            place=self.place,
            impossible=self.impossible,
        )
        return wait_messages.estimate_text(estimate, format_soon)


def estimate(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], spec: RunSpec
) -> Estimate:
    """Return the estimated start time of a call, or raise the error that the call would raise."""
    check_call(function, args, kwargs, spec)
    check_travels(function, args, kwargs, refusing_reducer(spec))
    return estimate_run(spec)


def estimate_run(spec: RunSpec) -> Estimate:
    """Return the estimated start time of a run, or raise the error that a launch would raise."""
    if isinstance(spec.payload, Command):
        check_command(spec.payload)
    if spec.remote:
        # The client imports the HTTP library only for remote calls, because the import is slow.
        return cast("Estimate", importlib.import_module("serverless_gpu.client.remote.estimate").estimate(spec))
    return _local_estimate(spec)


def to_estimate(estimate: values.StartEstimate, now_ns: int, cost: CostEstimate | None = None) -> Estimate:
    """Convert an estimate with times in nanoseconds since 1970 to an estimate in local time."""
    at_ns, basis = estimate.at_ns, estimate.basis
    if estimate.wait is not None:
        # The estimate displays the queue position and the start time separately.
        wait = msgspec.structs.replace(estimate.wait, place=0, at_ns=None)
        basis += f"; {wait_messages.sentence(wait, format_soon)}"
    left_s = None if at_ns is None else max(0.0, (at_ns - now_ns) / 1e9)
    return Estimate(
        start=None if at_ns is None else datetime.fromtimestamp(at_ns / 1e9, UTC).astimezone(),
        seconds=0.0 if left_s is not None and not estimate.place else left_s,
        is_bound=estimate.is_bound,
        basis=basis,
        node=estimate.node,
        nodes=estimate.nodes,
        place=estimate.place,
        impossible=estimate.impossible,
        cost=cost,
    )


def unknown_estimate(why: str) -> Estimate:
    """Return an estimate with an unknown start time and the reason."""
    return Estimate(start=None, seconds=None, basis=why)


def _local_estimate(spec: RunSpec) -> Estimate:
    """Return the estimated start time of a local run, from the agent's devices and their locks."""
    home = home_with_notice()
    channel, greeting = connect(home)
    channel.close()
    devices = restrict(offered(greeting, os.environ), os.environ.get("CUDA_VISIBLE_DEVICES"))
    wanted = spec.resources
    chosen = candidates(gpus=wanted.gpus, gpu_type=wanted.gpu_type, devices=devices, own=greeting.own_types)
    check_shown(spec, chosen.count)
    check_nccl(spec, chosen.devices)
    kind, now_ns = chosen.devices[0].kind, SystemClock().wall_ns()
    found = outlook(
        home,
        chosen,
        locks=DeviceLocks(lock_directory(kind, home.root)),
        provider=find_provider(kind, os.environ, home, None),
        now_ns=now_ns,
        ignore_busy=wanted.ignore_busy,
    )
    price = greeting.prices.get(chosen.devices[0].type, UNPRICED)
    return to_estimate(found, now_ns, _cost_here(home, spec, chosen, price))


def _cost_here(home: Home, spec: RunSpec, chosen: Candidates, tariff: Tariff) -> CostEstimate:
    devices = Devices(
        gpu_type=chosen.devices[0].type,
        count=chosen.count,
        cpus=spec.resources.cpus or 0,
        memory_bytes=spec.resources.memory_bytes or 0,
        tariff=tariff,
    )
    # A local run does not support the options `retries` and `resume`.
    lasting = AttemptDuration(limit_s=spec.timeout_s, expected_s=expected_s(home, spec.name))
    return estimated(devices, lasting, advice="set a price under [prices] of config.toml")


def outlook(
    home: Home,
    wanted: Candidates,
    *,
    locks: DeviceLocks,
    provider: Provider,
    now_ns: int,
    ignore_busy: bool = False,
) -> StartEstimate:
    """Return the estimated time at which a new run would get its devices.

    Raises StorageError for an unusable lock directory.
    """
    uuids = [device.uuid for device in wanted.devices]
    kind = wanted.devices[0].type
    waiting = locks.waiting(kind)
    holders = locks.holders(uuids)
    held = {holder.uuid for holder in holders}
    idle = [uuid for uuid in uuids if uuid not in held]
    outside = _outside(locks, provider, idle, ignore_busy=ignore_busy)
    free = len(idle) - outside
    if free >= wanted.count and not waiting:
        return StartEstimate(at_ns=now_ns, is_bound=False, node=HERE, basis=f"{free} of {len(uuids)} {kind} are free")
    having = device_holders(home, holders, now_ns)
    at_ns, is_bound = (None, False) if waiting else _when(wanted.count - free, having)
    wait = Wait(
        run_id="",
        reason=WaitReason.CAPACITY,
        count=wanted.count,
        gpu_type=kind,
        node=HERE,
        free=max(0, free),
        outside=outside,
        holders=tuple(having),
        words=f"{waiting} {'run is' if waiting == 1 else 'runs are'} ahead in the queue" if waiting else "",
    )
    return StartEstimate(
        at_ns=at_ns,
        is_bound=is_bound,
        node=HERE if at_ns is not None else "",
        basis=wait_messages.sentence(wait, functools.partial(format_soon, now_ns=now_ns)),
        place=waiting + 1,
    )


def expected_s(home: Home, name: str) -> float | None:
    """Return the expected device time of runs with this name, or None if too few such runs have ended."""
    return duration_estimates.expected_s(_past(home, {name})[name]) if name else None


def _outside(locks: DeviceLocks, provider: Provider, uuids: Sequence[str], *, ignore_busy: bool) -> int:
    """Return the number of devices that are quarantined or that other programs use."""
    if not uuids:
        return 0
    quarantined = retest_quarantined(locks, provider, uuids)
    usage = {} if ignore_busy else provider.usage(list(uuids))
    used = [
        uuid
        for uuid in uuids
        if not ignore_busy and foreign(usage.get(uuid, unknown_usage("the device did not answer"))) is not None
    ]
    return len({*quarantined, *used})


def device_holders(home: Home, holders: Sequence[LockHolder], now_ns: int) -> list[DeviceHolder]:
    """Return the runs that hold devices, sorted by their expected end."""
    counts: dict[str, list[LockHolder]] = {}
    for holder in holders:
        counts.setdefault(holder.run_id, []).append(holder)
    records = {
        run_id: read_run(home.runs, run_id) if run_id and (home.runs / run_id).is_dir() else None for run_id in counts
    }
    past = _past(home, {record.spec.name for record in records.values() if record is not None and record.spec})
    having = [_one(run_id, held, records[run_id], past, now_ns) for run_id, held in counts.items()]
    return sorted(having, key=lambda each: (each.until_ns is None, each.until_ns or 0, each.title))


def _one(run_id: str, held: Sequence[LockHolder], record: RunRecord | None, past: _Past, now_ns: int) -> DeviceHolder:
    name = record.spec.name if record is not None and record.spec is not None else ""
    until_ns, is_bound = (None, False) if record is None else _until(record, held[0].since_wall_ns, past, now_ns)
    what = "session " if held[0].session else ""
    title = f"{held[0].user}/{name or run_id}" if held[0].user else run_id or "unknown user"
    return DeviceHolder(title=what + title, count=len(held), until_ns=until_ns, is_bound=is_bound)


def _until(record: RunRecord, since_ns: int, past: _Past, now_ns: int) -> tuple[int | None, bool]:
    """Return a run's expected end time, and True if the run cannot end later. None means unknown."""
    spec = record.spec
    if spec is None or record.kind != FUNCTION:
        return None, False
    has_begun = record.began_ns is not None
    began_ns = min(record.began_ns or since_ns, now_ns)
    limit_s = duration_estimates.limit_s(
        spec.timeout_s, spec.grace_s, start_s=0.0 if has_begun else duration_estimates.START_S
    )
    expected_s = duration_estimates.expected_s(past.get(spec.name, ()))
    after_s, is_bound = duration_estimates.over_after_s(
        (now_ns - began_ns) / 1e9, expected_s=expected_s, limit_s=limit_s
    )
    return (None if after_s is None else max(now_ns, began_ns + round(after_s * 1e9))), is_bound


def _past(home: Home, names: Collection[str]) -> dict[str, list[float]]:
    """Return the device times of recent successful and timed-out runs by run name, newest first."""
    past: dict[str, list[float]] = {name: [] for name in names}
    for run_id in run_ids(home.runs)[:_PAST_MAX] if names else ():
        record = read_run(home.runs, run_id)
        if record.spec is None or record.spec.name not in past or record.state not in _BY_THEMSELVES:
            continue
        if record.began_ns is not None and record.ended_ns is not None:
            past[record.spec.name].append((record.ended_ns - record.began_ns) / 1e9)
    return past


def _when(lacking: int, having: Sequence[DeviceHolder]) -> tuple[int | None, bool]:
    """Return the time at which enough devices are free, and True if the time is an upper bound."""
    is_bound = True
    for holder in having:
        if holder.until_ns is None:
            return None, False
        is_bound = is_bound and holder.is_bound
        lacking -= holder.count
        if lacking <= 0:
            return holder.until_ns, is_bound
    return None, False
