"""Applies the network policy of this machine with nftables.

    policies of all nodes on this machine ─▶ merged ─▶ names resolved ─▶ egress_rules.ruleset ─▶ nft -f -

One table of the machine holds the rules, because principals have the same uids for all nodes of the machine. Several
nodes of one machine share a file with their policies, and the strictest policy applies. Before its first policy, a node
tries the rules in a network namespace of its own (`measure`), because a configuration is no evidence.

Failure cases:

If `nft` is missing or fails, a pool whose mode is `pool` or `none` starts no run on the node. In the mode `open`, runs
start without rules. The node reports the missing rules.

If another program removes the table, for example `nft flush ruleset`, the next refresh restores the table.

If a name cannot be resolved, its earlier addresses stay open for an hour. Without earlier addresses, the name stays
closed. The node resolves names every minute. A program that reads other addresses from its name server can be refused
for a minute.

A build reaches the index proxy of the server and nothing else (`NodeEgress.confined_build`). If the node is killed
during a build, the uid of the build stays closed until the next build with the same uid has ended.

If the node is killed, the rules stay. Without the rules, the principals' remaining processes would be open.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import ipaddress
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.egress import OPEN, Destination, EgressPolicy, destination, digest_of, merged
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.isolation import egress_rules, nft
from serverless_gpu.node.isolation.egress_rules import EgressRules
from serverless_gpu.node.isolation.principals import PrincipalMap, ranges_of
from serverless_gpu.node.processes.spawn import clean_process

REFRESH_S = 60.0
"""Seconds between two resolutions of the allowed names, and between two checks that the rules exist."""
KEEP_S = 3_600.0
"""Seconds for which an address stays open after its name had it last."""
ADDRESSES_MAX = 256
_LOOKUP_S = 5.0
_RETRY_S = 10.0
_TRIAL = "serverless_gpu.node.isolation.egress_trial"
_TRIAL_S = 20.0
_FILE = "egress.json"
_MISSING = "nft is missing: install nftables"
_RESOLVERS = Path("/etc/resolv.conf")
_RESOLVERS_MAX = 8
_PORTS = {"http": 80, "https": 443}

Lookup = Callable[[str], Sequence[str]]


def measure(environ: Mapping[str, str]) -> str:
    """Return "", or the reason why this node cannot enforce a network policy. The call takes about 0.2 s."""
    program = nft.find(environ)
    if program is None:
        return _MISSING
    output, child = os.pipe()
    with os.fdopen(output, "rb") as read:
        try:
            uid = ranges_of(environ)[-1][1]
            text = egress_rules.ruleset(EgressRules(uids=((uid, uid),)))
            trial = clean_process(_TRIAL, (uid, program, text), fds=(), log=child, environ=environ)
        except (OSError, msgspec.MsgspecError, IsolationUnavailable) as error:
            return f"the trial of the network rules cannot start: {error}"
        finally:
            os.close(child)
        try:
            code = trial.wait(_TRIAL_S)
        except subprocess.TimeoutExpired:
            trial.kill()
            trial.wait()
            return f"the trial of the network rules did not end within {_TRIAL_S:.0f} s"
        lines = read.read().decode("utf-8", "replace").strip().splitlines()
    return "" if code == 0 else f"the trial of the network rules failed: {lines[-1] if lines else f'exit code {code}'}"


class NodeEgress:
    """Keeps the network rules for one node. Thread-safe.

    `server_url` returns the address of the node's server, which the rules close. `trial` is `measure`, or its
    replacement in tests.
    """

    def __init__(
        self,
        home: Path,
        environ: Mapping[str, str],
        clock: Clock,
        *,
        server_url: Callable[[], str],
        say: Callable[[str], None],
        trial: Callable[[Mapping[str, str]], str] = measure,
    ) -> None:
        # Reason why the node cannot enforce a policy, or "". The trial waits for the first policy.
        self.problem = "" if nft.find(environ) else _MISSING
        self._trial: Callable[[Mapping[str, str]], str] | None = trial
        self.digest = ""  # Digest of the applied policy.
        self._home = str(home)
        self._environ = dict(environ)
        self._clock = clock
        self._server_url = server_url
        self._say = say
        self._names = NameCache(clock, addresses_of)
        self._lock = threading.Lock()
        self._policy: EgressPolicy | None = None
        self._applied_ns = 0
        self._loaded: EgressRules | None = None
        self._said = ""
        self._builds: frozenset[int] | None = None  # None before the node has read the builds of its earlier process.

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
        self._change_builds(add=frozenset({uid}))
        try:
            yield
        finally:
            self._change_builds(remove=frozenset({uid}))

    def _change_builds(self, *, add: frozenset[int] = frozenset(), remove: frozenset[int] = frozenset()) -> None:
        with self._lock:
            before = self._builds or frozenset()
            self._builds = (before | add) - remove
            try:
                self._enforce()
            except IsolationUnavailable:
                self._builds = before
                raise

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
            self._complain(error)
            return error.message
        return ""

    def offer(self, policy: EgressPolicy, *, asked_ns: int) -> None:
        """Apply a policy from a heartbeat's answer, unless the node has applied a policy since the request."""
        if asked_ns < self._applied_ns:
            return
        try:
            self._apply(policy)
        except IsolationUnavailable as error:
            self._complain(error)

    def refresh(self) -> None:
        """Resolve the names of the current policy again, and restore rules that another program has removed."""
        if self._policy is None:
            return
        try:
            with self._lock:
                if not nft.exists(self._environ):
                    self._loaded = None
                self._enforce()
        except IsolationUnavailable as error:
            self._complain(error)

    def leave(self) -> None:
        """Remove this node's policy, and the rules if no other node of the machine has a policy."""
        # A signal handler may call `leave` while its own thread holds the lock.
        if self._policy is None or not self._lock.acquire(timeout=1.0):
            return
        try:
            self._policy = None
            if not PrincipalMap(self._environ).place.is_dir():
                return
            with (
                contextlib.suppress(OSError, IsolationUnavailable),
                _policies(self._environ, self._clock.boot_id()) as known,
            ):
                known.pop(self._home, None)
                if not known:
                    nft.run(egress_rules.removal(nft.table_of(self._environ)), self._environ)
        finally:
            self._lock.release()

    def _complain(self, error: IsolationUnavailable) -> None:
        """Write an error to the log, once while it repeats."""
        if str(error) != self._said:
            self._said = str(error)
            self._say(self._said)

    def _apply(self, policy: EgressPolicy) -> None:
        with self._lock:
            if self._trial is not None and not self.problem:
                self.problem, self._trial = self._trial(self._environ), None
            if self.problem:
                raise IsolationUnavailable(
                    f"the node cannot enforce the network policy of its pool: {self.problem}", hint=nft.HINT
                )
            # Without loaded rules, an earlier call has failed.
            if policy != self._policy or self._loaded is None or not nft.exists(self._environ):
                self._policy, self._loaded = policy, None
                self._enforce()
            self._applied_ns = self._clock.boottime_ns()
            self.digest = digest_of(policy)

    def _enforce(self) -> None:
        """Load the rules if they have changed. Raises IsolationUnavailable."""
        policy = self._policy
        if policy is None:
            return
        own = msgspec.structs.replace(policy, closed=(*policy.closed, *_endpoint(self._server_url())))
        uids, boot_id = ranges_of(self._environ), self._clock.boot_id()
        try:
            with _policies(self._environ, boot_id) as known:
                if self._builds is None:
                    # Processes of a build can outlive the node's process. Their uids stay closed.
                    self._builds = frozenset(known[self._home].builds if self._home in known else ())
                builds = tuple(sorted(self._builds))
                known[self._home] = NodeEntry(policy=own, uids=uids, boot_id=boot_id, builds=builds)
                policies = [each.policy for each in known.values()]
                all_uids = tuple(pair for each in known.values() for pair in each.uids)
                all_builds = {uid for each in known.values() for uid in each.builds}
                rules = self._rules(merged(policies), all_uids, all_builds)
                if rules != self._loaded:
                    _load(rules, self._environ)
                    self._loaded = rules
        except (OSError, msgspec.MsgspecError) as error:
            place = PrincipalMap(self._environ).place
            raise IsolationUnavailable(
                f"the node cannot store its network policy: {error}", hint=f"make {place} writable for the node"
            ) from None

    def _rules(
        self, policy: EgressPolicy, uids: tuple[tuple[int, int], ...], builds: Collection[int] = ()
    ) -> EgressRules:
        lists = (policy.allow, policy.closed, policy.index_proxy)
        allow, closed, proxy = ([destination(text) for text in texts] for texts in lists)
        found = self._names.addresses({each.host for each in (*allow, *closed, *proxy) if each.network is None})
        return EgressRules(
            uids=uids,
            mode=policy.mode,
            endpoints=tuple(each for each in allow if each.is_endpoint),
            allowed=tuple(_resolved(allow, found)),
            closed=tuple(_resolved(closed, found)),
            resolvers=resolvers(_RESOLVERS),
            index_proxy=tuple(_resolved(proxy, found)),
            builds=tuple(sorted(builds)),
        )


