"""Chooses the pool and usage policy of a remote run: from its code, else from variables at the call.

    pool=  >  policy= (the server knows its pool)  >  SGPU_POOL  >  DATABRICKS_REMOTE_GPU_POOL_ID
                                                                 >  DATABRICKS_USE_RESERVED_GPU_POOL=true: the only one
    policy=  >  SGPU_POLICY  >  the one that is attached (the server knows it)

`DATABRICKS_USE_RESERVED_GPU_POOL=false` asks for on-demand devices and overrides the variable before it. The
run's spec records the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.agents import PoolView

POOL = "SGPU_POOL"
POLICY = "SGPU_POLICY"
POOL_ID = "DATABRICKS_REMOTE_GPU_POOL_ID"
USE_RESERVED = "DATABRICKS_USE_RESERVED_GPU_POOL"
_RESERVED = "reserved"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class PoolChoice(NamedTuple):
    """A pool, None for any on-demand one, and a policy."""

    pool: str | None
    variable: str = ""  # source of the pool, or ""
    policy: str | None = None  # of `SGPU_POLICY` where the code has none, or None

    def applied(self, spec: RunSpec) -> RunSpec:
        """Return a run with the choice."""
        return msgspec.structs.replace(spec, pool=self.pool, policy=spec.policy or self.policy)

    def told(self, error: InvalidValue) -> InvalidValue:
        """Return a refusal that names the variable with the refused value, if any."""
        for variable, name in ((self.variable, self.pool), (POLICY, self.policy)):
            if variable and name is not None and repr(name) in error.message:
                return type(error)(f"{error.message}, which {variable} names", hint=error.hint)
        return error


def choose(spec: RunSpec, environ: Mapping[str, str], pools: Callable[[], Iterable[PoolView]]) -> PoolChoice:
    """Return a run's pool and policy; asks for `pools` only if a variable wants an unnamed reserved one."""
    if spec.policy is not None:
        return PoolChoice(spec.pool)
    return _pool(spec, environ, pools)._replace(policy=environ.get(POLICY) or None)


def _pool(spec: RunSpec, environ: Mapping[str, str], pools: Callable[[], Iterable[PoolView]]) -> PoolChoice:
    if spec.pool is not None:
        return PoolChoice(spec.pool)
    if environ.get(POOL):
        return PoolChoice(environ[POOL], POOL)
    reserved = environ.get(USE_RESERVED, "").lower()
    if reserved and reserved not in (*_TRUE, *_FALSE):
        raise InvalidValue(f"{USE_RESERVED}={environ[USE_RESERVED]!r} is neither true nor false")
    if reserved in _FALSE:
        return PoolChoice(None, USE_RESERVED)
    if environ.get(POOL_ID):
        return PoolChoice(environ[POOL_ID], POOL_ID)
    return PoolChoice(_only_reserved(pools()), USE_RESERVED) if reserved else PoolChoice(None)


def _only_reserved(pools: Iterable[PoolView]) -> str:
    names = [pool.name for pool in pools if pool.kind == _RESERVED]
    if len(names) == 1:
        return names[0]
    if not names:
        raise InvalidValue(
            f"{USE_RESERVED} asks for a reserved pool, and the server has none",
            hint="unset it for on-demand devices; an operator makes one with `sgpu pool set NAME --reserved`",
        )
    raise InvalidValue(
        f"{USE_RESERVED} asks for a reserved pool, and the server has {len(names)}: {', '.join(names[:20])}",
        hint=f"pool=, or {POOL_ID}, says which",
    )
