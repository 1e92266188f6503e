"""Link between the nodes of one cluster: node 0 listens, the others prove the run's secret, and stay.

    node n                                            node 0
      │ ── connects, tries again until it may ──────────▶ │
      │ ◀── {"nonce"} ──────────────────────────────────  │
      │ ── {"node", "host", "nonce", "proof"} ──────────▶ │
      │ ◀── {"host", "proof"} ──────────────────────────  │  both know now whom they talk to
      │ ◀── {"address"} ────────────────────────────────  │  Ray's head is up: join there
      │ ── {"joined", "devices", "cpus"} ───────────────▶ │  the driver starts when all have
      │ ── {"lost": text} ──────────────────────────────▶ │  Ray on node n is gone
      │ ◀── {"done"} ───────────────────────────────────  │  the driver has ended: end Ray, return

A frame is four bytes of length and a JSON object. The secret never travels; neither does Ray's token, which every node
derives from it (`ray_start.py`). Frames after the proofs are not signed: an attacker who can write into this connection
can write into Ray's, too, which are not encrypted either.

Failure cases. A connection that does not prove itself in time, sends too much or nonsense, or claims node 0, a taken
number or an unknown one, is closed; other nodes do not notice. One that ends before its welcome tries again (something
else may listen at that port for a moment), until its patience ends. End of file after the welcome and without "done"
means that the other end's node task is gone; the kernel's keep-alives notice a vanished machine within `_SILENCE_S`. A
process that forks while a link is open has the child close its copy (`close`): the other end reads end of file when the
last copy is closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from typing import NamedTuple

from .. import protocol

FRAME_BYTES_MAX = 16_384
TEXT_CHARACTERS_MAX = 1000  # of what a node says about its end; escaped, it fits a frame
_HEADER = 4
_NONCE_BYTES = 32
PROVE_S = 10.0
_UNPROVEN_MAX = 64  # the oldest gives way; a node tries again
_FRAMES_MAX = 16  # at one look: there are not that many things to say
_HOST_CHARACTERS_MAX = 255
_AGAIN_S = 0.2
_CONNECT_S = 1.0
_SILENCE_S = 10
# Linux's TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT and TCP_USER_TIMEOUT.
_KEEP_ALIVE = ((4, 4), (5, 2), (6, 3), (18, _SILENCE_S * 1000))

JOINED, LOST, ADDRESS, DONE = "joined", "lost", "address", "done"


class LinkState(NamedTuple):
    """News from one end of a link."""

    kind: str  # `JOINED` or `LOST` (of a node), `ADDRESS` or `DONE` (from the head)
    node: int  # 0 is the head's
    host: str = ""  # that node's name; its address while unknown
    text: str = ""  # Ray's address, or a sentence about a loss
    devices: int = 0  # of a node that joined
    cpus: int = 0


class NonsenseError(Exception):
    """A peer sent something outside of the protocol."""


def proof(secret: str, role: str, node: int, nonces: tuple[str, str]) -> str:
    """Return the proof that its sender knows the secret, for node number `node` and both ends' nonces.

    `role` is "head" or "node": one end's proof cannot be sent back as the other's.
    """
    spoken = json.dumps(["sgpu-link", role, node, *nonces])
    return hmac.new(secret.encode(), spoken.encode(), hashlib.sha256).hexdigest()


def pack(message: protocol.Message) -> bytes:
    """Return a message as a frame; raises ValueError if it is too long."""
    body = protocol.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return len(body).to_bytes(_HEADER, "big") + body


def unpack(buffer: bytearray) -> list[protocol.Message]:
    """Take the whole frames off the front of a buffer.

    Raises NonsenseError for a frame that is too long or holds no JSON object.
    """
    messages = []
    while len(buffer) >= _HEADER:
        size = int.from_bytes(buffer[:_HEADER], "big")
        if size > FRAME_BYTES_MAX:
            raise NonsenseError(f"a frame of {size} bytes")
        if len(buffer) < _HEADER + size:
            break
        body = bytes(buffer[_HEADER : _HEADER + size])
        del buffer[: _HEADER + size]
        try:
            messages.append(protocol.decode(body))
        except (ValueError, RecursionError) as error:
            raise NonsenseError(f"a frame that is no message: {error}") from error
    return messages


class _Wire:
    """One connection: frames in, frames out, never waiting."""

    def __init__(self, sock: socket.socket, since: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            with contextlib.suppress(OSError):  # a kernel without it says so of a vanished machine, only later
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sock = sock
        self.since = since
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self._buffer = bytearray()

    def send(self, **message: object) -> None:
        """Send one frame; raises OSError when the other end is gone, or its buffer full."""
        frame = pack(message)
        if self.sock.send(frame) != len(frame):
            raise OSError("the other end does not read")

    def receive(self) -> list[protocol.Message] | None:
        """Return what has come, or None at end of file with nothing before it; raises OSError, NonsenseError."""
        messages: list[protocol.Message] = []
        while True:
            try:
                piece = self.sock.recv(FRAME_BYTES_MAX)
            except BlockingIOError:
                return messages
            if not piece:
                return messages or None  # end of file shows again at the next look
            self._buffer += piece
            messages += unpack(self._buffer)
            if len(messages) > _FRAMES_MAX:
                raise NonsenseError("more frames than there is to say")

    def close(self) -> None:
        """Hang up."""
        self.sock.close()


class _Guest(NamedTuple):
    """A connection to the head: unproven until `node` is above 0."""

    wire: _Wire
    node: int = 0
    host: str = ""


class HeadLink:
    """Node 0's end: accepts the others and receives from them. Every call returns at once.

    Raises OSError when nothing can listen at `address`; `num_nodes` counts this node, too.
    """

    def __init__(self, address: tuple[str, int], secret: str, num_nodes: int, host: str) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self._listener.setblocking(False)
        self._secret = secret
        self._num_nodes = num_nodes
        self._host = host[:_HOST_CHARACTERS_MAX]
        self._guests: list[_Guest] = []
        self._joined: set[int] = set()
        self._address = ""

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for with `select`."""
        return [self._listener, *(guest.wire.sock for guest in self._guests)]

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have not joined."""
        return [node for node in range(1, self._num_nodes) if node not in self._joined]

    def tell(self, address: str) -> None:
        """Tell all nodes, also those that come later, where Ray's head is."""
        self._address = address
        for guest in self._guests:
            if guest.node:
                self._say(guest, address=address)

    def done(self) -> None:
        """Tell all nodes that the driver has ended, and hang up.

        Call it before Ray's head ends: a node takes Ray's end for a loss unless it has heard this.
        """
        for guest in self._guests:
            if guest.node:
                self._say(guest, done=True)
        self.close()

    def close(self) -> None:
        """Hang up on all."""
        self._listener.close()
        for guest in self._guests:
            guest.wire.close()
        self._guests.clear()

    def take(self, now: float) -> list[LinkState]:
        """Return the news since the last call; `now` is monotonic seconds."""
        words: list[LinkState] = []
        self._accept(now)
        for guest in list(self._guests):
            heard = self._hear(guest)
            words += heard
            if any(word.kind == LOST for word in heard):
                self._drop(guest.wire)
        for guest in list(self._guests):
            if not guest.node and now > guest.wire.since + PROVE_S:
                self._drop(guest.wire)
        return words

    def _accept(self, now: float) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # no further connection, or gone already
                return
            try:
                wire = _Wire(sock, now)
                wire.send(nonce=wire.nonce)
            except OSError:
                sock.close()
                continue
            self._guests.append(_Guest(wire))
            unproven = [guest for guest in self._guests if not guest.node]
            if len(unproven) > _UNPROVEN_MAX:
                self._drop(unproven[0].wire)

    def _hear(self, guest: _Guest) -> list[LinkState]:
        """Return what one guest says; one that is lost says so once, as its last word."""
        words: list[LinkState] = []
        try:
            messages = guest.wire.receive()
            if messages is None:
                raise OSError("the connection was closed")
            for message in messages:
                if not guest.node:
                    guest = self._welcome(guest, message)
                elif LOST in message:
                    return [*words, LinkState(LOST, guest.node, guest.host, protocol.text(message, LOST))]
                elif JOINED in message and guest.node not in self._joined:
                    self._joined.add(guest.node)
                    devices, cpus = protocol.integer(message, "devices"), protocol.integer(message, "cpus")
                    words.append(LinkState(JOINED, guest.node, guest.host, devices=devices, cpus=cpus))
        except (OSError, ValueError, NonsenseError) as error:
            if guest.node:
                return [*words, LinkState(LOST, guest.node, guest.host, _gone(guest.host, error))]
            self._drop(guest.wire)
        return words

    def _welcome(self, guest: _Guest, message: protocol.Message) -> _Guest:
        """Return the guest with its number; one without a valid proof raises."""
        node = protocol.integer(message, "node")
        nonces = (guest.wire.nonce, protocol.text(message, "nonce"))
        if not hmac.compare_digest(
            proof(self._secret, "node", node, nonces).encode(), protocol.text(message, "proof").encode()
        ):
            raise NonsenseError("it does not know the secret")
        if not 0 < node < self._num_nodes or any(other.node == node for other in self._guests):
            raise NonsenseError(f"there is no place for a node {node}")
        guest.wire.send(host=self._host, proof=proof(self._secret, "head", node, nonces))
        if self._address:
            guest.wire.send(address=self._address)
        welcome = guest._replace(node=node, host=protocol.text(message, "host")[:_HOST_CHARACTERS_MAX])
        self._guests[self._guests.index(guest)] = welcome
        return welcome

    def _say(self, guest: _Guest, **message: object) -> None:
        with contextlib.suppress(OSError):  # gone: that is heard at the next look
            guest.wire.send(**message)

    def _drop(self, wire: _Wire) -> None:
        wire.close()
        self._guests = [guest for guest in self._guests if guest.wire is not wire]


