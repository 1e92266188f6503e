"""What runs cost.

GET    /runs/{run}/cost                                  → CostView
GET    /runs?costs=true                                  → RunPage, with the costs of its runs
"""

from __future__ import annotations

from serverless_gpu.model.cost import Cost
from serverless_gpu.wire.base import Answer


class CostView(Answer, frozen=True, kw_only=True):
    """What a run used so far, over all of its attempts, and what that costs."""

    id: str
    cost: Cost
