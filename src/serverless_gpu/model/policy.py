"""Usage policies: what an organisation has decided for the runs of somebody, and which of them a run is under.

    attached to the user, the service, the run's team ─▶ one: it applies by itself
    (a run for no team: all teams they are in)           several: `policy=` (or SGPU_POLICY) says which; else refused
                                                         none: any policy that is attached to nobody may be named
    the policy ─▶ is the run within it?  ── no ──▶ refused: the policy, what is not accepted, what would be
              └─▶ what it adds: default tags, pool, limits ─▶ the spec that is written down

What is decided here depends on values only. A policy fills in what the user left open and never loosens what they said.
Which installed packages are accepted is a question to the store of environments: `server/allowing.py` asks it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, get_args

import msgspec

from serverless_gpu import units
from serverless_gpu.errors import PolicyViolation
from serverless_gpu.model import hardware
from serverless_gpu.model.spec import TAGS_MAX, Priority, RunSpec

MAX_RUN_S = 7 * 86_400.0
"""The longest an attempt runs where no policy says otherwise; with `resume` the run goes on as another attempt."""
HolderKind = Literal["user", "service", "team"]
HOLDER_KINDS: tuple[HolderKind, ...] = get_args(HolderKind)
_NAMED_MAX = 20


class UsagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. None, or an empty tuple, means that it says nothing about that.

    Attributes:
        pool: where runs go that name no pool; "" for the first of `pools`, or any on-demand pool where there are none.
        pools: pools that runs may name; `pool` is always one of them.
        required_tags: keys that a run has to have; a key with values may have only those.
        default_tags: what is added where a run has no such key.
        gpu_types: that runs may ask for; one that asks for none gets the first that there is of these.
        gpus_per_run: the most devices of one run.
        gpus_at_once: the most devices that the runs of one user have at the same time.
        max_run_s: the longest an attempt runs, in seconds.
        idle_s: seconds of devices that do nothing until a run is stopped; users may say less, and not more or never.
        priorities: classes that runs may ask for; NORMAL, which is what a run has that says nothing, becomes the first
            where it is not one of them.
        environments: addresses of captured environments whose installed packages are accepted; the project's own code
            may differ. With any, a run that imports the caller's own files is refused.
    """

    pool: str = ""
    pools: tuple[str, ...] = ()
    required_tags: dict[str, tuple[str, ...]] = {}
    default_tags: dict[str, str] = {}
    gpu_types: tuple[str, ...] = ()
    gpus_per_run: int | None = None
    gpus_at_once: int | None = None
    max_run_s: float | None = None
    idle_s: float | None = None
    priorities: tuple[Priority, ...] = ()
    environments: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        """Return where runs go that name no pool, "" for any on-demand one."""
        return self.pool or next(iter(self.pools), "")


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a policy is attached to.

    Attributes:
        kind: what they are.
        name: of the principal, or the team.
    """

    kind: HolderKind
    name: str


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """The policies that are attached to somebody, by name.

    Attributes:
        own: to themselves.
        teams: to the teams they are in.
    """

    own: tuple[str, ...] = ()
    teams: dict[str, tuple[str, ...]] = {}

    def of(self, team: str) -> list[str]:
        """Return those that are for a run, by name, each once: one's own, and its team's; without a team all teams'."""
        others = self.teams.get(team, ()) if team else (name for names in self.teams.values() for name in names)
        return sorted({*self.own, *others})


def choose(attached: Attached, *, who: str, named: str | None, team: str = "", is_free: bool = False) -> str:
    """Return the name of the policy that a run is under, or "" for none.

    Args:
        attached: to whoever asks for the run, and to their teams.
        who: they are.
        named: the policy that the run names; it is there.
        team: the run is for; then the policies of other teams are not for it.
        is_free: whether the named policy is attached to nobody.

    Raises:
        PolicyViolation: the run names a policy that is not for it, or does not say which of several.
    """
    there = attached.of(team)
    if named is not None:
        if named in there or (is_free and not there):
            return named
        told = f"{who}'s runs for team {team!r}" if team else f"runs of {who}"
        hint = _choices(there) if there else f"an operator can attach it: sgpu policy attach {named} --user {who}"
        raise PolicyViolation(f"usage policy {named!r} is not for {told}", hint=hint)
    if len(there) <= 1:
        return there[0] if there else ""
    raise PolicyViolation(
        f"{len(there)} usage policies are for this run of {who}, and it does not say which", hint=_choices(there)
    )


def apply(
    name: str, policy: UsagePolicy, spec: RunSpec, *, present: Collection[str] = (), max_run_s: float | None = MAX_RUN_S
) -> RunSpec:
    """Return a run as it is under a policy.

    Args:
        name: of the policy; "" for none, which limits the time of an attempt and nothing else.
        policy: what it says.
        spec: what was asked for.
        present: GPU types that have joined; a run that asks for none gets one of these where the policy has a choice.
        max_run_s: the longest an attempt runs where the policy does not say; None for as long as it likes.

    Raises:
        PolicyViolation: the run is not within the policy; the message has all that is not accepted, the hint what is.
    """
    limit_s = max_run_s if policy.max_run_s is None else policy.max_run_s
    if not name:
        return msgspec.structs.replace(spec, max_run_s=_smaller(spec.max_run_s, limit_s))
    refused = _Refused()
    tags = _tags(policy, spec, refused)
    gpu_type = _gpu_type(policy, spec.resources.gpu_type, present, refused)
    _check_devices(policy, spec.resources.gpus, refused)
    priority = _priority(policy, spec.priority, refused)
    if policy.pools and spec.pool is not None and spec.pool not in (*policy.pools, policy.pool):
        refused.note(f"pool={spec.pool!r}", f"pools {_listed(dict.fromkeys((policy.home, *policy.pools)))}")
    if policy.idle_s is not None and spec.idle_timeout_s is not None and spec.idle_timeout_s > policy.idle_s:
        refused.note(f"idle_timeout={spec.idle_timeout_s:g}", f"idle_timeout up to {policy.idle_s:g}")
    if policy.environments and spec.environment == "live":
        refused.note("files that ranks import where they lie", "a captured environment, env='snapshot'")
    refused.check(name)
    return msgspec.structs.replace(
        spec,
        policy=name,
        tags=tags,
        priority=priority,
        resources=msgspec.structs.replace(spec.resources, gpu_type=gpu_type),
        idle_timeout_s=_smaller(spec.idle_timeout_s, policy.idle_s),
        max_run_s=_smaller(spec.max_run_s, limit_s),
    )


