"""Keeps the network rules of this machine with nftables. The functions need the rights of root.

    policies of all nodes on this machine ─▶ merged ─▶ names resolved ─▶ egress_rules.ruleset ─▶ nft -f -

One table of the machine holds the rules, because principals have the same uids for all nodes of the machine. Several
nodes of one machine share a file with their policies, and the strictest policy applies. `measure` tries the rules in a
network namespace of its own, because a configuration is no evidence.

Failure cases:

If another program removes the table, for example `nft flush ruleset`, the next refresh restores the table.

If a name cannot be resolved, its earlier addresses stay open for an hour. Without earlier addresses, the name stays
closed. The node resolves names every minute. A program that reads other addresses from its name server can be refused
for a minute.

If the node is killed, the rules stay. Without the rules, the principals' remaining processes would be open. For the
same reason, an account without the rights of root cannot remove the rules.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import ipaddress
import os
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.model.egress import Destination, EgressPolicy, destination, is_opened, merged
from serverless_gpu.node.base.network import own_addresses
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
NODES_MAX = 256
"""Maximum number of nodes with a policy on one machine."""
BUILDS_MAX = 256
"""Maximum number of running builds of one node."""
_LOOKUP_S = 5.0
_RETRY_S = 10.0
_TRIAL = "serverless_gpu.node.isolation.egress_trial"
_TRIAL_S = 20.0
_FILE = "egress.json"
_RESOLVERS = Path("/etc/resolv.conf")
_RESOLVERS_MAX = 8

Lookup = Callable[[str], Sequence[str]]


def measure(environ: Mapping[str, str]) -> str:
    """Return "", or the reason why this node cannot enforce a network policy. The call takes about 0.2 s."""
    program = nft.find(environ)
    if program is None:
        return nft.MISSING
    # In a user namespace, the trial would succeed, although the rules of the machine belong to root.
    if problem := nft.rights_problem():
        return problem
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


class MachineEgress:
    """Loads the network rules for the policies of this machine's nodes. Not thread-safe.

    `opened` contains the services of this machine that an allow-list may open, or None for every service. Only root may
    choose the services: a listener on the node itself can be one of the node's own.
    """

    def __init__(self, environ: Mapping[str, str], opened: Sequence[Destination] | None = None) -> None:
        self._environ = dict(environ)
        self._opened = opened
        self._clock: Clock = SystemClock()
        self._names = NameCache(self._clock, addresses_of)
        self._applied: tuple[str, EgressPolicy] | None = None  # None after a failure.
        self._loaded: EgressRules | None = None
        self._note = ""

    def enforce(self, home: str, policy: EgressPolicy, *, refresh: bool = False) -> str:
        """Load the rules for the policy of a node. Return a note for the node's log, or "".

        Without `refresh`, an applied policy only needs the table in the kernel. With `refresh`, the method also
        resolves names and reads the policies of the other nodes. Raises IsolationUnavailable.
        """
        exists = nft.exists(self._environ)
        is_applied = (home, policy) == self._applied
        if is_applied and exists and not refresh:
            return self._note
        if not is_applied or not exists:
            self._applied, self._loaded = None, None
        try:
            with self._policies() as known:
                if home not in known and len(known) >= NODES_MAX:
                    raise IsolationUnavailable(
                        f"{len(known)} nodes of this machine have a network policy", hint="remove homes without a node"
                    )
                uids, builds = ranges_of(self._environ), known[home].builds if home in known else ()
                known[home] = NodeEntry(policy=policy, uids=uids, boot_id=self._clock.boot_id(), builds=builds)
                rules = self._load(known)
        except (OSError, msgspec.MsgspecError) as error:
            raise self._unstorable(error) from None
        self._applied, self._note = (home, policy), self._closed_services(rules)
        return self._note

    def confine(self, home: str, uid: int, *, confined: bool) -> None:
        """Close everything but the index proxy for the uid of a build of a node, or open it again.

        The file of policies keeps the uid, because processes of a build can outlive the node's process. Raises
        IsolationUnavailable.
        """
        try:
            with self._policies() as known:
                if home not in known:
                    raise IsolationUnavailable("the node has no network policy, and confines no builds")
                builds = {*known[home].builds, uid} if confined else {*known[home].builds} - {uid}
                if len(builds) > BUILDS_MAX:
                    raise IsolationUnavailable(f"{BUILDS_MAX} builds of the node are running", hint="try again later")
                known[home] = msgspec.structs.replace(known[home], builds=tuple(sorted(builds)))
                self._load(known)
        except (OSError, msgspec.MsgspecError) as error:
            raise self._unstorable(error) from None

    def _unstorable(self, error: Exception) -> IsolationUnavailable:
        place = PrincipalMap(self._environ).place
        return IsolationUnavailable(
            f"the node cannot store its network policy: {error}", hint=f"make {place} writable for the node"
        )

    def remove(self, home: str) -> None:
        """Remove the policy of a node, and the rules if no other node of the machine has a policy.

        On behalf of an account without rights, the rules of an open pool stay instead.
        Raises OSError, MsgspecError or IsolationUnavailable.
        """
        self._applied = None
        if not PrincipalMap(self._environ).place.is_dir():
            return
        with self._policies() as known:
            known.pop(home, None)
            if not known and self._opened is None:
                nft.run(egress_rules.removal(nft.table_of(self._environ)), self._environ)
            elif not known:
                self._load(known)

    def protect(self, uid: int) -> None:
        """Load the rules if the machine has none, and ensure that they apply to a uid.

        Raises OSError, MsgspecError or IsolationUnavailable.
        """
        if not nft.exists(self._environ):
            self._applied, self._loaded = None, None
            with self._policies() as known:
                self._load(known)
        nft.cover(uid, self._environ)

    def _load(self, known: Mapping[str, NodeEntry]) -> EgressRules:
        """Load the rules of all policies unless they are loaded, or the rules of an open pool."""
        uids = tuple(pair for each in known.values() for pair in each.uids) or ranges_of(self._environ)
        builds = {uid for each in known.values() for uid in each.builds}
        rules = self._rules(merged([each.policy for each in known.values()]), uids, builds)
        if rules != self._loaded:
            _load(rules, self._environ)
            self._loaded = rules
        return rules

    @contextlib.contextmanager
    def _policies(self) -> Iterator[dict[str, NodeEntry]]:
        """Yield the policies of this machine's nodes by home, and store the changes.

        Entries of an earlier boot have no rules and no processes. Entries of a removed home have no node.
        Raises OSError or MsgspecError.
        """
        place, boot_id = PrincipalMap(self._environ).place, self._clock.boot_id()
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

    def _rules(self, policy: EgressPolicy, uids: tuple[tuple[int, int], ...], builds: Collection[int]) -> EgressRules:
        lists = (policy.allow, policy.closed, policy.index_proxy)
        allow, closed, proxy = ([destination(text) for text in texts] for texts in lists)
        found = self._names.addresses({each.host for each in (*allow, *closed, *proxy) if each.network is None})
        endpoints = tuple(each for each in allow if each.is_endpoint)
        opened = self._opened
        return EgressRules(
            uids=uids,
            mode=policy.mode,
            endpoints=endpoints,
            services=tuple(each for each in endpoints if opened is None or is_opened(each, opened)),
            allowed=tuple(_resolved(allow, found)),
            closed=tuple(_resolved(closed, found)),
            resolvers=resolvers(_RESOLVERS),
            index_proxy=tuple(_resolved(proxy, found)),
            builds=tuple(sorted(builds)),
        )

    def _closed_services(self, rules: EgressRules) -> str:
        """Return the note for allowed services of this machine that stay closed, or ""."""
        own = {ipaddress.ip_address(each.address) for each in own_addresses()}
        closed = []
        for each in rules.endpoints:
            network = each.network
            if each not in rules.services and network is not None:
                address = network.network_address
                closed += [each.text] if address.is_loopback or address in own else []
        if not closed:
            return ""
        options = " ".join(f"--open {text}" for text in closed)
        return f"services of this node stay closed for runs: {', '.join(closed)}. Start the spawner with {options}"


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


def _resolved(destinations: Iterable[Destination], found: Mapping[str, Sequence[str]]) -> Iterator[Destination]:
    """Yield destinations with the addresses of their names."""
    for each in destinations:
        for host in (each.host,) if each.network is not None else found[each.host]:
            yield msgspec.structs.replace(each, host=host)


def _load(rules: EgressRules, environ: Mapping[str, str]) -> None:
    """Load rules, and replace the sets of another version if they differ. Raises IsolationUnavailable."""
    table = nft.table_of(environ)
    try:
        nft.run(egress_rules.ruleset(rules, table), environ)
    except IsolationUnavailable:
        nft.run(egress_rules.ruleset(rules, table, afresh=True), environ)
