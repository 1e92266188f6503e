"""Defines bodies about the server's health, version and drain, which contain no user data.

The routes `/health` and `/version` are public:

    GET /health    → Health     503 with the same body while a check fails
    GET /version   → Version
    GET /metrics   → the text format of Prometheus
    GET /drain     → DrainView        for callers who may see nodes
    PUT /drain       DrainRequest → DrainView
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class HealthCheck(Answer, frozen=True, kw_only=True):
    """The health of one component of the server.

    Attributes:
        name: name of the component: database, store, environments, disk, mlflow, claim, server, or a loop (scheduler,
            reconciler, …).
        problem: the component's failure as a sentence without names of users, or "".
        ms: duration of the health check up to now, in milliseconds.
    """

    name: str
    ok: bool
    problem: str = ""
    ms: float = 0.0


class Health(Answer, frozen=True, kw_only=True):
    """The health of the server, with a list of problems and the result of each health check."""

    ok: bool
    problems: tuple[str, ...] = ()
    checks: tuple[HealthCheck, ...] = ()


class Version(Answer, frozen=True, kw_only=True):
    """Version and protocol of the server.

    Attributes:
        protocol: protocol version of the server. `protocols` contains all versions that the server accepts. A server
            with protocol 1 sends no `protocols`.
        machine: `ambient.machine()` of the server, by which a client detects that it runs on the same machine.
        mlflow: address of the server's MLflow for clients and nodes, or "". The server's MLflow tracks runs whose
            caller configured no MLflow.
        joinable: True if other machines can join the server. A run may then start on a machine without the caller's
            files.
        sandboxes: True if runs of a pool start in sandboxes, which do not show the caller's files.
    """

    version: str
    protocol: int
    machine: str
    mlflow: str = ""
    joinable: bool = False
    sandboxes: bool = False
    protocols: tuple[int, ...] = ()


class DrainRequest(Request, frozen=True, kw_only=True):
    """Start or end the drain of the server, with a reason for users who wait."""

    on: bool
    note: str = ""


class DrainView(Answer, frozen=True, kw_only=True):
    """The state of the server's drain, with its principal, start time and reason.

    Attributes:
        going: number of running runs.
        waiting: number of waiting runs.
    """

    on: bool
    by: str = ""
    since_ns: int = 0
    note: str = ""
    going: int = 0
    waiting: int = 0
