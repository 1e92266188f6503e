"""Defines bodies for users, teams, services, tokens, secrets, usage policies and the audit log.

    GET    /whoami                                         → PrincipalView
    GET    /users?q&after&limit                            → PrincipalList
    POST   /users                   PrincipalRequest       → TokenMade
    PATCH  /users/{name}            PrincipalChange        → PrincipalView
    GET    /teams                                          → TeamList
    POST   /teams                   TeamRequest            → TeamView
    PATCH  /teams/{team}            TeamChange             → TeamView
    PUT    /teams/{team}/members/{user}                    → TeamView      (DELETE the same)
    GET    /tokens?newest&valid&principal&before&limit     → TokenList
    POST   /tokens                  TokenRequest           → TokenMade
    DELETE /tokens/{id}                                    → TokenView     (revoked)

    GET    /secrets                                        → SecretList    secrets that the caller may use
    PUT    /secrets/{name}          SecretRequest          → SecretView    a new version; an equal value keeps the
    version
    DELETE /secrets/{name}?team                            → SecretView    deletes all versions and their values

    GET    /policies?mine                                  → PolicyList    mine: policies possible for the caller's runs
    GET    /policies/{name}                                → PolicyView
    PUT    /policies/{name}         PolicyRequest          → PolicyView    replaces all; omitted fields become unset
    DELETE /policies/{name}                                → PolicyView    the deleted policy; refused while attached
    PUT    /policies/{name}/holders/{kind}/{holder}        → PolicyView    kind: "user", "service", "team"
    DELETE /policies/{name}/holders/{kind}/{holder}        → PolicyView

    GET    /audit?after&before&limit&principal&action&subject&from_ns&to_ns&newest   → AuditPage
    GET    /audit/verification?after&sha256                → AuditVerification     verifies some seconds' worth

A service is a principal of kind "service". No route returns a secret's value. The server sends a secret's value only to
the node of an attempt, in the start order (`wire/agents.py`). The parameter `after` is the number of the reader's last
audit entry. The server adds each audit entry to the hash chain (`model/audit_chain.py`) within about a second.
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
    """A user or a service.

    Attributes:
        rights: rights of the principal that its role does not include. The first administrator has every right.
    """

    name: str
    kind: Kind
    role: Role
    teams: tuple[str, ...]
    disabled: bool
    created_ns: int
    rights: tuple[str, ...] = ()


class PrincipalList(Answer, frozen=True, kw_only=True):
    """A list of users and services, sorted by name.

    Attributes:
        cursor: value of the parameter `after` for the next page, or "" on the last page.
    """

    principals: tuple[PrincipalView, ...]
    cursor: str = ""


class PrincipalRequest(Request, frozen=True, kw_only=True):
    """Create a user or a service. The server answers with the principal's first token."""

    name: str
    kind: Kind = "user"
    role: Role = "member"
    teams: tuple[str, ...] = ()


class PrincipalChange(Request, frozen=True, kw_only=True):
    """Change a user or a service.

    A field with None keeps its value. If the request disables a principal, the server revokes all its tokens.

    Attributes:
        runs: action for the runs of a disabled principal. "finish" lets the runs finish, and "stop" requests their
            stop. None means the server's setting `on_owner_disabled`.
        grant: rights that the principal gets.
        revoke: granted rights that the principal loses.
    """

    role: Role | None = None
    disabled: bool | None = None
    runs: OnDisabled | None = None
    grant: tuple[str, ...] = ()
    revoke: tuple[str, ...] = ()


class TeamRequest(Request, frozen=True, kw_only=True):
    """Create a team."""

    name: str


class TeamChange(Request, frozen=True, kw_only=True):
    """Change the time zone of a team's budgets, such as "Europe/Berlin". "" means UTC."""

    time_zone: str


class TeamView(Answer, frozen=True, kw_only=True):
    """A team with its members and the time zone of its budgets."""

    name: str
    members: tuple[str, ...]
    time_zone: str = "UTC"


class TeamList(Answer, frozen=True, kw_only=True):
    """The list of all teams."""

    teams: tuple[TeamView, ...]


class TokenRequest(Request, frozen=True, kw_only=True):
    """Create a token for the caller, or for another principal if the caller has the permission.

    Attributes:
        scopes: permitted operations, within the permissions of the owner. An empty tuple permits all operations of the
            owner.
        expires_s: lifetime in seconds. None means the server's default, 90 days.
    """

    label: str = ""
    principal: str = ""
    scopes: tuple[str, ...] = ()
    expires_s: float | None = None


class TokenView(Answer, frozen=True, kw_only=True):
    """A token without its secret.

    Attributes:
        made_by: principal that created the token, or "server"; "" if unknown.
    """

    id: str
    principal: str
    label: str
    scopes: tuple[str, ...]
    created_ns: int
    expires_ns: int | None
    revoked_ns: int | None
    used_ns: int | None
    made_by: str = ""


class TokenMade(Answer, frozen=True, kw_only=True):
    """A new token with its secret, which the server never returns again."""

    token: TokenView
    secret: str


