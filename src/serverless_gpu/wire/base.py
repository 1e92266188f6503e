"""Defines the common parts of all HTTP bodies: protocol versions, limits, and errors.

Bodies are JSON objects under `/api/v1`. The server refuses a request with an unknown field. A client ignores unknown
fields of an answer, so that older clients can use newer servers. A stream consists of server-sent events. The data of
each event is one tagged object.
"""

from __future__ import annotations

import msgspec

API = "/api/v1"
PROTOCOL = 2
"""Protocol version in a node's hello message and in each request's `SGPU-Protocol` header."""
PROTOCOLS = (1, 2)
"""Protocol versions that a server accepts (current and previous).

Operators upgrade the server before nodes and clients.

    1    The first protocol version, recorded in tests/support/server/recorded/ for the tests of later servers.
    2    A node reports its clock difference (`Heartbeat.clock`). `Report.exec_ns` uses the server's time.
"""
BODY_BYTES_MAX = 8 << 20
INLINE_BYTES_MAX = 1 << 20
"""Maximum size in bytes of an inline payload or of all inline outputs in a report. Larger content is a blob."""
INLINE_OUTPUT_BYTES_MAX = 64 << 10
LOG_REPORT_BYTES_MAX = 1 << 20
LABEL_CHARACTERS_MAX = 256
NAME_CHARACTERS_MAX = 64
PAGE_MAX = 500
PAGE_DEFAULT = 50
LIVE_STREAMS_MAX = 128
"""Maximum number of output streams in one event stream. Each rank has two output streams."""

Json = msgspec.Raw | msgspec.UnsetType
"""Unparsed JSON, or `msgspec.UNSET` for an omitted field. msgspec cannot decode `Raw | None`."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of request bodies."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of answer bodies."""


class ShortageView(Answer, frozen=True, kw_only=True):
    """The requirements of a run that no node can meet, with alternatives that some node can meet.

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
    """The error body of an answer with status 400 or higher.

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
