"""Where runs would be tracked: what is installed and configured, and whether MLflow's servers answer.

Failure cases: nobody listens, or something hangs: each is asked for two seconds. Nothing is imported or started.
"""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
from collections.abc import Mapping

from serverless_gpu.client.caller.mlflow_context import SWITCH
from serverless_gpu.doctor.facts import TrackingFacts, TrackingServer
from serverless_gpu.node.base.home import find_home
from serverless_gpu.node.mlflow_server.server import MlflowServer, local_path, servers, without_password

_ANSWER_S = 2.0


def look_at_tracking(environ: Mapping[str, str]) -> TrackingFacts:
    """Return where runs would be tracked, and how MLflow's servers of this home are.

    Raises:
        StorageError: there is no home.
    """
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    is_http = uri.startswith(("http://", "https://"))
    return TrackingFacts(
        off=f"{SWITCH}=0" if environ.get(SWITCH) == "0" else "",
        installed=importlib.util.find_spec("mlflow") is not None,
        uri=without_password(uri),
        away=_away(without_userinfo(uri)) if is_http else None,
        servers=tuple(_server(each) for each in servers(find_home(environ)) if each.stage != "none"),
    )


def without_userinfo(uri: str) -> str:
    """Return an address without name and password."""
    return without_password(uri).replace("…@", "")


def _server(server: MlflowServer) -> TrackingServer:
    database = server.place.backing().uri
    return TrackingServer(
        uri=server.uri,
        store=without_password(server.store),
        database=without_password(database),
        file=str(local_path(database) or ""),
        python=server.python,
        stage=server.stage,
        version=server.version,
        problem=server.problem,
        pid=server.pid,
        away=_away(server.uri) if server.stage == "ready" else "",
    )


def _away(uri: str) -> str:
    """Return why a server does not answer, or ""."""
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:  # 401 of a proxy that wants a name: somebody is there
        error.close()
        return "" if error.code < 500 else f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
