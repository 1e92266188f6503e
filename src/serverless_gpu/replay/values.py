"""Values of a replay: jobs of the past, or made up, and the nodes they are to run on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.scheduling.values import NORMAL, Pool

GANG_GPUS = 8
"""Jobs of so many GPUs are told apart as gangs, unless the cluster says how many its nodes have."""

_NODES_MAX = 100_000


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One job of a trace.

    Attributes:
        job_id: what the trace calls it.
        submit_s: when it came, in seconds of the trace's own clock.
        duration_s: how long it had its GPUs.
        gpus: how many it had at once.
        team: "" where the trace does not say; so are `user`, `name`, `pool` and `gpu_type`.
        priority: class, as `model.scheduling.values` numbers them.
        preemptible: whether it may be stopped and go on later.
    """

    job_id: str
    submit_s: float
    duration_s: float
    gpus: int
    team: str = ""
    user: str = ""
    name: str = ""
    pool: str = ""
    gpu_type: str = ""
    priority: int = NORMAL
    preemptible: bool = False


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in the order in which they came.

    Attributes:
        jobs: sorted by time; those of one moment as the trace has them.
        source: where they are from, in words.
        left_out: how many rows are no jobs, by reason.
    """

    jobs: tuple[Job, ...]
    source: str = ""
    left_out: Mapping[str, int] = {}

    def gpu_seconds(self) -> float:
        """Return what all jobs take together."""
        return math.fsum(job.gpus * job.duration_s for job in self.jobs)

    def span_s(self) -> float:
        """Return the seconds between the first arrival and the last."""
        return self.jobs[-1].submit_s - self.jobs[0].submit_s if self.jobs else 0.0


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a cluster."""

    name: str
    gpus: int
    gpu_type: str = "GPU"
    pool: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes, and how they are shared.

    Attributes:
        machines: its nodes, in the order in which they are looked at.
        pools: those that are reserved or lend.
        teams: weights of teams, by name.
        users: weights of users, by name.
        gang_gpus: a job of so many GPUs is a gang: it takes a whole node.
        counted: whether it is looked at as one sum of GPUs, as if every GPU were beside every other.
    """

    machines: tuple[Machine, ...]
    pools: tuple[Pool, ...] = ()
    teams: Mapping[str, float] = {}
    users: Mapping[str, float] = {}
    gang_gpus: int = GANG_GPUS
    counted: bool = False

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""
        return sum(machine.gpus for machine in self.machines)

    def as_sum(self) -> Cluster:
        """Return the same GPUs as one node of them all, for each pool and type: `count` placement."""
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
        """Return it for reading: ``8 × 8 GPUs``, ``600 GPUs as one sum``."""
        if self.counted:
            return f"{self.gpus} GPUs as one sum"
        sizes = {machine.gpus for machine in self.machines}
        shape = (
            f"{len(self.machines)} × {sizes.pop()}" if len(sizes) == 1 else f"{len(self.machines)} nodes, {self.gpus}"
        )
        return f"{shape} GPUs"


def cluster_of(nodes: int, gpus: int) -> Cluster:
    """Return a cluster of equal nodes.

    Args:
        nodes: how many.
        gpus: how many each has.

    Raises:
        InvalidValue: there are none, or too many.
    """
    if not 1 <= nodes <= _NODES_MAX or not 1 <= gpus <= _NODES_MAX:
        message = f"a cluster of {nodes}x{gpus} cannot be replayed"
        raise InvalidValue(message, hint=f"1 to {_NODES_MAX} nodes of 1 to {_NODES_MAX} GPUs: 8x8")
    width = len(str(nodes))
    machines = tuple(Machine(name=f"n{place + 1:0{width}}", gpus=gpus) for place in range(nodes))
    return Cluster(machines=machines, gang_gpus=gpus if 1 < gpus <= GANG_GPUS else GANG_GPUS)


def trace_of(jobs: Iterable[Job], source: str = "", left_out: Mapping[str, int] | None = None) -> Trace:
    """Return a trace of jobs in any order."""
    ordered = tuple(sorted(jobs, key=lambda job: job.submit_s))
    return Trace(jobs=ordered, source=source, left_out=left_out or {})
