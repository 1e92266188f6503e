"""Manages the server's profile, connections, attempt tokens and clock for the uplink.

    UplinkProfile       address and token of the server: one small file, 0600, written by the uplink's starter
    UplinkServer        connections with the node's session and with tokens of attempts; all follow the profile
    Credentials         tokens of attempts: short-lived, replaced while the server answers
    ServerTime          the server's clock; the node's own wall clock is not used

The uplink reads the profile again whenever the server does not answer. A server that restarts with another port or
token rewrites the profile. Every connection uses the values of the current profile.

    report ─▶ answer with the next token ─▶ take ─▶ used by every connection of the attempt, stored in its directory
       └─ refused ─▶ wanted ─▶ the node's next heartbeat, with the node's own token ─▶ take
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from serverless_gpu import faults
from serverless_gpu.ambient import Clock
from serverless_gpu.errors import InvalidValue
from serverless_gpu.json_codec import from_json
from serverless_gpu.node.uplink.node_key_file import NodeKeyFile
from serverless_gpu.node.uplink.node_session import NodeSession
from serverless_gpu.wire.agents import ClockReading
from serverless_gpu.wire.connection import Connection


class UplinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Address and token of a server for this node."""

    url: str
    token: str  # The node's agent token.
    ca: str = ""  # File with trusted certificates; "" for the system's certificates.
    name: str = ""  # Name of the node; "" for the host name.
    pool: str = ""  # The pool that the node requests; "" lets the server choose.
    upload_s: float = 3600.0  # Seconds for which the uplink tries to send outputs while the server answers.


