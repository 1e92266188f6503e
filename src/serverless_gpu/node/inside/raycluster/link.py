"""Connects a cluster's nodes: the other nodes connect to node 0 and prove the run's secret.

    node n                                            node 0
      │ ── connects, retries until its deadline ────────▶ │
      │ ◀── {"nonce"} ──────────────────────────────────  │
      │ ── {"node", "host", "nonce", "proof"} ──────────▶ │
      │ ◀── {"host", "proof"} ──────────────────────────  │  both peers are now authenticated
      │ ◀── {"address"} ────────────────────────────────  │  Ray's head is up; node n joins it
      │ ── {"joined", "devices", "cpus"} ───────────────▶ │  the driver starts when all nodes have joined
      │ ── {"lost": text} ──────────────────────────────▶ │  Ray on node n is gone
      │ ◀── {"done"} ───────────────────────────────────  │  the driver has ended; node n ends Ray and returns

A frame consists of four length bytes and a JSON object. Nodes never send the secret over the network. Nodes do not send
Ray's token either, because every node derives the token from the secret (`ray_start.py`). Frames that follow the proofs
are not signed. An attacker who can write to a link can also write to Ray's unencrypted connections.

Failure cases:

* Node 0 closes a connection that sends no proof in time, too much data or an invalid message. Node 0 also closes a
  connection that claims an unknown node number, number 0 or a number in use. Connections from other nodes remain open.
* If a connection ends before node 0 has accepted the proof, node n retries until its deadline. Another process may
  temporarily use the port of node 0.
* If an accepted connection ends without the message "done", the peer's node task has ended. TCP keep-alives detect a
  vanished machine within `_SILENCE_S` seconds.
* If a process forks while a link is open, the child closes its copy of the connection (`close`). The peer reads end of
  file after the last copy of the connection is closed.
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
# Maximum length of a lost node's error message. With JSON escapes, a message of this length fits into a frame.
TEXT_CHARACTERS_MAX = 1000
_HEADER = 4
_NONCE_BYTES = 32
PROVE_S = 10.0
# Maximum number of unauthenticated connections. Above the limit, the head closes the oldest unauthenticated connection.
_UNPROVEN_MAX = 64
_FRAMES_MAX = 16  # Maximum number of frames in one read. The whole protocol uses fewer frames.
_HOST_CHARACTERS_MAX = 255
_AGAIN_S = 0.2
_CONNECT_S = 1.0
_SILENCE_S = 10
# Linux's TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_KEEPCNT and TCP_USER_TIMEOUT.
_KEEP_ALIVE = ((4, 4), (5, 2), (6, 3), (18, _SILENCE_S * 1000))

JOINED, LOST, ADDRESS, DONE = "joined", "lost", "address", "done"


class LinkState(NamedTuple):
    """A message received over a link."""

    kind: str  # `JOINED` or `LOST` from a node, `ADDRESS` or `DONE` from the head.
    node: int  # Number of the sending node; 0 for the head.
    host: str = ""  # Name of the sending node, or its address while the name is unknown.
    text: str = ""  # Address of the Ray head, or the error message of a loss.
    devices: int = 0  # Number of devices on a node that joined.
    cpus: int = 0


class NonsenseError(Exception):
    """A peer sent a message that violates the link protocol."""


def proof(secret: str, role: str, node: int, nonces: tuple[str, str]) -> str:
    """Return the proof that `node` knows the secret, for the nonces of both peers.

    `role` is "head" or "node", so that neither peer can replay a received proof.
    """
    spoken = json.dumps(["sgpu-link", role, node, *nonces])
    return hmac.new(secret.encode(), spoken.encode(), hashlib.sha256).hexdigest()


def pack(message: protocol.Message) -> bytes:
    """Return a message as a frame. Raises ValueError if the frame exceeds the size limit."""
    body = protocol.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}")
    return len(body).to_bytes(_HEADER, "big") + body


def unpack(buffer: bytearray) -> list[protocol.Message]:
    """Remove the complete frames from the front of a buffer and return the frames' messages.

    Raises NonsenseError if a frame exceeds the size limit or contains no JSON object.
    """
    messages = []
    while len(buffer) >= _HEADER:
        size = int.from_bytes(buffer[:_HEADER], "big")
        if size > FRAME_BYTES_MAX:
            raise NonsenseError(f"received a frame of {size} bytes, over the limit of {FRAME_BYTES_MAX}")
        if len(buffer) < _HEADER + size:
            break
        body = bytes(buffer[_HEADER : _HEADER + size])
        del buffer[: _HEADER + size]
        try:
            messages.append(protocol.decode(body))
        except (ValueError, RecursionError) as error:
            raise NonsenseError(f"received a frame that is not a valid message: {error}") from error
    return messages


class _Wire:
    """A non-blocking connection that sends and receives frames."""

    def __init__(self, sock: socket.socket, since: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            # A kernel without these socket options takes longer to detect a vanished machine.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.sock = sock
        self.since = since
        self.nonce = secrets.token_hex(_NONCE_BYTES)
        self._buffer = bytearray()

    def send(self, **message: object) -> None:
        """Send one frame. Raises OSError if the peer has closed the connection or the send buffer is full."""
        frame = pack(message)
        if self.sock.send(frame) != len(frame):
            raise OSError("the peer's receive buffer is full")

    def receive(self) -> list[protocol.Message] | None:
        """Return the received messages, or None at end of file.

        Raises OSError if the connection fails. Raises NonsenseError if a message is not valid. If messages arrived
        before the end of file, `receive` first returns these messages. The next call of `receive` after these messages
        returns None.
        """
        messages: list[protocol.Message] = []
        while True:
            try:
                piece = self.sock.recv(FRAME_BYTES_MAX)
            except BlockingIOError:
                return messages
            if not piece:
                return messages or None  # The next `receive` call reads end of file again.
            self._buffer += piece
            messages += unpack(self._buffer)
            if len(messages) > _FRAMES_MAX:
                raise NonsenseError("received more frames than the protocol allows")

    def close(self) -> None:
        """Close the connection."""
        self.sock.close()


class _Guest(NamedTuple):
    """A connection from a peer to the head.

    `node` is 0 until the peer has proved that it knows the secret.
    """

    wire: _Wire
    node: int = 0
    host: str = ""


class HeadLink:
    """The link end on node 0, which accepts the other nodes and receives their messages.

    All methods are non-blocking. Raises OSError if the head cannot listen at `address`. `num_nodes` includes node 0.
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
        """Return the sockets that the caller passes to `select`."""
        return [self._listener, *(guest.wire.sock for guest in self._guests)]

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have not joined the cluster."""
        return [node for node in range(1, self._num_nodes) if node not in self._joined]

    def tell(self, address: str) -> None:
        """Send the Ray head's address to all nodes, including nodes that connect later."""
        self._address = address
        for guest in self._guests:
            if guest.node:
                self._say(guest, address=address)

    def done(self) -> None:
        """Notify all nodes that the driver has ended, and close the connections.

        Call `done` before Ray's head ends. A node that has not received the message "done" treats the end of Ray as a
        loss.
        """
        for guest in self._guests:
            if guest.node:
                self._say(guest, done=True)
        self.close()

    def close(self) -> None:
        """Close the listener and all connections."""
        self._listener.close()
        for guest in self._guests:
            guest.wire.close()
        self._guests.clear()

    def take(self, now: float) -> list[LinkState]:
        """Return the messages received since the previous call. `now` is the monotonic time in seconds."""
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
            except OSError:  # No further connection is pending, or the peer has already closed the connection.
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
        """Return the messages of one connection. The last message of a lost node is `LOST`."""
        words: list[LinkState] = []
        try:
            messages = guest.wire.receive()
            if messages is None:
                raise OSError("the peer closed the connection")
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
        """Return the authenticated connection with its node number.

        Raises an error if the peer's proof is not valid.
        """
        node = protocol.integer(message, "node")
        nonces = (guest.wire.nonce, protocol.text(message, "nonce"))
        if not hmac.compare_digest(
            proof(self._secret, "node", node, nonces).encode(), protocol.text(message, "proof").encode()
        ):
            raise NonsenseError("the peer does not know the secret")
        if not 0 < node < self._num_nodes or any(other.node == node for other in self._guests):
            raise NonsenseError(f"node number {node} is unknown or already connected")
        guest.wire.send(host=self._host, proof=proof(self._secret, "head", node, nonces))
        if self._address:
            guest.wire.send(address=self._address)
        welcome = guest._replace(node=node, host=protocol.text(message, "host")[:_HOST_CHARACTERS_MAX])
        self._guests[self._guests.index(guest)] = welcome
        return welcome

    def _say(self, guest: _Guest, **message: object) -> None:
        # If the peer has closed the connection, the next `take` call detects the closed connection.
        with contextlib.suppress(OSError):
            guest.wire.send(**message)

    def _drop(self, wire: _Wire) -> None:
        wire.close()
        self._guests = [guest for guest in self._guests if guest.wire is not wire]


