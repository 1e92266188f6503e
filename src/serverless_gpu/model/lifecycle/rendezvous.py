"""Rendezvous of a gang, whose nodes test connections to each other instead of resolving names.

    each node     listens on every interface ─▶ Offer (port, addresses)       its supervisor, before user code
    server        has all offers             ─▶ sends them to every node
    each node     tries every address of every other node ─▶ CrewReach        over TCP, with a shared secret
    server        `choose` ─▶ Chosen: rank 0's address, an interface for each node; or Apart: the nodes without a path

The field `crew` is the number of a node within its gang. The shared secret from the gang's nonce prevents a node from
mistaking another program for its peer. Another program may listen at 127.0.0.1 or at an address that two sites share.
An address is usable only if every other node reached it, because NCCL and Gloo connect all ranks to each other.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence

import msgspec

SAVED_MAX = 32
"""Maximum number of earlier attempts in a rendezvous offer. The offer lists the newest earlier attempts."""
ADDRESSES_MAX = 16
"""Maximum number of addresses in a rendezvous offer. A machine with Docker can have dozens of bridges."""
PROBE_S = 3.0
"""Timeout in seconds of a connection test. A node tests all addresses at the same time."""
PROBLEM_CHARACTERS_MAX = 200
FAR_TIMES, FAR_US = 10, 1_000
"""The connection time of a distant address exceeds 1,000 µs and 10 times the nearest address's connection time."""

# Pattern for the kernel's interface names, except names with a comma, which separates names for NCCL.
_INTERFACE = re.compile(r"[!-+\--.0-~]{1,15}")
_Way = tuple[int, int, str]
"""Key of a connection test: number of the connecting node, number of the target node, and the address."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address at which other nodes may reach a node."""

    interface: str
    address: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and ports of a node for the rendezvous.

    Attributes:
        crew: number of the node in the gang.
        port: port on which the node's supervisor listens until the rendezvous is complete.
        rendezvous_port: port that node 0 reserves for rank 0, or 0 for all other nodes.
        addresses: addresses of the node in the node's order of preference. Loopback is the last address.
        saved: earlier attempts whose checkpoints the node can read, the newest first.
    """

    crew: int
    port: int
    rendezvous_port: int = 0
    addresses: tuple[Address, ...]
    saved: tuple[int, ...] = ()


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a connection test to one address of another node.

    Attributes:
        crew: number of the node with the address.
        microseconds: time until the answer, or None without an answer.
        problem: the error as text for users, or "".
    """

    crew: int
    address: str
    microseconds: int | None = None
    problem: str = ""


