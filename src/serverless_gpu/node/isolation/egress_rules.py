"""Renders the nftables rules for the sockets of principals. Pure.

    output hook ─┬─ answer to a SYN of a principal, on loopback ─▶ answer4/6   is the listener of the same uid?
                 └─ socket of a principal's uid ─▶ principal ─┬─ own gang ─▶ accept
                                                             ├─ name servers, unless the mode is `none` ─▶ accept
                                                             ├─ metadata ─▶ reject
                                                             ├─ allowed address and port ─▶ accept
                                                             ├─ control endpoints ─▶ reject
                                                             └─ mode: open ─▶ accept; pool ─▶ allow-list; reject
                            … to an address of this node ─▶ local ─▶ dial4/6
                            … of a build ─▶ build: index proxy ─▶ accept; reject

A rank reaches TCP services of its own node only if their listener has the rank's uid. The rules need no list of ports.
An nftables rule cannot see the owner of a listener in a SYN. The listener's answer passes the output hook too, and has
the listener's uid. Therefore `dial` records each SYN twice: the connection with the uid, and the connection alone. An
answer to a recorded connection passes only if the record with the listener's own uid exists. Otherwise the rules turn
the answer into a reset. The client reads ECONNREFUSED at once, and the listener never accepts the connection.

A record lasts longer than the kernel repeats a SYN. If another uid has recorded a connection with the same addresses
and ports, `dial` refuses it. The records therefore never name two uids for one connection.

Failure cases: A full set of records, or an answer without a socket (SYN cookies), refuses the connection. A rate limit
for each uid prevents that one principal fills the sets. A SYN with data (TCP Fast Open) is refused, because its
listener would receive the data before its answer passes the rules.

Each packet is checked without connection tracking. The rules keep the dynamic sets when they replace the other rules,
so that the connections of running gangs continue.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from serverless_gpu.model.egress import METADATA, NONE, OPEN, POOL, Destination, Egress, Network

TABLE = "serverless_gpu"
"""Name of the table on a machine whose map of principals has its usual place."""
FAMILY = "inet"
GANG_S = 180
"""Seconds for which a gang's addresses stay open without renewal."""
_RECORD_S = 120
_RECORDS_MAX = 131_072
_SYNS_PER_S, _SYNS_AT_ONCE = 400, 2_000
_DNS_PORT = 53
_FAST_OPEN_OPTION = 34
_SYN = "tcp flags & (fin | syn | rst | ack)"


