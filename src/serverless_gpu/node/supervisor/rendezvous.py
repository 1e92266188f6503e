"""Connects the nodes of a gang and tests if they can reach each other before ranks begin.

`Peers` represents the gang to one node's supervisor. All messages between nodes go through the server, except for the
rendezvous. In the diagram, the server's messages are in parentheses:

    devices, stem ─▶ offer ─▶ (offers) ─▶ reach ─▶ (chosen) ─▶ ranks begin
    all ranks returned ─▶ returned ─▶ (release) ─▶ ranks may exit
    an early end ─▶ halt, at once                           ◀─ (peer_failed): early end on another node

A supervisor sends its complete state with each change, and again to a restarted uplink. The server may therefore
receive a message twice. `rendezvous.py` has no deadlines, because the server ends a failed rendezvous. The lease limits
how long a node runs without the server. For a gang on one node, `Peers` only reserves a rendezvous port.

`Rendezvous` listens, tries the addresses of the other nodes, and reports the results:

    this node   ── connects ─▶ word(this, other) ─▶                              another node
                ◀─ word(other, this) ─┘          identity, and the time that it took
                ── FILL_BYTES ─▶ ◀─ FILL_BYTES ──  full packets get through, both ways

`model/lifecycle/rendezvous.py` chooses the addresses. The rendezvous tests the same connections that the ranks make
later. As with NCCL and Gloo, every node connects to every other node. The kernel chooses the ports of test connections.
Test packets are as large as the network allows. Every node also connects to the rendezvous port on rank 0's node.
Before user code begins, the server can therefore name a pair of nodes that cannot communicate.

No function blocks the supervisor's event loop. An unknown peer receives no data before it sends a secret that only the
gang's nodes know. The supervisor closes connections with a wrong secret.

Failure cases: The supervisor waits `PROBE_S` for an address that does not answer. Once every node was reached at
another address, the supervisor waits only `SETTLE_S`. A port counts as not reached if another program answers. In a
flood of connections, the supervisor closes the oldest unidentified connections. Without a free descriptor, the
supervisor reports an address as not tried.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import selectors
import socket
from collections.abc import Callable, Sequence

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import Attempt, Event, PeerFailed, Phase, Reason, Released, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import (
    ADDRESSES_MAX,
    PROBE_S,
    SAVED_MAX,
    Address,
    Chosen,
    CrewReach,
    Offer,
    Tried,
    variables,
    word,
)
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.network import NoPort, is_loopback, own_addresses, reserve_port
from serverless_gpu.node.inside.checkpoints import saved_before
from serverless_gpu.node.supervisor.rank_environment import Network

FILL_BYTES = 16 << 10
"""Number of test bytes, larger than a packet of any network. If the test bytes are lost, the network drops large
packets."""
SETTLE_S = 0.25
"""Seconds to wait for further addresses after every node was reached at one address."""
CALLS_MAX = 256
GUESTS_MAX = 256
_ACCEPTED_AT_ONCE = 64
_BREATH_S = 0.05
_LOOK_NS = 5_000_000
_BACKLOG = 1024
_WORD_BYTES = 32
_FILL = bytes(FILL_BYTES)
_RECEIVE_BYTES = 64 << 10
_DETAIL_CHARACTERS_MAX = 1_000
_TOO_LARGE = "the address answers, but large packets are lost: check that the network has the same MTU everywhere"


class Peers:
    """Exchanges state with the other nodes of a gang on several nodes."""

    def __init__(
        self,
        launch: protocol.Launch,
        checkpoints: str,
        clock: Clock,
        selector: selectors.BaseSelector,
        tell: Callable[[protocol.Message], None],
    ) -> None:
        # Callback for the gang state from the server. The callback returns the events that follow from the server's
        # judgement.
        self.judge: Callable[[protocol.GangNews], list[Event]] = lambda news: []
        self._launch = launch
        self._checkpoints = f"{checkpoints}/{launch.run_id}/{launch.fence}" if checkpoints else ""
        self._tell = tell
        self._port: socket.socket | None = None
        self._chosen: Chosen | None = None
        self._news = protocol.CrewNews()
        self._meeting: Rendezvous | None = None
        if len(launch.crews) > 1:
            self._meeting = Rendezvous(launch.nonce, launch.crew, len(launch.crews), selector, clock)

    @property
    def news(self) -> protocol.CrewNews | None:
        """Return this node's state for the other nodes, or None for a gang on one node."""
        return None if self._meeting is None else self._news

    @property
    def are_awaited(self) -> bool:
        """Return True if this node is ready and has not completed the rendezvous yet."""
        return self._news.offer is not None and self._chosen is None

    def met(self) -> bool:
        """Return True once the rendezvous is complete. The first call of `met` begins the rendezvous.

        Raises NoPort if no port can be reserved or opened for listening.
        """
        if self._meeting is None:
            return True
        if self._news.offer is None:
            port = self._reserved() if self._launch.crew == 0 else 0
            # Checkpoints that exist on this node. The ranks of all nodes must continue from the same checkpoint.
            saved: tuple[int, ...] = ()
            with contextlib.suppress(OSError):
                saved = tuple(saved_before(self._checkpoints))[:SAVED_MAX] if self._checkpoints else ()
            try:
                offer = self._meeting.offer(port)
                self._say(offer=msgspec.structs.replace(offer, saved=saved))
            except OSError as error:
                raise NoPort(f"no port is available on which other nodes could reach this node: {error}") from error
        return self._chosen is not None

    def network(self) -> Network:
        """Return the network addresses for the ranks after the rendezvous. Raises NoPort."""
        if self._chosen is None:
            return Network(master=("127.0.0.1", self._reserved()))
        crew = self._launch.crew
        return Network(self._chosen.master, self._chosen.addresses[crew], variables(self._chosen, crew))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses of the gang's other nodes after the rendezvous."""
        if self._chosen is None:
            return ()
        return tuple(one for number, one in enumerate(self._chosen.addresses) if number != self._launch.crew)

    def hear(self, heard: protocol.GangNews) -> list[Event]:
        """Process the gang state that the server has sent. Return the events for this node."""
        if self._meeting is None:
            return []
        # Process the server's judgement before a peer's failure, because the judgement may explain the failure.
        judged = self.judge(heard)
        if heard.peer_failed:
            return [*judged, PeerFailed(heard.peer_failed[:_DETAIL_CHARACTERS_MAX])]
        if heard.offers and self._news.offer is not None and self._news.halt is None:
            self._meeting.try_all(heard.offers)
        chosen, crews = heard.chosen, len(self._launch.crews)
        if chosen is not None and self.are_awaited and len(chosen.interfaces) == len(chosen.addresses) == crews:
            self._chosen = chosen
            self._meeting.close()
        return [*judged, Released()] if heard.release else judged

    def tell(self, **changes: object) -> None:
        """Publish changed fields of this node's `CrewNews`."""
        if self._meeting is not None:
            self._say(**changes)

    def watch(self, attempt: Attempt) -> None:
        """Publish the state of this node's attempt if it changed."""
        if self._meeting is None:
            return
        halt = self._news.halt
        if attempt.state is State.STOPPING and halt is None and attempt.reason is not Reason.COMPLETED:
            self._meeting.close()
            halt = _halt(attempt)
        returned = self._news.returned or attempt.phase is Phase.RETURNED
        self._say(halt=halt, returned=returned)

    @property
    def wake_ns(self) -> int | None:
        """Return the time of the next `tend` call, or None."""
        return None if self._meeting is None else self._meeting.wake_ns

    def tend(self) -> None:
        """Run the pending steps of the rendezvous."""
        if self._meeting is not None:
            self._meeting.tend()
            self._say(reach=self._meeting.reach)

    def close(self) -> None:
        """Stop listening and release the rendezvous port."""
        if self._meeting is not None:
            self._meeting.close()
        if self._port is not None:
            self._port.close()

    def _reserved(self) -> int:
        if self._port is None:
            self._port = reserve_port()
        number: int = self._port.getsockname()[1]
        return number

    def _say(self, **changes: object) -> None:
        news = msgspec.structs.replace(self._news, **changes)
        if news != self._news:
            self._news = news
            self._tell(news)


