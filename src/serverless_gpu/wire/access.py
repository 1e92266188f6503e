"""Who may do what: users, teams, services and their tokens; secrets; usage policies; the audit.

    GET    /whoami                                         → PrincipalView
    GET    /users                                          → PrincipalList
    POST   /users                   PrincipalRequest       → TokenMade
    PATCH  /users/{name}            PrincipalChange        → PrincipalView
    GET    /teams                                          → TeamList
    POST   /teams                   TeamRequest            → TeamView
    PATCH  /teams/{team}            TeamChange             → TeamView
    PUT    /teams/{team}/members/{user}                    → TeamView      (DELETE the same)
    GET    /tokens                                         → TokenList
    POST   /tokens                  TokenRequest           → TokenMade
    DELETE /tokens/{id}                                    → TokenView     (revoked)

    GET    /secrets                                        → SecretList    those one may use
    PUT    /secrets/{name}          SecretRequest          → SecretView    the next version; the same value: the same
    DELETE /secrets/{name}?team                            → SecretView    every version; its values are gone

    GET    /policies?mine                                  → PolicyList    mine: those that one's own runs can be under
    GET    /policies/{name}                                → PolicyView
    PUT    /policies/{name}         PolicyRequest          → PolicyView    whole: fields that are left out are unset
    DELETE /policies/{name}                                → PolicyView    as it was; refused while it is attached
    PUT    /policies/{name}/holders/{kind}/{holder}        → PolicyView    kind: "user", "service", "team"
    DELETE /policies/{name}/holders/{kind}/{holder}        → PolicyView

    GET    /audit?after=&limit=&principal=&action=&subject=&newest=   → AuditPage

Services are users of kind "service". No route shows a secret's value: it goes in here, and out with the order that
starts an attempt (`wire/agents.py`), to the attempt's node alone. `after` is the number of the last audit entry that
the reader has; entries are numbered and chained within a second or so after the request that they tell of was answered
(`model/audit_chain.py`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from serverless_gpu.model.access_control import Role
from serverless_gpu.model.audit_chain import ChainedEntry
from serverless_gpu.model.spec import Priority
from serverless_gpu.model.usage_policy import PolicySubject, UsagePolicy
from serverless_gpu.wire.base import Answer, Request

Kind = Literal["user", "service"]
OnDisabled = Literal["finish", "stop"]


class PrincipalView(Answer, frozen=True, kw_only=True):
    """A user or service."""

    name: str
    kind: Kind
    role: Role
    teams: tuple[str, ...]
    disabled: bool
    created_ns: int


class PrincipalList(Answer, frozen=True, kw_only=True):
    """Users and services."""

    principals: tuple[PrincipalView, ...]


class PrincipalRequest(Request, frozen=True, kw_only=True):
    """Make a user or service; the answer has its first token."""

    name: str
    kind: Kind = "user"
    role: Role = "member"
    teams: tuple[str, ...] = ()


class PrincipalChange(Request, frozen=True, kw_only=True):
    """Change a principal; None leaves a thing as it is. Disabling revokes all tokens.

    Attributes:
        runs: of somebody who may start none any more: those that go on "finish", or are asked to "stop"; None for what
            the server was told (`on_owner_disabled`).
    """

    role: Role | None = None
    disabled: bool | None = None
    runs: OnDisabled | None = None


class TeamRequest(Request, frozen=True, kw_only=True):
    """Make a team."""

    name: str


class TeamChange(Request, frozen=True, kw_only=True):
    """Change a team: the time zone of its budgets, as "Europe/Berlin"; "" for UTC."""

    time_zone: str


class TeamView(Answer, frozen=True, kw_only=True):
    """A team, who is in it, and the time zone of its budgets."""

    name: str
    members: tuple[str, ...]
    time_zone: str = "UTC"


class TeamList(Answer, frozen=True, kw_only=True):
    """All teams."""

    teams: tuple[TeamView, ...]


class TokenRequest(Request, frozen=True, kw_only=True):
    """Make a token for oneself, or for `principal` where one may.

    Attributes:
        scopes: what it can be used for, within what its owner may do; none means everything.
        expires_s: seconds from now; None for the server's default, 90 days.
    """

    label: str = ""
    principal: str = ""
    scopes: tuple[str, ...] = ()
    expires_s: float | None = None


class TokenView(Answer, frozen=True, kw_only=True):
    """A token without its secret."""

    id: str
    principal: str
    label: str
    scopes: tuple[str, ...]
    created_ns: int
    expires_ns: int | None
    revoked_ns: int | None
    used_ns: int | None


class TokenMade(Answer, frozen=True, kw_only=True):
    """A new token; the secret is said this once."""

    token: TokenView
    secret: str


class TokenList(Answer, frozen=True, kw_only=True):
    """Tokens."""

    tokens: tuple[TokenView, ...]


class SecretRequest(Request, frozen=True, kw_only=True):
    """Set a secret.

    Attributes:
        value: any bytes.
        team: whose it is to be; "" for one's own.
    """

    value: bytes
    team: str = ""

    def __repr__(self) -> str:
        """Return it without its value: what is printed may be kept."""
        return f"SecretRequest(team={self.team!r})"


class SecretView(Answer, frozen=True, kw_only=True):
    """A secret without its value.

    Attributes:
        version: that the next attempt gets.
        owner: whose it is; "" for one of a team.
        team: whose it is; "" for a principal's.
        created_ns: of this version, nanoseconds since 1970.
        by: who set it.
    """

    name: str
    version: int
    owner: str
    team: str
    created_ns: int
    by: str


class SecretList(Answer, frozen=True, kw_only=True):
    """Secrets, by name."""

    secrets: tuple[SecretView, ...]


class SecretValue(Answer, frozen=True, kw_only=True):
    """A secret on its way to the node of an attempt.

    Attributes:
        text: name and version for people, ``HF_TOKEN@3``.
        value: None where it was deleted after the attempt was placed: the attempt is refused, and the next one fails.
        variable: that ranks have it as, or "".
    """

    name: str
    text: str
    value: bytes | None = msgspec.field(default=None)
    variable: str = ""

    def __repr__(self) -> str:
        """Return it without its value: what is printed may be kept."""
        return f"SecretValue({self.text})"


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


class PolicyRequest(UsagePolicy, Request, frozen=True, kw_only=True):
    """Make a usage policy, or put another one in its place; fields are those of `model.policy.UsagePolicy`."""


def policy_of(said: PolicyRequest | PolicyView) -> UsagePolicy:
    """Return the policy that travelled."""
    return UsagePolicy(**{name: getattr(said, name) for name in UsagePolicy.__struct_fields__})


def request_of(policy: UsagePolicy) -> PolicyRequest:
    """Return a policy as it is asked for."""
    return PolicyRequest(**msgspec.structs.asdict(policy))


def view_of(name: str, policy: UsagePolicy, holders: tuple[PolicySubject, ...] = ()) -> PolicyView:
    """Return a policy as it is shown."""
    return PolicyView(name=name, holders=holders, **msgspec.structs.asdict(policy))


class AuditPage(Answer, frozen=True, kw_only=True):
    """Some entries.

    Attributes:
        entries: in the order of their numbers.
        last: number of the last entry there is.
        pending: entries that are written down and not in the chain yet.
        pending_since_ns: when the oldest of those was written, nanoseconds since 1970; None when there is none.
        now_ns: the server's time.
    """

    entries: tuple[ChainedEntry, ...]
    last: int
    pending: int
    pending_since_ns: int | None
    now_ns: int
