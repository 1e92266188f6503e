"""What Ray's processes on a node are told: arguments, variables, ports; and what they wrote last."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu.node.inside.raycluster import ray_installation, ray_start
from tests.support.node.rank_process import run_rank
from tests.support.node.ray_cluster import SHARE


def test_ports_lie_outside_of_what_the_kernel_gives_and_are_all_different(tmp_path: Path) -> None:
    given = tmp_path / "range"
    given.write_text("32768\t60999\n")
    found = ray_start.find_ports(range_file=str(given))
    assert len(set(found)) == len(found)
    assert all(11_000 <= port < 32_768 for port in found)
    given.write_text("9000\t61000\n")
    assert all(port > 61_000 for port in ray_start.find_ports(range_file=str(given)))


@pytest.mark.parametrize(
    ("nodes", "listens", "given"),
    [(1, "127.0.0.1", False), (1, "", False), (1, "127.0.0.11", True), (2, "127.0.0.11", False), (2, "", False)],
)
def test_a_port_somebody_listens_on_where_ray_will_is_not_given(nodes: int, listens: str, given: bool) -> None:
    said = run_rank(
        """
import socket
from _sgpu_inside.raycluster import ray_start
address, listens = sys.argv[2:]
taken = ray_start.find_ports("")[0]
ray_start._port_range = lambda _: (taken, taken + len(ray_start.Ports._fields) + 5)  # a few more than it takes
with socket.create_server((listens, taken)):
    print(any(taken in ray_start.find_ports(address) for _ in range(20)))
print(any(taken in ray_start.find_ports(address) for _ in range(20)))
""",
        ray_start.listens_at(SHARE._replace(num_nodes=nodes)),
        listens,
    )
    assert said == f"{given}\nTrue\n"


def test_a_ray_that_only_this_process_knows_is_found_by_those_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"PYTHONPATH": f"/one{os.pathsep}/two"}
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("print('found')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert ray_installation.python_path(told) == {"PYTHONPATH": os.pathsep.join([str(tmp_path), "/one", "/two"])}
    more = ray_installation.python_path({})
    done = subprocess.run([sys.executable, "-P", "-c", "import ray"], env={**os.environ, **more}, capture_output=True)
    assert done.stdout == b"found\n", done.stderr
    assert ray_installation.python_path(more) == {}, "it is told once"
    monkeypatch.setattr(ray_installation, "origin", lambda: f"{site.getsitepackages()[0]}/ray/__init__.py")
    assert ray_installation.python_path(told) == {}, "every interpreter has that one"