def where(policy: UsagePolicy, spec: RunSpec) -> str:
    """Return the pool that a run goes to, "" for any on-demand one.

    Args:
        policy: the one it is under.
        spec: what was asked for.
    """
    return policy.home if spec.pool is None else spec.pool


class _Refused:
    """What of a run its policy does not accept, and what it would."""

    def __init__(self) -> None:
        self._what: list[str] = []
        self._accepted: list[str] = []

    def note(self, what: str, accepted: str) -> None:
        self._what.append(what)
        self._accepted.append(accepted)

    def check(self, name: str) -> None:
        if not self._what:
            return
        raise PolicyViolation(
            f"usage policy {name!r} does not accept {'; '.join(self._what)}",
            hint=f"it accepts {'; '.join(self._accepted)}",
        )


def _tags(policy: UsagePolicy, spec: RunSpec, refused: _Refused) -> dict[str, str]:
    tags = {**policy.default_tags, **spec.tags}
    for key, values in policy.required_tags.items():
        accepted = f"tags={{{key!r}: {_listed(map(repr, values)) or '...'}}}"
        if key not in tags:
            refused.note(f"a run without the tag {key!r}", accepted)
        elif values and tags[key] not in values:
            refused.note(f"the tag {key!r} with {tags[key]!r}", accepted)
    if len(tags) > TAGS_MAX:
        refused.note(f"{len(tags)} tags, its own defaults among them", f"{TAGS_MAX} altogether")
    return tags


def _gpu_type(policy: UsagePolicy, asked: str | None, present: Collection[str], refused: _Refused) -> str | None:
    types = policy.gpu_types
    if not types or (asked is not None and any(hardware.matches(accepted, asked) for accepted in types)):
        return asked
    # What is asked for may be a family of which only some members are accepted.
    fit = types if asked is None else [accepted for accepted in types if hardware.matches(asked, accepted)]
    if not fit:
        refused.note(f"gpu_type={asked!r}", f"GPU types {_listed(types)}")
        return asked
    there = (accepted for accepted in fit if any(hardware.matches(accepted, kind) for kind in present))
    return next(there, fit[0])


def _check_devices(policy: UsagePolicy, gpus: int | None, refused: _Refused) -> None:
    limits = [most for most in (policy.gpus_per_run, policy.gpus_at_once) if most is not None]
    if not limits:
        return
    if gpus is None:
        refused.note("a run for every GPU of a node, whatever that has", f"a number, gpus={min(limits)} at most")
    elif gpus > min(limits):
        refused.note(f"gpus={gpus}", f"gpus={min(limits)} at most")


def _priority(policy: UsagePolicy, asked: Priority, refused: _Refused) -> Priority:
    if not policy.priorities or asked in policy.priorities:
        return asked
    if asked is not Priority.NORMAL:
        refused.note(f"priority={asked.value!r}", f"classes {_listed(policy.priorities)}")
    return policy.priorities[0]


def describe(policy: UsagePolicy) -> list[str]:
    """Return what a policy says, for people: one phrase for each thing it says."""
    said = [f"pool {policy.home}" if policy.home else "any on-demand pool"]
    said += [f"pools {_listed(policy.pools)}"] if policy.pools else []
    for key, values in policy.required_tags.items():
        said.append(f"needs tag {key}" + (f" ({_listed(values)})" if values else ""))
    said += [f"adds tag {key}={value}" for key, value in policy.default_tags.items()]
    said += [f"GPU types {_listed(policy.gpu_types)}"] if policy.gpu_types else []
    said += [f"{_gpus(policy.gpus_per_run)} a run"] if policy.gpus_per_run is not None else []
    said += [f"{_gpus(policy.gpus_at_once)} at once"] if policy.gpus_at_once is not None else []
    said += [f"{format_span(policy.max_run_s)} at a time"] if policy.max_run_s is not None else []
    said += [f"stopped after {format_span(policy.idle_s)} idle"] if policy.idle_s is not None else []
    said += [f"classes {_listed(policy.priorities)}"] if policy.priorities else []
    said += [f"packages of {_listed(each[:12] for each in policy.environments)}"] if policy.environments else []
    return said


def format_span(seconds: float) -> str:
    """Return a limit of time as people say it: days where they are whole."""
    ms = round(seconds * 1000)
    return units.format_days_ms(ms) if seconds >= 86_400 and seconds % 86_400 == 0 else units.format_duration_ms(ms)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _smaller(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def _choices(names: list[str]) -> str:
    return f"policy=, or SGPU_POLICY, says which: {_listed(names)}"


def _listed(names: Iterable[str]) -> str:
    there = list(names)
    more = f" and {len(there) - _NAMED_MAX} more" if len(there) > _NAMED_MAX else ""
    return ", ".join(there[:_NAMED_MAX]) + more
