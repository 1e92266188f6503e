"""What an uplink sends of an attempt's files: every byte once and in order, whatever the server has of it already."""

from __future__ import annotations

from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.node.uplink.delivery import FACTS_MAX, FactsFile, LogShipment, Outputs
from serverless_gpu.wire.agents import LogPiece
from serverless_gpu.wire.base import INLINE_BYTES_MAX, INLINE_OUTPUT_BYTES_MAX, LOG_REPORT_BYTES_MAX


def test_samples_go_when_they_are_asked_for_and_are_waited_for_only_then(tmp_path: Path) -> None:
    logs = LogShipment(tmp_path, known=True)
    write(tmp_path, "0.stdout", b"out\n")
    write(tmp_path, "0.telemetry", b"[1]\n")
    pieces = logs.pieces()
    assert [(piece.stream, piece.data) for piece in pieces] == [("stdout", b"out\n")]
    assert logs.is_complete(pieces)
    logs.taken(pieces, {})
    assert logs.pieces() == ()
    logs.samples = True
    assert not logs.is_complete(())
    pieces = logs.pieces()
    assert [(piece.stream, piece.rank, piece.data) for piece in pieces] == [("telemetry", 0, b"[1]\n")]
    logs.taken(pieces, {})
    assert logs.is_complete(()) and logs.ends_missing(()) == {}


