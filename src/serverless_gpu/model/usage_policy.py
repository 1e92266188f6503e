"""Usage policies: an organisation's rules for the runs of a principal.

    attached to the user, the service, the run's team ─▶ one: it applies automatically
    (a run without a team: all teams of its owner)       several: `policy=` (or SGPU_POLICY) selects one, else refused
                                                         none: the run may name any unattached policy
    mandatory ones ─▶ all attached ones apply beside the selected one; the strictest rule holds
    defaults       ─▶ a team and a time limit, before the rules are checked
    each policy ─▶ does the run comply? ── no ──▶ refused: the policy, the refused values, the accepted values
               └─▶ additions: default tags, pool, limits ─▶ the stored spec
    CRITICAL    ─▶ only if a policy that applies lists it, or the caller may grant it (`operator`, `admin`)

A policy fills in options that the user omitted, and never relaxes options that the user set. The server's environment
store, not this module, checks the installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, get_args

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import PolicyViolation
from serverless_gpu.model import hardware
from serverless_gpu.model.lifecycle.attempt import UNSAVED_MAX
from serverless_gpu.model.spec import TAGS_MAX, Priority, RunSpec

MAX_RUN_S = 7 * 86_400.0
"""Maximum seconds of an attempt without a policy limit. With `resume`, a run over the limit continues as another
attempt."""
HolderKind = Literal["user", "service", "team"]
HOLDER_KINDS: tuple[HolderKind, ...] = get_args(HolderKind)
_NAMED_MAX = 20


class UsagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One usage policy. A rule that is None or an empty tuple does not apply."""

    pool: str = ""  # Pool of runs that name no pool, or "" for the first of `pools` or any on-demand pool.
    pools: tuple[str, ...] = ()  # Pools that runs may name, always including `pool`.
    # Tags that each run must have. If a key lists values, the policy accepts only these values.
    required_tags: dict[str, tuple[str, ...]] = {}
    default_tags: dict[str, str] = {}  # Tags that the server adds to runs without these keys.
    # GPU types that runs may request. A run without a requested type uses the first available type of the list.
    gpu_types: tuple[str, ...] = ()
    gpus_per_run: int | None = None  # Maximum number of devices of one run.
    gpus_at_once: int | None = None  # Maximum number of devices of all active runs of one user.
    max_run_s: float | None = None  # Maximum time of an attempt, in seconds.
    # Seconds without work on any device until the supervisor stops a run. Users may set only a shorter idle time.
    idle_s: float | None = None
    # Priority classes that runs may request. A run without a requested class uses NORMAL or, if the policy refuses
    # NORMAL, the first accepted class.
    priorities: tuple[Priority, ...] = ()
    # Addresses of captured environments whose installed packages the policy accepts. The project's own code may differ
    # from the captured code. With listed environments, the policy refuses runs that import the caller's own files.
    environments: tuple[str, ...] = ()
    timeout_s: float | None = None  # Default time limit in seconds for runs without a user-set limit.
    team: str = ""  # Default team of a run whose owner is a member, or "" for no default.
    team_required: bool = False  # True if every run must belong to a team.
    # Maximum number of attempts that begin user code, excluding preempted attempts.
    attempts_max: int | None = None
    total_run_s: float | None = None  # Maximum time of user code over all attempts of a run, in seconds.
    unsaved_max: int | None = None  # Maximum number of consecutive attempts without a new checkpoint under `resume`.
    # True if the policy applies to all runs of its principals, in addition to the selected policy.
    mandatory: bool = False

    @property
    def home(self) -> str:
        """Return the pool of runs that name no pool, or "" for any on-demand pool."""
        return self.pool or next(iter(self.pools), "")


class NamedPolicy(msgspec.Struct, frozen=True):
    """A named policy that applies to a run."""

    name: str
    policy: UsagePolicy
    # True if the policy is attached to the caller or the caller's team. Callers may also name an unattached policy,
    # which grants no priority class.
    is_attached: bool = True


class PolicySubject(msgspec.Struct, frozen=True, kw_only=True):
    """A user, service or team to which a policy is attached.

    Attributes:
        kind: user, service or team.
        name: name of the principal or team.
    """

    kind: HolderKind
    name: str


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the policies that are attached to a principal and the principal's teams."""

    own: tuple[str, ...] = ()
    teams: dict[str, tuple[str, ...]] = {}  # Policies of the principal's teams.

    def of(self, team: str) -> list[str]:
        """Return the names of the principal's own policies and of the team's policies, sorted.

        Without a team, the result includes the policies of all teams.
        """
        others = self.teams.get(team, ()) if team else (name for names in self.teams.values() for name in names)
        return sorted({*self.own, *others})


