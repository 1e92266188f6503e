"""`sgpu runs`, `sgpu show`, `sgpu cancel`: run directories, and the runs behind them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_moment, format_utc
from serverless_gpu.cli.choosing import queued_runs, this_home
from serverless_gpu.cli.columns import columns
from serverless_gpu.cli.locating import PAGE, locate, own_runs, server_costs, server_runs
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.cli.server import runs as remote
from serverless_gpu.cli.uses import sampled_uses, use_lines
from serverless_gpu.client.attaching import attach
from serverless_gpu.client.costs import cost_here
from serverless_gpu.client.outcome import ending_text
from serverless_gpu.client.run import Run
from serverless_gpu.client.tracked import from_directory
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.attempt import TERMINAL, State
from serverless_gpu.model.cost import Cost
from serverless_gpu.model.receipt import Receipt
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.history import (
    FUNCTION,
    NOT_STARTED,
    UNREADABLE,
    Record,
    read_run,
    run_ids,
    size_on_disk,
    walk,
)
from serverless_gpu.node.home import Home
from serverless_gpu.units import format_bytes, format_duration_ms

if TYPE_CHECKING:
    from serverless_gpu.wire.runs import RunView

_STATES = [*(state.value for state in State), NOT_STARTED, UNREADABLE]
_NAME_CHARACTERS_MAX = 32
_FILES_MAX = 200
_NOT_ASKED = frozenset({"name", "resources", "tracker", "ray"})  # shown otherwise, or nobody's wish


@click.command()
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="List at most this many.")
@click.option("--state", type=click.Choice(_STATES, case_sensitive=False), help="List only runs in this state.")
@click.option("--size", is_flag=True, help="Also show how much room each takes on disk.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per run.")
def runs(limit: int, state: str | None, size: bool, as_json: bool) -> None:
    """List runs, newest first: those of this home, and those of the server if there is one."""
    home = this_home()
    queued = queued_runs(home)
    records = (read_run(home.runs, run_id, queued) for run_id in own_runs(home))
    own = list(islice((record for record in records if state in (None, record.state)), limit))
    asked = "" if state in (NOT_STARTED, UNREADABLE) else state or ""
    views, costs = server_costs(home, limit=limit, state=asked) if asked or state is None else ((), {})
    if as_json:
        found = [_as_json(home, record, size=size) for record in own]
        found += [remote.as_json(view, costs.get(view.id)) for view in views]
        print_json(sorted(found, key=lambda run: str(run["id"]), reverse=True)[:limit])
        return
    if not own and not views:
        say(f"no runs in {home.runs}" + (f" are {state}" if state else ""))
        return
    head = ["RUN", "NAME", "STATE", "STARTED", "TOOK", "DEVICES", "WHERE", "USED"]
    rows = [[*_row(record, home, size=size)] for record in own]
    rows += [[*remote.row(view), *(["-"] if size else []), _used_text(costs.get(view.id))] for view in views]
    if size:
        head.insert(-1, "SIZE")
    for line in columns([head, *sorted(rows, reverse=True)[:limit]]):
        say(line)


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(run: str | None, as_json: bool) -> None:
    """Show everything about one run: what was asked for, how it ended, its receipt, its files.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, the latest run.
    """
    home = this_home()
    found = locate(home, run)
    if found.view is not None:
        _show_remote(found.view, as_json=as_json)
        return
    record = read_run(home.runs, found.run_id, queued_runs(home))
    if as_json:
        print_json(_as_json(home, record, size=True) | _details(record))
        return
    for line in _story(home, record).splitlines():
        say(line)


def _show_remote(view: RunView, *, as_json: bool) -> None:
    if as_json:
        print_json(remote.details(view))
        return
    for line in remote.story(view):
        say(line)


@click.command()
@click.argument("run", required=False)
def cancel(run: str | None) -> None:
    """Stop a run and wait until its devices were handed back.

    RUN is an identifier, or any beginning or end of one that no other run has; without it, what runs is listed.
    """
    home = this_home()
    if run is None:
        _refuse_unnamed(home)
    found = locate(home, run)
    wanted = found.run_id
    inside = [] if found.view is not None else [attach(run_id) for run_id in _runs_of(home, wanted)]
    for handle in inside:
        handle.cancel()
    for handle in inside:
        handle.wait()
        say(f"run {handle.id} {handle.status()}: {handle.receipt().gate}")
    handle = attach(wanted)
    handle.cancel()
    handle.wait()
    say(f"{handle.status()}: {_gate(handle)}")


def _refuse_unnamed(home: Home) -> NoReturn:
    """Raise after listing what could be meant."""
    live = [_row(record, home)[:4] for run_id in own_runs(home) if (record := read_run(home.runs, run_id)).live]
    live += [remote.row(view)[:4] for view in server_runs(home, limit=PAGE) if view.state not in TERMINAL]
    for line in columns(live):
        say(line, err=True)
    raise click.UsageError("which run? " + ("These are running." if live else "None is running."))


def _gate(handle: Run[object]) -> str:
    """Return what is known of the devices; a run that never had any has no receipt."""
    try:
        receipt = handle.receipt()
    except ServerlessGpuError:
        return "it had no devices"
    if receipt.state != handle.status():  # it waited again: the last receipt is of what it had before
        return f"it had no devices any more; attempt {receipt.fence} gave them back, {receipt.gate}"
    return receipt.gate


def _runs_of(home: Home, session: str) -> list[str]:
    """Return the runs that use a session's devices now; none for a run."""
    if read_run(home.runs, session).kind == FUNCTION:
        return []
    records = (read_run(home.runs, run_id) for run_id in run_ids(home.runs))
    return [record.run_id for record in records if record.live and record.session == session]


