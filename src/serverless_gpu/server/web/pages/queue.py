"""Shows the queue: order, reason, latest start, and what would help a waiting run."""

from __future__ import annotations

import datetime

import msgspec

from serverless_gpu.model.scheduling.values import WaitReason
from serverless_gpu.model.scheduling.wait_messages import sentence
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.nodes import drain
from serverless_gpu.server.runs import queue_views
from serverless_gpu.server.runs.queue_views import QueueQuery
from serverless_gpu.server.web.site import WEB, Page, Site, zone_of_reader
from serverless_gpu.units import format_duration_ms
from serverless_gpu.wire.queue import QueueEntry, wait_of

routes = Routes("queue-pages", mount=WEB)


class QueuePageQuery(Query, frozen=True, kw_only=True):
    """Filters of the queue. `mine` selects the reader's own runs."""

    mine: bool = False


class QueueRow(msgspec.Struct, frozen=True, kw_only=True):
    """A queue entry with its reason, its latest or likely start, and advice."""

    entry: QueueEntry
    number: int
    why: str
    start_ns: int | None
    start: str  # "at the latest", "about" or "".
    helps: tuple[str, ...]


@routes.get("/queue", needs=reading("runs"))
def show_queue(call: Call, site: Site, query: QueuePageQuery) -> Page:
    """List waiting runs in scheduling order."""
    found = site.ask(call, queue_views.view_queue, query=QueueQuery(mine=query.mine))
    zone = zone_of_reader(call)
    return site.page(
        call,
        "queue.html",
        title="Queue",
        nav="queue",
        wakes=(SCHEDULER,),
        query=query,
        entries_=[
            queue_row(entry, number, zone, call.clock.wall_ns()) for number, entry in enumerate(found.entries, 1)
        ],
        waiting=found.waiting,
        drain=site.ask_if_allowed(call, drain.show_drain),
    )


def queue_row(entry: QueueEntry, number: int, zone: datetime.tzinfo, now_ns: int) -> QueueRow:
    """Return what the page shows about a waiting run."""
    view = entry.waiting
    wait = wait_of(view, entry.run) if view is not None else None
    why = sentence(wait, lambda at_ns: clock_text(at_ns, zone, now_ns)) if wait is not None else entry.sentence
    start_ns, start = entry.reserved_ns, "at the latest" if entry.is_bound else "about"
    if view is not None and view.likely_ns is not None:
        start_ns, start = view.likely_ns, "about"
    elif view is not None and view.at_ns is not None:
        start_ns, start = view.at_ns, "at the latest" if view.is_bound else "about"
    return QueueRow(
        entry=entry,
        number=number,
        why=why,
        start_ns=start_ns,
        start=start if start_ns is not None else "",
        helps=_advice(entry),
    )


def _advice(entry: QueueEntry) -> tuple[str, ...]:
    """Return what would let a waiting run start earlier."""
    view = entry.waiting
    if view is None:
        return ()
    found: list[str] = []
    if view.spare_s >= 60:
        limit = format_duration_ms(round(view.spare_s * 1000))
        found.append(f"with a time limit of at most {limit} (timeout=), the run starts now")
    if entry.gpu_type and view.reason in (WaitReason.CAPACITY, WaitReason.RESERVED):
        found.append("without gpu_type, the run also starts on other GPUs")
    if view.one_node and view.count > 1 and view.reason == WaitReason.CAPACITY:
        found.append("fewer GPUs start earlier, if one node has them free")
    if view.outside:
        found.append(f"{view.outside} GPUs are in quarantine or in use outside this server: see the nodes")
    if view.reason == WaitReason.CALENDAR and view.owner:
        found.append(f"{view.owner} owns {view.node or 'the node'} and can share it earlier")
    if view.reason == WaitReason.AWAY:
        found.append("a suitable node is silent or drained: see the nodes")
    if view.reason == WaitReason.UNSATISFIABLE:
        found.append("no node has these GPUs: change the request, or let a suitable node join")
    return tuple(found)


def clock_text(wall_ns: int, zone: datetime.tzinfo, now_ns: int) -> str:
    """Return a time of day in the reader's zone, with the date unless it is today."""
    moment, now = (datetime.datetime.fromtimestamp(ns // 1_000_000_000, zone) for ns in (wall_ns, now_ns))
    return f"{moment:%H:%M}" if moment.date() == now.date() else f"{moment:%d %b %H:%M}"
