"""Nodes of one Ray cluster: who is let in, who is not, and how each hears that another is gone."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from serverless_gpu.node.inside import protocol
from serverless_gpu.node.inside.raycluster import link
from serverless_gpu.node.inside.raycluster.link import ADDRESS, DONE, JOINED, LOST, HeadLink, LinkState, MemberLink
from tests.support.golden import golden

SECRET = "5e" * 32
LIMIT_S = 60.0
EVER = float("inf")
CONNECTIONS = 64  # that have proved nothing and are kept

Ends = dict[str, list[LinkState]]


@pytest.fixture
def address() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        host, port = free.getsockname()
    return host, port


@pytest.fixture
def head(address: tuple[str, int]) -> Iterator[HeadLink]:
    made = HeadLink(address, SECRET, 3, "castor")
    yield made
    made.close()


@pytest.fixture
def member(address: tuple[str, int]) -> Iterator[Callable[..., MemberLink]]:
    with contextlib.ExitStack() as stack:

        def make(node: int = 1, secret: str = SECRET, until: float = EVER) -> MemberLink:
            made = MemberLink(address, secret, node, f"pollux-{node}", until)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def stranger(address: tuple[str, int], head: HeadLink) -> Iterator[socket.socket]:
    with socket.create_connection(address) as sock:
        sock.settimeout(LIMIT_S)
        yield sock


def talk(
    *ends: HeadLink | MemberLink, until: Callable[[list[LinkState]], bool], now: float | None = None
) -> list[LinkState]:
    """Let all ends take what comes, until enough was heard."""
    heard: list[LinkState] = []
    limit = time.monotonic() + LIMIT_S
    while not until(heard):
        assert time.monotonic() < limit, f"heard only {heard}"
        for end in ends:
            heard += end.take(time.monotonic() if now is None else now)
        select.select([sock for end in ends for sock in end.sockets()], [], [], 0.05)
    return heard


def word(kind: str, node: int) -> Callable[[list[LinkState]], bool]:
    return lambda heard: any(one.kind == kind and one.node == node for one in heard)


def read_frame(sock: socket.socket) -> protocol.Message:
    buffer = bytearray()
    while not (messages := link.unpack(buffer)):
        piece = sock.recv(1)
        assert piece, "hung up"
        buffer += piece
    return messages[0]


def is_hung_up_on(sock: socket.socket, head: HeadLink, now: float | None = None) -> bool:
    """Whether the head closes a connection, which must happen before long."""
    sock.setblocking(False)
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        assert head.take(time.monotonic() if now is None else now) == []
        select.select([sock], [], [], 0.05)
        try:
            if not sock.recv(1000):
                return True
        except BlockingIOError:
            continue
        except ConnectionResetError:
            return True
    return False


def answer(sock: socket.socket, node: int, secret: str = SECRET) -> protocol.Message:
    """What a node says to the head's challenge."""
    nonces = (protocol.text(read_frame(sock), "nonce"), "ab" * 32)
    return {"node": node, "host": "pollux", "nonce": nonces[1], "proof": link.proof(secret, "node", node, nonces)}


def test_nodes_join_hear_the_address_and_that_all_is_done(head: HeadLink, member: Callable[..., MemberLink]) -> None:
    first, second = member(1), member(2)
    assert head.missing() == [1, 2]
    head.tell("127.0.0.11:6379")  # to those that are there, and to those that come
    heard = talk(head, first, second, until=lambda heard: len(heard) == 2)
    assert heard == [LinkState(ADDRESS, 0, "castor", "127.0.0.11:6379")] * 2
    second.joined(4, 9)
    assert talk(head, until=word(JOINED, 2)) == [LinkState(JOINED, 2, "pollux-2", devices=4, cpus=9)]
    assert head.missing() == [1]
    first.joined(1, 1)
    talk(head, until=word(JOINED, 1))
    assert head.missing() == []
    head.done()
    assert talk(first, until=word(DONE, 0)) == [LinkState(DONE, 0, "castor")]
    assert talk(second, until=word(DONE, 0)) == [LinkState(DONE, 0, "castor")]
    assert first.take(EVER) == []


def test_the_address_comes_later(head: HeadLink, member: Callable[..., MemberLink]) -> None:
    node = member(1)
    greeted = 5
    for _ in range(greeted):
        assert talk(head, node, until=lambda heard: True) == []
        select.select([], [], [], 0.02)
    head.tell("127.0.0.11:6379")
    assert talk(head, node, until=word(ADDRESS, 0)) == [LinkState(ADDRESS, 0, "castor", "127.0.0.11:6379")]


def test_a_node_waits_for_a_head_that_comes_later(address: tuple[str, int], member: Callable[..., MemberLink]) -> None:
    node = member(1)
    assert node.take(time.monotonic()) == []
    assert node.sockets() == []
    head = HeadLink(address, SECRET, 2, "castor")
    head.tell("here:1")
    talk(head, node, until=word(ADDRESS, 0))
    head.close()


