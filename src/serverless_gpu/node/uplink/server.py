"""The server as this node sees it: its profile, connections, tokens of attempts, and its time.

    UplinkProfile       address and token of the server: one small file, 0600, written by the uplink's starter
    UplinkServer        connections with the node's own token and with those of attempts; all follow the profile
    Credentials         tokens of attempts: short-lived, and replaced while the server answers
    ServerTime          the server's clock; this node's own wall clock decides nothing

The uplink reads the profile again whenever the server does not answer: a server that was started again on another port,
or with another token, writes the same file, and every connection follows it.

    report ─▶ answer with the next token ─▶ take ─▶ every line of the attempt uses it, and its directory has it
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
from serverless_gpu.wire.agents import ClockReading
from serverless_gpu.wire.connection import Connection


class UplinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Address and token of a server for this node."""

    url: str
    token: str  # an agent's
    ca: str = ""  # file with certificates to trust; "" for the system's
    name: str = ""  # what the node calls itself; "" for the host name
    pool: str = ""  # the pool it asks to be in; "" leaves that to the server
    upload_s: float = 3600.0  # how long outputs are tried while the server answers


def read_profile(path: Path) -> UplinkProfile:
    """Return what the file says; raises InvalidValue."""
    try:
        return from_json(path.read_bytes(), UplinkProfile)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidValue(f"{path} does not say how the server is reached: {error}") from None


def write_profile(path: Path, profile: UplinkProfile) -> None:
    """Write the file, readable by this user alone; raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(profile))
    temporary.replace(path)


_PAUSE_S = 0.1
PAUSE_S_MAX = 5.0


class UplinkServer:
    """One server; raises InvalidValue when its profile cannot be read."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path  # of the profile
        self._clock = clock
        self._profile = read_profile(path)
        self._answered_ns = clock.boottime_ns()
        self.credentials = Credentials()  # tokens of attempts
        self.time = ServerTime()

    @property
    def profile(self) -> UplinkProfile:
        """Return how the server is reached."""
        return self._profile

    def line(self, token: str | Callable[[], str] = "") -> ServerConnection:
        """Return a line to it, with the node's own token where none is given."""
        return ServerConnection(self, token)

    def look_again(self) -> None:
        """Read the profile again; all connections follow it."""
        with contextlib.suppress(InvalidValue):  # gone, or being written: keep the known one
            self._profile = read_profile(self.path)

    def answered(self) -> None:
        """Note that it has answered just now."""
        self._answered_ns = self._clock.boottime_ns()

    def silent_s(self) -> float:
        """Return for how long it has not answered anything, in seconds."""
        return (self._clock.boottime_ns() - self._answered_ns) / 1e9


class ServerConnection:
    """A connection that always leads to where the profile says.

    `token` is an attempt's, or returns its current one; "" for the node's own.
    """

    def __init__(self, server: UplinkServer, token: str | Callable[[], str]) -> None:
        self._server = server
        self._token = token
        self._profile = server.profile
        self._connection = self._made()

    def get(self) -> Connection:
        """Return the connection; it may be another one than before. One thread uses a line."""
        if self._server.profile != self._profile:
            self._connection.close()
            self._profile = self._server.profile
            self._connection = self._made()
        self._connection.renew()
        return self._connection

    def close(self) -> None:
        """Close it."""
        self._connection.close()

    def _made(self) -> Connection:
        return Connection(self._profile.url, self._token or self._profile.token, ca=self._profile.ca)


