"""`sgpu up --engine ray` and `sgpu join`, as a person uses them: two homes stand for two machines, Ray is real."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.doctor.probes.servers import look_at_pool
from serverless_gpu.engines.ray import ray_machine, start_arguments
from serverless_gpu.engines.ray.ray_keeper import unreachable
from serverless_gpu.node.base.private_files import write_private
from serverless_gpu.node.inside import linux
from tests.e2e.ray.plain_ray import PYTHON
from tests.e2e.ray.pools import START_S, Machine
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.ports import own_port
from tests.support.server.certificates import Authority

RUN_S = 120.0
pytestmark = [pytest.mark.heavy, pytest.mark.slow, pytest.mark.timeout(600)]

LOOK = """
    import os, subprocess, sys
    from serverless_gpu import distributed

    @distributed(gpus=2, gpu_type="H100", remote=True, env="live")
    def look(rank):
        said = sorted(name for name, value in os.environ.items() if name.startswith("RAY_") or "token" in value)
        if rank == 0:
            stop = [sys.argv[1], "-m", "ray.scripts.scripts", "stop", "--force"]
            subprocess.run(stop, capture_output=True, check=False)
        return said

    if __name__ == "__main__":
        print(look.distributed())
"""
STAY = """
    import time
    from pathlib import Path
    from serverless_gpu import distributed

    @distributed(gpus=2, gpu_type="H100", remote=True, env="live")
    def stay(path):
        print("it runs", flush=True)
        while not Path(path).exists():
            time.sleep(0.1)
        return "it went on"

    if __name__ == "__main__":
        import sys
        print(stay.distributed(sys.argv[1]))
