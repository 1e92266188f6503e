"""Generates the OpenAPI document from the routes and their structs.

`make docs` writes the OpenAPI document to `docs/openapi.json`.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.routing import compile_path

from serverless_gpu.server.http.routing import EVENTS, JSON, PUBLIC, Bytes, Incoming, Route, Stream
from serverless_gpu.version import __version__
from serverless_gpu.wire.base import Problem

_REFERENCE = "#/components/schemas/{name}"
_BINARY = {"type": "string", "format": "binary"}
_UNIONS = (typing.Union, types.UnionType)
_SECURITY = {"bearer": {"type": "http", "scheme": "bearer", "description": "`sgpu_…`, or `sgpa_…` of an attempt"}}


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document for the given routes."""
    used: list[Any] = [Problem]
    for route in routes:
        used += [] if route.body in (None, bytes, Incoming) else [route.body]
        said = (typing.get_args(kind)[0] if typing.get_origin(kind) is Stream else kind for kind in _kinds(route))
        used += [kind for kind in said if not (inspect.isclass(kind) and issubclass(kind, (Response, type(None))))]
    unique = list(dict.fromkeys(used))
    schemas, components = msgspec.json.schema_components(unique, ref_template=_REFERENCE)
    by_type = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = compile_path(route.full_path)[1]
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "serverless-gpu", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
    }


def _operation(route: Route, by_type: dict[Any, Any]) -> dict[str, Any]:
    problem = {"description": "A problem.", "content": {JSON: {"schema": by_type[Problem]}}}
    schemas: dict[type, dict[str, Any]] = {str: {"type": "string"}, int: {"type": "integer", "minimum": 0}}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": schemas[kind]} for name, kind in route.parts.items()
    ]
    operation: dict[str, Any] = {
        "operationId": f"{route.tag}_{route.handler.__name__}",
        "tags": [route.tag],
        "summary": (inspect.getdoc(route.handler) or "").partition("\n")[0],
        "parameters": [*in_path, *_query(route)],
        "responses": {**_answers(route, by_type), "default": problem},
        "security": [] if route.needs == PUBLIC else [{"bearer": []}],
        "x-needs": msgspec.to_builtins(route.needs),
    }
    if route.body is not None:
        schema = by_type.get(route.body, _BINARY)
        operation["requestBody"] = {"required": True, "content": {route.content_type: {"schema": schema}}}
        operation["x-body-bytes-max"] = route.limit
    return operation


def _answers(route: Route, by_type: dict[Any, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for kind in _kinds(route):
        if kind is type(None):
            answers["204"] = {"description": "Done."}
        elif typing.get_origin(kind) is Stream:
            # The schema describes a server-sent event with JSON data, as in OpenAPI 3.2.
            data = {"type": "string", "contentMediaType": JSON, "contentSchema": by_type[typing.get_args(kind)[0]]}
            schema = {"type": "object", "required": ["data"], "properties": {"data": data}}
            answers.setdefault("200", {"description": "Done.", "content": {}})["content"][EVENTS] = {"schema": schema}
        elif inspect.isclass(kind) and issubclass(kind, Response):
            text_or_bytes = _BINARY if issubclass(kind, Bytes) else {"type": "string"}
            content = {kind.media_type: {"schema": text_or_bytes}} if kind.media_type else {}
            answers.setdefault("200", {"description": "Done.", "content": {}})["content"].update(content)
        else:
            entry = answers.setdefault("200", {"description": "Done.", "content": {}})
            entry["content"][JSON] = {"schema": by_type[kind]}
    return answers


def _query(route: Route) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = msgspec.json.schema(route.query)
    definition = next(iter(schema["$defs"].values()))
    return [
        {"name": name, "in": "query", "required": False, "schema": field}
        for name, field in definition["properties"].items()
    ]


def _kinds(route: Route) -> tuple[Any, ...]:
    union = typing.get_origin(route.answer)
    return typing.get_args(route.answer) if union in _UNIONS else (route.answer,)
