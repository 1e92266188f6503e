"""Builds the environment variables of a rank.

Later sources override earlier sources in this order: presets, the caller's variables, secrets, tracking variables, the
rank's position in the gang. Only secrets with a variable (`secrets={"HF_TOKEN": "HF_TOKEN"}`) are in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serverless_gpu.model.hardware import Device
from serverless_gpu.model.placement import (
    NODE_COMMAND_PRESETS,
    TRACKED_PRESETS,
    RankPlace,
    default_variables,
    node_variables,
    rank_places,
    rank_variables,
)
from serverless_gpu.model.secrets import DIRECTORY
from serverless_gpu.model.spec import Command
from serverless_gpu.node.base.protocol import Context, Launch, original
from serverless_gpu.node.inside.process_group import PROCESS_GROUP_VARIABLE
from serverless_gpu.node.supervisor.attempt_files import AttemptFiles


class Network(NamedTuple):
    """Addresses through which the ranks of this node reach the other nodes."""

    master: tuple[str, int]  # Address and port of rank 0's rendezvous.
    address: str = "127.0.0.1"  # Address at which other nodes reach this node.
    variables: Mapping[str, str] = {}  # Interface variables for NCCL and Gloo; the caller's values have priority.


def place_of(launch: Launch, local: int) -> RankPlace:
    """Return the rank placement of the node's process `local` (0 for one command per node).

    A Ray driver is the only member of its own gang, because no other process of the run has a rank.
    """
    if launch.spec.ray is None:
        return rank_places(launch.all_crews, launch.crew)[local]
    nodes = len(launch.all_crews)
    return RankPlace(rank=0, local_rank=0, node_rank=launch.crew, world_size=1, local_world_size=1, num_nodes=nodes)


class RankEnvironment:
    """The environment variables of one attempt's ranks on this node."""

    def __init__(self, launch: Launch, context: Context, files: AttemptFiles) -> None:
        self.tracked: Mapping[str, str] = {}  # Variables with which MLflow in a rank finds its run.
        self.secrets: Mapping[str, bytes] = {}  # Values of the run's secrets by name.
        self._launch = launch
        self._context = context
        self._files = files
        self._command = launch.spec.payload if isinstance(launch.spec.payload, Command) else None

    def of(self, local: int, devices: Sequence[Device], network: Network) -> dict[str, str]:
        """Return the environment variables of one rank.

        `devices` are the node's devices in LOCAL_RANK order.
        """
        launch = self._launch
        per_node = self._command is not None and self._command.per == "node"
        own = self._variables(place_of(launch, local), devices, network, per_node=per_node)
        presets = NODE_COMMAND_PRESETS if per_node else {}
        if launch.spec.tracker is not None:
            presets = {**presets, **TRACKED_PRESETS}
        weak = {**default_variables(devices), **presets, **network.variables}
        return {**weak, **self._callers(), **self.tracked, **own, **self._places()}

    def _variables(
        self, place: RankPlace, devices: Sequence[Device], network: Network, *, per_node: bool
    ) -> dict[str, str]:
        run_id, fence, master = self._launch.run_id, self._launch.fence, network.master
        if not per_node:
            return rank_variables(place, devices=devices, run_id=run_id, fence=fence, master=master)
        return node_variables(
            place, devices=devices, run_id=run_id, fence=fence, master=master, address=network.address
        )

    def _places(self) -> dict[str, str]:
        """Return variables with the paths of an attempt's stop reason, checkpoints, process group and secrets."""
        launch = self._launch
        places = dict(self._files.variables)
        if self._command is not None:
            places["CODE_SOURCE_PATH"] = original(self._context.cwd)
        if launch.spec.init is not None:
            places[PROCESS_GROUP_VARIABLE] = launch.spec.init
        if launch.secrets is not None:
            places[DIRECTORY] = self._files.ranks_secrets
        return places

    def _callers(self) -> dict[str, str]:
        caller = {original(name): original(value) for name, value in self._context.environ.items()}
        # If the caller is itself a rank, the caller's process group does not apply to the new run.
        caller.pop(PROCESS_GROUP_VARIABLE, None)
        if (secrets := self._launch.secrets) is not None:
            caller |= {variable: os.fsdecode(self.secrets[name]) for name, variable in secrets.variables.items()}
        if self._command is not None:
            caller["PATH"] = program_path(caller.get("PATH", os.defpath), original(self._context.python))
        return caller


def program_path(path: str, python: str) -> str:
    """Return a PATH with the environment's programs (`python`, `torchrun`), even without activation."""
    own = os.path.dirname(python)
    return path if own in path.split(os.pathsep) else f"{own}{os.pathsep}{path}"
