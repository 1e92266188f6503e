"""Checks before a Ray cluster starts: the caller's Ray, and references to other clusters in the call.

Ranks import what the caller imports, so the caller's Ray is the cluster's. Ray itself is not imported here: that takes
a second. Refuses a missing or old Ray, and a file or directory of the user's named `ray` that ranks would import. The
rank reports problems that stay unknown here (no metadata, a finder of the user's that fails).
"""

from __future__ import annotations

import os
import sys
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
