"""Behind a proxy: connections to a server pass none, whatever the variables say, and an error names the variable."""

from __future__ import annotations

import contextlib
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.wire.http_client import proxy_variable
from tests.support.golden import golden

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")


class Proxy:
    """A proxy that refuses every request and writes down its first line."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        heard = self.heard

        class Answer(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                heard.append(self.rfile.readline())
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Answer while the context is open."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


@pytest.mark.slow
def test_23B13_calls_and_commands_reach_a_server_past_the_proxy(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy()
    for name in VARIABLES:
        monkeypatch.setenv(name, proxy.url)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with proxy.serving():
        done = subprocess.run(
            [sys.executable, "-c", f"import urllib.request\nurllib.request.urlopen({'http://192.0.2.1/'!r})"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "HTTP Error 403" in done.stderr and proxy.heard == [b"GET http://192.0.2.1/ HTTP/1.1\r\n"], "it works"
        proxy.heard.clear()
        for command in (["whoami"], ["runs"], ["node", "list"]):
            subprocess.run([sys.executable, "-m", "serverless_gpu.cli", *command], timeout=60, check=True)
        get = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)(os.environ.get)
        assert get.distributed("HTTPS_PROXY") == [proxy.url], "ranks pass the proxy that the caller uses"
    assert proxy.heard == []


@pytest.mark.parametrize(
    ("url", "variables", "named"),
    [
        ("https://gpu.example.com", {"HTTPS_PROXY": "http://proxy:3128"}, "HTTPS_PROXY"),
        ("https://10.0.0.5:7878", {"https_proxy": "http://a", "HTTPS_PROXY": "http://b"}, "https_proxy"),
        ("https://gpu.example.com", {"ALL_PROXY": "socks5://proxy"}, "ALL_PROXY"),
        ("https://gpu.example.com", {"HTTP_PROXY": "http://proxy:3128", "HTTPS_PROXY": ""}, ""),
        ("http://127.0.0.1:7878", {"HTTP_PROXY": "http://proxy:3128"}, ""),
    ],
)
def test_23B13_the_variable_of_a_proxy_is_named(url: str, variables: dict[str, str], named: str) -> None:
    assert proxy_variable(url, variables) == named


def test_23B13_a_server_that_does_not_answer_names_the_proxy_that_is_not_used(home: Path) -> None:
    variables = {
        "SERVERLESS_GPU_SERVER": "https://server.invalid:1",
        "SERVERLESS_GPU_TOKEN": "sgpu_test_secret",
        "HTTPS_PROXY": "http://proxy.invalid:3128",
        "SERVERLESS_GPU_PATIENCE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "serverless_gpu.cli", "whoami"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 75
    assert done.stderr.splitlines()[-1] == golden("remote.proxies.hint-sgpu-up")
