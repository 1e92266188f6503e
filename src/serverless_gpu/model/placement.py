"""Placement on one machine, and the layout of a gang on several nodes.

The module selects the devices that a run may use. The node's device locks then determine which of the selected devices
are free.

    gang   run:fence, all ranks        ┌ NODE_RANK 0   n2   ranks 0 … 7     rank 0's node: MASTER_ADDR, MASTER_PORT
                                       ├ NODE_RANK 1   n3   ranks 8 … 15
                                       └ NODE_RANK 2   n1   ranks 16 … 19   partly used nodes come last

An attempt has one worker group per node, called a crew in the code, with a supervisor, devices and ranks. The number of
a worker group is its NODE_RANK. Each worker group has a separate lease, token, fact file, receipt and end state. Values
that are the same for all nodes belong to the attempt. An attempt on one node is a gang with one worker group.

If this machine can never serve a request, the module raises `NoGpu`, `GpuTypeMismatch` or `NotEnoughGpus` at once. The
error lists the machine's devices. If the devices are only busy, the module raises no error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.errors import GpuTypeMismatch, HardwareError, InvalidValue, NoGpu, NotEnoughGpus
from serverless_gpu.model.hardware import CPU, Device, DeviceKind, GpuType, find_type, is_listed, matches

_UUID_PREFIXES = ("GPU-", "MIG-", "FAKE-")

_NO_GPU_HINT = (
    'gpu_type="CPU" runs on CPU slots, SERVERLESS_GPU_FAKE="H100:8" creates fake GPUs. '
    "GPUs that CUDA_VISIBLE_DEVICES hides do not count"
)


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one machine that a run may use."""

    count: int  # Number of devices that the run needs.
    devices: tuple[Device, ...]  # Suitable devices, in order of preference.


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one rank in its gang: rank numbers, world sizes and number of nodes."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    num_nodes: int

    def __post_init__(self) -> None:
        fits = (
            0 <= self.rank < self.world_size
            and 0 <= self.local_rank < self.local_world_size <= self.world_size
            and 0 <= self.node_rank < self.num_nodes
        )
        if not fits:
            raise InvalidValue(f"invalid position of a rank in a gang: {self!r}")


def restrict(devices: Sequence[Device], cuda_visible_devices: str | None) -> tuple[Device, ...]:
    """Return the devices that a caller may use, as CUDA reads the caller's ``CUDA_VISIBLE_DEVICES``.

    The function returns the devices in the order of the variable's entries. Like CUDA, the function stops at an entry
    that names no device. If two entries name the same device, the function returns no CUDA devices. CPU slots are last
    in the result, because CUDA cannot hide CPU slots.

    `cuda_visible_devices` is None if the variable is not set.
    """
    if cuda_visible_devices is None:
        return tuple(devices)
    cuda = [device for device in devices if device.type != CPU]
    visible: list[Device] = []
    entries = [entry.strip() for entry in cuda_visible_devices.split(",")]
    # The first entry determines whether CUDA reads all entries as indices or as identifiers.
    by_index = _is_number(entries[0])
    for entry in entries:
        if by_index:
            device = _by_index(cuda, entry)
        else:  # Select the device whose identifier starts with the entry, if exactly one device matches.
            found = [one for one in cuda if entry.startswith(_UUID_PREFIXES) and one.uuid.startswith(entry)]
            device = found[0] if len(found) == 1 else None
        if device is None:
            break
        if device in visible:
            visible.clear()
            break
        visible.append(device)
    return (*visible, *(device for device in devices if device.type == CPU))


