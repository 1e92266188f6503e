"""Serves the server's health, version and metrics.

    GET /metrics ─▶ StateMetrics.refresh   one query at a time, kept for 2 s, awaited for 3 s at most (`health.py`)
                 └▶ registry ─▶ StateMetrics.collect ─▶ the last sample; `sgpu_sample_age_seconds` is its age

`StateMetrics` counts runs, nodes, devices, leases, orders and free disk space. The queries read only unended runs,
because `server_metrics.py` counts ended runs. If the database does not answer within a scrape's time limit, the scrape
returns only metrics of the server process. Health and version reveal no information about users or runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
import sqlalchemy as sa
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.responses import Response

from serverless_gpu import ambient
from serverless_gpu.ambient import Clock
from serverless_gpu.model.hardware import census
from serverless_gpu.model.lifecycle.attempt import ACTIVE, State
from serverless_gpu.server.core.disk_space import free_bytes
from serverless_gpu.server.core.health import RETRY_AFTER_S, Probe, ServerHealth
from serverless_gpu.server.core.server_metrics import (
    CONTENT_TYPE,
    LABEL_VALUES_MAX,
    OTHER,
    MetricsSource,
    ServerMetrics,
)
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.db.tables import attempts, crews, orders, runs
from serverless_gpu.server.http.routing import JSON, PUBLIC, Call, Routes, reading
from serverless_gpu.server.lifecycle.liveness import Leases, Presence
from serverless_gpu.server.nodes import capacity, drain
from serverless_gpu.server.nodes.capacity import Minimum, minimum_of
from serverless_gpu.server.pools import PoolService
from serverless_gpu.server.records import audit, charges, nodes, pools
from serverless_gpu.server.records.crews import CrewId
from serverless_gpu.server.records.nodes import StoredNode
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import PROTOCOL, PROTOCOLS
from serverless_gpu.wire.server_status import Health, HealthCheck, Version

FRESH_S = 2.0
BOUND_S = 3.0
LIVE = (State.QUEUED, *ACTIVE)
FREE, LEASED, UNAVAILABLE, AWAY = "free", "leased", "unavailable", "away"
DEVICE_STATES = (FREE, LEASED, UNAVAILABLE, AWAY)
"""Device states. Quarantined devices and devices in use by other programs are unavailable. Devices of unusable nodes
count as away."""


class StateSample(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of runs, nodes and devices at one time."""

    at_ns: int  # Time of the sample, in nanoseconds of boottime.
    runs: Mapping[str, int]  # Unended runs by state.
    oldest_wait_s: float  # Longest current waiting time of any run.
    nodes: Mapping[str, int]  # Nodes by state.
    devices: Mapping[tuple[str, str], int]  # Devices by type and state.
    lease_age_s: float  # Longest time without a heartbeat of any attempt.
    orders: tuple[int, float]  # Number of unacknowledged orders, and age of the oldest unacknowledged order.
    free: int | None  # Free bytes on the disk of the server's files, or None if unknown.
    drained: bool  # True if the server starts no new runs.
    unchained: int  # Audit rows that are not yet in the audit chain.
    uncharged: int  # Ended attempts whose charges are not fully in the ledger.
    clock_off_s: float  # Largest clock offset of any node.


class _Rows(msgspec.Struct, frozen=True, kw_only=True):
    runs: dict[str, int]
    queued_ns: int | None
    nodes: list[StoredNode]
    minimums: dict[str, Minimum]  # Requirements of pools for their nodes.
    held: list[tuple[str, CrewId, str, int]]  # Values per entry: node, supervisor, type, devices.
    orders: tuple[int, int | None]
    drained: bool
    unchained: int
    uncharged: int


