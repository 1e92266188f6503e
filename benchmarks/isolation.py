"""Rounds of runs in sandboxes, beside the same runs of a pool whose runs share a uid."""

from __future__ import annotations

import contextlib
import functools
import os

from benchmarks import ranks, remote
from benchmarks.databases import held
from benchmarks.ranks import GIGABYTE, now_ns
from serverless_gpu import distributed
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.model.isolation import NONE, SANDBOX, Level
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import PoolRequest, PoolView

_remote = distributed(gpus=1, gpu_type="CPU", quiet=True, remote=True, env="snapshot")
_enter = _remote(ranks.entered)
_make = _remote(ranks.make_and_tell)


def warm_none(_directory: str) -> dict[str, object]:
    """Call with everything standing by, where all runs share a uid; until the caller has its results."""
    return _call(NONE)


def warm_sandbox(_directory: str) -> dict[str, object]:
    """The same in a sandbox."""
    return _call(SANDBOX)


def cold_none(_directory: str) -> dict[str, object]:
    """Call when the node has no agent, where all runs share a uid."""
    _serving(NONE)
    stop_agent(remote.own_home())
    return _call(NONE)


def cold_sandbox(_directory: str) -> dict[str, object]:
    """The same in a sandbox."""
    _serving(SANDBOX)
    stop_agent(remote.own_home())
    return _call(SANDBOX)


def tensor_none(_directory: str) -> dict[str, object]:
    """Return a tensor of 1 GB, where all runs share a uid; until the caller has read it once."""
    return _return(NONE)


def tensor_sandbox(_directory: str) -> dict[str, object]:
    """The same in a sandbox."""
    return _return(SANDBOX)


def _call(level: Level) -> dict[str, object]:
    _serving(level)
    called_ns = now_ns()
    (entered_ns,) = _enter.distributed()
    return {"ms": (now_ns() - called_ns) / 1e6, "enter_ms": (entered_ns - called_ns) / 1e6}


def _return(level: Level) -> dict[str, object]:
    _serving(level)
    ((value, made_ns),) = _make.distributed(GIGABYTE)
    ranks.read(value)
    read_ns = now_ns()
    del value
    remote.forget_runs()
    return {"ms": (read_ns - made_ns) / 1e6}


@functools.cache
def _serving(level: Level) -> None:
    """Start a server in a home of its own, and set the isolation of its pool."""
    home = remote.own_home() / level
    home.mkdir(mode=0o700)
    os.environ["SERVERLESS_GPU_HOME"] = str(home)
    held.callback(stop_agent, home)
    remote.serving()
    profile = find_profile(remote.own_home(), {})
    with contextlib.closing(Connection(profile.url, profile.token)) as connection:
        connection.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)
