"""The application: all routes behind their middleware.

Starlette dispatches requests to routes. Bodies and answers are `wire` structs, which msgspec reads, checks, writes and
describes: client, node and server share one definition of each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import starlette.routing
from starlette.applications import Starlette

from serverless_gpu.ambient import Clock
from serverless_gpu.server import audit, environments, policies, pools, secrets
from serverless_gpu.server.billing import price_service, usage_reports
from serverless_gpu.server.budgets import budget_service
from serverless_gpu.server.core.hub import Hub
from serverless_gpu.server.core.server_metrics import ServerMetrics
from serverless_gpu.server.http.access_log import AccessLogMiddleware
from serverless_gpu.server.http.auth_middleware import Authenticate, AuthMiddleware, Reach
from serverless_gpu.server.http.proxy_middleware import ProxyMiddleware
from serverless_gpu.server.http.routing import Route, Routes
from serverless_gpu.server.identity import principal_service
from serverless_gpu.server.lifecycle import reports
from serverless_gpu.server.nodes import drain, node_routes
from serverless_gpu.server.operations import server_status
from serverless_gpu.server.runs import estimates, queue_views, run_service
from serverless_gpu.server.storage import blobs
from serverless_gpu.wire.base import API

ROUTES: tuple[Routes, ...] = (
    node_routes.agent_routes,
    reports.routes,
    audit.routes,
    blobs.routes,
    budget_service.routes,
    drain.routes,
    environments.routes,
    estimates.routes,
    node_routes.routes,
    pools.routes,
    policies.routes,
    price_service.routes,
    principal_service.routes,
    queue_views.routes,
    run_service.routes,
    secrets.routes,
    server_status.routes,
    usage_reports.routes,
)
"""The routes of each noun; a module that declares others is named here."""


def all_routes() -> list[Route]:
    """Return every route of the server."""
    return [route for routes in ROUTES for route in routes.all]


def application(routes: Sequence[Route]) -> Starlette:
    """Return the application without middleware, which admits a request before a route sees it."""
    declared = []
    for route in routes:
        served = starlette.routing.Route(API + route.path, route.serve, methods=[route.method])
        served.methods = {route.method}  # Starlette adds HEAD to GET; AuthMiddleware knows the declared methods only
        declared.append(served)
    app = Starlette(routes=declared)
    app.router.redirect_slashes = False
    return app


def guarded(
    provided: Mapping[type, object],
    *,
    hub: Hub,
    clock: Clock,
    measures: ServerMetrics,
    hosts: Sequence[str],
    authenticate: Authenticate,
    reach: Reach,
    proxies: tuple[str, ...] = (),
) -> AccessLogMiddleware:
    """Return the application behind its middleware: access log, then proxy, then authentication."""
    routes = [route.bound(provided) for route in all_routes()]
    authenticated = AuthMiddleware(
        application(routes),
        clock=clock,
        measures=measures,
        routes=routes,
        hosts=hosts,
        authenticate=authenticate,
        reach=reach,
    )
    return AccessLogMiddleware(ProxyMiddleware(authenticated, hub=hub, proxies=proxies), measures=measures, clock=clock)
