"""Lazy command groups, which import a command only to run the command or to show its help.

    COMMANDS (`program.py`)   name ─▶ CommandEntry: module, first sentence of the help
    sgpu --help               writes the table in sections, imports no command
    sgpu runs                 imports `cli/runs/run_table.py` alone
    sgpu nodes                a renamed command: prints a notice on stderr and runs `sgpu node list`

Importing all commands takes 30 times as long as starting Python. A test compares the summaries in the command table
with the commands' docstrings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from serverless_gpu.lazy_import import load

HELP_CHARACTERS_MAX = 45
"""Maximum length of a command's help summary, which must fit 80 columns beside the longest command name."""


class CommandEntry(NamedTuple):
    """A command's import path and help summary."""

    place: str  # Import path of the command below `serverless_gpu.cli`, as ``"module:attribute"``.
    summary: str  # First sentence of the command's help.


class LazyGroup(click.Group):
    """Group of commands that a table lists by name and import path.

    Args:
        table: The commands by name. Without a table, decorators add the commands.
        sections: Title of each section of the help, and the names in it. By default, one section has all names in
            alphabetical order.
        renamed: The old name of each renamed command and its new path below `sgpu`, for example ``{"nodes": "node
            list"}``.
    """

    def __init__(
        self,
        *,
        table: Mapping[str, CommandEntry] | None = None,
        sections: Mapping[str, Sequence[str]] | None = None,
        renamed: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.table = table or {}
        self.sections = sections or {}
        self.renamed = renamed or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted({*self.table, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or return None for an unknown command name."""
        if cmd_name in self.table and cmd_name not in self.commands:
            module, _, attribute = self.table[cmd_name].place.partition(":")
            self.add_command(getattr(load(f"serverless_gpu.cli.{module}"), attribute), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name. Print a notice if the command has been renamed."""
        new = self.renamed.get(args[0])
        if new is None:
            return super().resolve_command(ctx, args)
        if not ctx.resilient_parsing:
            root = ctx.find_root().info_name
            old = f"{ctx.command_path} {args[0]}"
            click.echo(
                f"sgpu: `{old}` is now called `{root} {new}`. The next release removes the former name", err=True
            )
        path = new.split()
        own = ctx.command_path.split()[1:]
        return super().resolve_command(ctx, [*path[len(own) :], *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list of `--help` without importing the commands of the table."""
        names = self.list_commands(ctx)
        width = max(map(len, names))
        limit = formatter.width - 6 - width
        own = {name: command.get_short_help_str(limit) for name, command in self.commands.items()}
        summaries = {**own, **{name: entry.summary for name, entry in self.table.items()}}
        for title, members in (self.sections or {"Commands": names}).items():
            with formatter.section(title):
                # Padding the command names aligns the summaries of all sections.
                formatter.write_dl([(name.ljust(width), summaries[name]) for name in members])


def leaf_commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    """Yield each command below a command group, with the command's context."""
    if not isinstance(command, click.Group):
        yield command, context
        return
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if found is not None:
            yield from leaf_commands(found, click.Context(found, info_name=name, parent=context))
