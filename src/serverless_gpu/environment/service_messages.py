"""Defines the messages between a caller and its environment service (`service.py`).

A separate module for the messages keeps the service's dependencies out of the user's process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.documents import ProgressPoint

_STORE_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class StoreLocation(NamedTuple):
    """The location of an environment store, with the access token for a server."""

    url: str
    token: str = ""
    ca: str = ""  # CA certificate file for a server's store, or "" for the system's certificates


class EnvironmentQuestion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks the service if an environment is unchanged and stored.

    If `capture` is true, the service captures a changed or unstored environment.
    """

    number: int
    description: dict[str, object]
    store: str
    environ: dict[str, str] = {}
    token: str = ""
    ca: str = ""  # CA certificate file for a server's store, or "" for the system's certificates
    capture: bool = True


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tells the service that the caller no longer waits for an answer."""

    number: int


class Unchanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The quick check found the environment unchanged.

    A `FilesChecked` message follows after the service has checked every file.
    """

    number: int
    snapshot: str


class UnknownEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment is new, has changed, or is not in the store."""

    number: int


class FilesChecked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service has checked every file. The `changes` field describes the changed files."""

    number: int
    changes: tuple[str, ...] = ()


class CapturedEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service has scanned the environment and starts to capture it."""

    number: int
    first: bool  # True if the service knows no earlier capture
    changes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class CaptureProgress(msgspec.Struct, frozen=True, kw_only=True, tag="Taking"):
    """The progress of a capture."""

    number: int
    progress: ProgressPoint


class CaptureDone(msgspec.Struct, frozen=True, kw_only=True, tag="Taken"):
    """The capture has stored the environment."""

    number: int
    snapshot: str
    size: int  # total size of the environment's files in bytes
    files: int
    units: int
    code_bytes: int  # total size of the project's code files in bytes
    sent_units: int
    sent_bytes: int
    ms: int


class CaptureFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service cannot capture the environment, for the given reason."""

    number: int
    code: str
    message: str
    hint: str = ""


Question = EnvironmentQuestion | Abandon
Answer = (
    Unchanged | UnknownEnvironment | FilesChecked | CapturedEnvironment | CaptureProgress | CaptureDone | CaptureFailed
)

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """Encode a message as bytes."""
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Decode a question from the bytes of a message."""
    return _questions.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Decode an answer from the bytes of a message."""
    return _answers.decode(data)


def store_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that stores use for credentials, endpoints and proxies."""
    return {name: value for name, value in environ.items() if name.upper().startswith(_STORE_PREFIXES)}