class Taker:
    """The server's side of logs: appends what fits on, and says where it wants to go on."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def take(self, pieces: tuple[LogPiece, ...]) -> dict[str, int]:
        """Return `ReportAnswer.offsets`."""
        wanted = {}
        for piece in pieces:
            key = f"{piece.rank}.{piece.stream}"
            have = self.kept.get(key, b"")
            if piece.offset <= len(have):
                have += piece.data[len(have) - piece.offset :]
                self.kept[key] = have
            if len(have) != piece.offset + len(piece.data):
                wanted[key] = len(have)
        return wanted


def write(directory: Path, name: str, data: bytes) -> None:
    """Append to a log."""
    with (directory / name).open("ab") as file:
        file.write(data)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 2), st.binary(min_size=1, max_size=50)), max_size=30),
    restarts=st.sets(st.integers(0, 30)),
    losses=st.sets(st.integers(0, 30)),
    unanswered=st.sets(st.integers(0, 30)),
)
def test_logs_arrive_whole_over_restarts_of_both_sides_and_lost_answers(
    tmp_path_factory: object,
    chunks: list[tuple[int, bytes]],
    restarts: set[int],
    losses: set[int],
    unanswered: set[int],
) -> None:
    directory: Path = tmp_path_factory.mktemp("logs")  # type: ignore[attr-defined]  # pytest's type is private
    logs, taker, written = LogShipment(directory, known=True), Taker(), dict[str, bytes]()
    for step, (rank, data) in enumerate(chunks):
        name = f"{rank}.stdout"
        write(directory, name, data)
        written[name] = written.get(name, b"") + data
        if step in restarts:
            logs = LogShipment(directory, known=False)
        if step in losses and taker.kept:
            first = next(iter(taker.kept))
            taker.kept[first] = taker.kept[first][: len(taker.kept[first]) // 2]
        pieces = logs.pieces()
        wanted = taker.take(pieces)
        if step not in unanswered:
            logs.taken(pieces, wanted)
    for _ in range(5):  # what was lost without anybody's knowledge is found with the next bytes only
        for rank in range(3):
            if f"{rank}.stdout" in written:
                write(directory, f"{rank}.stdout", b".")
                written[f"{rank}.stdout"] += b"."
        pieces = logs.pieces()
        logs.taken(pieces, taker.take(pieces))
    pieces = logs.pieces()
    logs.taken(pieces, taker.take(pieces))
    assert taker.kept == written
    assert logs.is_complete(logs.pieces())


def test_one_report_carries_a_fair_share_of_every_stream(tmp_path: Path) -> None:
    write(tmp_path, "0.stdout", b"x" * (4 << 20))
    write(tmp_path, "1.stdout", b"few\n")
    logs = LogShipment(tmp_path, known=True)
    pieces = logs.pieces()
    assert sum(len(piece.data) for piece in pieces) <= LOG_REPORT_BYTES_MAX
    assert {piece.rank for piece in pieces} == {0, 1} and not logs.is_complete(pieces)


def test_facts_come_in_pieces_and_a_half_written_one_waits(tmp_path: Path) -> None:
    def fact(seq: int) -> bytes:
        value = Fact(
            attempt="r:1",
            seq=seq,
            kind=FactKind.ALIVE,
            boot_id="b",
            boottime_ns=seq,
            wall_ns=seq,
            gpus=(),
            cpus=0,
            memory_bytes=0,
        )
        return msgspec.json.encode(value) + b"\n"

    path = tmp_path / "facts.jsonl"
    facts = FactsFile(path)
    assert facts.unsent() == () and facts.is_complete()
    path.write_bytes(b"".join(fact(seq) for seq in range(FACTS_MAX + 1)) + fact(FACTS_MAX + 1)[:20])
    first = facts.unsent()
    assert [one.seq for one in first] == list(range(FACTS_MAX)) and not facts.is_complete()
    assert facts.unsent() == first, "what was not answered comes again"
    facts.taken()
    assert [one.seq for one in facts.unsent()] == [FACTS_MAX]
    facts.taken()
    assert facts.unsent() == () and not facts.is_complete()


def test_outputs_are_those_of_the_attempt_and_nothing_else(tmp_path: Path) -> None:
    for name in ("results", "failures"):
        (tmp_path / name).mkdir()
    small, large = b"s" * INLINE_OUTPUT_BYTES_MAX, b"l" * (INLINE_OUTPUT_BYTES_MAX + 1)
    (tmp_path / "results" / "0.pkl").write_bytes(small)
    (tmp_path / "results" / "1.pkl").write_bytes(large)
    (tmp_path / "results" / "2.pkl.tmp").write_bytes(small)
    (tmp_path / "results" / "3.pkl").symlink_to("/etc/passwd")
    (tmp_path / "failures" / "0.json").write_bytes(b"{}")
    (tmp_path / "hang-1.txt").write_bytes(b"stacks")
    (tmp_path / "remote.json").write_bytes(b"a token")
    outputs = Outputs(tmp_path)
    assert [output.name for output in outputs.unsent(ended=False)] == ["hang-1.txt"]
    (tmp_path / "failures" / "7.json").touch()
    (tmp_path / "failures" / "70.json").touch()
    assert [output.name for output in outputs.unsent(ended=False, failed=7)] == ["failures/7.json", "hang-1.txt"]
    (tmp_path / "failures" / "7.json").unlink()
    (tmp_path / "failures" / "70.json").unlink()
    unsent = outputs.unsent(ended=True)
    assert [output.name for output in unsent] == ["failures/0.json", "hang-1.txt", "results/0.pkl", "results/1.pkl"]
    files = outputs.inline(unsent)
    assert [file.name for file in files] == ["failures/0.json", "hang-1.txt", "results/0.pkl"]
    outputs.taken(files)
    assert [output.name for output in outputs.unsent(ended=True)] == ["results/1.pkl"]


def test_many_small_results_are_several_reports(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    for rank in range(40):
        (tmp_path / "results" / f"{rank}.pkl").write_bytes(b"s" * INLINE_OUTPUT_BYTES_MAX)
    outputs, count = Outputs(tmp_path), 0
    while files := outputs.inline(outputs.unsent(ended=True)):
        assert sum(file.size for file in files) <= INLINE_BYTES_MAX
        outputs.taken(files)
        count += 1
    assert count == 3


def test_a_server_without_room_for_logs_is_known_from_what_it_wants_and_what_it_lacks_is_said(tmp_path: Path) -> None:
    logs = LogShipment(tmp_path, known=True)
    write(tmp_path, "0.stdout", b"abcdef")
    write(tmp_path, "1.stderr", b"xyz")
    pieces = logs.pieces()
    assert not logs.taken(pieces, {"0.stdout": 2}), "only two bytes of six were taken"
    assert logs.ends_missing(()) == {"0.stdout": 6}
    assert logs.ends_missing(logs.pieces()) == {}
    assert logs.taken(logs.pieces(), {"0.stdout": 0}), "one that has lost bytes has room"
    assert logs.taken(logs.pieces(), {}) and logs.ends_missing(()) == {}
