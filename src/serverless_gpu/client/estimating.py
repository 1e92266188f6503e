"""Estimates start and cost of a call, `fn.estimate(*args)`, after the same checks and without starting it.

    local: devices of this machine (`node/agent/availability.py`) ─▶ Estimate, with the price (`model/cost.py`)
    remote: POST /estimates of the server (`remote/estimate.py`)  ─▶

An error that would refuse the call refuses the estimate. An unknown start is an answer with its reason.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec

from serverless_gpu.ambient import SystemClock, format_soon
from serverless_gpu.client.launch.launch import check_call, check_nccl, check_shown, noted_home
from serverless_gpu.client.launch.preflight import check_travels, refusing_reducer
from serverless_gpu.model.billing.pricing import UNPRICED, Tariff
from serverless_gpu.model.cost import CostEstimate, Devices, Lasting, estimated
from serverless_gpu.model.placement import Candidates, candidates, restrict
from serverless_gpu.model.receipt import TextPrinter
from serverless_gpu.model.scheduling import values, wait_messages
from serverless_gpu.model.spec import Command, RunSpec, check_command
from serverless_gpu.node.agent.availability import expected_s, outlook
from serverless_gpu.node.agent.connection import connect
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.inventory import offered
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
from serverless_gpu.node.devices.reservation import find_provider

_REMOTE = "serverless_gpu.client.remote.estimate"


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated start and cost of a run that is requested now. `print` shows it in words.

    Attributes:
        start: when, with its time zone; None where that is unknown.
        seconds: from now until then; 0 for at once, None where that is unknown.
        is_bound: whether that is the latest time: all runs ahead of it have declared a limit.
        basis: what that rests on, or why it is unknown.
        node: where, by name, or "".
        nodes: where, by name, of a gang on several nodes.
        place: its place in the queue for such devices; 0 when it would start at once.
        impossible: whether no existing node can ever serve it.
        cost: what it would cost, at most and about; None where a server does not say.
        policy: the server's usage policy that it would be under, or "".
        budgets: in words, what is left of the budgets that it would count for.
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
        """Return it in words: when, and in a second line what it costs where there is a price."""
        is_priced = self.cost is not None and self.cost.micros_per_hour is not None
        return f"{self.start_text()}\n{self.cost}" if is_priced else self.start_text()

    def _repr_pretty_(self, printer: TextPrinter, cycle: bool) -> None:
        printer.text(str(self))

    def start_text(self) -> str:
        """Return when in words, for example ``"at 14:20 at the latest on n3: …; 2nd in line"``."""
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
    """Return when a call would start; raise what would refuse it."""
    check_call(function, args, kwargs, spec)
    check_travels(function, args, kwargs, refusing_reducer(spec))
    return estimate_run(spec)


def estimate_run(spec: RunSpec) -> Estimate:
    """Return when a run would start, whatever it calls; raise what would refuse it."""
    if isinstance(spec.payload, Command):
        check_command(spec.payload)
    if spec.remote:
        # By name: HTTP is loaded only for those who use a server.
        return cast("Estimate", importlib.import_module(_REMOTE).estimate(spec))
    return _here(spec)


def made(estimate: values.StartEstimate, now_ns: int, cost: CostEstimate | None = None) -> Estimate:
    """Return an estimate in local time from one in nanoseconds since 1970."""
    at_ns, basis = estimate.at_ns, estimate.basis
    if estimate.wait is not None:
        wait = msgspec.structs.replace(estimate.wait, place=0, at_ns=None)  # both are said beside it
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


def unknown(why: str) -> Estimate:
    """Return an estimate without a time, and its reason."""
    return Estimate(start=None, seconds=None, basis=why)


def _here(spec: RunSpec) -> Estimate:
    """Return when a run of this machine would start, from its agent's devices and their locks."""
    home = noted_home()
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
    return made(found, now_ns, _cost_here(home, spec, chosen, price))


def _cost_here(home: Home, spec: RunSpec, chosen: Candidates, tariff: Tariff) -> CostEstimate:
    devices = Devices(
        gpu_type=chosen.devices[0].type,
        count=chosen.count,
        cpus=spec.resources.cpus or 0,
        memory_bytes=spec.resources.memory_bytes or 0,
        tariff=tariff,
    )
    # `retries` and `resume` are a server's.
    lasting = Lasting(limit_s=spec.timeout_s, expected_s=expected_s(home, spec.name))
    return estimated(devices, lasting, advice="[prices] of config.toml sets one")