def test_F45_node_that_lost_its_ray_is_named_with_what_it_said(
    head: HeadLink, member: Callable[..., MemberLink]
) -> None:
    node = member(2)
    head.tell("here:1")
    talk(head, node, until=word(ADDRESS, 0))
    node.joined(4, 9)
    node.lost("raylet died: exit code -9")
    node.close()
    heard = talk(head, until=word(LOST, 2))
    assert heard == [
        LinkState(JOINED, 2, "pollux-2", "", 4, 9),
        LinkState(LOST, 2, "pollux-2", "raylet died: exit code -9"),
    ]
    assert head.take(EVER) == []


def test_F45_node_task_that_dies_is_named(head: HeadLink, member: Callable[..., MemberLink]) -> None:
    node = member(1)
    head.tell("here:1")
    talk(head, node, until=word(ADDRESS, 0))
    node.close()
    [lost] = talk(head, until=word(LOST, 1))
    text = "Node pollux-1 of the run's Ray cluster is gone: its node task no longer answers"
    assert lost == LinkState(LOST, 1, "pollux-1", f"{text} (the peer closed the connection)")


def test_F45_head_that_dies_is_named(head: HeadLink, member: Callable[..., MemberLink]) -> None:
    node = member(1)
    head.tell("here:1")
    talk(head, node, until=word(ADDRESS, 0))
    head.close()
    [lost] = talk(node, until=word(LOST, 0))
    assert lost[:3] == (LOST, 0, "castor")
    assert golden("node.ray_link.node-castor-run") in lost.text
    assert node.take(EVER) == []


def test_a_long_text_about_a_loss_is_cut_and_arrives(head: HeadLink, member: Callable[..., MemberLink]) -> None:
    node = member(1)
    head.tell("here:1")
    talk(head, node, until=word(ADDRESS, 0))
    node.lost("\U0001f4a5" * 100_000)
    [lost] = talk(head, until=word(LOST, 1))
    assert lost.text == "\U0001f4a5" * link.TEXT_CHARACTERS_MAX


def test_a_node_with_another_secret_is_not_let_in(head: HeadLink, member: Callable[..., MemberLink]) -> None:
    head.tell("127.0.0.11:6379")
    stranger = member(1, secret="00" * 32, until=time.monotonic() + 1)
    heard = talk(head, stranger, until=lambda heard: bool(heard))
    assert [one.kind for one in heard] == [LOST]
    assert golden("node.ray_link.node-pollux-could") in heard[0].text
    assert head.missing() == [1, 2]


def test_a_head_with_another_secret_is_not_believed(
    address: tuple[str, int], member: Callable[..., MemberLink]
) -> None:
    node = member(1, until=1.0)
    heard: list[LinkState] = []
    with socket.create_server(address) as impostor:
        assert node.take(0.0) == []
        sock, _ = impostor.accept()
        with sock:
            sock.sendall(link.pack({"nonce": "00" * 32}))
            while not select.select([sock], [], [], 0.02)[0]:
                assert node.take(0.0) == []
            own = read_frame(sock)["proof"]
            sock.sendall(link.pack({"host": "evil", "proof": own}) + link.pack({"address": "evil:1"}))
            while not heard:
                select.select(node.sockets(), [], [], 0.02)
                heard += node.take(1.0)
    assert [one.kind for one in heard] == [LOST]
    assert golden("node.ray_link.does-know-secret") in heard[0].text


@pytest.mark.parametrize("node", [0, -1, 3, 10**30])
def test_a_number_that_is_none_of_the_run_has_no_place(head: HeadLink, stranger: socket.socket, node: int) -> None:
    head.take(0.0)
    stranger.sendall(link.pack(answer(stranger, node)))
    assert is_hung_up_on(stranger, head)


def test_a_number_that_is_taken_has_no_place(
    head: HeadLink, member: Callable[..., MemberLink], stranger: socket.socket
) -> None:
    head.tell("here:1")
    talk(head, member(1), until=word(ADDRESS, 0))
    stranger.sendall(link.pack(answer(stranger, 1)))
    assert is_hung_up_on(stranger, head)


def test_the_proof_is_of_this_connection_and_this_number(head: HeadLink, stranger: socket.socket) -> None:
    head.take(0.0)
    stranger.sendall(link.pack({**answer(stranger, 1), "node": 2}))
    assert is_hung_up_on(stranger, head)


def test_a_silent_connection_is_closed_in_time(head: HeadLink, stranger: socket.socket) -> None:
    head.take(0.0)
    assert len(head.sockets()) == 2
    assert head.take(link.PROVE_S - 1) == []
    assert len(head.sockets()) == 2
    assert is_hung_up_on(stranger, head, now=link.PROVE_S + 1)
    assert len(head.sockets()) == 1


