"""`sgpu up --mlflow`: an MLflow server beside ours, which ends with it.

    sgpu up ── keeper (`node/mlflow_server/`), in our own interpreter ── MLflow, on loopback
       └─ /version says where it is: runs whose caller configured none are tracked there

It is the server of the home's own store, at the same address, unless another store is named: what ran here before is
there, and what runs here without a server is, too. Whatever ran there before with another interpreter's MLflow ends.

Failure cases: MLflow is not installed, or other machines are to reach our server and could not reach MLflow's on
loopback: refused at the start. MLflow does not come up, or dies: tried again with pauses, `/health` says why, and our
own server does its work. Ours is killed: the kernel closes a pipe, and the keeper ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue, ServerProblem
from serverless_gpu.node.home import Home
from serverless_gpu.node.mlflow_server.places import Place, place_of
from serverless_gpu.node.mlflow_server.serving import Serving, kept, look, start_keeper, stop_server
from serverless_gpu.server.gate import LOOPBACK
from serverless_gpu.server.listening import names
from serverless_gpu.server.settings import Settings

_NEEDED = ("mlflow", "flask")  # the second is what mlflow-skinny lacks
_START_S = 30.0
_LOOK_S = 0.05


@contextlib.contextmanager
def mlflow_beside(settings: Settings) -> Iterator[Settings]:
    """Have an MLflow server for as long as the server runs; yield the settings with its address.

    Args:
        settings: what the server was told.

    Raises:
        ServerProblem: MLflow is not installed, or no process can be started.
        InvalidValue: other machines could not reach it.
    """
    if not settings.mlflow:
        yield settings
        return
    _refuse(settings)
    place = _place(settings)
    place.make()
    stop_server(place)
    host = urlsplit(settings.mlflow_url).hostname
    ours, its = os.pipe()  # it has the end that is read: when ours is closed, however that happens, it ends
    try:
        hosts = ",".join([*names(settings), *([host] if host else [])])
        try:
            start_keeper(place, sys.executable, os.environ, owner=ours, hosts=hosts)
        finally:
            os.close(ours)
        uri = _noted(place).uri
        yield msgspec.structs.replace(settings, mlflow_url=settings.mlflow_url or uri)
    finally:
        os.close(its)
        stop_server(place)


def mlflow_checks(settings: Settings) -> tuple[Callable[[], str], ...]:
    """Return what says why MLflow's server beside this one does not answer: one check, or none.

    Args:
        settings: what the server was told.
    """
    if not settings.mlflow:
        return ()
    place = _place(settings)

    def problem() -> str:
        found = look(place, SystemClock())
        return f"MLflow: {found.problem}" if found.problem else ""

    return (problem,)


def _place(settings: Settings) -> Place:
    return place_of(Home(settings.home), settings.mlflow_store)


def _refuse(settings: Settings) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ServerProblem(
            f"--mlflow needs packages that are not installed: {', '.join(missing)}",
            hint="pip install 'serverless-gpu[server,mlflow]'",
        )
    if any(name not in LOOPBACK for name in names(settings)) and not settings.mlflow_url:
        raise InvalidValue(
            "other machines may use this server, and could not reach MLflow's, which listens on loopback",
            hint="put a proxy that speaks TLS in front of it, and say where others find it: --mlflow-url https://…",
        )


def _noted(place: Place) -> Serving:
    """Wait until the keeper has its port."""
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + int(_START_S * 1e9)
    while clock.boottime_ns() < deadline_ns:
        serving = kept(place)
        if serving is not None and serving.uri:
            return serving
        select.select([], [], [], _LOOK_S)
    raise ServerProblem(
        "the keeper of MLflow's server did not come up", hint=f"it wrote: {place.directory / 'keeper.log'}"
    )
