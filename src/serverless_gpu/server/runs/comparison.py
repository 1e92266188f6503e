"""Compares runs: outcome, spec, arguments, tags, environment, metrics and cost.

`compare` is pure. The routes read the runs, and refuse a comparison with a run that the caller may not see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, format_utc
from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.cost import Cost
from serverless_gpu.model.receipt import DeviceUse, Receipt
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.billing import run_costs
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.lifecycle import endings, metering
from serverless_gpu.server.lifecycle.liveness import Leases
from serverless_gpu.server.records import run_list, runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.server.runs import run_details, run_views
from serverless_gpu.server.runs.run_service import RunQueries
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.units import format_bytes, format_duration_ms, format_joules
from serverless_gpu.wire.runs import (
    ArgumentsView,
    ComparisonRow,
    ComparisonSection,
    ComparisonView,
    RunEnvironmentView,
    RunView,
)

RUNS_MIN, RUNS_MAX = 2, 8
ROWS_MAX = 2_000
"""Maximum number of rows of one section."""
_EQUAL_MAX = 40
"""Sections with more equal rows contain only the number of equal rows."""
_INPUTS = ("Spec", "Arguments", "Tags", "Environment")
"""Sections about what a run was submitted with."""
_OTHERWISE = frozenset({"spec_version", "name", "tags", "payload", "tracker", "ray", "team", "pool"})
"""Fields of a spec that other sections contain, or that are no options of users."""


class ComparedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with the details that a comparison uses."""

    view: RunView
    cost: Cost
    arguments: ArgumentsView
    environment: RunEnvironmentView
    receipt: Receipt | None = None


def compare(found: Sequence[ComparedRun]) -> tuple[ComparisonSection, ...]:
    """Return the properties of runs by section, with the differing properties of each section first."""
    sections = (
        _section("Outcome", [_outcome(run) for run in found]),
        _section("Spec", [spec_texts(run.view.spec) for run in found]),
        _section("Arguments", [_arguments(run.arguments) for run in found]),
        _section("Tags", [run.view.spec.tags for run in found]),
        _section("Environment", [_environment(run.environment) for run in found]),
        _section("Metrics", [_metrics(run.receipt) for run in found]),
        _section("Cost", [run.cost.rows() for run in found]),
    )
    return tuple(section for section in sections if section.rows or section.equal)


def differences(sections: Iterable[ComparisonSection]) -> tuple[ComparisonSection, ...]:
    """Return the sections with their differing rows only."""
    found = []
    for section in sections:
        rows = tuple(row for row in section.rows if row.differs)
        equal = section.equal + len(section.rows) - len(rows)
        if rows:
            found.append(msgspec.structs.replace(section, rows=rows, equal=equal))
    return tuple(found)


def _section(name: str, columns: Sequence[Mapping[str, str]]) -> ComparisonSection:
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = []
    for label in labels:
        values = tuple(column.get(label, "") for column in columns)
        rows.append(ComparisonRow(label=label, values=values, differs=len(set(values)) > 1))
    differing, equal = [row for row in rows if row.differs], [row for row in rows if not row.differs]
    shown = [*differing, *(equal if len(equal) <= _EQUAL_MAX else ())][:ROWS_MAX]
    return ComparisonSection(name=name, rows=tuple(shown), equal=len(rows) - len(shown))


def _outcome(run: ComparedRun) -> dict[str, str]:
    view = run.view
    took_ms = None if view.started_ns is None or view.ended_ns is None else (view.ended_ns - view.started_ns) / 1e6
    return {
        "state": view.state.value,
        "reason": view.sentence if view.reason is not None else "",
        "owner": view.owner,
        "team": view.team,
        "pool": view.pool,
        "node": view.node,
        "GPUs": f"{view.world_size} × {view.gpu_type or 'GPU'}" if view.world_size else "",
        "submitted": format_utc(view.created_ns),
        "duration": "" if took_ms is None else format_duration_ms(round(took_ms)),
        "attempts": str(view.fence),
    }


def spec_texts(spec: RunSpec) -> dict[str, str]:
    """Return the options of a run as text. Options without a value are ""."""
    fields: dict[str, object] = msgspec.to_builtins(spec)
    resources = fields.pop("resources")
    assert isinstance(resources, dict)
    texts = {name: _option(name, value) for name, value in (resources | fields).items() if name not in _OTHERWISE}
    texts["ray"] = "" if spec.ray is None else spec.ray.text()
    texts["experiment"] = "" if spec.tracker is None else spec.tracker.experiment or spec.tracker.experiment_id
    return {name.removesuffix("_s").removesuffix("_bytes"): text for name, text in texts.items() if text}


def _option(name: str, value: object) -> str:
    if value is None or value == "" or value == [] or value == {}:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if name.endswith("_s") and isinstance(value, (int, float)):
        return f"{value:g} s"
    if isinstance(value, dict):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return str(value)


def _arguments(view: ArgumentsView) -> dict[str, str]:
    return ({"command": view.command} if view.command else {}) | (view.arguments or {})


