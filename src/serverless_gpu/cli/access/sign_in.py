"""`sgpu login`, `web`, `session`: log a terminal in, and sign a browser in.

    sgpu login URL     address and code for a browser ─▶ a signed-in user approves ─▶ the terminal receives a token
    sgpu web           the terminal's token ─▶ a one-time link ─▶ the browser opens the web pages, signed in

Failure cases:
* Without a browser, for example over SSH, both commands print the address. Any browser that reaches it can open it.
* If the server restarts while `sgpu login` waits, the command prints another code.
* Other users of the machine can read the arguments of processes. The browser therefore opens a one-time link from a
  file that only its user can read.
"""

from __future__ import annotations

import html
import os
import socket
import sys
import time
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import click
import msgspec

from serverless_gpu.ambient import SystemClock, format_moment, machine
from serverless_gpu.cli.command_group import LazyGroup
from serverless_gpu.cli.completion import complete_user
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.runs.run_location import durable_home
from serverless_gpu.cli.server_connection import connect, server
from serverless_gpu.client.remote.profile import ServerProfile, check_address, remote_home, write_profile
from serverless_gpu.errors import InvalidValue, NotAllowed, NotAuthenticated, NotFound, ServerUnavailable
from serverless_gpu.wire.access import PrincipalView, SessionList, SessionsEnded, SessionView, SignInLink
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.server_status import Version
from serverless_gpu.wire.sign_in import DeviceAnswer, DeviceCode, DeviceCodeRequest, DevicePoll

_TOKEN_BYTES_MAX = 1_000
_HOME = "`sgpu login` stores the token in the home directory"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
LINK_FILE = "sign-in.html"
"""File in the home directory that forwards the browser to the last one-time link of `sgpu web`."""


@click.command()
@click.argument("url")
@click.option("--token", "asks_token", is_flag=True, help="Ask for a token instead of an approval in a browser.")
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read the token from this file.",
)
@click.option("--no-browser", is_flag=True, help="Print the address of the approval, and open no browser.")
@click.option(
    "--ca", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Trust the CA certificates in this file."
)
def login(url: str, asks_token: bool, token_file: Path | None, no_browser: bool, ca: Path | None) -> None:
    """Log in to a server.

    URL is the server's address. On a terminal, `sgpu login` shows an address and a code. Open the address in any
    browser, sign in, and approve the code. The server then creates a token for this machine. Without a terminal, the
    command reads a token from stdin. `sgpu login` saves the login in the home directory. Only you can read the file
    with the server's address and token. Pass no token as an argument, because every user of the machine can read
    command arguments.
    """
    check_address(url)
    home = durable_home(_HOME).root
    profile = ServerProfile(url=url.rstrip("/"), token="", ca=str(ca.absolute()) if ca is not None else "")
    token = ""
    if token_file is None and not asks_token and sys.stdin.isatty():
        token = _approved_token(profile, opens=not no_browser)
    profile = msgspec.structs.replace(profile, token=token or _read_token(token_file))
    connection = connect(profile)
    try:
        version = connection.ask("GET", "/version", answer=Version)
        me = connection.ask("GET", "/whoami", answer=PrincipalView)
    finally:
        connection.close()
    write_profile(home, msgspec.structs.replace(profile, principal=me.name, machine=version.machine))
    here = ", on this machine" if version.machine == machine() else ""
    say(f"logged in as {me.name} ({me.role}) at {profile.url}{here}, serverless-gpu {version.version}")


def _approved_token(profile: ServerProfile, *, opens: bool) -> str:
    """Return a token after the approval in a browser, or "" for a server without web pages."""
    connection = connect(profile)
    try:
        while True:
            try:
                code = connection.ask(
                    "POST", "/device/codes", DeviceCodeRequest(host=socket.gethostname()[:100]), answer=DeviceCode
                )
            except (NotFound, NotAuthenticated):
                say(f"sgpu: {profile.url} has no web pages, so enter a token", err=True)
                return ""
            _show_code(profile, code, opens=opens)
            token = _wait(connection, code)
            if token:
                return token
            opens = False
            say("sgpu: the server has restarted and needs another approval", err=True)
    finally:
        connection.close()


def _show_code(profile: ServerProfile, code: DeviceCode, *, opens: bool) -> None:
    address = f"{profile.url}{code.path}?code={code.user_code}"
    say(f"Open this address, and approve the code {code.user_code}:", err=True)
    say(f"  {address}", err=True)
    _say_tunnel(profile.url)
    if opens and has_browser():
        webbrowser.open(address)
    say(f"The code is valid for {code.expires_s / 60:.0f} minutes. Ctrl-C ends the login. Waiting …", err=True)


