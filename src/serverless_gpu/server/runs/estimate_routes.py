"""The route of `wire/estimates.py`: when would a run start, and what would it cost?"""

from __future__ import annotations

from serverless_gpu.server.http.routing import Call, Routes, writing
from serverless_gpu.server.runs.estimates import EstimateService
from serverless_gpu.wire.estimates import EstimateRequest, EstimateView

routes = Routes("estimates")
SPEC_BYTES_MAX = 1 << 20


# Whoever may ask for a run may ask when it would start; who else has what is said in the answer.
@routes.post("/estimates", needs=writing("runs"), limit=SPEC_BYTES_MAX)
def make_estimate(call: Call, estimates: EstimateService, body: EstimateRequest) -> EstimateView:
    """Say when a run would start if it were asked for now, and what it would cost; nothing of it is kept."""
    return estimates.make(call.who, body)
