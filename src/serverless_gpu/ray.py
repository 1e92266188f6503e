"""Public API for Ray: `ray_launch` and `ray_init`.

`ray_launch` starts a private cluster and runs a function as the driver of the cluster. `ray_init` connects to the
cluster.

`serverless_gpu.ray` imports nothing before first use, because drivers and Ray's workers import this module too.
"""

from __future__ import annotations

import os

from serverless_gpu.errors import InvalidOption
from serverless_gpu.lazy_import import load

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from serverless_gpu.client.ray_launch import ray_launch as ray_launch

__all__ = ["ray_init", "ray_launch"]

_OF_THE_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory")
_HINT = "use gpus=, cpus= and object_store_memory= of ray_launch to set the size"


def ray_init(*args: Any, **kwargs: Any) -> Any:
    """Connect to the cluster of a `ray_launch` run, or call `ray.init` outside of a run.

    A function may call `ray_init` more than once. The dashboard is an option of `ray_launch`.

    Args:
        args: the address, which callers omit inside of a run.
        kwargs: the arguments of `ray.init`.

    Returns:
        The result of `ray.init`.

    Raises:
        ModuleNotFoundError: this environment has no Ray.
        InvalidOption: the call sets the cluster size inside of a run, where the cluster already exists.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError("ray_init needs Ray: pip install 'ray[default]'", name="ray") from None
    if "SGPU_RUN_ID" not in os.environ or "RAY_ADDRESS" not in os.environ or args or kwargs.get("address"):
        return ray.init(*args, **kwargs)
    sizes = [name for name in _OF_THE_CLUSTER if kwargs.get(name) is not None]
    if sizes:
        raise InvalidOption(
            f"the cluster of this run already exists, so ray_init cannot set {', '.join(sizes)}", hint=_HINT
        )
    kwargs.setdefault("ignore_reinit_error", True)
    return ray.init(**kwargs)


def __getattr__(name: str) -> object:
    if name == "ray_launch":
        return globals().setdefault(name, load("serverless_gpu.client.ray_launch").ray_launch)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
