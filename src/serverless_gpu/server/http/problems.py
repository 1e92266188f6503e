"""What is answered when something is refused or went wrong: `wire.base.Problem`, with the status of its class."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from serverless_gpu.errors import NoSuitableNode, NotAuthenticated, ServerlessGpuError, TooLarge
from serverless_gpu.wire.base import Problem, ShortageView

RETRY_AFTER_S = 1


def problem(error: ServerlessGpuError, *, close: bool = False) -> Response:
    """Return the answer for an error.

    Args:
        error: what is answered.
        close: whether a body may still be coming that nobody will read, so that the connection has to end.
    """
    body = Problem(
        code=error.code,
        message=error.message,
        hint=error.hint,
        run_id=str(getattr(error, "run_id", "") or ""),
        shortage=_shortage(error) if isinstance(error, NoSuitableNode) else None,
    )
    headers = {"Cache-Control": "no-store"}
    if isinstance(error, NotAuthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if error.retryable:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if close or isinstance(error, TooLarge):
        headers["Connection"] = "close"
    return Response(msgspec.json.encode(body), status_code=error.status, headers=headers, media_type="application/json")


def _shortage(error: NoSuitableNode) -> ShortageView:
    choices = tuple(dict(choice) for choice in error.choices)
    return ShortageView(gpus=error.gpus, gpu_type=error.gpu_type, pool=error.pool, choices=choices)
