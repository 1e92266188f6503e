"""Objects that know only the process in which they were made: refused before a call is sent.

accelerate sets such an object up for the process that makes it. A copy of it in a rank says that the rank is alone, and
whatever relies on it trains alone: each rank its own model, with a run that succeeds. transformers' `TrainingArguments`
travel without what they know of their process (`node/inside/payload.py`); these do not, since what they have prepared
(data loaders, optimizers, models) is prepared for one process.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from serverless_gpu.client import ray_preflight
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.inside.payload import Reducer

if TYPE_CHECKING:
    from serverless_gpu.node.inside.payload import Reduced

_KINDS = (
    ("accelerate.accelerator", "Accelerator"),
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "PartialState"),
    ("accelerate.state", "GradientState"),
)


def refusal(spec: RunSpec) -> Reducer | None:
    """Return what refuses to pickle objects that would mislead ranks, of accelerate and of another Ray cluster.

    Args:
        spec: the run.

    Returns:
        For `preflight.pack`; None where there is nothing to refuse.
    """
    of_ray = ray_preflight.refusal(spec)
    found = (getattr(sys.modules.get(module), name, None) for module, name in _KINDS)
    kinds = tuple(kind for kind in found if isinstance(kind, type))
    if not kinds:
        return of_ray

    def refuse(value: object) -> Reduced:
        if isinstance(value, kinds):
            raise TypeError(
                f"accelerate set this {type(value).__name__} up for the process that made it, and every rank that "
                "used it would train alone"
            )
        return cast("Reduced", NotImplemented) if of_ray is None else of_ray(value)

    return refuse
