"""Manages usage policies, and checks runs against them.

Submission and estimation of a run call `PolicyAdmission`. `model/usage_policy.py` contains the policy rules.

    spec, caller ─▶ policies attached to the caller ─▶ applicable policy ─▶ within limits? ─▶ effective spec, pool

Callers of `PolicyAdmission` run in a transaction. A concurrent policy change therefore applies to a run completely or
not at all. `PackagesNotLoaded` ends the transaction, because a transaction must not wait for the environment store.
After `PackagesNotLoaded`, the caller reads the environments' packages (`read_packages`) and repeats the transaction.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.environment.documents import Packages, are_same, difference
from serverless_gpu.errors import EnvironmentMissing, InvalidValue, NotFound, PolicyViolation, UnknownGpuType
from serverless_gpu.model import hardware
from serverless_gpu.model.access_control import AccessReach, Resource, reach
from serverless_gpu.model.hardware import FAMILIES
from serverless_gpu.model.spec import RANKS_MAX, SECONDS_MAX, TAG_CHARACTERS_MAX, TAGS_MAX, RunSpec
from serverless_gpu.model.usage_policy import (
    HOLDER_KINDS,
    NamedPolicy,
    PolicySubject,
    UsagePolicy,
    apply,
    choose,
    format_span,
    where,
    with_defaults,
)
from serverless_gpu.server.core.caller import Caller, check_name, check_range, check_text
from serverless_gpu.server.core.hub import SCHEDULER, Hub
from serverless_gpu.server.core.server_key import Sealer
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Query, Routes, reading, writing
from serverless_gpu.server.pools import find_pool, unknown_name
from serverless_gpu.server.records import audit, nodes, policies, pools, principals, stored_secrets
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.policies import POLICIES_MAX, StoredPolicy
from serverless_gpu.server.storage.environment_store import EnvironmentStore
from serverless_gpu.wire.access import PolicyList, PolicyRequest, PolicyView, policy_of, view_of
from serverless_gpu.wire.base import LABEL_CHARACTERS_MAX, NAME_CHARACTERS_MAX

HOLDERS_MAX = 20_000
NAMED_MAX = 100
"""Maximum number of pools, GPU types or tag values that one policy may name."""
ENVIRONMENTS_MAX = 16
"""Maximum number of captured environments in one policy, because the admission of a run reads each environment."""
LEAST_S = 1.0
_ADDRESS = re.compile(r"[0-9a-f]{64}", re.ASCII)


class PolicyService:
    """Views, changes, attaches and detaches usage policies."""

    def __init__(self, *, clock: Clock, database: Transactions, hub: Hub, environments: EnvironmentStore) -> None:
        self._clock = clock
        self._database = database
        self._hub = hub
        self._environments = environments

    def view_all(self, who: Caller, *, mine: bool = False) -> tuple[PolicyView, ...]:
        """Return usage policies by name.

        With `mine`, return only policies that can apply to the caller's runs. A policy can apply if it is attached to
        the caller or the caller's teams. If no policy is attached to the caller or teams, all unattached policies can
        apply.
        """

        def work(connection: sa.Connection) -> tuple[PolicyView, ...]:
            holders = policies.holders(connection)
            found = policies.every(connection)
            if mine:
                there = policies.attached(connection, who.name, who.teams).of("")
                has_choice = any(one.name in there and not one.policy.mandatory for one in found)
                found = [one for one in found if one.name in there or (not has_choice and one.name not in holders)]
            return tuple(_view(one, holders.get(one.name, ()), who) for one in found)

        return self._database.read(work)

    def view(self, who: Caller, name: str) -> PolicyView:
        """Return a usage policy."""

        def work(connection: sa.Connection) -> PolicyView:
            return _view(_find(connection, name), policies.holders(connection, name).get(name, ()), who)

        return self._database.read(work)

    def put(self, who: Caller, name: str, asked: UsagePolicy) -> PolicyView:
        """Create or replace a usage policy. Limits of already submitted runs do not change."""
        check_name("a policy", name)
        _check(asked)
        self._check_environments(asked.environments)
        at_ns = self._clock.wall_ns()
        types = tuple(dict.fromkeys(hardware.canonical(kind) for kind in asked.gpu_types))
        policy = StoredPolicy(name=name, policy=msgspec.structs.replace(asked, gpu_types=types), set_ns=at_ns)

        def work(connection: sa.Connection) -> PolicyView:
            for pool in filter(None, (asked.pool, *asked.pools)):
                find_pool(connection, pool)
            _check_types(connection, types)
            if asked.team:
                principals.team(connection, asked.team)
            there = {other.name for other in policies.every(connection)}
            if len(there | {name}) > POLICIES_MAX:
                raise InvalidValue(f"there are already {POLICIES_MAX} policies, the maximum", hint="delete some")
            policies.put(connection, policy)
            usual: dict[str, object] = msgspec.to_builtins(UsagePolicy())
            said: dict[str, object] = msgspec.to_builtins(policy.policy)
            detail = {field: value for field, value in said.items() if value != usual[field]}
            audit.record(connection, who=who, action=Action.POLICY_SET, subject=name, now_ns=at_ns, detail=detail)
            return _view(policy, policies.holders(connection, name).get(name, ()), who)

        view = self._database.write(work)
        self._hub.touch(SCHEDULER)  # A new policy may allow more concurrent devices.
        return view

    def delete(self, who: Caller, name: str) -> PolicyView:
        """Delete a usage policy.

        New runs cannot name the deleted policy. Limits of already submitted runs do not change.
        """
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> StoredPolicy:
            before = _find(connection, name)
            holders = policies.holders(connection, name).get(name, ())
            if holders:
                first = holders[0]
                rest = len(holders) - 1
                more = f" and {rest} other{'s' if rest > 1 else ''}" if rest else ""
                raise InvalidValue(
                    f"policy {name!r} is attached to {first.kind} {first.name}{more}",
                    hint=f"detach it first: sgpu policy detach {name} --{first.kind} {first.name}",
                )
            policies.remove(connection, name)
            audit.record(connection, who=who, action=Action.POLICY_DELETE, subject=name, now_ns=at_ns)
            return before

        before = self._database.write(work)
        self._hub.touch(SCHEDULER)
        return _view(before, (), who)

    def attach(self, who: Caller, name: str, kind: str, holder: str) -> PolicyView:
        """Attach a usage policy to a user, service or team. The attached policy applies to later submissions."""
        return self._change(who, name, _holder(kind, holder), attached=True)

    def detach(self, who: Caller, name: str, kind: str, holder: str) -> PolicyView:
        """Detach a usage policy from a user, service or team. Limits of already submitted runs do not change."""
        return self._change(who, name, _holder(kind, holder), attached=False)

    def _change(self, who: Caller, name: str, holder: PolicySubject, *, attached: bool) -> PolicyView:
        at_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> PolicyView:
            policy = _find(connection, name)
            if attached:
                _find_somebody(connection, holder)
                if policies.count_holders(connection) >= HOLDERS_MAX:
                    raise InvalidValue(
                        f"policies are already attached {HOLDERS_MAX} times, the maximum. Detach some policies first"
                    )
                is_news = policies.attach(connection, name, holder)
            else:
                is_news = policies.detach(connection, name, holder)
                if not is_news:
                    raise NotFound(f"policy {name!r} is not attached to {holder.kind} {holder.name[:64]!r}")
            if is_news:
                action = Action.POLICY_ATTACH if attached else Action.POLICY_DETACH
                detail = {"kind": holder.kind, "name": holder.name}
                audit.record(connection, who=who, action=action, subject=name, now_ns=at_ns, detail=detail)
            return _view(policy, policies.holders(connection, name).get(name, ()), who)

        return self._database.write(work)

    def _check_environments(self, addresses: Iterable[str]) -> None:
        """Refuse a policy that names an uncaptured environment, because no run could match the environment."""
        for address in addresses:
            try:
                if _ADDRESS.fullmatch(address):
                    self._environments.need(address)
                    continue
            except EnvironmentMissing:
                pass
            hint = "`sgpu env capture` prints the address of an environment, 64 hex digits"
            raise InvalidValue(f"there is no captured environment {address[:64]!r} on the server", hint=hint)


def _find(connection: sa.Connection, name: str) -> StoredPolicy:
    found = policies.find(connection, name)
    if found is None:
        raise NotFound(f"there is no policy {name[:64]!r}", hint="list the policies: sgpu policy list")
    return found


def _find_named(connection: sa.Connection, name: str) -> UsagePolicy:
    """Return a run's policy by name, or raise an error that lists the known policies."""
    found = policies.find(connection, name)
    if found is None:
        raise unknown_name("policy", name, [policy.name for policy in policies.every(connection)])
    return found.policy


