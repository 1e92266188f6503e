"""How commands print."""

from __future__ import annotations

import sys

import click
import msgspec

from serverless_gpu.client.display.terminal import safe


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def say(line: str, *, err: bool = False) -> None:
    """Print a line, in which names and words of others may stand: on a terminal it is one line, and moves nothing.

    Args:
        line: the line. An error's has its hint after a newline of its own: see `say_lines`.
        err: whether it goes to stderr.
    """
    click.echo(safe(line, tty=(sys.stderr if err else sys.stdout).isatty()), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print text of several lines, each as `say` does.

    Args:
        text: the text.
        err: whether it goes to stderr.
    """
    for line in text.split("\n"):
        say(line, err=err)
