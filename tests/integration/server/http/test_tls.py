"""TLS by files: who is answered, with which certificate, and what happens when that is renewed."""

from __future__ import annotations

import logging
import socket
import ssl
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.environment.stores.server_store import ServedStore
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import InvalidValue, ServerUnavailable, StoreUnavailable
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.server.http.listener import bind_sockets
from serverless_gpu.server.http.tls import FILE, Certificate, CertificateInUse
from serverless_gpu.wire.access import PrincipalView
from serverless_gpu.wire.connection import Connection
from tests.support.golden import golden
from tests.support.server.certificates import Authority
from tests.support.server.served import Served, served

NAMES = ("localhost", "127.0.0.1")


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def outside(server: Served) -> str:
    """Return the address under which others reach a server."""
    return f"https://127.0.0.1:{server.outside_port}"


def peer_of(server: Served, authority: Authority) -> ssl.SSLSocket:
    """Return a connection as any client makes it."""
    context = ssl.create_default_context(cafile=str(authority.ca))
    return context.wrap_socket(
        socket.create_connection(("127.0.0.1", server.outside_port), timeout=10), server_hostname="localhost"
    )


def serial(connection: ssl.SSLSocket) -> str:
    found = connection.getpeercert()
    assert found is not None
    return str(found["serialNumber"])


def test_a_certificate_is_renewed_on_a_disk_that_is_full(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.sign(*NAMES)
    certificate = Certificate(str(cert), str(key), directory=tmp_path, clock=SystemClock())
    said = (tmp_path / FILE).read_bytes()

    def full(path: Path, _data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    certificate.renew()
    assert (tmp_path / FILE).read_bytes() == said  # whole, of the one before


def test_others_are_answered_with_the_certificate_and_this_machine_on_loopback(
    tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.sign(*NAMES)
    with served(tmp_path, tls_cert=str(cert), tls_key=str(key)) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.connection().ask("GET", "/whoami", answer=PrincipalView).role == "admin"
        there = Connection(outside(server), server.token, ca=str(authority.ca))
        assert there.ask("GET", "/whoami", answer=PrincipalView).role == "admin"
        there.close()
        stranger = Connection(outside(server), server.token)
        with pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.ask("GET", "/whoami", answer=PrincipalView)
        stranger.close()
        with peer_of(server, authority) as connection:
            assert connection.version() in ("TLSv1.2", "TLSv1.3")
        old = ssl.create_default_context(cafile=str(authority.ca))
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with (
            pytest.raises(ssl.SSLError),
            socket.create_connection(("127.0.0.1", server.outside_port), timeout=10) as plain,
        ):
            old.wrap_socket(plain, server_hostname="localhost")


def test_a_name_in_the_certificate_is_one_that_it_answers_to(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign("localhost", "gpu.internal")
    with served(tmp_path, tls_cert=str(cert), tls_key=str(key)) as server:
        for name, status in (("gpu.internal", b"200"), ("other.internal", b"403")):
            with peer_of(server, authority) as connection:
                asked = f"GET /api/v1/version HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
                connection.sendall(asked.encode())
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status), name


def test_a_renewed_certificate_is_for_new_connections_and_one_that_is_none_changes_nothing(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.sign(*NAMES, file="renewed")
    with served(tmp_path, tls_cert=str(cert), tls_key=str(key)) as server:
        kept = Connection(outside(server), server.token, ca=str(authority.ca))
        kept.ask("GET", "/whoami", answer=PrincipalView)
        with peer_of(server, authority) as connection:
            first = serial(connection)
        authority.sign(*NAMES, days=2, file="renewed")
        server.renew()
        with peer_of(server, authority) as connection:
            second = serial(connection)
        assert second != first
        kept.ask("GET", "/whoami", answer=PrincipalView)
        kept.close()
        authority.sign(*NAMES, file="other")
        (cert.with_name("other.key")).replace(key)  # the certificate's is another one
        with caplog.at_level(logging.ERROR):
            server.renew()
        assert "did not renew" in caplog.text and golden("server.tls.do-go-together") in caplog.text
        with peer_of(server, authority) as connection:
            assert serial(connection) == second


@pytest.mark.parametrize("days", [-1.0, 2.0])
def test_a_certificate_that_has_ended_or_is_not_good_yet_does_not_replace_a_good_one(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture, days: float
) -> None:
    cert, key = authority.sign(*NAMES, file="good")
    with served(tmp_path, tls_cert=str(cert), tls_key=str(key)) as server:
        with peer_of(server, authority) as connection:
            first = serial(connection)
        authority.sign(*NAMES, days=days, file="good", not_before=1.0 if days > 0 else -30.0)
        with caplog.at_level(logging.ERROR):
            server.renew()
        says = "it becomes valid in 24 h" if days > 0 else "ended 24 h"
        assert golden("server.tls.renewed-one-use") in caplog.text and says in caplog.text
        with peer_of(server, authority) as connection:
            assert serial(connection) == first
        written = msgspec.json.decode((tmp_path / "server" / FILE).read_bytes(), type=CertificateInUse)
        assert 0 < written.until_ns - SystemClock().wall_ns() < 86_400e9


def test_environments_go_to_a_server_of_an_own_authority(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign(*NAMES, file="store")
    with served(tmp_path, tls_cert=str(cert), tls_key=str(key)) as server:
        url, name = f"sgpu+{outside(server)}", f"units/{'0' * 64}"
        trusting = open_store(url, {}, token=server.token, ca=str(authority.ca), bound_s=5)
        stranger = open_store(url, {}, token=server.token, bound_s=0)
        assert isinstance(trusting, ServedStore) and isinstance(stranger, ServedStore)
        assert trusting.present([name]) == frozenset()
        trusting.close()
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.present([name])
        stranger.close()


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, authority: Authority, mode: int) -> None:
    cert, key = authority.sign(*NAMES, file="readable")
    key.chmod(mode)
    with pytest.raises(InvalidValue, match="other users can read"):
        Certificate(str(cert), str(key), directory=tmp_path, clock=SystemClock())


def test_files_that_are_none_are_refused(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign(*NAMES, file="mixed")
    for pair, says in (
        ((str(tmp_path / "none"), str(key)), "is not a certificate"),
        ((str(cert), str(tmp_path / "none")), "cannot be read"),
        ((str(key), str(key)), "is not a certificate"),
    ):
        with pytest.raises(InvalidValue, match=says):
            Certificate(*pair, directory=tmp_path, clock=SystemClock())


def test_how_long_a_certificate_is_good_is_said_at_the_start(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.sign(*NAMES, days=-1, file="ended")
    with caplog.at_level(logging.ERROR):
        Certificate(str(cert), str(key), directory=tmp_path, clock=SystemClock())
    assert golden("server.tls.ended-pem-localhost") in caplog.text
    written = msgspec.json.decode((tmp_path / FILE).read_bytes(), type=CertificateInUse)
    assert (written.path, written.names) == (str(cert), NAMES)


def test_beyond_loopback_it_speaks_tls_or_has_a_proxy_or_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="network unencrypted") as caught:
        bind_sockets(read_settings(tmp_path, {"host": "0.0.0.0", "port": 0}))
    assert "--tls-cert" in caught.value.hint and "--behind-proxy" in caught.value.hint