def _holder(kind: str, name: str) -> PolicySubject:
    for known in HOLDER_KINDS:
        if kind == known:
            return PolicySubject(kind=known, name=name)
    raise InvalidValue(
        f"a policy cannot be attached to a {kind[:64]!r}", hint=f"attach it to one of: {', '.join(HOLDER_KINDS)}"
    )


def _find_somebody(connection: sa.Connection, holder: PolicySubject) -> None:
    if holder.kind == "team":
        principals.team(connection, holder.name)
        return
    kind = principals.principal(connection, holder.name).kind
    if kind != holder.kind:
        raise InvalidValue(f"{holder.name} is a {kind}", hint=f"--{kind} {holder.name}")


def _view(policy: StoredPolicy, holders: tuple[PolicySubject, ...], who: Caller) -> PolicyView:
    """Return a policy with its holders.

    Without write access, callers see only themselves and their teams as holders.
    """
    if reach(who.role, Resource.POLICIES.value, write=True) is not AccessReach.ALL:
        holders = tuple(one for one in holders if one.name in (who.teams if one.kind == "team" else (who.name,)))
    return view_of(policy.name, policy.policy, holders)


def _check(policy: UsagePolicy) -> None:
    """Refuse a policy with invalid values, without access to the database."""
    for what, names in (("pools", policy.pools), ("GPU types", policy.gpu_types), ("classes", policy.priorities)):
        if len(names) > NAMED_MAX:
            raise InvalidValue(f"a policy names {len(names)} {what}, over the limit of {NAMED_MAX}")
        if len(set(names)) != len(names):
            raise InvalidValue(f"the policy lists one of its {what} twice")
    if len(policy.environments) > ENVIRONMENTS_MAX:
        raise InvalidValue(f"a policy can name {ENVIRONMENTS_MAX} environments at most")
    for kind in policy.gpu_types:
        check_text("a GPU type", kind, LABEL_CHARACTERS_MAX)
    check_text("a team", policy.team, NAME_CHARACTERS_MAX)
    _check_tags(policy)
    check_range("GPUs of a run", policy.gpus_per_run, 1, RANKS_MAX)
    check_range("GPUs at once", policy.gpus_at_once, 1, RANKS_MAX)
    check_range("attempts of a run", policy.attempts_max, 1, RANKS_MAX)
    check_range("attempts without a checkpoint", policy.unsaved_max, 1, RANKS_MAX)
    times = (
        ("the longest run", policy.max_run_s),
        ("time of all attempts", policy.total_run_s),
        ("idle time", policy.idle_s),
        ("the time limit", policy.timeout_s),
    )
    for what, seconds in times:
        if seconds is not None and not LEAST_S <= seconds <= SECONDS_MAX:
            raise InvalidValue(f"{what} must be {format_span(LEAST_S)} to {format_span(SECONDS_MAX)}")


