"""Before a Ray cluster is started: can the caller's Ray make one, and is everything of the call of that cluster?

Ranks import what the caller imports, from where it lies or from a copy, so the caller's Ray is the cluster's. Ray
itself is not imported here: that takes a second, and a notebook that only calls a driver needs none in its process.

Failure cases: there is none; it is too old; a file or directory of the user's is called `ray`, and is what ranks would
import. What this cannot tell (no metadata, a finder of the user's that fails) is left to the rank, which says it.
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
    """What `import ray` would get.

    Attributes:
        version: of the distribution, "" where there is none.
        origin: the file that would be imported, "" where there is none or none is known.
    """

    version: str
    origin: str


def check_ray(cluster: RayCluster, found: RayInstallation | None = None) -> None:
    """Refuse a call that no Ray cluster can be made for.

    Args:
        cluster: what is asked for.
        found: what there is; None to look.

    Raises:
        RayMissing: the environment has no Ray, too old a one, one that is hidden, or one without the parts of a
            dashboard that is asked for; says what to do.
    """
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
    """Return what there is of Ray in this process's environment, without importing it."""
    return RayInstallation(ray_installation.version(), ray_installation.origin())


def refusal(spec: RunSpec) -> Reducer | None:
    """Return what refuses to pickle objects of the caller's own Ray cluster, for a run that has another one.

    Such a reference can be pickled, and is good for nothing in the driver: its owner is not there, and the handle of an
    actor cannot even be loaded.

    Args:
        spec: the run.

    Returns:
        For `preflight.pack`; None where there is nothing to refuse.
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
