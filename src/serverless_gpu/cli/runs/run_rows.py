"""Builds table rows and final states of server runs. `run_details.py` prints all details of one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from serverless_gpu.ambient import SystemClock, format_moment, format_soon, format_utc
from serverless_gpu.lazy_import import load
from serverless_gpu.model.hardware import CPU
from serverless_gpu.model.lifecycle.attempt import TERMINAL, State
from serverless_gpu.model.receipt import nodes_text
from serverless_gpu.model.scheduling import wait_messages
from serverless_gpu.model.spec import Command
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.units import format_duration_ms

if TYPE_CHECKING:
    from serverless_gpu.model.cost import Cost
    from serverless_gpu.model.lifecycle.attempt import Stopped
    from serverless_gpu.wire.queue import WaitView
    from serverless_gpu.wire.runs import CrewView, RunView

_ENDING_S = 10.0


def row(view: RunView) -> list[str]:
    """Return a table row: run, name, state, start time, duration, devices, and location with owner."""
    nodes = nodes_text([crew.node for crew in view.crews])
    place = nodes or view.node or ("waits" if view.state is State.QUEUED else "server")
    if view.waiting is not None and view.waiting.place:
        place = f"{place} {wait_messages.ordinal(view.waiting.place)}"
    return [
        view.id,
        view.name or "-",
        view.state.value,
        format_moment(view.started_ns or view.created_ns),
        "-" if view.started_ns is None else format_duration_ms(took_ms(view)),
        devices_text(view),
        f"{place}, {view.owner}",
    ]


def devices_text(view: RunView) -> str:
    """Return a run's assigned or requested devices as text."""
    count = view.world_size or view.spec.resources.gpus
    kind = view.gpu_type or view.spec.resources.gpu_type or "GPU"
    noun = "CPU slot" if kind == CPU else kind
    return f"{count or 'all'} {noun}" + ("s" if kind == CPU and count != 1 else "")


def as_json(view: RunView, cost: Cost | None = None) -> dict[str, object]:
    """Return a server run as JSON values with the same keys as a local run."""
    return {
        "id": view.id,
        "kind": "command" if isinstance(view.spec.payload, Command) else "function",
        "name": view.name,
        "state": view.state.value,
        "reason": None if view.reason is None else view.reason.value,
        "live": view.state not in TERMINAL,
        "created": format_utc(view.created_ns),
        "started": None if view.started_ns is None else format_utc(view.started_ns),
        "ended": None if view.ended_ns is None else format_utc(view.ended_ns),
        "took_ms": None if view.started_ns is None else took_ms(view),
        "ranks": (view.processes or 0) if view.world_size else 0,
        "gpus": view.world_size,
        "gpu_type": view.gpu_type or None,
        **{name: getattr(cost, name, None) for name in ("gpu_ms", "micros", "currency")},
        "owner": view.owner,
        "team": view.team,
        "pool": view.pool,
        "node": view.node,
        "nodes": [_crew(crew) for crew in view.crews],
        "attempt": view.fence,
        "sentence": sentence_of(view),
        "waiting": None if view.waiting is None else _waiting(view.waiting),
        "server": True,
    }


def took_ms(view: RunView) -> int:
    """Return a run's current or final run time in milliseconds."""
    ended_ns = view.ended_ns or SystemClock().wall_ns()
    return max(0, ended_ns - (view.started_ns or ended_ns)) // 1_000_000


def sentence_of(view: RunView) -> str:
    """Return a run's message. A wait message contains times in this machine's time zone."""
    if view.waiting is None:
        return view.sentence
    wait = load("serverless_gpu.wire.queue").wait_of(view.waiting, view.id)
    return view.sentence if wait is None else wait_messages.sentence(wait, format_soon)


def moment_of(waiting: WaitView) -> str:
    """Return the expected start of a waiting run as text."""
    assert waiting.at_ns is not None
    moment = format_moment(waiting.at_ns)
    return f"{moment} at the latest" if waiting.is_bound else f"about {moment}"


def _waiting(waiting: WaitView) -> dict[str, object]:
    """Return a run's wait state as JSON values, with times in UTC."""

    def utc(at_ns: int | None) -> str | None:
        return None if at_ns is None else format_utc(at_ns)

    parts = msgspec.structs.asdict(waiting)
    moments = {
        "start": parts.pop("at_ns"),
        "turns": parts.pop("turns_ns"),
        "kept": parts.pop("kept_ns"),
        "likely": parts.pop("likely_ns"),
    }
    holders = [
        {
            "title": each.title,
            "count": each.count,
            "until": utc(each.until_ns),
            "is_bound": each.is_bound,
            "is_leaving": each.is_leaving,
        }
        for each in waiting.holders
    ]
    return parts | {"holders": holders} | {name: utc(at_ns) for name, at_ns in moments.items()}


def _crew(crew: CrewView) -> dict[str, object]:
    return {
        "node": crew.node,
        "state": crew.state.value,
        "reason": None if crew.reason is None else crew.reason.value,
        "first_rank": crew.first_rank,
        "gpus": crew.gpus,
        "sentence": crew.sentence,
        "heard": format_utc(crew.heard_ns),
        "started": None if crew.started_ns is None else format_utc(crew.started_ns),
        "ended": None if crew.ended_ns is None else format_utc(crew.ended_ns),
    }


class RunEnding(NamedTuple):
    """Final state of a run, and the directory of the last attempt."""

    stopped: Stopped
    directory: Path  # Local directory of the last attempt's files.


def fetch_ending(view: RunView) -> RunEnding | None:
    """Return the final state of an ended run, or None if the final state is unknown.

    Unpickle nothing.
    """
    run = load("serverless_gpu.client.runs.attachment").attach(view.id)
    run.wait(_ENDING_S)
    stopped = read_ending(run.directory)
    return None if stopped is None else RunEnding(stopped, run.directory)
