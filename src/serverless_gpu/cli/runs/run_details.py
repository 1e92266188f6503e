"""`sgpu show` and `sgpu metrics`: prints the details or telemetry of one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.completion import complete_run
from serverless_gpu.cli.output import JsonType, columns, json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs import run_rows
from serverless_gpu.cli.runs.run_location import locate, queued_runs, this_home
from serverless_gpu.cli.runs.run_rows import fetch_ending
from serverless_gpu.cli.runs.run_table import cost_so_far, name_of, run_json, took_ms, took_text
from serverless_gpu.cli.server_connection import patient_server
from serverless_gpu.client.runs.attachment import attach
from serverless_gpu.client.runs.outcome import ending_text
from serverless_gpu.client.tracked import from_directory
from serverless_gpu.errors import NotFound
from serverless_gpu.lazy_import import load
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.model.receipt import DeviceUse, Receipt
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.model.telemetry import DeviceTotals, Header, add, decode
from serverless_gpu.node.attempt.history import RunRecord, read_run, size_on_disk, walk
from serverless_gpu.node.base.home import Home
from serverless_gpu.units import format_bytes, format_duration_ms, format_gpu_memory, format_joules

if TYPE_CHECKING:
    from serverless_gpu.model.cost import Cost
    from serverless_gpu.wire.runs import AttemptList, CrewView, FileList, RunView

_FILES_MAX = 200
# Options that the output shows on another line, and fields that are not options.
_OMITTED_OPTIONS = frozenset({"name", "resources", "tracker", "ray"})
_SHOWN_MAX = 128


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
@json_option(JsonType("cli.json_types:RunDetails"))
def show(run: str | None, as_json: bool) -> None:
    """Show everything about one run.

    The command shows the run's request, failure, receipt, devices and files. RUN is a run identifier, or the beginning
    or end of a run identifier. Without RUN, the command selects the latest run.
    """
    home = this_home()
    found = locate(home, run)
    if found.view is not None:
        if as_json:
            print_json(server_details(found.view))
        else:
            for line in server_story(found.view):
                say(line)
        return
    record = read_run(home.runs, found.run_id, queued_runs(home))
    if as_json:
        print_json(run_json(home, record, size=True) | _details(record))
        return
    for line in _story(home, record).splitlines():
        say(line)


@click.command()
@click.argument("run", required=False, shell_complete=complete_run)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a chart of the metrics to a .png, .svg or .pdf file.",
)
@wide_option
@json_option(JsonType("cli.json_types:MetricSeriesByName"), text="Print every telemetry sample as JSON.")
def metrics(run: str | None, plot: Path | None, wide: bool, as_json: bool) -> None:
    """Show the telemetry of a run.

    The command shows metrics of the run's nodes, GPUs and ranks. RUN is a run identifier, or the beginning or end of a
    run identifier. Without RUN, the command selects the latest run.
    """
    found = locate(this_home(), run)
    handle = attach(found.run_id)
    if plot is not None:
        handle.plot(plot)
        say(f"sgpu: {plot} shows run {found.run_id}", err=True)
        return
    series = handle.metrics()
    if as_json:
        print_json({name: {"times": one.times, "values": one.values} for name, one in series.items()})
        return
    if not series:
        say(f"sgpu: run {found.run_id} has no telemetry samples", err=True)
        return
    rows = [["SERIES", "SAMPLES", "LEAST", "MEAN", "MOST", "LAST"]]
    for name, (_, values) in series.items():
        numbers = (min(values), sum(values) / len(values), max(values), values[-1])
        rows.append([name, str(len(values)), *(f"{number:,.1f}" for number in numbers)])
    print_table(rows[0], rows[1:], wide=wide)


def _story(home: Home, record: RunRecord) -> str:
    reason = record.stopped.reason.value if record.stopped is not None else ""
    head = " · ".join(part for part in (f"run {record.run_id}", name_of(record), record.state, reason) if part)
    parts = [head]
    if record.problem:
        parts.append(record.problem)
    asked = _request_text(record)
    if asked:
        parts.append(f"asked for: {asked}")
    took = f" · took {took_text(record)}" if took_ms(record) is not None else ""
    parts.append(f"started: {format_moment(record.began_ns or record.created_ns)}{took}")
    if record.stopped is not None and record.stopped.state is not State.SUCCEEDED:
        parts += ["", ending_text(record.stopped, record.directory, record.run_id, record.spec)]
    cost = cost_so_far(home, record) if record.receipt is None else None
    if cost is not None and cost.gpu_ms:
        parts.append(f"cost: {cost}")
    if record.receipt is not None:
        parts += ["", "receipt:", *(f"  {line}" for line in record.receipt.text().splitlines()[1:])]
    link = _mlflow_link(record)
    if link and (record.receipt is None or not record.receipt.tracked):  # MLflow's link can arrive late.
        parts.append(f"tracked: {link}")
    uses = use_lines(sampled_uses(record.directory) if record.receipt is None else record.receipt.uses)
    if uses:
        parts += ["", "devices:" if record.receipt is not None else "devices so far:", *(f"  {line}" for line in uses)]
    return "\n".join([*parts, "", *_files_text(home, record)])


def _mlflow_link(record: RunRecord) -> str:
    """Return the URL of the run in MLflow, or "" if the URL is unknown."""
    tracked = from_directory(record.directory)
    if tracked is not None:
        return tracked.url
    return record.receipt.tracked if record.receipt is not None else ""


def _request_text(record: RunRecord) -> str:
    if record.spec is None:
        return ""
    spec = msgspec.to_builtins(record.spec)
    usual = msgspec.to_builtins(RunSpec())
    asked = {key: value for key, value in spec["resources"].items() if value != usual["resources"][key]}
    asked |= {key: value for key, value in spec.items() if key not in _OMITTED_OPTIONS and value != usual[key]}
    if "tags" in asked:
        asked["tags"] = ",".join(f"{name}={value}" for name, value in record.spec.tags.items())
    ranks = [f"{record.world_size} rank{'' if record.world_size == 1 else 's'}"] if record.world_size else []
    if record.spec.ray is not None:
        ranks = [record.spec.ray.text()]
    return " · ".join([*ranks, *(f"{key}={value}" for key, value in asked.items())])


def _files_text(home: Home, record: RunRecord) -> list[str]:
    total = format_bytes(size_on_disk(home.runs / record.run_id))
    lines = [f"files: {record.directory} ({total} on disk)"]
    files = _files(record)
    lines += [f"  {line}" for line in columns([[format_bytes(size), name] for name, size in files[:_FILES_MAX]])]
    if len(files) > _FILES_MAX:
        lines.append(f"  and {len(files) - _FILES_MAX} more")
    hangs = [name for name, _ in files if name.startswith("hang-")]
    if hangs:
        lines.append(f"stack traces of hanging ranks: {', '.join(hangs)}")
    return lines


def _files(record: RunRecord) -> list[tuple[str, int]]:
    found = [(path.relative_to(record.directory).as_posix(), status) for path, status in walk(record.directory)]
    return sorted((name, status.st_size) for name, status in found if status.st_mode & 0o170000 == 0o100000)


def _details(record: RunRecord) -> dict[str, object]:
    failure = ""
    if record.stopped is not None and record.stopped.state is not State.SUCCEEDED:
        failure = ending_text(record.stopped, record.directory, record.run_id, record.spec)
    return {
        "spec": record.spec,
        "stopped": record.stopped,
        "tracked": _mlflow_link(record),
        "receipt": record.receipt,
        "failure": failure,
        "files": [{"name": name, "size_bytes": size} for name, size in _files(record)],
    }


def use_lines(uses: Sequence[DeviceUse], nodes: Sequence[str] = ()) -> list[str]:
    """Return a table of devices by rank, or no lines for one device. `nodes` has one node name per device."""
    if len(uses) < 2:
        return []
    head = ["#", "BUSY", "PEAK MEMORY", "ENERGY", "THROTTLED", "NODE", "DEVICE"]
    shown = uses[:_SHOWN_MAX]
    places = nodes[:_SHOWN_MAX] if len(nodes) == len(uses) else ["-"] * len(shown)
    rows = [
        [str(rank), *_cells(use), node, use.uuid] for rank, (use, node) in enumerate(zip(shown, places, strict=True))
    ]
    kept = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    lines = columns([[row[at] for at in kept] for row in [head, *rows]])
    more = len(uses) - _SHOWN_MAX
    return [*lines, *([f"and {more} more"] if more > 0 else [])]


def sampled_uses(directory: Path) -> tuple[DeviceUse, ...]:
    """Compute the device usage of a local attempt from its telemetry samples."""
    uses: dict[str, DeviceTotals] = {}
    for path in sorted((directory / "logs").glob("*.telemetry")):
        try:
            lines, _ = decode(path.read_bytes())
        except OSError:  # Another process has deleted the telemetry file.
            continue
        header: Header | None = None
        for line in lines:
            if isinstance(line, Header):
                header = line
            elif header is not None:
                uses = add(uses, header, line)
    return tuple(use.result() for use in uses.values())


def _cells(use: DeviceUse) -> list[str]:
    form = format_bytes if use.uuid.startswith("CPU-") else format_gpu_memory  # A CPU slot uses host memory.
    return [
        "-" if use.busy_percent is None else f"{use.busy_percent:.0f} %",
        "-" if not use.peak_memory_bytes else form(use.peak_memory_bytes),
        "-" if use.energy_joules is None else format_joules(use.energy_joules),
        "-" if not use.throttled_s else format_duration_ms(round(use.throttled_s * 1000)),
    ]


def server_details(view: RunView) -> dict[str, object]:
    """Return all details of a server run as JSON values."""
    files, attempts = _fetch_files_and_attempts(view)
    cost = _cost(view)
    return run_rows.as_json(view, cost) | {
        "spec": view.spec,
        "attempts": attempts.attempts,
        "files": [{"name": file.name, "size_bytes": file.size} for file in files.files],
        "receipt": _receipt(view),
        "receipts": {crew.node: _receipt(view, crew.number) for crew in view.crews if view.finished},
        "cost": cost,
        "failure": failure_text(view),
    }


def server_story(view: RunView) -> Iterator[str]:
    """Yield the lines that describe a server run."""
    files, attempts = _fetch_files_and_attempts(view)
    reason = "" if view.reason is None else view.reason.value
    yield " · ".join(part for part in (f"run {view.id}", view.name, view.state.value, reason) if part)
    if view.sentence:
        yield run_rows.sentence_of(view)
    cluster = "" if view.spec.ray is None else f", {view.spec.ray.text()}"
    whose = f"by {view.owner}" + (f" for {view.team}" if view.team else "")
    policy = f", under policy {view.spec.policy}" if view.spec.policy else ""
    yield f"asked for: {run_rows.devices_text(view)}{cluster}, {whose}{policy}"
    if view.waiting is not None and view.waiting.at_ns is not None:
        yield f"starts: {run_rows.moment_of(view.waiting)}"
    started = view.started_ns or view.created_ns
    took = "" if view.started_ns is None else f" · took {format_duration_ms(run_rows.took_ms(view))}"
    yield f"{'submitted' if view.started_ns is None else 'started'}: {format_moment(started)}{took}"
    yield from columns([_crew_row(view, crew) for crew in view.crews])
    cost = _cost(view)
    if cost is not None and cost.gpu_ms:
        yield f"cost: {cost}"
    if len(attempts.attempts) > 1 or any(each.sentence not in view.sentence for each in attempts.attempts):
        for each in attempts.attempts:
            why = "" if each.reason is None else f" · {each.reason.value}"
            had = f" · secrets: {', '.join(each.secrets)}" if each.secrets else ""
            told = f": {each.sentence}" if each.sentence else ""
            yield f"attempt {each.fence}: {each.state.value}{why} on {each.node}{told}{had}"
    failure = failure_text(view)
    if failure and failure != view.sentence:
        yield from ("", *failure.splitlines())
    receipt = _receipt(view)
    if receipt is not None:
        which = (
            "receipt"
            if view.state in TERMINAL and len(attempts.attempts) == 1
            else f"receipt of attempt {receipt.fence}"
        )
        yield from ("", f"{which}:", *(f"  {line}" for line in receipt.text().splitlines()[1:]))
        crews = view.crews if len(view.crews) > 1 and receipt.fence == view.fence else ()
        if uses := use_lines(receipt.uses, [crew.node for crew in crews for _ in range(crew.gpus)]):
            yield from ("", "devices:", *(f"  {line}" for line in uses))
    yield from ("", f"files on the server: {format_bytes(sum(file.size for file in files.files))}")
    yield from (f"  {line}" for line in columns([[format_bytes(f.size), f.name] for f in files.files[:_FILES_MAX]]))
    if len(files.files) > _FILES_MAX:
        yield f"  and {len(files.files) - _FILES_MAX} more"


def failure_text(view: RunView) -> str:
    """Return a description of a run's failure, or "" without a failure."""
    if view.state not in TERMINAL or view.state is State.SUCCEEDED or not view.fence:
        return ""
    found = fetch_ending(view)
    return "" if found is None else ending_text(found.stopped, found.directory, view.id, view.spec)


