"""`sgpu help`, `version`, `schema` and `completion`: commands that describe `sgpu` and its commands."""

from __future__ import annotations

import click
import msgspec
from click.shell_completion import get_completion_class

from serverless_gpu.cli.output import JSON_TYPE, JsonType, print_json
from serverless_gpu.lazy_import import load
from serverless_gpu.version import __version__

_SHELLS = ("bash", "zsh", "fish")


def find_command(ctx: click.Context, path: tuple[str, ...]) -> tuple[click.Command, click.Context]:
    """Return the command at a path such as `("run", "logs")`, and the command's context.

    Raise UsageError for an unknown name.
    """
    context = ctx.find_root()
    command: click.Command = context.command
    for name in path:
        found = command.get_command(context, name) if isinstance(command, click.Group) else None
        if found is None:
            raise click.UsageError(f"no command {f'{context.command_path} {name}'!r}", ctx=context)
        command, context = found, click.Context(found, info_name=name, parent=context)
    return command, context


@click.command("help")
@click.argument("command", nargs=-1)
@click.pass_context
def help_command(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of a command.

    COMMAND is a command path, for example `run logs`. Without COMMAND, sgpu lists all commands.
    """
    found, context = find_command(ctx, command)
    click.echo(found.get_help(context))


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"serverless-gpu, version {__version__}")


@click.command()
@click.argument("command", nargs=-1, required=True)
@click.pass_context
def schema(ctx: click.Context, command: tuple[str, ...]) -> None:
    """Print the JSON schema of `--json` output.

    COMMAND is a command path, for example `run list`. The command prints a JSON Schema of draft 2020-12.
    """
    json_type = json_type_of(find_command(ctx, command)[0])
    if json_type is None:
        raise click.UsageError(f"`sgpu {' '.join(command)}` has no option --json")
    print_json(msgspec.json.schema(json_type))


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    r"""Print the completion script of a shell.

    The completion script completes commands, options, runs, pools and nodes. To load the script in each new shell:

    \b
      bash   sgpu completion bash >> ~/.bashrc
      zsh    sgpu completion zsh >> ~/.zshrc
      fish   sgpu completion fish > ~/.config/fish/completions/sgpu.fish
    """
    complete = get_completion_class(shell)
    assert complete is not None  # click supports bash, zsh and fish.
    click.echo(complete(load("serverless_gpu.cli.program").sgpu, {}, "sgpu", "_SGPU_COMPLETE").source())


def json_type_of(command: click.Command) -> object | None:
    """Return the type of a command's JSON output, or None if the command has no `--json`."""
    recorded = getattr(command.callback, JSON_TYPE, None)
    if not isinstance(recorded, JsonType):
        return recorded
    module, _, name = recorded.place.partition(":")
    found: object = getattr(load(f"serverless_gpu.{module}"), name)
    return list[found] if recorded.is_list else found  # type: ignore[valid-type] # dynamic type
