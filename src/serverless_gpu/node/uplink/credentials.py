"""The tokens of attempts on this node: short-lived, and replaced while the server answers.

report ─▶ answer with the next token ─▶ take ─▶ every line of the attempt uses it, and its directory has it
   └─ refused ─▶ wanted ─▶ the node's next heartbeat, with the node's own token ─▶ take
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from serverless_gpu import faults

_AT_ONCE = 1_000


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
            return tuple(gang for gang, one in self._by_gang.items() if one.is_wanted)[:_AT_ONCE]

    def take(self, tokens: Mapping[str, str]) -> None:
        """Use what the server has given."""
        for gang, token in tokens.items():
            with self._lock:
                one = self._by_gang.get(gang)
            if one is not None:
                one.take(token)