def _receipt(view: RunView, crew: int | None = None) -> Receipt | None:
    """Return the receipt of the last attempt or of node `crew`, or None if the receipt is missing."""
    query = {} if crew is None else {"fence": str(view.fence), "crew": str(crew)}
    with patient_server(this_home().root) as connection:
        try:
            return connection.ask("GET", f"/runs/{view.id}/receipt", answer=Receipt, query=query)
        except NotFound:
            return None


def _cost(view: RunView) -> Cost | None:
    """Return the run's cost from the server. Return None if the server version is too old."""
    wire = load("serverless_gpu.wire.runs")
    with patient_server(this_home().root) as connection:
        try:
            found: Cost = connection.ask("GET", f"/runs/{view.id}/cost", answer=wire.CostView).cost
        except NotFound:
            return None
    return found


def _fetch_files_and_attempts(view: RunView) -> tuple[FileList, AttemptList]:
    wire = load("serverless_gpu.wire.runs")
    with patient_server(this_home().root) as connection:
        files: FileList = (
            connection.ask("GET", f"/runs/{view.id}/files", answer=wire.FileList)
            if view.fence
            else wire.FileList(fence=0, files=())
        )
        attempts: AttemptList = connection.ask("GET", f"/runs/{view.id}/attempts", answer=wire.AttemptList)
    return files, attempts


def _crew_row(view: RunView, crew: CrewView) -> list[str]:
    state = crew.state.value if crew.reason is None else f"{crew.state.value} · {crew.reason.value}"
    silent = f"no contact since {format_moment(crew.heard_ns)}" if crew.state is State.UNREACHABLE else ""
    last = crew.first_rank + crew.gpus - 1
    ranks = f"rank {last}" if crew.gpus == 1 else f"ranks {crew.first_rank} to {last}"
    what = f"{crew.gpus} device{'' if crew.gpus == 1 else 's'}" if view.spec.per_node else ranks
    return [f"on {crew.node}:", what, state, silent or crew.sentence]
