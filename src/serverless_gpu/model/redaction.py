"""Masks the values of a run's secrets in the run's output. Masking is best effort.

    bytes of a stream ─▶ RedactedStream ─▶ the same bytes, with "[secret HF_TOKEN]" in place of each value
                             │
                             └─ holds back an end that may be the beginning of a value, until the next bytes decide

A *form* is a value of a secret in one encoding (`forms`). A regular expression finds the first 8 bytes of each form,
its *head*. Where a head occurs, the redactor compares the following bytes with the forms. At each position, the
longest form counts. The result does not depend on how a rank's output is split into reads. The end of a read waits only
if it may be the beginning of a form.

Limits:

* A value with less than 8 bytes is not masked, because masking such values would make logs unreadable.
* Encodings cover the first 4 KiB of a value. The value itself is masked as a whole.
* A value that is compressed, encrypted, encoded twice, or split by other bytes is visible.
"""

from __future__ import annotations

import base64
import json
import re
import string
from collections.abc import Collection, Iterator, Mapping

BYTES_MIN = 8
"""Minimum length of a masked value, and the length of a head."""
ENCODED_BYTES_MAX = 4096
_BLANKS = b" \t\r\n"
_URL_SAFE = f"{string.ascii_letters}{string.digits}-._~".encode()
# The bytes of a URL by byte, in a query, in a path, and as encodeURIComponent of JavaScript writes them.
_URL_BYTES = tuple(
    tuple(bytes([byte]) if byte in _URL_SAFE + more else b"%%%02X" % byte for byte in range(256))
    for more in (b"", b"/", b"!'()*")
)
_ESCAPED = re.compile(rb"%[0-9A-F]{2}")
_SHELL_SPECIAL = re.compile(rb"([^A-Za-z0-9_@%+=:,./~-])")
_QUOTED_SPECIAL = re.compile(rb'(["\\$`])')


class Redactor:
    """Masks the secrets of one attempt.

    Attributes:
        counts: number of masked occurrences by the name of the secret.
        unmasked: names of the secrets that are too short.
    """

    def __init__(self, secrets: Mapping[str, bytes]) -> None:
        self.counts: dict[str, int] = {}
        cores = {name: secrets[name].strip(_BLANKS) for name in sorted(secrets)}
        self.unmasked = tuple(name for name, core in cores.items() if len(core) < BYTES_MIN)
        names: dict[bytes, str] = {}
        for name, core in cores.items():
            for form in forms(core) if len(core) >= BYTES_MIN else ():
                names.setdefault(form, name)
        self._forms: dict[bytes, list[tuple[bytes, str]]] = {}  # Forms with their secret by head, longest form first.
        for form in sorted(names, key=len, reverse=True):
            self._forms.setdefault(form[:BYTES_MIN], []).append((form, names[form]))
        self._heads = re.compile(_any_of(self._forms)) if self._forms else None
        self._beginnings = {head[:size] for head in self._forms for size in range(1, BYTES_MIN)}

    def stream(self, counts: dict[str, int] | None = None) -> RedactedStream:
        """Return the state of one stream of bytes. `counts` replaces the counts of the redactor."""
        return RedactedStream(self, self.counts if counts is None else counts)

    def text(self, text: str, counts: dict[str, int] | None = None) -> str:
        """Return a text with masked secrets. `counts` replaces the counts of the redactor."""
        try:
            data = text.encode("utf-8", "surrogateescape")  # Variables with other bytes contain such surrogates.
        except UnicodeEncodeError:
            data = text.encode("utf-8", "backslashreplace")
        stream = self.stream(counts)
        masked = stream.feed(data) + stream.end()
        return text if masked == data else masked.decode("utf-8", "surrogateescape")

    def value(self, value: object, counts: dict[str, int] | None = None) -> object:
        """Mask secrets in all texts of a JSON value. `counts` replaces the counts of the redactor."""
        if isinstance(value, str):
            return self.text(value, counts)
        if isinstance(value, list):
            return [self.value(each, counts) for each in value]
        if isinstance(value, dict):
            return {self.text(key, counts): self.value(each, counts) for key, each in value.items()}
        return value

    def filled(self, data: bytes) -> bytes:
        """Return data of the same length, with asterisks in place of secrets.

        Pickled text keeps its structure, because a pickle contains the length of each text.
        """
        parts: list[bytes] = []
        start = 0
        for at, form, name in self._found(data):
            self.counts[name] = self.counts.get(name, 0) + 1
            parts += [data[start:at], b"*" * len(form)]
            start = at + len(form)
        return b"".join(parts) + data[start:] if parts else data

    def split(self, data: bytes, counts: dict[str, int], *, ended: bool) -> tuple[bytes, bytes]:
        """Return the masked beginning of some data, and the end that later bytes decide about."""
        parts: list[bytes] = []
        start = 0
        for at, form, name in self._found(data, ended=ended):
            parts.append(data[start:at])
            start = at
            if not form:  # Later bytes decide about the form at this position.
                return b"".join(parts), data[at:]
            counts[name] = counts.get(name, 0) + 1
            parts.append(f"[secret {name}]".encode())
            start += len(form)
        end = len(data)
        if not ended:
            sizes = range(min(BYTES_MIN - 1, end - start), 0, -1)
            end -= next((size for size in sizes if data[-size:] in self._beginnings), 0)
        if not parts and end == len(data):
            return data, b""
        return b"".join(parts) + data[start:end], data[end:]

    def _found(self, data: bytes, *, ended: bool = True) -> Iterator[tuple[int, bytes, str]]:
        """Yield position, form and secret of each occurrence, and the form b"" if the data ends too early."""
        at = 0
        while self._heads is not None and (match := self._heads.search(data, at)) is not None:
            at = match.start()
            for form, name in self._forms[match.group()]:
                if data.startswith(form, at):
                    yield at, form, name
                    at += len(form)
                    break
                if not ended and len(data) - at < len(form) and form.startswith(data[at:]):
                    yield at, b"", name
                    return
            else:
                at += 1


