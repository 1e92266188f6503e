"""Bodies for every route, made from what the route says it takes: each `bytes` in them is what the test says."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from msgspec import inspect


def sample(kind: Any, data: bytes, values: Mapping[str, Any] | None = None) -> Any:
    """Return a value of a type as JSON has it, with everything filled in that can be.

    Args:
        kind: of a body.
        data: what every field of bytes holds.
        values: of fields with these names, whatever their type.
    """
    return _filled(inspect.type_info(kind), base64.b64encode(data).decode(), values or {})


def _filled(kind: inspect.Type, data: str, values: Mapping[str, Any]) -> Any:
    match kind:
        case inspect.StructType() | inspect.DataclassType() | inspect.TypedDictType():
            tag = {kind.tag_field: kind.tag} if isinstance(kind, inspect.StructType) and kind.tag_field else {}
            named = {field.encode_name: (field.name, field.type) for field in kind.fields}
            filled = {
                encoded: values[name] if name in values else _filled(of, data, values)
                for encoded, (name, of) in named.items()
            }
            return {**tag, **filled}
        case inspect.BytesType():
            return data
        case inspect.RawType():
            return {"data": data}
        case inspect.UnionType():
            by_worth = sorted(kind.types, key=lambda one: isinstance(one, inspect.NoneType))
            has_bytes = [one for one in by_worth if isinstance(one, inspect.BytesType)]
            return _filled((has_bytes or by_worth)[0], data, values)
        case inspect.ListType() | inspect.SetType() | inspect.VarTupleType() | inspect.FrozenSetType():
            return [_filled(kind.item_type, data, values)]
        case inspect.TupleType():
            return [_filled(one, data, values) for one in kind.item_types]
        case inspect.DictType():
            return {"name": _filled(kind.value_type, data, values)}
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
    plain: dict[type[inspect.Type], Any] = {
        inspect.NoneType: None,
        inspect.BoolType: True,
        inspect.IntType: 1,
        inspect.FloatType: 1.0,
        inspect.StrType: "name",
        inspect.AnyType: data,
    }
    return plain[type(kind)]
