"""`ray_launch`: `distributed` for a function that is a Ray driver, on a Ray cluster of its run's own.

@ray_launch(gpus=8, gpu_type="H100")
def sweep(): ...

sweep.distributed()      a cluster of 8 GPUs, `sweep` its driver; [what it returned], one entry per node

Options of Ray and of other launchers say how many workers of which size there shall be. Here the cluster is made of
what the run gets: such an option is refused with the one to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import NamedTuple, ParamSpec, TypeVar, Unpack, cast

import msgspec

from serverless_gpu.client.decorator import DistributedFunction, decorator, parse_options
from serverless_gpu.errors import InvalidOption, InvalidValue
from serverless_gpu.model.spec import (
    OBJECT_STORE_BYTES_MAX,
    OBJECT_STORE_BYTES_MIN,
    Options,
    RayCluster,
    flag,
    parse_bytes,
)

P = ParamSpec("P")
R = TypeVar("R")
OWN = ("dashboard", "object_store_memory")
"""Options that only `ray_launch` has."""
NOT_TAKEN = frozenset({"hang_timeout", "init"})
"""Options of `distributed` that say nothing about a Ray driver."""
VALID = tuple(sorted({"gpus", "gpu_type", "remote", "timeout", *OWN, *Options.__annotations__} - NOT_TAKEN))
_WORKER_GPUS = "write gpus=, the GPUs of the whole cluster; a task or an actor takes its own: @ray.remote(num_gpus=1)"
_WORKER_CPUS = "write cpus=, the cores of the whole run; a task or an actor takes its own: @ray.remote(num_cpus=2)"
_SIZE = "write gpus=: the cluster is made of the nodes that have them, and does not grow or shrink"
_TYPE = "write gpu_type="
_STORE = "write object_store_memory=, of each node"
_MEMORY = "write memory=, the host memory of the whole run"
_DASHBOARD = "write dashboard=True; its port is chosen, and the link is printed"
_DIRECTORY = "leave it out: Ray's files lie in a directory of the run's own, and its logs are kept with the run"
_DRIVER = "give it to ray.init(...) inside the function"
_FIXED = (
    "leave it out: how Ray is started is the run's; what is for the driver goes to ray.init(...) inside the function"
)
_WAITS = "a Ray driver waits for its tasks for hours; timeout= and idle_timeout= end a run that takes too long"
_GROUP = "leave it out: a driver is alone; Ray Train makes the process group of its workers"
_MEANT = {
    _WORKER_GPUS: "num_gpus_per_worker gpus_per_worker gpus_per_node num_gpus_per_node num_gpus_worker_node "
    "num_gpus_head_node num_accelerators",
    _WORKER_CPUS: "num_cpus num_cpus_per_worker cpus_per_worker num_cpus_per_node num_cpus_worker_node "
    "num_cpus_head_node",
    _SIZE: "min_workers max_workers num_workers num_nodes num_worker_nodes min_worker_nodes max_worker_nodes autoscale "
    "autoscale_upscaling_speed autoscale_idle_timeout_minutes use_gpu resources_per_worker scaling_config",
    _TYPE: "accelerator_type",
    _STORE: "object_store_memory_per_node object_store_memory_worker_node object_store_memory_head_node "
    "object_store_bytes",
    _MEMORY: "memory_per_node memory_worker_node memory_head_node heap_memory_per_node",
    _DASHBOARD: "include_dashboard dashboard_port dashboard_host",
    _DIRECTORY: "temp_dir _temp_dir ray_temp_dir ray_temp_root_dir collect_log_to_path",
    _DRIVER: "runtime_env namespace log_to_driver logging_level job_config ray_init_kwargs",
    _FIXED: "address port resources system_config head_node_options worker_node_options ray_start_args strict_mode "
    "is_global",
    _WAITS: "hang_timeout",
    _GROUP: "init",
}
_INSTEAD = {name: words for words, names in _MEANT.items() for name in names.split()}


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


class RayRequest(NamedTuple):
    """The arguments of `ray_launch`: the cluster, and the options of `distributed`."""

    cluster: RayCluster
    options: dict[str, object]


def read_options(dashboard: object, object_store_memory: object, options: Mapping[str, object]) -> RayRequest:
    """Return the cluster that is asked for, and the options that any run may have."""
    for name in options:
        if name not in VALID:
            raise _unknown(name)
    cluster = RayCluster(
        dashboard=flag("dashboard", dashboard),
        object_store_bytes=None if object_store_memory is None else _store_bytes(object_store_memory),
    )
    return RayRequest(cluster, dict(options))


def _store_bytes(value: object) -> int:
    asked = parse_bytes("object_store_memory", value)
    if not OBJECT_STORE_BYTES_MIN <= asked <= OBJECT_STORE_BYTES_MAX:
        raise InvalidValue(
            f"object_store_memory must be between {OBJECT_STORE_BYTES_MIN // 10**6} MB and "
            f"{OBJECT_STORE_BYTES_MAX // 10**9} GB, not {asked} bytes",
            hint="left out, it is a share of the memory that goes with the run's devices",
        )
    return asked


def _unknown(name: str) -> InvalidOption:
    """Return the refusal of an option: what to write instead where that is known, and all there are."""
    valid = "valid options: " + ", ".join(VALID)
    if name in _INSTEAD:
        return InvalidOption(f"ray_launch has no option {name!r}", hint=f"{_INSTEAD[name]}; {valid}")
    near = difflib.get_close_matches(name, [*VALID, *_INSTEAD], n=1, cutoff=0.7)
    if near and near[0] in _INSTEAD:
        return InvalidOption(f"ray_launch has no option {name!r}", hint=f"{_INSTEAD[near[0]]}; {valid}")
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return InvalidOption(f"ray_launch has no option {name!r}{guess}", hint=valid)
