"""Defines the common parts of all bodies: protocol versions, limits, and errors.

Bodies are JSON objects under `/api/v1`. The server refuses a request with an unknown field. A client ignores unknown
fields of an answer, so that a newer server can answer an older client. Streams are server-sent events, and the data of
each event is one tagged object.
"""

from __future__ import annotations

import msgspec

API = "/api/v1"
PROTOCOL = 2
"""Protocol version, which a node's hello and each request's `SGPU-Protocol` header contain."""
PROTOCOLS = (1, 2)
"""Protocol versions that a server accepts: the current and the previous version. Operators upgrade the server before
nodes and clients.

    1    first version; every later server is tested with its recording in tests/support/server/recorded/
    2    a node reports its clock difference (`Heartbeat.clock`), and `Report.exec_ns` in the server's time
"""
BODY_BYTES_MAX = 8 << 20
INLINE_BYTES_MAX = 1 << 20
"""Maximum bytes of an inline payload, and of the inline outputs of a report. Larger content is a blob."""
INLINE_OUTPUT_BYTES_MAX = 64 << 10
LOG_REPORT_BYTES_MAX = 1 << 20
LABEL_CHARACTERS_MAX = 256
NAME_CHARACTERS_MAX = 64
PAGE_MAX = 500
PAGE_DEFAULT = 50
LIVE_STREAMS_MAX = 128
"""Maximum number of output streams in one event stream. A rank has two streams."""

Json = msgspec.Raw | msgspec.UnsetType
"""Unparsed JSON, or `msgspec.UNSET`, which is falsy and omitted. msgspec cannot decode `Raw | None`."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of request bodies."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of answer bodies."""


class ShortageView(Answer, frozen=True, kw_only=True):
    """Requirements of a run that no node can meet, and alternatives that a node can meet.

    Attributes:
        gpus: requested number of devices, or None for all devices of a node.
        gpu_type: requested type, or None.
        pool: requested pool, or "".
        choices: alternative requests. A choice contains only the differences in ``gpus``, ``gpu_type``, ``pool`` and
            ``env``.
    """

    gpus: int | None = None
    gpu_type: str | None = None
    pool: str = ""
    choices: tuple[dict[str, int | str], ...] = ()


class Problem(Answer, frozen=True, kw_only=True):
    """The body of an answer with status 400 or higher.

    Attributes:
        code: code of an exception class in `errors.py`. The client raises an exception of this class.
        message: the failure and the affected object.
        hint: advice for the next step.
        run_id: the affected run, or "".
        shortage: the unmet requirements and their alternatives, for the code ``no_suitable_node``.
    """

    code: str
    message: str
    hint: str = ""
    run_id: str = ""
    shortage: ShortageView | None = None
