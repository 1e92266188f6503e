"""The server starts, answers, is alone in its home, remembers its port, and stops in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.ambient import machine
from serverless_gpu.errors import InvalidValue, NotAuthenticated, ServerProblem, ServerUnavailable
from serverless_gpu.json_codec import from_json
from serverless_gpu.server.core.server_log import RedactingFormatter
from serverless_gpu.server.http import listener, routing
from serverless_gpu.version import __version__
from serverless_gpu.wire.access import PrincipalView, SecretList, SecretRequest, SecretView
from serverless_gpu.wire.blobs import DigestList
from serverless_gpu.wire.runs import RunView, StopRequest
from serverless_gpu.wire.server_status import Health, Version
from tests.support.golden import golden
from tests.support.server.runs_api import submit
from tests.support.server.served import Served, served


def test_a_server_answers_whoever_has_its_token(server: Served) -> None:
    connection = server.connection()
    version = connection.ask("GET", "/version", answer=Version)
    assert (version.version, version.machine) == (__version__, machine())
    assert connection.ask("GET", "/health", answer=Health).ok
    assert connection.ask("GET", "/whoami", answer=PrincipalView).role == "admin"
    with pytest.raises(NotAuthenticated):
        server.connection("sgpu_nobody").ask("GET", "/whoami", answer=PrincipalView)


_STARTS = """
import gc, sys
from pathlib import Path
from serverless_gpu.server.process import serve
from serverless_gpu.server.core.settings import read_settings

def ready(url, running):
    print(gc.get_freeze_count() > 10_000, sys.getswitchinterval())
    running.stop()