class MemberLink:
    """The link end on every node except node 0.

    Only connecting to node 0 blocks, for at most `_CONNECT_S` seconds. The node tries to connect to node 0 at `head`
    until the deadline `until` in monotonic seconds.
    """

    def __init__(self, head: tuple[str, int], secret: str, node: int, host: str, until: float) -> None:
        self._head = head
        self._secret = secret
        self._node = node
        self._host = host[:_HOST_CHARACTERS_MAX]
        self._until = until
        self._again = 0.0
        self._wire: _Wire | None = None
        self._reason = "no process answered"
        self._nonce = ""  # Nonce received from the head, or "" before the head has sent its nonce.
        self._known = ""  # Name of the head, or "" until the head has proved that it knows the secret.
        self._closed = False

    def sockets(self) -> list[socket.socket]:
        """Return the sockets that the caller passes to `select`.

        Use a short timeout for `select`, because `take` also retries the connection.
        """
        return [] if self._wire is None else [self._wire.sock]

    def joined(self, devices: int, cpus: int) -> None:
        """Report that Ray runs on this node, with the node's resources."""
        self._say(joined=True, devices=devices, cpus=cpus)

    def lost(self, text: str) -> None:
        """Report that Ray on this node has ended, with an error message."""
        self._say(lost=text[:TEXT_CHARACTERS_MAX])

    def close(self) -> None:
        """Close the connection and ignore all later messages."""
        self._closed = True
        self._hang_up()

    def take(self, now: float) -> list[LinkState]:
        """Return the messages received since the previous call, connecting first if needed.

        `now` is the monotonic time in seconds.
        """
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
                raise OSError("the peer closed the connection")
            words = [word for message in messages for word in self._hear(message)]
            if not self._known and now > wire.since + PROVE_S:
                raise OSError("the process at the head's address does not answer")
        except (OSError, ValueError, NonsenseError) as error:
            return self._break(error, now)
        return words

    def _connect(self, now: float) -> None:
        self._again = now + _AGAIN_S
        self._nonce = ""
        try:
            sock = socket.create_connection(self._head, timeout=_CONNECT_S)
            # If the head runs on this machine and does not listen yet, the kernel may choose the head's port as local
            # port. A socket with the head's port as local port is connected to itself.
            if sock.getsockname() == sock.getpeername():
                sock.close()
                raise OSError("no process listens at the head's address")
            self._wire = _Wire(sock, now)
        except OSError as error:
            self._reason = error.strerror or str(error)

    def _hear(self, message: protocol.Message) -> list[LinkState]:
        wire = self._wire
        if wire is None:  # A `DONE` message received earlier has closed the connection.
            return []
        if not self._nonce:
            self._nonce = protocol.text(message, "nonce")
            shown = proof(self._secret, "node", self._node, (self._nonce, wire.nonce))
            wire.send(node=self._node, host=self._host, nonce=wire.nonce, proof=shown)
        elif not self._known:
            expected = proof(self._secret, "head", self._node, (self._nonce, wire.nonce))
            if not hmac.compare_digest(expected.encode(), protocol.text(message, "proof").encode()):
                raise NonsenseError("the process at the head's address does not know the secret")
            self._known = protocol.text(message, "host") or self._head[0]
        elif ADDRESS in message:
            return [LinkState(ADDRESS, 0, self._known, protocol.text(message, ADDRESS))]
        elif DONE in message:
            self.close()
            return [LinkState(DONE, 0, self._known)]
        return []

    def _break(self, error: Exception, now: float) -> list[LinkState]:
        """Close the connection. The node retries later, unless the head has already sent its proof."""
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
            # If the head has closed the connection, the next `take` call detects the closed connection.
            with contextlib.suppress(OSError):
                self._wire.send(**message)

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def _gone(host: str, error: Exception) -> str:
    why = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"Node {host} of the run's Ray cluster is gone: its node task no longer answers ({why})"
