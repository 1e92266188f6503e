"""Lets a signed-in user approve the login of a terminal, as RFC 8628 describes.

    terminal ─ POST /device/codes ─▶ device code (secret) and user code (for display)
    browser  ─ /ui/device: enters the user code, sees host, address and time ─▶ approve
    terminal ─ POST /device/token, every 2 s ─▶ pending … pending ─▶ approved, with a new token of the user

The codes are in memory for ten minutes, so that callers without a token cannot write to the database. A terminal whose
code the server has forgotten, for example at a restart, asks for another code.

Failure cases:
* The server tells a terminal that polls too often to slow down.
* A terminal that misses an answer receives the same token again, until the code expires.
* A caller that guesses user codes reaches a rate limit. There are 25 billion codes, and at most a thousand are valid.
* The host name is what the terminal says. The page shows the terminal's address too, and names what approval permits.
"""

from __future__ import annotations

import hashlib
import secrets
import threading

import sqlalchemy as sa

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import NotAllowed, NotFound, ServerlessGpuError, TooManyRequests, UsageError
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.db.database import Transactions
from serverless_gpu.server.http.routing import PUBLIC, Call, Routes, writing
from serverless_gpu.server.identity.principal_service import check_unscoped, create_audited_token
from serverless_gpu.server.identity.rate_limiter import Rate, RateLimiter, network_of
from serverless_gpu.server.records import audit, principals
from serverless_gpu.server.records.audit import Action
from serverless_gpu.server.records.principals import NewToken
from serverless_gpu.wire.access import TokenMade
from serverless_gpu.wire.sign_in import (
    DeviceAnswer,
    DeviceCode,
    DeviceCodeRequest,
    DeviceDecision,
    DevicePoll,
    DeviceRequestView,
    DeviceState,
)

CODE_S = 600.0
"""Seconds for which codes are valid."""
INTERVAL_S = 2.0
"""Minimum seconds between two polls of a terminal."""
SLOWER_S = 5.0
"""Seconds by which the interval grows after a poll that was too early."""
REQUESTS_MAX = 1_000
PER_ADDRESS = Rate(20, 600.0)
"""Codes for one address."""
POLLS = Rate(600, 600.0)
"""Polls with unknown codes from one address."""
PER_CALLER = Rate(20, 300.0)
"""User codes that one caller may look up."""
BODY_BYTES_MAX = 4 << 10
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"
"""Letters of user codes: no vowels, so that no words appear (RFC 8628, section 6.1)."""
_CODE_LETTERS = 8
_DEVICE_BYTES = 32


class _Login:
    """The login of one terminal."""

    def __init__(self, view: DeviceRequestView, until_ns: int) -> None:
        self.view = view
        self.until_ns = until_ns  # Boottime.
        self.state: DeviceState = "pending"
        self.interval_s = INTERVAL_S
        self.polled_ns: int | None = None
        self.approver: Caller | None = None
        self.is_claimed = False
        self.made: TokenMade | None = None