def choose(
    attached: Attached,
    *,
    who: str,
    named: str | None,
    team: str = "",
    is_free: bool = False,
    mandatory: Collection[str] = (),
) -> str:
    """Return the name of the policy that applies in addition to mandatory policies, or "".

    Raises PolicyViolation when the named policy does not apply to this run, or when the choice is ambiguous.
    """
    every = attached.of(team)
    there = [name for name in every if name not in mandatory]
    if named in every and named in mandatory:
        named = None
    if named is not None:
        if named in there or (is_free and not there):
            return named
        told = f"{who}'s runs for team {team!r}" if team else f"runs of {who}"
        hint = _choices(there) if there else f"an operator can attach it: sgpu policy attach {named} --user {who}"
        raise PolicyViolation(f"usage policy {named!r} does not apply to {told}", hint=hint)
    if len(there) <= 1:
        return there[0] if there else ""
    raise PolicyViolation(
        f"{len(there)} usage policies apply to this run of {who}, and the run selects none of them",
        hint=_choices(there),
    )


def apply(
    policies: Sequence[NamedPolicy],
    spec: RunSpec,
    *,
    present: Collection[str] = (),
    max_run_s: float | None = MAX_RUN_S,
    may_be_critical: bool = False,
) -> RunSpec:
    """Return a run's spec after applying the strictest rules of its policies.

    `policies` starts with the selected policy. If no policy limits an attempt, `max_run_s` applies, where None stands
    for no limit. Raises PolicyViolation with every refused value, and with the accepted values as hint.
    """
    refused = _Refused()
    tags = _tags(policies, spec, refused)
    gpu_type = _gpu_type(policies, spec.resources.gpu_type, present, refused)
    for each in policies:
        _check_devices(each, spec.resources.gpus, refused)
    priority = _priority(policies, spec.priority, refused)
    pool = where(policies, spec)
    for each in policies:
        if (spec.pool is not None or pool) and not _is_accepted(each.policy, pool):
            what = f"pool={pool!r}" if spec.pool is not None else f"pool {pool!r}, where the run would go"
            refused.note(each.name, what, f"pools {_listed(dict.fromkeys((each.policy.home, *each.policy.pools)))}")
    for name, policy in ((each.name, each.policy) for each in policies):
        if policy.idle_s is not None and spec.idle_timeout_s is not None and spec.idle_timeout_s > policy.idle_s:
            refused.note(name, f"idle_timeout={spec.idle_timeout_s:g}", f"idle_timeout up to {policy.idle_s:g}")
        if policy.environments and spec.environment == "live":
            refused.note(name, "imports of the caller's files in place", "a captured environment, env='snapshot'")
    refused.check(policies)
    may_be_critical |= any(each.is_attached and Priority.CRITICAL in each.policy.priorities for each in policies)
    if priority is Priority.CRITICAL and not may_be_critical:
        raise PolicyViolation(
            "priority='CRITICAL' is not granted to this run",
            hint="use priority='NORMAL' or 'BEST_EFFORT', or ask an operator to grant CRITICAL with a policy: "
            "sgpu policy set NAME --priorities NORMAL,CRITICAL,BEST_EFFORT",
        )
    longest_s = _least(policies, lambda policy: policy.max_run_s)
    total_run_s = _least(policies, lambda policy: policy.total_run_s)
    attempts_max, unsaved_max = (
        None if most is None else round(most)
        for most in (
            _least(policies, lambda policy: policy.attempts_max),
            _least(policies, lambda policy: policy.unsaved_max),
        )
    )
    names = [each.name for each in policies]
    return msgspec.structs.replace(
        spec,
        policy=names[0] if names else spec.policy,
        policies=tuple(names[1:]),
        tags=tags,
        priority=priority,
        resources=msgspec.structs.replace(spec.resources, gpu_type=gpu_type),
        idle_timeout_s=_smaller(spec.idle_timeout_s, _least(policies, lambda policy: policy.idle_s)),
        max_run_s=_smaller(spec.max_run_s, max_run_s if longest_s is None else longest_s),
        total_run_s=total_run_s,
        attempts_max=attempts_max,
        unsaved_max=UNSAVED_MAX if unsaved_max is None else unsaved_max,
    )


