"""What every body has in common: names of the protocol, its limits, and errors as they travel.

Bodies are JSON objects under `/api/v1`; a request with a field that this version does not know is refused, an answer
with one is read without it, so that a newer server can talk to an older client. Streams are server-sent events whose
data is one tagged object each.
"""

from __future__ import annotations

import msgspec

API = "/api/v1"
PROTOCOL = 2
"""What nodes and clients of this version speak. A node says it in its hello, every request in `SGPU-Protocol`."""
PROTOCOLS = (1, 2)
"""What a server takes: its own and the one before. Servers are upgraded first, nodes and clients when it suits.

    1    as it was first used; recorded in tests/support/server/recorded/, which every server after it is tried with
    2    a node tells how far its clock is off (`Heartbeat.clock`), and `Report.exec_ns` in the server's time
"""
BODY_BYTES_MAX = 8 << 20
INLINE_BYTES_MAX = 1 << 20
"""A payload, and the outputs of one report together, up to this size travel inside of a body; larger ones are blobs."""
INLINE_OUTPUT_BYTES_MAX = 64 << 10
LOG_REPORT_BYTES_MAX = 1 << 20
LABEL_CHARACTERS_MAX = 256
NAME_CHARACTERS_MAX = 64
PAGE_MAX = 500
PAGE_DEFAULT = 50
LIVE_STREAMS_MAX = 128
"""Streams of output (a rank has two) that one event stream carries."""

Json = msgspec.Raw | msgspec.UnsetType
"""JSON as it came, or `msgspec.UNSET`, which is false and not sent: `Raw | None` is a type msgspec cannot decode."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what is sent to the server."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what the server sends."""


class ShortageView(Answer, frozen=True, kw_only=True):
    """What a run asked for that no node could ever serve, and what some node could.

    Attributes:
        gpus: how many devices, or None for all of a node's.
        gpu_type: of which type, or None.
        pool: in which pool, or "".
        choices: similar requests: each has ``gpus``, ``gpu_type``, ``pool`` and ``env`` only where they differ.
    """

    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    choices: tuple[dict[str, int | str], ...] = ()


class Problem(Answer, frozen=True, kw_only=True):
    """Any answer of 400 or more.

    Attributes:
        code: of an exception class in `errors.py`; the client raises that.
        message: what happened, to which thing.
        hint: what to do next.
        run_id: the run it is about, or "".
        shortage: with the code ``no_suitable_node``: what would work.
    """

    code: str
    message: str
    hint: str = ""
    run_id: str = ""
    shortage: ShortageView | None = None
