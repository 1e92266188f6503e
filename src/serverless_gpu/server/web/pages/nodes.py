"""Shows nodes with their GPUs, and changes the rules of nodes."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import msgspec

from serverless_gpu.errors import NotFound
from serverless_gpu.model.device_history import BUCKET_S
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.http.routing import FORM_BYTES_MAX, Call, Form, Query, Routes, reading, writing
from serverless_gpu.server.nodes import canaries, device_views, node_service
from serverless_gpu.server.nodes.device_views import DevicesQuery
from serverless_gpu.server.web import form_values
from serverless_gpu.server.web.figures import Figure, make_figure
from serverless_gpu.server.web.line_chart import PlotLine
from serverless_gpu.server.web.site import WEB, Page, Redirect, Site, zone_of_reader
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX
from serverless_gpu.wire.canary import CanaryRequest, CanaryView
from serverless_gpu.wire.nodes import (
    ApproveRequest,
    CalendarRequest,
    DeviceView,
    ForgetRequest,
    NodeDrainRequest,
    NodeView,
    QuarantineRequest,
)

routes = Routes("node-pages", mount=WEB)
SHOWN = 40
"""Nodes on one page."""
PENDING = "PENDING"
_LINES_MAX = 16
_CHARTS = {
    "busy_percent": ("Use", "percent"),
    "memory_bytes": ("Memory", "bytes"),
    "temperature_celsius": ("Temperature", "celsius"),
    "power_watts": ("Power", "watts"),
}
"""Title and unit of each series of `model.device_history`."""
Text = Annotated[str, msgspec.Meta(max_length=LABEL_CHARACTERS_MAX)]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)]


class NodesQuery(Query, frozen=True, kw_only=True):
    """Filters of the node list. `after` is the last node of the previous page."""

    pool: Text = ""
    state: Text = ""
    text: Text = ""
    after: Text = ""


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A node with the sums of its devices' measured values. None stands for an unknown value."""

    node: NodeView
    devices: tuple[DeviceView, ...]  # The GPUs, or the CPU slots of a node without a GPU.
    types: str
    counts: Counter[str]
    owners: tuple[str, ...]
    busy_percent: float | None
    memory_bytes: int | None
    celsius: float | None
    watts: float | None


@routes.get("/nodes", needs=reading("nodes"))
def show_nodes(call: Call, site: Site, query: NodesQuery) -> Page:
    """List nodes with their devices."""
    there = site.ask(call, node_service.list_nodes).nodes
    by_node: dict[str, list[DeviceView]] = {}
    for device in site.ask(call, device_views.list_devices).devices:
        by_node.setdefault(device.node_id, []).append(device)
    chosen = [
        node
        for node in sorted(there, key=lambda one: one.name)
        if query.pool in ("", node.pool)
        and query.state in ("", node.state)
        and query.text.lower() in f"{node.name} {' '.join(device.type for device in node.devices)}".lower()
    ]
    pending = [node for node in chosen if node.state == PENDING]
    rest = [node for node in chosen if node.state != PENDING and node.name > query.after]
    shown = [summary(node, by_node.get(node.id, ())) for node in rest[:SHOWN]]
    everything = [device for devices in by_node.values() for device in devices]
    gpus = [device for device in everything if device.kind is not DeviceKind.CPU]
    return site.page(
        call,
        "nodes.html",
        title="Nodes and GPUs",
        nav="nodes",
        wakes=(SCHEDULER,),
        query=query,
        is_empty=not there,
        pools=sorted({node.pool for node in there if node.pool}),
        states=sorted({node.state for node in there}),
        pending=pending,
        nodes=shown,
        following=shown[-1].node.name if len(rest) > SHOWN else "",
        totals=Counter(device.state for device in gpus),
        slots=Counter(device.state for device in everything if device.kind is DeviceKind.CPU),
    )


@routes.get("/nodes/{node}", needs=reading("nodes"))
def show_node(call: Call, site: Site, node: str) -> Page:
    """Show a node with its devices, rules and findings."""
    view = site.ask(call, node_service.read_node, node=node)
    devices = site.ask(call, device_views.list_devices, query=DevicesQuery(node=view.id)).devices
    return site.page(
        call,
        "node.html",
        title=view.name,
        nav="nodes",
        wakes=(SCHEDULER,),
        node=view,
        summary=summary(view, devices),
        devices=devices,
        figures=_figures(call, site, view),
        canary=_canary(call, site, view.name),
        owns=view.rules.calendar.owner == call.who.name,
    )


def _figures(call: Call, site: Site, node: NodeView) -> list[Figure]:
    """Return the charts of a node's GPUs over the last two hours."""
    histories = site.ask(call, device_views.read_history, node=node.id).devices
    named = {device.uuid: f"{device.type} {device.index}" for device in node.devices}
    there = [history for history in histories if history.uuid in named and history.at_s]
    if not there:
        return []
    # The histories of devices that joined later are shorter.
    times_s = range(min(history.at_s[0] for history in there), max(history.at_s[-1] for history in there) + 1, BUCKET_S)
    found: list[Figure] = []
    for series, (title, unit) in _CHARTS.items():
        lines = []
        for history in there[:_LINES_MAX]:
            values = dict(zip(history.at_s, history.series.get(series, ()), strict=False))
            if any(value is not None for value in values.values()):
                lines.append(PlotLine(label=named[history.uuid], mean=tuple(map(values.get, times_s))))
        if lines:
            times_ms = [1000 * at_s for at_s in times_s]
            omitted = max(0, len(there) - _LINES_MAX)
            zone = zone_of_reader(call)
            found.append(make_figure(series, title, times_ms, lines, unit=unit, zone=zone, omitted=omitted))
    return found


