"""`ray_launch`: `distributed` for a function that is a Ray driver, on a Ray cluster of its run's own.

@ray_launch(gpus=8, gpu_type="H100")
def sweep(): ...

sweep.distributed()      a cluster of 8 GPUs, `sweep` its driver; [what it returned], one entry per node
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar, Unpack, cast

import msgspec

from serverless_gpu.client.decorator import DistributedFunction, decorator, parse_options
from serverless_gpu.errors import InvalidOption
from serverless_gpu.model.ray_options import read_options
from serverless_gpu.model.spec import Options

P = ParamSpec("P")
R = TypeVar("R")


def ray_launch(
    gpus: int | None = None,
    gpu_type: str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    dashboard: bool = False,
    object_store_memory: int | str | None = None,
    **options: Unpack[Options],
) -> Callable[[Callable[P, R]], DistributedFunction[P, R]]:
    """Make a function the driver of a Ray cluster that exists for its run only.

    Args:
        gpus: number of GPUs of the cluster; None means every GPU of the node.
        gpu_type: ``"H100"``, ``"A10"`` …, any case; ``"CPU"`` for CPU slots; None for the type that is there.
        remote: run through a server instead of on this machine.
        timeout: seconds from the first user byte, or None.
        dashboard: whether Ray's dashboard is started, on the loopback interface; its link is printed.
        object_store_memory: size of each node's object store, bytes or ``"20GB"``; None for a share of the memory.
        options: those of `distributed`, except `hang_timeout`.

    Returns:
        A decorator; what it returns has `.distributed`, `.submit`, `.map` and `.estimate`.

    Raises:
        InvalidOption: an option does not exist, or has the wrong type.
        InvalidValue: a value is not possible.
    """
    if callable(gpus):
        raise InvalidOption("ray_launch needs parentheses", hint="write @ray_launch(), or @ray_launch(gpus=8)")
    asked = read_options(dashboard, object_store_memory, cast("Mapping[str, object]", options))
    spec = parse_options(gpus, gpu_type, remote, timeout, asked.options)
    return decorator(msgspec.structs.replace(spec, ray=asked.cluster))
