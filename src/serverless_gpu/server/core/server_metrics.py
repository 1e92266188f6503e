"""Metrics of the server for Prometheus: one object, made once, counted into from any thread.

    measures.retries.inc()                                        what happens is counted where it happens
    with measures.ticks.labels("scheduler").time(): ...
    what is there (runs, nodes, devices, disk) is read when Prometheus asks: `operations/server_status.py`

A new measure is an attribute here with its sentence, a row in docs/how-to/operating-a-server.md, and, when people
should look at it, a panel or an alert in `deploy/`; tests compare the three. A label has few values that nobody outside
can add to: a loop, a route as it was declared, a reason, a class of status. Never a run, a user, a node, or text from a
request: each new value is kept for ever, and readers of metrics may not see who works on what.

Counters begin at zero with each process; Prometheus knows. Nothing here can fail a request: it is memory.
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
"""The value of a label for everything that is not in a short list."""
LABEL_VALUES_MAX = 24
"""Values of one label that come from outside, such as types of GPUs; what is beyond is `OTHER`."""
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_SLOW_S = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_WORKS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

# One more unused series for each.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # theirs has no annotation


class MetricsSource(Collector, abc.ABC):
    """Metrics of the current state, refreshed when Prometheus asks."""

    @abc.abstractmethod
    async def refresh(self) -> None:
        """Look again; never raises, and returns within a bound."""


class ServerMetrics:
    """Counters and histograms of one server; a registry of its own, so that two servers of a test do not mix."""

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
            "request_seconds", "Seconds until the answer to a request began.", _FAST_S, "method", "route", "status"
        )
        self.streams = gauge("streams_open", "Event streams that are open.")
        self.transactions = histogram(
            "transaction_seconds", "Seconds of a database transaction, with the wait for it.", _FAST_S, "kind"
        )
        self.transaction_failures = counter(
            "transaction_failures", "Transactions that the database could not do: away, or full.", "kind"
        )
        self.commits = counter("commits", "Commits of SQLite's one writer.")
        self.commit_works = histogram("commit_works", "Works that shared one commit.", _WORKS)
        self.retries = counter("transaction_retries", "Transactions done again because another one was in the way.")
        self.ticks = histogram("tick_seconds", "Seconds of one tick of a loop.", _SLOW_S, "loop")
        self.tick_failures = counter("tick_failures", "Ticks of a loop that failed.", "loop")
        self.tick_success = gauge("tick_success_time_seconds", "When a loop's last good tick ended.", "loop")
        self.submitted = counter("runs_submitted", "Runs that were accepted.")
        self.placed = counter("attempts_placed", "Attempts that were placed on a node.")
        self.preempted = counter("attempts_preempted", "Attempts asked to stop so that another run finds room.")
        self.reservations = gauge("reservations", "Runs that devices are kept for.")
        self.budgets = gauge("budgets", "Budgets that there are.")
        self.budgets_used_up = gauge("budgets_used_up", "Budgets that nothing new starts for.")
        self.budget_stops = counter("budget_stops", "Runs that a hard budget asked to stop.")
        self.budget_warnings = counter("budget_warnings", "Marks of budgets that were reached.", "percent")
        self.notices = counter("notices", "Posts to the webhook, by outcome.", "outcome")
        self.alarms = counter("spend_alarms", "Runs and teams that spent far more than they are used to.")
        self.decisions = histogram("decision_seconds", "Seconds of one decision about the queue, in memory.", _FAST_S)
        self.ended = counter("runs_ended", "Runs that ended, by reason.", "reason")
        self.given_up = counter("attempts_given_up", "Attempts given up without a word from their node.", "reason")
        self.log_bytes = counter("log_bytes", "Bytes of output that were taken.")
        self.log_bytes_dropped = counter("log_bytes_dropped", "Bytes of output that the server had no room for.")
        self.charges = counter("charges_posted", "Entries of the ledger that were written.")
        self.charge_failures = counter("charge_failures", "Times that an attempt could not be charged.")
        self.upload_bytes = counter("upload_bytes", "Bytes that were put into a store.", "store")
        self.store = histogram("store_seconds", "Seconds of one call to a store.", _SLOW_S, "store", "operation")
        self.store_errors = counter("store_errors", "Calls to a store that failed.", "store", "operation")
        self.violations = counter("violations", "Violations of invariants that the self-check found.", "invariant")
        for kind in ("read", "write"):  # a series that begins with its first failure shows no increase
            self.transaction_failures.labels(kind)
        for reason in (Reason.NODE_GONE, Reason.NODE_REBOOTED):
            self.given_up.labels(reason.value)
        gauge("build_info", "Which version this is.", "version").labels(__version__).set(1)

    def watch(self, source: MetricsSource) -> None:
        """Add metrics of the current state."""
        self._sources.append(source)
        self.registry.register(source)

    async def refresh(self) -> None:
        """Have every source look again, within its bound."""
        await asyncio.gather(*(source.refresh() for source in self._sources))

    def text(self) -> bytes:
        """Return all figures as Prometheus reads them (`CONTENT_TYPE`)."""
        return exposition.generate_latest(self.registry)