class DeviceService:
    """Keeps the logins of terminals that wait for approval. Thread-safe."""

    def __init__(self, *, settings: Settings, clock: Clock, database: Transactions) -> None:
        self._has_pages = settings.ui
        self._clock = clock
        self._database = database
        self._lock = threading.Lock()
        self._logins: dict[str, _Login] = {}  # By the digest of the device code, oldest first.
        self._addresses = RateLimiter(PER_ADDRESS, clock=clock)
        self._polls = RateLimiter(POLLS, clock=clock)
        self._callers = RateLimiter(PER_CALLER, clock=clock)

    def start(self, request: DeviceCodeRequest, *, address: str) -> DeviceCode:
        """Return codes for a terminal's login."""
        if not self._has_pages:
            raise NotFound("this server has no web pages", hint="log in with a token")
        self._addresses.take(network_of(address))
        device_code, now_ns = secrets.token_urlsafe(_DEVICE_BYTES), self._clock.boottime_ns()
        wall_ns, valid_ns = self._clock.wall_ns(), round(CODE_S * 1e9)
        with self._lock:
            self._forget(now_ns)
            if len(self._logins) >= REQUESTS_MAX:
                raise TooManyRequests("too many terminals wait for approval", hint="try again in a few minutes")
            taken = {login.view.user_code for login in self._logins.values()}
            user_code = next(code for code in iter(_new_user_code, "") if code not in taken)
            view = DeviceRequestView(
                user_code=user_code,
                host="".join(filter(str.isprintable, request.host)),
                address=address,
                created_ns=wall_ns,
                expires_ns=wall_ns + valid_ns,
                state="pending",
            )
            self._logins[_digest(device_code)] = _Login(view, now_ns + valid_ns)
        return DeviceCode(
            device_code=device_code,
            user_code=user_code,
            path="/ui/device",
            expires_s=CODE_S,
            interval_s=INTERVAL_S,
        )

    def poll(self, device_code: str, *, address: str) -> DeviceAnswer:
        """Return the state of a login, with the token after the approval."""
        now_ns = self._clock.boottime_ns()
        with self._lock:
            login = self._logins.get(_digest(device_code))
            if login is None or login.until_ns <= now_ns:
                self._polls.take(network_of(address))
                return DeviceAnswer(state="expired")
            is_early = login.polled_ns is not None and now_ns - login.polled_ns < 0.5 * login.interval_s * 1e9
            login.polled_ns = now_ns
            if login.made is not None:
                return DeviceAnswer(state="approved", made=login.made)
            if login.state == "pending" and is_early:
                login.interval_s += SLOWER_S
                return DeviceAnswer(state="slow_down", interval_s=login.interval_s)
            if login.state != "approved" or login.is_claimed:
                state: DeviceState = "pending" if login.state == "approved" else login.state
                return DeviceAnswer(state=state, interval_s=login.interval_s)
            login.is_claimed = True
        return self._claim(login)

    def find(self, who: Caller, user_code: str) -> DeviceRequestView:
        """Return the terminal that displays a user code."""
        return self._login(who, user_code).view

    def decide(self, who: Caller, user_code: str, *, approve: bool) -> DeviceRequestView:
        """Approve or refuse a terminal's login."""
        check_unscoped(who)
        if who.kind != "user":
            raise NotAllowed(f"{who.name} is no user", hint="log in with a token: `sgpu login --token-file`")
        login = self._login(who, user_code)
        state: DeviceState = "approved" if approve else "refused"
        with self._lock:
            if login.state != "pending":
                raise NotFound("someone has already decided about this code", hint="run `sgpu login` again")
            login.state, login.approver = state, who
            login.view = _decided(login.view, state)
        if not approve:
            detail = {"host": login.view.host, "address": login.view.address}
            now_ns = self._clock.wall_ns()
            self._database.write(
                lambda connection: audit.record(
                    connection,
                    who=who,
                    action=Action.DEVICE_REFUSE,
                    subject=login.view.user_code,
                    now_ns=now_ns,
                    detail=detail,
                )
            )
        return login.view

    def _login(self, who: Caller, user_code: str) -> _Login:
        self._callers.take(who.name)
        wanted = format_user_code(user_code)
        with self._lock:
            self._forget(self._clock.boottime_ns())
            found = next((login for login in self._logins.values() if login.view.user_code == wanted), None)
        if found is None:
            raise NotFound(
                "no terminal waits with this code", hint="compare the code with the terminal, or run `sgpu login` again"
            )
        self._callers.give_back(who.name)
        return found

    def _claim(self, login: _Login) -> DeviceAnswer:
        """Create the token of an approved login."""
        who = login.approver
        assert who is not None
        secret, now_ns = principals.new_secret(), self._clock.wall_ns()
        host = login.view.host or login.view.address
        new = NewToken(principal=who.name, label=f"sgpu login on {host}")

        def work(connection: sa.Connection) -> TokenMade:
            return create_audited_token(connection, who, new, secret=secret, now_ns=now_ns)

        try:
            made = self._database.write(work)
        except UsageError:  # An administrator has disabled or deleted the approver.
            with self._lock:
                login.state = "refused"
            return DeviceAnswer(state="refused")
        except ServerlessGpuError:
            with self._lock:
                login.is_claimed = False  # The next poll tries again.
            raise
        with self._lock:
            login.made = made
        return DeviceAnswer(state="approved", made=made)

    def _forget(self, now_ns: int) -> None:
        for key in [key for key, login in self._logins.items() if login.until_ns <= now_ns]:
            del self._logins[key]


def format_user_code(text: str) -> str:
    """Return a typed user code as the terminal displays it, such as "BCDF-GHJK"."""
    letters = "".join(letter for letter in text.upper() if letter in _LETTERS)[:_CODE_LETTERS]
    return f"{letters[:4]}-{letters[4:]}"


def _new_user_code() -> str:
    return format_user_code("".join(secrets.choice(_LETTERS) for _ in range(_CODE_LETTERS)))


def _decided(view: DeviceRequestView, state: DeviceState) -> DeviceRequestView:
    return DeviceRequestView(
        user_code=view.user_code,
        host=view.host,
        address=view.address,
        created_ns=view.created_ns,
        expires_ns=view.expires_ns,
        state=state,
    )


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()


routes = Routes("device")


@routes.post("/device/codes", needs=PUBLIC, limit=BODY_BYTES_MAX)
def start_login(call: Call, devices: DeviceService, body: DeviceCodeRequest) -> DeviceCode:
    """Return a code with which a user approves a terminal's login."""
    return devices.start(body, address=call.address)


@routes.post("/device/token", needs=PUBLIC, limit=BODY_BYTES_MAX)
def poll_login(call: Call, devices: DeviceService, body: DevicePoll) -> DeviceAnswer:
    """Return the state of a terminal's login, with a token after a user has approved the login."""
    return devices.poll(body.device_code, address=call.address)


@routes.get("/device/requests/{code}", needs=writing("tokens"))
def show_login(call: Call, devices: DeviceService, code: str) -> DeviceRequestView:
    """Return the terminal that waits with a user code."""
    return devices.find(call.who, code)


@routes.post("/device/requests/{code}", needs=writing("tokens"), limit=BODY_BYTES_MAX)
def decide_login(call: Call, devices: DeviceService, code: str, body: DeviceDecision) -> DeviceRequestView:
    """Approve or refuse a terminal's login. The terminal receives a token of the caller."""
    return devices.decide(call.who, code, approve=body.approve)
