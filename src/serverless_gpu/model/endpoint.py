"""The targets to which a user can connect in a running attempt.

`sgpu exec`, `sgpu forward`, `sgpu shell`, `ssh` and notebooks use these targets. Only the owner of a run may connect.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
PROGRAM_ARGUMENTS_MAX = 1_000
SOCKETS = frozenset({"terminal", "kernel"} | {f"kernel-{number}" for number in range(1, 6)})
"""Names of the sockets that serverless-gpu opens in the work directory of an attempt."""


class PortTarget(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="port"):
    """A TCP port on the loopback interface of the node, as the ranks see it."""

    port: Port


class SocketTarget(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="socket"):
    """A Unix socket in the attempt's work directory, one of `SOCKETS`."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z]+(-[0-9])?$", max_length=32)]


class ProgramTarget(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="program"):
    """A new program beside the ranks.

    Attributes:
        argv: the program and its arguments; () for the user's shell.
        tty: True for a pseudo-terminal; False for pipes.
        rows: initial height of the pseudo-terminal.
        columns: initial width of the pseudo-terminal.
        term: type of the user's terminal, such as ``xterm-256color``, or "".
    """

    argv: Annotated[tuple[str, ...], msgspec.Meta(max_length=PROGRAM_ARGUMENTS_MAX)] = ()
    tty: bool = False
    rows: Size = 24
    columns: Size = 80
    term: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._+-]*$", max_length=64)] = ""


EndpointTarget = PortTarget | SocketTarget | ProgramTarget


def target_text(target: EndpointTarget) -> str:
    """Return a target as text for messages and the audit log, such as ``port 6006``."""
    match target:
        case PortTarget(port=port):
            return f"port {port}"
        case SocketTarget(name=name):
            return f"socket {name}"
        case ProgramTarget(argv=argv):
            return f"program {argv[0]}" if argv else "shell"
