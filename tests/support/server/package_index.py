"""A package index of a test's own on loopback, whose answers the test decides, and wheels for it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

JSON = "application/vnd.pypi.simple.v1+json"


class Asked(NamedTuple):
    """A request that the index has received."""

    method: str
    path: str
    headers: dict[str, str]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from the index's table."""

    protocol_version = "HTTP/1.1"
    index: PackageIndex

    def do_GET(self) -> None:
        """Answer as the test has said."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.index.asked.append(Asked(self.command, self.path, headers))
        found = self.index.answers.get(self.path)
        if found is None:
            self.give(404, b"")
        elif callable(found):
            found(self)
        else:
            self.give(200, found[1], {"Content-Type": found[0], "Accept-Ranges": "bytes"})

    do_HEAD = do_GET

    def give(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send a response, or the part that the request's range names."""
        more = dict(headers or {})
        asked = self.headers.get("Range", "")
        if status == 200 and asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, len(body) - int(last))
            end = int(last) + 1 if first and last else len(body)
            more["Content-Range"] = f"bytes {start}-{min(end, len(body)) - 1}/{len(body)}"
            status, body = 206, body[start:end]
        self.send_response(status)
        for name, value in {"Content-Length": f"{len(body)}", **more}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class PackageIndex:
    """An index that serves what is in `answers`.

    Attributes:
        answers: by path, a media type with a body, or a function that answers.
        asked: the requests so far.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[str, bytes] | Callable[[Handler], None]] = {}
        self.asked: list[Asked] = []
        self._server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Own", (Handler,), {"index": self}), bind_and_activate=True
        )
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> PackageIndex:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def host(self) -> str:
        """Return the address with the port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """Return the URL of the simple repository."""
        return f"http://{self.host}/simple/"

    def add(self, project: str, files: dict[str, bytes], *, host: str = "", metadata: bytes = b"") -> None:
        """Serve a project with files as HTML, which another host may have; wheels have this metadata."""
        lines = []
        for name, body in files.items():
            self.answers[f"/files/{name}"] = ("application/octet-stream", body)
            more = ""
            if metadata:
                self.answers[f"/files/{name}.metadata"] = ("application/octet-stream", metadata)
                more = f' data-core-metadata="sha256={hashlib.sha256(metadata).hexdigest()}"'
            url = f"http://{host}/files/{name}" if host else f"../../files/{name}"
            lines.append(f'<a href="{url}#sha256={hashlib.sha256(body).hexdigest()}"{more}>{name}</a>')
        self.answers[f"/simple/{project}/"] = ("text/html", "\n".join(lines).encode())


def wheel(name: str, version: str = "1.0", *, requires: str = "", size: int = 0) -> tuple[str, bytes, bytes]:
    """Return the file name, the bytes and the metadata of a wheel with one module, and about `size` bytes more."""
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}".encode()
    files = {
        f"{name}.py": b"VALUE = 27\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if size:
        files[f"{name}.bin"] = bytes(range(256)) * (size // 256)
    rows = [f"{path},sha256={_record_hash(body)},{len(body)}" for path, body in files.items()]
    files[f"{info}/RECORD"] = "\n".join((*rows, f"{info}/RECORD,,", "")).encode()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for path, body in files.items():
            archive.writestr(path, body)
    return f"{name}-{version}-py3-none-any.whl", made.getvalue(), metadata


def _record_hash(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