def _wait(connection: Connection, code: DeviceCode) -> str:
    """Return the token after the approval, or "" if the server has forgotten the code."""
    clock = SystemClock()
    until_ns = clock.boottime_ns() + round(code.expires_s * 1e9)
    interval_s, is_away = code.interval_s, False
    while True:
        time.sleep(interval_s)
        is_over = clock.boottime_ns() >= until_ns
        try:
            answer = connection.ask(
                "POST", "/device/token", DevicePoll(device_code=code.device_code), answer=DeviceAnswer
            )
        except ServerUnavailable as error:
            if is_over:
                raise
            if not is_away:
                say(f"sgpu: {error.message}; waiting for the server", err=True)
            is_away = True
            continue
        if answer.made is not None:
            return answer.made.secret
        if answer.state == "refused":
            raise NotAllowed("a user has refused this login", hint="run `sgpu login` again")
        if answer.state == "expired":
            if is_over:
                raise NotAuthenticated("no user has approved the code in time", hint="run `sgpu login` again")
            return ""
        interval_s = answer.interval_s or interval_s


@click.command()
@click.option("--no-browser", is_flag=True, help="Print the one-time link, and open no browser.")
def web(no_browser: bool) -> None:
    """Open the web pages in a browser.

    The browser is signed in as the user who logged in here. Without a browser, for example over SSH, `sgpu web` prints
    a link. The link is valid once, for ten minutes. It works in every browser that reaches the server.
    """
    with server() as connection:
        link = connection.ask("POST", "/sign-in-links", answer=SignInLink)
        url = connection.url
    address = f"{url}{link.path}"
    if not no_browser and has_browser():
        path = _write_link(remote_home(os.environ).root / LINK_FILE, address)
        if webbrowser.open(path.absolute().as_uri()):
            say(f"{url}/ui opens in the browser. If it does not: sgpu web --no-browser")
            return
    say(f"sgpu: this link signs you in, once, until {format_moment(link.expires_ns)}:", err=True)
    say(address)
    _say_tunnel(url)


def has_browser() -> bool:
    """Return True if this process can open a browser with windows on the user's screen."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _write_link(path: Path, address: str) -> Path:
    """Write a page that forwards to a link, in a file that only its user can read."""
    path.unlink(missing_ok=True)
    text = f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={html.escape(address)}">\n'
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path


def _say_tunnel(url: str) -> None:
    """Over SSH, print how another machine's browser reaches a server that listens on loopback."""
    parts = urlsplit(url)
    if os.environ.get("SSH_CONNECTION") and parts.hostname in _LOOPBACK:
        port = parts.port or 80
        say(f"sgpu: on your own machine, first run: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", err=True)


@click.group(cls=LazyGroup)
def session() -> None:
    """List and end sessions of browsers."""


@session.command("list")
@wide_option
@json_option(tuple[SessionView, ...])
def list_sessions(wide: bool, as_json: bool) -> None:
    """List the browsers in which you are signed in.

    An administrator sees the sessions of all users.
    """
    with server() as connection:
        found = connection.ask("GET", "/sessions", answer=SessionList).sessions
    if as_json:
        print_json(found)
        return
    rows = []
    for each in found:
        used = "-" if each.used_ns is None else format_moment(each.used_ns)
        origin = each.origin
        ends = format_moment(each.expires_ns)
        rows.append([each.id, each.principal, origin.method, origin.address or "-", used, ends, origin.browser or "-"])
    print_table(["ID", "OF", "METHOD", "ADDRESS", "LAST USED", "ENDS", "BROWSER"], rows, wide=wide)


@session.command("end")
@click.argument("identifier", required=False)
@click.option("--all", "is_all", is_flag=True, help="End all sessions of a user.")
@click.option(
    "--for", "principal", default="", metavar="NAME", shell_complete=complete_user, help="User of --all (default: you)."
)
def end_session(identifier: str | None, is_all: bool, principal: str) -> None:
    """End a session, or all sessions of a user."""
    if is_all == bool(identifier) or (principal and not is_all):
        raise click.UsageError("give the identifier of a session, or --all with an optional --for")
    with server() as connection:
        if is_all:
            query = {"principal": principal} if principal else None
            ended = connection.ask("DELETE", "/sessions", answer=SessionsEnded, query=query)
            say(f"ended sessions: {ended.count}")
            return
        connection.ask("DELETE", f"/sessions/{identifier}", answer=type(None))
    say(f"session {identifier} has ended")


def _read_token(path: Path | None) -> str:
    if path is not None:
        text = path.read_text(encoding="ascii", errors="replace")[:_TOKEN_BYTES_MAX]
    elif sys.stdin.isatty():
        text = click.prompt("Token", hide_input=True)
    else:
        text = sys.stdin.readline(_TOKEN_BYTES_MAX)
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidValue(
            "the entered text is not a valid token",
            hint="create a token with `sgpu token create`, or ask the server's operator for a token",
        )
    return token
