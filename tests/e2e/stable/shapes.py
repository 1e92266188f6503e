"""JSON schemas as flat lists of fields, without the names of classes: ``spec.retries`` is ``integer, default 0``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems")
_LIMITS = (*_NUMBERS, *_LENGTHS, "pattern", "format", "contentEncoding", "contentMediaType")


def of_type(kind: Any) -> dict[str, str]:
    """Return the fields of what msgspec reads and writes as a type."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/{name}")
    return fields(schema, components)


def fields(schema: Mapping[str, Any], components: Mapping[str, Any]) -> dict[str, str]:
    """Return a line for each field of a schema, by its path; the schema itself is ``""``.

    Args:
        schema: JSON schema, references included.
        components: what references name, by the last part of the reference.
    """
    found: dict[str, str] = {}
    _walk(schema, components, "", "", (), found)
    return found


def _walk(  # one recursion
    schema: Mapping[str, Any],
    components: Mapping[str, Any],
    path: str,
    remark: str,
    above: tuple[str, ...],
    found: dict[str, str],
) -> None:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        remark += _default(schema)
        if name in above:
            found[path] = f"as above{remark}"
        else:
            _walk(components[name], components, path, remark, (*above, name), found)
        return
    remark += _default(schema)
    if "anyOf" in schema:
        _walk_union(schema, components, path, remark, above, found)
        return
    found[path] = _kind(schema) + remark
    needed = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        _walk(inner, components, f"{path}.{name}", ", required" if name in needed else "", above, found)
    if isinstance(schema.get("additionalProperties"), Mapping) and schema["additionalProperties"]:
        _walk(schema["additionalProperties"], components, f"{path}.*", "", above, found)
    if isinstance(schema.get("items"), Mapping):
        _walk(schema["items"], components, f"{path}[]", "", above, found)
    for number, inner in enumerate(schema.get("prefixItems", ())):
        late = number >= schema.get("minItems", 0)
        _walk(inner, components, f"{path}[{number}]", "" if late else ", required", above, found)
    if "contentSchema" in schema:
        _walk(schema["contentSchema"], components, f"{path}.data", "", above, found)


def _walk_union(  # part of `_walk`
    schema: Mapping[str, Any],
    components: Mapping[str, Any],
    path: str,
    remark: str,
    above: tuple[str, ...],
    found: dict[str, str],
) -> None:
    variants = [_resolved(variant, components) for variant in schema["anyOf"]]
    tags = schema.get("discriminator", {}).get("propertyName", "")
    kinds = sorted({_kind(variant) for variant, _ in variants})
    found[path] = " or ".join(kinds) + (f" by {tags}" if tags else "") + remark
    for variant, name in variants:
        if name in above or not {"properties", "items", "prefixItems", "additionalProperties"} & set(variant):
            continue
        label = f"<{variant['properties'][tags]['enum'][0]}>" if tags else ""
        inner: dict[str, str] = {}
        _walk(variant, components, path + label, "", (*above, name), inner)
        if not tags:
            inner.pop(path)
        found.update(inner)


def _default(schema: Mapping[str, Any]) -> str:
    """Return a remark; of an object's default its fields tell, and one more of them is no other default."""
    if "default" not in schema:
        return ""
    default = schema["default"]
    return ", default object" if isinstance(default, dict) and default else f", default {json.dumps(default)}"


def _resolved(schema: Mapping[str, Any], components: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if "$ref" not in schema:
        return schema, ""
    name = schema["$ref"].rpartition("/")[2]
    return components[name], name


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + " ".join(sorted(json.dumps(value) for value in schema["enum"]))
    kind = str(schema.get("type", "anything"))
    limits = [f"{name} {schema[name]}" for name in _LIMITS if name in schema]
    if schema.get("additionalProperties") is False:
        limits.append("nothing else")
    return f"{kind} ({', '.join(limits)})" if limits else kind
