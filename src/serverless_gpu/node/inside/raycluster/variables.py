"""Environment variables of Ray's processes and the driver; pure.

The caller's shell may belong to another Ray, whose address, token or temporary directory would tie this cluster to it.
So everything that begins with ``RAY_`` goes, except tuning of libraries. torch's world goes too, which the supervisor
announces to every rank: a driver is in none, and Ray Train makes worlds of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from .ray_start import Ports
from .words import ClusterShare

TOKEN_FILE = "token"
START_S = 180
"""Time for Ray to start: its first import from a slow disk takes most of it."""
LOOPBACK = "127.0.0.1"

_WORLD = frozenset(
    {
        "GROUP_RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "RANK",
        "TORCHELASTIC_RUN_ID",
        "WORLD_SIZE",
    }
)
# They tune what user code sees of a library, and say nothing of where a cluster is or who may enter it.
_KEPT = frozenset(
    {
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "RAY_BACKEND_LOG_LEVEL",
        "RAY_CHDIR_TO_TRIAL_DIR",
        "RAY_COLOR_PREFIX",
        "RAY_DEDUP_LOGS",
        "RAY_DEDUP_LOGS_AGG_WINDOW_S",
        "RAY_DEDUP_LOGS_ALLOW_REGEX",
        "RAY_DEDUP_LOGS_SKIP_REGEX",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV",
        "RAY_IGNORE_UNHANDLED_ERRORS",
        "RAY_PROFILING",
        "RAY_TQDM",
        "RAY_memory_monitor_refresh_ms",
        "RAY_memory_usage_threshold",
        "RAY_verbose_spill_logs",
    }
)
# Ray Train asks the state API for its controller once a second. The dashboard's process serves that, so without one the
# relay of workers' lines would have this once a second, too.
_REPEATED = "Failed to query Ray Train Controller actor state"
_KEPT_PREFIXES = ("RAY_AIR_", "RAY_CGRAPH_", "RAY_DATA_", "RAY_EXPERIMENTAL_NOSET_", "RAY_TRAIN_", "RAY_TUNE_")
_METRIC_PORTS = frozenset({"AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT"})


def stripped(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without those of another Ray cluster and of torch's world."""
    return {
        name: value
        for name, value in variables.items()
        if name not in _WORLD
        and name not in _METRIC_PORTS
        and (not name.startswith("RAY_") or name in _KEPT or name.startswith(_KEPT_PREFIXES))
    }


def defaults(share: ClusterShare) -> dict[str, str]:
    """Return what is set unless the caller's variables say otherwise."""
    return {} if share.dashboard else {"RAY_DEDUP_LOGS_SKIP_REGEX": _REPEATED}


def cluster_variables(share: ClusterShare, *, token: bool) -> dict[str, str]:
    """Return the environment of every process of the cluster: Ray's own, workers, driver.

    Ray reads some of it when it is imported. `token` says that this Ray knows tokens.
    """
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",  # they are on by default, and would call out
        "RAY_raylet_start_wait_time_s": str(START_S),  # 30 by default, which a busy machine takes
    }
    if share.num_nodes == 1:
        # "No cluster of several machines": the one way to have every process of Ray's listen on loopback only.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if token:
        variables["RAY_AUTH_MODE"] = "token"
        variables["RAY_AUTH_TOKEN_PATH"] = os.path.join(share.directory, TOKEN_FILE)
    return variables


def port_variables(ports: Ports, address: str) -> dict[str, str]:
    """Return what is known of a cluster once its ports are, for all of its processes.

    A task asks for the address, too: Ray Train's actors do.
    """
    return {
        "RAY_ADDRESS": address,
        # Ports that `ray start` has no argument for.
        "AUTOSCALER_METRIC_PORT": str(ports.autoscaler_metrics),
        "DASHBOARD_METRIC_PORT": str(ports.dashboard_metrics),
    }


def token_of(secret: str) -> str:
    """Return the token of a run's cluster, the same on all its nodes and of no use for anything else."""
    return hmac.new(secret.encode(), b"the token of the run's Ray cluster", hashlib.sha256).hexdigest()
