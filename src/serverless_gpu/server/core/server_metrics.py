"""Defines the server's Prometheus metrics, which all threads may update.

    measures.retries.inc()                                        code counts an event where the event happens
    with measures.ticks.labels("scheduler").time(): ...
    Prometheus scrapes the current state (runs, nodes, devices, disk) through `operations/server_status.py`

To add a metric, add an attribute with a help text and a row in docs/how-to/operating-a-server.md. If operators should
watch the metric, add a panel or an alert in `deploy/`. Tests compare the metrics with the page and with `deploy/`.

Each label has a small set of values, such as loops, declared routes or HTTP status classes. Labels never contain runs,
users, nodes or request text. Prometheus stores each label value permanently. Metrics must not reveal which user works
on which run.

Counters restart at zero with each server process.
"""

from __future__ import annotations

import abc
import asyncio

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition
from prometheus_client.registry import Collector

from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.version import __version__

CONTENT_TYPE = exposition.CONTENT_TYPE_PLAIN_0_0_4
OTHER = "other"
"""Label value that replaces unknown values."""
LABEL_VALUES_MAX = 24
"""Maximum number of distinct external label values, such as GPU types. `OTHER` replaces further label values."""
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_SLOW_S = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_WORKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# By default, prometheus_client adds an unused creation-time series for each metric.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no annotation


class MetricsSource(Collector, abc.ABC):
    """Metrics of the server's current state, refreshed at each Prometheus scrape."""

    @abc.abstractmethod
    async def refresh(self) -> None:
        """Update the metrics within a time limit, without raising exceptions."""


class ServerMetrics:
    """Counters and histograms of one server, in a separate Prometheus registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self._sources: list[MetricsSource] = []

        def counter(name: str, sentence: str, *labels: str) -> Counter:
            return Counter(f"sgpu_{name}", sentence, labels, registry=registry)

        def histogram(name: str, sentence: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"sgpu_{name}", sentence, labels, buckets=buckets, registry=registry)

        def gauge(name: str, sentence: str, *labels: str) -> Gauge:
            return Gauge(f"sgpu_{name}", sentence, labels, registry=registry)

        self.requests = histogram(
            "request_seconds",
            "Seconds from a request to the start of its response.",
            _FAST_S,
            "method",
            "route",
            "status",
        )
        self.streams = gauge("streams_open", "Open event streams.")
        self.transactions = histogram(
            "transaction_seconds",
            "Seconds of a database transaction, including the wait for its start.",
            _FAST_S,
            "kind",
        )
        self.transaction_failures = counter(
            "transaction_failures", "Transactions that failed because the database was unreachable or full.", "kind"
        )
        self.commits = counter("commits", "Commits of SQLite's single writer.")
        self.commit_works = histogram("commit_works", "Transactions that shared one commit.", _WORKS)
        self.retries = counter("transaction_retries", "Transactions that the server retried after a conflict.")
        self.ticks = histogram("tick_seconds", "Duration of a loop's tick in seconds.", _SLOW_S, "loop")
        self.tick_failures = counter("tick_failures", "Failed ticks of a loop.", "loop")
        self.tick_success = gauge("tick_success_time_seconds", "Time of a loop's last successful tick.", "loop")
        self.submitted = counter("runs_submitted", "Accepted runs.")
        self.placed = counter("attempts_placed", "Attempts placed on a node.")
        self.preempted = counter(
            "attempts_preempted", "Attempts that the scheduler asked to stop so that another run can start."
        )
        self.reservations = gauge("reservations", "Runs with reserved devices.")
        self.budgets = gauge("budgets", "Defined budgets.")
        self.budgets_used_up = gauge("budgets_used_up", "Used-up budgets that block new runs.")
        self.budget_stops = counter("budget_stops", "Runs that a hard budget asked to stop.")
        self.budget_warnings = counter("budget_warnings", "Reached budget thresholds.", "percent")
        self.notices = counter("notices", "Posts to the webhook, by outcome.", "outcome")
        self.alarms = counter("spend_alarms", "Runs and teams that spent far more than usual.")
        self.decisions = histogram("decision_seconds", "Seconds of one scheduling decision, in memory.", _FAST_S)
        self.ended = counter("runs_ended", "Ended runs, by reason.", "reason")
        self.given_up = counter(
            "attempts_given_up", "Attempts that the server abandoned because their node did not report.", "reason"
        )
        self.log_bytes = counter("log_bytes", "Bytes of output that the server accepted.")
        self.log_bytes_dropped = counter(
            "log_bytes_dropped", "Bytes of output that the server dropped for lack of space."
        )
        self.charges = counter("charges_posted", "Ledger entries that the server has written.")
        self.charge_failures = counter("charge_failures", "Attempts that the server failed to charge.")
        self.upload_bytes = counter("upload_bytes", "Bytes written to a store.", "store")
        self.store = histogram("store_seconds", "Duration of a store call in seconds.", _SLOW_S, "store", "operation")
        self.store_errors = counter("store_errors", "Failed calls to a store.", "store", "operation")
        self.violations = counter("violations", "Invariant violations that the self-check found.", "invariant")
        self.index_requests = counter(
            "index_proxy_requests", "Requests of the index proxy, by index and outcome.", "index", "outcome"
        )
        self.index_bytes = counter("index_proxy_bytes", "Bytes that the index proxy sent, by index.", "index")
        # Create the failure series at zero, so that Prometheus notices the first failure of each series.
        for kind in ("read", "write"):
            self.transaction_failures.labels(kind)
        for reason in (Reason.NODE_GONE, Reason.NODE_REBOOTED):
            self.given_up.labels(reason.value)
        gauge("build_info", "Version of the server.", "version").labels(__version__).set(1)

    def watch(self, source: MetricsSource) -> None:
        """Register a source of current-state metrics."""
        self._sources.append(source)
        self.registry.register(source)

    async def refresh(self) -> None:
        """Refresh all metrics sources concurrently."""
        await asyncio.gather(*(source.refresh() for source in self._sources))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format (`CONTENT_TYPE`)."""
        return exposition.generate_latest(self.registry)
