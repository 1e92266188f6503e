"""The server itself. Both routes are public and say nothing about anybody's work.

GET /health    → Health     503 with the same body while something is wrong
GET /version   → Version
"""

from __future__ import annotations

from serverless_gpu.wire.base import Answer


class Health(Answer, frozen=True, kw_only=True):
    """Whether the server can do its work; `problems` in words that name no one."""

    ok: bool
    problems: tuple[str, ...] = ()


class Version(Answer, frozen=True, kw_only=True):
    """What the server speaks.

    Attributes:
        machine: `ambient.machine()` of the server, so that a client knows whether it is on the same one.
        mlflow: where runs whose caller configured no MLflow are tracked, as clients and nodes reach it; "" for nowhere.
    """

    version: str
    protocol: int
    machine: str
    mlflow: str = ""
