"""Whatever a command shows or does has a page, or a reason why no page does."""

from __future__ import annotations

import click

from serverless_gpu.cli import program
from serverless_gpu.cli.command_group import leaf_commands
from serverless_gpu.server.web import pages
from serverless_gpu.server.web.command_pages import COMMAND_PAGES


def test_every_command_has_a_page_or_a_reason() -> None:
    named = {one.command for one in COMMAND_PAGES}
    root = click.Context(program.sgpu, info_name="sgpu")
    commands = {context.command_path.removeprefix("sgpu ") for _, context in leaf_commands(program.sgpu, root)}
    assert named == commands
    assert len(named) == len(COMMAND_PAGES)
    paths = {route.path for routes in pages.ROUTES for route in routes.all if route.method == "GET"}
    for one in COMMAND_PAGES:
        assert bool(one.path) != bool(one.reason), one.command
        assert not one.path or one.path.partition("?")[0] in paths, one.command