class RedactedStream:
    """One stream of bytes, whose reads may split a secret."""

    def __init__(self, redactor: Redactor, counts: dict[str, int]) -> None:
        self._redactor = redactor
        self._counts = counts
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream. Return the bytes that are decided, with masked secrets."""
        masked, self._held = self._redactor.split(self._held + data, self._counts, ended=False)
        return masked

    def end(self) -> bytes:
        """Return the rest of the stream."""
        masked, self._held = self._redactor.split(self._held, self._counts, ended=True)
        return masked


def forms(core: bytes) -> Iterator[bytes]:
    """Yield the encodings of a secret's value, which has no blanks at its ends."""
    yield core
    core = core[:ENCODED_BYTES_MAX]
    yield from _base64(core)
    yield from (core.hex().encode(), core.hex().upper().encode())
    quoted = [b"".join(map(table.__getitem__, core)) for table in _URL_BYTES]
    quoted.append(quoted[0].replace(b"%20", b"+"))
    yield from quoted
    yield from (_ESCAPED.sub(lambda match: match.group().lower(), text) for text in quoted)
    text = core.decode("utf-8", "ignore")
    if text.encode() == core or len(core) == ENCODED_BYTES_MAX:
        yield from _escaped(text)
    yield repr(core)[2:-1].encode()
    yield from (core.replace(b"'", quote) for quote in (b"'\\''", b"'\"'\"'"))
    yield from (_SHELL_SPECIAL.sub(rb"\\\1", core), _QUOTED_SPECIAL.sub(rb"\\\1", core))


def _base64(core: bytes) -> Iterator[bytes]:
    """Yield the characters of a base64 text that depend on the value only, at each position of the value."""
    found = [base64.b64encode(core), base64.b64encode(core).rstrip(b"=")]
    for before in range(3):
        text = base64.b64encode(bytes(before) + core)
        found.append(text[-(-8 * before // 6) : 8 * (before + len(core)) // 6])
    for text in found:
        yield text
        yield text.translate(bytes.maketrans(b"+/", b"-_"))


def _escaped(text: str) -> Iterator[bytes]:
    """Yield a text as JSON and as Python write it in a literal."""
    yield json.dumps(text)[1:-1].encode()
    yield json.dumps(text, ensure_ascii=False)[1:-1].encode()
    yield repr(text)[1:-1].encode("utf-8", "surrogateescape")


def _any_of(heads: Collection[bytes]) -> bytes:
    """Return a pattern that matches each head.

    The alternatives form a tree by byte, because `re` tries alternatives one by one. With 32 secrets, the check of the
    next bytes by class doubles the speed.
    """
    classes = (sorted({head[at] for head in heads}) for at in range(BYTES_MIN))
    ahead = b"".join(b"[" + b"".join(re.escape(bytes([byte])) for byte in each) + b"]" for each in classes)
    return b"(?=" + ahead + b")" + _tree(heads)


def _tree(texts: Collection[bytes]) -> bytes:
    by_first: dict[bytes, list[bytes]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text[1:])
    branches = [
        re.escape(first) + (re.escape(rest[0]) if len(rest) == 1 else _tree(rest))
        for first, rest in sorted(by_first.items())
    ]
    return branches[0] if len(branches) == 1 else b"(?:" + b"|".join(branches) + b")"
