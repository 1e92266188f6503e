"""Signs users in with passwords, on a server without an identity provider.

    sgpu user password NAME            the user or an administrator sets a password
    sgpu user password NAME --link     a one-time link with which the user sets the password, valid for a day

The database contains Argon2id hashes. An unknown user and a wrong password take the same time and have the same
answer. Each user name and each address has a limited number of wrong attempts. A limited number of threads compute
hashes, because each hash needs 64 MiB.

Failure cases:
* After ten wrong passwords of a user, further attempts fail until the limit refills. Other ways to sign in still work.
* A changed password ends the other sessions of the user. Tokens stay valid.
* With an identity provider, no user can sign in with a password. Stored passwords stay in the database.
"""

from __future__ import annotations

import functools
import secrets
import threading

import sqlalchemy as sa
from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerifyMismatchError

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, NotFound, TooManyRequests
from serverless_gpu.model.access_control import AccessReach, covers
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import Call, Routes, reading, writing
from serverless_gpu.server.identity.principal_service import check_unscoped
from serverless_gpu.server.identity.rate_limiter import Rate, RateLimiter, network_of
from serverless_gpu.server.records import audit, credentials, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.wire.access import SignInLink
from serverless_gpu.wire.sign_in import PASSWORD_CHARACTERS_MIN, PasswordRequest, PasswordView

RESET_S = 86_400.0
"""Seconds for which a link to set a password is valid."""
PER_USER = Rate(10, 900.0)
PER_ADDRESS = Rate(30, 900.0)
HASHING_MAX = 2
"""Maximum number of concurrent hash computations."""
HASHING_S = 10.0
"""Seconds for which a request waits for a computation."""
_WRONG = "the name or the password is wrong"
_CODE_BYTES = 32


class PasswordService:
    """Verifies and changes passwords. Thread-safe."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions) -> None:
        self._is_on = settings.oidc is None
        self._clock = clock
        self._database = database
        self._hasher = PasswordHasher()
        self._hashing = threading.BoundedSemaphore(HASHING_MAX)
        self._users = RateLimiter(PER_USER, clock=clock)
        self._addresses = RateLimiter(PER_ADDRESS, clock=clock)

    @property
    def is_on(self) -> bool:
        """Return True if users can sign in with passwords."""
        return self._is_on

    def has_passwords(self) -> bool:
        """Return True if at least one user can sign in with a password."""
        return self._is_on and self._database.read(credentials.has_passwords)

    def authenticate(self, name: str, password: str, *, address: str) -> str:
        """Return the name of the user with a name and a password.

        Raises:
            NotAuthenticated: the name or the password is wrong.
            TooManyRequests: too many attempts for the name or from the address.
        """
        self._check_on()
        name = name.strip().lower()[:64]
        keys = ((self._users, name), (self._addresses, network_of(address)))
        for limiter, key in keys:
            limiter.take(key)
        decoy = self._decoy
        stored = self._database.read(lambda connection: credentials.password(connection, name)).hash
        is_right = self._verify(stored or decoy, password) and stored is not None
        if not is_right:
            raise NotAuthenticated(_WRONG, hint="ask an administrator for a link to set a password")
        for limiter, key in keys:
            limiter.give_back(key)
        if stored is not None and self._hasher.check_needs_rehash(stored):
            self._store(name, self._hash(password))
        return name

    def change(self, who: Caller, name: str, request: PasswordRequest, *, reach: str) -> None:
        """Set a user's password, and end the user's other sessions."""
        self._check_reach(who, name, reach)
        before = self._database.read(lambda connection: credentials.password(connection, name)).hash
        if name == who.name and before is not None:
            self._users.take(name)
            if not self._verify(before, request.current):
                raise NotAllowed("the current password is wrong", hint="ask an administrator for a link")
            self._users.give_back(name)
        check_password(name, request.password)
        text = self._hash(request.password)
        self._set(who, name, text, kept=who.token_id)

    def remove(self, who: Caller, name: str, *, reach: str) -> None:
        """Delete a user's password and the link to set a password."""
        self._check_reach(who, name, reach)
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            if not credentials.remove_password(connection, name):
                raise NotFound(f"{name} has no password")
            principals.end_sessions(connection, name, kept=who.token_id, now_ns=now_ns)
            audit.record(connection, who=who, action=Action.PASSWORD_REMOVE, subject=name, now_ns=now_ns)

        self._database.write(work)

    def link(self, who: Caller, name: str, *, reach: str) -> SignInLink:
        """Return a one-time link with which a user sets a password. A new link replaces an unused link."""
        if reach != AccessReach.ALL:
            raise NotAllowed("only an administrator can create links to set passwords")
        self._check_reach(who, name, reach)
        code, now_ns = secrets.token_urlsafe(_CODE_BYTES), self._clock.wall_ns()
        until_ns = now_ns + round(RESET_S * 1e9)

        def work(connection: sa.Connection) -> None:
            credentials.set_reset(connection, name, code, until_ns=until_ns)
            audit.record(connection, who=who, action=Action.PASSWORD_RESET, subject=name, now_ns=now_ns)

        self._database.write(work)
        return SignInLink(path=f"/ui/password?code={code}", expires_ns=until_ns)

    def user_of_link(self, code: str) -> str:
        """Return the user of a link to set a password. The link stays valid."""
        self._check_on()
        now_ns = self._clock.wall_ns()
        found = self._database.read(lambda connection: credentials.principal_of_reset(connection, code, now_ns=now_ns))
        if not found:
            raise NotFound(
                "this link has expired, or someone has used it", hint="ask an administrator for another link"
            )
        return found

    def reset(self, code: str, password: str) -> str:
        """Set the password of a link's user, make the link invalid, and return the user's name."""
        name = self.user_of_link(code)
        check_password(name, password)
        text = self._hash(password)
        self.user_of_link(code)  # Another request may have used the link during the computation.
        self._set(Caller(name=name), name, text, kept="", code=code)
        return name

    def _set(self, who: Caller, name: str, text: str, *, kept: str, code: str = "") -> None:
        now_ns = self._clock.wall_ns()

        def work(connection: sa.Connection) -> None:
            if code and not credentials.principal_of_reset(connection, code, now_ns=now_ns):
                raise NotFound("someone has used this link", hint="ask an administrator for another link")
            credentials.set_password(connection, name, text, now_ns=now_ns)
            ended = principals.end_sessions(connection, name, kept=kept, now_ns=now_ns)
            detail = {"sessions_ended": len(ended)}
            audit.record(connection, who=who, action=Action.PASSWORD_SET, subject=name, now_ns=now_ns, detail=detail)

        self._database.write(work)

    def _store(self, name: str, text: str) -> None:
        now_ns = self._clock.wall_ns()
        self._database.write(lambda connection: credentials.set_password(connection, name, text, now_ns=now_ns))

    def _check_on(self) -> None:
        if not self._is_on:
            raise NotAllowed(
                "passwords are off, because the server uses an identity provider", hint="sign in with the provider"
            )

    def _check_reach(self, who: Caller, name: str, reach: str) -> None:
        self._check_on()
        check_unscoped(who)
        if not covers(reach, name=who.name, teams=(), owner=name):
            raise NotFound(f"there is no user or service {name[:64]!r}")
        found = self._database.read(lambda connection: principals.principal(connection, name))
        if found.kind != "user":
            raise InvalidValue(f"{name} is a service", hint="services use tokens: `sgpu token create --for NAME`")

    @functools.cached_property
    def _decoy(self) -> str:
        """A hash that no password matches, so that unknown users take the time of known users."""
        return self._hasher.hash(secrets.token_urlsafe(_CODE_BYTES))

    def _verify(self, text: str, password: str) -> bool:
        with _Turn(self._hashing):
            try:
                return self._hasher.verify(text, password)
            except (VerifyMismatchError, InvalidHashError):
                return False

    def _hash(self, password: str) -> str:
        with _Turn(self._hashing):
            return self._hasher.hash(password)