def test_half_a_frame_is_waited_for_and_then_closed(head: HeadLink, stranger: socket.socket) -> None:
    head.take(0.0)
    frame = link.pack(answer(stranger, 1))
    stranger.sendall(frame[:-1])
    assert head.take(1.0) == []
    assert is_hung_up_on(stranger, head, now=link.PROVE_S + 1)


@pytest.mark.parametrize(
    "sent",
    [
        (link.FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        b"\xff" * 100,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x04\xff\xfe\xfd\xfc",
        (10_000).to_bytes(4, "big") + b"[" * 10_000,
        link.pack({"node": "1", "host": "a", "nonce": "b", "proof": "c"}),
        link.pack({"node": 1, "host": "a", "nonce": "b", "proof": "\u00e9"}),
        link.pack({"joined": True, "devices": 1, "cpus": 1}),
        b"\x00\x00\x00\x00" * 2,
    ],
)
def test_nonsense_is_hung_up_on_and_the_others_do_not_notice(
    head: HeadLink, member: Callable[..., MemberLink], stranger: socket.socket, sent: bytes
) -> None:
    head.tell("here:1")
    stranger.sendall(sent)
    assert is_hung_up_on(stranger, head)
    talk(head, member(1), until=word(ADDRESS, 0))


def test_a_welcome_node_that_talks_nonsense_is_lost(head: HeadLink, stranger: socket.socket) -> None:
    head.take(0.0)
    stranger.sendall(link.pack(answer(stranger, 1)))
    while select.select([stranger], [], [], 0)[0] == []:
        assert head.take(time.monotonic()) == []
    stranger.sendall(b"\xff" * 8)
    [lost] = talk(head, until=word(LOST, 1))
    assert "a frame of" in lost.text


def test_many_silent_connections_do_not_keep_a_node_out(
    head: HeadLink, member: Callable[..., MemberLink], address: tuple[str, int]
) -> None:
    head.tell("here:1")
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS + 30):
            stack.enter_context(socket.create_connection(address))
            head.take(0.0)
        assert len(head.sockets()) == CONNECTIONS + 1
        talk(head, member(1), until=word(ADDRESS, 0), now=0.0)


def test_a_listener_that_says_nothing_is_left_and_tried_again(
    address: tuple[str, int], member: Callable[..., MemberLink]
) -> None:
    node = member(1, until=100.0)
    with socket.create_server(address) as silent:
        assert node.take(0.0) == []
        assert node.take(link.PROVE_S - 1) == []
        assert len(node.sockets()) == 1
        assert node.take(link.PROVE_S + 1) == []
        assert node.sockets() == []
        assert node.take(link.PROVE_S + 2) == []  # tries again
        assert len(node.sockets()) == 1
        [lost] = node.take(200.0)
        assert lost.kind == LOST
        assert "does not answer" in lost.text
        silent.settimeout(LIMIT_S)
        for _ in range(2):
            silent.accept()[0].close()


def test_nobody_there_is_said_after_the_patience_is_over(
    address: tuple[str, int], member: Callable[..., MemberLink]
) -> None:
    node = member(1, until=60.0)
    assert node.take(59.0) == []
    [lost] = node.take(60.0)
    where = f"{address[0]}:{address[1]}"
    text = f"Node pollux-1 could not reach the head of its run's Ray cluster at {where}: Connection refused"
    assert lost == LinkState(LOST, 0, address[0], text)
    assert node.take(EVER) == []


def test_an_address_that_is_taken_is_an_error(address: tuple[str, int]) -> None:
    with socket.create_server(address), pytest.raises(OSError, match="in use"):
        HeadLink(address, SECRET, 2, "castor")


def test_frames_come_off_the_buffer_whole() -> None:
    stream = link.pack({"a": 1}) + link.pack({"b": "two"})
    buffer = bytearray()
    found = []
    for byte in stream:
        buffer.append(byte)
        found += link.unpack(buffer)
    assert found == [{"a": 1}, {"b": "two"}]
    assert not buffer


def test_a_frame_that_is_too_long_is_not_packed() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        link.pack({"text": "x" * link.FRAME_BYTES_MAX})


def test_proofs_differ_by_run_role_node_and_connection() -> None:
    nonces = ("1", "2")
    made = {
        link.proof("0" * 64, "head", 1, nonces),
        link.proof(SECRET, "head", 1, nonces),
        link.proof(SECRET, "node", 1, nonces),
        link.proof(SECRET, "node", 2, nonces),
        link.proof(SECRET, "node", 1, ("2", "1")),
    }
    assert len(made) == 5
    assert all(len(one) == 64 for one in made)