def with_defaults(policies: Iterable[tuple[str, UsagePolicy]], spec: RunSpec, teams: Collection[str]) -> RunSpec:
    """Return a run's spec after filling in the default team and time limit of its policies.

    A run without a team uses the first `team` of a policy whose members include the run's owner. If a policy requires a
    team, an owner in exactly one team need not name the team.

    Raises PolicyViolation when a policy requires a team and the run does not determine one.
    """
    policies = list(policies)
    team, timeout_s = spec.team, spec.timeout_s
    for name, policy in policies:
        if team is None and policy.team in teams:
            team = policy.team
        if team is None and policy.team_required:
            if len(teams) != 1:
                known = f"set team= to one of: {', '.join(sorted(teams))}" if teams else ""
                hint = known or "an operator can add you: sgpu team join TEAM USER"
                raise PolicyViolation(f"usage policy {name!r} requires a team, and the run names none", hint=hint)
            team = next(iter(teams))
        if timeout_s is None:
            timeout_s = policy.timeout_s
    return msgspec.structs.replace(spec, team=team, timeout_s=timeout_s)


def where(policies: Sequence[NamedPolicy], spec: RunSpec) -> str:
    """Return the pool in which the scheduler will place a run, or "" for any on-demand pool."""
    if spec.pool is not None:
        return spec.pool
    homes = [each.policy.home for each in policies if each.policy.home]
    named = [pool for each in policies for pool in each.policy.pools]
    accepted = (pool for pool in (*homes, *named) if all(_is_accepted(each.policy, pool) for each in policies))
    return next(accepted, homes[0] if homes else "")


def _is_accepted(policy: UsagePolicy, pool: str) -> bool:
    return not policy.pools or pool in (*policy.pools, policy.pool)


class _Refused:
    """Collects the refused and the accepted values of a run, by policy name."""

    def __init__(self) -> None:
        self._by_policy: dict[str, list[tuple[str, str]]] = {}

    def note(self, name: str, what: str, accepted: str) -> None:
        self._by_policy.setdefault(name, []).append((what, accepted))

    def check(self, policies: Sequence[NamedPolicy]) -> None:
        if not self._by_policy:
            return
        names = [each.name for each in policies if each.name in self._by_policy]
        said = {name: [*zip(*self._by_policy[name], strict=True)] for name in names}
        mandatory = [each.name for each in policies if each.policy.mandatory and each.name in said]
        message = "; ".join(
            f"usage policy {name!r} does not accept {'; '.join(what)}" for name, (what, _) in said.items()
        )
        hints = {name: "; ".join(accepted) for name, (_, accepted) in said.items()}
        single = len(policies) == 1
        hint = "; ".join(f"{'it' if single else repr(name)} accepts {text}" for name, text in hints.items())
        note = f"; mandatory: {_listed(mandatory)}" if mandatory else ""
        raise PolicyViolation(message, hint=hint + note)


def _tags(policies: Sequence[NamedPolicy], spec: RunSpec, refused: _Refused) -> dict[str, str]:
    tags: dict[str, str] = {}
    for each in policies:
        tags = {**each.policy.default_tags, **tags}
    tags |= spec.tags
    for each in policies:
        for key, values in each.policy.required_tags.items():
            accepted = f"tags={{{key!r}: {_listed(map(repr, values)) or '...'}}}"
            if key not in tags:
                refused.note(each.name, f"a run without the tag {key!r}", accepted)
            elif values and tags[key] not in values:
                refused.note(each.name, f"the tag {key!r} with {tags[key]!r}", accepted)
    if policies and len(tags) > TAGS_MAX:
        refused.note(policies[0].name, f"{len(tags)} tags, including its own defaults", f"{TAGS_MAX} altogether")
    return tags


def _gpu_type(
    policies: Sequence[NamedPolicy], asked: str | None, present: Collection[str], refused: _Refused
) -> str | None:
    left: list[str] | None = None  # GPU types that all policies so far accept.
    for each in policies:
        types = each.policy.gpu_types
        if not types:
            continue
        fit: Sequence[str] = types
        if asked is not None and any(hardware.matches(accepted, asked) for accepted in types):
            fit = (asked,)
        elif asked is not None:  # For a requested GPU family, the policy may accept only some members.
            fit = [accepted for accepted in types if hardware.matches(asked, accepted)]
        common = list(fit) if left is None else _common(left, fit)
        if not common:
            what = f"gpu_type={asked!r}" if asked is not None else f"the GPU types {_listed(left or ())}"
            refused.note(each.name, what, f"GPU types {_listed(types)}")
            return asked
        left = common
    if left is None or asked in left:
        return asked
    there = (accepted for accepted in left if any(hardware.matches(accepted, kind) for kind in present))
    return next(there, left[0])


