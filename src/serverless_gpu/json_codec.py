"""Decodes bytes to values of a type, safely in any thread.

msgspec inspects a struct type on first use. A thread that decodes the same type during the inspection reads fields that
do not exist yet. The process then ends with SIGSEGV. The crash happened with msgspec 0.22.0, in a restore whose four
threads decoded their first environment unit at the same time. Therefore `json_codec` prepares each type in one thread
at a time before the first decoding. A decoder that a module creates during its import is also safe, unless several
threads import modules.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making_ready = threading.Lock()
_ready: dict[Any, msgspec.json.Decoder[Any]] = {}


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decode JSON as a type. Raise msgspec.DecodeError, or ValidationError for a value of another type."""
    return decoder(kind).decode(data)


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """Decode MessagePack as a type. Raises the same errors as `from_json`."""
    decoder(kind)
    return msgspec.msgpack.decode(data, type=kind)


def from_builtins(value: object, kind: type[T], *, strict: bool = True, from_attributes: bool = False) -> T:
    """Convert dictionaries, lists and numbers to a type. Accepts the arguments of `msgspec.convert`."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, from_attributes=from_attributes)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return a JSON decoder of a type for use in any thread."""
    found = _ready.get(kind)
    if found is None:
        with _making_ready:
            found = _ready.get(kind) or msgspec.json.Decoder(kind)
            _ready[kind] = found
    return found
