"""Routes of `wire/state.py`: is it there, what does it speak, how does it do. Silent about anybody's work."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.responses import Response

from serverless_gpu import ambient
from serverless_gpu.server.core.health import RETRY_AFTER_S
from serverless_gpu.server.core.health import ServerHealth as HealthChecks
from serverless_gpu.server.core.server_metrics import CONTENT_TYPE, Measures
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.http.routing import JSON, PUBLIC, Call, Routes, reading
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import PROTOCOL, PROTOCOLS
from serverless_gpu.wire.state import Health, HealthCheck, Version

routes = Routes("state")


class PrometheusText(Response):
    """An answer that Prometheus reads."""

    media_type = CONTENT_TYPE


@routes.get("/health", needs=PUBLIC)
async def health(call: Call, server_health: HealthChecks) -> Health | Response:
    """Say whether the server can do its work."""
    found = await server_health.look()
    checks = tuple(HealthCheck(name=one.name, ok=not one.problem, problem=one.problem, ms=one.ms) for one in found)
    problems = tuple(one.problem for one in found if one.problem)
    if not problems:
        return Health(ok=True, checks=checks)
    answer = msgspec.json.encode(Health(ok=False, problems=problems, checks=checks))
    headers = {"Retry-After": str(RETRY_AFTER_S), "Cache-Control": "no-store"}
    return Response(answer, status_code=503, headers=headers, media_type=JSON)


@routes.get("/metrics", needs=reading("metrics"))
async def metrics(call: Call, measures: Measures, server_health: HealthChecks) -> PrometheusText:
    """Return figures of the whole server, in the text format of Prometheus."""
    await asyncio.gather(server_health.look(), measures.refresh())
    return PrometheusText(await call.in_thread(measures.text), headers={"Cache-Control": "no-store"})


@routes.get("/version", needs=PUBLIC)
def version(call: Call, settings: Settings) -> Version:
    """Say what the server speaks."""
    return Version(
        version=__version__,
        protocol=PROTOCOL,
        protocols=PROTOCOLS,
        machine=ambient.machine(),
        mlflow=settings.mlflow_url,
        joinable=settings.ray is not None,
    )
