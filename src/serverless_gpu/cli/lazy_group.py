"""A click group that imports a command when it runs or shows its help.

`sgpu --version`, `sgpu --help` and each command load only what they need: importing all commands takes 30 times as long
as starting Python. The table repeats the first sentence of each command's help; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from serverless_gpu.lazy_import import load


class CommandEntry(NamedTuple):
    """One command of the table."""

    place: str  # ``"module:attribute"`` below `serverless_gpu.cli`
    summary: str  # the first sentence of its help


class LazyGroup(click.Group):
    """A group that imports its commands one by one from a table."""

    def __init__(self, *, table: Mapping[str, CommandEntry], **settings: Any) -> None:
        super().__init__(**settings)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*self.table, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported by now; None for a name that is not in the table."""
        if cmd_name in self.table and cmd_name not in self.commands:
            module, _, attribute = self.table[cmd_name].place.partition(":")
            self.add_command(getattr(load(f"serverless_gpu.cli.{module}"), attribute), cmd_name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands for `--help`, without importing them."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        summaries = {name: click.Command(name, help=entry.summary) for name, entry in self.table.items()}
        rows = [(name, {**summaries, **self.commands}[name].get_short_help_str(limit)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
