"""The server's log: JSON lines that know what they are about, never wait for the disk, and are read by people."""

from __future__ import annotations

import errno
import io
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner

from serverless_gpu.cli.program import sgpu
from serverless_gpu.cli.server import FollowedFile
from serverless_gpu.server.core import server_log
from serverless_gpu.server.core.server_log import ACCESS, LogFile, RedactingFormatter
from tests.support.golden import golden

RUN = "01kaz5w8d3e4f5g6h7j8k9m0n1"


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, once all are written: nothing is logged to it after that."""
    for handler in list(logging.getLogger(server_log.LOGGERS[0]).handlers):
        if isinstance(handler, LogFile):
            server_log.detach(handler)
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def path(home: Path) -> Iterator[Path]:
    handler = server_log.to_file(home / "server" / "server.log", secrets=("hunter2-hunter2",))
    yield home / "server" / "server.log"
    server_log.detach(handler)


def test_a_line_says_what_it_is_about_also_from_another_thread(path: Path) -> None:
    logger = logging.getLogger("serverless_gpu.server.lifecycle.reports")
    with server_log.bound(run=RUN, attempt=2):
        logger.warning("a fact came again")
        server_log.note(node="node-1")
        logger.warning("and again")
    logger.error("nobody's")
    first, second, third = lines_of(path)
    assert set(first) == {"ts", "level", "logger", "msg", "run", "attempt"}
    assert (first["level"], first["logger"], first["msg"]) == (
        "WARNING",
        "reports",
        golden("server.logbook.fact-came-again"),
    )
    assert (first["run"], first["attempt"], second["node"]) == (RUN, 2, "node-1")
    assert first["ts"].endswith("Z") and "run" not in third


def test_only_listed_fields_can_be_said() -> None:
    with pytest.raises(ValueError, match="does not define the field 'env'"), server_log.bound(env={"A": "b"}):
        pass
    with server_log.bound(run=RUN), pytest.raises(ValueError, match="does not define the field 'token'"):
        server_log.note(token="x")


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("sgpu_0123456789abcdef", "sgpu_…"),
        ("postgresql://sgpu:pass:word@db/x", "postgresql://sgpu:…@db/x"),
        ("Authorization: Bearer abcdef.ghijkl-mn", "Authorization: Bearer …"),
        ("the password is hunter2-hunter2.", "the password is …."),
        ("DETAIL:  Failing row contains (x, secret).\nrest", "DETAIL:  Failing row contains …\nrest"),
        ("two\nlines \x1b[31m", "two\nlines \x1b[31m"),
        pytest.param("a lone \udcff", "a lone ?", id="lone surrogate"),
        ("x" * 9_000, "x" * 8_000 + "… (9000 characters)"),
    ],
)
def test_secrets_are_taken_out_and_a_message_stays_one_line(path: Path, said: str, written: str) -> None:
    logging.getLogger("serverless_gpu.server").warning("%s", said)
    assert [line["msg"] for line in lines_of(path)] == [written]


def test_a_traceback_is_cleaned_too(path: Path) -> None:
    try:
        raise ValueError("hunter2-hunter2 of sgpa_0123456789")
    except ValueError:
        logging.getLogger("serverless_gpu.server").exception("it failed")
    (line,) = lines_of(path)
    assert "ValueError: … of sgpa_…" in line["traceback"]


class Slow(LogFile):
    """The log on a disk that stands still until it is told to go on."""

    def __init__(self, path: Path) -> None:
        self.stuck, self.go = threading.Event(), threading.Event()
        super().__init__(path)

    def emit(self, record: logging.LogRecord) -> None:
        self.stuck.set()
        self.go.wait(60)
        super().emit(record)


@pytest.mark.parametrize("name", [ACCESS, "serverless_gpu.server.lifecycle.reports", "uvicorn.error"])
def test_nobody_waits_for_a_disk_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(server_log, "QUEUE_MAX", 3)
    handler = Slow(tmp_path / "server.log")
    stuck, go = handler.stuck, handler.go

    def note(text: str) -> bool:
        return handler.handle(logging.getLogger(name).makeRecord(name, logging.INFO, "", 0, text, (), None))

    assert note("1")
    assert stuck.wait(30)  # the thread is in the write, and the queue is empty
    assert [note(str(number)) for number in range(2, 8)] == [True, True, True, False, False, False]
    go.set()
    while not note("8"):  # as soon as there is room
        pass
    handler.close()
    lines = lines_of(tmp_path / "server.log")
    assert [line["msg"] for line in lines] == ["1", "2", "3", "4", "8"]
    assert lines[-1]["more"] >= 3


def test_the_end_does_not_wait_for_a_disk_that_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "QUEUE_MAX", 2)
    monkeypatch.setattr(server_log, "CLOSING_S", 0.1)
    handler = Slow(tmp_path / "server.log")
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "", 0, "said", (), None)
    assert handler.handle(record) and handler.stuck.wait(30)
    while handler.handle(record):
        pass

    def end() -> None:
        server_log.detach(handler)
        logging.shutdown([lambda: handler])  # as at the end of the process

    ended = threading.Thread(target=end, daemon=True)
    ended.start()
    ended.join(30)
    assert not ended.is_alive()
    handler.go.set()
    handler._thread.join(30)
    assert len((tmp_path / "server.log").read_bytes().splitlines()) == 3  # all that there was room for


def test_the_end_of_a_log_on_a_full_disk_is_no_traceback(tmp_path: Path) -> None:
    class Full(io.StringIO):
        def close(self) -> None:
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")

    handler = LogFile(tmp_path / "server.log")
    opened, handler.stream = handler.stream, cast("Any", Full())
    assert opened is not None
    opened.close()
    handler._queue.put(None)
    handler._thread.join(30)  # pytest fails a test whose thread ends with an exception
    handler.stream = cast("Any", io.StringIO())
    handler.close()


def test_what_is_logged_is_what_was_known_then(path: Path) -> None:
    logger, values = logging.getLogger("serverless_gpu.server"), [1]
    with server_log.bound(run=RUN):
        logger.info("values %s", values)
        server_log.note(node="node-1")
    values.append(2)
    (line,) = lines_of(path)
    assert line["msg"] == "values [1]" and "node" not in line


def test_it_is_bounded_and_the_files_before_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "BYTES_MAX", 2_000)
    handler = server_log.to_file(tmp_path / "server.log")
    for number in range(200):
        logging.getLogger("serverless_gpu.server").info("line %d", number)
    server_log.detach(handler)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["server.log", "server.log.1", "server.log.2", "server.log.3"]
    assert all(file.stat().st_size <= 2_000 for file in files)


def told(home: Path, *arguments: str) -> list[str]:
    found = CliRunner().invoke(sgpu, ["server", "logs", *arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output.splitlines()


def test_people_read_it_by_run_and_level_over_all_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "BYTES_MAX", 600)
    handler = server_log.to_file(home / "server" / "server.log")
    logger = logging.getLogger("serverless_gpu.server.scheduling.scheduler")
    for number in range(6):
        with server_log.bound(run=RUN if number % 2 else "01kazzzzzzzzzzzzzzzzzzzzzz", attempt=1):
            logger.info("line %d", number)
    logger.error("forged\n2026-01-01T00:00:00.000Z ERROR nobody: I am a line")
    server_log.detach(handler)
    with open(home / "server" / "server.log", "ab") as file:
        file.write(b'{"ts":"20')  # cut, as by a kill
        file.write(b"\n")
    every = told(home)
    assert next(line for line in every if "line" in line).endswith(
        "INFO    scheduler: line 0  (run=01kazzzzzzzzzzzzzzzzzzzzzz attempt=1)"
    )
    assert sum("scheduler: line" in line for line in every) == 6
    assert every[-2].endswith("scheduler: forged⏎2026-01-01T00:00:00.000Z ERROR nobody: I am a line")
    assert every[-1] == '{"ts":"20'
    assert len([line for line in told(home, "--run", RUN[:8]) if "line" in line]) == 3
    assert ["forged" in line for line in told(home, "--level", "error")] == [True, False]
    assert len(told(home, "-n", "2")) == 2
    assert msgspec.json.decode(told(home, "--json", "-n", "3")[0])["msg"] == "line 5"


def test_without_a_log_it_is_said(home: Path) -> None:
    assert golden("server.logbook.log-server") in str(CliRunner().invoke(sgpu, ["server", "logs"]).exception)


def test_it_is_followed_over_a_turn(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "BYTES_MAX", 400)
    handler = server_log.to_file(home / "server" / "server.log")
    followed = FollowedFile(home / "server" / "server.log")
    read: list[bytes] = []
    for number in range(40):
        logging.getLogger("serverless_gpu.server").info("line %d", number)
        while len(read) <= number:
            read += followed.more()
    server_log.detach(handler)
    assert [msgspec.json.decode(line)["msg"] for line in read] == [f"line {number}" for number in range(40)]


def test_a_formatter_needs_no_file() -> None:
    record = logging.getLogger("x").makeRecord("x", logging.INFO, "", 0, "said %s", ("this",), None)
    assert msgspec.json.decode(RedactingFormatter().format(record))["msg"] == "said this"
