"""docs/how-to/one-machine-to-many.md, step by step, on two machines: network namespaces with a wire between them.

Each has a name, an identity, a home and the page's address. What a reader would type is what the page says, but for the
installation and for `scp`, which copies from the other home.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray.pools import START_S, end_of_machine, remove_directory_of_ray
from tests.e2e.ray.user_environment import UserEnvironment
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.network.namespaces import entering, ip, need_root
from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(900)]

_PAGE = (REPOSITORY / "docs" / "how-to" / "one-machine-to-many.md").read_text(encoding="utf-8")
_ADDRESSES = {"gpu-1": "10.0.0.5", "gpu-2": "10.0.0.6"}
_SERVER = ("starlette", "uvicorn", "uvloop", "httptools", "sqlalchemy", "alembic", "psycopg", "obstore")
_NAMES = ("ray", *_SERVER, "cryptography", "prometheus-client", "nvidia-ml-py", "psutil", "torch", "scikit-learn")
_AS_MACHINE = 'hostname "$1"; mount --bind "$2" /etc/machine-id; shift 2; exec "$@"'
_RUN_S = 600.0


def steps(section: str) -> list[str]:
    """Return what a section of the page has its reader type, block by block."""
    text = _PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, section
    return [re.sub(r"^\$ ", "", code, flags=re.MULTILINE) for _, code in blocks]


class Machine:
    """A machine of the page: a namespace, a name, a home.

    Args:
        name: the page's.
        namespace: where its network is.
        directory: of everything of it.
        bin: directory with `sgpu`, `python` and `scp`.
    """

    def __init__(self, name: str, namespace: str, directory: Path, bin: Path) -> None:
        self.name, self.home = name, directory / name
        self.home.mkdir(mode=0o700)
        identity = directory / f"{name}.id"
        identity.write_text(f"{uuid.uuid4().hex}\n")
        inside = ["unshare", "--mount", "--uts", "sh", "-c", _AS_MACHINE, "sh", name, str(identity)]
        self._around = [*entering(namespace), *inside]
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("RAY_", "SGPU_", "SERVERLESS_", "PYTHON"))
        }
        self._environ = {
            **kept,
            "HOME": str(self.home),
            "PATH": f"{bin}:{os.environ['PATH']}",
            "SERVERLESS_GPU_FAKE": "H100:4",
        }
        self._programs: list[subprocess.Popen[bytes]] = []

    def begin(self, step: str, text: str) -> str:
        """Type a step whose last command goes on, and wait until it says something; return all it said."""
        path = self.home / "said"
        with path.open("wb") as said:
            program = subprocess.Popen(
                [*self._around, "bash", "-ec", step],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=self._environ,
                cwd=self.home,
                start_new_session=True,
            )
        self._programs.append(program)

        def is_said() -> bool:
            there = text in path.read_text(errors="replace")
            assert there or program.poll() is None, path.read_text(errors="replace")
            return there

        wait_for(is_said, f"{self.name} says {text!r}", limit_s=START_S)
        return path.read_text(errors="replace")

    def type(self, step: str) -> str:
        """Type a step, and return what it says; it has to end well."""
        done = subprocess.run(
            [*self._around, "bash", "-ec", step],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self._environ,
            cwd=self.home,
            check=False,
            timeout=_RUN_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def end(self) -> None:
        """End everything of it."""
        end_of_machine(self.home)
        for place in ("server/ray", "ray"):
            remove_directory_of_ray(self.home / ".serverless_gpu" / place)
        for program in self._programs:
            program.wait(60)


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    """Yield the machines of the page, with its package and Ray installed."""
    need_root()
    directory = Path(tempfile.mkdtemp(prefix="sg-how-", dir="/tmp"))
    namespaces = {name: f"sgpu-how-{os.getpid()}-{number}" for number, name in enumerate(_ADDRESSES, 1)}
    made: dict[str, Machine] = {}
    try:
        _wire(*namespaces.values())
        commands = _commands(directory)
        for name, namespace in namespaces.items():
            made[name] = Machine(name, namespace, directory, commands)
            shutil.copytree(REPOSITORY / "examples", made[name].home / "examples")
        yield made
    finally:
        for machine in made.values():
            machine.end()
        for namespace in namespaces.values():
            for pid in ip("netns", "pids", namespace).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", namespace)
        shutil.rmtree(directory, ignore_errors=True)


def _wire(one: str, two: str) -> None:
    """Make two namespaces with a wire between them, which is their way to everywhere, too."""
    for namespace in (one, two):
        ip("netns", "add", namespace)
    ip("link", "add", "lan0", "netns", one, "type", "veth", "peer", "lan0", "netns", two)
    for namespace, address in zip((one, two), _ADDRESSES.values(), strict=True):
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "lan0")
        for device in ("lo", "lan0"):
            ip("-n", namespace, "link", "set", device, "up")
        ip("-n", namespace, "route", "add", "default", "dev", "lan0")


def _commands(directory: Path) -> Path:
    """Return a directory with what the page's commands are called."""
    user = UserEnvironment(directory / "installed", os.environ, *_NAMES)
    commands = directory / "bin"
    commands.mkdir()
    copy = 'from="${1%%:*}"; exec cp "$(dirname "$HOME")/$from/${1#*:}" "$2"'
    texts = {
        "python": f'exec {user.python} "$@"',
        "sgpu": f'exec {user.python} -m serverless_gpu.cli "$@"',
        "scp": copy,
    }
    for name, text in texts.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    return commands


def test_the_page_leads_to_a_gang_over_both_machines(machines: dict[str, Machine]) -> None:
    first, second = machines["gpu-1"], machines["gpu-2"]
    (up,) = steps("Start the first machine")
    said = first.begin(up, "sgpu join 10.0.0.5 --token-file join.json")
    assert "Ray at 10.0.0.5:7900, ports 7900-7999\n" in said
    join, _ = steps("Join other machines")
    said = second.begin(join, "to the pool of https://10.0.0.5:7878; Ray here has ports 7900-7999\n")
    assert golden("ray.how_to.ray-being-started") in said
    assert "gpu-2 gives 4 H100" in said

    (look,) = steps("Inspect the pool")
    nodes, pools, doctor = look.splitlines()
    wait_for(lambda: first.type(nodes).count(" UP ") == 2, "both are there", limit_s=START_S)
    assert "8 of 8 H100" in first.type(pools)
    assert "pool-ports" not in second.type(f"{doctor} || true").partition("fail")[2]

    (gang,) = steps("Gangs over machines")
    said = first.type(gang)
    found = re.search(r"^test accuracy: ([\d.]+)%$", said, re.MULTILINE)
    assert found is not None and float(found[1]) > 90, said
    assert "'rank': 7" in said
    shown = first.type("sgpu runs")
    assert "8 H100" in shown and "gpu-1, gpu-2" in shown