def name_of(record: Record) -> str:
    """Return what a run is called: its function, or what else it is."""
    if record.kind != FUNCTION:
        return f"({record.kind})"
    return record.spec.name if record.spec is not None else ""


def _row(record: Record, home: Home, *, size: bool = False) -> list[str]:
    name = name_of(record) or "-"
    if len(name) > _NAME_CHARACTERS_MAX:
        name = name[: _NAME_CHARACTERS_MAX - 1] + "…"
    return [
        record.run_id,
        name,
        record.state,
        format_moment(record.began_ns or record.created_ns),
        _took_text(record),
        _devices_text(record),
        "here",
        *([format_bytes(size_on_disk(home.runs / record.run_id))] if size else []),
        record.receipt.used_text() if record.receipt is not None else _used_text(_cost_so_far(home, record)),
    ]


def _cost_so_far(home: Home, record: Record) -> Cost | None:
    """Return what a run that goes on has used by now; None for any other."""
    return cost_here(home.runs / record.run_id, SystemClock()) if record.live else None


def _used_text(cost: Cost | None) -> str:
    return "-" if cost is None or not cost.gpu_ms else cost.used_text()


def _took_ms(record: Record) -> int | None:
    """Return how long user code ran, or has run by now; None where that is not known."""
    if record.receipt is not None and record.receipt.segments.run_ms is not None:
        return record.receipt.segments.run_ms
    if record.began_ns is None:
        return None
    return max(0, (record.ended_ns or SystemClock().wall_ns()) - record.began_ns) // 1_000_000


def _took_text(record: Record) -> str:
    took_ms = _took_ms(record)
    return "-" if took_ms is None else format_duration_ms(took_ms)


def _devices_text(record: Record) -> str:
    receipt = record.receipt
    if receipt is None:
        return f"{record.world_size} rank{'' if record.world_size == 1 else 's'}" if record.world_size else "-"
    return receipt.devices_text()


def _story(home: Home, record: Record) -> str:
    """Return everything about one run, for reading."""
    reason = record.stopped.reason.value if record.stopped is not None else ""
    head = " · ".join(part for part in (f"run {record.run_id}", name_of(record), record.state, reason) if part)
    parts = [head]
    if record.problem:
        parts.append(record.problem)
    asked = _asked_text(record)
    if asked:
        parts.append(f"asked for: {asked}")
    took = f" · took {_took_text(record)}" if _took_ms(record) is not None else ""
    parts.append(f"started: {format_moment(record.began_ns or record.created_ns)}{took}")
    if record.stopped is not None and record.stopped.state is not State.SUCCEEDED:
        parts += ["", ending_text(record.stopped, record.directory, record.run_id, record.spec)]
    cost = _cost_so_far(home, record) if record.receipt is None else None
    if cost is not None and cost.gpu_ms:
        parts.append(f"cost: {cost}")
    if record.receipt is not None:
        parts += ["", "receipt:", *(f"  {line}" for line in record.receipt.text().splitlines()[1:])]
    link = _link(record)
    if link and (record.receipt is None or not record.receipt.tracked):  # it came after the receipt was written
        parts.append(f"tracked: {link}")
    uses = use_lines(sampled_uses(record.directory) if record.receipt is None else record.receipt.uses)
    if uses:
        parts += ["", "devices:" if record.receipt is not None else "devices so far:", *(f"  {line}" for line in uses)]
    return "\n".join([*parts, "", *_files_text(home, record)])