def _halt(attempt: Attempt) -> Halt:
    """Return the known reason for the early end of a node's ranks."""
    assert attempt.reason is not None
    cause = attempt.cause
    if cause is None:
        return Halt(reason=attempt.reason)
    detail = cause.detail[:_DETAIL_CHARACTERS_MAX]
    return Halt(reason=attempt.reason, rank=cause.rank, peer_lost=cause.peer_lost, detail=detail)


class Rendezvous:
    """Tests the connections of one node to all other nodes of its gang."""

    def __init__(self, nonce: str, crew: int, crews: int, selector: selectors.BaseSelector, clock: Clock) -> None:
        self.reach: CrewReach | None = None  # Other nodes that this node reached; None until the test is complete.
        self._nonce = nonce
        self._crew = crew
        self._crews = crews
        self._selector = selector
        self._clock = clock
        self._listeners: list[socket.socket] = []
        self._guests: list[_Guest] = []
        self._calls: list[_Call] = []
        self._waiting: list[_Call] = []  # Connection attempts that have not started.
        self._offers: dict[int, Offer] = {}
        self._enough_ns: int | None = None  # Time at which the wait for missing results ends.
        self._look_ns = 0  # Time of the next check if every node was reached.

    def offer(self, rendezvous_port: int = 0) -> Offer:
        """Start to listen, and return the addresses at which other nodes may reach this node. Raises OSError.

        `rendezvous_port` is the reserved port on rank 0's node, and 0 on the other nodes.
        """
        listeners = [listener()]
        self._listeners = listeners
        if rendezvous_port:
            # Until the rendezvous is complete, the listener shares the port with the socket that reserves the port.
            listeners.append(listener(rendezvous_port))
        others = [other for other in range(self._crews) if other != self._crew]
        self._answers = {
            word(self._nonce, frm=other, to=self._crew): word(self._nonce, frm=self._crew, to=other) for other in others
        }
        for one in listeners:
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ, functools.partial(self._accept, one))
        return Offer(
            crew=self._crew,
            port=listeners[0].getsockname()[1],
            rendezvous_port=rendezvous_port,
            addresses=own_addresses(),
        )

    def try_all(self, offers: Sequence[Offer]) -> None:
        """Try every address of the other nodes once. Ignore an incomplete list of offers."""
        if self._offers or [offer.crew for offer in offers] != list(range(self._crews)):
            return
        self._offers = {offer.crew: offer for offer in offers if offer.crew != self._crew}
        places = [
            (place, _Call(offer.crew, address, port))
            for offer in self._offers.values()
            for place, address in enumerate(offer.addresses[:ADDRESSES_MAX])
            for port in (offer.port, offer.rendezvous_port)
            if port
        ]
        # Sort the best address of each node first.
        self._waiting = [call for _, call in sorted(places, key=lambda one: one[0])]
        self.tend()

    @property
    def wake_ns(self) -> int | None:
        """Return the time of the next `tend` call, or None while this node only waits for other nodes."""
        limits = [call.until_ns for call in self._calls if call.tried is None]
        limits += [guest.wire.until_ns for guest in self._guests]
        if self._offers and self.reach is None:
            limits.append(self._look_ns if self._enough_ns is None else self._enough_ns)
        return min(limits, default=None)

    def tend(self) -> None:
        """Start new connection attempts, expire old attempts and collect the outcomes."""
        now_ns = self._clock.boottime_ns()
        for guest in self._guests:
            if now_ns >= guest.wire.until_ns:
                guest.wire.close()
        self._guests = [guest for guest in self._guests if guest.wire.is_open]
        if self.reach is not None or not self._offers:
            return
        for call in self._calls:
            if call.tried is None and now_ns >= call.until_ns:
                call.expire(PROBE_S)
        self._begin_calls()
        self._look_for_enough(now_ns)
        if not self._waiting and all(call.tried is not None for call in self._calls):
            self.reach = CrewReach(crew=self._crew, tried=tuple(tried for _, tried in self._outcomes()))

    def close(self) -> None:
        """Stop listening and close all connections."""
        for one in self._listeners:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(one)
            one.close()
        for guest in self._guests:
            guest.wire.close()
        for call in self._calls:
            call.end("the rendezvous ended before this address answered")
        self._listeners, self._guests, self._calls, self._waiting = [], [], [], []

    def _begin_calls(self) -> None:
        free = CALLS_MAX - sum(call.tried is None for call in self._calls)
        now, self._waiting = self._waiting[: max(0, free)], self._waiting[max(0, free) :]
        for call in now:
            self._calls.append(call)
            words = (
                word(self._nonce, frm=self._crew, to=call.crew),
                word(self._nonce, frm=call.crew, to=self._crew),
            )
            call.begin(words, self._selector, self._clock)

    def _outcomes(self) -> list[tuple[Address, Tried]]:
        """Return the outcome of each address whose ports have all been tried."""
        calls: dict[tuple[int, Address], list[_Call]] = {}
        for call in (*self._calls, *self._waiting):
            calls.setdefault((call.crew, call.address), []).append(call)
        found: list[tuple[Address, Tried]] = []
        for (_, address), ports in calls.items():
            tried = [call.tried for call in ports if call.tried is not None]
            if len(tried) == len(ports):
                # An address gets the outcome of its worst port: an unreached port, or else the slowest port.
                found.append((address, max(tried, key=lambda one: (one.microseconds is None, one.microseconds or 0))))
        return found

    def _look_for_enough(self, now_ns: int) -> None:
        """Stop waiting for silent addresses once every node was reached at an address other than loopback."""
        if self._enough_ns is None and now_ns >= self._look_ns:
            self._look_ns = now_ns + _LOOK_NS
            times: dict[int, int] = {}
            for address, tried in self._outcomes():
                took_us = tried.microseconds
                if took_us is not None and not is_loopback(address):
                    times[tried.crew] = min(took_us, times.get(tried.crew, took_us))
            if len(times) == len(self._offers):
                self._enough_ns = now_ns + max(round(SETTLE_S * 1e9), 4_000 * max(times.values()))
        elif self._enough_ns is not None and now_ns >= self._enough_ns:
            for call in [*self._calls, *self._waiting]:
                if call.began_ns:
                    call.expire((now_ns - call.began_ns) / 1e9)
                else:
                    call.end("the node did not try this address, because another address had answered")
            self._calls += self._waiting
            self._waiting = []

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE if listening in self._listeners else 0):
            if not self._has_room():
                return  # The kernel queues new connections until connections of identified peers end.
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            # `accept` fails if the peer has closed the connection or no descriptor is free. Without a free descriptor,
            # a retry of `accept` would be a busy loop.
            except OSError:
                select.select([], [], [], _BREATH_S)
                return
            until_ns = self._clock.boottime_ns() + round(PROBE_S * 1e9)
            self._guests.append(_Guest(_Wire(sock, self._selector, until_ns), self._answers))

    def _has_room(self) -> bool:
        """Return True if another connection is allowed.

        Close the oldest unidentified connection if necessary.
        """
        if len(self._guests) >= GUESTS_MAX:
            self._guests = [guest for guest in self._guests if guest.wire.is_open]
        if len(self._guests) < GUESTS_MAX:
            return True
        stranger = next((guest for guest in self._guests if not guest.is_known), None)
        if stranger is not None:
            stranger.wire.close()
            self._guests.remove(stranger)
        return stranger is not None


