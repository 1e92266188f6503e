"""Signs users in through an identity provider, and links accounts with users.

    account (issuer + subject) ─▶ linked with a user? ─ yes ─▶ role and teams of its groups ─▶ session
                                       └ no ─▶ `oidc_create` and a free name? ─ yes ─▶ new user ─▶ session
                                                      └ no ─▶ ticket: a signed-in user confirms the link

A link never depends on a name or an e-mail address, because these can change or belong to someone else later. An
account whose name is taken by another user therefore receives a ticket. The user signs in in another way, sees the
account, and confirms. Tickets are in memory for ten minutes.

The mapping of groups applies at each sign-in. It changes only the teams that it names. It never demotes the only
administrator.

Failure cases:
* A disabled user cannot sign in.
* Removing an account at the provider ends no session and no token here. Disable the user here, too.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import sqlalchemy as sa

from serverless_gpu.ambient import Clock, new_run_id
from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, NotFound
from serverless_gpu.json_codec import from_json
from serverless_gpu.lazy_import import load
from serverless_gpu.model.access_control import covers
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, writing
from serverless_gpu.server.identity import provider_accounts
from serverless_gpu.server.identity.bootstrap import NODE
from serverless_gpu.server.identity.login_state import LoginState
from serverless_gpu.server.identity.principal_service import PrincipalService, check_unscoped
from serverless_gpu.server.identity.provider_accounts import Account
from serverless_gpu.server.records import audit, credentials, principals
from serverless_gpu.server.records.audit import SERVER, Action
from serverless_gpu.wire.access import PrincipalChange, PrincipalRequest, PrincipalView
from serverless_gpu.wire.sign_in import IdentityView, LinkRequest

if TYPE_CHECKING:
    from serverless_gpu.server.identity.oidc_provider import OidcProvider

TICKETS_MAX = 1_000
TICKET_S = 600.0
_CODE_BYTES = 32
_log = logging.getLogger(__name__)


class SignInResult(NamedTuple):
    """The outcome of a verified sign-in: a user, or a ticket to link the account with a user.

    Attributes:
        principal: the user, or "".
        ticket: secret of the ticket, or "".
        reason: why the account has no user; "" with a user.
    """

    principal: str = ""
    ticket: str = ""
    reason: str = ""


class _Ticket(NamedTuple):
    account: Account
    until_ns: int  # Boottime.


class OidcService:
    """Maps accounts at an identity provider to users. Thread-safe."""

    def __init__(
        self, *, settings: Settings, clock: Clock, database: Transactions, principals: PrincipalService
    ) -> None:
        self.settings = settings.oidc
        self._clock = clock
        self._database = database
        self._principals = principals
        self._lock = threading.Lock()
        self._tickets: OrderedDict[str, _Ticket] = OrderedDict()
        self._provider: OidcProvider | None = None
        if settings.oidc is not None:
            # Authlib takes 150 ms to import, which only servers with a provider need.
            module = load("serverless_gpu.server.identity.oidc_provider")
            self._provider = module.OidcProvider(settings.oidc, clock=clock)

    @property
    def provider(self) -> OidcProvider:
        """Return the identity provider. Raises `NotFound` without a provider."""
        if self._provider is None:
            raise NotFound("this server has no identity provider")
        return self._provider

    def start(self, *, to: str, links: bool, redirect: str) -> tuple[str, bytes]:
        """Return the provider's address for a sign-in, and the state of the sign-in for a cookie.

        Args:
            to: path of the page to open afterwards.
            links: True to link the account with an existing user, instead of creating a user.
            redirect: address of this server's callback.
        """
        provider = self.provider
        login = LoginState.random(to=to, links=links, now_ns=self._clock.wall_ns())
        return provider.authorization_url(login, redirect=redirect), msgspec.json.encode(login)

    def finish(
        self, cookie: bytes, *, code: str, state: str, issuer: str, error: tuple[str, str], redirect: str
    ) -> tuple[str, SignInResult]:
        """Return the page to open and the user of the provider's answer.

        Args:
            cookie: state of the sign-in from the cookie.
            code: authorization code of the answer.
            state: state of the answer.
            issuer: issuer of the answer, or "".
            error: error code of the answer and its description, both "" on success.
            redirect: address of this server's callback, as at the beginning.
        """
        provider = self.provider
        try:
            login = from_json(cookie, LoginState)
        except msgspec.MsgspecError:
            raise NotAuthenticated("the sign-in did not begin in this browser", hint="begin again") from None
        if error[0]:
            shown = "".join(filter(str.isprintable, error[1] or error[0]))[:200]
            raise NotAllowed(f"the identity provider refused the sign-in: {shown}", hint="begin again")
        account = provider.account(login, code=code, state=state, issuer=issuer, redirect=redirect)
        return login.to, self.sign_in(account, links=login.links)

    def sign_in(self, account: Account, *, links: bool) -> SignInResult:
        """Return the user of a verified account.

        Args:
            account: the verified account.
            links: True if the browser's user wants to link the account with an existing user.

        Raises:
            NotAllowed: the account's groups may not sign in.
        """
        settings = self.settings
        assert settings is not None
        role = provider_accounts.role_of(settings, account.groups)
        issuer, subject = account.issuer, account.subject
        if self._database.read(lambda connection: credentials.identity(connection, issuer, subject)) is None:
            if links or not settings.create:
                return SignInResult(ticket=self._ticket(account), reason="is not linked with a user of this server")
            reason = self._create(account, role or settings.role or "viewer")
            if reason:
                return SignInResult(ticket=self._ticket(account), reason=reason)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> PrincipalView:
            there = credentials.identity(connection, account.issuer, account.subject)
            if there is None:
                raise NotAuthenticated("someone has just removed the link of this account", hint="begin again")
            credentials.note_identity_use(connection, there.id, shown=account.shown, now_ns=now_ns)
            return principals.principal(connection, there.principal)

        user = self._database.write(work)
        if not user.disabled:
            self._apply_groups(account, user, role)
        return SignInResult(principal=user.name)

    def account_of(self, ticket: str) -> Account:
        """Return the account of a ticket, which stays valid."""
        with self._lock:
            found = self._tickets.get(_digest(ticket))
        if found is None or found.until_ns < self._clock.boottime_ns():
            raise NotFound("this sign-in has expired", hint="begin again with the identity provider")
        return found.account

    def link(self, who: Caller, ticket: str) -> IdentityView:
        """Link the account of a ticket with the caller."""
        check_unscoped(who)
        if who.kind != "user":
            raise NotAllowed(f"{who.name} is no user", hint="services use tokens")
        account = self.account_of(ticket)
        now_ns = self._clock.wall_ns()
        made = _identity(account, who.name, now_ns)

        def work(connection: sa.Connection) -> None:
            credentials.add_identity(connection, made)
            _record(connection, who, Action.IDENTITY_LINK, made, now_ns)

        self._database.write(work)
        with self._lock:
            self._tickets.pop(_digest(ticket), None)
        return made

    def unlink(self, who: Caller, identifier: str, *, reach: str) -> IdentityView:
        """Remove the link of an account with its user, and end the user's sessions that began with a provider."""
        check_unscoped(who)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> IdentityView:
            found = credentials.identity_by_id(connection, identifier)
            if not covers(reach, name=who.name, teams=(), owner=found.principal):
                raise NotFound(f"there is no identity {identifier[:64]!r}")
            credentials.remove_identity(connection, identifier)
            for session in principals.sessions_of(connection, found.principal, now_ns=now_ns):
                if session.origin.method == "provider" and session.id != who.token_id:
                    principals.revoke_token(connection, session.id, now_ns=now_ns)
            _record(connection, who, Action.IDENTITY_UNLINK, found, now_ns)
            return found

        return self._database.write(work)

    def _create(self, account: Account, role: str) -> str:
        """Create the user of an account, or return why the server cannot create a user."""
        name, now_ns = account.name, self._clock.wall_ns()
        if not name or name in (*principals.RESERVED, NODE):
            return "has no name that this server accepts"
        made = _identity(account, name, now_ns)

        def work(connection: sa.Connection) -> str:
            if any(one.name == name for one in principals.all_principals(connection)):
                return f"has the name {name}, which belongs to another user of this server"
            request = PrincipalRequest(name=name, role=role)  # type: ignore[arg-type] # from the settings
            principals.create_principal(connection, request, now_ns=now_ns)
            detail = {"kind": "user", "role": role, "by": "identity provider"}
            audit.record(connection, who=SERVER, action=Action.USER_CREATE, subject=name, now_ns=now_ns, detail=detail)
            credentials.add_identity(connection, made)
            _record(connection, SERVER, Action.IDENTITY_LINK, made, now_ns)
            return ""

        return self._database.write(work)

    def _apply_groups(self, account: Account, user: PrincipalView, role: str | None) -> None:
        """Change the role and the teams of a user as the provider's groups demand."""
        settings = self.settings
        assert settings is not None
        if role is not None and role != user.role:
            change = PrincipalChange(role=role)  # type: ignore[arg-type] # from the settings
            try:
                self._principals.change(SERVER, user.name, change)
            except InvalidValue as error:  # The user is the only administrator.
                _log.warning("the role of %s stays %s: %s", user.name, user.role, error.message)
        changes = provider_accounts.team_changes(settings, account.groups, user.teams)
        there = self._database.read(principals.all_teams) if changes.join else ()
        for team in changes.join:
            if all(one.name != team for one in there):
                self._principals.make_team(SERVER, team)
            self._principals.set_member(SERVER, team=team, principal=user.name, member=True)
        for team in changes.leave:
            self._principals.set_member(SERVER, team=team, principal=user.name, member=False)

    def _ticket(self, account: Account) -> str:
        code = secrets.token_urlsafe(_CODE_BYTES)
        with self._lock:
            self._tickets[_digest(code)] = _Ticket(account, self._clock.boottime_ns() + round(TICKET_S * 1e9))
            while len(self._tickets) > TICKETS_MAX:
                self._tickets.popitem(last=False)
        return code


def _identity(account: Account, principal: str, now_ns: int) -> IdentityView:
    return IdentityView(
        id=new_run_id(),
        principal=principal,
        issuer=account.issuer,
        subject=account.subject,
        shown=account.shown,
        created_ns=now_ns,
        used_ns=None,
    )


def _record(connection: sa.Connection, who: Caller, action: Action, identity: IdentityView, now_ns: int) -> None:
    detail = {"issuer": identity.issuer, "subject": identity.subject, "shown": identity.shown}
    audit.record(connection, who=who, action=action, subject=identity.principal, now_ns=now_ns, detail=detail)


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


routes = Routes("identities")


@routes.post("/identities", needs=writing("tokens"))
def link_identity(call: Call, oidc: OidcService, body: LinkRequest) -> IdentityView:
    """Link a verified account at the identity provider with the caller."""
    return oidc.link(call.who, body.ticket)


@routes.delete("/identities/{identity}", needs=writing("tokens"))
def unlink_identity(call: Call, oidc: OidcService, identity: str) -> IdentityView:
    """Remove the link of an account at the identity provider with its user."""
    return oidc.unlink(call.who, identity, reach=call.reach)
