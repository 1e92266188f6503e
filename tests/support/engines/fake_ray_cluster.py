"""A Ray without Ray: a process that answers as `ray_driver.py` does, out of a file that a test writes.

It is started as an interpreter that has Ray: `FakeRay.python` ignores its arguments. What is in the file:

    nodes     rows of the node table          groups    placement groups, by name
    agents    what actors say, by node        problems  what Ray raises, by operation       late  what is never answered
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def _opened(path: Path) -> Iterator[dict[str, Any]]:
    """Yield what is in the file, and write it back whole: whoever does so may be killed at any time."""
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(path.read_text(encoding="utf-8"))
        yield state
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(state), encoding="utf-8")
        fresh.replace(path)


class FakeRay:
    """A cluster that is a file, and a head that is a port.

    Args:
        directory: an empty one.
        offers: resources of each node, by name.

    Attributes:
        python: what is started as an interpreter that has Ray.
    """

    def __init__(self, directory: Path, offers: dict[str, dict[str, float]]) -> None:
        self._state = directory / "ray.json"
        nodes = [_node(name, f"id-{name}", offered) for name, offered in offers.items()]
        empty: dict[str, Any] = {"groups": {}, "agents": {}, "problems": {}, "late": [], "asked": {}}
        self._state.write_text(json.dumps({"nodes": nodes, **empty}), encoding="utf-8")
        self.python = directory / "python"
        program = f"#!/bin/sh\nexec '{sys.executable}' -I -S '{__file__}' '{self._state}'\n"
        self.python.write_text(program, encoding="utf-8")
        self.python.chmod(0o700)
        self._head = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._head.getsockname()[1])

    @contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """Yield what is in the file; what is in it afterwards, is."""
        with _opened(self._state) as state:
            yield state

    def lose(self, name: str) -> None:
        """Let a node be dead: its row stays, without what it offered."""
        with self.changed() as state:
            for node in state["nodes"]:
                if node["NodeID"] == f"id-{name}":
                    node.update(Alive=False, Resources={}, DeathReasonMessage="it missed too many heartbeats")

    def bring_back(self, name: str, offered: dict[str, float]) -> None:
        """Let Ray be started on a node again: it is another row."""
        with self.changed() as state:
            state["nodes"].append(_node(name, f"id-{name}-{len(state['nodes'])}", offered))

    def head_ends(self) -> None:
        """Let the head's port answer nobody."""
        self._head.close()

    def head_comes_back(self, *, empty: bool) -> None:
        """Let the head's port answer again."""
        self._head = socket.create_server(("127.0.0.1", self.port), backlog=128)
        if empty:
            with self.changed() as state:
                state["groups"] = {}

    def close(self) -> None:
        """Close the port."""
        self._head.close()


def _node(name: str, node: str, offered: dict[str, float]) -> dict[str, Any]:
    resources = {"node:127.0.0.11": 1.0, f"sgpu_node:{name}": 1.0, **offered}
    return {"NodeID": node, "Alive": True, "NodeManagerAddress": "127.0.0.11", "Resources": resources}


# --- the process: nothing of pytest or of ours is imported here -------------------------------------------------------


def _answer(state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    match request["op"]:
        case "look":
            return {"nodes": state["nodes"], "groups": list(state["groups"].values()), "free": _free(state)}
        case "reserve":
            return _reserve(state, request["name"], request["bundles"])
        case "release":
            return {"was_there": state["groups"].pop(request["name"], None) is not None}
        case "agent":
            said: dict[str, Any] = state["agents"].get(request["node"], {"pid": 1, "started": False})
            return said
    return {}


def _free(state: dict[str, Any]) -> dict[str, dict[str, float]]:
    free = {node["NodeID"]: dict(node["Resources"]) for node in state["nodes"] if node["Alive"]}
    for group in state["groups"].values():
        for bundle in group["bundles"]:
            for resources in free.values():
                if any(key.startswith("sgpu_node:") and key in resources for key in bundle):
                    for key, count in bundle.items():
                        resources[key] = resources.get(key, 0) - count
    return free


def _reserve(state: dict[str, Any], name: str, bundles: list[dict[str, float]]) -> dict[str, Any]:
    group = state["groups"].get(name)
    if group is None:
        group = {"name": name, "bundles": bundles, "state": "CREATED", "stats": {"scheduling_state": "FINISHED"}}
        trial = {**state, "groups": {**state["groups"], name: group}}
        if any(count < 0 for resources in _free(trial).values() for count in resources.values()):
            refused = {**group, "state": "PENDING", "stats": {"scheduling_state": "NO_RESOURCES"}}
            return {"group": refused, "nodes": state["nodes"], "free": _free(state)}
        state["groups"][name] = group
    return {"group": group, "nodes": [], "free": {}}


def _serve(path: Path) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        operation = request["op"]
        with _opened(path) as state:
            state["asked"][operation] = state["asked"].get(operation, 0) + 1
            state["child"] = os.getpid()
            if operation in state["late"]:
                continue
            answer: dict[str, Any] = {"id": request["id"]}
            if operation in state["problems"]:
                answer["problem"] = state["problems"][operation]
            else:
                answer["ok"] = _answer(state, request)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