class Backoff:
    """Longer and longer pauses, each of them a little random so that many do not come at once."""

    def __init__(self) -> None:
        self._pause_s = _PAUSE_S

    def next_s(self) -> float:
        """Return how long to wait now, in seconds."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s

    def reset(self) -> None:
        """Begin with short pauses again."""
        self._pause_s = _PAUSE_S


_RENEWED_AT_ONCE = 1_000


class Credential:
    """The current token of one attempt; `keep` writes the next one down, for a restarted uplink."""

    def __init__(self, token: str, keep: Callable[[str], None]) -> None:
        self._token = token
        self._keep = keep
        self._refused = ""

    def token(self) -> str:
        """Return the token."""
        return self._token

    def take(self, token: str) -> None:
        """Replace the token; "" means that it has ended."""
        if token and token != self._token:
            self._token = token
            faults.reach("before_token_is_written")
            self._keep(token)
            faults.reach("after_token_is_written")

    def refused(self) -> None:
        """Note that the server does not take it any more."""
        self._refused = self._token

    @property
    def is_wanted(self) -> bool:
        """Return whether another one is wanted."""
        return self._refused == self._token


class Credentials:
    """The tokens of all attempts, by gang; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted = threading.Event()  # set when a heartbeat should not wait for its time
        self._by_gang: dict[str, Credential] = {}

    def add(self, gang: str, credential: Credential) -> None:
        """Have one."""
        with self._lock:
            self._by_gang[gang] = credential

    def of(self, gang: str) -> Credential:
        """Return that of an attempt which is looked after."""
        with self._lock:
            return self._by_gang[gang]

    def refused(self, gang: str) -> None:
        """Note that the server does not take a token any more, and have that said soon."""
        self.of(gang).refused()
        self.wanted.set()

    def remove(self, gang: str) -> None:
        """Have it no more."""
        with self._lock:
            self._by_gang.pop(gang, None)

    def to_renew(self) -> tuple[str, ...]:
        """Return the gangs that want another token; the others come next time where there are too many."""
        with self._lock:
            return tuple(gang for gang, one in self._by_gang.items() if one.is_wanted)[:_RENEWED_AT_ONCE]

    def take(self, tokens: Mapping[str, str]) -> None:
        """Use what the server has given."""
        for gang, token in tokens.items():
            with self._lock:
                one = self._by_gang.get(gang)
            if one is not None:
                one.take(token)


_MEASUREMENT_KEPT_S = 600.0
"""Quartz drifts by 0.1 s a quarter of an hour at worst."""


class ServerTime:
    """The server's clock, told by this node's boottime.

        asked ────────▶ server says `at_ns` ────────▶ answered        boottime of this node
          └── at_ns is somewhere in between: server = boottime + K, K in [at_ns − answered, at_ns − asked] ──┘

    The fastest answer is kept, as the most precise. One that contradicts it shows that the server's clock was set, and
    replaces it; so does any other once it is old, for clocks drift. This node's wall clock may jump: it plays no part.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._low_ns = self._high_ns = self._measured_ns = 0
        self._known = False

    def heard(self, at_ns: int, *, asked_ns: int, answered_ns: int) -> None:
        """Take an answer with the server's time (1970; 0: none) and boottimes before and after the request."""
        if not at_ns:
            return
        low_ns, high_ns = at_ns - answered_ns, at_ns - asked_ns
        with self._lock:
            is_old = answered_ns - self._measured_ns > _MEASUREMENT_KEPT_S * 1e9
            contradicts = low_ns > self._high_ns or high_ns < self._low_ns
            if not self._known or is_old or contradicts or high_ns - low_ns <= self._high_ns - self._low_ns:
                self._low_ns, self._high_ns, self._measured_ns, self._known = low_ns, high_ns, answered_ns, True

    def wall_ns(self, boottime_ns: int) -> int | None:
        """Return the server's clock at a boottime of this node, nanoseconds since 1970; None if unknown."""
        with self._lock:
            return boottime_ns + (self._low_ns + self._high_ns) // 2 if self._known else None

    def reading(self, clock: Clock) -> ClockReading | None:
        """Return how far this node's wall clock is from the server's now; None if that is not known."""
        with self._lock:
            if not self._known:
                return None
            middle_ns = (self._low_ns + self._high_ns) // 2
            ahead_ns = clock.wall_ns() - clock.boottime_ns() - middle_ns
            return ClockReading(ahead_ns=ahead_ns, error_ns=(self._high_ns - self._low_ns + 1) // 2)
