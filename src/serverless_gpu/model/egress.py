"""Network policy of a pool: which addresses the ranks of separated principals may reach.

    open    every address except control endpoints
    pool    nodes of the own gang, name servers, and the pool's allow-list
    none    nodes of the own gang

The metadata services of clouds are closed at each setting. Control endpoints are the server, its database, Ray, and all
nodes of the server. An entry of the allow-list with an address and a port also opens control endpoints and services of
other users on the same node. Such an entry is a decision of an administrator, which the audit records.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from serverless_gpu.errors import InvalidValue

Egress = Literal["open", "pool", "none"]
OPEN: Egress = "open"
POOL: Egress = "pool"
NONE: Egress = "none"
EGRESS: tuple[Egress, ...] = (OPEN, POOL, NONE)
"""All settings, the weakest first."""
ALLOWED_MAX = 100
METADATA = (
    "169.254.0.0/16",  # Link-local: most clouds
    "100.100.100.200/32",  # Alibaba
    "168.63.129.16/32",  # Azure's agent endpoint
    "192.0.0.192/32",  # Oracle Cloud Classic
    "fd00:ec2::/32",  # AWS: instances, and credentials of pods
    "fd20:ce::254/128",  # Google
    "fd00:c1::a9fe:a9fe/128",  # Oracle
    "fd00:42::42/128",  # Scaleway
    "fe80::/10",  # Link-local: OpenStack, and other nodes beside their closed addresses
    "64:ff9b::a9fe:0/112",  # 169.254.0.0/16 through NAT64
)
"""Addresses of clouds' metadata services, which give the rights of the machine to each process that asks.

The list includes all link-local addresses.
"""
_NAME = re.compile(r"(?=.{1,253}$)([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")
_HINT = "for example pypi.org:443, 10.1.0.0/16, 10.1.2.3:5000-5010 or [2001:db8::1]:443"
PORT_MAX = 65_535

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class EgressPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Network policy for the ranks of a node.

    Attributes:
        allow: destinations that are open, in the notation of `Destination`.
        closed: control endpoints in the same notation.
        index_proxy: destinations of the server's index proxy, the only ones that builds reach.
    """

    mode: Egress = OPEN
    allow: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    index_proxy: tuple[str, ...] = ()


class Destination(msgspec.Struct, frozen=True):
    """A host name or a network, with a range of ports. The range 0 to 0 means every port and protocol."""

    host: str
    first: int = 0
    last: int = 0

    @property
    def network(self) -> Network | None:
        """Return the network, or None for a host name."""
        try:
            return ipaddress.ip_network(self.host)
        except ValueError:
            return None

    @property
    def is_endpoint(self) -> bool:
        """Return True for one address with ports."""
        network = self.network
        return network is not None and network.num_addresses == 1 and self.first > 0

    @property
    def text(self) -> str:
        """Return the notation that `destination` reads."""
        network = self.network
        host = self.host
        if network is not None:
            host = str(network.network_address) if network.num_addresses == 1 else str(network)
        if not self.first:
            return host
        ports = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"[{host}]:{ports}" if ":" in host else f"{host}:{ports}"


def destination(text: str) -> Destination:
    """Read `HOST`, `HOST:PORT` or `HOST:FIRST-LAST`. Raises InvalidValue.

    HOST is a name, an address or a network. Brackets enclose an IPv6 address before a port.
    """
    shown = text[:300]
    host, ports = _split(text.strip().lower())
    first, last = _ports(ports, shown)
    try:
        return Destination(str(ipaddress.ip_network(host)), first, last)
    except ValueError as error:
        if "host bits" in str(error):
            whole = ipaddress.ip_network(host, strict=False)
            raise InvalidValue(f"{shown!r} is not a network: its address has host bits", hint=f"use {whole}") from None
    name = host.removesuffix(".")
    # A name whose last label is a number is a mistyped address.
    if not _NAME.fullmatch(name) or name.rpartition(".")[2].isdigit():
        raise InvalidValue(f"{shown!r} is not a host name, an address or a network", hint=_HINT)
    return Destination(name, first, last)


def check_allowed(texts: Sequence[str]) -> tuple[str, ...]:
    """Return an allow-list in its canonical notation, without duplicates. Raises InvalidValue."""
    if len(texts) > ALLOWED_MAX:
        raise InvalidValue(f"a pool allows at most {ALLOWED_MAX} destinations, but {len(texts)} are given")
    found = [destination(text) for text in texts]
    for each in found:
        network = each.network
        if network is not None and any(_is_within(network, ipaddress.ip_network(text)) for text in METADATA):
            raise InvalidValue(
                f"{each.text} is link-local or an address of a cloud's metadata service, which stays closed",
                hint="give runs credentials as secrets: sgpu secret set",
            )
    return tuple(dict.fromkeys(each.text for each in found))


def merged(policies: Sequence[EgressPolicy]) -> EgressPolicy:
    """Return the policy that satisfies all policies of the nodes on one machine.

    The strictest mode and all closed endpoints apply. A destination is allowed only if each policy allows it. Builds
    reach a destination only if each policy names it as index proxy.
    """
    if not policies:
        return EgressPolicy()
    mode = max((policy.mode for policy in policies), key=EGRESS.index)
    closed = tuple(dict.fromkeys(text for policy in policies for text in policy.closed))
    return EgressPolicy(
        mode=mode,
        allow=_common([policy.allow for policy in policies]),
        closed=closed,
        index_proxy=_common([policy.index_proxy for policy in policies]),
    )


def is_opened(endpoint: Destination, opened: Sequence[Destination]) -> bool:
    """Return True if one of the opened services contains an address with ports."""
    return any(
        each.host == endpoint.host and each.first <= endpoint.first <= endpoint.last <= each.last for each in opened
    )


def digest_of(policy: EgressPolicy) -> str:
    """Return a short digest of a policy, by which a server knows that a node has applied the policy."""
    said = msgspec.structs.asdict(policy)
    if not policy.index_proxy:  # As nodes compute it that know no index proxy.
        del said["index_proxy"]
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]


def _common(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(text for text in lists[0] if all(text in other for other in lists[1:]))


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if bracket and not rest:
            return host, None
        return (host, rest[1:]) if bracket and rest.startswith(":") else ("", None)
    if text.count(":") != 1:  # No port, or an IPv6 address.
        return text, None
    host, _, ports = text.partition(":")
    return host, ports


def _ports(text: str | None, shown: str) -> tuple[int, int]:
    if text is None:
        return 0, 0
    first, dash, last = text.partition("-")
    last = last if dash else first
    if not all(each.isascii() and each.isdigit() and len(each) <= len(str(PORT_MAX)) for each in (first, last)):
        raise InvalidValue(f"{shown!r} has an invalid port", hint=_HINT)
    if not 1 <= int(first) <= int(last) <= PORT_MAX:
        raise InvalidValue(f"{shown!r} has an invalid range of ports", hint=f"ports from 1 to {PORT_MAX}")
    return int(first), int(last)


def _is_within(network: Network, other: Network) -> bool:
    return network.version == other.version and network.subnet_of(other)  # type: ignore[arg-type]  # same version