class TokenList(Answer, frozen=True, kw_only=True):
    """A list of tokens.

    Attributes:
        cursor: value of the parameter `before` for the next page, or "" on the last page.
    """

    tokens: tuple[TokenView, ...]
    cursor: str = ""


class SignInLink(Answer, frozen=True, kw_only=True):
    """A link that signs its first user in to the web pages, as the caller.

    Attributes:
        path: path and query of the link, below the server's address.
        expires_ns: end of the link's validity, nanoseconds since 1970.
    """

    path: str
    expires_ns: int


class SessionOrigin(Answer, frozen=True, kw_only=True):
    """The way, the browser and the address with which a session began.

    Attributes:
        method: link, token, password, or provider (an identity provider).
        browser: text of the browser's `User-Agent` header, shortened.
        address: network address of the browser.
    """

    method: str
    browser: str = ""
    address: str = ""


class SessionView(Answer, frozen=True, kw_only=True):
    """An open session of a browser."""

    id: str
    principal: str
    origin: SessionOrigin
    created_ns: int
    expires_ns: int
    used_ns: int | None


class SessionList(Answer, frozen=True, kw_only=True):
    """A list of open sessions, newest first."""

    sessions: tuple[SessionView, ...]


class SessionsEnded(Answer, frozen=True, kw_only=True):
    """The number of ended sessions."""

    count: int


class SecretRequest(Request, frozen=True, kw_only=True):
    """Set a secret.

    Attributes:
        value: any bytes.
        team: team that owns the secret, or "" for the caller.
    """

    value: bytes
    team: str = ""

    def __repr__(self) -> str:
        """Omit the secret's value, because logs may store printed objects."""
        return f"SecretRequest(team={self.team!r})"


class SecretView(Answer, frozen=True, kw_only=True):
    """A secret without its value.

    Attributes:
        version: version that the server sends to the next attempt.
        owner: principal that owns the secret, or "" for a secret of a team.
        team: team that owns the secret, or "" for a secret of a principal.
        created_ns: creation time of this version, in nanoseconds since 1970.
        by: principal who set this version.
        used_ns: time at which the node of an attempt last received the secret in any version, or None if unknown.
    """

    name: str
    version: int
    owner: str
    team: str
    created_ns: int
    by: str
    used_ns: int | None = None


class SecretList(Answer, frozen=True, kw_only=True):
    """A list of secrets, sorted by name."""

    secrets: tuple[SecretView, ...]


class SecretValue(Answer, frozen=True, kw_only=True):
    """A secret with its value, which the server sends to the node of an attempt.

    Attributes:
        text: name and version for display, such as ``HF_TOKEN@3``.
        value: the secret's value, or None if the secret was deleted after the placement. The node then refuses the
            attempt, and the next attempt fails.
        variable: environment variable that holds the value in ranks, or "".
    """

    name: str
    text: str
    value: bytes | None = msgspec.field(default=None)
    variable: str = ""

    def __repr__(self) -> str:
        """Omit the secret's value, because logs may store printed objects."""
        return f"SecretValue({self.text})"


class PolicyView(Answer, frozen=True, kw_only=True):
    """A usage policy with the fields of `model.policy.UsagePolicy`.

    Attributes:
        pool: pool for runs that name no pool. "" means any on-demand pool.
        holders: principals and teams to which this policy is attached, if the caller may see them.
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
    """A list of usage policies, sorted by name."""

    policies: tuple[PolicyView, ...]


class PolicyRequest(UsagePolicy, Request, frozen=True, kw_only=True):
    """Create or replace a usage policy."""


def policy_of(said: PolicyRequest | PolicyView) -> UsagePolicy:
    """Convert a request or a view to a usage policy."""
    return UsagePolicy(**{name: getattr(said, name) for name in UsagePolicy.__struct_fields__})


def request_of(policy: UsagePolicy) -> PolicyRequest:
    """Convert a usage policy to a request."""
    return PolicyRequest(**msgspec.structs.asdict(policy))


def view_of(name: str, policy: UsagePolicy, holders: tuple[PolicySubject, ...] = ()) -> PolicyView:
    """Convert a usage policy to a view."""
    return PolicyView(name=name, holders=holders, **msgspec.structs.asdict(policy))


class AuditPage(Answer, frozen=True, kw_only=True):
    """A page of audit entries.

    Attributes:
        entries: entries in the order of their numbers.
        last: number of the newest entry.
        pending: number of recorded entries that are not in the hash chain yet.
        pending_since_ns: time of the oldest pending entry, in nanoseconds since 1970, or None without pending entries.
        now_ns: the server's time in nanoseconds since 1970.
    """

    entries: tuple[ChainedEntry, ...]
    last: int
    pending: int
    pending_since_ns: int | None
    now_ns: int


class AuditVerification(Answer, frozen=True, kw_only=True):
    """The result of a verification of the audit chain.

    Attributes:
        number: number of the last verified entry. `sha256` is its digest. A client continues with these values.
        last: number of the newest entry.
        problem: first defect as a sentence, or "".
        entries: number of entries that this request verified.
        took_ms: duration of the verification in milliseconds.
        at_ns: time of the verification, in nanoseconds since 1970.
    """

    number: int
    sha256: str
    last: int
    problem: str
    entries: int
    took_ms: int
    at_ns: int
