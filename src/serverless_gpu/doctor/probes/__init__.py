"""Probes this machine. Each probe has a time limit and returns facts, or the reason for its failure.

    threads     home · runs · agent, cgroups · server · pool · tracking · kernel · limits · network  (a disk may hang)
    processes   NVML · mounts · installed packages · package imports              (these may crash or hang)

All probes start in parallel with the same time limit. The total time therefore barely exceeds the limit of one probe.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from serverless_gpu.doctor.facts import (
    NO_HOME,
    AgentFacts,
    CgroupFacts,
    GpuFacts,
    HomeFacts,
    ImportFacts,
    InterpreterFacts,
    IsolationFacts,
    KernelFacts,
    LimitFacts,
    MachineFacts,
    MountFacts,
    NetworkFacts,
    PoolFacts,
    PrincipalFacts,
    RunsFacts,
    ServerFacts,
    TrackingFacts,
    UnknownFact,
)
from serverless_gpu.doctor.probes.bounded_calls import side_by_side
from serverless_gpu.doctor.probes.environment import look_at_imports, look_at_packages
from serverless_gpu.doctor.probes.gpus import look_at_gpus
from serverless_gpu.doctor.probes.machine import (
    look_at_agent,
    look_at_home,
    look_at_isolation,
    look_at_kernel,
    look_at_limits,
    look_at_mounts,
    look_at_network,
    look_at_principals,
    look_at_runs,
)
from serverless_gpu.doctor.probes.servers import look_at_pool, look_at_server, look_at_tracking

T = TypeVar("T")


def gather(environ: Mapping[str, str], limit_s: float) -> MachineFacts:
    """Run all probes and return their facts.

    `limit_s` is the time limit of each probe in seconds. `environ` contains the caller's environment variables.
    """
    looks: dict[str, Callable[[], object]] = {
        "imports": lambda: look_at_imports(limit_s),
        "interpreter": lambda: look_at_packages(limit_s),
        "gpus": lambda: look_at_gpus(environ, limit_s),
        "mounts": lambda: look_at_mounts(environ, limit_s),
        "service": lambda: look_at_agent(environ),
        "server": lambda: look_at_server(environ),
        "pool": lambda: look_at_pool(environ),
        "tracking": lambda: look_at_tracking(environ),
        "home": lambda: look_at_home(environ),
        "runs": lambda: look_at_runs(environ),
        "isolation": lambda: look_at_isolation(environ),
        "kernel": look_at_kernel,
        "limits": look_at_limits,
        "network": look_at_network,
        "principals": lambda: look_at_principals(environ),
    }
    # Probe threads wait half a second longer, because probe processes enforce the same limit and report better reasons.
    seen = _told_once(side_by_side(looks, limit_s + 0.5))

    def area(name: str, kind: type[T]) -> T | UnknownFact:
        found = seen[name]
        return found if isinstance(found, kind) else _why(found)

    try:
        cwd = os.getcwd()
    except OSError:
        cwd = ""
    service = seen["service"]
    agent, cgroups = service if isinstance(service, tuple) else (_why(service), _why(service))
    return MachineFacts(
        environ=dict(environ),
        python=sys.executable,
        cwd=cwd,
        home=area("home", HomeFacts),
        runs=area("runs", RunsFacts),
        agent=agent if isinstance(agent, AgentFacts) else _why(agent),
        cgroups=cgroups if isinstance(cgroups, CgroupFacts) else _why(cgroups),
        principals=area("principals", PrincipalFacts),
        isolation=area("isolation", IsolationFacts),
        server=area("server", ServerFacts),
        pool=area("pool", PoolFacts),
        limits=area("limits", LimitFacts),
        kernel=area("kernel", KernelFacts),
        network=area("network", NetworkFacts),
        mounts=area("mounts", MountFacts),
        gpus=area("gpus", GpuFacts),
        interpreter=area("interpreter", InterpreterFacts),
        imports=area("imports", ImportFacts),
        tracking=area("tracking", TrackingFacts),
    )


def _told_once(seen: Mapping[str, object]) -> Mapping[str, object]:
    """Shorten reasons that repeat the problem of the home directory."""
    home = seen["home"]
    if not isinstance(home, HomeFacts) or home.root or not home.problem:
        return seen
    return {
        name: UnknownFact(NO_HOME) if isinstance(found, UnknownFact) and home.problem in found.why else found
        for name, found in seen.items()
    }


def _why(found: object) -> UnknownFact:
    return found if isinstance(found, UnknownFact) else UnknownFact()
