"""Under which usage policy is a run, is it within it, and what does it get from it? Asked where runs are asked for.

    spec, who ─▶ what is attached to them ─▶ which policy ─▶ within it? ─▶ the spec that is written down, a pool

The decisions are `model/policy.py`'s. Whoever asks is in a transaction, so that a policy that is changed at the same
moment holds for a run or does not, and nothing between.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model import policy as decisions
from serverless_gpu.model.policy import UsagePolicy
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server import dividing, policies, secret_store
from serverless_gpu.server.callers import Caller
from serverless_gpu.server.services import Services

_NOTHING = UsagePolicy()


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """A run that its policy accepts.

    Attributes:
        spec: as it is written down: with the policy's name, default tags, limits.
        policy: what it is under; says nothing where there is none.
        pool: where it goes, "" for any on-demand pool.
    """

    spec: RunSpec
    policy: UsagePolicy
    pool: str


def allow(connection: sa.Connection, services: Services, spec: RunSpec, who: Caller) -> Allowed:
    """Return a run as it is under its policy.

    Args:
        connection: of the transaction that writes it down, or of one that reads.
        services: the server's.
        spec: what was asked for; it can be (`submitting.check_spec`).
        who: asks for it, and will own it.

    Raises:
        InvalidValue: there is no such policy, or pool.
        PolicyViolation: it is not within its policy, or does not say which of several it is under.
        SecretMissing: there is no such secret.
    """
    secret_store.pins(connection, services.sealer, who.name, spec.team or "", spec.secrets)
    name = _choose(connection, spec, who)
    policy = dividing.find_policy(connection, name) if name else _NOTHING
    effective = decisions.apply(name, policy, spec, max_run_s=services.settings.max_run_s)
    pool = decisions.where(policy, effective)
    return Allowed(spec=effective, policy=policy, pool=dividing.find_pool(connection, pool).name if pool else "")


def _choose(connection: sa.Connection, spec: RunSpec, who: Caller) -> str:
    attached, team = policies.attached(connection, who.name, who.teams), spec.team or ""
    if spec.policy is None:
        return decisions.choose(attached, who=who.name, named=None, team=team)
    dividing.find_policy(connection, spec.policy)
    is_free = not attached.of(team) and not policies.holders(connection, spec.policy)
    return decisions.choose(attached, who=who.name, named=spec.policy, team=team, is_free=is_free)
