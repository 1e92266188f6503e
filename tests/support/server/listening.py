"""The server's routes behind their gate, on loopback: what clients and nodes really talk to, without scheduler or node.

Tokens are the names of roles, as `Authorization: Bearer operator`; `attempt` is that of one attempt.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.model.access_control import reach
from serverless_gpu.server.composition import guarded
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.http.auth_middleware import LOOPBACK
from serverless_gpu.server.http.routing import Need
from serverless_gpu.server.storage.server_stores import Storage
from tests.support.server.made import made_services, recomposed

T = TypeVar("T")
RUN = "01kaz5w8d3e4f5g6h7j8k9m0n1"
ROLES = ("admin", "operator", "member", "viewer", "agent")


class NoDatabase:
    """A database that nobody asks."""

    def read(self, work: Callable[[Any], T]) -> T:
        raise AssertionError("this test needs a database")

    write = read


def authenticate(token: str) -> Caller:
    if token == "attempt":
        return Caller(kind="attempt", attempt=(RUN, 1, 0))
    if token not in ROLES:
        raise NotAuthenticated
    return Caller(name=token, role=token)


def reach_of(who: Caller, need: Need) -> str:
    return reach(who.role, need.noun, write=need.write)


def app_of(storage: Storage, database: Any = None) -> ASGIApp:
    """Return the application on some storage."""
    made = made_services(database or NoDatabase(), Path("/nonexistent"), clock=SystemClock())
    services = recomposed(made, **storage._asdict())
    return guarded(
        services.by_type,
        hub=services.hub,
        clock=services.clock,
        measures=services.measures,
        hosts=LOOPBACK,
        authenticate=authenticate,
        reach=reach_of,
    )


@contextlib.contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """Serve an application from a thread; yield its url."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
