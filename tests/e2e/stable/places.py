"""What has no public name and is frozen all the same: the one file here that a move inside the package changes."""

from __future__ import annotations

from serverless_gpu.client.estimating import Estimate
from serverless_gpu.client.metrics import Series
from serverless_gpu.client.tracked import TrackedRun
from serverless_gpu.environment.documents import SNAPSHOT_VERSION, Snapshot, Unit
from serverless_gpu.environment.documents import VERSION as UNIT_VERSION
from serverless_gpu.model.cost import Cost, CostEstimate
from serverless_gpu.model.lifecycle.attempt import Fact
from serverless_gpu.model.receipt import Bill, DeviceUse, Segments
from serverless_gpu.model.spec import SPEC_VERSION, RunSpec
from serverless_gpu.model.telemetry import Header, Sample
from serverless_gpu.node.base.protocol import PROTOCOL as NODE_PROTOCOL
from serverless_gpu.node.base.protocol import AnyMessage
from serverless_gpu.node.inside.protocol import VERSION as RANKS_PROTOCOL
from serverless_gpu.server.composition import api_routes
from serverless_gpu.server.http.openapi import document
from serverless_gpu.wire.base import PROTOCOL, PROTOCOLS

VALUES: tuple[type, ...] = (Bill, Cost, CostEstimate, DeviceUse, Estimate, Segments, Series, TrackedRun)
"""Classes without an import path of their own, whose values public calls return and users keep and pickle."""

VERSIONS = {
    "server, its clients and nodes": PROTOCOL,
    "accepted by a server": PROTOCOLS,
    "client, agent and supervisor": NODE_PROTOCOL,
    "zygote, stem and rank": RANKS_PROTOCOL,
    "spec.json": SPEC_VERSION,
    "snapshot": SNAPSHOT_VERSION,
    "unit": UNIT_VERSION,
}
"""Versions that a peer or a later version of this package compares."""

NODE_MESSAGES = AnyMessage
"""What client, agent and supervisor of a node say to each other, tagged by its `type`."""

STORED = {
    "spec.json": RunSpec,
    "facts.jsonl line": Fact,
    "telemetry header": Header,
    "telemetry sample": Sample,
    "environment snapshot": Snapshot,
    "environment unit": Unit,
}
"""Documents in files that a later version reads; the receipt and how a run ended are in the messages."""


def openapi() -> dict[str, object]:
    """Return the description of the server's routes."""
    return document(api_routes())
