"""Runs of several principals on one node, in sandboxes and without: what the code of one reaches of the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.canary import ATTEMPTS, CanaryReport, count
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from serverless_gpu.wire.canary import CanaryRequest, CanaryView
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import NodeList, PoolRequest, PoolView
from tests.support.cli.cli import sgpu
from tests.support.local.observe import wait_for
from tests.support.remote.gang_work import add_up_by_sockets
from tests.support.remote.machines import Machines
from tests.support.remote.server_process import ServerProcess

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sandboxes")

F = TypeVar("F", bound=Callable[..., object])


def by_value(function: F) -> F:
    """Have a function travel with its code: a sandbox shows no directory of these tests."""
    function.__module__ = "__main__"
    return function


@pytest.fixture
def principals(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a directory for the principals of this test, where other uids may pass."""
    with tempfile.TemporaryDirectory(prefix="sg-principals-", dir="/var/tmp") as place:
        os.chmod(place, 0o711)
        monkeypatch.setenv(PLACE, place)
        yield Path(place)


@pytest.fixture
def admin(principals: Path, own_server: ServerProcess, home: Path) -> Iterator[Connection]:
    """Yield a connection of the first administrator of a server with one node."""
    profile = find_profile(home, {})
    with contextlib.closing(Connection(profile.url, profile.token)) as connection:
        yield connection


def isolate(admin: Connection, level: str) -> None:
    admin.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)


@contextlib.contextmanager
def acting_as(admin: Connection, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make a user, and submit runs as this user."""
    made = admin.ask("POST", "/users", PrincipalRequest(name=name), answer=TokenMade)
    with monkeypatch.context() as patched:
        patched.setenv("SERVERLESS_GPU_SERVER", admin.url)
        patched.setenv("SERVERLESS_GPU_TOKEN", made.secret)
        yield


OPEN_NETWORK = {"server-port", "node-port", "other-run-port", "metadata-address"}
"""Attempts on the network that a sandbox does not refuse yet. Only rules for the egress of a pool refuse them."""
SHARED_UID = {
    *("server-key", "administrator-token", "node-token", "database", "attempt-token", "other-log", "forge-log"),
    *("other-arguments", "other-result", "own-facts", "other-facts", "own-order", "other-secret", "other-home"),
    *("poison-unit", "poison-cache", "poison-package", "passwords", "end-supervisor", "end-agent", "end-zygote"),
    *("signal-rank", "rank-arguments", "agent-socket", "supervisor-socket", "public-tmp-file", "shared-memory-file"),
    *("shared-memory", "abstract-socket", "other-device", "user-namespace", "key-ring", "io-uring", "change-root"),
}
"""Attempts that succeed where runs share the uid of the agent."""
CONTROLS_MIN = 100
_CANARY_S = 90.0


def run_canary(admin: Connection) -> CanaryReport:
    """Run the canary on the server's node, as `sgpu node canary` does, and return its report."""

    def nodes() -> list[str]:
        return [node.name for node in admin.ask("GET", "/nodes", answer=NodeList).nodes]

    def view() -> CanaryView:
        return admin.ask("GET", path, answer=CanaryView)

    wait_for(nodes, "the node has joined")
    path = f"/nodes/{nodes()[0]}/canary"
    asked = admin.ask("POST", path, CanaryRequest(), answer=CanaryView)
    wait_for(lambda: view().report is not None, "the canary has ended", limit_s=_CANARY_S)
    found = view()
    assert found.report is not None and (found.id, found.report.node) == (asked.id, nodes()[0])
    return found.report


def identity(name: str) -> dict[str, object]:
    """Return what a rank is and sees, and leave a file in the home directory."""
    with open(os.path.expanduser(f"~/{name}"), "w", encoding="utf-8") as file:
        file.write(name)
    with open("/proc/self/status", encoding="utf-8") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        points = [line.split()[4] for line in mounts]
    return {
        "attempts": len({point.split("/")[3] for point in points if point.startswith("/run/sgpu/")}),
        "uid": os.getuid(),
        "capabilities": {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "no_new_privs": fields["NoNewPrivs"],
        "seccomp": fields["Seccomp"],
        "processes": sum(entry.isdigit() for entry in os.listdir("/proc")),
        "home": sorted(os.listdir(os.path.expanduser("~"))),
    }


identify = distributed(gpus=2, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(identity))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "user", "sandbox"])
def test_27_a_member_reads_no_token_key_secret_or_log_and_ends_no_supervisor_in_a_sandbox(
    admin: Connection, level: str
) -> None:
    isolate(admin, level)
    report = run_canary(admin)
    assert (report.problem, report.level, len(report.rows)) == ("", level, len(ATTEMPTS))
    verdicts = {row.attempt: row.verdict for row in report.rows}
    possible = {name for name, verdict in verdicts.items() if verdict == "possible"}
    if level == "none":
        # Each attempt that succeeds here can show what a sandbox refuses.
        assert possible >= SHARED_UID, SHARED_UID - possible
        assert not report.failed, "the level none promises nothing"
    else:
        required = {row.attempt for row in report.rows if row.required}
        assert possible & required <= OPEN_NETWORK
        if level == "user":
            return
        assert count(report.rows, "refused") >= CONTROLS_MIN, verdicts
        assert {name for name in SHARED_UID if verdicts[name] != "refused"} == set(), verdicts


