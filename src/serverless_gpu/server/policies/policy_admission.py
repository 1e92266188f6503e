"""Under which usage policy is a run, is it within it, and what does it get from it? Asked where runs are asked for.

    spec, who ─▶ what is attached to them ─▶ which policy ─▶ within it? ─▶ the spec that is written down, a pool

The decisions are `model/access/usage_policy.py`'s. Whoever asks is in a transaction, so that a policy that is changed
at the same moment holds for a run or does not, and nothing between. What is installed in an environment is read from
the store, and that is no work for a transaction: `Unread` ends it, the store is asked, and it begins again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import sqlalchemy as sa

from serverless_gpu.environment.packages import Packages, are_same, difference
from serverless_gpu.errors import EnvironmentMissing, PolicyViolation
from serverless_gpu.model.access.roles import AccessReach, Resource, reach
from serverless_gpu.model.access.usage_policy import NamedPolicy, UsagePolicy, apply, choose, where, with_defaults
from serverless_gpu.model.hardware import FAMILIES
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.pools import pool_service
from serverless_gpu.server.records import nodes, policies, pools, stored_secrets
from serverless_gpu.server.storage.environment_store import Environments


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """A run that its policies accept.

    Attributes:
        spec: as it is written down: with the policy's name, default tags, limits.
        policies: what it is under, the one that was chosen first.
        pool: where it goes, "" for any on-demand pool.
    """

    spec: RunSpec
    policies: tuple[NamedPolicy, ...]
    pool: str


class Unread(Exception):
    """A policy names environments, and what is installed in these has not been read.

    Attributes:
        addresses: of snapshots; `read_packages` reads them, outside of the transaction.
    """

    def __init__(self, addresses: frozenset[str]) -> None:
        self.addresses = addresses
        super().__init__(f"{len(addresses)} environments were not read")


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """What comes with a run, and is known of it.

    Attributes:
        snapshot: address of its environment; "" where it has none, or that is not asked.
        packages: what is installed in environments that were read; None for one that is not there any more.
    """

    snapshot: str = ""
    packages: Mapping[str, Packages | None] = {}


class PolicyAdmission:
    """Checks runs against usage policies."""

    def __init__(self, *, settings: Settings, sealer: Sealer, environments: Environments) -> None:
        self._settings = settings
        self._sealer = sealer
        self._environments = environments

    def allow(self, connection: sa.Connection, spec: RunSpec, who: Caller, brought: Brought | None = None) -> Allowed:
        """Return a run as it is under its policies.

        Args:
            connection: of the transaction that writes it down, or of one that reads.
            spec: what was asked for; it can be (`submitting.check_spec`).
            who: asks for it, and will own it.
            brought: what comes with it; None where that is not looked at.

        Raises:
            InvalidValue: there is no such policy, or pool.
            PolicyViolation: it is not within its policies, or does not say which of several it is under.
            SecretMissing: there is no such secret.
            Unread: its environment is to be compared, and what is installed there was not read.
        """
        under = _choose(connection, spec, who)
        spec = with_defaults([(each.name, each.policy) for each in under], spec, who.teams)
        stored_secrets.pins(connection, self._sealer, who.name, spec.team or "", spec.secrets)
        pool = where(under, spec)
        pool = pool_service.find_pool(connection, pool).name if pool else ""
        effective = apply(
            under,
            spec,
            present=_present(connection, under, spec, pool),
            max_run_s=self._settings.max_run_s,
            may_be_critical=reach(who.role, Resource.POLICIES.value, write=True) is AccessReach.ALL,
        )
        if brought is not None:
            for each in under:
                _check_packages(each.name, each.policy, brought)
        return Allowed(spec=effective, policies=under, pool=pool)

    def read_packages(self, addresses: Collection[str]) -> dict[str, Packages | None]:
        """Return what is installed in environments; None for one that is not there any more. In no transaction.

        Raises:
            EnvironmentProblem: the store does not answer, or what it has cannot be read.
        """
        found: dict[str, Packages | None] = {}
        for address in addresses:
            try:
                found[address] = self._environments.packages(address)
            except EnvironmentMissing:
                found[address] = None
        return found


def _choose(connection: sa.Connection, spec: RunSpec, who: Caller) -> tuple[NamedPolicy, ...]:
    """Return what a run is under: the policy that it names or has, then the mandatory ones by name."""
    attached, team = policies.attached(connection, who.name, who.teams), spec.team or ""
    there = [NamedPolicy(name, pool_service.find_policy(connection, name)) for name in attached.of(team)]
    mandatory = {each.name: each for each in there if each.policy.mandatory}
    is_free = False
    if spec.policy is not None:
        pool_service.find_policy(connection, spec.policy)
        is_free = not policies.holders(connection, spec.policy)
    chosen = choose(attached, who=who.name, named=spec.policy, team=team, is_free=is_free, mandatory=mandatory)
    if not chosen:
        return tuple(mandatory.values())
    is_attached = any(each.name == chosen for each in there)
    return (NamedPolicy(chosen, pool_service.find_policy(connection, chosen), is_attached), *mandatory.values())


def _present(connection: sa.Connection, under: tuple[NamedPolicy, ...], spec: RunSpec, pool: str) -> frozenset[str]:
    """Return the GPU types where a run would go; looked up only where its policies leave a choice."""
    asked = spec.resources.gpu_type
    if all(len(each.policy.gpu_types) < 2 for each in under) or (asked is not None and asked not in FAMILIES):
        return frozenset()
    shared = {one.name for one in pools.every(connection) if one.kind != pools.RESERVED}
    here = {pool} if pool else shared
    return frozenset(
        device.type for node in nodes.every(connection) if node.pool in here for device in node.hello.devices
    )


def _check_packages(name: str, policy: UsagePolicy, brought: Brought) -> None:
    """Refuse an environment in which something else is installed than in those that the policy names."""
    if not policy.environments or not brought.snapshot:
        return
    unread = frozenset({brought.snapshot, *policy.environments} - brought.packages.keys())
    if unread:
        raise Unread(unread)
    asked = brought.packages[brought.snapshot]
    accepted = {address: brought.packages[address] for address in policy.environments}
    if asked is not None and any(one is not None and are_same(asked, one) for one in accepted.values()):
        return
    listed = ", ".join(address[:12] for address in accepted)
    nearest = min(
        (difference(asked, one) for one in accepted.values() if asked is not None and one is not None),
        key=len,
        default="none of them is in the store any more",
    )
    raise PolicyViolation(
        f"usage policy {name!r} does not accept what is installed in environment {brought.snapshot[:12]}: {nearest}",
        hint=f"it accepts what is installed in: {listed}; your own code may differ",
    )
