"""What a node and a client of one version say to a server, written down once, to be said again to servers that follow.

    python -m tests.support.server.recording tests/support/server/recorded/protocol-1.json

    client ─┐
            ├─▶ Recorder ─▶ server        each request with its answer, each event of a stream, in the order of arrival
    uplink ─┘

It is run at the end of a protocol's time, before anything of the wire changes: a real server, a real node and a real
client, of the code that is there. What is recorded: a node joins; a run of two ranks that prints, returns, is settled;
one whose result is a blob; one that raises; one that is cancelled. `recorded.py` says it again.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from serverless_gpu.ambient import format_utc, machine
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import server, start_stop
from serverless_gpu.testing import stop_agent
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import API, PROTOCOL

FAKES = "H100:2"
CALLS = """
import sys, time
import numpy as np
from serverless_gpu import distributed
from serverless_gpu.errors import RunCancelled

@distributed(gpus=2, gpu_type="H100", remote=True, ranks_log="all")
def prints(rank=0):
    print("rank", rank, flush=True)
    time.sleep(6.5)
    print("done", flush=True)
    return rank

@distributed(gpus=1, gpu_type="H100", remote=True)
def large():
    return np.zeros(20_000)

@distributed(gpus=1, gpu_type="H100", remote=True)
def fails():
    raise ValueError("no")

@distributed(gpus=1, gpu_type="H100", remote=True)
def stays():
    time.sleep(600)

if __name__ == "__main__":
    assert prints.distributed() == [0, 1]
    assert large.distributed()[0].size == 20_000
    try:
        fails.distributed()
    except ValueError:
        pass
    run = stays.submit()
    while run.status() != "RUNNING":
        time.sleep(0.1)
    run.cancel()
    try:
        run.results()
    except RunCancelled:
        pass
"""
_SKIPPED = ("/version", "/health")


class Recorder:
    """A door in front of a server that writes down what goes through.

    Args:
        port: of the server.

    Attributes:
        exchanges: what was said so far.
        node_token: tells requests of the node from those of the client.
    """

    def __init__(self, port: int) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self.node_token = ""
        self._port = port
        self._lock = threading.Lock()
        recorder = self

        class Handler(_Handler):
            owner = recorder

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def note(self, **exchange: Any) -> dict[str, Any]:
        """Write something down; what it comes to may be filled in later."""
        with self._lock:
            self.exchanges.append(exchange)
            return exchange

    def who(self, authorization: str) -> str:
        """Return whose token came with a request."""
        token = authorization.removeprefix("Bearer ")
        if token.startswith("sgpa_"):
            return "attempt"
        return "node" if token == self.node_token else "client"

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to the server behind."""
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)

    def close(self) -> None:
        """Let nobody through any more."""
        self._http.shutdown()
        self._http.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Recorder

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on()

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _pass_on(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        kept = {"Content-Length", "Connection", "Accept-Encoding"}
        headers = {name: value for name, value in self.headers.items() if name not in kept}
        path = self.path.removeprefix(API)
        exchange = self.owner.note(who=self.owner.who(self.headers["Authorization"]), method=self.command, path=path)
        if data:
            exchange["body"] = recorded(data, self.headers.get("Content-Type", ""))
        behind = self.owner.connection()
        with contextlib.closing(behind), contextlib.suppress(OSError):
            behind.request(self.command, self.path, body=data or None, headers=headers)
            answer = behind.getresponse()
            exchange["status"] = answer.status
            kind = answer.headers.get("Content-Type", "")
            if kind.startswith("text/event-stream"):
                self._stream(answer, exchange)
            else:
                self._answer(answer, exchange, kind)

    def _answer(self, answer: http.client.HTTPResponse, exchange: dict[str, Any], kind: str) -> None:
        content = answer.read()
        if content:
            exchange["answer"] = recorded(content, kind)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, answer: http.client.HTTPResponse, exchange: dict[str, Any]) -> None:
        exchange["stream"] = True
        self.send_response(answer.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for line in answer:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                self.owner.note(event_of=exchange["path"], event={**event, "token": ""} if "token" in event else event)
            self.wfile.write(line)
            self.wfile.flush()


def recorded(data: bytes, kind: str) -> Any:
    """Return a body as it is kept: JSON as it is, anything else packed."""
    if kind.startswith("application/json"):
        return json.loads(data)
    return {"packed": base64.b85encode(zlib.compress(data, 9)).decode()}


@contextlib.contextmanager
def _server(home: Path) -> Iterator[int]:
    environ = {**os.environ, "SERVERLESS_GPU_HOME": str(home)}
    words = [sys.executable, "-m", "serverless_gpu.cli", "up", "--no-node", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield int(line.partition("http://")[2].split()[0].rpartition(":")[2].rstrip("/,.;)"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def record() -> list[dict[str, Any]]:
    """Have a conversation of this version's own, and return it."""
    home = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
    try:
        with _server(home) as port:
            recorder = Recorder(port)
            _converse(home, recorder)
            recorder.close()
            return recorder.exchanges
    finally:
        start_stop.stop_all(Home(home))
        stop_agent(home)
        shutil.rmtree(home, ignore_errors=True)


def _converse(home: Path, recorder: Recorder) -> None:
    token = (home / "server" / "token").read_text(encoding="ascii").strip()
    node_token = (home / "server" / "node.token").read_text(encoding="ascii").strip()
    recorder.node_token = node_token
    path = home / "server" / "uplink.json"
    server.write_profile(path, server.UplinkProfile(url=recorder.url, token=node_token, name="recorded"))
    write_profile(home, ServerProfile(url=recorder.url, token=token, embedded=True, machine=machine()))
    base = {"PATH": "/usr/bin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "PYTHONPATH": os.getcwd() + "/src"}
    environ = {**base, "SERVERLESS_GPU_HOME": str(home), "SERVERLESS_GPU_FAKE": FAKES}
    start_stop.ensure(Home(home), path, environ)
    script = home / "calls.py"
    script.write_text(CALLS)
    subprocess.run([sys.executable, str(script)], check=True, env=environ, timeout=300, cwd=home)
    deadline = time.monotonic() + 60
    while not _all_settled(recorder.exchanges):
        assert time.monotonic() < deadline, "not every attempt was settled"
        time.sleep(0.1)


def _all_settled(exchanges: list[dict[str, Any]]) -> bool:
    reports = [one for one in exchanges if one.get("who") == "attempt" and one["path"].endswith("/report")]
    receipts = {one["path"] for one in reports if "receipt" in one["body"] and one.get("status") == 200}
    return len(receipts) == 4


def main(path: str) -> None:
    """Record, and write it down."""
    exchanges = [one for one in record() if "event" in one or ("status" in one and one["path"] not in _SKIPPED)]
    said = {"protocol": PROTOCOL, "version": __version__, "at": format_utc(time.time_ns()), "exchanges": exchanges}
    text = json.dumps(said, indent=1, ensure_ascii=False)
    venv = Path(sys.prefix)
    for place, name in (
        (os.getcwd(), "/source"),
        (sys.prefix, "/venv"),
        (sys.base_prefix, "/python"),
        (str(venv.parent), "/project"),
    ):
        text = text.replace(place, name)
    Path(path).write_text(text + "\n", encoding="utf-8")
    print(f"{len(exchanges)} lines of conversation in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
