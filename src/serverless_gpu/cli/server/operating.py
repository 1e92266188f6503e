"""`sgpu server`: what whoever runs a server does beside starting it; on its machine, in its home."""

from __future__ import annotations

import getpass
import os
import sys

import click

from serverless_gpu.cli.choosing import this_home
from serverless_gpu.cli.columns import columns
from serverless_gpu.cli.output import print_json
from serverless_gpu.cli.server.up import refuse_incomplete
from serverless_gpu.client.terminal import safe
from serverless_gpu.loading import load


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


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return "-" if value in (None, "") else str(value)
