"""Paths of the product's files on this machine: home directory, run directories, sockets, agent files.

    $SERVERLESS_GPU_HOME (default ~/.serverless_gpu), 0700
    ├── runs/<run>/<fence>/    one attempt: spec, payload, entrypoint, logs, results, failures, facts, receipt
    ├── remote/<run>/<fence>/  results of a server's runs, copied for their callers
    ├── locks/                 locks of fakes and CPU slots (real GPUs are locked machine-wide)
    ├── environments/          captured environments (`store/`), restored environments, and their indexes
    ├── mlflow/<key>/          MLflow servers in front of this home's store and of callers' own stores
    ├── checkpoints/<run>/<fence>/   checkpoints of attempts; this package never deletes them
    ├── config.toml            own GPU types, prices
    ├── instance               identity of this home for the server that it joined
    ├── tracking/              attempts that are not delivered to MLflow yet
    └── agent.log, monitor.log

Sockets are in /tmp, in a directory that only this user can enter. The home directory is unsuitable for sockets, because
Linux limits a socket path to 107 bytes. Network file systems also do not support sockets. If the home directory is not
writable, local runs use a directory under the temporary directory. `Home.note` names the fallback directory. Servers,
logins and secrets have no fallback directory (`find_durable_home`).

A machine belongs to a Ray pool while a process locks server/ray/keeper.lock (`sgpu up --engine ray`) or ray/keeper.lock
(`sgpu join`) in its home directory. On a machine in a Ray pool, Landlock confines the signals of ranks
(`inside/linux.py`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.errors import StorageError
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.operating_system import lacks_inodes

_ATTEMPT_DIRECTORIES = ("logs", "results", "failures")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = "the directory is read-only"


class Home:
    """The home directory of one user on this machine."""

    def __init__(self, root: Path, note: str = "") -> None:
        self.root = root
        self.note = note  # Message for the user if `root` is the fallback directory, else "".

    @property
    def runs(self) -> Path:
        """Return the directory of all runs."""
        return self.root / "runs"

    @property
    def remote(self) -> Path:
        """Return the directory for copied results of server runs."""
        return self.root / "remote"

    @property
    def locks(self) -> Path:
        """Return the directory of locks for fakes and CPU slots."""
        return self.root / "locks"

    @property
    def environments(self) -> Path:
        """Return the directory of captured and restored environments."""
        return self.root / "environments"

    @property
    def checkpoints(self) -> Path:
        """Return the default directory of checkpoints."""
        return self.root / "checkpoints"

    @property
    def agent_log(self) -> Path:
        """Return the log file of the agent and its zygotes."""
        return self.root / "agent.log"

    def principal_log(self, uid: int) -> Path:
        """Return the log file of the zygotes of a principal."""
        return self.root / f"agent-{uid}.log"

    @property
    def monitor_log(self) -> Path:
        """Return the log file of the monitor."""
        return self.root / "monitor.log"

    @property
    def tracking(self) -> Path:
        """Return the directory that lists attempts with undelivered data for MLflow."""
        return self.root / "tracking"

    def attempt(self, run_id: str, fence: int) -> Path:
        """Return the directory of one attempt."""
        return self.runs / run_id / str(fence)

    def sockets(self) -> Path:
        """Return the private socket directory of this home, after creating it if needed. Raises StorageError."""
        parent = account_sockets()
        digest = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:12]
        return _socket_directory(parent / digest)

    def make_attempt(self, run_id: str, fence: int) -> Path:
        """Create the directory of one attempt completely or not at all. Raises StorageError."""
        directory = self.attempt(run_id, fence)
        try:
            directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.mkdir(mode=0o700)
        except OSError as error:
            self._remove_if_empty(directory.parent)
            raise storage_error(error, directory) from None
        try:
            for name in _ATTEMPT_DIRECTORIES:
                (directory / name).mkdir(mode=0o700)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            self._remove_if_empty(directory.parent)
            raise storage_error(error, directory) from None
        return directory

    def remove_run(self, run_id: str) -> None:
        """Remove all files of a run."""
        remove_at_once(self.runs / run_id)

    def _remove_if_empty(self, directory: Path) -> None:
        with contextlib.suppress(OSError):
            directory.rmdir()


def account_sockets() -> Path:
    """Return the private socket directory of this account, or create it. Raises StorageError."""
    # $XDG_RUNTIME_DIR is unsuitable, because terminals, notebook servers and cron jobs of one user may have different
    # values. The system also empties $XDG_RUNTIME_DIR at the user's last logout, while runs may still be running.
    return _socket_directory(Path(os.environ.get("SERVERLESS_GPU_SOCKETS") or f"/tmp/serverless_gpu-{os.getuid()}"))


def _socket_directory(directory: Path) -> Path:
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make {directory}, the directory for sockets: {error.strerror}",
            hint="set SERVERLESS_GPU_SOCKETS to a short directory that you can write to"
            + _in_container(error.strerror),
        ) from error
    if not _private_directory(directory):
        raise StorageError(
            f"{directory} belongs to another user or is a link",
            hint="remove the directory or link, or set SERVERLESS_GPU_SOCKETS to a directory that you own",
        )
    return directory


def remove_at_once(directory: Path) -> None:
    """Rename a run directory before its removal, so that later writes of other processes fail."""
    gone = directory.with_name(f".{directory.name}.removed")
    with contextlib.suppress(OSError):
        directory.rename(gone)
    for path in (gone, directory):
        shutil.rmtree(path, ignore_errors=True)


def find_home(environ: Mapping[str, str]) -> Home:
    """Return the user's home directory for runs. Create the directory if needed. Raises StorageError."""
    wanted = _asked(environ)
    problem = _make_private(wanted)
    if problem is None:
        return Home(wanted)
    fallback = Path(environ.get("TMPDIR") or "/tmp") / f"serverless_gpu-home-{os.getuid()}"
    second = _make_private(fallback)
    if second is not None:
        raise StorageError(
            f"neither {wanted} ({problem}) nor {fallback} ({second}) can be written to",
            hint=f"set SERVERLESS_GPU_HOME to a directory you can write to{_in_container(second)}",
        )
    return Home(fallback, f"{wanted} cannot be written to ({problem}), so this run's files are under {fallback}")


