"""Placement on one machine, and the layout of a gang on several: devices, ranks, and the variables of each rank.

The devices that a run may take are decided from a list; the locks answer which of them are free.

    gang   run:fence, all ranks        ┌ crew 0   n2   ranks 0 … 7     rank 0's node: MASTER_ADDR, MASTER_PORT
                                       ├ crew 1   n3   ranks 8 … 15
                                       └ crew 2   n1   ranks 16 … 19   a part of a node comes last

A crew is what one attempt has on one node: its supervisor, its devices and their ranks. Its number is its NODE_RANK;
each has a lease, a token, facts, a receipt and an end of its own, the attempt has what is the same for all of them. An
attempt on one node is a gang of one crew.

Failure cases: a request this machine can never serve raises at once (`NoGpu`, `GpuTypeMismatch`, `NotEnoughGpus`),
with what the machine has; devices that are merely busy are no failure here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.errors import GpuTypeMismatch, HardwareError, InvalidValue, NoGpu, NotEnoughGpus
from serverless_gpu.model.hardware import CPU, Device, DeviceKind, GpuType, find_type, is_listed, matches

_UUID_PREFIXES = ("GPU-", "MIG-", "FAKE-")

_NO_GPU_HINT = (
    'gpu_type="CPU" runs on CPU slots, SERVERLESS_GPU_FAKE="H100:8" makes slots that pass for GPUs; '
    "a GPU that CUDA_VISIBLE_DEVICES hides does not count"
)


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """The devices a run may take."""

    count: int  # how many of them it takes
    devices: tuple[Device, ...]  # those that fit, in order of preference


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one rank in its gang."""

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
            raise InvalidValue(f"no rank can stand here: {self!r}")