serve(read_settings(Path(sys.argv[1]), {"port": 0, "node": False}), ready=ready)
"""


def test_22C4_a_server_process_shortens_what_keeps_its_event_loop_waiting(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _STARTS, str(tmp_path)], check=True, capture_output=True, text=True, timeout=120
    )
    assert found.stdout == "True 0.001\n"


def test_22C4_a_server_in_a_thread_leaves_the_process_as_it_is(home: Path) -> None:
    before = (gc.get_freeze_count(), sys.getswitchinterval())
    with served(home):
        assert (gc.get_freeze_count(), sys.getswitchinterval()) == before


def test_22C4_the_event_loop_neither_reads_nor_writes_large_json(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, str] = {}

    def noted(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads[name] = threading.current_thread().name
            return work(*args)

        return call

    monkeypatch.setattr(routing, "from_json", noted("read", from_json))
    monkeypatch.setattr(routing, "make_response", noted("written", routing.make_response))
    with served(home) as server:
        connection = server.connection()
        connection.ask("PUT", "/secrets/hf", SecretRequest(value=b"x"), answer=SecretView)
        assert all(name.startswith("AnyIO worker") for name in threads.values()) and len(threads) == 2
        digests = tuple(f"{number:064x}" for number in range(2_000))  # 134 kB, for a route of the loop
        missing = connection.ask("POST", "/blobs/missing", DigestList(digests=digests), answer=DigestList)
        assert missing.digests == digests and threads["read"].startswith("AnyIO worker")


def test_files_of_the_server_are_for_its_user_only(server: Served) -> None:
    directory = server.home / "server"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("token", "node.token", "key", "server.db", "server.log", "lock"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name


def test_a_home_has_one_server(server: Served) -> None:
    with pytest.raises(ServerProblem, match="is already running"), served(server.home):
        pass
    assert server.connection().ask("GET", "/health", answer=Health).ok


def test_a_server_without_the_key_of_its_runs_does_not_start_unless_told(tmp_path: Path, database_url: str) -> None:
    with served(tmp_path, database=database_url) as server:
        run = submit(server.connection())
    (tmp_path / "server" / "key").unlink()
    wrong = pytest.raises(ServerProblem, match=re.escape(golden("server.serving.key-one-database")))
    with wrong, served(tmp_path, database=database_url):
        pass
    with served(tmp_path, database=database_url, key_lost=True) as server:
        server.connection().ask("POST", f"/runs/{run.id}/stop", StopRequest(), answer=RunView)
    with served(tmp_path, database=database_url):  # nothing is left that the key would open
        pass


def test_a_server_without_the_key_of_its_secrets_does_not_start_unless_told(tmp_path: Path, database_url: str) -> None:
    with served(tmp_path, database=database_url) as server:
        made = SecretRequest(value=b"kept")
        for name in ("KEEP", "OTHER"):
            server.connection().ask("PUT", f"/secrets/{name}", made, answer=SecretView)
    key = tmp_path / "server" / "key"
    right = key.read_bytes()
    key.unlink()
    wrong = pytest.raises(ServerProblem, match=re.escape(golden("server.serving.secrets-sealed-another")))
    with wrong as refused, served(tmp_path, database=database_url):
        pass
    assert "restore the key file" in refused.value.hint and "--key-lost" in refused.value.hint
    another = key.read_bytes()
    key.write_bytes(right)
    with served(tmp_path, database=database_url) as server:  # nothing was taken away
        assert len(server.connection().ask("GET", "/secrets", answer=SecretList).secrets) == 2
    key.write_bytes(another)
    with served(tmp_path, database=database_url, key_lost=True) as server:
        assert server.connection().ask("GET", "/secrets", answer=SecretList).secrets == ()
        assert server.connection().ask("PUT", "/secrets/KEEP", made, answer=SecretView).version == 2
    with served(tmp_path, database=database_url) as server:
        assert [one.name for one in server.connection().ask("GET", "/secrets", answer=SecretList).secrets] == ["KEEP"]


def test_a_server_that_starts_again_has_the_same_port_and_token(tmp_path: Path) -> None:
    with served(tmp_path, port=None) as first:
        pass
    with served(tmp_path, port=None) as second:
        assert (second.url, second.token) == (first.url, first.token)
        assert second.connection().ask("GET", "/whoami", answer=PrincipalView).role == "admin"
    with pytest.raises(ServerUnavailable):
        first.connection().ask("GET", "/version", answer=Version)
    first.close()


def test_a_port_that_was_asked_for_is_used_or_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerProblem, match=str(port)), served(tmp_path, port=port):
            pass


def test_a_port_nobody_asked_for_is_replaced_when_somebody_else_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(listener, "PORT", port)
        with served(tmp_path, port=None) as server:
            assert not server.url.endswith(f":{port}")
            assert (tmp_path / "server" / "port").read_text() == server.url.rpartition(":")[2] + "\n"


def _raw(server: Served, sent: bytes, wait_s: float = 60) -> bytes:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        received = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # closed before all of it was read
            connection.sendall(sent)
            while piece := connection.recv(1 << 16):
                received += piece
        return received


def test_headers_that_never_end_and_connections_that_say_nothing_are_closed(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _raw(server, b"GET / HTTP/1.1\r\n" + b"X: " + b"1" * 400_000) == b""
    monkeypatch.setattr(listener, "HEAD_S", 0.2)
    assert _raw(server, b"GET / HTT") == b""
    assert server.connection().ask("GET", "/health", answer=Health).ok


def test_what_is_no_http_is_answered_without_a_word_about_the_server(server: Served) -> None:
    answer = _raw(server, b"\x16\x03\x01\x02\x00\x01\x00")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"uvicorn" not in answer.lower()


def test_the_log_has_no_tokens_also_not_in_tracebacks() -> None:
    formatter = RedactingFormatter()
    try:
        raise ValueError("sgpu_01kaz5w8d3e4f5g6h7j8k9m0n1_abcdefghijklmnop-_")
    except ValueError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "f", 1, "sgpa_secretsecret %s", ("sgpu_0123456789",), sys.exc_info()
        )
    text = formatter.format(record)
    assert "secretsecret" not in text and "0123456789" not in text and "abcdefgh" not in text
    assert "ValueError: sgpu_…" in text


def test_stopping_waits_for_no_idle_connections(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        connection = server.connection()
        assert connection.ask("GET", "/health", answer=Health).ok
        began = time.monotonic()
    assert time.monotonic() - began < 5, "they would be kept for more than a minute"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu.example"])
def test_it_does_not_listen_beyond_loopback_without_being_told_twice(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidValue, match="tokens"), served(tmp_path, host=host):
        pass
