"""The listener of the index proxy: addresses, TLS, odd requests, the end of its server, and the commands."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.wire.indexes import IndexLog, IndexRequest, IndexToken, IndexTokenRequest, IndexView
from tests.support.cli.cli import sgpu
from tests.support.local.observe import wait_for
from tests.support.ports import own_port
from tests.support.server.certificates import Authority
from tests.support.server.package_index import Handler, PackageIndex, wheel
from tests.support.server.served import served

NAME, WHEEL, _ = wheel("sgdemo", size=3_000_000)


@pytest.mark.parametrize(
    ("said", "url"),
    [
        ({"index_proxy": "10.0.0.5:7880"}, "http://10.0.0.5:7880/"),
        ({"index_proxy": "[fd12::5]:7880", "index_url": "https://packages.example/p"}, "https://packages.example/p/"),
        ({"index_proxy": "10.0.0.5:7880", "tls_cert": "c", "tls_key": "k"}, "https://10.0.0.5:7880/"),
    ],
)
def test_27_a_proxy_has_an_address_for_clients(tmp_path: Path, said: dict[str, object], url: str) -> None:
    asked = read_settings(tmp_path, said).index_proxy
    assert asked is not None and asked.url == url and not asked.open
    assert read_settings(tmp_path).index_proxy is None


@pytest.mark.parametrize(
    "said",
    [
        {"index_proxy": "10.0.0.5"},
        {"index_proxy": "7880"},
        {"index_proxy": "0.0.0.0:7880"},
        {"index_proxy": "10.0.0.0/8:7880"},
        {"index_proxy": "10.0.0.5:1-9"},
        {"index_proxy": "10.0.0.5:0"},
        {"index_url": "https://packages.example/"},
        {"index_open": True},
        {"index_proxy": "10.0.0.5:7880", "index_url": "packages.example"},
        {"index_proxy": "10.0.0.5:7880", "index_url": "https://a:b@packages.example"},
        {"index_proxy": "10.0.0.5:7880", "index_url": "https://[x"},
    ],
)
def test_27_an_unusable_address_is_refused(tmp_path: Path, said: dict[str, object]) -> None:
    with pytest.raises(InvalidValue) as refused:
        read_settings(tmp_path, said)
    assert "index_" in refused.value.message


def test_27_a_taken_port_or_a_network_without_tls_ends_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ServerProblem, match=f"{port}"), served(tmp_path / "a", index_proxy=f"127.0.0.1:{port}"):
            pass
    with pytest.raises(InvalidValue, match="unencrypted"), served(tmp_path / "b", index_proxy="192.0.2.7:7880"):
        pass


def test_27_a_server_with_a_certificate_has_a_proxy_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("localhost", "127.0.0.1")
    port = own_port()
    options: dict[str, Any] = {"tls_cert": str(cert), "tls_key": str(key), "index_proxy": f"127.0.0.1:{port}"}
    with PackageIndex() as index, served(tmp_path / "home", **options) as server:
        index.add("sgdemo", {NAME: WHEEL})
        request = IndexRequest(url=index.url, private=True)
        server.connection().ask("PUT", "/indexes/main", request, answer=IndexView)
        made = server.connection().ask("POST", "/index-token", IndexTokenRequest(), answer=IndexToken)
        assert made.url == f"https://127.0.0.1:{port}/"
        context = ssl.create_default_context(cafile=str(authority.ca))
        with httpx2.Client(verify=context, auth=("sgpu", made.token), trust_env=False) as client:
            assert client.get(f"{made.url}main/simple/sgdemo/").status_code == 200
        with pytest.raises(httpx2.RemoteProtocolError):
            httpx2.get(f"http://127.0.0.1:{port}/", trust_env=False)


def test_27_behind_a_tls_proxy_other_peers_are_refused(tmp_path: Path) -> None:
    proxy = f"127.0.0.1:{own_port()}"
    options: dict[str, Any] = {"index_proxy": proxy, "index_open": True, "behind_proxy": ("127.0.0.1",)}
    with PackageIndex() as index, served(tmp_path, **options) as server:
        index.add("sgdemo", {NAME: WHEEL})
        request = IndexRequest(url=index.url, private=True)
        server.connection().ask("PUT", "/indexes/main", request, answer=IndexView)
        forwarded = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
        url = f"http://{proxy}/main/simple/sgdemo/"
        assert httpx2.get(url, headers=forwarded, trust_env=False).status_code == 200
        wait_for(
            lambda: server.connection().ask("GET", "/index-log", answer=IndexLog).requests, "the log has the request"
        )
        (entry,) = server.connection().ask("GET", "/index-log", answer=IndexLog).requests
        assert entry.client == "address:203.0.113.9"
        plain = {**forwarded, "X-Forwarded-Proto": "http"}
        assert httpx2.get(url, headers=plain, trust_env=False).status_code == 403


def test_27_odd_requests_lead_nowhere_and_a_server_ends_with_a_download(home: Path) -> None:
    proxy = f"127.0.0.1:{own_port()}"
    begun, end = threading.Event(), threading.Event()

    def slow(at: Handler) -> None:
        at.send_response(200)
        at.send_header("Content-Length", f"{len(WHEEL)}")
        at.end_headers()
        at.wfile.write(WHEEL[:1_000_000])
        begun.set()
        end.wait(20)
        at.close_connection = True

    with PackageIndex() as index, PackageIndex() as elsewhere:
        index.add("sgdemo", {NAME: WHEEL})
        failed: list[Exception] = []
        with served(home, index_proxy=proxy, index_open=True) as server:
            write_profile(home, ServerProfile(url=server.url, token=server.token))
            assert sgpu("index", "set", "main", index.url, "--private").exit_code == 0
            for line in (
                f"GET http://{elsewhere.host}/main/simple/x/ HTTP/1.1",
                f"CONNECT {elsewhere.host} HTTP/1.1",
                f"GET //{elsewhere.host}/simple/x/ HTTP/1.1",
                f"GET /main/simple/{elsewhere.host}@x/ HTTP/1.1",
                f"GET /main/files/x/-/http/{elsewhere.host}/x.whl HTTP/1.1",
                f"GET /{'a' * 70_000} HTTP/1.1",
                "GET /main/simple/\x00/ HTTP/1.1",
                "\x16\x03\x01",
            ):
                assert b" 200 " not in said(proxy, f"{line}\r\nHost: {elsewhere.host}\r\n\r\n").partition(b"\r\n")[0]
            assert elsewhere.asked == []
            page = httpx2.get(f"http://{proxy}/main/simple/sgdemo/", trust_env=False)
            match = re.search(r'href="\.\./\.\.([^"#]+)', page.text)
            assert match is not None
            index.answers[f"/files/{NAME}"] = slow
            link = f"http://{proxy}/main{match[1]}"
            thread = threading.Thread(target=lambda: failed.append(failure(link)))
            thread.start()
            assert begun.wait(20)
            server.stop()
            server.wait_stopped()
        end.set()
        thread.join(20)
    assert [type(each) for each in failed] == [httpx2.RemoteProtocolError]


def failure(url: str) -> Exception:
    """Return the error of a request, which must fail."""
    with pytest.raises(httpx2.HTTPError) as found:
        httpx2.get(url, trust_env=False, timeout=30)
    return found.value


def said(proxy: str, sent: str) -> bytes:
    """Return the answer to bytes on a connection."""
    host, _, port = proxy.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(sent.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while piece := connection.recv(1 << 16):
                found += piece
        except ConnectionResetError:
            pass
        return found


def test_27_the_commands_define_indexes_and_show_tokens_and_requests(home: Path) -> None:
    proxy = f"127.0.0.1:{own_port()}"
    with PackageIndex() as index, served(home, index_proxy=proxy) as server:
        write_profile(home, ServerProfile(url=server.url, token=server.token))
        index.add("sgdemo", {NAME: WHEEL})
        assert "packages.example" in sgpu("index", "set", "a", "https://packages.example/simple").stdout
        assert sgpu("index", "set", "main", index.url, "--private", "--file-host", "b.example").exit_code == 0
        listed = sgpu("index", "list", "--wide").stdout
        assert index.url in listed and "b.example" in listed and proxy in listed
        shown = json.loads(sgpu("index", "list", "--json").stdout)
        assert [each["name"] for each in shown["indexes"]] == ["a", "main"]
        urls = sgpu("index", "token", "--for", "10m").stdout.split()
        assert [urlsplit(url).path for url in urls] == ["/a/simple/", "/main/simple/"]
        assert json.loads(sgpu("index", "token", "--json").stdout)["indexes"] == ["a", "main"]
        assert httpx2.get(f"{urls[1]}sgdemo/", trust_env=False).status_code == 200
        wait_for(lambda: "sgdemo" in sgpu("index", "log").stdout, "the log shows the request")
        (entry,) = json.loads(sgpu("index", "log", "--json").stdout)["requests"]
        assert (entry["client"], entry["project"], entry["status"]) == ("user:root", "sgdemo", 200)
        assert "a" in sgpu("index", "delete", "a").stdout
        assert "packages.example" not in sgpu("index", "list").stdout