class EgressRules(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the rules.

    All destinations are networks, because the node has resolved names.

    Attributes:
        uids: first and last uid of each range of principals.
        endpoints: allowed addresses with ports, which also open control endpoints.
        services: allowed addresses with ports that open services of this node.
        allowed: further allowed destinations.
        closed: control endpoints.
        resolvers: addresses of name servers.
        index_proxy: destinations that builds reach.
        builds: uids of running builds, which are uids of principals.
    """

    uids: tuple[tuple[int, int], ...]
    mode: Egress = OPEN
    endpoints: tuple[Destination, ...] = ()
    services: tuple[Destination, ...] = ()
    allowed: tuple[Destination, ...] = ()
    closed: tuple[Destination, ...] = ()
    resolvers: tuple[str, ...] = ()
    index_proxy: tuple[Destination, ...] = ()
    builds: tuple[int, ...] = ()


class _Version:
    """Names of nftables for one version of IP."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ip = "ip" if number == 4 else "ip6"
        self.address = f"ipv{number}_addr"
        self.dialed = f"{self.ip} saddr . tcp sport . {self.ip} daddr . tcp dport"
        self.answered = f"{self.ip} daddr . tcp dport . {self.ip} saddr . tcp sport"


_VERSIONS = (_Version(4), _Version(6))


def ruleset(rules: EgressRules, table: str = TABLE, *, afresh: bool = False) -> str:
    """Return the input of `nft -f -` that replaces the rules in one transaction.

    With `afresh`, the rules also replace the dynamic sets, for example the sets of another version.
    """
    lines = [f"add table {FAMILY} {table}"]
    lines += [f"delete table {FAMILY} {table}"] if afresh else [f"flush table {FAMILY} {table}"]
    lines += [f"table {FAMILY} {table} {{", *_sets(rules)]
    for version in _VERSIONS:
        lines += _records(version)
    lines += _chain("build", [*_verdicts(rules.index_proxy, "accept"), "reject"])
    lines += _chain("local", _local(rules))
    lines += _chain("principal", _principal(rules))
    lines += _chain("output", _output())
    # The set keeps its elements when the rules are replaced, so the same transaction empties it.
    lines += ["}", f"flush set {FAMILY} {table} builds"]
    if rules.builds:
        lines.append(f"add element {FAMILY} {table} builds {{ {', '.join(map(str, sorted(rules.builds)))} }}")
    return "\n".join((*lines, ""))


def removal(table: str = TABLE) -> str:
    """Return the input of `nft -f -` that removes the rules."""
    return f"add table {FAMILY} {table}\ndelete table {FAMILY} {table}\n"


def admission(uid: int, addresses: Iterable[str], table: str = TABLE) -> str:
    """Return the input of `nft -f -` that opens addresses for a uid, or renews their time.

    An existing element keeps its expiry on Linux before 6.12. The transaction therefore replaces the element.
    """
    lines = []
    for address in addresses:
        ip = ipaddress.ip_address(address)
        named = f"{FAMILY} {table} gang{ip.version} {{ {uid} . {ip} }}"
        timed = f"{FAMILY} {table} gang{ip.version} {{ {uid} . {ip} timeout {GANG_S}s }}"
        lines += [f"add element {named}", f"delete element {named}", f"add element {timed}"]
    return "\n".join((*lines, ""))


def _sets(rules: EgressRules) -> list[str]:
    uids = ", ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in _joined(rules.uids))
    lines = _set("principals", "type uid; flags interval;", f"elements = {{ {uids} }}")
    lines += _set("builds", "type uid;")
    lines += _set("syns", "type uid; flags dynamic,timeout;", f"size {_RECORDS_MAX}; timeout 1m;")
    for version in _VERSIONS:
        lines += _set(f"gang{version.number}", f"type uid . {version.address}; flags timeout;", "size 65536;")
        connection, size = f"{version.address} . inet_service", f"size {_RECORDS_MAX};"
        pair = f"{connection} . {connection}"
        # The record without a uid lasts longer, so that an answer never passes because its record has expired.
        lines += _set(
            f"owned{version.number}",
            f"type {pair} . uid; flags dynamic,timeout;",
            f"{size} timeout {_RECORD_S}s;",
        )
        lines += _set(
            f"dialed{version.number}", f"type {pair}; flags dynamic,timeout;", f"{size} timeout {_RECORD_S + 10}s;"
        )
    return lines


def _records(version: _Version) -> list[str]:
    number = version.number
    owned, dialed = f"owned{number}", f"dialed{number}"
    record = [
        f"update @{dialed} {{ {version.dialed} }} update @{owned} {{ {version.dialed} . meta skuid }} accept",
        "reject with tcp reset",
    ]
    dial = [
        f"{version.dialed} . meta skuid @{owned} goto record{number}",
        f"{version.dialed} @{dialed} reject with tcp reset",
        f"goto record{number}",
    ]
    answer = [f"{version.answered} . meta skuid @{owned} accept", "tcp flags set rst | ack"]
    return [
        *_chain(f"record{number}", record),
        *_chain(f"dial{number}", dial),
        *_chain(f"answer{number}", answer),
    ]


def _output() -> list[str]:
    answers = [
        f'oifname "lo" {_SYN} == syn | ack {version.answered} @dialed{version.number} goto answer{version.number}'
        for version in _VERSIONS
    ]
    return [
        "type filter hook output priority filter; policy accept;",
        *answers,
        "meta skuid @principals goto principal",
    ]


def _local(rules: EgressRules) -> list[str]:
    """Return the rules for packets to addresses of this node."""
    return [
        *_name_servers(rules),
        *_verdicts(_metadata(), "reject"),
        *_verdicts(rules.services, "accept"),
        *([f"meta l4proto {{ tcp, udp }} th dport {_DNS_PORT} reject"] if rules.mode == NONE else []),
        f"meta l4proto tcp {_SYN} != syn accept",
        f"meta l4proto tcp tcp option {_FAST_OPEN_OPTION} exists reject with tcp reset",
        f"meta l4proto tcp update @syns {{ meta skuid limit rate over {_SYNS_PER_S}/second "
        f"burst {_SYNS_AT_ONCE} packets }} drop",
        *(f"meta l4proto tcp meta nfproto ipv{version.number} goto dial{version.number}" for version in _VERSIONS),
        "meta l4proto { udp, icmp, ipv6-icmp } accept",
        "reject",
    ]


def _principal(rules: EgressRules) -> list[str]:
    """Return the rules for the sockets of principals."""
    return [
        "meta skuid @builds goto build",
        'oifname "lo" goto local',
        *(f"meta skuid . {version.ip} daddr @gang{version.number} accept" for version in _VERSIONS),
        *_name_servers(rules),
        *_verdicts(_metadata(), "reject"),
        *_verdicts(rules.endpoints, "accept"),
        *_verdicts(rules.closed, "reject"),
        *(_verdicts(rules.allowed, "accept") if rules.mode == POOL else []),
        "accept" if rules.mode == OPEN else "reject",
    ]


def _metadata() -> list[Destination]:
    return [Destination(text) for text in METADATA]


def _name_servers(rules: EgressRules) -> list[str]:
    if rules.mode == NONE:
        return []
    return _verdicts([Destination(address, _DNS_PORT, _DNS_PORT) for address in rules.resolvers], "accept")


def _verdicts(destinations: Iterable[Destination], verdict: str) -> list[str]:
    """Return one rule for each range of ports and version of IP."""
    networks: dict[tuple[int, int, int], list[Network]] = defaultdict(list)
    for each in destinations:
        network = each.network
        assert network is not None, f"{each.host} is not resolved"
        networks[each.first, each.last, network.version].append(network)
    lines = []
    for (first, last, number), found in sorted(networks.items(), key=lambda item: item[0]):
        ip = "ip" if number == 4 else "ip6"
        # nft refuses overlapping networks in one rule.
        merged = ", ".join(str(network) for network in ipaddress.collapse_addresses(found))  # type: ignore[type-var]  # one version
        ports = "" if not first else f"meta l4proto {{ tcp, udp }} th dport {first}-{last} "
        ports = ports.replace(f"{first}-{last}", f"{first}") if first == last else ports
        lines.append(f"{ip} daddr {{ {merged} }} {ports}{verdict}")
    return lines


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges of uids in order, without overlaps."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def _set(name: str, *lines: str) -> list[str]:
    return [f"  set {name} {{", *(f"    {line}" for line in lines), "  }"]


def _chain(name: str, rules: Iterable[str]) -> list[str]:
    return [f"  chain {name} {{", *(f"    {rule}" for rule in rules), "  }"]
