"""Routes of `wire/state.py`: is it there, what does it speak. Public, and silent about anybody's work."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from serverless_gpu import ambient
from serverless_gpu.server.api.routing import JSON, PUBLIC, Call, Routes
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import PROTOCOL, PROTOCOLS
from serverless_gpu.wire.state import Health, Version

routes = Routes("state")


@routes.get("/health", needs=PUBLIC)
def health(call: Call) -> Health | Response:
    """Say whether the server can do its work."""
    problems = tuple(filter(None, (check() for check in call.services.checks)))
    answer = Health(ok=not problems, problems=problems)
    if answer.ok:
        return answer
    return Response(msgspec.json.encode(answer), status_code=503, media_type=JSON)


@routes.get("/version", needs=PUBLIC)
def version(call: Call) -> Version:
    """Say what the server speaks."""
    mlflow = call.services.settings.mlflow_url
    return Version(
        version=__version__, protocol=PROTOCOL, protocols=PROTOCOLS, machine=ambient.machine(), mlflow=mlflow
    )
