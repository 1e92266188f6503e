"""How the crews of a gang find each other: by what was tried between just these nodes, not by what names resolve to.

    each crew     listens on every interface ─▶ Offer (port, addresses)       its supervisor, before user code
    server        all offers are there       ─▶ told to every crew
    each crew     tries every address of every other one ─▶ Reach            TCP, and a word that only they know
    server        `choose` ─▶ Chosen: rank 0's address, an interface for each node; or Apart: who does not reach whom

The word is made from the gang's nonce, so that whoever answers at 127.0.0.1, or behind an address that two sites share,
is not taken for the peer. An address counts only when every other crew has reached it: NCCL and Gloo connect all to
all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

ADDRESSES_MAX = 16
"""A node offers no more: a machine with Docker has dozens of bridges."""
PROBE_S = 3.0
"""How long one address is tried; all are tried at once."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node might be reached."""

    interface: str
    address: str


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a crew can be tried.

    Attributes:
        crew: its number.
        port: on which its supervisor listens until the gang has met.
        rendezvous_port: held for rank 0 on its node; of crew 0, else 0.
        addresses: the node's own, in the order in which it would have them used; loopback is the last.
    """

    crew: int
    port: int
    rendezvous_port: int = 0
    addresses: tuple[Address, ...]


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """What came of trying one address of another crew.

    Attributes:
        crew: whose address.
        microseconds: how long it took to be answered; None where it was not.
        problem: why not, for people, or "".
    """

    crew: int
    address: str
    microseconds: int | None = None
    problem: str = ""


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What one crew reached of the others."""

    crew: int
    tried: tuple[Tried, ...]


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """How a gang meets; the same for all of its crews, and never changed for an attempt.

    Attributes:
        master: address and port of rank 0's rendezvous.
        interfaces: by crew, in their order: what NCCL and Gloo are to use there.
        addresses: by crew, in their order: where the others reach it.
    """

    master: tuple[str, int]
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """A gang cannot meet.

    Attributes:
        pair: numbers of two crews, of which the first does not reach the second.
        sentence: which nodes that are, and what came of trying, for people.
    """

    pair: tuple[int, int]
    sentence: str


def word(nonce: str, *, frm: int, to: int) -> bytes:
    """Return what crew `frm` says to crew `to`, so that they know each other: 32 bytes.

    Args:
        nonce: of the gang, which nobody else has.
        frm: who speaks.
        to: to whom; the answer is the word of the other direction.
    """
    return hashlib.sha256(f"{nonce}:{frm}:{to}".encode()).digest()


def choose(offers: Sequence[Offer], reaches: Sequence[Reach], nodes: Sequence[str]) -> Chosen | Apart:
    """Return how a gang meets, or who does not reach whom.

    Of the addresses of a node that every other one reached, the one that the slowest of them reached soonest; loopback
    only where nothing else will do.

    Args:
        offers: of all crews, by their numbers.
        reaches: likewise.
        nodes: names of the crews' nodes, by their numbers.
    """
    tried = {(reach.crew, one.crew, one.address): one for reach in reaches for one in reach.tried}
    found: list[Address] = []
    for offer in offers:
        others = [other.crew for other in offers if other.crew != offer.crew]
        usable = [
            (_slowest(tried, others, offer.crew, address), place, address)
            for place, address in enumerate(offer.addresses[:ADDRESSES_MAX])
        ]
        reached = [
            (is_loopback(address.address), us, place, address) for us, place, address in usable if us is not None
        ]
        if not reached:
            return _apart(offer, others, tried, nodes)
        found.append(min(reached, key=lambda one: one[:3])[3])
    return Chosen(
        master=(found[0].address, offers[0].rendezvous_port),
        interfaces=tuple(address.interface for address in found),
        addresses=tuple(address.address for address in found),
    )


def is_loopback(address: str) -> bool:
    """Return whether an address is only this machine's own."""
    return address.startswith("127.") or address == "::1"


def _slowest(
    tried: Mapping[tuple[int, int, str], Tried], others: Sequence[int], crew: int, address: Address
) -> int | None:
    """Return how long the slowest of the others took to reach an address, or None where one did not."""
    took = [tried[other, crew, address.address] for other in others if (other, crew, address.address) in tried]
    times = [one.microseconds for one in took if one.microseconds is not None]
    return max(times, default=0) if len(times) == len(others) else None


def _apart(
    offer: Offer, others: Sequence[int], tried: Mapping[tuple[int, int, str], Tried], nodes: Sequence[str]
) -> Apart:
    """Return the first crew that reached nothing of another one; where each reached something, one that fails."""
    missing = {
        other: [address.address for address in offer.addresses if _time(tried, other, offer, address) is None]
        for other in others
    }
    worst = max(others, key=lambda other: (len(missing[other]), -other))
    named = nodes[offer.crew]
    if not offer.addresses:
        return Apart(pair=(worst, offer.crew), sentence=f"{named} has no address at which it could be reached")
    told = []
    for address in missing[worst][:3]:
        one = tried.get((worst, offer.crew, address))
        told.append(f"{address} ({one.problem or 'no answer'})" if one is not None else f"{address} (not tried)")
    more = f" and {len(missing[worst]) - 3} more" if len(missing[worst]) > 3 else ""
    sentence = f"{nodes[worst]} does not reach {named}: tried {', '.join(told)}{more}"
    return Apart(pair=(worst, offer.crew), sentence=sentence)


def _time(tried: Mapping[tuple[int, int, str], Tried], frm: int, offer: Offer, address: Address) -> int | None:
    one = tried.get((frm, offer.crew, address.address))
    return one.microseconds if one is not None else None


def variables(chosen: Chosen, crew: int) -> dict[str, str]:
    """Return what NCCL and Gloo are told of a node's network: the interface that the others reach.

    Args:
        chosen: how the gang meets.
        crew: the node's number.
    """
    interface = chosen.interfaces[crew]
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
