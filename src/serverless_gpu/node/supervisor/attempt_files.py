"""The files of an attempt that its ranks see, and their paths for the ranks.

    without a sandbox    the ranks use the paths of the node
    in a sandbox         call.pkl, stop/, secrets/        read-only   ─┐
                         results/ failures/ work/         writable     ├─ mounted below `sandbox.ATTEMPT`
                         checkpoints of the run           writable    ─┘
                         facts, receipt, logs, order      not visible

The supervisor mounts the files after it has locked the devices, because a stem stands by before its attempt is known.
Files of the ranks belong to the principal. All other files of the attempt belong to the node.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.node.base.protocol import Account, Launch
from serverless_gpu.node.inside import sandbox
from serverless_gpu.node.isolation.grafts import Graft, graft
from serverless_gpu.node.isolation.views import gpu_nodes

STOP_FILE = "stop_reason"
_WRITABLE = (("results", sandbox.RESULTS), ("failures", sandbox.FAILURES), ("work", sandbox.WORK))


class AttemptFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Paths of an attempt's files, on the node and for its ranks.

    Attributes:
        uid: uid of the ranks in their sandbox; 0 without a sandbox.
        account: account of the operating system with this uid; None for a uid of the range.
        stop_file: file with the reason of a stop, on the node.
        ranks_directory: directory of `call.pkl`, `results` and `failures`, for the ranks.
        ranks_work: working directory of ranks that cannot use the caller's working directory, or "".
        ranks_secrets: directory of the secrets, for the ranks.
        ranks_cluster: directory of a Ray cluster, for the ranks, or "" for the path of the node.
        variables: environment variables with paths, for the ranks.
        made: directories that the supervisor makes and gives to the principal.
        grafts: files that the supervisor mounts into the sandbox.
    """

    uid: int
    stop_file: Path
    ranks_directory: str
    ranks_work: str
    ranks_secrets: str
    ranks_cluster: str
    variables: Mapping[str, str]
    account: Account | None = None
    made: Sequence[Path] = ()
    grafts: Sequence[Graft] = ()

    @property
    def gid(self) -> int:
        """Return the primary group of the ranks. A uid of the range has a group with its number."""
        return self.uid if self.account is None else self.account.gid

    def show(self, stem_pidfd: int, devices: Sequence[Device], cluster: str = "") -> None:
        """Mount files and GPUs into the sandbox of a stem. Without a sandbox, do nothing. Raises OSError.

        `cluster` is the directory of the attempt's Ray cluster, or "".
        """
        if not self.uid:
            return
        own = [*self.made, *([Path(cluster)] if cluster else [])]
        gpus = gpu_nodes([device.uuid for device in devices if device.kind is DeviceKind.GPU])
        more = [Graft(path, path, device=True) for path in gpus]
        if cluster:
            more.append(Graft(cluster, sandbox.CLUSTER, writable=True))
        for path in own:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chown(path, self.uid, self.gid)
        self.stop_file.parent.mkdir(mode=0o755, exist_ok=True)
        there = [each for each in (*self.grafts, *more) if os.path.exists(each.source)]
        for each in there:
            if each.at in (sandbox.CALL, sandbox.SECRETS):
                self._make_readable(each.source)
        graft(stem_pidfd, there)

    def _make_readable(self, path: str) -> None:
        """Let the principal read a file, or a directory and its files.

        The group of a uid of the range has no other member. The primary group of an account may have other members, so
        the account becomes the owner of the files. The mount is read-only in both cases.
        """
        owner, group, mode = (-1, self.uid, 0o440) if self.account is None else (self.uid, -1, 0o400)
        if os.path.isdir(path):  # The node stays the owner, because it removes only directories of its own.
            os.chown(path, -1, self.gid)
            os.chmod(path, 0o750)
        for file in [os.path.join(path, name) for name in os.listdir(path)] if os.path.isdir(path) else [path]:
            os.chown(file, owner, group)
            os.chmod(file, mode)


def attempt_files(launch: Launch, checkpoints: str = "", uid: int = 0, account: Account | None = None) -> AttemptFiles:
    """Return the paths of an attempt. `checkpoints` is the node's directory of checkpoints, or ""."""
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
    user = sandbox.USER if account is None else account.name
    variables = {
        "SGPU_STOP_FILE": f"{sandbox.STOP}/{STOP_FILE}",
        "HOME": sandbox.HOME if account is None else account.home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/sh",
        "TMPDIR": "/tmp",
    }
    writable = {str(directory / name): at for name, at in _WRITABLE}
    if run:
        variables["SGPU_CHECKPOINT_DIR"] = f"{sandbox.CHECKPOINTS}/{launch.fence}"
        writable[run] = sandbox.CHECKPOINTS
    shown = {str(directory / "call.pkl"): sandbox.CALL, str(directory / "stop"): sandbox.STOP}
    if secrets:
        shown[secrets] = sandbox.SECRETS
    return AttemptFiles(
        uid=uid,
        stop_file=directory / "stop" / STOP_FILE,
        ranks_directory=sandbox.ATTEMPT,
        ranks_work=sandbox.WORK,
        ranks_secrets=sandbox.SECRETS,
        ranks_cluster=sandbox.CLUSTER,
        variables=variables,
        account=account,
        made=tuple(map(Path, writable)),
        grafts=(
            *(Graft(source, at) for source, at in shown.items()),
            *(Graft(source, at, writable=True) for source, at in writable.items()),
        ),
    )
