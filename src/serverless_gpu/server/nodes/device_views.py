"""Shows each device with the run that holds it and its latest measured values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model import access_control
from serverless_gpu.model.device_history import SERIES
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading
from serverless_gpu.server.nodes.capacity import DEGRADED, DRAINING, UP
from serverless_gpu.server.nodes.device_samples import DeviceSamples
from serverless_gpu.server.nodes.node_admission import find_node
from serverless_gpu.server.nodes.node_service import NodeService
from serverless_gpu.server.records import active_runs
from serverless_gpu.server.records.active_runs import AttemptDevices
from serverless_gpu.wire.agents import DeviceSample
from serverless_gpu.wire.nodes import (
    DeviceHistoryList,
    DeviceHistoryView,
    DeviceList,
    DeviceView,
    HolderRun,
    NodeView,
)

STATES = FREE, HELD, QUARANTINED, OUTSIDE, AWAY = "free", "held", "quarantined", "outside", "away"
_PRESENT = (UP, DRAINING, DEGRADED)


class DeviceViews:
    """Views of devices."""

    def __init__(
        self, *, clock: Clock, database: Transactions, nodes: NodeService, device_samples: DeviceSamples
    ) -> None:
        self._clock = clock
        self._database = database
        self._nodes = nodes
        self._samples = device_samples

    def view(self, who: Caller, *, node: str = "") -> DeviceList:
        """Return the devices of one node, by name or identifier, or of all nodes."""
        node_id = self._id_of(node) if node else None
        holders = self._database.read(lambda connection: active_runs.device_holders(connection, node_id=node_id))
        by_device = {(one.node_id, uuid): one for one in holders for uuid in one.uuids}
        latest = self._samples.latest(wall_ns=self._clock.wall_ns())
        reach = access_control.reach(who.role, "runs", write=False, scopes=who.scopes)
        return DeviceList(
            devices=tuple(
                device
                for view in self._nodes.view_nodes()
                if node_id in (None, view.id)
                for device in _devices(view, by_device, latest.get(view.id, {}), who=who, reach=reach)
            )
        )

    def history(self, node: str) -> DeviceHistoryList:
        """Return the measured values of a node's devices over the last two hours."""
        found = self._samples.history(self._id_of(node), wall_ns=self._clock.wall_ns())
        return DeviceHistoryList(
            devices=tuple(
                DeviceHistoryView(
                    uuid=uuid,
                    at_s=tuple(point.at_s for point in points),
                    series={name: tuple(point.values[at] for point in points) for at, name in enumerate(SERIES)},
                )
                for uuid, points in found.items()
            )
        )

    def _id_of(self, node: str) -> str:
        return self._database.read(lambda connection: find_node(connection, node)).id


def _devices(
    view: NodeView,
    holders: Mapping[tuple[str, str], AttemptDevices],
    samples: Mapping[str, DeviceSample],
    *,
    who: Caller,
    reach: str,
) -> list[DeviceView]:
    quarantined = {one.uuid: one.note or f"quarantined by {one.by}" for one in view.rules.quarantined}
    found: list[DeviceView] = []
    for device in view.devices:
        holder, sample = holders.get((view.id, device.uuid)), samples.get(device.uuid)
        state = FREE
        if view.state not in _PRESENT:
            state = AWAY
        elif holder is not None:
            state = HELD
        elif device.uuid in quarantined:
            state = QUARANTINED
        elif device.uuid in view.unavailable:
            state = OUTSIDE
        found.append(
            DeviceView(
                uuid=device.uuid,
                index=device.index,
                type=device.type,
                product=device.product,
                kind=device.kind,
                memory_bytes=device.memory_bytes,
                node=view.name,
                node_id=view.id,
                pool=view.pool,
                state=state,
                note=quarantined.get(device.uuid, ""),
                holder=None if holder is None else _holder(holder, who=who, reach=reach),
                sample=None if sample is None else sample.sample,
            )
        )
    return found


def _holder(holder: AttemptDevices, *, who: Caller, reach: str) -> HolderRun:
    is_visible = access_control.covers(reach, name=who.name, teams=who.teams, owner=holder.owner, team=holder.team)
    return HolderRun(
        run=holder.crew[0] if is_visible else "",
        name=holder.name if is_visible else "",
        owner=holder.owner,
        team=holder.team,
        state=holder.state,
        since_ns=holder.since_ns,
    )


# --- routes -----------------------------------------------------------------------------------------------------------

routes = Routes("devices")


class DevicesQuery(Query, frozen=True, kw_only=True):
    """Selects the devices of one node, by name or identifier, or of all nodes."""

    node: Annotated[str, msgspec.Meta(max_length=256)] = ""


@routes.get("/devices", needs=reading("nodes"))
def list_devices(call: Call, device_views: DeviceViews, query: DevicesQuery) -> DeviceList:
    """List devices with the runs that hold them and their latest measured values."""
    return device_views.view(call.who, node=query.node)


@routes.get("/nodes/{node}/history", needs=reading("nodes"))
def read_history(call: Call, device_views: DeviceViews, node: str) -> DeviceHistoryList:
    """Return the measured values of a node's devices over the last two hours."""
    return device_views.history(node)