def candidates(
    *, gpus: int | None, gpu_type: str | None, devices: Sequence[Device], own: Sequence[GpuType] = ()
) -> Candidates:
    """Return the devices of a machine that satisfy a request.

    If `gpus` is None, the function returns every device of the type. If `gpu_type` is None, the function selects the
    machine's only GPU type. Raises InvalidValue, UnknownGpuType, NoGpu, GpuTypeMismatch or NotEnoughGpus.
    """
    if gpus is not None and gpus < 1:
        raise InvalidValue(
            f"gpus must be at least 1, not {gpus}", hint="leave gpus out to use every GPU of the machine"
        )
    present = [device for device in devices if device.type != CPU]
    if gpu_type is None:
        wanted = _only_type(present)
    else:
        # A GPU outside the catalogue has its product string as type. Users can request the GPU by its product string.
        unlisted = [GpuType(name=name, memory_bytes=0) for name in _types(present) if not is_listed(name, own)]
        wanted = find_type(gpu_type, (*own, *unlisted)).name
    types = {name for name in {device.type for device in devices} if matches(wanted, name, own)}
    fitting = tuple(device for device in devices if device.type in types)
    # Fake CPU slots replace the machine's own CPU slots instead of adding to them.
    fitting = tuple(device for device in fitting if device.kind is DeviceKind.FAKE) or fitting
    if not fitting and wanted != CPU:
        raise _none_of(wanted, present)
    count = gpus or len(fitting) or 1
    if count > len(fitting):
        raise _too_many(wanted, count, len(fitting))
    return Candidates(count=count, devices=fitting)


def rank_variables(
    place: RankPlace, *, devices: Sequence[Device], run_id: str, fence: int, master: tuple[str, int]
) -> dict[str, str]:
    """Return the environment variables that tell a rank its position in the gang.

    `devices` are all devices of the attempt on this node, in LOCAL_RANK order.
    """
    variables = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "GROUP_RANK": str(place.node_rank),
        "NUM_NODES": str(place.num_nodes),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "TORCHELASTIC_RUN_ID": run_id,
        "SGPU_RUN_ID": run_id,
        "SGPU_FENCE": str(fence),
        "SGPU_GPU_UUIDS": ",".join(device.uuid for device in devices),
        "PYTHONUNBUFFERED": "1",
    }
    indices = [str(device.index) for device in devices if device.type != CPU]
    # An empty variable prevents ranks on CPU slots from using the machine's GPUs.
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(indices)
    if indices:
        # By default, CUDA orders devices by speed. The device indices come from NVML, which uses PCI bus order.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return variables


def node_variables(
    place: RankPlace, *, devices: Sequence[Device], run_id: str, fence: int, master: tuple[str, int], address: str
) -> dict[str, str]:
    """Return the variables of a command that runs once per node and starts its own processes.

    The result omits RANK and LOCAL_RANK, because the command sets both variables for its processes. Programs that read
    LOCAL_ADDR bind their sockets to the node's address.

    `place` is the position of the node's lowest rank. Other nodes reach the node at `address`.
    """
    variables = rank_variables(place, devices=devices, run_id=run_id, fence=fence, master=master)
    of_ranks = {"RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"}
    node_rank = str(place.node_rank)
    return {
        **{name: value for name, value in variables.items() if name not in of_ranks},
        "POD_RANK": node_rank,
        "LOCAL_ADDR": address,
    }


# Environment presets of the command-line tool that this package emulates, except variables with tool-specific paths.
NODE_COMMAND_PRESETS: Mapping[str, str] = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_CUMEM_ENABLE": "0",
}

# Settings for MLflow calls of the ranks. With MLflow's default settings, a call to a hanging tracking server takes over
# 100 s.
TRACKED_PRESETS: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def default_variables(devices: Sequence[Device]) -> dict[str, str]:
    """Return the default environment variables of a rank, which the caller can override.

    On CPU slots, Accelerate and the Hugging Face Trainer would run as separate single processes by default. The
    returned variables make Accelerate and the Trainer use the CPU and form one gang.
    """
    return {} if any(device.kind is DeviceKind.GPU for device in devices) else {"ACCELERATE_USE_CPU": "true"}