def _link(record: Record) -> str:
    """Return where the run is in MLflow, as is known now, or ""."""
    tracked = from_directory(record.directory)
    if tracked is not None:
        return tracked.url
    return record.receipt.tracked if record.receipt is not None else ""


def _asked_text(record: Record) -> str:
    if record.spec is None:
        return ""
    spec = msgspec.to_builtins(record.spec)
    usual = msgspec.to_builtins(RunSpec())
    asked = {key: value for key, value in spec["resources"].items() if value != usual["resources"][key]}
    asked |= {key: value for key, value in spec.items() if key not in _NOT_ASKED and value != usual[key]}
    if "tags" in asked:
        asked["tags"] = ",".join(f"{name}={value}" for name, value in record.spec.tags.items())
    ranks = [f"{record.world_size} rank{'' if record.world_size == 1 else 's'}"] if record.world_size else []
    if record.spec.ray is not None:
        ranks = [record.spec.ray.text()]
    return " · ".join([*ranks, *(f"{key}={value}" for key, value in asked.items())])


def _files_text(home: Home, record: Record) -> list[str]:
    total = format_bytes(size_on_disk(home.runs / record.run_id))
    lines = [f"files: {record.directory} ({total} on disk)"]
    files = _files(record)
    lines += [f"  {line}" for line in columns([[format_bytes(size), name] for name, size in files[:_FILES_MAX]])]
    if len(files) > _FILES_MAX:
        lines.append(f"  and {len(files) - _FILES_MAX} more")
    hangs = [name for name, _ in files if name.startswith("hang-")]
    if hangs:
        lines.append(f"where ranks stood when nothing moved: {', '.join(hangs)}")
    return lines


def _files(record: Record) -> list[tuple[str, int]]:
    found = [(path.relative_to(record.directory).as_posix(), status) for path, status in walk(record.directory)]
    return sorted((name, status.st_size) for name, status in found if status.st_mode & 0o170000 == 0o100000)


def _as_json(home: Home, record: Record, *, size: bool) -> dict[str, object]:
    receipt, cost = record.receipt, _cost_so_far(home, record) if record.receipt is None else None
    row: dict[str, object] = {
        "id": record.run_id,
        "kind": record.kind,
        "name": record.spec.name if record.spec is not None else "",
        "state": record.state,
        "reason": record.stopped.reason.value if record.stopped is not None else None,
        "live": record.live,
        "created": format_utc(record.created_ns),
        "started": format_utc(record.began_ns) if record.began_ns is not None else None,
        "ended": format_utc(record.ended_ns) if record.ended_ns is not None else None,
        "took_ms": _took_ms(record),
        "ranks": record.world_size,
        "gpu_type": receipt.gpu_type if receipt is not None else None,
        "devices": list(receipt.gpus) if receipt is not None else None,
        **_spent(receipt or cost),
        "directory": str(record.directory),
        "problem": record.problem,
    }
    return row | ({"size_bytes": size_on_disk(home.runs / record.run_id)} if size else {})


def _spent(said: Receipt | Cost | None) -> dict[str, object]:
    return {name: getattr(said, name, None) for name in ("gpu_ms", "micros", "currency")}


def _details(record: Record) -> dict[str, object]:
    failure = ""
    if record.stopped is not None and record.stopped.state is not State.SUCCEEDED:
        failure = ending_text(record.stopped, record.directory, record.run_id, record.spec)
    return {
        "spec": record.spec,
        "stopped": record.stopped,
        "tracked": _link(record),
        "receipt": record.receipt,
        "failure": failure,
        "files": [{"name": name, "size_bytes": size} for name, size in _files(record)],
    }
