"""Applies the network policy of this node's pool.

    order, heartbeat ─▶ NodeEgress ─▶ root: `machine_egress.py`, or the spawner's process ─▶ rules of the machine

Before its first policy, a node tries the rules.

Failure cases: If `nft` is missing or fails, a pool whose mode is `pool` or `none` starts no run on the node. In the
mode `open`, runs start without rules. The node reports the missing rules.

A build reaches the index proxy of the server and nothing else (`NodeEgress.confined_build`). If the node is killed
during a build, the uid of the build stays closed until the next build with the same uid has ended.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.egress import OPEN, EgressPolicy, digest_of
from serverless_gpu.node.isolation import SPAWNER, nft
from serverless_gpu.node.isolation.principals import ranges_of

_PORTS = {"http": 80, "https": 443}


class EgressState(NamedTuple):
    """Result of a trial of the network rules.

    `problem` is the reason why the machine cannot enforce a network policy, or "".
    """

    problem: str
    is_loaded: bool  # True if the machine already has rules.


class EgressVerbs(Protocol):
    """The verbs of the node's spawner that network policies need."""

    def measure_egress(self) -> EgressState:
        """Try the network rules in a network namespace of its own."""

    def enforce(self, home: Path, policy: EgressPolicy | None, *, refresh: bool = False) -> str:
        """Load the network rules for the policy of the node, or remove the policy. Return a note for the log."""

    def confine(self, home: Path, uid: int, *, confined: bool) -> None:
        """Close everything but the index proxy for the uid of a build, or open it again."""


class NodeEgress:
    """Keeps the network rules for one node. Thread-safe.

    `server_url` returns the address of the node's server, which the rules close.
    """

    def __init__(
        self,
        home: Path,
        environ: Mapping[str, str],
        clock: Clock,
        verbs: EgressVerbs,
        *,
        server_url: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        # Reason why the node cannot enforce a policy, or "". The trial waits for the first policy.
        self.problem = _problem(environ)
        self._is_tried = False
        self.digest = ""  # Digest of the applied policy.
        self._home = home
        self._environ = environ
        self._clock = clock
        self._verbs = verbs
        self._server_url = server_url
        self._say = say
        self._lock = threading.Lock()
        self._policy: EgressPolicy | None = None
        self._applied_ns = 0
        self._said = ""

    @contextlib.contextmanager
    def confined_build(self, uid: int) -> Iterator[None]:
        """Let a uid reach the index proxy of the server and nothing else, until the end of the context.

        The uid must be one of the range for principals. Start the build within the context, and end all of its
        processes before the end of the context. Raises IsolationUnavailable.
        """
        if not any(first <= uid <= last for first, last in ranges_of(self._environ)):
            raise IsolationUnavailable(f"the uid {uid} of a build is not one of the node's range for principals")
        if self._policy is None or not self._policy.index_proxy:
            raise IsolationUnavailable(
                "the node knows no index proxy for builds",
                hint="start the server with --index-proxy, and give the node's pool an isolation level",
            )
        self._confine(uid, confined=True)
        try:
            yield
        finally:
            self._confine(uid, confined=False)

    def require(self, policy: EgressPolicy) -> str:
        """Apply a policy before an attempt starts.

        Return "", or the reason why an attempt in the mode `open` starts without rules. Raises IsolationUnavailable if
        the node cannot apply a strict policy.
        """
        try:
            self._apply(policy)
        except IsolationUnavailable as error:
            if policy.mode != OPEN:
                raise
            self._complain(str(error))
            return error.message
        return ""

    def offer(self, policy: EgressPolicy, *, asked_ns: int) -> None:
        """Apply a policy from a heartbeat's answer, unless the node has applied a policy since the request."""
        if asked_ns < self._applied_ns:
            return
        try:
            self._apply(policy)
        except IsolationUnavailable as error:
            self._complain(str(error))

    def refresh(self) -> None:
        """Resolve the names of the current policy again, and restore rules that another program has removed."""
        if self._policy is None:
            return
        try:
            with self._lock:
                self._enforce(refresh=True)
        except IsolationUnavailable as error:
            self._complain(str(error))

    def leave(self) -> None:
        """Remove this node's policy, and the rules if no other node of the machine has a policy."""
        # A signal handler may call `leave` while its own thread holds the lock.
        if self._policy is None or not self._lock.acquire(timeout=1.0):
            return
        try:
            self._policy = None
            with contextlib.suppress(OSError, msgspec.MsgspecError, IsolationUnavailable):
                self._verbs.enforce(self._home, None)
        finally:
            self._lock.release()

    def _complain(self, sentence: str) -> None:
        """Write a sentence to the log, once while it repeats."""
        if sentence != self._said:
            self._said = sentence
            self._say(sentence)

    def _apply(self, policy: EgressPolicy) -> None:
        with self._lock:
            if not self._is_tried and not self.problem:
                self.problem, self._is_tried = self._verbs.measure_egress().problem, True
            if self.problem:
                raise IsolationUnavailable(
                    f"the node cannot enforce the network policy of its pool: {self.problem}", hint=nft.HINT
                )
            self._policy = policy
            self._enforce()
            self._applied_ns = self._clock.boottime_ns()
            self.digest = digest_of(policy)

    def _enforce(self, *, refresh: bool = False) -> None:
        """Load the rules of the current policy. Raises IsolationUnavailable."""
        policy = self._policy
        if policy is None:
            return
        own = msgspec.structs.replace(policy, closed=(*policy.closed, *_endpoint(self._server_url())))
        try:
            note = self._verbs.enforce(self._home, own, refresh=refresh)
        except OSError as error:
            raise IsolationUnavailable(f"the node cannot load its network rules: {error}", hint=nft.HINT) from None
        if note:
            self._complain(note)

    def _confine(self, uid: int, *, confined: bool) -> None:
        with self._lock:
            try:
                self._verbs.confine(self._home, uid, confined=confined)
            except OSError as error:
                raise IsolationUnavailable(f"the node cannot load its network rules: {error}", hint=nft.HINT) from None


def _problem(environ: Mapping[str, str]) -> str:
    """Return the reason why no policy can be enforced here, as far as it is known before the trial, or ""."""
    if not nft.find(environ):
        return nft.MISSING
    return "" if environ.get(SPAWNER) else nft.rights_problem()


def _endpoint(url: str) -> tuple[str, ...]:
    """Return the destination of a server's URL."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme, 0)
    if not parts.hostname or not port:
        return ()
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return (f"{host}:{port}",)
