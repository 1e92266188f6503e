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
    """Print one line; on a terminal, escape names and foreign text that could move the cursor."""
    click.echo(safe(line, tty=(sys.stderr if err else sys.stdout).isatty()), err=err)


def say_lines(text: str, *, err: bool = False) -> None:
    """Print text of several lines, each as `say` does."""
    for line in text.split("\n"):
        say(line, err=err)
