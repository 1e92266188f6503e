"""Directives for pages that follow from the code or from files outside of `docs`.

{commands} SECTION       the commands of a section of `sgpu --help`: usage, arguments, options
{error-catalogue}        each public exception: its code, its base, its documentation
{http-api}               `docs/openapi.json`: each route with its parameters and messages, and each message's fields
{repository-page} FILE   a page that stands at the top of the repository, without its title
{diagram} FILE           an SVG picture of `docs/images`, in the colours of the page
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from serverless_gpu import errors
from serverless_gpu.cli import program
from serverless_gpu.cli.command_group import leaf_commands

DOCS = Path(__file__).parents[1]
_TOP_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "../index.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_ANCHOR = re.compile(r'^<a id="([^"]+)"></a>[ \t]*\n*(?=#|\S)', re.MULTILINE)


class Generated(SphinxDirective):
    """A directive whose content is MyST Markdown that `lines` makes."""

    has_content = False

    def lines(self) -> Iterator[str]:
        """Yield the lines of the content."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        """Return the parsed content."""
        content = StringList(list(self.lines()), source=self.get_location())
        parsed = nodes.section()
        parsed.document = self.state.document
        self.state.nested_parse(content, self.content_offset, parsed, match_titles=True)
        return parsed.children


class Commands(Generated):
    """The commands of one section of `sgpu --help`; short names of `sgpu run` stand only there."""

    required_arguments = 1
    final_argument_whitespace = True

    def lines(self) -> Iterator[str]:
        """Yield a section for each command that is no group."""
        root = click.Context(program.sgpu, info_name="sgpu")
        for name in program.SECTIONS[self.arguments[0]]:
            command = program.sgpu.get_command(root, name)
            if command is not None and name not in program.SHORT_NAMES:
                for leaf, context in leaf_commands(command, click.Context(command, info_name=name, parent=root)):
                    yield from _command_lines(leaf, context)


def _command_lines(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f"### {context.command_path}"
    yield ""
    yield from inspect.cleandoc(command.help or "").replace("\b\n", "").splitlines()
    yield from ("", "```text", " ".join([context.command_path, *command.collect_usage_pieces(context)]), "```", "")
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            yield f"- `{record[0]}`: {record[1]}"
    yield ""


class RepositoryPage(Generated):
    """A page of the repository's top folder; links to files that the site lacks become plain text."""

    required_arguments = 1

    def lines(self) -> Iterator[str]:
        """Yield the page below its title."""
        path = DOCS.parent / self.arguments[0]
        self.env.note_dependency(str(path))
        text = path.read_text(encoding="utf-8").partition("\n")[2]
        yield from _ANCHOR.sub(r"(\1)=\n", _LINK.sub(_link_text, text)).splitlines()


def _link_text(match: re.Match[str]) -> str:
    text, target = match.groups()
    if target.startswith(("http://", "https://", "#")):
        return match[0]
    name, _, anchor = target.partition("#")
    page = _TOP_PAGES.get(name) or (f"../{name[5:]}" if name.startswith("docs/") and name.endswith(".md") else "")
    return f"[{text}]({page}{'#' if anchor else ''}{anchor})" if page else text


class ErrorCatalogue(Generated):
    """Every public exception of `serverless_gpu.errors`."""

    def lines(self) -> Iterator[str]:
        """Yield a section for each exception, in the order of the module."""
        for name, error in vars(errors).items():
            if inspect.isclass(error) and issubclass(error, errors.ServerlessGpuError):
                yield from (f"## {name}", "", f"Code: `{error.code}`. Base: `{error.__bases__[0].__name__}`.", "")
                yield from (*inspect.cleandoc(error.__doc__ or "").splitlines(), "")


class HttpApi(Generated):
    """Every route of the API, and every message."""

    def lines(self) -> Iterator[str]:
        """Yield the routes by path, then the messages by name."""
        document = json.loads((DOCS / "openapi.json").read_text(encoding="utf-8"))
        yield "## Routes"
        yield ""
        for path, methods in document["paths"].items():
            for method, route in methods.items():
                yield from _route_lines(method.upper(), path, route)
        yield "## Messages"
        yield ""
        for name, schema in sorted(document["components"]["schemas"].items()):
            yield from _message_lines(name, schema)


def _route_lines(method: str, path: str, route: dict[str, Any]) -> Iterator[str]:
    yield f"### {method} `{path}`"
    yield ""
    yield from (route.get("summary") or route.get("description") or "").splitlines()
    yield ""
    for parameter in route.get("parameters", ()):
        text = f": {parameter['description']}" if parameter.get("description") else ""
        yield f"- `{parameter['name']}` ({parameter['in']}, {_type_text(parameter.get('schema', {}))}){text}"
    if body := _content(route.get("requestBody", {})):
        yield f"- Body: {body}"
    for status, answer in route.get("responses", {}).items():
        content = _content(answer)
        yield f"- {status}: {content or answer.get('description') or 'no body'}"
    yield ""


def _message_lines(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f"### {name}"
    yield ""
    yield from (schema.get("description") or "").splitlines()
    yield ""
    if "enum" in schema:
        yield "One of: " + ", ".join(f"`{value}`" for value in schema["enum"])
        yield ""
    required = set(schema.get("required", ()))
    for field, shape in schema.get("properties", {}).items():
        presence = "required" if field in required else "optional"
        text = f": {shape['description']}" if shape.get("description") else ""
        yield f"- `{field}` ({_type_text(shape)}, {presence}){text}"
    yield ""


def _content(part: dict[str, Any]) -> str:
    found = [f"{_type_text(each.get('schema', {}))} as `{media}`" for media, each in part.get("content", {}).items()]
    return ", or ".join(found)


def _type_text(schema: dict[str, Any] | bool) -> str:
    if isinstance(schema, bool):  # true: a value of any type
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type_text(each) for each in options)
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type_text(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"map to {_type_text(schema['additionalProperties'])}"
    return "nothing" if kind == "null" else str(kind)


class Diagram(SphinxDirective):
    """An SVG picture in the colours of the page; its title is its text for readers without pictures."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the picture as HTML; other builders get nothing."""
        path = DOCS / "images" / self.arguments[0]
        if not path.is_file():
            raise self.error(f"no picture {path.name} in docs/images")
        self.env.note_dependency(str(path))
        svg = path.read_text(encoding="utf-8")
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


def read_anchors(app: Sphinx, name: str, content: list[str]) -> None:
    """Turn `<a id="x"></a>`, which every Markdown reader understands, into a target that Sphinx checks."""
    content[0] = _ANCHOR.sub(r"(\1)=\n", content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.connect("source-read", read_anchors)
    app.add_directive("commands", Commands)
    app.add_directive("repository-page", RepositoryPage)
    app.add_directive("error-catalogue", ErrorCatalogue)
    app.add_directive("http-api", HttpApi)
    app.add_directive("diagram", Diagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