def _environment(view: RunEnvironmentView) -> dict[str, str]:
    found = {"kind": view.kind, "python": view.python, "platform": view.platform}
    if view.missing:
        found["snapshot"] = "no longer on the server"
    for unit in view.units:
        if unit.kind == "distribution":
            # Equal versions with other files are a change, too.
            found[unit.name] = f"{unit.version} ({unit.digest})"
        else:
            label = f"code {unit.name}" if unit.kind == "code" else "files of no distribution"
            found[label] = " ".join(filter(None, (found.get(label, ""), unit.digest)))
    return found


def _metrics(receipt: Receipt | None) -> dict[str, str]:
    if receipt is None:
        return {}
    spent = {
        "time in the environment": receipt.segments.environment_ms,
        "time to start": receipt.segments.start_ms,
        "time to the first line": receipt.segments.first_line_ms,
        "time in user code": receipt.segments.run_ms,
        "time to stop": receipt.segments.stop_ms,
    }
    found = {label: format_duration_ms(ms) for label, ms in spent.items() if ms is not None}
    if receipt.peak_memory_bytes is not None:
        found["host memory peak"] = format_bytes(receipt.peak_memory_bytes)
    return found | _uses(receipt.uses) | {"start": "warm" if receipt.warm else "cold"}


def _uses(uses: Sequence[DeviceUse]) -> dict[str, str]:
    busy = [use.busy_percent for use in uses if use.busy_percent is not None]
    peaks = [use.peak_memory_bytes for use in uses if use.peak_memory_bytes is not None]
    energy = [use.energy_joules for use in uses if use.energy_joules is not None]
    found = {}
    if busy:
        found["GPUs busy"] = f"{sum(busy) / len(busy):.0f} % (lowest {min(busy):.0f} %)"
    if peaks:
        found["GPU memory peak"] = format_bytes(max(peaks))
    if energy:
        found["energy"] = format_joules(sum(energy))
    return found


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("runs")


class ComparisonQuery(Query, frozen=True, kw_only=True):
    """The compared runs as a comma-separated list of two to eight identifiers."""

    runs: Annotated[str, msgspec.Meta(max_length=RUNS_MAX * 41)] = ""


class Comparisons:
    """Reads and compares runs."""

    def __init__(
        self,
        *,
        clock: Clock,
        leases: Leases,
        database: Transactions,
        environments: EnvironmentStore,
        run_queries: RunQueries,
    ) -> None:
        self._clock = clock
        self._leases = leases
        self._database = database
        self._environments = environments
        self._queries = run_queries

    def compare(self, call: Call, run_ids: Sequence[str]) -> ComparisonView:
        """Return the comparison of several runs that the caller may see."""
        at = metering.now(self._clock, self._leases)

        def work(db: sa.Connection) -> tuple[list[StoredRun], dict[str, Cost], list[ArgumentsView], list[str | None]]:
            found = [run_views.visible(db, run_id, who=call.who, reach=call.reach) for run_id in run_ids]
            arguments = [run_details.arguments_view(run, runs.arguments(db, run.id)) for run in found]
            receipts = [endings.outcome(db, run.attempt).receipt for run in found]
            return found, run_costs.costs_of(db, found, at), arguments, receipts

        found, costs, arguments, receipts = self._database.read(work)
        compared = [
            ComparedRun(
                view=self._queries.view(run, call.who),
                cost=costs[run.id],
                arguments=asked,
                environment=run_details.environment_view(self._environments, run),
                receipt=_receipt(text),
            )
            for run, asked, text in zip(found, arguments, receipts, strict=True)
        ]
        return ComparisonView(runs=tuple(run.view for run in compared), sections=compare(compared))

    def changes(self, call: Call, run_id: str) -> ComparisonView:
        """Return the differences between a run and the owner's previous run with the same name."""

        def work(db: sa.Connection) -> str:
            run = run_views.visible(db, run_id, who=call.who, reach=call.reach)
            found = run_list.previous_of_name(db, run)
            before = runs.find(db, found) if found else None
            # A member of the run's team may not see the owner's runs outside of the team.
            is_visible = before is not None and run_views.in_reach(before, who=call.who, reach=call.reach)
            return found if is_visible else ""

        before = self._database.read(work)
        if not before:
            return ComparisonView()
        view = self.compare(call, [before, run_id])
        sections = [section for section in view.sections if section.name in _INPUTS]
        return msgspec.structs.replace(view, sections=differences(sections))


def _receipt(text: str | None) -> Receipt | None:
    if text is None:
        return None
    try:
        return from_json(text, Receipt)
    except msgspec.DecodeError:  # A node of another version may have sent the receipt.
        return None


@routes.get("/comparisons", needs=reading("runs"))
def compare_runs(call: Call, comparisons: Comparisons, query: ComparisonQuery) -> ComparisonView:
    """Compare two to eight runs."""
    wanted = list(dict.fromkeys(filter(None, (word.strip() for word in query.runs.split(",")))))
    if not RUNS_MIN <= len(wanted) <= RUNS_MAX:
        raise InvalidValue(
            f"a comparison needs {RUNS_MIN} to {RUNS_MAX} runs, not {len(wanted)}", hint="write runs=ID,ID"
        )
    return comparisons.compare(call, wanted)


@routes.get("/runs/{run}/changes", needs=reading("runs"))
def read_changes(call: Call, comparisons: Comparisons, run: str) -> ComparisonView:
    """Compare a run with its owner's previous run of the same name."""
    return comparisons.changes(call, run)
