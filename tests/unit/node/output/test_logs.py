"""What ranks write: byte-exact in files, as text to whoever watches, bounded everywhere."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import format_clock
from serverless_gpu.model.redaction import Redactor
from serverless_gpu.node.output import logs
from serverless_gpu.node.output.logs import KEPT_BYTES, OutputTail, RankLog, hidden_tails
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.node.logs import Rank


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
    log = RankLog(0, tmp_path, None, FakeClock())
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
    log = RankLog(0, tmp_path, None, FakeClock())
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
    rank.close()
    assert (rank.stored(), rank.stored("stderr")) == (b"12345678gone", b"abcdefgh"), "the last words are kept anyway"
    assert rank.log.dropped_bytes == 0


def test_F49_over_the_size_limit_the_file_is_head_marker_and_tail(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "STORED_BYTES_MAX", 100_000)
    head, middle, tail = b"h" * 100_000, b"m" * 700_000, b"t" * KEPT_BYTES
    rank.flood(head + middle + tail)
    assert rank.stored() == head
    rank.close()
    marker = f"\n— 700.0 kB dropped until {format_clock(rank.clock.wall_ns())} (limit 10 MB/s, 1 GiB per rank) —\n"
    assert rank.stored() == head + marker.encode() + tail
    assert rank.log.dropped_bytes == 700_000


def test_F49_over_the_rate_the_file_says_where_bytes_are_missing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "STORED_BURST_BYTES", 100_000)
    monkeypatch.setattr(logs, "STORED_BYTES_PER_S", 100_000)
    rank.log = RankLog(3, rank.directory, rank, rank.clock)
    rank.flood(b"a" * 100_000 + b"b" * 50_000)
    rank.clock.advance(0.9)
    rank.write(b"still too much")
    rank.drain()
    assert rank.stored() == b"a" * 100_000
    rank.clock.advance(0.1)
    rank.write(b"calm again\n")
    rank.drain()
    assert rank.stored()[100_000:].decode() == golden(
        "node.logs.50-kb-dropped", format_clock=format_clock(rank.clock.wall_ns())
    )
    assert rank.log.dropped_bytes == 50_014


def test_F49_a_line_of_100_MB_is_no_flood(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.watching = False
    block = b"0123456789abcdef" * (1 << 11)
    for _ in range(3100):
        rank.write(block)
        rank.drain()
    rank.close()
    stored = rank.stored()
    assert (len(stored), rank.log.dropped_bytes) == (3100 * len(block), 0)
    assert stored == block * 3100


def test_F49_live_output_over_the_rate_is_counted_and_shown_as_missing(rank: Rank) -> None:
    line = b"x" * 63 + b"\n"
    rank.flood(line * 40_000)  # 2.56 MB at one moment; 2 MB pass, of which the lines themselves are one half
    assert rank.missed == [], "nothing is said in the middle of it"
    assert rank.log.behind
    rank.log.tend()
    assert rank.missed == [], "the flood may still go on"
    rank.clock.advance(1.0)
    rank.log.tend()
    shown, _, end = rank.text().partition("<missing>")
    assert len(shown) == 1_000_000 and end == line.decode() * (len(end) // 64) and 0 < len(end) <= 4096
    assert rank.missed == [("stdout", 1_560_000 - len(end), False)]
    assert (rank.log.unshown_bytes, rank.log.behind) == (1_560_000 - len(end), False)
    assert rank.stored() == line * 40_000


def test_F49_after_a_gap_the_live_view_goes_on_with_a_whole_line(rank: Rank) -> None:
    rank.flood(b"x" * 2_500_000)
    rank.clock.advance(1.5)
    rank.write(b"end of a line\nnext\n")
    rank.drain()
    assert rank.text() == "x" * 2_000_000 + "<missing>next\n"
    assert rank.missed == [("stdout", 500_014, False)]


def test_F49_the_line_with_which_the_live_view_goes_on_is_shown(rank: Rank) -> None:
    """The last line of a flood may come when the bucket has just opened again."""
    rank.flood(b"y\n" * 500_000)
    rank.clock.advance(1.5)
    rank.write(b"END\n")
    rank.drain()
    shown, _, end = rank.text().partition("<missing>")
    assert (shown, end) == ("y\n" * (len(shown) // 2), "y\n" * 2047 + "END\n")
    assert rank.missed == [("stdout", 1_000_000 - len(shown) - 4094, False)]


def test_F49_short_lines_count_more_than_their_bytes(rank: Rank) -> None:
    """Each gets a tag and a row of the screen: a flood of them would be printed for long after the run."""
    rank.flood(b"y\n" * 500_000)
    assert 25_000 <= rank.text().count("\n") <= 31_000


def test_F49_what_is_not_in_the_file_either_is_said_to_be_lost(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "STORED_BYTES_MAX", 2_100_000)
    rank.flood(b"x" * 2_500_000, stream=1)
    rank.close()
    assert rank.missed == [("stderr", 100_000, False), ("stderr", 400_000 - 4096, True)]


def test_F49_a_flood_that_ends_with_its_rank_is_still_counted(rank: Rank) -> None:
    rank.flood(b"x" * 2_500_000)
    rank.close()
    assert rank.missed == [("stdout", 500_000 - 4096, False)]
    assert rank.text().endswith("<missing>" + "x" * 4096)


def test_nothing_is_counted_as_missing_while_nobody_watches(rank: Rank) -> None:
    rank.watching = False
    rank.flood(b"x" * 2_500_000)
    rank.watching = True
    rank.write(b"new\n")
    rank.drain()
    rank.close()
    assert (rank.text(), rank.missed, rank.log.unshown_bytes) == ("new\n", [], 0)


def test_F28_a_file_that_cannot_be_written_loses_log_bytes_and_not_the_run(rank: Rank) -> None:
    (rank.directory / "3.stdout").mkdir()
    rank.write(b"lost\n")
    assert rank.drain() == [True, True]
    assert (rank.log.dropped_bytes, rank.log.tail(), rank.text()) == (5, "lost", "lost\n")
    rank.write(b"and more\n")
    (rank.directory / "3.stdout").rmdir()
    rank.drain()
    marker = f"\n— 5 B dropped until {format_clock(rank.clock.wall_ns())} (Is a directory) —\n"
    assert rank.stored() == marker.encode() + b"and more\n"
    assert rank.log.dropped_bytes == 5


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


def test_a_flood_on_one_stream_leaves_the_tail_of_the_other(rank: Rank) -> None:
    rank.write(b"Traceback\n", 1)
    rank.drain()
    rank.flood(b"x" * 2_000_000)
    assert rank.log.tail() == "Traceback\n" + "x" * 2_000


def test_the_tail_shows_progress_bars_as_they_ended(rank: Rank) -> None:
    rank.write(b"10%\r20%\r30%\nlines of\r\nDOS\r\n40%\r50%\r")
    rank.drain()
    assert rank.log.tail().split("\n") == ["30%", "lines of", "DOS", "50%"]


def test_F49_the_tail_of_many_small_pieces_is_bounded_and_in_order() -> None:
    tail = OutputTail(("stdout", "stderr"))
    for number in range(100_000):
        tail.add(("stdout", "stderr")[number // 10 % 2], b"%d\n" % number)
    assert tail.text(50, 2_000).split("\n") == [str(number) for number in range(99_950, 100_000)]
    kept = sum(len(tail.last(stream, 1 << 30)) for stream in ("stdout", "stderr"))
    assert kept < 2 * (KEPT_BYTES + 4096)
    assert tail.last("stderr", 7) == b"\n99999\n"
    assert tail.last("stderr", 0) == b""
    for number in range(100_000):
        tail.add(("stdout", "stderr")[number % 2], b"%d\n" % number)
    assert tail.text(3, 2_000) == "99997\n99998\n99999"
    assert len(tail.last("stdout", 1 << 30)) <= 512 * 6, "pieces that cannot grow together are bounded by number"


def test_characters_cut_by_the_bounds_of_the_tail_are_replaced(rank: Rank) -> None:
    rank.flood("ä".encode() * 300_000)
    assert rank.log.tail() == "ä" * 2_000


def test_hidden_tails_are_those_of_ranks_not_shown_first_the_ones_to_blame_and_bounded(rank: Rank) -> None:
    hidden = {number: RankLog(number, rank.directory, None, FakeClock()) for number in range(12)}
    for number, log in hidden.items():
        if number != 2:
            os.write(log.write_ends()[0], b"x\n" * 30 + b"y" * 600 + b"%d\n" % number)
        log.close()
    rank.write(b"seen\n")
    rank.drain()
    tails = hidden_tails({3: rank.log, **{number: log for number, log in hidden.items() if number != 3}}, [9, 3, 2, 77])
    assert list(tails) == [9, 0, 1, 4, 5, 6, 7, 8]
    assert tails[9] == "x\n" * 19 + "y" * 499 + "9"


def test_27_a_secret_split_by_reads_reaches_no_log_tail_or_client(tmp_path: Path) -> None:
    redactor = Redactor({"TOKEN": b"hunter2-hunter2"})
    rank = Rank(tmp_path, redactor)
    rank.write(b"token hunter2-h")
    rank.drain()
    assert rank.text() == "token "
    rank.write(b"unter2 end\n")
    rank.write(b"hunter2-hunter2", stream=1)
    rank.drain()
    rank.write(b"hunter2-hun")
    rank.close()
    assert rank.stored() == rank.text().encode() == b"token [secret TOKEN] end\nhunter2-hun", "the end is not a secret"
    assert rank.stored("stderr") == b"[secret TOKEN]"
    assert rank.log.tail() == "token [secret TOKEN] end\nhunter2-hun\n[secret TOKEN]"
    assert redactor.counts == {"TOKEN": 2}
