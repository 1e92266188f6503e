"""Thread-safe decoding of JSON and MessagePack to typed values.

msgspec inspects a struct type on first use. If a second thread decodes the type during the inspection, msgspec 0.22.0
reads missing fields and crashes with SIGSEGV. A restore crashed because four threads decoded their first environment
unit at the same time. Therefore `json_codec` prepares each type under a lock before the first decoding. Decoders that a
module creates at import are also safe, unless several threads import modules.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_making_ready = threading.Lock()
_ready: dict[Any, msgspec.json.Decoder[Any]] = {}


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Decode JSON to a value of a type. Raises msgspec.DecodeError, or ValidationError for another type."""
    return decoder(kind).decode(data)


def from_msgpack(data: bytes, kind: type[T]) -> T:
    """Decode MessagePack to a value of a type. Raises the same errors as `from_json`."""
    decoder(kind)
    return msgspec.msgpack.decode(data, type=kind)


def from_builtins(value: object, kind: type[T], *, strict: bool = True, from_attributes: bool = False) -> T:
    """Convert built-in values to a value of a type. Accepts the options of `msgspec.convert`."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, from_attributes=from_attributes)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Return a thread-safe JSON decoder for a type."""
    found = _ready.get(kind)
    if found is None:
        with _making_ready:
            found = _ready.get(kind) or msgspec.json.Decoder(kind)
            _ready[kind] = found
    return found
