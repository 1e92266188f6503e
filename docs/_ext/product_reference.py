"""Directives for pages that follow from the code: the catalogue of errors, and the routes of the HTTP API.

    {error-catalogue}   each public exception: its code, its base, its documentation
    {http-api}          `docs/openapi.json`: each route with its parameters and messages, and each message's fields
    {diagram} FILE      an SVG picture of `docs/images`, in the colours of the page
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from serverless_gpu import errors

DOCS = Path(__file__).parents[1]
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


class ErrorCatalogue(Generated):
    """Every public exception of `serverless_gpu.errors`."""

    def lines(self) -> Iterator[str]:
        """Yield a section for each exception, in the order of the module."""
        for name, error in vars(errors).items():
            if not (inspect.isclass(error) and issubclass(error, BaseException) and error.__module__ == errors.__name__):
                continue
            if name.startswith("_"):
                continue
            code = getattr(error, "code", "")
            yield f"## {name}"
            yield ""
            parts = [f"Code: `{code}`."] if code else []
            parts.append(f"Base: `{error.__bases__[0].__name__}`.")
            yield " ".join(parts)
            yield ""
            yield from inspect.cleandoc(error.__doc__ or "").splitlines()
            yield ""


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
    found = [
        f"{_type_text(each.get('schema', {}))} as `{media}`" for media, each in part.get("content", {}).items()
    ]
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
        self.env.note_dependency(str(path))
        svg = path.read_text(encoding="utf-8")
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


def read_anchors(app: Sphinx, name: str, content: list[str]) -> None:
    """Turn `<a id="x"></a>`, which every Markdown reader understands, into a target that Sphinx checks."""
    content[0] = _ANCHOR.sub(r"(\1)=\n", content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.connect("source-read", read_anchors)
    app.add_directive("error-catalogue", ErrorCatalogue)
    app.add_directive("http-api", HttpApi)
    app.add_directive("diagram", Diagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
