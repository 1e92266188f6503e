"""What a caller and its environment service (`service.py`) say to each other.

Kept apart from the service so that the user's process loads nothing of what the service needs to do its work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from serverless_gpu.environment.documents import ProgressPoint

_STORE_PREFIXES = ("AWS_", "GOOGLE_", "AZURE_", "SSL_CERT_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class StoreLocation(NamedTuple):
    """A store of environments."""

    url: str
    token: str = ""
    ca: str = ""  # for such a one: file with the certificates to trust; "" for the system's


class EnvironmentQuestion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Is this environment known, and is it in the store? Capture it if not, unless that is not wanted now."""

    number: int
    description: dict[str, object]
    store: str
    environ: dict[str, str] = {}
    token: str = ""
    ca: str = ""  # for a server's store: file with the certificates to trust; "" for the system's
    capture: bool = True


class Abandon(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The caller no longer waits for the answer."""

    number: int


class Unchanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It looks unchanged; whether every file is will be said by `FilesChecked`."""

    number: int
    snapshot: str


class UnknownEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It was never seen, has changed, or is not in the store."""

    number: int


class FilesChecked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every file was looked at; what is not as it was, in words."""

    number: int
    changes: tuple[str, ...] = ()


class CapturedEnvironment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It was looked at, and is captured now."""

    number: int
    first: bool  # whether it was never captured before
    changes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


class CaptureProgress(msgspec.Struct, frozen=True, kw_only=True, tag="Taking"):
    """How far the capture is."""

    number: int
    progress: ProgressPoint


class CaptureDone(msgspec.Struct, frozen=True, kw_only=True, tag="Taken"):
    """It is in the store."""

    number: int
    snapshot: str
    size: int  # content bytes
    files: int
    units: int
    code_bytes: int  # content bytes of the project's code
    sent_units: int
    sent_bytes: int
    ms: int


class CaptureFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It cannot be captured."""

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
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_question(data: bytes) -> Question:
    """Return the question in bytes."""
    return _questions.decode(data)


def decode_answer(data: bytes) -> Answer:
    """Return the answer in bytes."""
    return _answers.decode(data)


def store_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a store may need to be opened: credentials, endpoints, proxies."""
    return {name: value for name, value in environ.items() if name.upper().startswith(_STORE_PREFIXES)}
