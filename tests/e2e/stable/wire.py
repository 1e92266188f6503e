"""Sections of the surface: versions, the server's routes, messages of a node, stored documents."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.e2e.stable import places, shapes

Sections = dict[str, dict[str, str]]
_SHORT = {"application/json": "json", "text/event-stream": "event"}


def sections() -> Sections:
    """Return what processes and files of two versions have to agree on."""
    found: Sections = {"versions": {name: repr(number) for name, number in places.VERSIONS.items()}}
    found.update(_routes())
    messages, components = msgspec.json.schema_components([places.NODE_MESSAGES], ref_template="#/{name}")
    found.update(_tagged("node message", messages[0], components))
    for name, kind in places.STORED.items():
        found[f"stored {name}"] = _named(shapes.of_type(kind))
    return found


def _routes() -> Sections:
    document: dict[str, Any] = places.openapi()
    components = document["components"]["schemas"]
    found: Sections = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines = {"needs": str(operation["x-needs"])}
            for parameter in operation.get("parameters", ()):
                need = ", required" if parameter["required"] else ""
                for at, line in shapes.fields(parameter["schema"], components).items():
                    lines[f"{parameter['in']} {parameter['name']}{at}"] = line + need
            for kind, content in operation.get("requestBody", {}).get("content", {}).items():
                for at, line in shapes.fields(content["schema"], components).items():
                    lines[f"request {_SHORT.get(kind, kind)}{at}"] = line
            for status, answer in operation["responses"].items():
                if status == "default":
                    continue  # a problem: the same for every route
                lines[f"answer {status}"] = ", ".join(answer.get("content", {})) or "nothing"
                for kind, content in answer.get("content", {}).items():
                    for at, line in shapes.fields(content["schema"], components).items():
                        lines[f"answer {status} {_SHORT.get(kind, kind)}{at}"] = line
            found[f"route {method.upper()} {path}"] = lines
    found["problem of every route"] = _named(shapes.fields(components["Problem"], components))
    return found


def _tagged(label: str, union: dict[str, Any], components: dict[str, Any]) -> Sections:
    found: Sections = {}
    for variant in union["anyOf"]:
        struct = components[variant["$ref"].rpartition("/")[2]]
        (tag,) = struct["properties"]["type"]["enum"]
        found[f"{label} {tag}"] = _named(shapes.fields(struct, components))
    return found


def _named(lines: dict[str, str]) -> dict[str, str]:
    return {name or "itself": line for name, line in lines.items()}
