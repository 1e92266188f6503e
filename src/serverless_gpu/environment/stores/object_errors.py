"""What the answers of an object store mean, read from the error a request ended with; pure.

An error's text holds urls, headers and the server's words, and with some clouds a signature or a key is among them. So
only three things are ever taken from it: the number of the answer, the server's own code (``NoSuchBucket``), and
which step failed. Nothing else of it reaches a person or a log.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Verdict = Literal["again", "absent", "beyond", "whole", "refused", "no bucket", "no credentials", "full"]

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>|\"code\":\s*\"(\w{1,60})\"")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest",
        "ContentSHA256Mismatch",
        "IncompleteBody",
        "Md5Mismatch",
        "OperationAborted",
        "RequestTimeout",
        "XAmzContentSHA256Mismatch",
    }
)
_TRANSIENT = frozenset({408, 409, 425, 429})
_FULL = re.compile(r"no space left|StorageFull|InsufficientStorage|QuotaExceeded|status code: 507", re.IGNORECASE)
_STEPS = (
    ("kind: Connect", "no connection"),
    ("kind: Timeout", "no answer in time"),
    ("timed out", "no answer in time"),
    ("kind: Interrupted", "the answer broke off"),
    ("kind: Decode", "the answer broke off"),
    ("kind: Request", "the request broke off"),
)
# Where credentials come from on machines of a cloud, when there are none in variables.
_METADATA = re.compile(r"169\.254\.169\.254|metadata\.google|/latest/api/token|/latest/meta-data|/metadata/identity")


class ErrorMeaning(NamedTuple):
    """What an answer means, and what may be said of it."""

    verdict: Verdict
    said: str


def judge(text: str, *, not_found: bool = False, denied: bool = False) -> ErrorMeaning:
    """Return what an error means.

    Args:
        text: all that the error says.
        not_found: whether its class already says that there is no such object.
        denied: whether its class already says that the credentials do not do.
    """
    said = _said(text)
    code = said.partition(" ")[2]
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    if code in _NO_BUCKET:
        return ErrorMeaning("no bucket", said)
    if not_found:
        return ErrorMeaning("absent", said)
    if _METADATA.search(text):
        return ErrorMeaning("no credentials", "no credentials were found")
    if status == 416:
        return ErrorMeaning("beyond", said)
    if "non-partial response" in text:
        return ErrorMeaning("whole", "it knows no ranges")
    if _FULL.search(text):
        return ErrorMeaning("full", said)
    if denied:
        return ErrorMeaning("refused", said)
    transient = not status or status >= 500 or status in _TRANSIENT or code in _TRANSIENT_CODES
    return ErrorMeaning("again" if transient else "refused", said)


def _said(text: str) -> str:
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        return f"{status[1]} {(code[1] or code[2]) if code else ''}".strip()
    for sign, words in _STEPS:
        if sign in text:
            return words
    return "no usable answer"


def pause_s(tries: int, chance: float) -> float:
    """Return how long to wait before asking again: doubling, never more than 15 s, and never all clients at once.

    Args:
        tries: how often it was asked.
        chance: a number between 0 and 1.
    """
    return min(15.0, 0.1 * 2.0 ** min(tries, 10)) * (0.5 + chance / 2)