class StateMetrics(MetricsSource):
    """Counts runs, nodes and devices for the server's Prometheus metrics."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        database: Transactions,
        leases: Leases,
        presence: Presence,
        health: ServerHealth,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._database = database
        self._leases = leases
        self._presence = presence
        self._health = health
        self._last: StateSample | None = None
        self._probe = Probe("sample", self._look, clock=clock, fresh_s=FRESH_S, bound_s=BOUND_S)

    async def refresh(self) -> None:
        """Take a new sample unless the last sample is fresh, and return within `BOUND_S`."""
        await self._probe.answer()

    def collect(self) -> Iterator[Metric]:
        """Yield the last sample as Prometheus metrics, or only health metrics before the first sample."""
        healthy = GaugeMetricFamily("sgpu_healthy", "1 if a server component is healthy, else 0.", labels=["check"])
        for name, well in self._health.last().items():
            healthy.add_metric([name], well)
        yield healthy
        sample = self._last
        if sample is None:
            return
        now_ns = self._clock.boottime_ns()
        age_s = (now_ns - sample.at_ns) / 1e9
        yield _single("sample_age_seconds", "Age of the latest sample of runs, nodes and devices.", age_s)
        yield from families(sample)

    def _look(self) -> bool:
        self._last = self.look()
        return True

    def look(self) -> StateSample:
        """Return a new sample of the server's state."""
        rows = self._database.read(_load)
        times = capacity.now(self._settings, self._clock)
        freed = self._leases.freed()
        held = [(node, gpu_type, count) for node, crew, gpu_type, count in rows.held if crew not in freed]
        ages = [times.boottime_ns - self._leases.last_ns(crew, now_ns=times.boottime_ns) for _, crew, _, _ in rows.held]
        clocks = [clock for node in rows.nodes if (clock := self._presence.clock(node.id)) is not None]
        off_ns = [max(0, abs(clock.ahead_ns) - clock.error_ns) for clock in clocks]
        count, oldest_ns = rows.orders
        return StateSample(
            at_ns=times.boottime_ns,
            runs={state.value: rows.runs.get(state.value, 0) for state in LIVE},
            oldest_wait_s=_age_s(rows.queued_ns, times.wall_ns),
            nodes=Counter(capacity.state_of(node, self._presence, times) for node in rows.nodes),
            devices=self._devices(rows, held, times),
            lease_age_s=max(ages, default=0) / 1e9,
            orders=(count, _age_s(oldest_ns, times.wall_ns)),
            free=free_bytes(self._settings.directory),
            drained=rows.drained,
            unchained=rows.unchained,
            uncharged=rows.uncharged,
            clock_off_s=max(off_ns, default=0) / 1e9,
        )

    def _devices(
        self, rows: _Rows, held: list[tuple[str, str, int]], times: capacity.Times
    ) -> dict[tuple[str, str], int]:
        leased: dict[str, Counter[str]] = {}
        for node_id, gpu_type, count in held:
            leased.setdefault(node_id, Counter())[gpu_type] += count
        counted: Counter[tuple[str, str]] = Counter()
        for node in rows.nodes:
            total, outside = census(node.hello.devices, node.unavailable)
            is_away = bool(capacity.away(node, self._presence, times, rows.minimums))
            for name, number in total.items():
                used = min(number, leased.get(node.id, Counter())[name])
                shut = min(number - used, outside.get(name, 0))
                counted[name, LEASED] += used
                counted[name, UNAVAILABLE] += shut
                counted[name, AWAY if is_away else FREE] += number - used - shut
        return few_types(counted)


def _load(connection: sa.Connection) -> _Rows:
    """Read the database rows for a sample, using the index of runs by state."""
    alive = [state.value for state in LIVE]
    active = [state.value for state in ACTIVE]
    by_state = sa.select(runs.c.state, sa.func.count()).where(runs.c.state.in_(alive)).group_by(runs.c.state)
    oldest = sa.select(sa.func.min(runs.c.queued_ns)).where(runs.c.state == State.QUEUED.value)
    current = sa.and_(attempts.c.run_id == runs.c.id, attempts.c.fence == runs.c.fence)
    own = sa.and_(crews.c.run_id == attempts.c.run_id, crews.c.fence == attempts.c.fence)
    columns = (crews.c.node_id, crews.c.run_id, crews.c.fence, crews.c.crew, attempts.c.gpu_type, crews.c.gpus)
    held = sa.select(*columns).select_from(runs.join(attempts, current).join(crews, own))
    held = held.where(runs.c.state.in_(active), crews.c.ended_ns.is_(None))
    about = sa.and_(orders.c.run_id == runs.c.id, orders.c.fence == runs.c.fence)
    untaken = sa.select(sa.func.count(), sa.func.min(orders.c.created_ns)).select_from(runs.join(orders, about))
    untaken = untaken.where(runs.c.state.in_(active), orders.c.taken_ns.is_(None))
    count, oldest_order = connection.execute(untaken).one()
    return _Rows(
        runs={state: number for state, number in connection.execute(by_state)},
        queued_ns=connection.scalar(oldest),
        nodes=nodes.every(connection),
        minimums={pool.name: minimum_of(pool) for pool in pools.every(connection)},
        held=[(row[0], (row[1], row[2], row[3]), row[4], row[5]) for row in connection.execute(held)],
        orders=(count, oldest_order),
        drained=drain.find(connection) is not None,
        unchained=audit.pending(connection, after_seq=audit.chained_seq(connection))[0],
        uncharged=charges.count_uncharged(connection),
    )