class _Turn:
    """Waits for a free computation, at most `HASHING_S` seconds."""

    def __init__(self, semaphore: threading.BoundedSemaphore) -> None:
        self._semaphore = semaphore

    def __enter__(self) -> None:
        if not self._semaphore.acquire(timeout=HASHING_S):
            raise TooManyRequests("too many users sign in at this moment", hint="try again in a few seconds")

    def __exit__(self, *_error: object) -> None:
        self._semaphore.release()


def check_password(name: str, password: str) -> None:
    """Refuse a password that is too short or too easy to guess."""
    if len(password) < PASSWORD_CHARACTERS_MIN:
        raise InvalidValue(f"a password has at least {PASSWORD_CHARACTERS_MIN} characters", hint="use several words")
    rest = password.lower().replace(name, "")
    if len(set(password)) < 5 or len(rest) < PASSWORD_CHARACTERS_MIN // 2:
        raise InvalidValue("this password is easy to guess", hint="use several words without your name")


routes = Routes("passwords")


@routes.get("/users/{name}/password", needs=reading("tokens"))
def show_password(call: Call, database: Transactions, name: str) -> PasswordView:
    """Return if a user has a password."""
    if not covers(call.reach, name=call.who.name, teams=(), owner=name):
        raise NotFound(f"there is no user or service {name[:64]!r}")
    found = database.read(lambda connection: credentials.password(connection, name))
    return PasswordView(is_set=found.hash is not None, changed_ns=found.changed_ns)


@routes.put("/users/{name}/password", needs=writing("tokens"))
def set_password(call: Call, passwords: PasswordService, name: str, body: PasswordRequest) -> None:
    """Set the password of the caller, or of another user with access to all tokens."""
    passwords.change(call.who, name, body, reach=call.reach)


@routes.delete("/users/{name}/password", needs=writing("tokens"))
def remove_password(call: Call, passwords: PasswordService, name: str) -> None:
    """Delete a user's password and the link to set a password."""
    passwords.remove(call.who, name, reach=call.reach)


@routes.post("/users/{name}/password-links", needs=writing("tokens"))
def make_password_link(call: Call, passwords: PasswordService, name: str) -> SignInLink:
    """Return a one-time link with which a user sets a password."""
    return passwords.link(call.who, name, reach=call.reach)
