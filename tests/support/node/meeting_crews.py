"""Crews that meet on this machine, in a process of their own: what they listen on is every address, which the guard of
the tests refuses.

    python -m tests.support.node.meeting_crews SCENE     prints what came of it as JSON
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.lifecycle.rendezvous import Address, Chosen, CrewReach, Offer, choose, word
from serverless_gpu.node.base.network import reserve_port
from serverless_gpu.node.supervisor import rendezvous
from serverless_gpu.node.supervisor.rendezvous import FILL_BYTES, Rendezvous

NONCE = "a secret of the gang"
HERE = Address(interface="lo", address="127.0.0.1")


class Crews:
    """Some crews of one gang, and the loop of all of them."""

    def __init__(self, count: int, nonces: list[str] | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        nonces = nonces or [NONCE] * count
        self.all = [
            Rendezvous(nonce, number, count, self.selector, SystemClock()) for number, nonce in enumerate(nonces)
        ]
        self.port = reserve_port()  # of crew 0, for rank 0
        offers = [one.offer(0 if number else self.port.getsockname()[1]) for number, one in enumerate(self.all)]
        self.offers = [msgspec.structs.replace(offer, addresses=(HERE,)) for offer in offers]

    def turn(self, limit_s: float = 0.05) -> None:
        """Turn the loop once, as a supervisor does."""
        for key, _ in self.selector.select(limit_s):
            key.data()
        for one in self.all:
            one.tend()

    def until(self, look: Callable[[], object], limit_s: float = 20.0) -> float:
        """Turn the loop until something is true; return how long that took."""
        began = time.monotonic()
        while not look():
            assert time.monotonic() < began + limit_s, "it does not come about"
            self.turn()
        return time.monotonic() - began

    def meet(self) -> float:
        """Have all try all; return how long that took."""
        for one in self.all:
            one.try_all(self.offers)
        return self.until(lambda: all(one.reach is not None for one in self.all))

    def reaches(self) -> list[CrewReach]:
        """Return what they reached."""
        return [one.reach for one in self.all if one.reach is not None]

    def problems(self, crew: int) -> list[str]:
        """Return why a crew did not reach what it did not."""
        return [tried.problem for tried in self.reaches()[crew].tried]

    def knock(self, crew: int = 0) -> socket.socket:
        """Connect to a crew as anybody can."""
        return socket.create_connection(("127.0.0.1", self.offers[crew].port))


def all_meet() -> object:
    """Sixteen crews reach each other; the soonest of a few times, for others use this machine, too."""
    times = []
    for _ in range(10):
        crews = Crews(16)
        times.append(crews.meet())
    took_s = min(times)
    chosen = choose(crews.offers, crews.reaches(), [f"n{number}" for number in range(16)])
    answered = sum(tried.microseconds is not None for reach in crews.reaches() for tried in reach.tried)
    return {"took_s": took_s, "answered": answered, "met": isinstance(chosen, Chosen)}


def another_gang() -> object:
    """A port on which a crew of another gang listens is nobody's of ours."""
    crews = Crews(2, ["one gang", "another gang"])
    crews.meet()
    return [crews.problems(0), crews.problems(1)]


def nobody() -> object:
    """Nobody listens; nobody answers; an address is no address."""
    crews = Crews(2)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        dead = Address(interface="x", address="127.0.0.2")
        port = deaf.getsockname()[1]
        crews.offers[1] = msgspec.structs.replace(crews.offers[1], port=port, addresses=(HERE, dead))
        crews.offers[1] = msgspec.structs.replace(
            crews.offers[1], addresses=(*crews.offers[1].addresses, Address(interface="y", address="nonsense"))
        )
        took_s = crews.meet()
    return {"took_s": took_s, "problems": crews.problems(0)}


def settles() -> object:
    """A dead address is not waited for where another one does."""
    crews = Crews(2)
    outside = [Address(interface="eth0", address="127.0.0.1"), Address(interface="eth1", address="192.0.2.77")]
    setattr(rendezvous, "is_loopback", lambda _one: False)  # noqa: B010 - it is not the room's own name
    crews.offers = [msgspec.structs.replace(offer, addresses=tuple(outside)) for offer in crews.offers]
    took_s = crews.meet()
    return {"took_s": took_s, "problems": [crews.problems(number) for number in range(2)]}


def large_is_lost() -> object:
    """Who answers, and takes nothing more, is behind a network that loses large packets."""
    setattr(rendezvous, "PROBE_S", 1.0)  # noqa: B010 - it is not the room's own name
    crews = Crews(2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        crews.offers[1] = msgspec.structs.replace(crews.offers[1], port=other.getsockname()[1])
        crews.all[0].try_all(crews.offers)
        for _ in range(3):
            crews.turn()
        guest, _ = other.accept()
        said = guest.recv(100)
        guest.sendall(word(NONCE, frm=1, to=0))
        crews.until(lambda: crews.all[0].reach is not None)
        guest.close()
    return {"said": said == word(NONCE, frm=0, to=1), "problems": crews.problems(0)}


def strangers() -> object:
    """Garbage, silence, half a word and a flood are harmless: nothing is told, and crews meet among them."""
    crews = Crews(2)
    silent = [crews.knock() for _ in range(rendezvous.GUESTS_MAX + 40)]
    for sock in silent[:20]:
        sock.sendall(b"\x00" * 16)
    for sock in silent[20:40]:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 100)
    crews.until(lambda: len(crews.all[0]._guests) >= rendezvous.GUESTS_MAX - 40)
    took_s = crews.meet()
    replayed = crews.knock()
    replayed.sendall(word(NONCE, frm=0, to=1))  # of the other direction
    known = crews.knock()
    known.sendall(word(NONCE, frm=1, to=0) + b"x" * FILL_BYTES + b"and more")
    for _ in range(20):
        crews.turn()
    told = 0
    for sock in (*silent, replayed):
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            told += len(sock.recv(100))
    guests = len(crews.all[0]._guests)
    for one in crews.all:
        one.close()
    left = len(crews.selector.get_map())
    return {"took_s": took_s, "told": told, "guests": guests, "left": left}


def nonsense() -> object:
    """What is no list of all crews is left alone; a second list changes nothing."""
    crews = Crews(2)
    first = crews.all[0]
    lists: list[list[Offer]] = [[], crews.offers[:1], crews.offers[::-1], [*crews.offers, crews.offers[1]]]
    for offers in lists:
        first.try_all(offers)
        first.tend()
    untouched = first.reach is None and not first._calls
    crews.meet()
    reach = first.reach
    first.try_all(crews.offers)
    crews.turn()
    return {"untouched": untouched, "same": first.reach is reach}


def rendezvous_is_closed() -> object:
    """Rank 0's node answers, but not on the port of the rendezvous; afterwards that port is rank 0's."""
    crews = Crews(2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        refusing = other.getsockname()[1]
    crews.offers[0] = msgspec.structs.replace(crews.offers[0], rendezvous_port=refusing)
    crews.meet()
    for one in crews.all:
        one.close()
    with socket.create_server(("127.0.0.1", crews.port.getsockname()[1])) as store:
        listens = bool(store.fileno())
    return {"problems": crews.problems(1), "listens": listens}


def alone() -> object:
    """A crew that offers no address cannot be tried, and nobody waits for it."""
    crews = Crews(2)
    crews.offers[1] = msgspec.structs.replace(crews.offers[1], addresses=())
    crews.meet()
    return [len(reach.tried) for reach in crews.reaches()]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
