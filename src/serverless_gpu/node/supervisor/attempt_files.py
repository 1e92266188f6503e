"""The files of an attempt that its ranks see, and their paths for the ranks.

    without a sandbox    the ranks use the paths of the node
    level `sandbox`      call.pkl, stop/                  read-only   ─┐
                         results/ failures/ work/         writable     ├─ mounted at `sandbox.ATTEMPT`
                         checkpoints of the run           writable     │
                         secrets/                         copied      ─┘
                         facts, receipt, logs, order      not visible
    level `user`         the same, mounted at `sandbox.ATTEMPT`/<name of the attempt>, because the attempts of a zygote
                         share a mount namespace

The supervisor mounts the files after it has locked the devices, because a stem stands by before its attempt is known.
Files of the ranks belong to the principal. All other files of the attempt belong to the node. The copies of the secrets
exist in memory, in the mount namespace of the ranks only (`gang.py` then removes the node's files).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from serverless_gpu.errors import IsolationUnavailable
from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.isolation import NONE, SANDBOX, USER, Level
from serverless_gpu.node.base.protocol import Account, Launch
from serverless_gpu.node.inside import sandbox
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.isolation.views import gpu_nodes, network_nodes
from serverless_gpu.node.spawner.ownership import CALL, WRITTEN, reclaim
from serverless_gpu.node.spawner.verbs import Spawner

STOP_FILE = "stop_reason"


class Shown(NamedTuple):
    """The mount namespace of an attempt (-1 at the level `none`), and a note for the receipt, or ""."""

    namespace: int
    note: str


class AttemptFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of an attempt's files, on the node and for its ranks.

    Attributes:
        uid: uid of the ranks; 0 at the isolation level `none`.
        level: isolation level of the ranks.
        stop_file: file with the reason of a stop, on the node.
        ranks_directory: directory of `call.pkl`, `results` and `failures`, for the ranks.
        ranks_work: working directory of ranks that cannot use the caller's working directory, or "".
        ranks_secrets: directory of the secrets, for the ranks.
        ranks_cluster: directory of a Ray cluster, for the ranks, or "" for the path of the node.
        variables: environment variables with paths, for the ranks.
        made: directories that the supervisor makes and gives to the principal.
        grafts: files that the supervisor mounts for the ranks.
        has_peers: True if the run has ranks on other nodes, which the ranks may reach through InfiniBand.
    """

    uid: int
    level: Level = NONE
    stop_file: Path
    ranks_directory: str
    ranks_work: str
    ranks_secrets: str
    ranks_cluster: str
    variables: Mapping[str, str]
    made: Sequence[Path] = ()
    grafts: Sequence[Graft] = ()
    has_peers: bool = False

    def show(
        self,
        spawner: Spawner,
        stem_pidfd: int,
        devices: Sequence[Device],
        cluster: str = "",
        cgroup: Path | None = None,
    ) -> Shown:
        """Mount files and GPUs for the ranks of a stem. At the level `none`, do nothing.

        `cluster` is the directory of the attempt's Ray cluster, or "". `cgroup` is the attempt's cgroup v2, or None.
        Raises OSError or IsolationUnavailable.
        """
        if not self.uid:
            return Shown(-1, "")
        own = [*self.made, *([Path(cluster)] if cluster else [])]
        nodes: list[str] = []
        if self.level == SANDBOX:  # Ranks at the level `user` see the device nodes of the node.
            nodes += gpu_nodes([device.uuid for device in devices if device.kind is DeviceKind.GPU])
            nodes += network_nodes() if self.has_peers else []
        more = [Graft(path, path, device=True) for path in nodes]
        if cluster:
            more.append(Graft(cluster, self.ranks_cluster, writable=True))
        for path in own:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            spawner.give(self.uid, str(path), writable=True)
        self.stop_file.parent.mkdir(mode=0o755, exist_ok=True)
        there = [each for each in (*self.grafts, *more) if os.path.exists(each.source)]
        for each in there:
            if each.at == f"{self.ranks_directory}/{CALL}":  # The principal's group may read the call.
                spawner.give(self.uid, each.source, writable=False)
        namespace = spawner.show(stem_pidfd, there)
        is_sandbox = self.level == SANDBOX
        note = spawner.limit_devices("" if cgroup is None else str(cgroup), nodes) if is_sandbox else ""
        return Shown(namespace, note)

    def take_back(self, spawner: Spawner, namespace: int) -> str:
        """Make the node the owner of the attempt's files after the last rank has ended.

        Return a problem, or "". `namespace` is the descriptor of `show`. At the level `user`, later attempts of the
        principal use the same mount namespace. The files of this attempt therefore leave the namespace.
        """
        if self.level == USER:
            with contextlib.suppress(OSError, IsolationUnavailable):  # The mounts end with the principal's zygote.
                spawner.hide(namespace, self.ranks_directory)
        call = [Path(each.source) for each in self.grafts if each.at == f"{self.ranks_directory}/{CALL}"]
        return reclaim(spawner, [*self.made, *call])


