"""`sgpu server`: what whoever runs a server does beside starting it; on its machine, in its home."""

from __future__ import annotations

import getpass
import os
import sys
import time

import click

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.choosing import this_home
from serverless_gpu.cli.columns import columns
from serverless_gpu.cli.output import print_json
from serverless_gpu.cli.server.reaching import server
from serverless_gpu.cli.server.up import refuse_incomplete
from serverless_gpu.client.terminal import safe
from serverless_gpu.errors import ServerProblem
from serverless_gpu.loading import load
from serverless_gpu.units import parse_duration_s
from serverless_gpu.wire.state import DrainRequest, DrainView

_LOOK_S = 0.5


@click.group("server")
def server_group() -> None:
    """Look after a server: its settings, its unit, its backups."""


@server_group.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def config(as_json: bool) -> None:
    """Print every setting as `sgpu up` would take it now, and where it was said.

    An option wins over a variable (SGPU_PORT), that over server.toml in the home. Passwords in addresses are not shown.
    """
    refuse_incomplete()
    home = this_home()
    settings = load("serverless_gpu.server.settings")
    settings.read_settings(home.root, environ=os.environ)
    said = settings.effective(home.root, environ=os.environ)
    if as_json:
        print_json(said)
        return
    rows = [[each.name, _shown(each.value), each.origin] for each in said]
    for line in columns([["SETTING", "VALUE", "SAID BY"], *rows]):
        click.echo(safe(line, tty=sys.stdout.isatty()))


@server_group.command()
def unit() -> None:
    """Print a unit with which systemd runs this home's server: restarting it leaves runs alone."""
    refuse_incomplete()
    home = this_home()
    systemd = load("serverless_gpu.server.systemd")
    settings = load("serverless_gpu.server.settings").read_settings(home.root, environ=os.environ)
    there = systemd.Installation(
        command=(sys.executable, "-m", "serverless_gpu.cli", "up"),
        user=getpass.getuser(),
        home=home.root,
        node=settings.node,
        tls=bool(settings.tls_cert),
        stopping_s=settings.stopping_s,
    )
    click.echo(systemd.unit(there), nl=False)


@server_group.command()
@click.option("--note", default="", metavar="TEXT", help="Why, for those who wait.")
@click.option("--wait", "wait", metavar="DURATION", help="Wait until nothing runs any more, this long at most.")
def drain(note: str, wait: str | None) -> None:
    """Start nothing new, until `sgpu server resume`, also after a restart.

    What runs goes on, new runs are taken and wait, and whoever waits is told who drains and why.
    """
    limit_s = parse_duration_s(wait) if wait is not None else 0.0
    with server(patience_s=limit_s) as connection:
        view = connection.ask("PUT", "/drain", DrainRequest(on=True, note=note), answer=DrainView)
        click.echo(f"nothing new is started; {_counted(view)}")
        clock, said = SystemClock(), view.going
        deadline_ns = clock.boottime_ns() + round(limit_s * 1e9)
        while view.going and clock.boottime_ns() < deadline_ns:
            time.sleep(_LOOK_S)
            view = connection.ask("GET", "/drain", answer=DrainView)
            if view.going != said:
                said = view.going
                click.echo(_counted(view))
    if wait is not None and view.going:
        raise ServerProblem(f"{view.going} runs still go on after {wait}", hint="`sgpu runs` lists them")


@server_group.command()
def resume() -> None:
    """Start again what waits: the end of `sgpu server drain`."""
    with server() as connection:
        view = connection.ask("PUT", "/drain", DrainRequest(on=False), answer=DrainView)
    click.echo(f"what waits is started again; {_counted(view)}")


def _counted(view: DrainView) -> str:
    return f"{view.going} runs go on, {view.waiting} wait"


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value in (None, "") else str(value)
