"""What ranks write: byte-exact in files, as text to whoever watches, bounded everywhere."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node import logs
from serverless_gpu.node.logs import RankLog

Heard = list[tuple[int, str, str]]


class Rank:
    """A log whose write ends a test holds, as a rank would."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.heard: Heard = []
        self.log = RankLog(3, directory, lambda rank, stream, text: self.heard.append((rank, stream, text)))
        self.closed = False

    def write(self, data: bytes, stream: int = 0) -> None:
        os.write(self.log.write_ends()[stream], data)

    def drain(self) -> list[bool]:
        return [drain() for _, drain in self.log.readers()]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.log.close()

    def stored(self, stream: str = "stdout") -> bytes:
        path = self.directory / f"3.{stream}"
        return path.read_bytes() if path.exists() else b""

    def text(self, stream: str = "stdout") -> str:
        return "".join(text for _, name, text in self.heard if name == stream)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_both_streams_are_stored_and_passed_on(rank: Rank) -> None:
    rank.write(b"out\n")
    rank.write(b"err\n", 1)
    assert rank.drain() == [True, True]
    assert (rank.stored(), rank.stored("stderr")) == (b"out\n", b"err\n")
    assert rank.heard == [(3, "stdout", "out\n"), (3, "stderr", "err\n")]


def test_a_rank_that_writes_nothing_leaves_no_files(rank: Rank) -> None:
    rank.drain()
    rank.close()
    assert list(rank.directory.iterdir()) == []


def test_files_are_private_and_appended_to(rank: Rank) -> None:
    (rank.directory / "3.stdout").write_bytes(b"before\n")
    rank.write(b"after\n")
    rank.write(b"x", 1)
    rank.drain()
    assert rank.stored() == b"before\nafter\n"
    assert (rank.directory / "3.stderr").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "data",
    [b"\xff\xfe\x00 binary", "umlaut ä, snowman ☃".encode(), b"\x1b[31mred\x1b[0m", b"10%\r20%\r30%\n", b"\n\n\n"],
    ids=["binary", "utf-8", "ansi", "progress", "newlines"],
)
def test_F50_bytes_are_stored_as_they_are_and_shown_as_text(rank: Rank, data: bytes) -> None:
    for byte in data:  # split in the middle of characters
        rank.write(bytes([byte]))
        rank.drain()
    assert rank.stored() == data
    assert rank.text() == data.decode("utf-8", "replace")


def test_nobody_has_to_watch(tmp_path: Path) -> None:
    log = RankLog(0, tmp_path, None)
    os.write(log.write_ends()[0], b"x\n")
    log.close()
    assert ((tmp_path / "0.stdout").read_bytes(), log.tail()) == (b"x\n", "x")


# --- ends ------------------------------------------------------------------------------------------------------------


def test_the_end_of_a_stream_is_told_once_everybody_has_closed_it(rank: Rank) -> None:
    out, _ = rank.log.write_ends()
    grandchild = os.dup(out)
    rank.log.close_write_ends()
    rank.log.close_write_ends()
    assert rank.drain() == [True, False]
    os.close(grandchild)
    assert rank.drain() == [False, False]


def test_F10_closing_takes_what_is_there_and_does_not_wait_for_a_grandchild(rank: Rank) -> None:
    grandchild = os.dup(rank.log.write_ends()[0])
    rank.log.close_write_ends()
    os.write(grandchild, b"last words")
    rank.close()
    os.close(grandchild)
    assert (rank.stored(), rank.log.tail()) == (b"last words", "last words")


def test_closing_takes_everything_that_is_in_the_pipe(rank: Rank) -> None:
    fd = rank.log.write_ends()[0]
    os.set_blocking(fd, False)
    written = 0
    with pytest.raises(BlockingIOError):
        while True:
            written += os.write(fd, b"x" * 4096)
    rank.close()
    assert rank.stored() == b"x" * written


def test_no_descriptor_outlives_a_log(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    log = RankLog(0, tmp_path, None)
    os.write(log.write_ends()[1], b"x")
    log.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_descriptors_are_for_selectors(rank: Rank) -> None:
    rank.write(b"x", 1)
    readers = dict(rank.log.readers())
    assert len(readers) == 2
    ready = select.select(list(readers), [], [], 10)[0]
    assert [readers[fd]() for fd in ready] == [True]
    assert rank.text("stderr") == "x"


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_F49_one_turn_takes_only_so_much(rank: Rank) -> None:
    """A flood must not starve the other ranks: the pipe is left to the next turn."""
    fd = rank.log.write_ends()[0]
    turn_bytes = 16 * (1 << 16)
    written = 0
    pid = os.fork()
    if pid == 0:
        try:
            os.write(fd, b"x" * (3 * turn_bytes))  # blocks until it is read
        finally:
            os._exit(0)
    while written < 3 * turn_bytes:
        select.select([rank.log.readers()[0][0]], [], [], 10)
        assert rank.log.readers()[0][1]()
        assert len(rank.stored()) - written <= turn_bytes
        written = len(rank.stored())
    os.waitpid(pid, 0)
    assert rank.stored() == b"x" * (3 * turn_bytes)


def test_F49_over_the_limit_bytes_are_counted_and_still_passed_on(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "STORED_BYTES_MAX", 10)
    rank.write(b"12345678")
    rank.drain()
    rank.write(b"abcdefgh", 1)
    rank.drain()
    rank.write(b"gone")
    rank.drain()
    assert (rank.stored(), rank.stored("stderr"), rank.log.dropped_bytes) == (b"12345678", b"ab", 10)
    assert (rank.text(), rank.text("stderr")) == ("12345678gone", "abcdefgh")


def test_F28_a_file_that_cannot_be_written_loses_log_bytes_and_not_the_run(rank: Rank) -> None:
    (rank.directory / "3.stdout").mkdir()
    rank.write(b"lost\n")
    assert rank.drain() == [True, True]
    assert (rank.log.dropped_bytes, rank.log.tail(), rank.text()) == (5, "lost", "lost\n")


# --- the tail --------------------------------------------------------------------------------------------------------


def test_the_tail_has_the_last_lines_of_both_streams(rank: Rank) -> None:
    assert rank.log.tail() == ""
    for number in range(60):
        rank.write(b"line %d\n" % number, number % 2)
        rank.drain()
    rank.write(b"without an end")
    rank.drain()
    assert rank.log.tail().split("\n") == [f"line {number}" for number in range(10, 60)] + ["without an end"]


def test_F50_a_long_line_is_cut_to_its_end_in_the_tail_only(rank: Rank) -> None:
    data = b"a" * 5_000 + b"b" * 2_000
    rank.write(data + b"\n" + data)
    rank.drain()
    assert rank.log.tail() == "b" * 2_000 + "\n" + "b" * 2_000
    assert rank.stored() == data + b"\n" + data


def test_an_unfinished_line_of_one_stream_is_not_glued_to_the_other(rank: Rank) -> None:
    rank.write(b"loss: ")
    rank.drain()
    rank.write(b"Traceback\n", 1)
    rank.drain()
    rank.write(b"0.5\n")
    rank.drain()
    assert rank.log.tail().split("\n") == ["Traceback", "loss: 0.5"]