def attempt_files(
    launch: Launch, checkpoints: str = "", *, uid: int = 0, user_home: str = "", account: Account | None = None
) -> AttemptFiles:
    """Return the paths of an attempt. `checkpoints` is the node's directory of checkpoints, or "".

    `uid`, `user_home` and `account` belong to the run's principal. At the level `none`, `uid` is 0. A principal with a
    uid of the range has no account.
    """
    level = launch.isolation
    directory, secrets = Path(launch.directory), "" if launch.secrets is None else launch.secrets.directory
    run = f"{checkpoints}/{launch.run_id}" if checkpoints else ""
    if not uid:
        variables = {"SGPU_STOP_FILE": str(directory / STOP_FILE)}
        if run:
            variables["SGPU_CHECKPOINT_DIR"] = f"{run}/{launch.fence}"
        return AttemptFiles(
            uid=0,
            stop_file=directory / STOP_FILE,
            ranks_directory=launch.directory,
            ranks_work="",
            ranks_secrets=secrets,
            ranks_cluster="",
            variables=variables,
        )
    base = sandbox.ATTEMPT if level == SANDBOX else f"{sandbox.ATTEMPT}/{_short_name(launch)}"
    user = sandbox.USER if account is None else account.name
    home = {
        "HOME": sandbox.HOME if account is None and level == SANDBOX else user_home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "TMPDIR": "/tmp",
    }
    variables = {"SGPU_STOP_FILE": f"{base}/stop/{STOP_FILE}", **home}
    writable = {str(directory / name): f"{base}/{name}" for name in WRITTEN}
    if run:
        variables["SGPU_CHECKPOINT_DIR"] = f"{base}/checkpoints/{launch.fence}"
        writable[run] = f"{base}/checkpoints"
    shown = {str(directory / name): f"{base}/{name}" for name in (CALL, "stop")}
    return AttemptFiles(
        uid=uid,
        level=level,
        has_peers=len(launch.all_crews) > 1,
        stop_file=directory / "stop" / STOP_FILE,
        ranks_directory=base,
        ranks_work=f"{base}/work",
        ranks_secrets=f"{base}/secrets",
        ranks_cluster=f"{base}/cluster",
        variables=variables,
        made=tuple(map(Path, writable)),
        grafts=(
            *(Graft(source, at) for source, at in shown.items()),
            *(Graft(source, at, writable=True) for source, at in writable.items()),
            *((Graft(secrets, f"{base}/secrets", owner=uid),) if secrets else ()),
        ),
    )


def _short_name(launch: Launch) -> str:
    """Return a name for the attempt that keeps the paths of its Unix sockets short."""
    return hashlib.sha256(f"{launch.run_id} {launch.fence}".encode()).hexdigest()[:8]
