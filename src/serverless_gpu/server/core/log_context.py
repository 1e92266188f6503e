"""What a line of the server's log is about, known to whoever logs without being told: run, attempt, node, request.

    with bound(request_id="…", method="GET"):        the request, in its task and in every thread it goes to
        note(route="/runs/{run}", principal="ada")   what is found out later
        _log.warning("…")                            the line has all of that

Only the fields of `FIELDS` can be there, so nobody puts a request's contents, a token or a variable of a caller's into
the log by naming one more thing. Threads that anyio starts have the context of who started them; loops bind their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

FIELDS = (
    "loop",  # whose tick it is
    "run",
    "attempt",  # number of the attempt: its fence
    "node",
    "request_id",  # also in the answer's header SGPU-Request
    "principal",  # whose token it is
    "method",
    "route",  # as declared, "/runs/{run}": never the path
    "status",
    "ms",  # until the answer began
    "total_ms",  # until it ended
    "peer",  # address it came from
    "more",  # lines like this one that were left out before it
)
VALUE_CHARACTERS_MAX = 200
_fields: ContextVar[dict[str, object] | None] = ContextVar("sgpu_log_fields", default=None)


@contextlib.contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Have lines say this, too, until the block ends.

    Args:
        fields: values by names of `FIELDS`.
    """
    token = _fields.set({**current(), **_checked(fields)})
    try:
        yield
    finally:
        _fields.reset(token)


def note(**fields: object) -> None:
    """Add to the innermost `bound`, for everybody in it; nothing happens outside of one."""
    held = _fields.get()
    if held is not None:
        held.update(_checked(fields))


def current() -> Mapping[str, object]:
    """Return what lines say now."""
    return _fields.get() or {}


def _checked(fields: Mapping[str, object]) -> dict[str, object]:
    unknown = set(fields) - set(FIELDS)
    if unknown:
        raise ValueError(f"lines of the log have no field {sorted(unknown)[0]!r}")
    return {name: _short(value) for name, value in fields.items() if value not in (None, "")}


def _short(value: object) -> object:
    return value if isinstance(value, int | float) else str(value)[:VALUE_CHARACTERS_MAX]