def find_durable_home(environ: Mapping[str, str], why: str) -> Home:
    """Return the requested home directory, created if needed, without a fallback. Raises StorageError.

    `why` is the end of the error message, for example ``"the server keeps its database there"``.
    """
    wanted = _asked(environ)
    problem = _make_private(wanted)
    if problem is not None:
        raise StorageError(
            f"{wanted} cannot be written to ({problem}), and {why}",
            hint="make the home directory writable, or set SERVERLESS_GPU_HOME to a directory you can write to",
        )
    return Home(wanted)


def _in_container(problem: str | None) -> str:
    if problem not in (os.strerror(errno.EROFS), _READ_ONLY):
        return ""
    return "; in a container with a read-only root, mount a volume at /tmp (Kubernetes: emptyDir)"


def storage_error(error: OSError, path: Path) -> StorageError:
    """Return a user-facing error for a failed write to a file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(
            f"cannot create {path}: too many open files",
            hint="raise `ulimit -n`, or start fewer runs at once: each handle of a running run keeps one file open",
        )
    if error.errno in _FULL and lacks_inodes(path):
        return StorageError(
            f"no inodes left for {path}: its disk has space, but cannot store one more file",
            hint="delete files on that disk (`sgpu clean` removes old runs, `sgpu env gc` environments), or set "
            "SERVERLESS_GPU_HOME to a directory on a disk with more inodes",
        )
    if error.errno in _FULL:
        return StorageError(
            f"no space left for {path}",
            hint="free some space, or set SERVERLESS_GPU_HOME to a directory on another disk",
        )
    return StorageError(
        f"cannot write {path}: {error.strerror}", hint="set SERVERLESS_GPU_HOME to a directory you can write to"
    )


def _asked(environ: Mapping[str, str]) -> Path:
    """Return the home directory that the user requested. Raises StorageError if the path is not UTF-8."""
    asked = environ.get("SERVERLESS_GPU_HOME")
    wanted = Path(asked).absolute() if asked else Path(os.path.expanduser("~/.serverless_gpu"))
    try:
        str(wanted).encode()
    except UnicodeEncodeError:
        raise StorageError(f"the home directory {str(wanted)!r} is not UTF-8", hint="set SERVERLESS_GPU_HOME") from None
    return wanted


def _make_private(path: Path) -> str | None:
    """Create a directory that only its owner can enter. Return an error message, or None on success."""
    try:
        path.mkdir(parents=True, mode=0o700, exist_ok=True)
        # The path may be a link to another directory of the same user, for example on a larger disk.
        if not _owned_directory(str(path)):
            return "the directory belongs to another user" if path.exists() else "the path is not a directory"
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o700)
        for name in ("runs", "locks", "checkpoints"):
            (path / name).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        if error.errno in _FULL and lacks_inodes(path):
            return "No inodes left on device"
        return error.strerror or str(error)
    return None if os.access(path, os.W_OK | os.X_OK) else _READ_ONLY


def _owned_directory(path: str) -> bool:
    if not path:
        return False
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _private_directory(path: Path) -> bool:
    """Return True if a path is this user's directory and not a link. Revoke other users' access."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return True


RAY_PLACES = ("server/ray", "ray")
RAY_LOCK = "keeper.lock"


def ray_keepers(home: Path) -> list[Path]:
    """Return the directories in a home directory whose keeper process runs a Ray cluster."""
    return [home / place for place in RAY_PLACES if held_note(home / place / RAY_LOCK) is not None]


def in_pool(attempt: Path) -> bool:
    """Return True if the home of ``<home>/runs/<run>/<fence>`` currently belongs to a Ray pool."""
    return bool(ray_keepers(attempt.parents[2])) if len(attempt.parents) > 2 else False