class NameCache:
    """Addresses of names, which stay for `KEEP_S` after a name had them last. Not thread-safe."""

    def __init__(self, clock: Clock, lookup: Lookup) -> None:
        self._clock = clock
        self._lookup = lookup
        self._known: dict[str, dict[str, int]] = {}  # Boottime of the last answer with an address, by name.
        self._looked_ns: dict[str, int] = {}

    def addresses(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the addresses of names. Wait at most a few seconds for name servers."""
        now_ns = self._clock.boottime_ns()
        wanted = sorted(names)
        old = [name for name in wanted if now_ns - self._looked_ns.get(name, -(1 << 62)) >= REFRESH_S * 1e9]
        answers = self._looked_up(old)
        for name in old:
            # After a failure, the next call asks again, but not every call waits for the name server.
            self._looked_ns[name] = now_ns - (0 if name in answers else round((REFRESH_S - _RETRY_S) * 1e9))
            self._known.setdefault(name, {}).update(dict.fromkeys(answers.get(name, ()), now_ns))
        for name in wanted:
            seen = self._known.get(name, {})
            young = sorted(seen.items(), key=lambda item: -item[1])[:ADDRESSES_MAX]
            self._known[name] = {address: at_ns for address, at_ns in young if now_ns - at_ns <= KEEP_S * 1e9}
        return {name: tuple(sorted(self._known[name])) for name in wanted}

    def _looked_up(self, names: Sequence[str]) -> dict[str, Sequence[str]]:
        """Return the answers that arrive in time."""
        if not names:
            return {}
        pool = concurrent.futures.ThreadPoolExecutor(min(16, len(names)), thread_name_prefix="lookup")
        asked = {pool.submit(self._lookup, name): name for name in names}
        done, _ = concurrent.futures.wait(asked, _LOOKUP_S)
        pool.shutdown(wait=False, cancel_futures=True)
        return {asked[each]: each.result() for each in done if each.exception() is None}


def addresses_of(name: str) -> Sequence[str]:
    """Return the addresses that this node's resolver has for a name. Raises OSError."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def resolvers(path: Path) -> tuple[str, ...]:
    """Return the addresses of the name servers in a file such as /etc/resolv.conf."""
    found = []
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if len(words) >= 2 and words[0] == "nameserver":
                with contextlib.suppress(ValueError):
                    found.append(str(ipaddress.ip_address(words[1].partition("%")[0])))
    return tuple(found[:_RESOLVERS_MAX]) or ("127.0.0.1",)  # As libc, without a name server in the file.


class NodeEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Policy of one node of this machine, the uids of its principals, and the uids of its running builds."""

    policy: EgressPolicy
    uids: tuple[tuple[int, int], ...]
    boot_id: str
    builds: tuple[int, ...] = ()


@contextlib.contextmanager
def _policies(environ: Mapping[str, str], boot_id: str) -> Iterator[dict[str, NodeEntry]]:
    """Yield the policies of this machine's nodes by home, and store the changes.

    Entries of an earlier boot have no rules and no processes. Entries of a removed home have no node.
    Raises OSError or MsgspecError.
    """
    place = PrincipalMap(environ).place
    place.mkdir(mode=0o711, parents=True, exist_ok=True)
    lock = os.open(place / f".{_FILE}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = place / _FILE
        before = from_json(path.read_bytes(), dict[str, NodeEntry]) if path.exists() else {}
        known = {home: each for home, each in before.items() if each.boot_id == boot_id and os.path.isdir(home)}
        yield known
        if known != before:
            write_private(path, msgspec.json.encode(known))
    finally:
        os.close(lock)


def _resolved(destinations: Iterable[Destination], found: Mapping[str, Sequence[str]]) -> Iterator[Destination]:
    """Yield destinations with the addresses of their names."""
    for each in destinations:
        for host in (each.host,) if each.network is not None else found[each.host]:
            yield msgspec.structs.replace(each, host=host)


def _endpoint(url: str) -> tuple[str, ...]:
    """Return the destination of a server's URL."""
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme, 0)
    if not parts.hostname or not port:
        return ()
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return (f"{host}:{port}",)


def _load(rules: EgressRules, environ: Mapping[str, str]) -> None:
    """Load rules, and replace the sets of another version if they differ. Raises IsolationUnavailable."""
    table = nft.table_of(environ)
    try:
        nft.run(egress_rules.ruleset(rules, table), environ)
    except IsolationUnavailable:
        nft.run(egress_rules.ruleset(rules, table, afresh=True), environ)
