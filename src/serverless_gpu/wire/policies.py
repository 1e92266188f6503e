"""Usage policies, and whom they are attached to.

GET    /policies?mine                                  → PolicyList   mine: those that one's own runs can be under
GET    /policies/{name}                                → PolicyView
PUT    /policies/{name}         PolicyRequest          → PolicyView   whole: fields that are left out are unset
DELETE /policies/{name}                                → PolicyView   as it was; refused while it is attached
PUT    /policies/{name}/holders/{kind}/{holder}        → PolicyView   kind: "user", "service", "team"
DELETE /policies/{name}/holders/{kind}/{holder}        → PolicyView
"""

from __future__ import annotations

import msgspec

from serverless_gpu.model.access.usage_policy import PolicySubject, UsagePolicy
from serverless_gpu.model.spec import Priority
from serverless_gpu.wire.base import Answer, Request


class PolicyView(Answer, frozen=True, kw_only=True):
    """A usage policy; fields are those of `model.policy.UsagePolicy`.

    Attributes:
        pool: where runs go that name no pool; "" for any on-demand pool.
        holders: whom it is attached to, as far as whoever asks may see that.
    """

    name: str
    pool: str
    pools: tuple[str, ...] = ()
    required_tags: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    default_tags: dict[str, str] = msgspec.field(default_factory=dict)
    gpu_types: tuple[str, ...] = ()
    gpus_per_run: int | None = None
    gpus_at_once: int | None = None
    max_run_s: float | None = None
    idle_s: float | None = None
    priorities: tuple[Priority, ...] = ()
    environments: tuple[str, ...] = ()
    timeout_s: float | None = None
    team: str = ""
    team_required: bool = False
    holders: tuple[PolicySubject, ...] = ()
    attempts_max: int | None = None
    total_run_s: float | None = None
    unsaved_max: int | None = None
    mandatory: bool = False


class PolicyList(Answer, frozen=True, kw_only=True):
    """Usage policies, by name."""

    policies: tuple[PolicyView, ...]


class PolicyRequest(Request, frozen=True, kw_only=True):
    """Make a usage policy, or put another one in its place; fields are those of `model.policy.UsagePolicy`."""

    pool: str = ""
    pools: tuple[str, ...] = ()
    required_tags: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    default_tags: dict[str, str] = msgspec.field(default_factory=dict)
    gpu_types: tuple[str, ...] = ()
    gpus_per_run: int | None = None
    gpus_at_once: int | None = None
    max_run_s: float | None = None
    idle_s: float | None = None
    priorities: tuple[Priority, ...] = ()
    environments: tuple[str, ...] = ()
    timeout_s: float | None = None
    team: str = ""
    team_required: bool = False
    attempts_max: int | None = None
    total_run_s: float | None = None
    unsaved_max: int | None = None
    mandatory: bool = False


def policy_of(said: PolicyRequest | PolicyView) -> UsagePolicy:
    """Return the policy that travelled."""
    return UsagePolicy(**{name: getattr(said, name) for name in UsagePolicy.__struct_fields__})


def request_of(policy: UsagePolicy) -> PolicyRequest:
    """Return a policy as it is asked for."""
    return PolicyRequest(**msgspec.structs.asdict(policy))


def view_of(name: str, policy: UsagePolicy, holders: tuple[PolicySubject, ...] = ()) -> PolicyView:
    """Return a policy as it is shown."""
    return PolicyView(name=name, holders=holders, **msgspec.structs.asdict(policy))
