"""Rendezvous of a gang: crews meet by connections tried between just these nodes, not by name resolution.

    each crew     listens on every interface ─▶ Offer (port, addresses)       its supervisor, before user code
    server        all offers are there       ─▶ told to every crew
    each crew     tries every address of every other one ─▶ Reach            TCP, and a word that only they know
    server        `choose` ─▶ Chosen: rank 0's address, an interface for each node; or Apart: who does not reach whom

The word is made from the gang's nonce, so a stranger at 127.0.0.1, or behind an address that two sites share,
is not taken for the peer. An address counts only when every other crew has reached it: NCCL and Gloo connect all to
all.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence

import msgspec

SAVED_MAX = 32
"""A crew tells of so many earlier attempts, the newest ones."""
ADDRESSES_MAX = 16
"""A node offers no more: a machine with Docker has dozens of bridges."""
PROBE_S = 3.0
"""How long one address is tried; all are tried at once."""
PROBLEM_CHARACTERS_MAX = 200
FAR_TIMES, FAR_US = 10, 1_000
"""An address is far where it takes so many times as long as a nearer one of the same node, and so long at least."""

_INTERFACE = re.compile(r"[!-+\--.0-~]{1,15}")  # as the kernel has them, but for the comma that NCCL takes for its own
_Way = tuple[int, int, str]
"""Who tries, whom, at which address."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """An address at which a node might be reached."""

    interface: str
    address: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and ports of a crew for the rendezvous.

    Attributes:
        crew: its number.
        port: on which its supervisor listens until the gang has met.
        rendezvous_port: held for rank 0 on its node; of crew 0, else 0.
        addresses: the node's own, in the order in which it would have them used; loopback is the last.
        saved: earlier attempts whose checkpoints are seen there, the newest first.
    """

    crew: int
    port: int
    rendezvous_port: int = 0
    addresses: tuple[Address, ...]
    saved: tuple[int, ...] = ()


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of trying one address of another crew.

    Attributes:
        crew: whose address.
        microseconds: how long it took to be answered; None where it was not.
        problem: why not, for people, or "".
    """

    crew: int
    address: str
    microseconds: int | None = None
    problem: str = ""


class CrewReach(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses of other crews that one crew reached."""

    crew: int
    tried: tuple[Tried, ...]


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The rendezvous of a gang: the same for all crews, fixed for an attempt.

    Attributes:
        master: address and port of rank 0's rendezvous.
        interfaces: by crew, in their order: what NCCL and Gloo are to use there.
        addresses: by crew, in their order: where the others reach it.
        resume: the newest earlier attempt whose checkpoints all of them see, 0 for none: ranks that went on from
            different ones would not be one run.
    """

    master: tuple[str, int]
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]
    resume: int = 0


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """A gang whose crews do not reach each other."""

    pair: tuple[int, int]  # numbers of two crews, of which the first does not reach the second
    sentence: str  # which nodes that are, and what came of trying, for people


def word(nonce: str, *, frm: int, to: int) -> bytes:
    """Return what crew `frm` says to crew `to`, so that they know each other: 32 bytes.

    The nonce is of the gang alone; the answer is the word of the other direction.
    """
    return hashlib.sha256(f"{nonce}:{frm}:{to}".encode()).digest()


def choose(offers: Sequence[Offer], reaches: Sequence[CrewReach], nodes: Sequence[str]) -> Chosen | Apart:
    """Return how a gang meets, or who does not reach whom.

    One kind of address for all, as NCCL and Gloo take it: IPv4, else IPv6, else loopback, which all share or nobody.
    Of a node's addresses of that kind the first that every other one reached, in the node's own order: how long a
    connection takes says nothing of bandwidth. Only one that is far away where another is near is passed over.

    Raises ValueError when crews are missing, come twice, or have ports that cannot be.
    """
    offers = sorted(offers, key=lambda offer: offer.crew)
    if [offer.crew for offer in offers] != list(range(len(nodes))) or len(nodes) < 2:
        raise ValueError(f"{len(nodes)} crews meet, and offers are of {[offer.crew for offer in offers][:8]}")
    ports = [offers[0].rendezvous_port, *(offer.port for offer in offers)]
    if not all(0 < port < 1 << 16 for port in ports):
        raise ValueError(f"a crew offers a port that cannot be: {ports[:8]}")
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
    """Return whether a variable can name an interface to NCCL and Gloo."""
    return _INTERFACE.fullmatch(name) is not None


def kind_of(address: str) -> str:
    """Return the kind of an address; "" for one that other nodes cannot use as it is (link-local, none)."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # also one with a scope that is only its own node's
        return ""
    ip = getattr(ip, "ipv4_mapped", None) or ip
    if ip.is_link_local or ip.is_unspecified or ip.is_multicast or "%" in address:
        return ""
    return f"{'loopback ' if ip.is_loopback else ''}IPv{ip.version}"


def _nearest(offer: Offer, offers: Sequence[Offer], tried: Mapping[_Way, Tried], kind: str) -> Address | None:
    """Return the address of a kind at which all others reach a crew, or None."""
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
    """Return how long the slowest of the others took to reach an address, or None where one did not."""
    found = [tried.get((other.crew, offer.crew, address.address)) for other in offers if other.crew != offer.crew]
    times = [one.microseconds for one in found if one is not None and one.microseconds is not None]
    return max(times) if len(times) == len(found) else None


def _apart(offers: Sequence[Offer], tried: Mapping[_Way, Tried], nodes: Sequence[str]) -> Apart:
    """Return the first crew that not all others reach, and the one that reaches the least of it.

    Where all are reached, but not by one kind of address: the first, and who reaches the least of it.
    """
    lonely = [to for to in offers if all(_slowest(to, offers, tried, address) is None for address in _offered(to))]
    to = (lonely or list(offers))[0]
    frm = max((one for one in offers if one.crew != to.crew), key=lambda one: len(_missing(one, to, tried)))
    if not to.addresses:
        sentence = f"{nodes[to.crew]} has no address at which it could be reached"
        return Apart(pair=(frm.crew, to.crew), sentence=sentence)
    missing = _missing(frm, to, tried)
    told = ", ".join(f"{address} ({why})" for address, why in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    sentence = f"{nodes[frm.crew]} does not reach {nodes[to.crew]}: tried {told}{more}"
    return Apart(pair=(frm.crew, to.crew), sentence=sentence)


def _offered(offer: Offer) -> tuple[Address, ...]:
    return offer.addresses[:ADDRESSES_MAX]


def _missing(frm: Offer, to: Offer, tried: Mapping[_Way, Tried]) -> list[tuple[str, str]]:
    """Return the addresses of a crew that another one did not reach, and why, in words."""
    missing: list[tuple[str, str]] = []
    for address in _offered(to):
        one = tried.get((frm.crew, to.crew, address.address))
        if one is None or one.microseconds is None:
            why = "not tried" if one is None else one.problem[:PROBLEM_CHARACTERS_MAX] or "no answer"
            missing.append((address.address, why))
    return missing


def variables(chosen: Chosen, crew: int) -> dict[str, str]:
    """Return what ranks are told of how their nodes have met: the interface that the others reach, for NCCL and Gloo,
    and from which attempt all of them go on.
    """
    interface = chosen.interfaces[crew]
    return {
        "NCCL_SOCKET_IFNAME": f"={interface}",
        "GLOO_SOCKET_IFNAME": interface,
        "SGPU_RESUME_FENCE": str(chosen.resume),
    }
