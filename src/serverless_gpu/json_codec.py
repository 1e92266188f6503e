"""From bytes to values of a type, in any thread.

What msgspec needs to know of a struct it finds out when the struct is used first, and meanwhile another thread that
decodes the same one reads fields that are not there yet: the process ends by SIGSEGV (seen with msgspec 0.22.0, in a
restore whose four threads read their first unit at once). So a type is made ready here by one thread at a time, before
anything is decoded as it. A decoder that a module makes while it is imported is as good, unless modules are imported by
several threads.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making_ready = threading.Lock()
_ready: dict[Any, msgspec.json.Decoder[Any]] = {}


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Return JSON as a value of a type; raise msgspec.DecodeError, or its ValidationError for another value."""
    return decoder(kind).decode(data)


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """Return MessagePack as a value of a type; raises as `from_json`."""
    decoder(kind)
    return msgspec.msgpack.decode(data, type=kind)


def from_builtins(value: object, kind: type[T], *, strict: bool = True, from_attributes: bool = False) -> T:
    """Return dictionaries, lists and numbers as a value of a type; arguments and exceptions of `msgspec.convert`."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, from_attributes=from_attributes)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return what decodes JSON as a type, which any thread may use."""
    found = _ready.get(kind)
    if found is None:
        with _making_ready:
            found = _ready.get(kind) or msgspec.json.Decoder(kind)
            _ready[kind] = found
    return found