"""


@pytest.fixture
def first() -> Iterator[Machine]:
    machine = Machine("one", "A10:1")
    yield machine
    machine.run("stop")
    machine.end()


@pytest.fixture
def second() -> Iterator[Machine]:
    machine = Machine("two", "H100:2")
    yield machine
    machine.end()


@pytest.fixture
def up(first: Machine, tmp_path: Path) -> subprocess.Popen[bytes]:
    authority = Authority(tmp_path)
    cert, key = authority.sign("127.0.0.2")
    process = first.start(
        *("up", "--engine", "ray", "--host", "127.0.0.2", "--port", str(own_port()), "--ray-port", str(first.port)),
        *("--tls-cert", str(cert), "--tls-key", str(key), "--tls-ca", str(authority.ca)),
    )
    first.wait_said("sgpu join 127.0.0.2 --token-file join.json", process)
    return process


def joining(second: Machine, first: Machine) -> list[str]:
    """Return the command of the second machine, with a copy of the join file of the first."""
    path = second.home / "join.json"
    path.touch(mode=0o600)
    path.write_bytes((first.home / "server" / "join.json").read_bytes())
    more = ("--name", "two", "--node-address", "127.0.0.3", "--ray-port", str(second.port))
    return ["join", "127.0.0.2", "--token-file", str(path), *more]


def refused(second: Machine, command: list[str]) -> str:
    """Return what a command says that is refused."""
    done = second.run(*command)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_machine_joins_runs_leaves_and_its_run_goes_on(
    first: Machine, second: Machine, up: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    command = joining(second, first)
    join = second.start(*command)
    second.wait_said(f"two offers 2 H100, {len(os.sched_getaffinity(0))} CPU to the pool of https://127.0.0.2:", join)
    wait_for(lambda: "two" in first.run("node", "list").stdout, "its agent is there", limit_s=START_S)

    before = {"one": first.rays(), "two": second.rays()}
    look = first.program(LOOK, str(PYTHON))
    output, errors = look.communicate(timeout=RUN_S)
    assert output.strip() == "[[], []]", errors  # nothing of Ray's, and no path of a token
    if not linux.landlock_refusal():
        assert {"one": first.rays(), "two": second.rays()} == before

    _check_what_is_seen(second)
    assert "another `sgpu join`" in refused(second, command)

    done = tmp_path / "done"
    stay = first.program(STAY, str(done))
    wait_for(lambda: "2 busy" in first.run("node", "list").stdout, "it runs", limit_s=RUN_S)
    join.send_signal(signal.SIGINT)
    assert join.wait(60) == 0
    assert second.said.endswith(
        "two has left the pool and gets no new runs. 1 run continues here, "
        "and this machine reports to the server how it ends\n"
    )
    assert second.rays() == []
    wait_for(
        lambda: golden("ray.joining.left-pool") in first.run("node", "list").stdout, "the server knows", limit_s=60
    )
    done.touch()
    output, errors = stay.communicate(timeout=RUN_S)
    assert golden("ray.joining.went-went") in output, errors

    up.send_signal(signal.SIGTERM)
    assert up.wait(120) == 0
    assert first.rays()  # the head outlives the server
    assert golden("ray.joining.ray-ended-here") in first.run("stop").stdout
    assert first.rays() == []
    assert not Path(ray_machine.directory_of(first.home / "server" / "ray")).parent.exists()


def _check_what_is_seen(second: Machine) -> None:
    """Check what the doctor gathers, and that no secret is where others look."""
    facts = look_at_pool(second.environ)
    assert (facts.address, facts.token_problem, facts.without_token) == ("127.0.0.3", "", ())
    assert tuple(map(int, facts.version.split(".")[:2])) >= start_arguments.OLDEST
    ports = {each.port for each in facts.listeners}
    assert ports
    assert ports <= set(range(second.port, second.port + start_arguments.PORTS))
    secrets = [(second.home / "ray" / name).read_text() for name in ("token", "profile.json")]
    token = secrets[1].partition('"token":"')[2].partition('"')[0]
    assert token.startswith("sgpu_")
    for pid in second.rays():
        shown = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        assert secrets[0].encode() not in shown
        assert token.encode() not in shown
    logs = Path(ray_machine.directory_of(second.home / "ray")).rglob("*.log")
    assert not [path for path in logs if token.encode() in path.read_bytes()]
    for name in ("ray/token", "ray/profile.json", "ray/node.json", "ray/ca.pem", "node.key"):
        assert (second.home / name).stat().st_mode & 0o777 == 0o600
    place = Path(ray_machine.directory_of(second.home / "ray")).parent
    assert place.stat().st_mode & 0o077 == 0
    copies = [path for path in place.rglob("*") if path.is_file() and secrets[0].encode() in path.read_bytes()]
    assert copies == [], "Ray has written its token to a file of its own"


def test_27_7_a_second_machine_of_a_name_waits_for_approval_and_then_joins(
    first: Machine, second: Machine, up: subprocess.Popen[bytes]
) -> None:
    """The token of the first one is stolen with the file, and is good for nothing."""
    assert first.run("node", "invite", "--uses", "2", "--out", str(first.home / "server" / "join.json")).returncode == 0
    join = second.start(*joining(second, first))
    second.wait_said("two offers 2 H100", join)
    wait_for(lambda: "two" in first.run("node", "list").stdout, "its agent is there", limit_s=START_S)
    stolen = (second.home / "ray" / "profile.json").read_bytes()
    third = Machine("three", "H100:2")
    try:
        command = joining(third, first)
        (third.home / "ray").mkdir(mode=0o700)
        write_private(third.home / "ray" / "profile.json", stolen)
        said = refused(third, command)
        assert "another home" in said
        join.send_signal(signal.SIGINT)
        assert join.wait(60) == 0
        wait_for(lambda: "SILENT" in first.run("node", "list").stdout, "the first one is away", limit_s=60)
        for _ in range(2):
            assert "node 'two' waits" in refused(third, command)
        assert first.run("node", "approve", "two").returncode == 0
        again = third.start(*command)
        third.wait_said("two offers 2 H100", again)
        assert "two offers" not in refused(second, joining(second, first))  # its token was revoked
    finally:
        third.end()


def test_what_is_wrong_is_said_before_ray_is_started(
    first: Machine, second: Machine, up: subprocess.Popen[bytes]
) -> None:
    command = joining(second, first)
    path = second.home / "join.json"
    path.chmod(0o644)
    assert golden("ray.joining.mode-0644-so") in refused(second, command)
    path.chmod(0o600)
    assert golden("ray.joining.machine-cannot-address") in refused(second, [*command, "--node-address", "127.0.0.1"])
    wait_for(lambda: not unreachable(f"127.0.0.2:{first.port}"), "the head answers", limit_s=START_S)
    said = refused(second, [*command[:1], f"127.0.0.2:{first.port + 99}", *command[2:]])
    assert golden("ray.joining.server-answers-ray", value=first.port + 99) in said
    assert golden("ray.joining.tcp-open-both", port_range=start_arguments.port_range(second.port)) in said
    assert golden("ray.joining.port-taken-machine", port=first.port) in refused(
        second, [*command, "--ray-port", str(first.port)]
    )
    path.write_text(path.read_text().replace("sgpu_", "sgpu_0"))
    assert golden("ray.joining.does-take-token", path=path) in refused(second, command)
    assert second.rays() == []
