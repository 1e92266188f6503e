"""Calls Ray for the engine, in a child process that reads and writes lines of JSON.

    engine ── {"id", "op", …} ─▶ stdin    a thread for each request ─▶ Ray      ◀── {"id", "ok" | "problem"} ── stdout

    connect   become a driver of the cluster, in the namespace of one server; kill its outdated actors
    look      return Ray's node table, placement groups and free resources
    reserve   create a detached placement group; remove it if Ray does not place it in time
    release   remove a placement group
    agent     start the agent of one node if it does not run, through a detached actor on the node

The driver process makes no decisions and holds no state. A call to Ray without a head can block for minutes. The engine
therefore kills an unresponsive driver process. The driver process exits at the end of its input. The engine runs this
file with `-I` in an interpreter that has Ray. The file therefore imports no module of serverless-gpu. Ray pickles the
actor class by value, so that Ray workers do not need serverless-gpu.

The actor runs `uplink_launcher.py` with the node's interpreter in a clean environment. The launcher detaches the uplink
from Ray's process tree. The uplink therefore survives `ray.kill` and the exit of the raylet or worker. In a memory
shortage, the kernel kills Ray's workers before the uplink.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

_ACTOR_S = 40.0
_LOOK_S = 0.002
# Ray retries a placement after one second. Released resources become free within 50 ms. For a faster retry, `reserve`
# creates the placement group again.
_AGAIN_S = 0.05
_REFUSED = ("INFEASIBLE", "NO_RESOURCES")
# Number of consecutive INFEASIBLE reports after which `reserve` gives up. Ray registers a new node shortly before the
# node's resources.
_SURE = 3
_ANSWER = threading.Lock()
_is_driver = threading.Event()


def main() -> None:
    """Answer requests until the end of the input."""
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # Ray also writes to stdout, which would corrupt the stream of answers.
    for line in requests:
        request = json.loads(line)
        threading.Thread(target=_answer, args=(request, answers), daemon=True).start()
    os._exit(0)


def _answer(request: dict[str, Any], answers: int) -> None:
    answer: dict[str, Any] = {"id": request.pop("id")}
    try:
        answer["ok"] = _OPERATIONS[request.pop("op")](**request)
    except Exception as error:  # noqa: BLE001 - Ray may raise any exception
        answer["problem"] = f"{type(error).__name__}: {error}"
    data = memoryview(json.dumps(answer).encode() + b"\n")
    with _ANSWER:
        while data:
            data = data[os.write(answers, data) :]


def connect(address: str, node_address: str, namespace: str, program: str) -> dict[str, Any]:
    """Connect to a Ray cluster as a driver."""
    import ray

    ray.init(
        address=address,
        namespace=namespace,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address=node_address,
    )
    for name in ray.util.list_named_actors():
        if not name.endswith(program):
            with contextlib.suppress(ValueError):  # The actor may have exited in the meantime.
                ray.kill(ray.get_actor(name))
    _is_driver.set()
    return {"version": ray.__version__}


def _connected() -> None:
    """Refuse requests before `connect`, because Ray would start a local cluster."""
    if not _is_driver.is_set():
        raise ConnectionError("not connected yet")


def look() -> dict[str, Any]:
    """Return the cluster's node table, placement groups and free resources."""
    _connected()
    import ray
    from ray.util.placement_group import placement_group_table

    nodes = ray.nodes()
    groups = list(placement_group_table().values())
    return {"nodes": nodes, "groups": groups, "free": ray._private.state.available_resources_per_node()}


