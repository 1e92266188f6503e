"""Defines bodies for the canary of a node.

POST /nodes/{node}/canary     CanaryRequest → CanaryView    starts the canary
GET  /nodes/{node}/canary                   → CanaryView    the last report; without a report while the canary runs
"""

from __future__ import annotations

from serverless_gpu.model.canary import CanaryReport
from serverless_gpu.wire.base import Answer, Request


class CanaryRequest(Request, frozen=True, kw_only=True):
    """Start the canary in the isolation level of the node's pool."""


class CanaryView(Answer, frozen=True, kw_only=True):
    """A canary, with its report after its end.

    Attributes:
        id: identifier of the request that started the canary.
        report: verdicts on all attempts, or None while the canary runs.
    """

    id: str
    report: CanaryReport | None = None