def _check_tags(policy: UsagePolicy) -> None:
    if len({*policy.required_tags, *policy.default_tags}) > TAGS_MAX:
        raise InvalidValue(f"a policy can have {TAGS_MAX} tags at most")
    for key in (*policy.required_tags, *policy.default_tags):
        check_text("a tag", key, TAG_CHARACTERS_MAX)
        if not key or "=" in key:  # Users write tags in the form `key=value`.
            raise InvalidValue(f"a policy cannot have the tag key {key!r}", hint="a key without '='")
    for key, values in policy.required_tags.items():
        if len(values) > NAMED_MAX:
            raise InvalidValue(f"the tag {key!r} has {len(values)} values, over the limit of {NAMED_MAX}")
        for value in values:
            check_text(f"tag {key!r}", value, TAG_CHARACTERS_MAX)
        if values and key in policy.default_tags and policy.default_tags[key] not in values:
            raise InvalidValue(
                f"the policy adds the tag {key}={policy.default_tags[key]}, but does not accept this value",
                hint=f"it accepts {', '.join(values[:20])}",
            )
    for key, value in policy.default_tags.items():
        check_text(f"tag {key!r}", value, TAG_CHARACTERS_MAX)


def _check_types(connection: sa.Connection, types: tuple[str, ...]) -> None:
    """Refuse unknown GPU types, because a policy with only unknown types would refuse every run."""
    strange = [kind for kind in types if not hardware.is_listed(kind)]
    if not strange:
        return
    there = {device.type for node in nodes.every(connection) for device in node.hello.devices}
    for kind in strange:
        if kind not in there:
            raise UnknownGpuType(
                f"there is no GPU type {kind[:64]!r} on any node",
                hint=f"nodes have: {', '.join(sorted(there)) or 'nothing'}",
            )


class AdmittedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that its usage policies accept."""

    spec: RunSpec  # The spec that the server stores, with the policy's name, default tags and limits.
    policies: tuple[NamedPolicy, ...]  # Policies of the run, with the chosen policy first.
    pool: str  # Pool of the run, or "" for any on-demand pool.


class PackagesNotLoaded(Exception):
    """Signals that the caller must first read the packages of some environments."""

    def __init__(self, addresses: frozenset[str]) -> None:
        # Addresses of environments whose packages the caller must read with `read_packages`.
        self.addresses = addresses
        super().__init__(f"the packages of {len(addresses)} environments are not loaded")


class PolicyInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Environment data for the admission of a run, in addition to the run's spec."""

    snapshot: str = ""  # Address of the run's environment, or "" without a package check.
    packages: Mapping[str, Packages | None] = {}
    """Packages by environment address, with None for a deleted environment."""


class PolicyAdmission:
    """Checks runs against usage policies."""

    def __init__(self, *, settings: Settings, sealer: Sealer, environments: EnvironmentStore) -> None:
        self._settings = settings
        self._sealer = sealer
        self._environments = environments

    def allow(
        self, connection: sa.Connection, spec: RunSpec, who: Caller, brought: PolicyInputs | None = None
    ) -> AdmittedRun:
        """Return a run with the defaults and limits of its policies, or refuse the run.

        Raises `PackagesNotLoaded` if the caller must first load packages of environments in a policy.
        """
        under = _choose(connection, spec, who)
        spec = with_defaults([(each.name, each.policy) for each in under], spec, who.teams)
        stored_secrets.pins(connection, self._sealer, who.name, spec.team or "", spec.secrets)
        pool = where(under, spec)
        pool = find_pool(connection, pool).name if pool else ""
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
        return AdmittedRun(spec=effective, policies=under, pool=pool)

    def read_packages(self, addresses: Collection[str]) -> dict[str, Packages | None]:
        """Return packages by environment, or None for a missing environment. Call outside of transactions."""
        found: dict[str, Packages | None] = {}
        for address in addresses:
            try:
                found[address] = self._environments.packages(address)
            except EnvironmentMissing:
                found[address] = None
        return found


