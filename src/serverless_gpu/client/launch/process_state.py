"""Refuses to send objects that hold state of the process in which they were made.

accelerate and Lightning set such an object up for one process. A copy in a rank says that the rank is alone, so each
rank would train its own model, with a run that succeeds. transformers' `TrainingArguments` travel without that state
(`node/inside/payload.py`); these do not, since their data loaders, optimizers and strategies are prepared for one
process. Used data modules of Lightning travel without their trainer, as its modules do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from serverless_gpu.client.launch import ray_preflight
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.inside.payload import Reducer

if TYPE_CHECKING:
    from serverless_gpu.node.inside.payload import Reduced

_KINDS = (
    ("accelerate.accelerator", "Accelerator"),
    ("accelerate.state", "AcceleratorState"),
    ("accelerate.state", "PartialState"),
    ("accelerate.state", "GradientState"),
    ("lightning.pytorch.trainer.trainer", "Trainer"),
    ("pytorch_lightning.trainer.trainer", "Trainer"),
    ("lightning.fabric.fabric", "Fabric"),
    ("lightning_fabric.fabric", "Fabric"),
)
_DATA_MODULES = (
    ("lightning.pytorch.core.datamodule", "LightningDataModule"),
    ("pytorch_lightning.core.datamodule", "LightningDataModule"),
)


def refusal(spec: RunSpec) -> Reducer | None:
    """Return a reducer that refuses objects of one process or of another Ray cluster, or None."""
    of_ray = ray_preflight.refusal(spec)
    kinds, data_modules = _loaded(_KINDS), _loaded(_DATA_MODULES)
    if not kinds:
        return of_ray

    def refuse(value: object) -> Reduced:
        if isinstance(value, kinds):
            raise TypeError(
                f"this {type(value).__name__} is set up for the process that made it, and every rank that used it "
                "would train alone"
            )
        if isinstance(value, data_modules):
            reduced: Reduced = value.__reduce_ex__(5)
            if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
                return reduced
            return reduced[0], reduced[1], {**reduced[2], "trainer": None}, *reduced[3:]
        return cast("Reduced", NotImplemented) if of_ray is None else of_ray(value)

    return refuse


def _loaded(names: Sequence[tuple[str, str]]) -> tuple[type, ...]:
    """Return those of some classes that this process has imported."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in found if isinstance(kind, type))
