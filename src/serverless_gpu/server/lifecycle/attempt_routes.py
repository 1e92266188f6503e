"""Route of `wire/attempts.py`: how a node reports about an attempt. Parts of its payload: `blob_routes.py`."""

from __future__ import annotations

from serverless_gpu.server.http.routing import ATTEMPT, Call, Routes
from serverless_gpu.server.lifecycle.reports import ReportService
from serverless_gpu.wire.attempts import Report, ReportAnswer

routes = Routes("attempts")


@routes.post("/attempts/{run}/{fence}/report", needs=ATTEMPT)
def report(call: Call, reports: ReportService, run: str, fence: int, body: Report) -> ReportAnswer:
    """Take what is new about an attempt."""
    return reports.receive(call.who, run_id=run, fence=fence, said=body)