def reserve(name: str, bundles: list[dict[str, float]], patience_s: float) -> dict[str, Any]:
    """Create a placement group and return its last state. Remove a group that Ray does not place."""
    _connected()
    from ray.util.placement_group import placement_group, remove_placement_group

    until, never = time.monotonic() + patience_s, 0
    while True:
        group = _find(name) or placement_group(bundles, strategy="PACK", name=name, lifetime="detached")
        said = _settled(group, until)
        if said.get("state") == "CREATED":
            return {"group": said, "free": {}, "nodes": []}
        remove_placement_group(group)
        never = never + 1 if _scheduling(said) == "INFEASIBLE" else 0
        if never >= _SURE or time.monotonic() >= until:
            seen = look()
            return {"group": said, "free": seen["free"], "nodes": seen["nodes"]}
        time.sleep(_AGAIN_S)


def _settled(group: Any, until: float) -> dict[str, Any]:
    """Return Ray's record of a placement group after Ray's first placement attempt."""
    from ray.util.placement_group import placement_group_table

    pause_s = _LOOK_S
    while True:
        said: dict[str, Any] = placement_group_table(group)
        if said.get("state") == "CREATED" or _scheduling(said) in _REFUSED or time.monotonic() >= until:
            return said
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _AGAIN_S)


def _scheduling(said: dict[str, Any]) -> object:
    return said.get("stats", {}).get("scheduling_state")


def release(name: str) -> dict[str, Any]:
    """Remove a placement group, and report if the group existed."""
    _connected()
    from ray.util.placement_group import remove_placement_group

    group = _find(name)
    if group is not None:
        remove_placement_group(group)
    return {"was_there": group is not None}


def _find(name: str) -> Any:
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(name)
    except ValueError:
        return None


def agent(node: str, actor: str, program: list[str]) -> dict[str, Any]:
    """Start the agent of a node if necessary, and return the answer of the node's actor."""
    _connected()
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    options = {
        "name": actor,
        "get_if_exists": True,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    handle = ray.remote(NodeActor).options(**options).remote(*program)
    said: dict[str, Any] = ray.get(handle.ensure.remote(), timeout=_ACTOR_S)
    return said


class NodeActor:
    """Actor that starts and checks the agent of one node."""

    def __init__(self, variable: str, launcher: str, module: str) -> None:
        self._variable, self._launcher, self._module = variable, launcher, module
        self._agent: tuple[int, str] | None = None

    def ensure(self) -> dict[str, Any]:
        """Start the agent if necessary, and return the agent's process id or the problem."""
        if self._agent is not None and self._started(self._agent[0]) == self._agent[1]:
            return {"pid": self._agent[0], "started": False}
        path = os.environ.get(self._variable)
        if not path:
            return {"problem": f"`sgpu join` did not start Ray on this node, because {self._variable} is not set"}
        try:
            said = self._launch(path)
        except (OSError, ValueError, KeyError) as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        if isinstance(said.get("pid"), int):
            self._agent = (said["pid"], self._started(said["pid"]))
        return said

    def _launch(self, path: str) -> dict[str, Any]:
        with open(path, encoding="utf-8") as file:
            node = json.load(file)
        paths = [str(one) for one in node.get("paths", ())]
        program = f"import sys; sys.path += {paths!r}; from {self._module} import main; main({path!r})"
        argv = [str(node["python"]), "-I", *(["-S"] if paths else []), "-c", program]
        try:
            done = subprocess.run(
                [argv[0], "-I", "-S", "-c", self._launcher, json.dumps(argv)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd="/",
                env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"},
                start_new_session=True,
                timeout=30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"problem": "the process that launches the node's agent did not exit within 30 s"}
        lines = done.stdout.decode(errors="replace").strip().splitlines()
        if not lines:
            return {
                "problem": (
                    f"the launcher did not start the node's agent: {done.stderr.decode(errors='replace')[-400:]}"
                )
            }
        said: dict[str, Any] = json.loads(lines[-1])
        return said

    def _started(self, pid: int) -> str:
        """Return the start time of a process in kernel ticks, or "" for an exited process."""
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]


_OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "connect": connect,
    "look": look,
    "reserve": reserve,
    "release": release,
    "agent": agent,
}

if __name__ == "__main__":
    main()