@pytest.mark.slow
def test_27_the_canary_tests_this_machine_without_a_server(home: Path, principals: Path) -> None:
    tested = sgpu("node", "canary", "--json")
    report = msgspec.json.decode(tested.stdout, type=CanaryReport)
    possible = {row.attempt for row in report.rows if row.verdict == "possible" and row.required}
    assert (report.problem, report.level) == ("", "sandbox")
    assert possible <= OPEN_NETWORK
    assert tested.exit_code == (1 if possible else 0)
    assert list(home.glob("sgpu-canary-*")) == list(Path("/tmp").glob("sgpu-canary-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_each_principal_has_a_uid_and_a_home_of_its_own(
    admin: Connection, principals: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    isolate(admin, level)
    mine = identify.distributed("mine")
    with acting_as(admin, "bob", monkeypatch):
        his = identify.distributed("his")
    again = identify.distributed("again")
    assert [one["uid"] for one in (*mine, *again)] == [mine[0]["uid"]] * 4
    assert his[0]["uid"] != mine[0]["uid"]
    for one in (*mine, *his, *again):
        assert (one["capabilities"], one["no_new_privs"]) == ({"0" * 16}, "1")
        if level == "sandbox":
            assert one["seccomp"] == "2"
            assert one["processes"] == 3, "the stem and two ranks"
        else:
            assert one["attempts"] == 1, "the files of earlier attempts are unmounted"
    assert (his[0]["home"], again[0]["home"]) == (["his"], ["again", "mine"])
    assert [path.stat().st_mode & 0o777 for path in principals.glob("1*") if path.is_dir()] == [0o700] * 2


def misuse_results(target: str) -> str:
    """Replace the file of the result by a link to a file of the node, after the rank has returned."""

    result = os.path.join(os.path.dirname(os.environ["SGPU_STOP_FILE"]), "../results/0.pkl")

    def link() -> None:
        os.unlink(result)
        os.symlink(target, result)

    atexit.register(link)
    return "returned"


misuse = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(misuse_results))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_a_link_in_place_of_a_result_sends_no_file_of_the_node(admin: Connection, tmp_path: Path, level: str) -> None:
    isolate(admin, level)
    (tmp_path / "secret").write_text("a file of the node")
    run = misuse.submit(str(tmp_path / "secret"))
    with pytest.raises(ServerlessGpuError):
        run.results()
    assert b"results" not in admin.get(f"/runs/{run.id}/files")


def save_and_stop() -> str:
    """Save a checkpoint when the run must stop; a later attempt returns what it finds."""
    earlier = rt.resume_dir()
    if earlier is not None:
        return (earlier / "state").read_text()
    own = rt.checkpoint_dir()
    print("ready", flush=True)
    until = time.monotonic() + 60
    while not rt.should_stop() and time.monotonic() < until:
        time.sleep(0.02)
    (own / "state").write_text(f"stopped: {rt.stop_reason()}")
    raise SystemExit(3)


stopping = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live", resume=True)(
    by_value(save_and_stop)
)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_a_run_of_another_uid_reads_its_stop_reason_and_resumes_from_its_checkpoint(
    admin: Connection, home: Path, level: str
) -> None:
    isolate(admin, level)
    run = stopping.submit()
    log = Home(home).attempt(run.id, 1) / "logs" / "0.stdout"
    wait_for(lambda: log.exists() and b"ready" in log.read_bytes(), "the first attempt runs")
    run.preempt()
    assert run.results() == ["stopped: preempt"]


@pytest.mark.slow
def test_the_ranks_of_two_nodes_meet_from_their_sandboxes(home: Path, principals: Path) -> None:
    with Machines(home) as pool:
        pool.join("n1")
        pool.join("n2")
        isolate(pool.administrator(), "sandbox")
        run = pool.submit(add_up_by_sockets)
        results = [found for found in run.results(60) if isinstance(found, tuple)]
        assert [total for total, _ in results] == [6] * 4
        assert {uid for _, uid in results}.isdisjoint({os.getuid()})
        assert run.receipt().isolation == "sandbox"