def _choose(connection: sa.Connection, spec: RunSpec, who: Caller) -> tuple[NamedPolicy, ...]:
    """Return the chosen policy of a run, followed by the mandatory policies in name order."""
    attached, team = policies.attached(connection, who.name, who.teams), spec.team or ""
    there = [NamedPolicy(name, _find_named(connection, name)) for name in attached.of(team)]
    mandatory = {each.name: each for each in there if each.policy.mandatory}
    is_free = False
    if spec.policy is not None:
        _find_named(connection, spec.policy)
        is_free = not policies.holders(connection, spec.policy)
    chosen = choose(attached, who=who.name, named=spec.policy, team=team, is_free=is_free, mandatory=mandatory)
    if not chosen:
        return tuple(mandatory.values())
    is_attached = any(each.name == chosen for each in there)
    return (NamedPolicy(chosen, _find_named(connection, chosen), is_attached), *mandatory.values())


def _present(connection: sa.Connection, under: tuple[NamedPolicy, ...], spec: RunSpec, pool: str) -> frozenset[str]:
    """Return the GPU types in the run's pool, or nothing if the policies leave no choice of type."""
    asked = spec.resources.gpu_type
    if all(len(each.policy.gpu_types) < 2 for each in under) or (asked is not None and asked not in FAMILIES):
        return frozenset()
    shared = {one.name for one in pools.every(connection) if one.kind != pools.RESERVED}
    here = {pool} if pool else shared
    return frozenset(
        device.type for node in nodes.every(connection) if node.pool in here for device in node.hello.devices
    )


def _check_packages(name: str, policy: UsagePolicy, brought: PolicyInputs) -> None:
    """Refuse an environment unless its packages equal those of an environment in the policy."""
    if not policy.environments or not brought.snapshot:
        return
    unread = frozenset({brought.snapshot, *policy.environments} - brought.packages.keys())
    if unread:
        raise PackagesNotLoaded(unread)
    asked = brought.packages[brought.snapshot]
    accepted = {address: brought.packages[address] for address in policy.environments}
    if asked is not None and any(one is not None and are_same(asked, one) for one in accepted.values()):
        return
    listed = ", ".join(address[:12] for address in accepted)
    nearest = min(
        (difference(asked, one) for one in accepted.values() if asked is not None and one is not None),
        key=len,
        default="the server no longer stores any environment of the policy",
    )
    raise PolicyViolation(
        f"usage policy {name!r} does not accept the packages of environment {brought.snapshot[:12]}: {nearest}",
        hint=f"the policy accepts the packages of: {listed}. Your own code may differ",
    )


routes = Routes("policies")


class PolicyQuery(Query, frozen=True, kw_only=True):
    """Query parameters of the policy list.

    `mine` selects policies that can apply to the caller's own runs.
    """

    mine: bool = False


@routes.get("/policies", needs=reading("policies"))
def list_policies(call: Call, policies: PolicyService, query: PolicyQuery) -> PolicyList:
    """List usage policies."""
    return PolicyList(policies=policies.view_all(call.who, mine=query.mine))


@routes.get("/policies/{name}", needs=reading("policies"))
def get_policy(call: Call, policies: PolicyService, name: str) -> PolicyView:
    """Return a usage policy."""
    return policies.view(call.who, name)


@routes.put("/policies/{name}", needs=writing("policies"))
def put_policy(call: Call, policies: PolicyService, name: str, body: PolicyRequest) -> PolicyView:
    """Create or replace a usage policy."""
    return policies.put(call.who, name, policy_of(body))


@routes.delete("/policies/{name}", needs=writing("policies"))
def delete_policy(call: Call, policies: PolicyService, name: str) -> PolicyView:
    """Delete a usage policy without holders. Limits of already submitted runs do not change."""
    return policies.delete(call.who, name)


@routes.put("/policies/{name}/holders/{kind}/{holder}", needs=writing("policies"))
def attach(call: Call, policies: PolicyService, name: str, kind: str, holder: str) -> PolicyView:
    """Attach a usage policy to a user, service or team."""
    return policies.attach(call.who, name, kind, holder)


@routes.delete("/policies/{name}/holders/{kind}/{holder}", needs=writing("policies"))
def detach(call: Call, policies: PolicyService, name: str, kind: str, holder: str) -> PolicyView:
    """Detach a usage policy from a user, service or team. Limits of already submitted runs do not change."""
    return policies.detach(call.who, name, kind, holder)
