"""Formats a call's arguments as short texts, for users who view the run.

The module formats only values whose text is cheap to compute, short and free of secrets. This module never calls the
`repr` of a user's class, because such a `repr` may take seconds or raise. The module omits names and values that look
like secrets, because the server shows the texts to other users.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import cast

ARGUMENTS_MAX = 100
CHARACTERS_MAX = 500
COMMAND_CHARACTERS_MAX = 2_000
_DEPTH_MAX = 3
_ENTRIES_MAX = 1_000
_ITEMS_MAX = 16
_BITS_MAX = 512

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset(
    {"auth", "authorization", "bearer", "cookie", "cookies", "cred", "creds", "dsn", "key", "keys", "pw", "pwd"}
    | {"secrets", "signature", "tokens", "webhook"}
)
_SECRET_ENDINGS = (
    *("accesskey", "apikey", "apikeys", "credential", "credentials", "passphrase", "passwd", "password", "passwords"),
    *("privatekey", "secret", "secretkey", "token"),
)
_COUNTED = frozenset({"count", "max", "min", "n", "new", "num", "number", "per", "total"})
_COUNTABLE = frozenset({"key", "keys", "token", "tokens"})
_SECRET_VALUE = re.compile(
    r"-----BEGIN"
    r"|://[^/\s]*@"
    r"|[?&;][\w.-]*(?:sig|signature|token|key|secret|password|credential)[\w.-]*="
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{12}"
    r"|\bAIza[\w-]{20}"
    r"|\beyJ[\w-]{10,}\.[\w-]{5,}"
    r"|\b(?:hf|sgpu|gh[opsur]|github_pat|npm|pypi|r8|rk_live|sk_live|sk_test)_[A-Za-z0-9_-]{10}"
    r"|\b(?:sk|xox[abeprs]|glpat|pypi|dapi|dp\.pt)-?[A-Za-z0-9_-]{20}",
    re.IGNORECASE,
)
_ARRAYS = frozenset({"jax", "jaxlib", "numpy", "pandas", "polars", "torch"})
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})
_HIDDEN = "…"
_LEFT_OUT = frozenset({"rank", "world_size"})


def argument_texts(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return a call's arguments as texts, with one text per entry of a dictionary or dataclass.

    The result omits the arguments `rank` and `world_size`. Returns at most `ARGUMENTS_MAX` texts of at most
    `CHARACTERS_MAX` characters, in UTF-8.
    """
    texts: dict[str, str] = {}
    for name, text in _entry_texts({name: value for name, value in arguments.items() if name not in _LEFT_OUT}, "", 0):
        if len(texts) >= ARGUMENTS_MAX:
            break
        texts[_clean(name)] = _clean(text)
    return texts


def command_text(argv: Sequence[str]) -> str:
    """Return a program and its arguments as a shell command line, with ``…`` in place of likely secrets."""
    words: list[str] = []
    hides_next = False
    for word in argv[:_ENTRIES_MAX]:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if is_secret_value(word) or (hides_next and not is_option):
            words.append(_HIDDEN)
        elif equals and is_secret_name(name):
            words.append(f"{shlex.quote(name)}={_HIDDEN}")
        else:
            words.append(shlex.quote(word))
        hides_next = is_option and not equals and is_secret_name(word)
    return _clean(" ".join(words), COMMAND_CHARACTERS_MAX)


def is_secret_name(name: str) -> bool:
    """Return True if a name suggests a secret, such as ``api_key`` or ``hfToken``, but not ``max_tokens``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    counted = not _COUNTED.isdisjoint(words)
    return any(
        (word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS)) and not (counted and word in _COUNTABLE)
        for word in words
    )


def is_secret_value(text: str) -> bool:
    """Return True if a text looks like a secret: a known kind of token, or a URL with credentials."""
    return _SECRET_VALUE.search(text) is not None


def _entry_texts(values: Mapping[object, object], above: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in itertools.islice(values.items(), _ENTRIES_MAX):
        if not isinstance(key, str | int) or isinstance(key, Enum):
            continue
        name = f"{key}"
        if is_secret_name(name):
            continue
        inner = _entries(value)
        if inner is not None and depth < _DEPTH_MAX:
            yield from _entry_texts(inner, f"{above}{name}.", depth + 1)
        elif inner is None and (text := _text(value)) is not None and not is_secret_value(text):
            yield f"{above}{name}", text


def _entries(value: object) -> Mapping[object, object] | None:
    """Return the entries or fields of a value by name, or None for a value without named entries."""
    kind = type(value)
    if isinstance(value, dict):
        return value if kind is dict else dict(dict.items(value))
    if dataclasses.is_dataclass(kind):
        # Read `__dict__` instead of attributes, because a field may be a property that runs user code.
        held: Mapping[str, object] = getattr(value, "__dict__", {})
        return {field.name: held[field.name] for field in dataclasses.fields(kind) if field.name in held}
    return (
        cast("dict[object, object]", vars(value)) if f"{kind.__module__}.{kind.__qualname__}" in _NAMESPACES else None
    )


def _text(value: object) -> str | None:
    """Return one value as text, or None if the value contains a likely secret."""
    plain = _plain(value)
    if plain is not None:
        return plain
    if isinstance(value, list | tuple | set | frozenset):
        return _items(value)
    kind = type(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if kind.__module__.partition(".")[0] in _ARRAYS:
        package, shape = kind.__module__.partition(".")[0], getattr(value, "shape", None)
        if package == "numpy" and shape == ():
            return _plain(value.item())  # type: ignore[attr-defined]  # NumPy scalars have the method `item`.
        name = f"{package}.{kind.__qualname__}"
        if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
            return f"{name} ({', '.join(f'{size}' for size in shape)})"
        return name
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: object) -> str | None:
    """Return a scalar as text without calling methods of a subclass, or None for other values."""
    text: str | None = None
    if value is None or isinstance(value, bool):
        text = str(value)
    elif isinstance(value, Enum):
        text = f"{type(value).__name__}.{value._name_}"
    elif isinstance(value, str):
        text = str.__str__(value)
    elif isinstance(value, int):
        bits = int.bit_length(value)
        text = int.__repr__(value) if bits <= _BITS_MAX else f"a number of {bits} bits"
    elif isinstance(value, float):
        text = float.__repr__(value)
    elif isinstance(value, complex):
        text = complex.__repr__(value)
    elif isinstance(value, bytes | bytearray):
        text = f"{len(value)} bytes"
    elif type(value).__module__.partition(".")[0] == "pathlib":
        text = str(value)
    return text


def _items(values: Sequence[object] | set[object] | frozenset[object]) -> str | None:
    texts: list[str] = []
    for number, value in enumerate(values):
        plain = _plain(value)
        if number >= _ITEMS_MAX or plain is None:
            return f"{type(values).__name__} of {len(values)}"
        if is_secret_value(plain):
            return None
        texts.append(plain)
    return f"[{', '.join(texts)}]"


def _clean(text: str, characters_max: int = CHARACTERS_MAX) -> str:
    """Return a text truncated at the limit and without lone surrogates, which UTF-8 cannot encode."""
    if len(text) > characters_max:
        text = f"{text[: characters_max - 1]}…"
    return text.encode("utf-8", "replace").decode()
