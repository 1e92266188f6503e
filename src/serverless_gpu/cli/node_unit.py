"""`sgpu node unit`: prints the systemd units of a node and of its spawner."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from serverless_gpu.cli.join import join
from serverless_gpu.cli.service_account import account_option, print_warnings, service_home
from serverless_gpu.server.operations.systemd_units import Installation, node_unit, spawner_unit

_SGPU = (sys.executable, "-m", "serverless_gpu.cli")


@click.command(context_settings={"ignore_unknown_options": True})
@account_option
@click.option("--as-root", is_flag=True, help="Run the node as root, which makes sandboxes without a spawner.")
@click.option("--spawner", is_flag=True, help="Print the unit of the node's spawner.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF sgpu join]...")
def unit(account: str, as_root: bool, spawner: bool, arguments: Sequence[str]) -> None:
    """Print a systemd unit for a node.

    The unit runs `sgpu join` with the given arguments, for example --token-file /etc/serverless-gpu/join.json. The node
    runs as the account of --account, without capabilities. Sandboxes then need the spawner, which runs as root in a
    unit of its own (--spawner). Runs continue while systemd restarts the units. The home is SERVERLESS_GPU_HOME, or
    /var/lib/serverless-gpu/node for another account.
    """
    if spawner:
        if as_root or arguments:
            raise click.UsageError("--spawner prints a unit that takes neither --as-root nor arguments of sgpu join")
        click.echo(spawner_unit((*_SGPU, "node", "spawner", "--account", account)), nl=False)
        print_warnings(account, root_runs_it=True)
        return
    print_node_unit(join.make_context("sgpu join", list(arguments)).params, account, as_root=as_root)


def print_node_unit(options: Mapping[str, object], account: str, *, as_root: bool = False) -> None:
    """Print the unit of a node. `options` are parsed options of `sgpu join`."""
    words: list[str] = []
    for option in join.params:
        value = options[option.name or ""]
        if value in (None, "") or option.name == "unit":
            continue
        text = str(value.absolute() if isinstance(value, Path) else value)
        words += [text] if isinstance(option, click.Argument) else [option.opts[0], text]
    owner = "root" if as_root else account
    there = Installation(command=(*_SGPU, "join", *words), account=owner, home=service_home(owner, "node"))
    click.echo(node_unit(there, as_root=as_root), nl=False)
    print_warnings(owner, root_runs_it=as_root)
