"""The application: all routes behind the gate, and their description.

FastAPI keeps the table of routes and writes the OpenAPI document; bodies and answers are `wire` structs, which msgspec
reads, checks, writes and describes. So client, node and server have one definition of what they say to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.routing import compile_path

from serverless_gpu.ambient import Clock
from serverless_gpu.server.access import Accessed
from serverless_gpu.server.api import (
    agents,
    attempts,
    audit,
    blobs,
    budgets,
    drains,
    environments,
    estimates,
    nodes,
    policies,
    prices,
    principals,
    queue,
    runs,
    secrets,
    state,
    usage,
)
from serverless_gpu.server.api.description import SECURITY, describe
from serverless_gpu.server.api.routing import Route
from serverless_gpu.server.door import Door
from serverless_gpu.server.gate import Authenticate, Gate, Reach
from serverless_gpu.server.hub import Hub
from serverless_gpu.server.measures import Measures
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import API

MODULES = (
    agents,
    attempts,
    audit,
    blobs,
    budgets,
    drains,
    environments,
    estimates,
    nodes,
    policies,
    prices,
    principals,
    queue,
    runs,
    secrets,
    state,
    usage,
)
"""Modules of `api/` with `routes`; whoever adds one adds it here."""


def all_routes() -> list[Route]:
    """Return every route of the server."""
    return [route for module in MODULES for route in module.routes.all]


def application(routes: Sequence[Route]) -> FastAPI:
    """Return the application without its gate, of use to the gate and for its description only."""
    app = FastAPI(
        title="serverless-gpu",
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    for route in routes:
        app.add_api_route(
            API + route.path,
            route.serve,
            methods=[route.method],
            response_model=None,
            tags=[route.tag],
            operation_id=f"{route.tag}_{route.handler.__name__}",
        )
    return app


def description(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of the routes."""
    document = application(routes).openapi()
    described = describe(routes)
    for route, operation in zip(routes, described.operations, strict=True):
        said = document["paths"][compile_path(API + route.path)[1]][route.method.lower()]
        for own in ("parameters", "description"):
            said.pop(own, None)
        said.update(operation)
    document["components"] = {"schemas": described.components, "securitySchemes": SECURITY}
    return document


def guarded(
    provided: Mapping[type, object],
    *,
    hub: Hub,
    clock: Clock,
    measures: Measures,
    hosts: Sequence[str],
    authenticate: Authenticate,
    reach: Reach,
    proxies: tuple[str, ...] = (),
) -> Accessed:
    """Return what the server serves: the application behind gate and door, and what counts requests in front of both.

    Args:
        provided: services by their class, for the handlers of routes.
        hub: tells streams that the server stops.
        clock: times requests and streams.
        measures: count requests and streams.
        hosts: names under which the server may be reached.
        authenticate: whose token it is.
        reach: what they may.
        proxies: addresses and networks of those that speak TLS for this server.

    Raises:
        RuntimeError: a handler names a class that is not provided.
    """
    routes = [route.bound(provided) for route in all_routes()]
    gate = Gate(
        application(routes),
        clock=clock,
        measures=measures,
        routes=routes,
        hosts=hosts,
        authenticate=authenticate,
        reach=reach,
    )
    return Accessed(Door(gate, hub=hub, proxies=proxies), measures=measures, clock=clock)
