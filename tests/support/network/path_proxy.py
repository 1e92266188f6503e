"""A proxy in a thread, as nginx or Caddy is in front of a server: one path prefix, and the headers that a proxy sets.

with path_proxy(server.url, prefix="/gpu", strips=True) as url: …     url ends with the prefix

TLS ends before it: it says `X-Forwarded-Proto: https` without speaking TLS itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

_HOP = {"connection", "transfer-encoding", "keep-alive", "server", "date"}


@contextlib.contextmanager
def path_proxy(target: str, *, prefix: str, strips: bool, proto: str = "https") -> Iterator[str]:
    """Pass requests below a prefix on to a server.

    Args:
        target: address of the server.
        prefix: of the paths that are passed on; others answer 404.
        strips: the server sees paths without the prefix.
        proto: how clients reached the proxy, as the proxy says; "" to say nothing.
    """
    host = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            path = self.path[len(prefix) :] if strips else self.path
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            headers["X-Forwarded-For"] = "203.0.113.7"
            if proto:
                headers["X-Forwarded-Proto"] = proto
            connection = HTTPConnection(host, timeout=30)
            try:
                connection.request(self.command, path, body=body or None, headers=headers)
                answer = connection.getresponse()
                data = answer.read()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP | {"content-length"}:
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            finally:
                connection.close()

        do_GET = do_POST = _pass

        def log_message(self, *_said: object) -> None:
            """Say nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}{prefix}"
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
