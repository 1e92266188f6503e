"""A bucket and a line that pass so many bytes a second, whoever shares them; the bucket counts what it is asked for.

    with Bucket(Bandwidth(200e6)) as bucket, Line(url, Bandwidth(125e6)) as line:
        …                      s3://any/prefix at bucket.variables(); the server at line.url, one Gbit/s for all

    a piece ─▶ its place in the order of all pieces ─▶ sent when those before it would have arrived, at that rate

Threads of this process, on loopback; nothing of the system is changed. What limits is arithmetic about bytes, so the
time that comes out is the least that such a link would take; latency is not simulated.

Failure cases: nobody is behind the line any more (its connections are closed); what is asked of the bucket is not one
of the few requests it knows (501).
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlsplit

_PIECE_BYTES = 256 << 10
_TAG = '"tag"'  # no digest: nobody compares it with one
_DATE = "Fri, 15 Jan 2027 14:03:22 GMT"
_KEY = re.compile(r"<Key>([^<]+)</Key>")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Bandwidth:
    """So many bytes a second, for all who take them.

    Args:
        bytes_s: 0 for as many as can.
    """

    def __init__(self, bytes_s: float = 0.0) -> None:
        self._bytes_s = bytes_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def take(self, size: int) -> None:
        """Wait until so many bytes have passed after all that were taken before."""
        if not self._bytes_s:
            return
        with self._lock:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + size / self._bytes_s
            wait_s = self._free_s - now
        time.sleep(wait_s)


class FakeBucket:
    """A server that speaks enough S3 for a store that nobody lists: get, ranges, head, put, delete.

    Args:
        bandwidth: of what it sends.

    Attributes:
        objects: bytes by path, ``/bucket/prefix/packs/…``; a test may put others.
        gets: how often each path was got.
        sent_bytes: bytes of bodies that were sent.
        open: cleared, it keeps those who get a pack waiting before the first byte.
        url: where it is.
    """

    def __init__(self, bandwidth: Bandwidth | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.gets: Counter[str] = Counter()
        self.sent_bytes = 0
        self.open = threading.Event()
        self.open.set()
        self.bandwidth = bandwidth or Bandwidth()
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Request)
        self._server.bucket = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        host, port = self._server.server_address[:2]
        self.url = f"http://{host!s}:{port}"

    def __enter__(self) -> FakeBucket:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def variables(self) -> dict[str, str]:
        """Return what a process has in its environment to use it."""
        return {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }

    def reads(self, kind: str) -> Counter[str]:
        """Return how often each object of a kind was got, by its name."""
        with self.lock:
            return Counter({path.rsplit("/", 1)[1]: n for path, n in self.gets.items() if f"/{kind}/" in path})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    bucket: FakeBucket


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_PUT(self) -> None:
        """Keep an object."""
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        with self.server.bucket.lock:
            self.server.bucket.objects[self._path()] = data
        self._answer(200, b"", {"ETag": _TAG})

    def do_HEAD(self) -> None:
        """Say whether an object is there, and how large it is."""
        data = self.server.bucket.objects.get(self._path())
        if data is None:
            self._answer(404, b"")
        else:
            self._answer(200, data, {"ETag": _TAG}, is_sent=False)

    def do_GET(self) -> None:
        """Send an object, or a range of it."""
        bucket, path = self.server.bucket, self._path()
        with bucket.lock:
            bucket.gets[path] += 1
            data = bucket.objects.get(path)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if "/packs/" in path:
            bucket.open.wait()
        headers, status = {"ETag": _TAG}, 200
        if asked := _RANGE.fullmatch(self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            if first > last:
                self._answer(416, b"")
                return
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        self._answer(status, data, headers)

    def do_POST(self) -> None:
        """Delete objects, as S3 does with several at once."""
        asked = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
        keys = _KEY.findall(asked)
        if not keys or "delete" not in urlsplit(self.path).query:
            self._answer(501, b"")
            return
        with self.server.bucket.lock:
            for key in keys:
                self.server.bucket.objects.pop(f"{self._path()}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, is_sent: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Last-Modified": _DATE, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # whoever asked is gone
            view = memoryview(body) if is_sent else memoryview(b"")
            for first in range(0, len(view), _PIECE_BYTES):
                piece = view[first : first + _PIECE_BYTES]
                self.server.bucket.bandwidth.take(len(piece))
                self.wfile.write(piece)
                with self.server.bucket.lock:
                    self.server.bucket.sent_bytes += len(piece)


class SharedLine:
    """A line to a server, whose answers share a bandwidth.

    Args:
        url: of the server, ``http://host:port``.
        bandwidth: of what comes from it.

    Attributes:
        url: of the server through the line.
        passed_bytes: what came from the server.
    """

    def __init__(self, url: str, bandwidth: Bandwidth) -> None:
        parts = urlsplit(url)
        assert parts.hostname and parts.port
        self._behind = parts.hostname, parts.port
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._thread = threading.Thread(target=self._accept)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed_bytes = 0

    def __enter__(self) -> SharedLine:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        threads: list[threading.Thread] = []
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                break
            try:
                far = socket.create_connection(self._behind)
            except OSError:
                near.close()
                continue
            self._sockets += [near, far]
            for way in ((near, far, False), (far, near, True)):
                threads.append(threading.Thread(target=self._pass, args=way, daemon=True))
                threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                if is_counted:
                    self._bandwidth.take(len(piece))
                    with self._lock:
                        self.passed_bytes += len(piece)
                target.sendall(piece)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
