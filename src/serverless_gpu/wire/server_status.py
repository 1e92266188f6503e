"""Bodies about the server itself, without data of users. The first two routes are public.

Routes:

    GET /health    → Health     503 with the same body while a check fails
    GET /version   → Version
    GET /metrics   → the text format of Prometheus
    GET /drain     → DrainView        for callers who may see nodes
    PUT /drain       DrainRequest → DrainView
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class HealthCheck(Answer, frozen=True, kw_only=True):
    """One part of the server.

    Attributes:
        name: database, store, environments, disk, mlflow, claim, server, or a loop: scheduler, reconciler, …
        problem: the failure as a sentence without names of users, or "".
        ms: duration of the check so far, in milliseconds.
    """

    name: str
    ok: bool
    problem: str = ""
    ms: float = 0.0


class Health(Answer, frozen=True, kw_only=True):
    """The health of the server: a list of problems without names of users, and the result of each check."""

    ok: bool
    problems: tuple[str, ...] = ()
    checks: tuple[HealthCheck, ...] = ()


class Version(Answer, frozen=True, kw_only=True):
    """Version and protocol of the server.

    Attributes:
        protocol: protocol version of the server. `protocols` has all versions that it accepts, and is empty from a
            server of protocol 1.
        machine: `ambient.machine()` of the server, by which a client detects that it runs on the same machine.
        mlflow: address of the server's MLflow for clients and nodes. This MLflow tracks runs whose caller configured no
            MLflow. "" means none.
        joinable: True if other machines can join. A run may then start on a machine without the caller's files.
    """

    version: str
    protocol: int
    machine: str
    mlflow: str = ""
    joinable: bool = False
    protocols: tuple[int, ...] = ()


class DrainRequest(Request, frozen=True, kw_only=True):
    """Start or end the drain of the server, with a reason for users who wait."""

    on: bool
    note: str = ""


class DrainView(Answer, frozen=True, kw_only=True):
    """The drain of the server, with its principal, its start time (nanoseconds since 1970) and its reason.

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
