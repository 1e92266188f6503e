"""The index proxy with real clients: pip and uv, an index whose answers the test decides, and a server with a proxy."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

import httpx2
import pytest

from serverless_gpu.server.index_proxy import client_limits, upstream
from serverless_gpu.wire.access import AuditPage, SecretRequest, SecretView
from serverless_gpu.wire.indexes import IndexLog, IndexLogEntry, IndexRequest, IndexToken, IndexTokenRequest, IndexView
from tests.support.local.observe import wait_for
from tests.support.ports import own_port
from tests.support.server.package_index import JSON, Handler, PackageIndex, wheel
from tests.support.server.served import Served, served

READ_S = 0.5
PASSWORD = "hunter2-of-the-index"
NAME, WHEEL, METADATA = wheel("sgdemo", requires="sgdep", size=300_000)


class Site(NamedTuple):
    """A server with an index proxy, and an index for it."""

    server: Served
    packages: PackageIndex
    proxy: str  # Address and port.

    def define(self, name: str, index: PackageIndex | None = None, **more: object) -> IndexView:
        """Define an index."""
        url = (index or self.packages).url
        request = IndexRequest(**{"url": url, "private": True, **more})  # type: ignore[arg-type] # fields by name
        return self.server.connection().ask("PUT", f"/indexes/{name}", request, answer=IndexView)

    def token(self) -> str:
        """Return a token of the administrator for the proxy."""
        made = self.server.connection().ask("POST", "/index-token", IndexTokenRequest(), answer=IndexToken)
        assert made.url == f"http://{self.proxy}/"
        return made.token

    def url(self, name: str) -> str:
        """Return the URL of an index, with a token."""
        return f"http://sgpu:{self.token()}@{self.proxy}/{name}/simple/"

    def client(self, **more: object) -> httpx2.Client:
        """Return a client with a token."""
        auth = more.pop("auth", ("sgpu", self.token()))
        return httpx2.Client(base_url=f"http://{self.proxy}", auth=auth, timeout=20, trust_env=False)  # type: ignore[arg-type] # a pair

    def last(self, limit: int = 1) -> tuple[IndexLogEntry, ...]:
        """Return the last requests of the proxy."""
        query = {"limit": f"{limit}"}
        return self.server.connection().ask("GET", "/index-log", answer=IndexLog, query=query).requests

    def logged(self, **fields: object) -> IndexLogEntry:
        """Return the last request once it has these fields: a response arrives before its log entry."""

        def look() -> IndexLogEntry | None:
            entry = self.last()[0]
            return entry if all(getattr(entry, name) == value for name, value in fields.items()) else None

        return wait_for(look, f"the last request has {fields}")  # type: ignore[return-value] # not None


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Yield a server with a proxy in front of one index, which has packages."""
    with pytest.MonkeyPatch.context() as patch, PackageIndex() as index:
        patch.setattr(upstream, "READ_S", READ_S)
        proxy = f"127.0.0.1:{own_port()}"
        with served(tmp_path_factory.mktemp("server"), index_proxy=proxy) as server:
            made = Site(server, index, proxy)
            made.define("main")
            index.add("sgdemo", {NAME: WHEEL}, metadata=METADATA)
            name, body, _ = wheel("sgdep")
            index.add("sgdep", {name: body})
            yield made


def file_url(client: httpx2.Client, project: str = "sgdemo", index: str = "main") -> str:
    """Return the URL of the first file of a project."""
    page = client.get(f"/{index}/simple/{project}/")
    assert page.status_code == 200, page.text
    match = re.search(r'href="([^"#]+)', page.text)
    assert match is not None, page.text
    return str(urljoin(str(page.url), match[1]))