def listener(port: int = 0) -> socket.socket:
    """Return a socket that listens on all addresses. Raises OSError.

    With port 0, the kernel chooses the port.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


class _Wire:
    """A connection with its unsent and received bytes."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, until_ns: int) -> None:
        sock.setblocking(False)
        self.until_ns = until_ns
        self.got = bytearray()
        self.is_open = True
        self._sock = sock
        self._selector = selector
        self._left = b""

    def watch(self, events: int, callback: Callable[[], None]) -> None:
        self._selector.register(self._sock, events, callback)

    def rewatch(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the socket is readable, or writable while bytes are unsent."""
        if self.is_open:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._left else 0)
            self._selector.modify(self._sock, events, callback)

    def say(self, data: bytes) -> None:
        """Send as many bytes as the kernel accepts, and queue the remaining bytes.

        Raises OSError if the peer has closed its socket.
        """
        self._left += data
        with contextlib.suppress(BlockingIOError):
            while self._left:
                self._left = self._left[self._sock.send(self._left) :]

    def hear(self) -> bool:
        """Receive bytes, and send queued bytes. Return False at end of file. Raises OSError."""
        self.say(b"")
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return True
        self.got += data
        return bool(data)

    @property
    def has_said(self) -> bool:
        return not self._left

    def error(self) -> str:
        """Return why the connection failed, or ""."""
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return os.strerror(code)
        return "no process listens at this address" if self._sock.getsockname() == self._sock.getpeername() else ""

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._sock)
            self._sock.close()


class _Guest:
    """An accepted connection of a peer that may not have identified itself yet."""

    def __init__(self, wire: _Wire, answers: dict[bytes, bytes]) -> None:
        self.wire = wire
        self.is_known = False
        self._answers = answers
        self._is_filled = False
        wire.watch(selectors.EVENT_READ, self.hear)

    def hear(self) -> None:
        wire = self.wire
        if not wire.is_open:
            return
        try:
            goes_on = wire.hear() and self._answer()
        except OSError:
            goes_on = False
        if not goes_on:
            wire.close()
        wire.rewatch(self.hear)

    def _answer(self) -> bool:
        got = self.wire.got
        if not self.is_known and len(got) >= _WORD_BYTES:
            answer = self._answers.get(bytes(got[:_WORD_BYTES]))
            if answer is None:
                return False
            self.is_known = True
            del got[:_WORD_BYTES]
            self.wire.say(answer)
        if self.is_known and not self._is_filled and len(got) >= FILL_BYTES:
            self._is_filled = True
            self.wire.say(_FILL)
        return len(got) <= FILL_BYTES and (self.is_known or len(got) < _WORD_BYTES)


class _Call:
    """An attempt to connect to an address and port of another node."""

    def __init__(self, crew: int, address: Address, port: int) -> None:
        self.crew = crew
        self.address = address
        self.port = port
        self.began_ns = 0
        self.answered_ns: int | None = None
        self.tried: Tried | None = None
        self._wire: _Wire | None = None
        self._expected = b""
        self._own = b""

    def begin(self, words: tuple[bytes, bytes], selector: selectors.BaseSelector, clock: Clock) -> None:
        """Connect to the address of the other node.

        `words` are the secret to send and the expected secret.
        """
        self._clock = clock
        self._own, self._expected = words
        self.began_ns = clock.boottime_ns()
        family = socket.AF_INET6 if ":" in self.address.address else socket.AF_INET
        try:
            # The address must be numeric, because a name lookup would block.
            socket.inet_pton(family, self.address.address)
            sock = socket.socket(family)
        except OSError as error:
            self.end(error.strerror or str(error))
            return
        self._wire = _Wire(sock, selector, self.began_ns + round(PROBE_S * 1e9))
        try:
            sock.connect((self.address.address, self.port))
        except BlockingIOError:
            pass
        except OSError as error:
            self.end(error.strerror or str(error))
            return
        self._wire.watch(selectors.EVENT_WRITE, self._connected)

    @property
    def until_ns(self) -> int:
        return self._wire.until_ns if self._wire is not None else 0

    def expire(self, waited_s: float) -> None:
        """Record that the address was not reached, unless its outcome is known."""
        self.end(_TOO_LARGE if self.answered_ns is not None else f"no answer in {waited_s:.2g} s")

    def end(self, problem: str = "") -> None:
        """Record the outcome of the connection attempt and close the connection."""
        if self._wire is not None:
            self._wire.close()
        took_us = None if self.answered_ns is None or problem else (self.answered_ns - self.began_ns) // 1000
        self.tried = self.tried or Tried(
            crew=self.crew, address=self.address.address, microseconds=took_us, problem=problem
        )

    def _connected(self) -> None:
        wire = self._wire
        if wire is None or not wire.is_open:
            return
        try:
            problem = wire.error()
            if not problem:
                wire.say(self._own)
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            self.end(problem)
        wire.rewatch(self._hear)

    def _hear(self) -> None:
        wire = self._wire
        if wire is None or not wire.is_open:
            return
        try:
            goes_on = wire.hear()
            problem = self._understand(wire)
        except OSError as error:
            goes_on, problem = True, error.strerror or str(error)
        if problem is None and not goes_on:
            problem = "the peer closed the connection"
        if problem is not None:
            self.end(problem)
        wire.rewatch(self._hear)

    def _understand(self, wire: _Wire) -> str | None:
        """Return "" once the peer was reached, the text of a problem, or None while the outcome is open."""
        if self.answered_ns is None and len(wire.got) >= _WORD_BYTES:
            if bytes(wire.got[:_WORD_BYTES]) != self._expected:
                return "another program answers at this address"
            self.answered_ns = self._clock.boottime_ns()
            del wire.got[:_WORD_BYTES]
            wire.say(_FILL)
        if len(wire.got) > FILL_BYTES:
            return "another program answers at this address"
        return "" if self.answered_ns is not None and wire.has_said and len(wire.got) == FILL_BYTES else None