def _common(one: Iterable[str], other: Iterable[str]) -> list[str]:
    """Return the GPU types in both lists, where a member of a GPU family matches the family."""
    others = list(other)
    narrow = [
        theirs if hardware.matches(mine, theirs) else mine
        for mine in one
        for theirs in others
        if hardware.matches(mine, theirs) or hardware.matches(theirs, mine)
    ]
    return list(dict.fromkeys(narrow))


def _check_devices(each: NamedPolicy, gpus: int | None, refused: _Refused) -> None:
    limits = [most for most in (each.policy.gpus_per_run, each.policy.gpus_at_once) if most is not None]
    if not limits:
        return
    if gpus is None:
        what, accepted = "a run for every GPU of a node", f"a number, gpus={min(limits)} at most"
        refused.note(each.name, what, accepted)
    elif gpus > min(limits):
        refused.note(each.name, f"gpus={gpus}", f"gpus={min(limits)} at most")


def _priority(policies: Sequence[NamedPolicy], asked: Priority, refused: _Refused) -> Priority:
    listing = [each for each in policies if each.policy.priorities]
    left = [one for one in Priority if all(one in each.policy.priorities for each in listing)]
    if not listing or asked in left:
        return asked
    for each in listing:
        if asked not in each.policy.priorities and (asked is not Priority.NORMAL or not left):
            refused.note(each.name, f"priority={asked.value!r}", f"classes {_listed(each.policy.priorities)}")
    return next((one for one in listing[0].policy.priorities if one in left), asked)


def _least(policies: Sequence[NamedPolicy], limit: Callable[[UsagePolicy], float | None]) -> float | None:
    """Return the smallest value of a limit among the policies, or None if no policy sets the limit."""
    return min((most for each in policies if (most := limit(each.policy)) is not None), default=None)


def describe(policy: UsagePolicy) -> list[str]:
    """Return the rules of a policy as text, one phrase per rule."""
    said = ["mandatory"] if policy.mandatory else []
    said += [f"pool {policy.home}" if policy.home else "any on-demand pool"]
    said += [f"pools {_listed(policy.pools)}"] if policy.pools else []
    for key, values in policy.required_tags.items():
        said.append(f"needs tag {key}" + (f" ({_listed(values)})" if values else ""))
    said += [f"adds tag {key}={value}" for key, value in policy.default_tags.items()]
    said += [f"GPU types {_listed(policy.gpu_types)}"] if policy.gpu_types else []
    said += [f"{_gpus(policy.gpus_per_run)} a run"] if policy.gpus_per_run is not None else []
    said += [f"{_gpus(policy.gpus_at_once)} at once"] if policy.gpus_at_once is not None else []
    said += [f"{format_span(policy.max_run_s)} at a time"] if policy.max_run_s is not None else []
    said += [f"{format_span(policy.total_run_s)} in all attempts"] if policy.total_run_s is not None else []
    said += [_attempts(policy.attempts_max)] if policy.attempts_max is not None else []
    said += (
        [f"stopped after {_attempts(policy.unsaved_max)} in a row without a checkpoint"]
        if policy.unsaved_max is not None
        else []
    )
    said += [f"stopped after {format_span(policy.idle_s)} idle"] if policy.idle_s is not None else []
    said += [f"default time limit {format_span(policy.timeout_s)}"] if policy.timeout_s is not None else []
    said += [f"default team {policy.team}"] if policy.team else []
    said += ["needs a team"] if policy.team_required else []
    said += [f"classes {_listed(policy.priorities)}"] if policy.priorities else []
    said += [f"packages of {_listed(each[:12] for each in policy.environments)}"] if policy.environments else []
    return said


def format_span(seconds: float) -> str:
    """Return a time limit as text, in days for a whole number of days."""
    ms = round(seconds * 1000)
    return units.format_days_ms(ms) if seconds >= 86_400 and seconds % 86_400 == 0 else units.format_duration_ms(ms)


def _attempts(count: int) -> str:
    return f"{count} attempt{'' if count == 1 else 's'}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _smaller(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def _choices(names: list[str]) -> str:
    return f"select one with policy= or SGPU_POLICY: {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    there = list(names)
    more = f" and {len(there) - _NAMED_MAX} more" if len(there) > _NAMED_MAX else ""
    return ", ".join(there[:_NAMED_MAX]) + more
