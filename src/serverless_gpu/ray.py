"""`from serverless_gpu.ray import ray_launch`: a function as the driver of a private Ray cluster; and `ray_init` in it.

Drivers and Ray's workers import this module, too, so it loads nothing until a name is asked for.
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
_HINT = "gpus=, cpus= and object_store_memory= of ray_launch say how large it is"


def ray_init(*args: Any, **kwargs: Any) -> Any:
    """Do what `ray.init` does: inside of a run of `ray_launch` connect to its cluster, elsewhere as Ray does it.

    It may be called twice. Whether there is a dashboard is said to `ray_launch`.

    Args:
        args: the address; left out inside of a run.
        kwargs: what `ray.init` takes.

    Returns:
        What `ray.init` returns.

    Raises:
        ModuleNotFoundError: this environment has no Ray.
        InvalidOption: the size of a cluster, inside of a run that has one.
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
            f"the cluster of this run is there already, so {', '.join(sizes)} cannot be said", hint=_HINT
        )
    kwargs.setdefault("ignore_reinit_error", True)
    return ray.init(**kwargs)


def __getattr__(name: str) -> object:
    if name == "ray_launch":
        return globals().setdefault(name, load("serverless_gpu.client.ray_launch").ray_launch)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
