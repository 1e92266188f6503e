"""The server itself. Nothing here is about anybody's work; the first two routes are public.

GET /health    → Health     503 with the same body while something is wrong
GET /version   → Version
GET /metrics   → the text format of Prometheus
GET /drain     → DrainView        who may see nodes
PUT /drain       DrainRequest → DrainView
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer, Request


class HealthCheck(Answer, frozen=True, kw_only=True):
    """One part of the server.

    Attributes:
        name: database, store, environments, disk, mlflow, claim, server, or a loop: scheduler, reconciler, …
        problem: what is wrong with it, in words that name no one, or "".
        ms: how long it took to find out, or has taken so far.
    """

    name: str
    ok: bool
    problem: str = ""
    ms: float = 0.0


class Health(Answer, frozen=True, kw_only=True):
    """Whether the server can do its work; `problems` in words that name no one, `checks` part by part."""

    ok: bool
    problems: tuple[str, ...] = ()
    checks: tuple[HealthCheck, ...] = ()


class Version(Answer, frozen=True, kw_only=True):
    """What the server speaks.

    Attributes:
        protocol: its own; `protocols` are all that it takes, none said by one of protocol 1.
        machine: `ambient.machine()` of the server, so that a client knows whether it is on the same one.
        mlflow: where runs whose caller configured no MLflow are tracked, as clients and nodes reach it; "" for nowhere.
        joinable: whether other machines join it: then a run may be on one that has none of its caller's files.
    """

    version: str
    protocol: int
    machine: str
    mlflow: str = ""
    joinable: bool = False
    protocols: tuple[int, ...] = ()


class DrainRequest(Request, frozen=True, kw_only=True):
    """Whether nothing new is to be started, and why, for those who wait."""

    on: bool
    note: str = ""


class DrainView(Answer, frozen=True, kw_only=True):
    """Whether nothing new is started: who said so, when (nanoseconds since 1970) and why.

    Attributes:
        going: runs that go on.
        waiting: runs that wait.
    """

    on: bool
    by: str = ""
    since_ns: int = 0
    note: str = ""
    going: int = 0
    waiting: int = 0