class CrewReach(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one node's connection tests to the addresses of other nodes."""

    crew: int
    tried: tuple[Tried, ...]


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous of a gang, identical for all nodes and fixed for an attempt.

    Attributes:
        master: address and port of rank 0's rendezvous.
        interfaces: the interface for NCCL and Gloo on each node, by number of the node.
        addresses: the address at which other nodes reach each node, by number of the node.
        resume: the newest earlier attempt whose checkpoints all nodes can read, or 0. All ranks must continue from the
            same attempt.
    """

    master: tuple[str, int]
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]
    resume: int = 0


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Failed rendezvous of a gang with two nodes that cannot reach each other."""

    pair: tuple[int, int]  # Numbers of the node that cannot connect, and of the unreachable node.
    sentence: str  # Message for users with the names of both nodes and the tried addresses.


def word(nonce: str, *, frm: int, to: int) -> bytes:
    """Return the 32-byte secret by which node `to` recognizes a connection from node `frm`.

    The secret depends on the gang's nonce. The peer answers with the secret for the opposite direction.
    """
    return hashlib.sha256(f"{nonce}:{frm}:{to}".encode()).digest()


def choose(offers: Sequence[Offer], reaches: Sequence[CrewReach], nodes: Sequence[str]) -> Chosen | Apart:
    """Return the rendezvous of a gang, or two nodes that cannot reach each other.

    All nodes use the same kind of address, as NCCL and Gloo require. The function prefers IPv4 to IPv6, and IPv6 to
    loopback addresses of one machine. For each node, the function selects the first address of the chosen kind that all
    other nodes reached. The function respects the node's order of addresses, because connection time does not indicate
    bandwidth. The function skips a distant address only if a near address exists.

    Raises ValueError if nodes are missing or duplicate, or have invalid ports.
    """
    offers = sorted(offers, key=lambda offer: offer.crew)
    if [offer.crew for offer in offers] != list(range(len(nodes))) or len(nodes) < 2:
        raise ValueError(
            f"{len(nodes)} nodes need offers, but the offers are from nodes {[offer.crew for offer in offers][:8]}"
        )
    ports = [offers[0].rendezvous_port, *(offer.port for offer in offers)]
    if not all(0 < port < 1 << 16 for port in ports):
        raise ValueError(f"a node offers an invalid port: {ports[:8]}")
    tried = {(reach.crew, one.crew, one.address): one for reach in reaches for one in reach.tried}
    for kind in ("IPv4", "IPv6", "loopback IPv4", "loopback IPv6"):
        found = [_nearest(offer, offers, tried, kind) for offer in offers]
        taken = [address for address in found if address is not None]
        if len(taken) == len(offers):
            return Chosen(
                master=(taken[0].address, offers[0].rendezvous_port),
                interfaces=tuple(address.interface for address in taken),
                addresses=tuple(address.address for address in taken),
                resume=max(frozenset(offers[0].saved).intersection(*(offer.saved for offer in offers)), default=0),
            )
    return _apart(offers, tried, nodes)


def is_interface(name: str) -> bool:
    """Return True if NCCL and Gloo can read an interface name from an environment variable."""
    return _INTERFACE.fullmatch(name) is not None


def kind_of(address: str) -> str:
    """Return the kind of an address, or "" for an address that other nodes cannot use, such as link-local."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # An address with a scope is also invalid, because only the address's node can use the address.
        return ""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_link_local or ip.is_unspecified or ip.is_multicast or "%" in address:
        return ""
    return f"{'loopback ' if ip.is_loopback else ''}IPv{ip.version}"


def _nearest(offer: Offer, offers: Sequence[Offer], tried: Mapping[_Way, Tried], kind: str) -> Address | None:
    """Return the address of a kind at which all other nodes reach a node, or None."""
    reached = [
        (address, took)
        for address in _offered(offer)
        if kind_of(address.address) == kind and (took := _slowest(offer, offers, tried, address)) is not None
    ]
    if not reached:
        return None
    far_us = max(FAR_US, FAR_TIMES * min(took for _, took in reached))
    return next(address for address, took in reached if took <= far_us)


def _slowest(offer: Offer, offers: Sequence[Offer], tried: Mapping[_Way, Tried], address: Address) -> int | None:
    """Return the longest time that a node needed to reach an address, or None if a node failed."""
    found = [tried.get((other.crew, offer.crew, address.address)) for other in offers if other.crew != offer.crew]
    times = [one.microseconds for one in found if one is not None and one.microseconds is not None]
    return max(times) if len(times) == len(found) else None


def _apart(offers: Sequence[Offer], tried: Mapping[_Way, Tried], nodes: Sequence[str]) -> Apart:
    """Return the lowest-numbered node that other nodes do not reach, with a message for users.

    The message names the node that reaches the fewest addresses of the unreachable node. If all nodes are reachable,
    but not by the same kind of address, the message is about the lowest-numbered node.
    """
    lonely = [to for to in offers if all(_slowest(to, offers, tried, address) is None for address in _offered(to))]
    to = (lonely or list(offers))[0]
    frm = max((one for one in offers if one.crew != to.crew), key=lambda one: len(_missing(one, to, tried)))
    if not to.addresses:
        sentence = f"{nodes[to.crew]} has no address that other nodes can reach"
        return Apart(pair=(frm.crew, to.crew), sentence=sentence)
    missing = _missing(frm, to, tried)
    told = ", ".join(f"{address} ({why})" for address, why in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    sentence = f"{nodes[frm.crew]} does not reach {nodes[to.crew]}: tried {told}{more}"
    return Apart(pair=(frm.crew, to.crew), sentence=sentence)


def _offered(offer: Offer) -> tuple[Address, ...]:
    return offer.addresses[:ADDRESSES_MAX]


def _missing(frm: Offer, to: Offer, tried: Mapping[_Way, Tried]) -> list[tuple[str, str]]:
    """Return the addresses of a node that another node did not reach, each with the error as text."""
    missing: list[tuple[str, str]] = []
    for address in _offered(to):
        one = tried.get((frm.crew, to.crew, address.address))
        if one is None or one.microseconds is None:
            why = "not tried" if one is None else one.problem[:PROBLEM_CHARACTERS_MAX] or "no answer"
            missing.append((address.address, why))
    return missing


def variables(chosen: Chosen, crew: int) -> dict[str, str]:
    """Return the environment variables that configure ranks for the rendezvous.

    The variables set the interface for NCCL and Gloo, and the attempt whose checkpoint all ranks load.
    """
    interface = chosen.interfaces[crew]
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "SGPU_RESUME_FENCE": str(chosen.resume),
    }