def _canary(call: Call, site: Site, node: str) -> CanaryView | None:
    try:
        return site.ask_if_allowed(call, canaries.view_canary, node=node)
    except NotFound:
        return None


def summary(node: NodeView, devices: tuple[DeviceView, ...] | list[DeviceView]) -> NodeSummary:
    """Return the sums of a node's devices."""
    devices = [device for device in devices if device.kind is not DeviceKind.CPU] or devices
    types = Counter(device.type for device in devices)
    samples = [device.sample for device in devices if device.sample is not None]
    busy = [one.busy_percent for one in samples if one.busy_percent is not None]
    memory = [one.memory_bytes for one in samples if one.memory_bytes is not None]
    degrees = [one.temperature_celsius for one in samples if one.temperature_celsius is not None]
    watts = [one.power_watts for one in samples if one.power_watts is not None]
    return NodeSummary(
        node=node,
        devices=tuple(devices),
        types=", ".join(f"{count} {name}" for name, count in types.items()),
        counts=Counter(device.state for device in devices),
        owners=tuple(dict.fromkeys(device.holder.owner for device in devices if device.holder is not None)),
        busy_percent=sum(busy) / len(busy) if busy else None,
        memory_bytes=sum(memory) if memory else None,
        celsius=max(degrees, default=None),
        watts=sum(watts) if watts else None,
    )


# --- changes ----------------------------------------------------------------------------------------------------------


class NodeDrainForm(Form, frozen=True, kw_only=True):
    """Start or end a drain."""

    on: bool
    stop: bool = False
    note: Text = ""


class CalendarForm(Form, frozen=True, kw_only=True):
    """The owner and the sharing times of a node. `shared` has one time per line."""

    owner: Name = ""
    owner_first: bool = False
    shared: Annotated[str, msgspec.Meta(max_length=4_000)] = ""
    zone: Name = ""


class QuarantineForm(Form, frozen=True, kw_only=True):
    """Quarantine or release a device."""

    uuid: Text
    on: bool
    note: Text = ""


@routes.post("/nodes/{node}/drain", needs=writing("node-rules"), limit=FORM_BYTES_MAX)
def drain(call: Call, site: Site, node: str, body: NodeDrainForm) -> Redirect:
    """Drain or resume a node."""
    asked = NodeDrainRequest(on=body.on, stop=body.stop, note=body.note)
    return _to(site.ask(call, node_service.drain, node=node, body=asked))


@routes.post("/nodes/{node}/calendar", needs=writing("node-rules"), limit=FORM_BYTES_MAX)
def put_calendar(call: Call, site: Site, node: str, body: CalendarForm) -> Redirect:
    """Set the owner and the sharing times of a node."""
    shared = form_values.lines(body.shared)
    asked = CalendarRequest(owner=body.owner.strip(), owner_first=body.owner_first, shared=shared, zone=body.zone)
    return _to(site.ask(call, node_service.put_calendar, node=node, body=asked))


@routes.post("/nodes/{node}/quarantine", needs=writing("node-rules"), limit=FORM_BYTES_MAX)
def quarantine(call: Call, site: Site, node: str, body: QuarantineForm) -> Redirect:
    """Quarantine or release a device."""
    asked = QuarantineRequest(uuid=body.uuid, on=body.on, note=body.note)
    return _to(site.ask(call, node_service.quarantine, node=node, body=asked))


@routes.post("/nodes/{node}/forget", needs=writing("nodes"), limit=FORM_BYTES_MAX)
def forget(call: Call, site: Site, node: str, body: Form) -> Redirect:
    """Abandon a dead node. The reader confirms the death by typing the node's name."""
    site.ask(call, node_service.forget, node=node, body=ForgetRequest(i_know_it_is_dead=True))
    return Redirect(path="/nodes")


@routes.post("/nodes/{node}/canary", needs=writing("nodes"), limit=FORM_BYTES_MAX)
def start_canary(call: Call, site: Site, node: str, body: Form) -> Redirect:
    """Start the canary on a node."""
    site.ask(call, canaries.start_canary, node=node, body=CanaryRequest())
    return Redirect(path=f"/nodes/{node}")


@routes.post("/nodes/{node}/rotate", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def rotate(call: Call, site: Site, node: str, body: Form) -> Redirect:
    """Request another key of a node."""
    return _to(site.ask(call, node_service.rotate_key, node=node))


@routes.post("/nodes/{node}/revoke", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def revoke(call: Call, site: Site, node: str, body: Form) -> Redirect:
    """End a node's access."""
    return _to(site.ask(call, node_service.revoke, node=node))


@routes.post("/nodes/{node}/approve", needs=writing("tokens"), limit=FORM_BYTES_MAX)
def approve(call: Call, site: Site, node: str, body: Form) -> Redirect:
    """Approve a node that waits for an administrator. `node` is the identifier of its token."""
    return _to(site.ask(call, node_service.approve, body=ApproveRequest(name=node)))


def _to(node: NodeView) -> Redirect:
    return Redirect(path=f"/nodes/{node.name}")