def environment(tmp_path: Path) -> dict[str, str]:
    """Return variables with which pip and uv use neither settings nor caches of this machine."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    return {**clean, "PIP_CONFIG_FILE": os.devnull, "UV_CACHE_DIR": str(tmp_path / "cache"), "UV_NO_CONFIG": "1"}


def test_27_pip_downloads_through_the_proxy(site: Site, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "pip", "download", "--no-input", "--no-cache-dir", "--dest", str(tmp_path)]
    command = [*program, "--index-url", site.url("main"), "sgdemo"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / NAME).read_bytes() == WHEEL
    assert {path.name for path in tmp_path.iterdir()} == {NAME, "sgdep-1.0-py3-none-any.whl"}
    assert "sgpx_" not in done.stdout + done.stderr, "pip masks the token"


@pytest.mark.parametrize("kind", ["html", "json", "no metadata"])
def test_27_uv_installs_through_the_proxy(site: Site, tmp_path: Path, kind: str) -> None:
    uv = shutil.which("uv", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))))
    assert uv is not None, "the development requirements contain uv"
    with PackageIndex() as index:
        site.define("own", index)
        index.add("sgdemo", {NAME: WHEEL}, metadata=b"" if kind == "no metadata" else METADATA)
        name, body, _ = wheel("sgdep")
        index.add("sgdep", {name: body})
        if kind == "json":
            digest = {"sha256": hashlib.sha256(WHEEL).hexdigest()}
            file = {"filename": NAME, "url": f"../../files/{NAME}", "hashes": digest, "core-metadata": True}
            page = {"meta": {"api-version": "1.0"}, "name": "sgdemo", "files": [file]}
            index.answers["/simple/sgdemo/"] = (JSON, json.dumps(page).encode())
        target = tmp_path / "target"
        command = [uv, "pip", "install", "--quiet", "--target", str(target), "--python", sys.executable, "sgdemo"]
        command += ["--default-index", site.url("own")]
        done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (target / "sgdemo.py").exists() and (target / "sgdep.py").exists()
        asked = [(each.path.rpartition("/")[2], "range" in each.headers) for each in index.asked]
    assert (f"{NAME}.metadata", False) in asked or kind == "no metadata"
    assert (NAME, True) in asked or kind != "no metadata", "uv reads the metadata in the wheel by ranges"


def test_27_a_request_without_a_valid_token_is_refused(site: Site) -> None:
    asked = len(site.packages.asked)
    token = site.token()
    changed = token[:-1] + ("A" if token[-1] != "A" else "B")
    for auth in (None, ("sgpu", ""), ("sgpu", changed), ("sgpu", site.server.token), ("sgpu", "x" * 500)):
        with site.client(auth=auth) as client:
            answer = client.get("/main/simple/sgdemo/")
            assert (answer.status_code, client.get("/nowhere/simple/x/").status_code) == (401, 401)
            assert answer.headers["www-authenticate"].startswith("Basic")
    with site.client(auth=None) as client:
        for said in ("Bearer abc", "Basic !", "Basic", f"Bearer {token}"):
            assert client.get("/main/simple/sgdemo/", headers={"Authorization": said}).status_code == 401
    with site.client(auth=(token, "")) as client:
        assert client.get("/main/simple/sgdemo/").status_code == 200, "the token may be the user name"
    with site.client(auth=None) as client:
        answer = client.get(f"http://{site.proxy}/main/simple/sgdemo/", headers={"Host": "127.0.0.1"})
        assert answer.status_code == 401
    assert len(site.packages.asked) == asked + 1
    status = httpx2.get(f"{site.server.url}/api/v1/runs", headers={"Authorization": f"Bearer {token}"}).status_code
    assert status in (401, 404), "a token of the proxy opens nothing else"


def test_27_only_projects_and_their_files_are_served(site: Site) -> None:
    with site.client() as client:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"):
            assert client.request(method, "/main/simple/sgdemo/").status_code == 405
        for path in ("/", "/main", "/main/simple/", "/main/other/x/", "/main/simple/-x/", "/nowhere/simple/x/"):
            assert client.get(path).status_code == 404, path
        for path in ("/main/simple/../../secret/", "/main/simple/%2e%2e/", "/main/files/../../etc/passwd"):
            answer = client.get(path)
            assert answer.status_code == 404, path
        for path in ("/main/simple/SgDemo/", "/main/simple/sgdemo"):
            answer = client.get(path)
            assert answer.status_code == 301
            assert urljoin(str(answer.url), answer.headers["location"]).endswith("/main/simple/sgdemo/")
        assert client.get(f"/main/simple/{'x' * 9_000}/").status_code == 414
        url = file_url(client)
        assert client.get(url.replace("/files/", "/files/x")).status_code == 404
        assert client.get(url.replace(NAME, "other.whl")).status_code == 404
        head = client.head("/main/simple/sgdemo/")
        assert (head.status_code, head.content) == (200, b"") and int(head.headers["content-length"]) > 100


def test_27_ranges_conditions_and_hashes_pass_through(site: Site) -> None:
    with site.client() as client:
        url = file_url(client)
        head = client.head(url)
        assert (head.status_code, head.headers["content-length"], head.content) == (200, f"{len(WHEEL)}", b"")
        assert head.headers["accept-ranges"] == "bytes"
        for said, part in (("bytes=0-9", WHEEL[:10]), ("bytes=-30", WHEEL[-30:]), ("bytes=100-", WHEEL[100:])):
            answer = client.get(url, headers={"Range": said})
            assert (answer.status_code, answer.content) == (206, part)
            assert answer.headers["content-range"].endswith(f"/{len(WHEEL)}")
        answer = client.get(url, headers={"Range": "bytes=0-1,5-6", "If-None-Match": '"a"'})
        assert (answer.status_code, answer.content) == (200, WHEEL)
        assert site.packages.asked[-1].headers["if-none-match"] == '"a"'
        assert client.get(f"{url}.metadata").content == METADATA
        site.packages.answers[f"/files/{NAME}"], before = (lambda at: at.give(304, b"", {"ETag": '"a"'})), WHEEL
        answer = client.get(url)
        site.packages.answers[f"/files/{NAME}"] = ("application/octet-stream", before)
        assert (answer.status_code, answer.headers["etag"]) == (304, '"a"')


def test_27_a_page_leads_to_hosts_of_the_definition_only(site: Site) -> None:
    with PackageIndex() as files, PackageIndex() as foreign:
        site.define("hosts", file_hosts=(files.host,))
        site.packages.add("apart", {NAME: WHEEL}, host=files.host)
        files.answers[f"/files/{NAME}"] = ("application/octet-stream", WHEEL)
        site.packages.add("elsewhere", {NAME: WHEEL}, host=foreign.host)
        with site.client() as client:
            assert client.get(file_url(client, "apart", "hosts")).content == WHEEL
            page = client.get("/hosts/simple/elsewhere/")
            assert page.status_code == 200 and "href" not in page.text
            entry = site.logged(project="elsewhere")
            assert foreign.host in entry.detail, "the log names the host that an administrator may add"
            apart = file_url(client, "apart", "hosts")
            for target, status in ((f"http://{files.host}/other.whl", 200), (f"http://{foreign.host}/x", 502)):
                files.answers[f"/files/{NAME}"] = redirect(target)
                files.answers["/other.whl"] = ("application/octet-stream", WHEEL)
                assert client.get(apart).status_code == status
            site.logged(outcome="redirect")
            for target in ("", "//", "http://[x", "file:///etc/passwd", "http://169.254.169.254/"):
                files.answers[f"/files/{NAME}"] = redirect(target)
                assert client.get(apart).status_code == 502, target
        assert foreign.asked == []


def test_27_a_name_that_leads_into_a_private_network_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    port = site.packages.host.partition(":")[2]

    async def addresses(host: str, port: int, within_s: float) -> list[str]:
        return {"public.example": ["127.0.0.1"], "metadata.example": ["169.254.169.254"]}[host]

    monkeypatch.setattr(upstream, "_addresses", addresses)
    site.define("rebound", url=f"http://public.example:{port}/simple/", private=False)
    site.define("permitted", url=f"http://public.example:{port}/simple/", private=True)
    site.define("metadata", url=f"http://metadata.example:{port}/simple/", private=True)
    with site.client() as client:
        assert client.get("/permitted/simple/sgdemo/").status_code == 200
        for name in ("rebound", "metadata"):
            assert client.get(f"/{name}/simple/sgdemo/").status_code == 502
            site.logged(outcome="address")


def test_27_credentials_come_from_a_secret_and_go_to_the_index_only(site: Site) -> None:
    connection = site.server.connection()
    request = SecretRequest(value=f"reader:{PASSWORD}".encode())
    connection.ask("PUT", "/secrets/INDEX", request, answer=SecretView)
    with PackageIndex() as private, PackageIndex() as files:
        site.define("private", private, secret="INDEX", file_hosts=(files.host,))
        private.add("sgdemo", {NAME: WHEEL}, host=files.host)
        files.answers[f"/files/{NAME}"] = ("application/octet-stream", WHEEL)
        with site.client() as client:
            assert client.get(file_url(client, index="private")).content == WHEEL
            assert httpx2.BasicAuth("reader", PASSWORD)._auth_header == private.asked[-1].headers["authorization"]
            assert "authorization" not in files.asked[-1].headers
            private.answers["/simple/sgdemo/"] = redirect(f"http://{files.host}/simple/sgdemo/")
            assert client.get("/private/simple/sgdemo/").status_code == 404
            assert "authorization" not in files.asked[-1].headers
            texts = [client.get("/private/simple/sgdemo/").text]
            private.answers["/simple/sgdemo/"] = lambda at: at.give(401, PASSWORD.encode())
            texts.append(client.get("/private/simple/sgdemo/").text)
            site.logged(outcome="credentials")
    texts += [repr(site.last(50)), repr(connection.ask("GET", "/indexes", answer=dict))]
    texts.append(repr(connection.ask("GET", "/audit", answer=AuditPage)))
    log = site.server.home / "server" / "server.log"
    wait_for(lambda: '"outcome":"credentials"' in log.read_text(), "the request is in the log")
    texts.append(log.read_text())
    assert not any(PASSWORD in text or "sgpx_" in text for text in texts)
    connection.ask("DELETE", "/secrets/INDEX", answer=SecretView)
    with site.client() as client:
        site.define("main")  # A change of an index is in effect at once, a change of a secret after five seconds.
        assert client.get("/private/simple/sgdemo/").status_code == 502
        assert "INDEX" in site.logged(index="private", outcome="credentials").detail


def test_27_two_downloads_go_on_at_once(site: Site) -> None:
    both = threading.Barrier(2)

    def wait_for_both(at: Handler) -> None:
        both.wait(10)
        at.give(200, WHEEL)

    with PackageIndex() as index:
        site.define("two", index)
        index.add("sgdemo", {NAME: WHEEL})
        with site.client() as client:
            url = file_url(client, index="two")
            index.answers[f"/files/{NAME}"] = wait_for_both
            found: list[bytes] = []
            threads = [threading.Thread(target=lambda: found.append(client.get(url).content)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
    assert found == [WHEEL, WHEEL]


def redirect(target: str) -> Callable[[Handler], None]:
    return lambda at: at.give(302, b"", {"Location": target})


def part(size: int) -> Callable[[Handler], None]:
    """Answer with the beginning of a wheel, and close the connection."""

    def answer(at: Handler) -> None:
        at.send_response(200)
        at.send_header("Content-Length", f"{len(WHEEL)}")
        at.end_headers()
        at.wfile.write(WHEEL[:size])
        at.close_connection = True

    return answer


def silent(at: Handler) -> None:
    """Answer with the beginning of a wheel, and send nothing more until the proxy closes the connection."""
    part(1_000)(at)
    at.wfile.flush()
    at.connection.settimeout(20)
    at.connection.recv(1)


def garbage(at: Handler) -> None:
    at.wfile.write(b"hello\r\n\r\n")
    at.close_connection = True


FAULTS: dict[str, tuple[Callable[[Handler], None], int, str]] = {
    "not found": (lambda at: at.give(404, b""), 404, "missing"),
    "not allowed": (lambda at: at.give(403, b""), 404, "missing"),
    "failed": (lambda at: at.give(500, b""), 502, "upstream"),
    "busy": (lambda at: at.give(429, b""), 503, "upstream"),
    "no answer": (lambda at: at.connection.recv(1) and None, 504, "timeout"),
    "closed": (lambda at: at.connection.shutdown(socket.SHUT_RDWR), 502, "truncated"),
    "no HTTP": (garbage, 502, "truncated"),
    "redirects": (redirect("#again"), 502, "redirect"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_27_a_failing_index_is_named_with_its_fault(site: Site, fault: str) -> None:
    answer, status, outcome = FAULTS[fault]
    with PackageIndex() as index, site.client() as client:
        site.define("failing", index)
        index.add("sgdemo", {NAME: WHEEL})
        url = file_url(client, index="failing")
        index.answers["/simple/sgdemo/"] = index.answers[f"/files/{NAME}"] = answer
        for asked in ("/failing/simple/sgdemo/", url):
            found = client.get(asked)
            assert found.status_code == status
            site.logged(outcome=outcome)
            assert "failing" in found.text
        assert (found.headers.get("retry-after") is not None) is (status == 503)


def test_27_an_index_that_sends_a_page_byte_by_byte_has_a_deadline(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def drip(at: Handler) -> None:
        at.send_response(200)
        at.send_header("Content-Type", "text/html")
        at.end_headers()
        try:
            while not ended.wait(READ_S / 10):
                at.wfile.write(b" ")
        except OSError:
            pass
        at.close_connection = True

    monkeypatch.setattr("serverless_gpu.server.index_proxy.application.PAGE_S", 2 * READ_S)
    site.packages.answers["/simple/drip/"] = drip
    with site.client() as client:
        assert client.get("/main/simple/drip/").status_code == 504
    ended.set()
    site.logged(outcome="timeout")


def test_27_an_index_that_does_not_listen(site: Site) -> None:
    site.define("dead", url=f"http://127.0.0.1:{own_port()}/simple/")
    with site.client() as client:
        assert client.get("/dead/simple/sgdemo/").status_code == 502
    site.logged(outcome="unreachable")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (part(len(WHEEL) - 7), "truncated"),
        (silent, "timeout"),
        (lambda at: at.give(200, bytes(len(WHEEL))), "hash"),
    ],
)
def test_27_an_incomplete_or_changed_file_never_arrives_whole(
    site: Site, answer: Callable[[Handler], None], outcome: str
) -> None:
    with PackageIndex() as index, site.client() as client:
        site.define("damaged", index)
        index.add("sgdemo", {NAME: WHEEL})
        url = file_url(client, index="damaged")
        index.answers[f"/files/{NAME}"] = answer
        with pytest.raises(httpx2.RemoteProtocolError):
            client.get(url)
        site.logged(outcome=outcome)


GZIP = {"Content-Type": "text/html", "Content-Encoding": "gzip"}
NO_PAGES: dict[str, tuple[dict[str, str], bytes, str]] = {
    "other type": ({"Content-Type": "application/json"}, b"{}", "invalid"),
    "other compression": ({"Content-Type": "text/html", "Content-Encoding": "br"}, b"x", "invalid"),
    "no gzip": (GZIP, b"no gzip", "invalid"),
    "half of gzip": (GZIP, gzip.compress(b"x")[:-9], "truncated"),
    "small gzip of a large page": (GZIP, gzip.compress(b"x" * 2_000), "too_large"),
    "other JSON": ({"Content-Type": JSON}, b"{}", "invalid"),
    "large page": ({"Content-Type": "text/html"}, b"x" * 2_000, "too_large"),
}


@pytest.mark.parametrize("name", NO_PAGES)
def test_27_what_is_not_a_page_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    headers, body, outcome = NO_PAGES[name]
    monkeypatch.setattr("serverless_gpu.server.index_proxy.application.PAGE_BYTES_MAX", 1_000)
    site.packages.answers["/simple/odd/"] = lambda at: at.give(200, body, headers)
    with site.client() as client:
        assert client.get("/main/simple/odd/").status_code == 502
    site.logged(outcome=outcome)


def test_27_a_client_that_leaves_ends_the_request_to_the_index(site: Site) -> None:
    ended = threading.Event()

    def endless(at: Handler) -> None:
        at.send_response(200)
        at.end_headers()
        try:
            while True:
                at.wfile.write(bytes(1 << 16))
        except OSError:
            ended.set()
            at.close_connection = True

    with PackageIndex() as index, site.client() as client:
        site.define("endless", index)
        index.add("sgdemo", {NAME: WHEEL})
        url = file_url(client, index="endless")
        index.answers[f"/files/{NAME}"] = endless
        with client.stream("GET", url) as answer:
            next(answer.iter_raw())
        assert ended.wait(20)
        site.logged(outcome="disconnected")


def test_27_each_request_is_counted_and_logged_with_its_client(site: Site) -> None:
    with site.client() as client:
        assert client.get(file_url(client)).content == WHEEL
    site.logged(file=NAME, status=200)
    page, file = site.last(2)
    assert (page.client, page.index, page.project, page.status) == ("user:root", "main", "sgdemo", 200)
    assert (file.file, file.bytes, file.status, file.outcome) == (NAME, len(WHEEL), 200, "ok")
    metrics = httpx2.get(
        f"{site.server.url}/api/v1/metrics", headers={"Authorization": f"Bearer {site.server.token}"}
    ).text
    assert re.search(r'sgpu_index_proxy_requests_total\{index="main",outcome="ok"\} [1-9]', metrics)
    assert re.search(r'sgpu_index_proxy_bytes_total\{index="main"\} [1-9]', metrics)
    log = site.server.home / "server" / "server.log"
    wait_for(lambda: f'"file":"{NAME}"' in log.read_text(), "the request is in the log")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    line = next(each for each in reversed(lines) if each.get("file") == NAME and each.get("status") == 200)
    assert (line["client"], line["index"], line["logger"]) == ("user:root", "main", "request_log")


def test_27_an_open_proxy_needs_no_token_but_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_limits, "BURST", 3)
    monkeypatch.setattr(client_limits, "PER_S", 1)
    proxy = f"127.0.0.1:{own_port()}"
    with PackageIndex() as index, served(tmp_path, index_proxy=proxy, index_open=True) as server:
        site = Site(server, index, proxy)
        site.define("main")
        index.add("sgdemo", {NAME: WHEEL})
        with site.client(auth=None) as client:
            assert client.get(file_url(client)).content == WHEEL
            site.logged(client="address:127.0.0.1")
            found = [client.get("/main/simple/sgdemo/") for _ in range(3)]
            assert found[-1].status_code == 429 and found[-1].headers["retry-after"]
            site.logged(outcome="limit")
        with site.client(auth=("sgpu", "wrong")) as client:
            assert client.get("/main/simple/sgdemo/").status_code == 401
