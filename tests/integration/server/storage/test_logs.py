"""Output of ranks as the server keeps it: appended by offset, bounded, durable when asked, at no other place."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.server.storage import logs as logs_module
from serverless_gpu.server.storage.logs import Logs

RUN = "01hzx0000000000000000000ab"


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "logs", kept_free_bytes=0)


def add(logs: Logs, offset: int, data: bytes, *, rank: int = 0, stream: str = "stdout") -> int:
    return logs.append(RUN, 1, rank=rank, stream=stream, offset=offset, data=data)


def content(logs: Logs, *, rank: int = 0, stream: str = "stdout") -> bytes:
    return logs.read(RUN, 1, rank=rank, stream=stream, limit=1 << 20)


def test_pieces_are_appended_and_read_from_any_offset(logs: Logs) -> None:
    assert add(logs, 0, b"one\n") == 4
    assert add(logs, 4, b"two\n") == 8
    assert content(logs) == b"one\ntwo\n"
    assert logs.read(RUN, 1, rank=0, stream="stdout", offset=4, limit=2) == b"tw"
    assert logs.read(RUN, 1, rank=0, stream="stdout", offset=8, limit=10) == b""
    assert logs.read(RUN, 1, rank=7, stream="stderr", limit=10) == b""
    assert logs.sizes(RUN, 1) == {(0, "stdout"): 8}
    assert logs.sizes(RUN, 2) == {}


def test_a_piece_that_comes_twice_changes_nothing_and_one_that_overlaps_adds_what_is_new(logs: Logs) -> None:
    add(logs, 0, b"abcdef")
    assert add(logs, 0, b"abcdef") == 6
    assert add(logs, 2, b"cd") == 6
    assert add(logs, 4, b"efgh") == 8
    assert content(logs) == b"abcdefgh"


def test_a_piece_that_leaves_a_gap_is_not_taken_and_the_answer_says_what_is_wanted(logs: Logs) -> None:
    assert add(logs, 5, b"later") == 0
    assert logs.sizes(RUN, 1) == {}
    add(logs, 0, b"abc")
    assert add(logs, 5, b"later") == 3
    assert content(logs) == b"abc"


def test_the_same_bytes_in_any_order_and_by_many_at_once_make_the_same_file(logs: Logs) -> None:
    whole = random.Random(7).randbytes(60_000)
    order = random.Random(8)

    def send(_: int) -> None:
        at = 0
        while at < len(whole):
            start = max(0, at - order.randrange(500))
            at = add(logs, start, whole[start : at + order.randrange(1, 4_000)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    assert content(logs) == whole


def test_a_stream_is_bounded_and_what_is_beyond_counts_as_taken(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs", bytes_max=10, kept_free_bytes=0)
    assert add(logs, 0, b"123456") == 6
    assert add(logs, 6, b"789abcdef") == 15
    assert add(logs, 15, b"more") == 19
    assert add(logs, 0, b"123456") == 10
    assert content(logs) == b"123456789a"


def test_F40_a_full_disk_costs_log_bytes_for_now_and_never_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = Logs(tmp_path / "logs", kept_free_bytes=0)
    write = os.write
    room = [4]

    def tight(fd: int, data: bytes | memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(os, "write", tight)
    assert add(logs, 0, b"123456789") == 4
    assert add(logs, 4, b"56789") == 4
    room[0] = 100
    assert add(logs, 4, b"56789") == 9
    assert content(logs) == b"123456789"


def test_logs_leave_room_on_the_disk_for_what_matters_more(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "logs", kept_free_bytes=1 << 60)
    assert add(logs, 0, b"no room for this") == 0
    assert content(logs) == b""


def test_another_problem_of_the_disk_is_no_full_disk(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", broken)
    with pytest.raises(OSError, match="Input/output"):
        add(logs, 0, b"x")


@pytest.mark.parametrize(
    "run_id", ["", "..", "../../etc", RUN[:-1], RUN + "/", RUN[:-1] + "/", RUN.upper(), RUN + "\n"]
)
def test_no_identifier_of_a_run_leads_anywhere_else(logs: Logs, run_id: str, tmp_path: Path) -> None:
    for call in (
        lambda: logs.append(run_id, 1, rank=0, stream="stdout", offset=0, data=b"x"),
        lambda: logs.read(run_id, 1, rank=0, stream="stdout", limit=1),
        lambda: logs.sizes(run_id, 1),
        lambda: logs.sync(run_id, 1),
        lambda: logs.remove(run_id),
    ):
        with pytest.raises(InvalidValue):
            call()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "stream", "offset"), [(-1, "stdout", 0), (10**9, "stdout", 0), (0, "../x", 0), (0, "stdout", -1)]
)
def test_no_rank_stream_or_offset_leads_anywhere_else(logs: Logs, rank: int, stream: str, offset: int) -> None:
    with pytest.raises(InvalidValue):
        logs.append(RUN, 1, rank=rank, stream=stream, offset=offset, data=b"x")
    with pytest.raises(InvalidValue):
        logs.read(RUN, 1, rank=rank, stream=stream, offset=offset, limit=1)


def test_a_link_where_a_log_should_be_is_not_followed(logs: Logs, tmp_path: Path) -> None:
    add(logs, 0, b"x")
    path = tmp_path / "logs" / RUN / "1" / "0.stdout"
    canary = tmp_path / "canary"
    canary.write_bytes(b"untouched")
    path.unlink()
    path.symlink_to(canary)
    with pytest.raises(OSError, match="symbolic"):
        add(logs, 0, b"harm")
    with pytest.raises(OSError, match="symbolic"):
        content(logs)
    assert canary.read_bytes() == b"untouched"


def test_only_the_owner_can_read_what_ranks_wrote(logs: Logs, tmp_path: Path) -> None:
    add(logs, 0, b"x")
    for path in (tmp_path / "logs", *(tmp_path / "logs").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("together_min", [1, 1_000])
def test_sync_makes_durable_what_was_written_since_and_first_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together_min: int
) -> None:
    add(Logs(tmp_path / "logs", kept_free_bytes=0), 0, b"by a server that was killed", rank=3)
    logs = Logs(tmp_path / "logs", kept_free_bytes=0)
    add(logs, 0, b"by this one")
    synced: list[str] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(logs_module, "TOGETHER_MIN", together_min)
    logs.sync(RUN, 1)
    files = [] if together_min == 1 else ["0.stdout", "3.stdout"]
    assert sorted(synced) == sorted([*files, "1", RUN, "logs", tmp_path.name])


def test_sync_of_an_attempt_without_output_is_nothing(logs: Logs) -> None:
    logs.sync(RUN, 1)


def test_a_sync_that_failed_is_not_forgotten(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    add(logs, 0, b"x")
    calls: list[int] = []

    def broken(fd: int) -> None:
        calls.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            logs.sync(RUN, 1)
    assert len(calls) == 2


def test_what_was_appended_survives_a_kill_of_the_process(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from serverless_gpu.server.storage.logs import Logs\n"
        f"logs = Logs(Path({str(tmp_path)!r}) / 'logs', kept_free_bytes=0)\n"
        f"print(logs.append({RUN!r}, 1, rank=0, stream='stderr', offset=0, data=b'acknowledged'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "12\n", done.stderr
    assert content(Logs(tmp_path / "logs"), stream="stderr") == b"acknowledged"


def test_removing_a_run_removes_all_its_attempts(logs: Logs, tmp_path: Path) -> None:
    add(logs, 0, b"x")
    logs.append(RUN, 2, rank=0, stream="stdout", offset=0, data=b"y")
    logs.remove(RUN)
    logs.remove(RUN)
    assert list((tmp_path / "logs").iterdir()) == []
    assert add(logs, 0, b"again") == 5
