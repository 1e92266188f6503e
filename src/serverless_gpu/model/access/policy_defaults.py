"""Defaults of usage policies for a run: a team and a time limit.

The rules (`usage_policy.apply`) are checked afterwards, on the run as it is then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from serverless_gpu.errors import PolicyViolation
from serverless_gpu.model.access.usage_policy import UsagePolicy
from serverless_gpu.model.spec import RunSpec


def with_defaults(policies: Iterable[tuple[str, UsagePolicy]], spec: RunSpec, teams: Collection[str]) -> RunSpec:
    """Return a run with its policies' defaults.

    A run without a team gets the first `team` of a policy that its owner is in. Where a policy requires a team, an
    owner of one team need not name it.

    Raises PolicyViolation when a policy requires a team, and it is not known which.
    """
    policies = list(policies)
    team, timeout_s = spec.team, spec.timeout_s
    for name, policy in policies:
        if team is None and policy.team in teams:
            team = policy.team
        if team is None and policy.team_required:
            if len(teams) != 1:
                known = f"team= one of: {', '.join(sorted(teams))}" if teams else ""
                hint = known or "an operator can add you: sgpu team join TEAM USER"
                raise PolicyViolation(f"usage policy {name!r} requires a team, and the run names none", hint=hint)
            team = next(iter(teams))
        if timeout_s is None:
            timeout_s = policy.timeout_s
    return msgspec.structs.replace(spec, team=team, timeout_s=timeout_s)