def restrict(devices: Sequence[Device], cuda_visible_devices: str | None) -> tuple[Device, ...]:
    """Return the devices a caller may use, as CUDA reads the caller's own ``CUDA_VISIBLE_DEVICES``.

    The order of the variable is kept. Like CUDA, reading stops at the first entry that names no device, and a device
    named twice leaves none. CPU slots are not CUDA's to hide; they come last.

    `cuda_visible_devices` is None when the variable is not set.
    """
    if cuda_visible_devices is None:
        return tuple(devices)
    cuda = [device for device in devices if device.type != CPU]
    visible: list[Device] = []
    entries = [entry.strip() for entry in cuda_visible_devices.split(",")]
    # The first entry decides how all are read; CUDA does not mix the two forms.
    by_index = _is_number(entries[0])
    for entry in entries:
        if by_index:
            device = _by_index(cuda, entry)
        else:  # the device whose identifier starts like this, if exactly one does
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
    """Return the devices that fit a request.

    `gpus` None takes every device of the type, `gpu_type` None the only GPU type. Raises InvalidValue, UnknownGpuType,
    NoGpu, GpuTypeMismatch or NotEnoughGpus.
    """
    if gpus is not None and gpus < 1:
        raise InvalidValue(
            f"gpus must be at least 1, not {gpus}", hint="leave gpus out to use every GPU of the machine"
        )
    present = [device for device in devices if device.type != CPU]
    if gpu_type is None:
        wanted = _only_type(present)
    else:
        # A card no catalogue knows has its product string for a type, and can be asked for by it.
        unlisted = [GpuType(name=name, memory_bytes=0) for name in _types(present) if not is_listed(name, own)]
        wanted = find_type(gpu_type, (*own, *unlisted)).name
    types = {name for name in {device.type for device in devices} if matches(wanted, name, own)}
    fitting = tuple(device for device in devices if device.type in types)
    # Fake CPU slots are there instead of the machine's own, not in addition.
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
    """Return the environment variables that tell a rank who it is.

    `devices` are all of the attempt on this node, in LOCAL_RANK order.
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
    # Empty, not absent, for CPU slots: they must not touch a GPU that happens to be there.
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(indices)
    if indices:
        # CUDA's own default orders by speed; our indices are NVML's, which are in bus order.
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return variables


def node_variables(
    place: RankPlace, *, devices: Sequence[Device], run_id: str, fence: int, master: tuple[str, int], address: str
) -> dict[str, str]:
    """Return the environment variables of a command that runs once per node and starts its processes itself.

    Without RANK and LOCAL_RANK, which are not the command's to have; programs that read LOCAL_ADDR bind there.

    `place` is that of the node's first rank; `address` is where the other nodes reach this one.
    """
    variables = rank_variables(place, devices=devices, run_id=run_id, fence=fence, master=master)
    of_ranks = {"RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"}
    node_rank = str(place.node_rank)
    return {
        **{name: value for name, value in variables.items() if name not in of_ranks},
        "POD_RANK": node_rank,
        "LOCAL_ADDR": address,
    }


# What the command line of the system that is re-created presets, as far as it does not name its own places.
NODE_COMMAND_PRESETS: Mapping[str, str] = {
    "NCCL_DEBUG": "INFO",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_CUMEM_ENABLE": "0",
}

# For what ranks say to MLflow themselves: left alone, it waits for a server that hangs for over 100 s, at every call.
TRACKED_PRESETS: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


def default_variables(devices: Sequence[Device]) -> dict[str, str]:
    """Return what a rank finds in its environment unless its caller decided otherwise.

    Without a GPU, Accelerate and the Hugging Face Trainer look for one, find none, and run as so many single processes;
    told to use the CPU they make one gang of them.
    """
    return {} if any(device.kind is DeviceKind.GPU for device in devices) else {"ACCELERATE_USE_CPU": "true"}


def threads_per_rank(cores: int, local_world_size: int) -> int:
    """Return how many threads each rank of a node may run: its share of the cores, at least one."""
    return max(1, cores // local_world_size)


def share_of_cores(cores: int, devices: int, of_type: int) -> int:
    """Return the cores that go with some of a node's devices: as many of the cores as of the devices, at least one."""
    return max(1, cores * devices // max(devices, of_type))


def _is_number(entry: str) -> bool:
    return entry.isascii() and entry.isdigit()


def _by_index(devices: Sequence[Device], entry: str) -> Device | None:
    if not _is_number(entry):
        return None
    # Compared as text, so that a thousand digits are never made into a number.
    wanted = entry.lstrip("0") or "0"
    return next((device for device in devices if str(device.index) == wanted), None)


def _only_type(present: Sequence[Device]) -> str:
    types = _types(present)
    if not types:
        raise NoGpu("this machine has no GPU", hint=_NO_GPU_HINT)
    if len(types) > 1:
        raise InvalidValue(
            f"this machine has several GPU types ({_census(present)}) and gpu_type does not say which",
            hint=f"use {_choices(types)}",
        )
    return types[0]


def _none_of(wanted: str, present: Sequence[Device]) -> HardwareError:
    if not present:
        return NoGpu(f"asked for {wanted}, this machine has no GPU", hint=_NO_GPU_HINT)
    types = _types(present)
    or_none = ", or leave gpu_type out" if len(types) == 1 else ""
    return GpuTypeMismatch(
        f"asked for {wanted}, this machine has {_census(present)}", hint=f"use {_choices(types)}{or_none}"
    )


def _too_many(wanted: str, asked: int, there: int) -> NotEnoughGpus:
    if wanted == CPU:
        return NotEnoughGpus(
            f"asked for {asked} CPU {'slot' if asked == 1 else 'slots'}, this machine has {there}",
            hint=f'SERVERLESS_GPU_FAKE="CPU:{asked}" makes as many slots, whatever the number of cores',
        )
    return NotEnoughGpus(
        f"asked for {asked} {wanted}, this machine has {there}",
        hint=f"use gpus={there}, or leave gpus out to use all; a GPU that CUDA_VISIBLE_DEVICES hides does not count",
    )


def _types(devices: Sequence[Device]) -> list[str]:
    return list(dict.fromkeys(device.type for device in devices))


def _census(devices: Sequence[Device]) -> str:
    types = [device.type for device in devices]
    return ", ".join(f"{types.count(name)} {name}" for name in dict.fromkeys(types))


def _choices(types: Sequence[str]) -> str:
    return " or ".join(f'gpu_type="{name}"' for name in types)


NODES_MAX = 256
"""A gang is not spread over more: every crew meets every other one before user code begins."""


class CrewPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one crew within its gang.

    Attributes:
        number: from 0 on; NODE_RANK.
        node: the node's name.
        first_rank: its lowest global rank, where each device has a rank.
        gpus: how many devices it has, CPU slots among them.
    """

    number: int
    node: str
    first_rank: int
    gpus: int


def laid_out(shares: Sequence[tuple[str, int]]) -> tuple[CrewPlace, ...]:
    """Return the crews of a gang: those with the most devices first, of those alike by the names of their nodes.

    The same gang has the same ranks on the same nodes whatever order the nodes were found in, and rank 0 is where most
    of its peers need no network.
    """
    names = [name for name, _ in shares]
    if not 0 < len(names) <= NODES_MAX or len(set(names)) != len(names) or any(gpus < 1 for _, gpus in shares):
        raise ValueError(f"a gang has devices on 1 to {NODES_MAX} nodes, each named once: {list(shares)[:8]}")
    crews: list[CrewPlace] = []
    first = 0
    for number, (node, gpus) in enumerate(sorted(shares, key=lambda share: (-share[1], share[0]))):
        crews.append(CrewPlace(number=number, node=node, first_rank=first, gpus=gpus))
        first += gpus
    return tuple(crews)


def world_size(crews: Sequence[CrewPlace]) -> int:
    """Return how many devices a gang has."""
    return sum(crew.gpus for crew in crews)


def rank_places(crews: Sequence[CrewPlace], number: int) -> tuple[RankPlace, ...]:
    """Return where the ranks of one crew stand, in the order of LOCAL_RANK."""
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
    """Return the numbers of a crew's processes, by which logs, results and failures are named.

    Global ranks; where a node has one process for all of its devices (a command that runs once per node, a driver of
    Ray), the node's number.
    """
    first, count = (crew.number, 1) if per_node else (crew.first_rank, crew.gpus)
    return range(first, first + count)