def read_profile(path: Path) -> UplinkProfile:
    """Return the server profile in a file. Raises InvalidValue."""
    try:
        return from_json(path.read_bytes(), UplinkProfile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{path} is not a valid server profile: {error}") from None


def write_profile(path: Path, profile: UplinkProfile) -> None:
    """Write a server profile that only this user can read. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(profile))
    temporary.replace(path)


_PAUSE_S = 0.1
PAUSE_S_MAX = 5.0


class UplinkServer:
    """Connections to one server. Raises InvalidValue if the server's profile cannot be read."""

    def __init__(self, path: Path, clock: Clock, keys: NodeKeyFile) -> None:
        self.path = path  # Path of the profile.
        self._clock = clock
        self._profile = read_profile(path)
        self._answered_ns = clock.boottime_ns()
        self.credentials = Credentials()  # Tokens of the server's attempts.
        self.time = ServerTime()
        self.session = NodeSession(keys, clock, connect=self._connect, own_token=lambda: self._profile.token)

    def _connect(self) -> Connection:
        return Connection(self._profile.url, self._profile.token, ca=self._profile.ca)

    @property
    def profile(self) -> UplinkProfile:
        """Return the server's current profile."""
        return self._profile

    def line(self, token: str | Callable[[], str] = "") -> ServerConnection:
        """Return a connection that uses `token`, or the token of the node's session if `token` is ""."""
        return ServerConnection(self, token)

    def look_again(self) -> None:
        """Read the server profile again, so that all connections use the new profile."""
        # If the profile file is missing or incomplete, the uplink keeps the known profile.
        with contextlib.suppress(InvalidValue):
            self._profile = read_profile(self.path)

    def answered(self) -> None:
        """Record that the server has just answered."""
        self._answered_ns = self._clock.boottime_ns()

    def silent_s(self) -> float:
        """Return the time since the server's last answer, in seconds."""
        return (self._clock.boottime_ns() - self._answered_ns) / 1e9


class ServerConnection:
    """A connection that always uses the server's current profile.

    `token` is an attempt's token, or a function that returns the token. The value "" selects the node's session.
    """

    def __init__(self, server: UplinkServer, token: str | Callable[[], str]) -> None:
        self._server = server
        self._token = token
        self._profile = server.profile
        self._connection = self._made()

    def get(self) -> Connection:
        """Return the connection, reopened if the profile has changed. Only one thread may use a connection."""
        if self._server.profile != self._profile:
            self._connection.close()
            self._profile = self._server.profile
            self._connection = self._made()
        self._connection.renew()
        return self._connection

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _made(self) -> Connection:
        return Connection(self._profile.url, self._token or self._server.session.token, ca=self._profile.ca)


class Backoff:
    """Exponential retry pauses with jitter, so that many nodes do not retry at the same time."""

    def __init__(self) -> None:
        self._pause_s = _PAUSE_S

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s

    def reset(self) -> None:
        """Reset the backoff to short pauses."""
        self._pause_s = _PAUSE_S


_RENEWED_AT_ONCE = 1_000


class Credential:
    """The current token of one attempt.

    `keep` stores each new token for a restarted uplink.
    """

    def __init__(self, token: str, keep: Callable[[str], None]) -> None:
        self._token = token
        self._keep = keep
        self._refused = ""

    def token(self) -> str:
        """Return the current token."""
        return self._token

    def take(self, token: str) -> None:
        """Replace the token. Ignore "", which the server sends after the attempt's last token."""
        if token and token != self._token:
            self._token = token
            faults.reach("before_token_is_written")
            self._keep(token)
            faults.reach("after_token_is_written")

    def refused(self) -> None:
        """Record that the server refused the current token."""
        self._refused = self._token

    @property
    def is_wanted(self) -> bool:
        """Return True while the attempt needs another token."""
        return self._refused == self._token


class Credentials:
    """Thread-safe collection of all attempts' tokens by gang."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted = threading.Event()  # Event that requests an immediate heartbeat.
        self._by_gang: dict[str, Credential] = {}

    def add(self, gang: str, credential: Credential) -> None:
        """Add the credential of a gang."""
        with self._lock:
            self._by_gang[gang] = credential

    def of(self, gang: str) -> Credential:
        """Return the credential that `add` stored for a gang."""
        with self._lock:
            return self._by_gang[gang]

    def refused(self, gang: str) -> None:
        """Record that the server refused a gang's token, and request a heartbeat at once."""
        self.of(gang).refused()
        self.wanted.set()

    def remove(self, gang: str) -> None:
        """Remove the credential of a gang."""
        with self._lock:
            self._by_gang.pop(gang, None)

    def to_renew(self) -> tuple[str, ...]:
        """Return gangs that need another token, at most as many as one heartbeat may contain."""
        with self._lock:
            return tuple(gang for gang, one in self._by_gang.items() if one.is_wanted)[:_RENEWED_AT_ONCE]

    def take(self, tokens: Mapping[str, str]) -> None:
        """Store the new tokens that the server has sent."""
        for gang, token in tokens.items():
            with self._lock:
                one = self._by_gang.get(gang)
            if one is not None:
                one.take(token)


_MEASUREMENT_KEPT_S = 600.0
"""Maximum age of a clock estimate. Within this time, a quartz clock drifts by less than 0.1 s."""


class ServerTime:
    """Estimates the server's clock from this node's boottime.

        asked ────────▶ server says `at_ns` ────────▶ answered        boottime of this node
          └── at_ns is somewhere in between: server = boottime + K, K in [at_ns − answered, at_ns − asked] ──┘

    The estimate uses the server's fastest answer, because the fastest answer is the most precise. An answer that
    contradicts the estimate replaces the estimate, because the server's clock has changed. Any answer replaces an old
    estimate, because clocks drift. The estimate does not use this node's wall clock, which may jump.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._low_ns = self._high_ns = self._measured_ns = 0
        self._known = False

    def heard(self, at_ns: int, *, asked_ns: int, answered_ns: int) -> None:
        """Process an answer with the server's time.

        `at_ns` is the time since 1970, or 0 if the answer has no time. `asked_ns` and `answered_ns` are boottimes
        before and after the request.
        """
        if not at_ns:
            return
        low_ns, high_ns = at_ns - answered_ns, at_ns - asked_ns
        with self._lock:
            is_old = answered_ns - self._measured_ns > _MEASUREMENT_KEPT_S * 1e9
            contradicts = low_ns > self._high_ns or high_ns < self._low_ns
            if not self._known or is_old or contradicts or high_ns - low_ns <= self._high_ns - self._low_ns:
                self._low_ns, self._high_ns, self._measured_ns, self._known = low_ns, high_ns, answered_ns, True

    def wall_ns(self, boottime_ns: int) -> int | None:
        """Return the server's clock at a boottime of this node, in nanoseconds since 1970; None if unknown."""
        with self._lock:
            return boottime_ns + (self._low_ns + self._high_ns) // 2 if self._known else None

    def reading(self, clock: Clock) -> ClockReading | None:
        """Return the difference between this node's wall clock and the server's clock; None if unknown."""
        with self._lock:
            if not self._known:
                return None
            middle_ns = (self._low_ns + self._high_ns) // 2
            ahead_ns = clock.wall_ns() - clock.boottime_ns() - middle_ns
            return ClockReading(ahead_ns=ahead_ns, error_ns=(self._high_ns - self._low_ns + 1) // 2)
