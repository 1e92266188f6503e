"""Checks before a Ray cluster starts: the caller's Ray, and references to other clusters in the call.

Ranks import what the caller imports, so the caller's Ray is the cluster's. Ray itself is not imported here: that takes
a second. Refuses a missing or old Ray, and a file or directory of the user's named `ray` that ranks would import. The
rank reports problems that stay unknown here (no metadata, a finder of the user's that fails).

Refuses to send objects that hold state of the process in which they were made.

accelerate and Lightning set such an object up for one process. A copy in a rank says that the rank is alone, so each
rank would train its own model, with a run that succeeds. transformers' `TrainingArguments` travel without that state
(`node/inside/payload.py`); these do not, since their data loaders, optimizers and strategies are prepared for one
process. Used data modules of Lightning travel without their trainer, as its modules do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from serverless_gpu.errors import RayMissing
from serverless_gpu.model.ray_cluster import RayCluster
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.inside.payload import Reducer
from serverless_gpu.node.inside.raycluster import ray_installation

if TYPE_CHECKING:
    from serverless_gpu.node.inside.payload import Reduced

_PIP = "pip install {}'ray[default]'"


class RayInstallation(NamedTuple):
    """The Ray that `import ray` would load."""

    version: str  # or ""
    origin: str  # the imported file, or ""


def check_ray(cluster: RayCluster, found: RayInstallation | None = None) -> None:
    """Raise RayMissing if no cluster can be made: no Ray, an old, hidden or incomplete one."""
    version, origin = found if found is not None else look()
    if version and origin and not _is_ray(origin):
        place = origin if os.path.basename(origin) != "__init__.py" else os.path.dirname(origin)
        raise RayMissing(f"{place} hides Ray {version}: `import ray` gets that", hint=f"give {place} another name")
    if not version and not (origin and _is_ray(origin)):
        raise RayMissing("ray_launch needs Ray, which this Python environment does not have", hint=_PIP.format(""))
    if () < ray_installation.release(version) < ray_installation.OLDEST:
        oldest = ".".join(map(str, ray_installation.OLDEST))
        raise RayMissing(
            f"ray_launch needs Ray {oldest} or newer, and here is Ray {version}", hint=_PIP.format("--upgrade ")
        )
    if cluster.dashboard and (missing := ray_installation.missing_parts()):
        raise RayMissing(
            f"dashboard=True needs Ray's dashboard, for which {missing[0]} is missing here", hint=_PIP.format("")
        )


def look() -> RayInstallation:
    """Return this environment's Ray without importing it."""
    return RayInstallation(ray_installation.version(), ray_installation.origin())


def refusal(spec: RunSpec) -> Reducer | None:
    """Return a reducer that refuses objects of the caller's own Ray cluster, or None.

    Such a reference pickles but is useless in the driver: its owner is missing, and an actor's handle does not load.
    """
    ray = sys.modules.get("ray")
    found = (getattr(ray, "ObjectRef", None), getattr(getattr(ray, "actor", None), "ActorHandle", None))
    kinds = tuple(kind for kind in found if isinstance(kind, type))
    if spec.ray is None or not kinds:
        return None

    def refuse(value: object) -> Reduced:
        if isinstance(value, kinds):
            raise TypeError(
                f"this {type(value).__name__} is of the Ray cluster it was made in, and the run has its own"
            )
        return cast("Reduced", NotImplemented)

    return refuse


def _is_ray(origin: str) -> bool:
    """Return whether a file is the `__init__.py` of Ray's package: its compiled half lies beside it."""
    path = Path(origin)
    return path.name == "__init__.py" and any(path.parent.glob("_raylet*"))


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


def process_state_refusal(spec: RunSpec) -> Reducer | None:
    """Return a reducer that refuses objects of one process or of another Ray cluster, or None."""
    of_ray = refusal(spec)
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