class MemberLink:
    """Another node's end. Calls return at once, but for an address that does not answer: `_CONNECT_S`.

    It connects to node 0 at `head`, until `until` in monotonic seconds.
    """

    def __init__(self, head: tuple[str, int], secret: str, node: int, host: str, until: float) -> None:
        self._head = head
        self._secret = secret
        self._node = node
        self._host = host[:_HOST_CHARACTERS_MAX]
        self._until = until
        self._again = 0.0
        self._wire: _Wire | None = None
        self._reason = "nobody answered"
        self._nonce = ""  # the head's, once it has come
        self._known = ""  # the head's name, once it has proved itself
        self._closed = False

    def sockets(self) -> list[socket.socket]:
        """Return what to wait for with `select`, besides a moment (`take` tries again)."""
        return [] if self._wire is None else [self._wire.sock]

    def joined(self, devices: int, cpus: int) -> None:
        """Say that Ray runs on this node, and what it offers."""
        self._say(joined=True, devices=devices, cpus=cpus)

    def lost(self, text: str) -> None:
        """Say, in a sentence, that Ray on this node is gone."""
        self._say(lost=text[:TEXT_CHARACTERS_MAX])

    def close(self) -> None:
        """Hang up, and hear nothing more."""
        self._closed = True
        self._hang_up()

    def take(self, now: float) -> list[LinkState]:
        """Return the news since the last call, connecting first if needed; `now` is monotonic seconds."""
        if self._closed:
            return []
        if self._wire is None and now >= self._again:
            self._connect(now)
        wire = self._wire
        if wire is None:
            return self._give_up(now)
        try:
            messages = wire.receive()
            if messages is None:
                raise OSError("the connection was closed")
            words = [word for message in messages for word in self._hear(message)]
            if not self._known and now > wire.since + PROVE_S:
                raise OSError("who listens there does not answer")
        except (OSError, ValueError, NonsenseError) as error:
            return self._break(error, now)
        return words

    def _connect(self, now: float) -> None:
        self._again = now + _AGAIN_S
        self._nonce = ""
        try:
            sock = socket.create_connection(self._head, timeout=_CONNECT_S)
            # Before the head listens, on one machine, the kernel may choose the very port that is called.
            if sock.getsockname() == sock.getpeername():
                sock.close()
                raise OSError("nobody listens there")
            self._wire = _Wire(sock, now)
        except OSError as error:
            self._reason = error.strerror or str(error)

    def _hear(self, message: protocol.Message) -> list[LinkState]:
        wire = self._wire
        if wire is None:  # "done" came before this one
            return []
        if not self._nonce:
            self._nonce = protocol.text(message, "nonce")
            shown = proof(self._secret, "node", self._node, (self._nonce, wire.nonce))
            wire.send(node=self._node, host=self._host, nonce=wire.nonce, proof=shown)
        elif not self._known:
            expected = proof(self._secret, "head", self._node, (self._nonce, wire.nonce))
            if not hmac.compare_digest(expected.encode(), protocol.text(message, "proof").encode()):
                raise NonsenseError("who listens there does not know the secret")
            self._known = protocol.text(message, "host") or self._head[0]
        elif ADDRESS in message:
            return [LinkState(ADDRESS, 0, self._known, protocol.text(message, ADDRESS))]
        elif DONE in message:
            self.close()
            return [LinkState(DONE, 0, self._known)]
        return []

    def _break(self, error: Exception, now: float) -> list[LinkState]:
        """Hang up: for good when the head was known, else to try again."""
        self._hang_up()
        if self._known:
            self._closed = True
            return [LinkState(LOST, 0, self._known, _gone(self._known, error))]
        self._reason = str(error)
        return self._give_up(now)

    def _give_up(self, now: float) -> list[LinkState]:
        if now < self._until:
            return []
        self._closed = True
        where = f"{self._head[0]}:{self._head[1]}"
        text = f"Node {self._host} could not reach the head of its run's Ray cluster at {where}: {self._reason}"
        return [LinkState(LOST, 0, self._head[0], text)]

    def _say(self, **message: object) -> None:
        if self._wire is not None and self._known:
            with contextlib.suppress(OSError):  # the head is gone: that is heard at the next look
                self._wire.send(**message)

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _gone(host: str, error: Exception) -> str:
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"Node {host} of the run's Ray cluster is gone: its node task does not answer any more ({why})"
