"""Defines the messages between a caller and its environment service (`service.py`).

The messages are separate from the service, so that the user's process does not load the service's dependencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.documents import ProgressPoint

_STORE_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class StoreLocation(NamedTuple):
    """The location of a store of environments, with the token for a server."""

    url: str
    token: str = ""
    ca: str = ""  # file with the certificates for a server's store; "" for the system's certificates


class EnvironmentQuestion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks if an environment is unchanged and stored. With `capture`, requests a capture otherwise."""

    number: int
    description: dict[str, object]
    store: str
    environ: dict[str, str] = {}
    token: str = ""
    ca: str = ""  # file with the certificates for a server's store; "" for the system's certificates
    capture: bool = True


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Informs the service that the caller no longer waits for an answer."""

    number: int


class Unchanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment looks unchanged. `FilesChecked` follows after a check of every file."""

    number: int
    snapshot: str


class UnknownEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment is new, has changed, or is not in the store."""

    number: int


class FilesChecked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service has checked every file. `changes` describes the changed files."""

    number: int
    changes: tuple[str, ...] = ()


class CapturedEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The service has scanned the environment and starts to capture it."""

    number: int
    first: bool  # True if no earlier capture is known
    changes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class CaptureProgress(msgspec.Struct, frozen=True, kw_only=True, tag="Taking"):
    """The progress of a capture."""

    number: int
    progress: ProgressPoint


class CaptureDone(msgspec.Struct, frozen=True, kw_only=True, tag="Taken"):
    """The environment is in the store."""

    number: int
    snapshot: str
    size: int  # number of content bytes of the environment
    files: int
    units: int
    code_bytes: int  # number of content bytes of the project's code
    sent_units: int
    sent_bytes: int
    ms: int


class CaptureFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment cannot be captured."""

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
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Return the question that the bytes of a message contain."""
    return _questions.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Return the answer that the bytes of a message contain."""
    return _answers.decode(data)


def store_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that opening a store may need: credentials, endpoints, proxies."""
    return {name: value for name, value in environ.items() if name.upper().startswith(_STORE_PREFIXES)}
