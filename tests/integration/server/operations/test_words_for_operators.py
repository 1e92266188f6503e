"""What goes wrong at an operator's hands is said in words, with what to do next."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.program import sgpu
from serverless_gpu.cli.server import disk_warnings
from serverless_gpu.errors import (
    InvalidValue,
    NotAuthenticated,
    NotFound,
    ServerNotConfigured,
    ServerProblem,
    ServerUnavailable,
)
from serverless_gpu.model.lifecycle.attempt import StopReason
from serverless_gpu.model.lifecycle.run_lifecycle import StopAsked
from serverless_gpu.model.secrets import VALUE_BYTES_MAX
from serverless_gpu.node.base.home import Home
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core import disk_space, server_log
from serverless_gpu.server.core.settings import unknown_variables
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.http.tls import Certificate
from serverless_gpu.wire.access import PrincipalView, SecretRequest, SecretView
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import RunView
from serverless_gpu.wire.server_status import Version
from tests.support.golden import golden
from tests.support.server.agents import NODE, hello, submit, tell
from tests.support.server.certificates import Authority
from tests.support.server.runs_api import request
from tests.support.server.served import served
from tests.support.server.stored import add_people

pytestmark = pytest.mark.any_database


def told(*arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(sgpu, list(arguments), input=stdin)


@pytest.mark.parametrize("command", [["check"], ["backup", "copies"]])
def test_a_damaged_database_is_named(home: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "server").mkdir()
    (home / "server" / "key").write_bytes(b"k")
    (home / "server" / "server.db").write_bytes(b"garbage" * 1000)
    error = told("server", *command).exception
    assert isinstance(error, ServerProblem), error
    assert (
        f"{home}/server/server.db" in error.message
        and golden("server.words_for_operators.file-database") in error.message
    )
    assert error.hint


def test_a_server_with_a_damaged_database_does_not_start(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = home / "server.db"
    path.write_bytes(b"garbage" * 1000)
    database = Database(f"sqlite:///{path}", clock=SystemClock())
    with pytest.raises(ServerProblem, match=golden("server.words_for_operators.database-damaged-none")) as found:
        database.migrate()
    assert "sgpu server restore" in found.value.hint
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    database.close()


@pytest.mark.parametrize("command", [["server", "drain", "--wait", "x"], ["token", "create", "--expires", "x"]])
def test_a_duration_that_is_none_is_refused_with_its_option(home: Path, command: list[str]) -> None:
    found = told(*command)
    assert found.exit_code == 2 and command[-2] in found.output and "'x'" in found.output


def test_an_odd_line_does_not_end_the_log(home: Path) -> None:
    path = home / "server" / "server.log"
    handler = server_log.to_file(path)
    logging.getLogger("serverless_gpu.server").error("before")
    server_log.detach(handler)
    with path.open("ab") as file:
        file.write(b'{"ts":5,"level":{},"logger":[],"msg":[1]}\n{"level":"ERROR","msg":"after"}\n')
    for more in ([], ["--level", "error"]):
        lines = told("server", "logs", *more).output.splitlines()
        assert (len(lines), lines[0][-6:], lines[-1][-5:]) == (3, "before", "after")
    error = told("server", "logs", "--run", "01kaz").exception
    assert isinstance(error, NotFound) and "01kaz" in error.message


@pytest.mark.parametrize("command", [["audit", "list"], ["server", "drain"], ["server", "resume"], ["secret", "list"]])
def test_a_command_without_a_server_says_what_it_needs(home: Path, command: list[str]) -> None:
    error = told(*command).exception
    assert isinstance(error, ServerNotConfigured)
    assert "remote" not in str(error) and "sgpu up" in error.hint and "sgpu login" in error.hint


@pytest.mark.parametrize("url", ["localhost:7878", "ftp://gpus.example.org", "http://gpus.example.org"])
def test_login_says_how_an_address_is_written(home: Path, url: str) -> None:
    error = told("login", url, stdin="").exception
    assert isinstance(error, InvalidValue) and "https://" in error.hint


def test_what_is_no_certificate_is_named(home: Path, tmp_path: Path) -> None:
    ca = tmp_path / "k.pem"
    ca.write_text("no certificate")
    error = told("login", "https://localhost:1", "--ca", str(ca), stdin="token").exception
    assert isinstance(error, InvalidValue) and str(ca) in error.message and "--ca" in error.hint


def test_why_a_certificate_is_not_trusted_is_said_with_what_mends_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("gpus.internal")
    with served(tmp_path / "home", tls_cert=str(cert), tls_key=str(key)) as server:
        said = {}
        for ca in ("", str(authority.ca)):
            there = Connection(f"https://127.0.0.1:{server.outside_port}", server.token, ca=ca)
            with pytest.raises(ServerUnavailable) as found:
                there.ask("GET", "/version", answer=Version)
            there.close()
            said[ca] = found.value
        there = Connection(f"http://localhost:{server.outside_port}", server.token)
        with pytest.raises(ServerUnavailable) as plain:
            there.ask("GET", "/version", answer=Version)
        there.close()
    stranger, misnamed = said.values()
    assert golden("server.words_for_operators.unable-get-local") in stranger.message and "--ca" in stranger.hint
    assert "mismatch" in misnamed.message and "name" in misnamed.hint and "--ca" not in misnamed.hint
    assert "https://" in plain.value.hint


def test_a_key_that_is_a_directory_or_has_a_passphrase_is_said_to_be(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).sign("localhost")
    with pytest.raises(InvalidValue, match="is a directory"):
        Certificate(str(cert), str(tmp_path), directory=tmp_path, clock=SystemClock())
    plain = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(InvalidValue, match="has a passphrase"):
        Certificate(str(cert), str(key), directory=tmp_path, clock=SystemClock())


def test_how_large_a_secret_is_is_not_made_up(home: Path) -> None:
    error = told("secret", "set", "HUGE", "--local", stdin=b"x" * 3_000_000).exception
    assert isinstance(error, InvalidValue)
    assert error.message == golden("server.words_for_operators.secret-huge-more", VALUE_BYTES_MAX=VALUE_BYTES_MAX)


def test_variables_that_are_no_settings_are_named_with_what_was_meant() -> None:
    environ = dict.fromkeys(
        ("SGPU_PORT", "SGPU_ALLOW_HOST", "SGPU_RETENTOIN", "SGPU_QQQQ", "SGPU_FAULT", "SGPU_RUN_ID", "PATH"), "x"
    )
    assert unknown_variables(environ) == [
        golden("server.words_for_operators.sgpu-allow-host"),
        golden("server.words_for_operators.sgpu-qqqq-setting"),
        golden("server.words_for_operators.sgpu-retentoin-setting"),
    ]


def test_a_disk_on_which_little_can_be_done_is_said_at_the_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_warnings(Home(home)) == []
    monkeypatch.setattr(disk_space, "free_bytes", lambda _place: 64 << 20)
    (said,) = disk_warnings(Home(home))
    assert str(home) in said and "67.1 MB" in said and "134.2 MB" in said


def test_who_is_disabled_is_told_so_and_who_enables_that_tokens_are_gone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(home) as server:
        monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)
        monkeypatch.setenv("SERVERLESS_GPU_TOKEN", server.token)
        carl = told("user", "create", "carl").stdout.split()[-1]
        assert "sgpu token create" not in told("user", "set", "carl", "--disable").output
        asking = server.connection(carl)
        with pytest.raises(NotAuthenticated, match="carl is disabled"):
            asking.ask("GET", "/whoami", answer=PrincipalView)
        assert golden("server.words_for_operators.sgpu-token-create") in told("user", "set", "carl", "--enable").output
        with pytest.raises(NotAuthenticated, match="was revoked"):
            asking.ask("GET", "/whoami", answer=PrincipalView)
        carl = told("token", "create", "--for", "carl").stdout.split()[-1]
        body = SecretRequest(value=b"x")
        server.connection(carl).ask("PUT", "/secrets/CS", body, answer=SecretView)
        (_, line) = told("secret", "list").stdout.splitlines()
        assert line.split()[:3] == ["CS", "1", "carl"]
        error = told("secret", "delete", "CS").exception
        assert (
            isinstance(error, NotFound)
            and golden("server.words_for_operators.secret-cs") in error.message
            and "your own" in error.hint
        )


def test_the_log_has_what_became_of_a_run(services: Services, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, "serverless_gpu.server")
    handler = server_log.to_file(tmp_path / "server.log")
    add_people(services.database, "node", "alice")  # type: ignore[arg-type] # the fixture's is a Database
    services.agents.hello(NODE, hello())
    run_id = submit(services)
    make_scheduler(services).tick(services.clock.boottime_ns())
    tell(services, run_id, StopAsked(StopReason.CANCEL))
    server_log.detach(handler)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "server.log").read_bytes().splitlines()]
    about = [(line["msg"], line["attempt"]) for line in lines if line.get("run") == run_id]
    assert about == [("placed", 1), ("STOPPING", 1)]


def test_the_log_says_which_run_was_submitted(home: Path) -> None:
    with served(home) as server:
        asked = request()
        server.connection().ask("POST", "/runs", asked, answer=RunView)
    (line,) = told("server", "logs", "--run", asked.id).output.splitlines()
    assert "POST /runs" in line
