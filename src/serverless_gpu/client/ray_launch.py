"""Implements `ray_launch`, which runs a function as the driver of a new Ray cluster.

    @ray_launch(gpus=8, gpu_type="H100")
    def sweep(): ...

    sweep.distributed()      a cluster of 8 GPUs with `sweep` as its driver; returns one result per node

The run's devices determine the number and the size of Ray's workers. `ray_launch` therefore refuses options that
configure workers in Ray and in other launchers. The error message names the option to use instead.
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
"""Options of `ray_launch` that `distributed` does not accept."""
NOT_TAKEN = frozenset({"hang_timeout", "init"})
"""Options of `distributed` that have no meaning for a Ray driver."""
VALID = tuple(sorted({"gpus", "gpu_type", "remote", "timeout", *OWN, *Options.__annotations__} - NOT_TAKEN))
_WORKER_GPUS = "set gpus= for the whole cluster, and use @ray.remote(num_gpus=1) for the GPUs of a task or an actor"
_WORKER_CPUS = "set cpus= for the whole run, and use @ray.remote(num_cpus=2) for the cores of a task or an actor"
_SIZE = "set gpus=, which determines the fixed size of the Ray cluster"
_TYPE = "set gpu_type="
_STORE = "set object_store_memory= for each node's object store"
_MEMORY = "set memory= for the host memory of the whole run"
_DASHBOARD = "set dashboard=True, so that the run chooses the dashboard's port and prints the link"
_DIRECTORY = "remove this option, because Ray writes its files and logs to a directory of the run"
_DRIVER = "pass this option to ray.init(...) inside the function"
_FIXED = "remove this option, because the run starts Ray; pass driver options to ray.init(...) inside the function"
_WAITS = "limit the run with timeout= or idle_timeout= instead, because a Ray driver may wait for tasks for hours"
_GROUP = "remove this option, because Ray Train creates the process group of its workers"
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
    """Make a function the driver of a Ray cluster that exists only for its run.

    Args:
        gpus: number of GPUs of the cluster. None means every GPU of the node.
        gpu_type: GPU type in any case, such as ``"H100"`` or ``"a10"``, or ``"CPU"`` for CPU slots. None means the only
            available type.
        remote: run through a server instead of on this machine.
        timeout: maximum duration of user code, in seconds. None means no limit.
        dashboard: start Ray's dashboard on the loopback interface and print its link.
        object_store_memory: size of each node's object store, in bytes or as text such as ``"20GB"``. None means a
            share of the run's memory.
        options: the options of `distributed`, except `hang_timeout` and `init`.

    Returns:
        A decorator. The decorated function has `.distributed`, `.submit`, `.map` and `.estimate`.

    Raises:
        InvalidOption: an option does not exist or has the wrong type.
        InvalidValue: an option has an impossible value.
    """
    if callable(gpus):
        raise InvalidOption("ray_launch needs parentheses", hint="write @ray_launch(), or @ray_launch(gpus=8)")
    asked = read_options(dashboard, object_store_memory, cast("Mapping[str, object]", options))
    spec = parse_options(gpus, gpu_type, remote, timeout, asked.options)
    return decorator(msgspec.structs.replace(spec, ray=asked.cluster))


class RayRequest(NamedTuple):
    """The arguments of `ray_launch`: the Ray cluster, and the options of `distributed`."""

    cluster: RayCluster
    options: dict[str, object]


def read_options(dashboard: object, object_store_memory: object, options: Mapping[str, object]) -> RayRequest:
    """Return the requested Ray cluster, and the options of the run."""
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
            hint="remove this option to use a share of the memory that belongs to the run's devices",
        )
    return asked


def _unknown(name: str) -> InvalidOption:
    """Return the error for an unknown option.

    The error names a replacement, if one is known, and all valid options.
    """
    valid = "valid options: " + ", ".join(VALID)
    if name in _INSTEAD:
        return InvalidOption(f"ray_launch has no option {name!r}", hint=f"{_INSTEAD[name]}; {valid}")
    near = difflib.get_close_matches(name, [*VALID, *_INSTEAD], n=1, cutoff=0.7)
    if near and near[0] in _INSTEAD:
        return InvalidOption(f"ray_launch has no option {name!r}", hint=f"{_INSTEAD[near[0]]}; {valid}")
    guess = f" (did you mean {near[0]!r}?)" if near else ""
    return InvalidOption(f"ray_launch has no option {name!r}{guess}", hint=valid)
