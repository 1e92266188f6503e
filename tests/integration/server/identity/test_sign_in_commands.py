"""`sgpu login` by approval, `sgpu web`, `session`, `user password`, and what `sgpu up` says of the pages."""

from __future__ import annotations

import os
import re
import stat
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from serverless_gpu.cli import program
from serverless_gpu.cli import server as server_commands
from serverless_gpu.cli.access import sign_in
from serverless_gpu.client.remote.profile import ServerProfile, find_profile, write_profile
from serverless_gpu.errors import NotAllowed, NotAuthenticated
from serverless_gpu.wire.access import PrincipalView, SessionList
from serverless_gpu.wire.sign_in import DeviceDecision, DeviceRequestView, PasswordRequest
from tests.support.cli.terminal import on_terminal
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user, sign_in_path
from tests.support.web.clients import signed_in, stranger

CODE = r"[BCDFGHJKLMNPQRSTVWXZ]{4}-[BCDFGHJKLMNPQRSTVWXZ]{4}"
PASSWORD = "correct horse battery"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def laptop(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home that is logged in as the administrator, without a screen."""
    home = tmp_path / "laptop"
    home.mkdir()
    write_profile(home, ServerProfile(url=server.url, token=server.token))
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(home))
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    return home


def sgpu(*arguments: str, typed: str = "") -> Result:
    said = CliRunner().invoke(program.sgpu, arguments, input=typed, prog_name="sgpu", catch_exceptions=True)
    if said.exception is not None and not isinstance(said.exception, SystemExit):
        raise said.exception
    return said


def decide(server: Served, code: str, *, approve: bool) -> None:
    answer = DeviceRequestView
    server.connection().ask("POST", f"/device/requests/{code}", DeviceDecision(approve=approve), answer=answer)


def test_a_terminal_logs_in_when_a_browser_approves(server: Served, tmp_path: Path) -> None:
    with on_terminal("login", server.url, home=tmp_path) as terminal:
        assert terminal.wait_for(rf"{server.url}/ui/device\?code={CODE}")
        decide(server, terminal.wait_for(CODE), approve=True)
        assert terminal.ended() == 0
    profile = find_profile(tmp_path, {})
    me = server.connection(profile.token).ask("GET", "/whoami", answer=PrincipalView)
    assert (profile.url, profile.principal) == (server.url, me.name)
    assert profile.token not in terminal.text


def test_a_refusal_and_ctrl_c_end_the_login_and_leave_nothing(server: Served, tmp_path: Path) -> None:
    with (
        on_terminal("login", server.url, home=tmp_path) as refused,
        on_terminal("login", server.url, home=tmp_path, SSH_CONNECTION="1 2 3 4") as interrupted,
    ):
        decide(server, refused.wait_for(CODE), approve=False)
        interrupted.wait_for("Waiting")
        interrupted.interrupt()
        assert interrupted.ended() == 130
        assert refused.ended() not in (0, 130)
    assert "Traceback" not in refused.text + interrupted.text
    assert "ssh -L" in interrupted.text
    assert not (tmp_path / "server.json").exists()


def test_a_server_without_pages_asks_for_a_token(tmp_path: Path) -> None:
    with (
        served(tmp_path / "home", ui=False) as running,
        on_terminal("login", running.url, home=tmp_path / "laptop") as terminal,
    ):
        terminal.wait_for("Token:")
        terminal.type(f"{running.token}\n")
        assert terminal.ended() == 0
    assert running.token not in terminal.text


def test_a_restart_of_the_server_gives_the_terminal_another_code(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter(["", "secret"])
    shown: list[str] = []
    connection = SimpleNamespace(ask=lambda *_a, **_k: SimpleNamespace(), close=lambda: None)
    monkeypatch.setattr(sign_in, "connect", lambda _profile: connection)
    monkeypatch.setattr(sign_in, "_show_code", lambda *_a, **_k: shown.append("code"))
    monkeypatch.setattr(sign_in, "_wait", lambda *_a: next(waits))
    profile = ServerProfile(url="http://127.0.0.1:1", token="")
    assert sign_in._approved_token(profile, opens=False) == "secret"
    assert len(shown) == 2


def test_web_prints_a_link_that_signs_in_once(server: Served, laptop: Path) -> None:
    said = sgpu("web")
    link = said.stdout.strip()
    assert link.startswith(f"{server.url}/ui/sign-in?code=")
    with stranger(server) as client:
        assert client.get(link).status_code == 303
        assert client.get("/ui/").status_code == 200
        client.cookies.clear()
        assert client.get(link).status_code == 401
    assert not (laptop / sign_in.LINK_FILE).exists()


def test_web_gives_the_browser_a_private_file_instead_of_the_link(
    server: Served, laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")

    def open_page(address: str) -> bool:
        opened.append(address)
        return True

    monkeypatch.setattr(webbrowser, "open", open_page)
    said = sgpu("web")
    path = laptop / sign_in.LINK_FILE
    assert opened == [path.as_uri()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    link = re.search(r'url=([^"]+)"', path.read_text())
    assert link is not None
    assert link[1] not in said.output
    with stranger(server) as client:
        assert client.get(link[1]).status_code == 303


def test_sessions_are_listed_and_end_on_the_command_line(server: Served, laptop: Path) -> None:
    token = make_user(server, "alice")
    with signed_in(server, token) as client, signed_in(server, token) as other, signed_in(server) as own:
        found: SessionList = server.connection(token).ask("GET", "/sessions", answer=SessionList)
        assert {one.id for one in found.sessions} <= set(
            re.findall(r"\w{26}", sgpu("session", "list", "--json").stdout)
        )
        assert sgpu("session", "end", found.sessions[0].id).exit_code == 0
        assert sorted(client.get("/ui/").status_code for client in (client, other)) == [200, 303]
        assert "1" in sgpu("session", "end", "--all", "--for", "alice").stdout
        assert {client.get("/ui/").status_code for client in (client, other)} == {303}
        assert own.get("/ui/").status_code == 200
    for wrong in (("session", "end"), ("session", "end", "x", "--all"), ("session", "end", "x", "--for", "alice")):
        assert CliRunner().invoke(program.sgpu, wrong).exit_code != 0


def test_passwords_are_set_changed_and_removed_on_the_command_line(server: Served, laptop: Path) -> None:
    make_user(server, "bob")
    assert sgpu("user", "password", "bob", typed=f"{PASSWORD}\n").exit_code == 0
    link = sgpu("user", "password", "bob", "--link").stdout.strip()
    with stranger(server) as client:
        assert client.get(link).status_code == 200
    assert sgpu("user", "password", "bob", "--remove").exit_code == 0
    own = server.connection().ask("GET", "/whoami", answer=PrincipalView).name
    request = PasswordRequest(password=PASSWORD)
    server.connection().ask("PUT", f"/users/{own}/password", request, answer=NoneType)
    with pytest.raises(NotAllowed):
        sgpu("user", "password", own, typed="wrong\nanother long password\n")
    assert sgpu("user", "password", own, typed=f"{PASSWORD}\nanother long password\n").exit_code == 0
    assert sgpu("user", "password", own, "--remove").exit_code == 0


@pytest.mark.parametrize(
    ("is_terminal", "ui", "shown"), [(True, True, "code="), (False, True, "sgpu web"), (True, False, "")]
)
def test_up_shows_a_link_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, ui: bool, shown: str
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    settings: Any = SimpleNamespace(ui=ui)
    running: Any = SimpleNamespace(sign_in_path=lambda: "/ui/sign-in?code=secret")
    lines = "\n".join(server_commands._web_lines(settings, "http://127.0.0.1:7878", running))
    assert shown in lines
    assert ("secret" in lines) == (is_terminal and ui)
    assert bool(lines) == ui


def test_the_link_of_up_signs_the_administrator_in(server: Served) -> None:
    with stranger(server) as client:
        assert client.get(server._running.sign_in_path()).status_code == 303
        own = server.connection().ask("GET", "/whoami", answer=PrincipalView).name
        assert own in client.get("/ui/").text


def test_a_used_link_says_what_to_do(server: Served) -> None:
    path = sign_in_path(server)
    with stranger(server) as client:
        client.get(path)
        client.cookies.clear()
        assert "sgpu web" in client.get(path).text


def test_a_session_is_no_token(server: Served) -> None:
    with signed_in(server) as client, pytest.raises(NotAuthenticated):
        server.connection(client.cookies["sgpu_session"]).ask("GET", "/whoami", answer=PrincipalView)
    assert os.environ.get("SERVERLESS_GPU_SERVER") is None
