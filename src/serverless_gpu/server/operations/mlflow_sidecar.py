"""`sgpu up --mlflow`: an MLflow server beside ours, which ends with it.

    sgpu up ── keeper (`node/mlflow_server/`), in our own interpreter ── MLflow, on loopback
       ├─ a thread starts another keeper, should it be killed
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
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, ServerProblem
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import ServerFiles, kept, look, place_of, start_keeper, stop_server
from serverless_gpu.server.core.settings import Settings
from serverless_gpu.server.http.auth_middleware import LOOPBACK
from serverless_gpu.server.http.listener import names

_NEEDED = ("mlflow", "flask")  # the second is what mlflow-skinny lacks
_START_S = 30.0
_LOOK_S = 0.05
_LOOKS = 600
_TRIES = 5
_PAUSE_S = 1.0
_log = logging.getLogger(__name__)


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
    host = urlsplit(settings.mlflow_url).hostname
    beside = _Beside(place, ",".join([*names(settings), *([host] if host else [])]))
    try:
        uri = beside.start()
        yield msgspec.structs.replace(settings, mlflow_url=settings.mlflow_url or uri)
    finally:
        beside.close()


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


def _place(settings: Settings) -> ServerFiles:
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


class _Beside:
    """The keeper, and a thread that starts another one should it be killed.

    Args:
        place: the files of MLflow's server.
        hosts: further names it answers to, with commas.
    """

    def __init__(self, place: ServerFiles, hosts: str) -> None:
        self._place, self._hosts = place, hosts
        # It has the end that is read: when ours is closed, however that happens, it ends.
        self._its, self._ours = os.pipe()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name="mlflow", daemon=True)
        self._keeper: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start the keeper and return where its server will be.

        Raises:
            ServerProblem: it does not come up.
        """
        self._keeper, uri = self._started()
        self._thread.start()
        return uri

    def close(self) -> None:
        """Have the keeper end."""
        self._closing.set()
        os.close(self._ours)
        stop_server(self._place)
        if self._thread.is_alive():
            self._thread.join(_START_S)
        os.close(self._its)

    def _started(self) -> tuple[subprocess.Popen[bytes], str]:
        for _ in range(_TRIES):
            stop_server(self._place)  # another interpreter's; a tracked run may have that started again
            keeper = start_keeper(self._place, sys.executable, os.environ, owner=self._its, hosts=self._hosts)
            for _ in range(_LOOKS):
                serving = kept(self._place)
                if serving is not None and self._place.noted().keeper == keeper.pid:
                    return keeper, serving.uri
                if keeper.poll() is not None or self._closing.wait(_LOOK_S):
                    break
        wrote = self._place.directory / "keeper.log"
        raise ServerProblem("the keeper of MLflow's server did not come up", hint=f"it wrote: {wrote}")

    def _look_after(self) -> None:
        while not self._closing.is_set():
            if self._keeper is not None:
                self._keeper.wait()
            if self._closing.wait(_PAUSE_S):
                return
            try:
                self._keeper = self._started()[0]
            except (ServerlessGpuError, OSError) as error:
                _log.warning("MLflow's server: %s", error)
