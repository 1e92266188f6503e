"""What the doctor says of the pool's Ray: who gets in, where it listens, whether a rank could end it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serverless_gpu.doctor.facts import PoolFacts
from serverless_gpu.doctor.probes import servers
from serverless_gpu.engines.ray import ray_machine
from serverless_gpu.engines.ray.ray_keeper import MARK
from serverless_gpu.node.base.lock_files import hold
from tests.support.local.observe import wait_for

_LISTENING = """
import signal, socket, sys
kept = [socket.create_server((host, 0)) for host in ("127.0.0.1", "")]
print(*(each.getsockname()[1] for each in kept), flush=True)
signal.pause()
"""


def test_processes_of_a_keeper_are_found_with_what_they_listen_on(tmp_path: Path) -> None:
    directory = tmp_path / "ray"
    directory.mkdir()
    token = directory / ray_machine.TOKEN
    token.touch(mode=0o600)
    lock = hold(directory / "keeper.lock", "1 x")
    assert lock is not None
    reading, writing = os.pipe()
    argv = [sys.executable, "-c", _LISTENING, "--node-ip-address=127.0.0.6"]
    environ = {MARK: ray_machine.directory_of(directory), "RAY_AUTH_MODE": "disabled"}
    pid = os.posix_spawn(sys.executable, argv, environ, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
    os.close(writing)
    try:
        with os.fdopen(reading) as output:
            loopback, everywhere = map(int, output.readline().split())
        wait_for(lambda: bool(servers.look_at_pool({"SERVERLESS_GPU_HOME": str(tmp_path)}).processes), "it is seen")
        facts = servers.look_at_pool({"SERVERLESS_GPU_HOME": str(tmp_path)})
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(lock)
    assert {(each.port, each.address) for each in facts.listeners} == {(loopback, "127.0.0.1"), (everywhere, "*")}
    assert (facts.address, facts.processes, facts.token_problem) == ("127.0.0.6", 1, "")
    assert len(facts.without_token) == 1
    assert servers.look_at_pool({"SERVERLESS_GPU_HOME": str(tmp_path)}) == PoolFacts()
