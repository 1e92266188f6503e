"""The cluster of a replay: a shape such as ``8x8``, or a TOML file with nodes, pools and shares.

    [[nodes]]                       [[pools]]                        [teams]          [users]
    count = 8                       name = "research"                search = 70      alice = 2
    gpus = 8                        reserved = true                  vision = 30
    type = "H100"                   lends = true
    pool = "research"               return = "5m"

A cluster file must contain at least ``gpus``. An invalid entry raises `InvalidValue`, which names the entry.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.scheduling.values import Pool
from serverless_gpu.units import parse_duration_s

_SHAPE = re.compile(r"(\d{1,6})\s*[x×]\s*(\d{1,6})", re.ASCII)
_BYTES_MAX = 1 << 20
_NODES_MAX = 100_000
GANG_GPUS = 8
"""Minimum number of GPUs of a gang, unless the cluster has smaller nodes."""

Count = Annotated[int, msgspec.Meta(ge=1, le=_NODES_MAX)]
Weight = Annotated[float, msgspec.Meta(gt=0)]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a cluster."""

    name: str
    gpus: int
    gpu_type: str = "GPU"
    pool: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """The nodes of a replay, and the pools and shares that divide them."""

    machines: tuple[Machine, ...]  # Nodes in the order of placement.
    pools: tuple[Pool, ...] = ()  # Pools that are reserved or lend devices.
    teams: Mapping[str, float] = {}  # Weights of teams by name.
    users: Mapping[str, float] = {}  # Weights of users by name.
    gang_gpus: int = GANG_GPUS  # A job with at least this number of GPUs is a gang that takes whole nodes.
    counted: bool = False  # True when placement ignores node boundaries, as if all GPUs were on one node.

    @property
    def gpus(self) -> int:
        """Total number of GPUs of all nodes."""
        return sum(machine.gpus for machine in self.machines)

    def as_sum(self) -> Cluster:
        """Return the cluster for `count` placement, with one node for all GPUs of a pool and type."""
        sums: dict[tuple[str, str], int] = {}
        for machine in self.machines:
            kind = (machine.pool, machine.gpu_type)
            sums[kind] = sums.get(kind, 0) + machine.gpus
        machines = tuple(
            Machine(name=pool or "all", pool=pool, gpu_type=gpu_type, gpus=gpus)
            for (pool, gpu_type), gpus in sums.items()
        )
        return msgspec.structs.replace(self, machines=machines, counted=True)

    def text(self) -> str:
        """Return the cluster's shape as text, such as ``8 × 8 GPUs`` or ``600 GPUs as one sum``."""
        if self.counted:
            return f"{self.gpus} GPUs as one sum"
        sizes = {machine.gpus for machine in self.machines}
        shape = (
            f"{len(self.machines)} × {sizes.pop()}" if len(sizes) == 1 else f"{len(self.machines)} nodes, {self.gpus}"
        )
        return f"{shape} GPUs"


def cluster_of(nodes: int, gpus: int) -> Cluster:
    """Return a cluster of equal nodes with `gpus` each. Raises InvalidValue when a number is out of range."""
    if not 1 <= nodes <= _NODES_MAX or not 1 <= gpus <= _NODES_MAX:
        message = f"the cluster {nodes}x{gpus} is out of range"
        raise InvalidValue(message, hint=f"use 1 to {_NODES_MAX} nodes of 1 to {_NODES_MAX} GPUs, for example 8x8")
    width = len(str(nodes))
    machines = tuple(Machine(name=f"n{place + 1:0{width}}", gpus=gpus) for place in range(nodes))
    return Cluster(machines=machines, gang_gpus=gpus if 1 < gpus <= GANG_GPUS else GANG_GPUS)


class _Nodes(msgspec.Struct, forbid_unknown_fields=True):
    gpus: Count
    count: Count = 1
    name: str = "n"
    type: str = "GPU"
    pool: str = ""


class _Pool(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    reserved: bool = False
    lends: bool = False
    return_: str = msgspec.field(name="return", default="5m")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    nodes: Annotated[list[_Nodes], msgspec.Meta(min_length=1)]
    pools: list[_Pool] = []
    teams: Mapping[str, Weight] = {}
    users: Mapping[str, Weight] = {}


def read_cluster(text: str) -> Cluster:
    """Return the cluster for a shape such as ``8x8`` (nodes x GPUs per node), or for the path of a file.

    Raises InvalidValue when the text is neither a shape nor the path of a valid file.
    """
    shape = _SHAPE.fullmatch(text.strip())
    if shape is not None:
        return cluster_of(int(shape[1]), int(shape[2]))
    path = Path(text)
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise InvalidValue(f"{path} is larger than 1 MiB, the maximum of a cluster file")
        told = from_builtins(tomllib.loads(path.read_text(encoding="utf-8")), _File)
        return _cluster(told)
    except OSError as error:
        message = (
            f"{text!r} is not a valid cluster: there is no readable file with this name ({error.strerror or error})"
        )
        raise InvalidValue(
            message, hint="give nodes and GPUs per node, such as 8x8, or a TOML file with [[nodes]]"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, ValueError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(f"{path} is not a valid cluster file: {error}") from None


def _cluster(told: _File) -> Cluster:
    if sum(each.count for each in told.nodes) > _NODES_MAX:
        raise InvalidValue(f"the cluster has more than {_NODES_MAX} nodes, the maximum")
    machines: list[Machine] = []
    for each in told.nodes:
        for _ in range(each.count):
            name = f"{each.name}{len(machines) + 1}"
            machines.append(Machine(name=name, gpus=each.gpus, gpu_type=each.type, pool=each.pool))
    pools = tuple(
        Pool(name=each.name, reserved=each.reserved, lends=each.lends, return_s=parse_duration_s(each.return_))
        for each in told.pools
    )
    unknown = sorted({machine.pool for machine in machines} - {"", *(pool.name for pool in pools)})
    if pools and unknown:
        raise InvalidValue(f"nodes are in pool {unknown[0]}, which the file does not define")
    largest = max(machine.gpus for machine in machines)
    return Cluster(
        machines=tuple(machines),
        pools=pools,
        teams=told.teams,
        users=told.users,
        gang_gpus=largest if 1 < largest <= GANG_GPUS else GANG_GPUS,
    )
