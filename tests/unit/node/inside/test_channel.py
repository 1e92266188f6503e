"""Messages with descriptors: whole or not at all, in order, whoever writes them."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from serverless_gpu.node.inside.channel import BODY_BYTES_MAX, PACKET_BYTES_MAX, Channel, pair
from tests.support.golden import golden

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = pair()
    yield left, right
    left.close()
    right.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe2(os.O_CLOEXEC)
    yield read, write
    os.close(read)
    os.close(write)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def raw(channel: Channel, packet: bytes, fds: tuple[int, ...] = ()) -> None:
    socket.send_fds(channel.sock, [packet], list(fds))


@pytest.mark.parametrize("size", [0, 1, PACKET_BYTES_MAX, PACKET_BYTES_MAX + 1, 3_000_000])
def test_a_body_of_any_size_arrives_whole(ends: Ends, size: int) -> None:
    body = os.urandom(size)
    ends[0].send(body)
    assert ends[1].receive() == (body, ())


def test_both_ways_and_in_order(ends: Ends) -> None:
    for body in (b"one", b"2" * 100_000, b"three"):
        ends[0].send(body)
    ends[1].send(b"answer")
    assert [ends[1].receive() for _ in range(3)] == [(b"one", ()), (b"2" * 100_000, ()), (b"three", ())]
    assert ends[0].receive() == (b"answer", ())


@pytest.mark.parametrize("size", [5, 100_000])
def test_descriptors_travel_with_their_message(ends: Ends, pipe: tuple[int, int], size: int) -> None:
    ends[0].send(b"x" * size, (pipe[1], pipe[0]))
    received = ends[1].receive()
    assert received is not None
    body, (write, read) = received
    os.write(write, b"hello")
    assert (body, os.read(pipe[0], 5)) == (b"x" * size, b"hello")
    assert [os.get_inheritable(fd) for fd in (write, read)] == [False, False]
    os.close(write)
    os.close(read)


def test_no_descriptor_is_left_behind(ends: Ends) -> None:
    before = open_descriptors()
    for _ in range(3):
        ends[0].send(b"x" * 100_000)
        ends[1].receive()
    assert open_descriptors() == before


def test_a_closed_peer_reads_as_none_after_what_it_said(ends: Ends) -> None:
    ends[0].send(b"last words")
    ends[0].close()
    assert [ends[1].receive(), ends[1].receive(), ends[1].receive()] == [(b"last words", ()), None, None]


def test_a_peer_that_left_without_reading_reads_as_none_too(ends: Ends) -> None:
    ends[1].send(b"never read")
    ends[0].close()
    assert ends[1].receive() is None


def test_nobody_to_send_to(ends: Ends) -> None:
    ends[0].close()
    with pytest.raises(BrokenPipeError):
        ends[1].send(b"x")


def test_a_channel_that_does_not_block(ends: Ends) -> None:
    ends[0].sock.setblocking(False)
    ends[1].sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[0].receive()
    sent = 0
    with pytest.raises(BlockingIOError):
        while True:
            ends[0].send(sent.to_bytes(4, "big") + b"x" * 50_000)
            sent += 1
    received = []
    with pytest.raises(BlockingIOError):
        while (message := ends[1].receive()) is not None:
            received.append(int.from_bytes(message[0][:4], "big"))
    assert sent > 0 and received == list(range(sent))


def test_many_writers_never_mix(ends: Ends) -> None:
    """The ranks of a gang share the socket of their stem."""
    writers, each = 8, 50

    def write(number: int) -> None:
        for count in range(each):
            size = 70_000 if count % 10 == 0 else 300
            ends[0].send(bytes([number, count]) + bytes([number]) * size)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {number: [] for number in range(writers)}
    for _ in range(writers * each):
        received = ends[1].receive()
        assert received is not None
        number, count = received[0][:2]
        assert set(received[0][2:]) == {number}
        seen[number].append(count)
    for thread in threads:
        thread.join()
    assert seen == {number: list(range(each)) for number in range(writers)}


def test_a_descriptor_that_was_inherited_becomes_a_channel(ends: Ends) -> None:
    adopted = Channel.adopt(os.dup(ends[1].fileno()))
    ends[0].send(b"to whoever reads")
    assert adopted.receive() == (b"to whoever reads", ())
    adopted.close()


# --- packets no channel of ours sends --------------------------------------------------------------------------------


def test_a_packet_that_is_too_long_is_refused(ends: Ends) -> None:
    raw(ends[0], b"I" + b"x" * (PACKET_BYTES_MAX + 1))
    with pytest.raises(OSError, match=golden("node.channel.message-cut-short")):
        ends[1].receive()


def test_more_descriptors_than_fit_are_refused_and_closed(ends: Ends, pipe: tuple[int, int]) -> None:
    before = open_descriptors()
    raw(ends[0], b"Ix", (pipe[0],) * 251)
    with pytest.raises(OSError, match=golden("node.channel.message-cut-short")):
        ends[1].receive()
    assert open_descriptors() == before


def test_more_descriptors_than_the_kernel_takes_cannot_be_sent(ends: Ends, pipe: tuple[int, int]) -> None:
    with pytest.raises(OSError) as caught:
        ends[0].send(b"x", (pipe[0],) * 254)
    assert caught.value.errno == errno.EINVAL


def test_a_body_over_the_limit_is_refused_and_leaves_no_descriptor(ends: Ends, pipe: tuple[int, int]) -> None:
    before = open_descriptors()
    memory = os.memfd_create("test")
    os.ftruncate(memory, BODY_BYTES_MAX + 1)  # sparse: takes no memory
    raw(ends[0], b"M", (pipe[0], memory))
    os.close(memory)
    with pytest.raises(OSError, match=golden("node.channel.message-67108865-bytes")):
        ends[1].receive()
    assert open_descriptors() == before


@pytest.mark.parametrize("packet", [b"M", b"X", b"?what"])
def test_a_packet_that_is_no_message_is_an_os_error(ends: Ends, packet: bytes) -> None:
    raw(ends[0], packet)
    with pytest.raises(OSError):
        ends[1].receive()