def threads_per_rank(cores: int, local_world_size: int) -> int:
    """Return the number of threads per rank: an equal share of the node's cores, at least one."""
    return max(1, cores // local_world_size)


def share_of_cores(cores: int, devices: int, of_type: int) -> int:
    """Return the share of a node's cores for some of its devices, at least one core."""
    return max(1, cores * devices // max(devices, of_type))


def _is_number(entry: str) -> bool:
    return entry.isascii() and entry.isdigit()


def _by_index(devices: Sequence[Device], entry: str) -> Device | None:
    if not _is_number(entry):
        return None
    # Comparing text avoids converting an entry with thousands of digits to a number.
    wanted = entry.lstrip("0") or "0"
    return next((device for device in devices if str(device.index) == wanted), None)


def _only_type(present: Sequence[Device]) -> str:
    types = _types(present)
    if not types:
        raise NoGpu("this machine has no GPU", hint=_NO_GPU_HINT)
    if len(types) > 1:
        raise InvalidValue(
            f"this machine has several GPU types ({_census(present)}) and gpu_type does not select one",
            hint=f"use {_choices(types)}",
        )
    return types[0]


def _none_of(wanted: str, present: Sequence[Device]) -> HardwareError:
    if not present:
        return NoGpu(f"the run requests {wanted}, but this machine has no GPU", hint=_NO_GPU_HINT)
    types = _types(present)
    or_none = ", or leave gpu_type out" if len(types) == 1 else ""
    return GpuTypeMismatch(
        f"the run requests {wanted}, but this machine has {_census(present)}", hint=f"use {_choices(types)}{or_none}"
    )


def _too_many(wanted: str, asked: int, there: int) -> NotEnoughGpus:
    if wanted == CPU:
        return NotEnoughGpus(
            f"the run requests {asked} CPU {'slot' if asked == 1 else 'slots'}, but this machine has {there}",
            hint=f'SERVERLESS_GPU_FAKE="CPU:{asked}" creates as many slots, regardless of the number of cores',
        )
    return NotEnoughGpus(
        f"the run requests {asked} {wanted}, but this machine has {there}",
        hint=f"use gpus={there}, or leave gpus out to use all. GPUs that CUDA_VISIBLE_DEVICES hides do not count",
    )


def _types(devices: Sequence[Device]) -> list[str]:
    return list(dict.fromkeys(device.type for device in devices))


def _census(devices: Sequence[Device]) -> str:
    types = [device.type for device in devices]
    return ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types))


def _choices(types: Sequence[str]) -> str:
    return " or ".join(f'gpu_type="{name}"' for name in types)


NODES_MAX = 256
"""Maximum number of nodes in a gang, because every node connects to every other node before user code begins."""


class CrewPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The position of one node within a gang.

    Attributes:
        number: NODE_RANK, from 0.
        node: name of the node.
        first_rank: lowest global rank on the node, if each device has a rank.
        gpus: number of devices, including CPU slots.
    """

    number: int
    node: str
    first_rank: int
    gpus: int


def laid_out(shares: Sequence[tuple[str, int]]) -> tuple[CrewPlace, ...]:
    """Return the positions of a gang's nodes, sorted by descending devices, then by node name.

    The layout does not depend on the order of `shares`. Rank 0 runs on the node with the most ranks, so that most ranks
    reach rank 0 without the network.
    """
    names = [name for name, _ in shares]
    if not 0 < len(names) <= NODES_MAX or len(set(names)) != len(names) or any(gpus < 1 for _, gpus in shares):
        raise ValueError(f"a gang needs devices on 1 to {NODES_MAX} different nodes: {list(shares)[:8]}")
    crews: list[CrewPlace] = []
    first = 0
    for number, (node, gpus) in enumerate(sorted(shares, key=lambda share: (-share[1], share[0]))):
        crews.append(CrewPlace(number=number, node=node, first_rank=first, gpus=gpus))
        first += gpus
    return tuple(crews)


def world_size(crews: Sequence[CrewPlace]) -> int:
    """Return the number of devices of a gang."""
    return sum(crew.gpus for crew in crews)


def rank_places(crews: Sequence[CrewPlace], number: int) -> tuple[RankPlace, ...]:
    """Return the positions of one node's ranks, in the order of LOCAL_RANK."""
    crew = crews[number]
    return tuple(
        RankPlace(
            rank=crew.first_rank + local,
            local_rank=local,
            node_rank=number,
            world_size=world_size(crews),
            local_world_size=crew.gpus,
            num_nodes=len(crews),
        )
        for local in range(crew.gpus)
    )


def numbered(crew: CrewPlace, *, per_node: bool) -> range:
    """Return the process numbers of a node, which identify logs, results and failures.

    The process numbers are global ranks. If one process uses all devices of a node, the node number is the process
    number. A per-node command and a Ray driver are single processes for all devices of a node.
    """
    first, count = (crew.number, 1) if per_node else (crew.first_rank, crew.gpus)
    return range(first, first + count)
