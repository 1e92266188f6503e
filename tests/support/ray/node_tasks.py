"""A node task for tests: a rank process in the environment that has Ray, and this side of it as supervisor and stem."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serverless_gpu.node.inside import linux, payload, protocol
from serverless_gpu.node.inside.call import dump_call
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.inside.raycluster.share import ClusterShare
from tests.support.local.observe import Process
from tests.support.node.rank_process import INSIDE
from tests.support.paths import REPOSITORY

PYTHON = Path(sys.prefix) / "ray" / "bin" / "python"
LIMIT_S = 90.0

_RANK = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location(
    "_sgpu_inside", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
)
sys.modules["_sgpu_inside"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["_sgpu_inside"])
from _sgpu_inside import channel, rank
from _sgpu_inside.raycluster import pid_namespace, ray_start, task
exec(sys.argv[4])
os._exit(rank.main(channel.Channel.adopt(int(sys.argv[2])), channel.Channel.adopt(int(sys.argv[3]))))
"""


def share(directory: Path, **changes: Any) -> ClusterShare:
    """Return a node's share of a cluster of one node with two fake H100.

    Args:
        directory: of the cluster; short, for sockets lie in it.
        changes: fields that are otherwise.
    """
    plain = ClusterShare(
        directory=str(directory),
        devices=2,
        accelerator="H100",
        cpus=3,
        object_store_bytes=100_000_000,
        dashboard=False,
        node_rank=0,
        num_nodes=1,
        host="node-of-the-test",
        address="127.0.0.1",
        head=("127.0.0.1", 0),
        secret=secrets.token_hex(32),
    )
    return plain._replace(**changes)


class NodeTask:
    """A node task, from its "go" to its end.

    Args:
        attempt: directory of the attempt; made.
        own: its share of the cluster.
        function: of an importable module, called with `args`.
        python: the interpreter it runs in.
        before: code that runs there before it is told anything; sees `rank` and the modules of `raycluster`.
        environ: variables besides this process's own.
    """

    def __init__(
        self,
        attempt: Path,
        own: ClusterShare,
        function: Callable[..., object],
        *args: object,
        python: Path = PYTHON,
        before: str = "",
        **environ: str,
    ) -> None:
        self.attempt, self.share, self.python = attempt, own, python
        for name in ("results", "failures", "logs"):
            (attempt / name).mkdir(parents=True)
        dump_call(str(attempt / "call.pkl"), function=function, args=args, kwargs={}, sources={})
        channel, theirs = pair()
        self.events, speaks = pair()
        self.events.sock.settimeout(LIMIT_S)
        self.said: list[protocol.Message] = []
        fds = (theirs.fileno(), speaks.fileno())
        argv = [str(python), "-c", _RANK, str(INSIDE), *map(str, fds), before]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.child = subprocess.Popen(argv, pass_fds=fds, env=environment)
        self.process = Process(self.child.pid)
        theirs.close()
        speaks.close()
        self._go(channel, {**environment, "CUDA_VISIBLE_DEVICES": "0,1", "RANK": "0", **environ})
        channel.close()

    def named(self, name: str) -> list[Process]:
        """Return the processes below it that are called so."""
        found = []
        for pid in linux.descendants(self.child.pid):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                    found.append(Process(pid))
        return found

    def _go(self, channel: Channel, environment: dict[str, str]) -> None:
        message: protocol.Message = {
            "op": "rank",
            "rank": self.share.node_rank,
            "env": environment,
            "directory": str(self.attempt),
            "world_size": 1,
            "local_rank": 0,
            "local_world_size": 1,
            "command": None,
            "result_bytes_max": 1 << 30,
            "umask": 0o022,
            "descriptors_max": 4096,
            "cwd": str(self.attempt),
            "argv": ["test"],
            "sys_path": ["", str(REPOSITORY), str(REPOSITORY / "src"), *_paths(self.python)],
            "threads": 1,
            "tracked": False,
            "ray": {**self.share._asdict(), "head": list(self.share.head)},
        }
        files = [os.open(self.attempt / "logs" / name, os.O_WRONLY | os.O_CREAT, 0o600) for name in ("out", "err")]
        gate, gate_write = os.pipe()
        release, self._release = os.pipe()
        fds = (*files, gate_write, release)
        channel.send(protocol.encode(message), fds)
        for fd in (*fds, gate):
            os.close(fd)

    def hear(self) -> protocol.Message | None:
        """Return the next event, or None when there are no more; lets the rank go when it has returned."""
        received = self.events.receive()
        if received is None:
            return None
        event = protocol.decode(received[0])
        self.said.append(event)
        if event["event"] == "returned" and self._release >= 0:
            os.close(self._release)
            self._release = -1
        return event

    def hear_until(self, name: str) -> protocol.Message:
        """Return the next event of a name."""
        while (event := self.hear()) is not None:
            if event["event"] == name:
                return event
        raise AssertionError(f"it ended without {name}: {self.said}\n{self.output()}")

    def end(self) -> int:
        """Take its events until there are no more, and return how it ended, a signal as a negative number."""
        while self.hear() is not None:
            pass
        return self.child.wait(LIMIT_S)

    def value(self) -> object:
        """Return what the function returned."""
        return payload.load(str(self.attempt / "results" / f"{self.share.node_rank}.pkl"))

    def failure(self) -> dict[str, object]:
        """Return the failure it told."""
        failure = self.hear_until("failed")["failure"]
        assert isinstance(failure, dict)
        return failure

    def output(self) -> str:
        """Return what was printed."""
        return "".join((self.attempt / "logs" / name).read_text(errors="replace") for name in ("out", "err"))

    def sentences(self) -> list[str]:
        """Return what it had to say to the caller."""
        return [str(event["text"]) for event in self.said if event["event"] == "say"]

    def close(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send(signal.SIGKILL)
        self.child.wait(LIMIT_S)
        self.events.close()
        if self._release >= 0:
            os.close(self._release)


@contextmanager
def node_task(
    attempt: Path, own: ClusterShare, function: Callable[..., object], *args: object, **options: Any
) -> Iterator[NodeTask]:
    """Have a node task, which is gone at the end; options as for `NodeTask`."""
    task = NodeTask(attempt, own, function, *args, **options)
    try:
        yield task
    finally:
        task.close()


@contextmanager
def cluster_directory() -> Iterator[Path]:
    """Make a directory for one node's part of a cluster and hold it as a supervisor does: agents sweep others."""
    path = Path(f"/tmp/sgpu-ray-{secrets.token_hex(4)}")
    path.mkdir(0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _paths(python: Path) -> list[str]:
    asked = subprocess.run(
        [str(python), "-c", "import sys; print(*sys.path[1:], sep='\\n')"], capture_output=True, text=True, check=True
    )
    return [line for line in asked.stdout.splitlines() if line]
