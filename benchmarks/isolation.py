"""Rounds of runs at each isolation level of one pool: none, an own uid, and a sandbox.

All contestants of a row use one server and one node in the home of the row. Each round first sets the level of the
pool, outside of its time. So the environment is captured, uploaded and restored once for all levels, and only the
level differs.
"""

from __future__ import annotations

import contextlib

from benchmarks import ranks, remote
from benchmarks.ranks import GIGABYTE, now_ns
from serverless_gpu import distributed
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import ServerNotConfigured
from serverless_gpu.model.isolation import NONE, SANDBOX, USER, Level
from serverless_gpu.testing import stop_agent
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import PoolRequest, PoolView

_remote = distributed(gpus=1, gpu_type="CPU", quiet=True, remote=True, env="snapshot")
_enter = _remote(ranks.entered)
_make = _remote(ranks.make_and_tell)


def warm_none(_directory: str) -> dict[str, object]:
    """Call with everything standing by, where all runs share a uid; until the caller has its results."""
    return _call(NONE)


def warm_user(_directory: str) -> dict[str, object]:
    """The same with an own uid."""
    return _call(USER)


def warm_sandbox(_directory: str) -> dict[str, object]:
    """The same in a sandbox."""
    return _call(SANDBOX)


def cold_none(_directory: str) -> dict[str, object]:
    """Call when the node has no agent, where all runs share a uid."""
    return _call(NONE, cold=True)


def cold_user(_directory: str) -> dict[str, object]:
    """The same with an own uid."""
    return _call(USER, cold=True)


def cold_sandbox(_directory: str) -> dict[str, object]:
    """The same in a sandbox."""
    return _call(SANDBOX, cold=True)


def tensor_none(_directory: str) -> dict[str, object]:
    """Return a tensor of 1 GB, where all runs share a uid; until the caller has read it once."""
    return _return(NONE)


def tensor_user(_directory: str) -> dict[str, object]:
    """The same with an own uid."""
    return _return(USER)


def tensor_sandbox(_directory: str) -> dict[str, object]:
    """The same in a sandbox."""
    return _return(SANDBOX)


def _call(level: Level, *, cold: bool = False) -> dict[str, object]:
    _serve(level)
    if cold:
        stop_agent(remote.own_home())
    called_ns = now_ns()
    (entered_ns,) = _enter.distributed()
    return {"ms": (now_ns() - called_ns) / 1e6, "enter_ms": (entered_ns - called_ns) / 1e6}


def _return(level: Level) -> dict[str, object]:
    _serve(level)
    ((value, made_ns),) = _make.distributed(GIGABYTE)
    got_ns = now_ns()
    ranks.read(value)
    read_ns = now_ns()
    del value
    remote.forget_runs()
    return {"ms": (got_ns - made_ns) / 1e6, "read_ms": (read_ns - made_ns) / 1e6}


def _serve(level: Level) -> None:
    """Start the server of this home, unless another contestant has started it, and set the level of its pool."""
    try:
        profile = find_profile(remote.own_home(), {})
    except ServerNotConfigured:
        remote.serving()
        profile = find_profile(remote.own_home(), {})
    with contextlib.closing(Connection(profile.url, profile.token)) as connection:
        connection.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)