def few_types(counted: Counter[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Limit the number of device types in counts, because a node can report any device name."""
    totals = Counter[str]()
    for (name, _), number in counted.items():
        totals[name] += number
    kept = {name for name, _ in totals.most_common(LABEL_VALUES_MAX)}
    few = Counter({(name, state): 0 for name in kept for state in DEVICE_STATES})
    for (name, state), number in counted.items():
        few[name if name in kept else OTHER, state] += number
    return dict(few)


def families(sample: StateSample) -> Iterator[Metric]:
    """Yield a sample as Prometheus metrics."""
    by_state = GaugeMetricFamily("sgpu_runs", "Unended runs, by state.", labels=["state"])
    for state, number in sample.runs.items():
        by_state.add_metric([state], number)
    there = GaugeMetricFamily("sgpu_nodes", "Nodes that have joined, by state.", labels=["state"])
    for state in capacity.STATES:
        there.add_metric([state], sample.nodes.get(state, 0))
    devices = GaugeMetricFamily("sgpu_devices", "Devices of nodes, by type and state.", labels=["type", "state"])
    for (name, state), number in sorted(sample.devices.items()):
        devices.add_metric([name, state], number)
    yield from (by_state, there, devices)
    count, oldest_s = sample.orders
    yield _single("queue_oldest_seconds", "Longest waiting time of any run.", sample.oldest_wait_s)
    yield _single("lease_age_max_seconds", "Longest time without a heartbeat of any attempt.", sample.lease_age_s)
    yield _single("orders_unacknowledged", "Unacknowledged orders to nodes.", count)
    yield _single("orders_oldest_seconds", "Age of the oldest unacknowledged order.", oldest_s)
    yield _single("drained", "1 while the server is drained and starts no new runs, else 0.", sample.drained)
    yield _single("audit_unchained", "Audit rows that are not yet in the audit chain.", sample.unchained)
    yield _single("uncharged_attempts", "Ended attempts that are not yet in the ledger.", sample.uncharged)
    yield _single("node_clock_off_seconds", "Largest clock offset of any node.", sample.clock_off_s)
    if sample.free is not None:
        yield _single("disk_free_bytes", "Free space on the disk of the server's files.", sample.free)


def _single(name: str, sentence: str, value: float) -> Metric:
    return GaugeMetricFamily(f"sgpu_{name}", sentence, value=value)


def _age_s(since_ns: int | None, now_ns: int) -> float:
    return 0.0 if since_ns is None else max(0, now_ns - since_ns) / 1e9


routes = Routes("state")


class PrometheusText(Response):
    """Response in the text format of Prometheus."""

    media_type = CONTENT_TYPE


@routes.get("/health", needs=PUBLIC)
async def health(call: Call, server_health: ServerHealth) -> Health | Response:
    """Return the health of the server's components, with status 503 if any component has a problem."""
    found = await server_health.look()
    checks = tuple(HealthCheck(name=one.name, ok=not one.problem, problem=one.problem, ms=one.ms) for one in found)
    problems = tuple(one.problem for one in found if one.problem)
    if not problems:
        return Health(ok=True, checks=checks)
    answer = msgspec.json.encode(Health(ok=False, problems=problems, checks=checks))
    headers = {"Retry-After": str(RETRY_AFTER_S), "Cache-Control": "no-store"}
    return Response(answer, status_code=503, headers=headers, media_type=JSON)


@routes.get("/metrics", needs=reading("metrics"))
async def metrics(call: Call, measures: ServerMetrics, server_health: ServerHealth) -> PrometheusText:
    """Return the server's metrics in the text format of Prometheus."""
    await asyncio.gather(server_health.look(), measures.refresh())
    return PrometheusText(await call.in_thread(measures.text), headers={"Cache-Control": "no-store"})


@routes.get("/version", needs=PUBLIC)
def version(call: Call, settings: Settings, pools: PoolService) -> Version:
    """Return the server's version and the protocols that it supports."""
    return Version(
        version=__version__,
        protocol=PROTOCOL,
        protocols=PROTOCOLS,
        machine=ambient.machine(),
        mlflow=settings.mlflow_url,
        joinable=settings.ray is not None,
        sandboxes=pools.has_sandboxes,
    )
