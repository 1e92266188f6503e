"""Runs of several principals on one node, in sandboxes and without: what the code of one reaches of the others."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import NodeLost, OutOfMemory, ServerlessGpuError
from serverless_gpu.model.canary import ATTEMPTS, CanaryReport, count
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.isolation import nft
from serverless_gpu.node.isolation.egress_rules import removal
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.testing import agent_status
from serverless_gpu.wire.access import PrincipalList, PrincipalRequest, SecretRequest, SecretView, TokenMade
from serverless_gpu.wire.canary import CanaryRequest, CanaryView
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import NodeList, PoolRequest, PoolView
from tests.e2e.remote.conftest import end_node
from tests.support.cli.cli import sgpu
from tests.support.golden import golden
from tests.support.local.observe import cancel_all, processes_of, wait_for
from tests.support.local.small_machine import small_memory
from tests.support.remote import member_attacks
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
        if nft.find(os.environ) and nft.exists(os.environ):  # The uplink may have ended before its attempts.
            nft.run(removal(nft.table_of(os.environ)), os.environ)


@pytest.fixture
def admin(principals: Path, own_server: ServerProcess, home: Path) -> Iterator[Connection]:
    """Yield a connection of the first administrator of a server with one node."""
    profile = find_profile(home, {})
    with contextlib.closing(Connection(profile.url, profile.token)) as connection:
        yield connection


def isolate(admin: Connection, level: str) -> None:
    admin.ask("PUT", "/pools/default", PoolRequest(isolation=level), answer=PoolView)


@contextlib.contextmanager
def acting_as(admin: Connection, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """Make a user, and submit runs as this user."""
    made = admin.ask("POST", "/users", PrincipalRequest(name=name), answer=TokenMade)
    with monkeypatch.context() as patched:
        patched.setenv("SERVERLESS_GPU_SERVER", admin.url)
        patched.setenv("SERVERLESS_GPU_TOKEN", made.secret)
        with contextlib.closing(Connection(admin.url, made.secret)) as connection:
            yield connection


SHARED_UID = {
    *("server-key", "administrator-token", "node-token", "database", "attempt-token", "other-log", "forge-log"),
    *("other-arguments", "other-result", "own-facts", "other-facts", "own-order", "other-secret", "other-home"),
    *("poison-unit", "poison-cache", "poison-package", "passwords", "end-supervisor", "end-agent", "end-zygote"),
    *("signal-rank", "rank-arguments", "agent-socket", "supervisor-socket", "public-tmp-file", "shared-memory-file"),
    *("shared-memory", "abstract-socket", "other-device", "user-namespace", "key-ring", "io-uring", "change-root"),
}
"""Attempts that succeed where runs share the uid of the agent."""
CONNECTIONS = {"server-port", "node-port", "other-run-port"}
"""Attempts on the network whose controls need no service of this machine."""
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
        "umask": fields["Umask"],
        "core": resource.getrlimit(resource.RLIMIT_CORE),
        "memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK),
    }


one_gpu = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live")
one_gpu_with_secret = distributed(
    gpus=1, gpu_type="H100", remote=True, quiet=True, env="live", secrets=["TOKEN"], timeout="2m"
)
identify = distributed(gpus=2, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(identity))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", pytest.param("user", marks=pytest.mark.long), "sandbox"])
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
        assert possible & required == set(), possible & required
        if level == "user":
            return
        assert count(report.rows, "refused") >= CONTROLS_MIN, verdicts
        assert {name for name in SHARED_UID | CONNECTIONS if verdicts[name] != "refused"} == set(), verdicts


attacked = one_gpu_with_secret(by_value(member_attacks.be_victim))
by_value(member_attacks.processes)
attacking = one_gpu(by_value(member_attacks.attack))
ending_supervisors = one_gpu(by_value(member_attacks.end_supervisor))
SUCCEEDED = member_attacks.SUCCEEDED
WITHOUT_ISOLATION = {*member_attacks.ATTACKS} - {member_attacks.ZYGOTE}
"""Attacks that succeed where runs share a uid. Even there, each principal has a zygote in its own user namespace."""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "user", "sandbox"])
def test_27_the_attacks_of_a_member_on_other_users_and_the_node(
    admin: Connection, home: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """At 6f51c1b, all six attacks succeed (`tests/support/remote/member_attacks.py`)."""
    isolate(admin, level)
    with acting_as(admin, "victim", monkeypatch) as victim:
        victim.ask("PUT", "/secrets/TOKEN", SecretRequest(value=member_attacks.VALUE.encode()), answer=SecretView)
        run = attacked.submit()
        log = Home(home).attempt(run.id, 1) / "logs" / "0.stdout"
        wait_for(lambda: log.exists() and member_attacks.OUTPUT.encode() in log.read_bytes(), "the victim runs")
        with acting_as(admin, "mallory", monkeypatch):
            (found,) = attacking.distributed(str(home), "second")
            try:
                (found[member_attacks.SUPERVISOR],) = ending_supervisors.distributed(str(home))
            except NodeLost:
                found[member_attacks.SUPERVISOR] = SUCCEEDED
        run.cancel()
        # A standby process of the first run can be older than the attack.
        is_patched = [member_attacks.PATCH] in [attacked.distributed(False) for _ in range(3)]
    found[member_attacks.ZYGOTE] = SUCCEEDED if is_patched else "the victim's interpreter is unchanged"
    succeeded = {name for name, outcome in found.items() if outcome == SUCCEEDED}
    assert succeeded == (WITHOUT_ISOLATION if level == "none" else set()), found
    assert found.keys() == {*member_attacks.ATTACKS}
    names = {each.name for each in admin.ask("GET", "/users", answer=PrincipalList).principals}
    assert ("second" in names) is (level == "none")


@pytest.mark.slow
def test_27_the_canary_tests_this_machine_without_a_server(home: Path, principals: Path) -> None:
    tested = sgpu("node", "canary", "--json")
    report = msgspec.json.decode(tested.stdout, type=CanaryReport)
    possible = {row.attempt for row in report.rows if row.verdict == "possible" and row.required}
    assert (report.problem, report.level, possible, tested.exit_code) == ("", "sandbox", set(), 0)
    assert list(home.glob("sgpu-canary-*")) == []


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
        assert (one["umask"], one["core"]) == ("0077", (0, 0)), "nobody else reads files or memory of a rank"
        assert one["memlock"] == (resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],) * 2, "NCCL registers memory"
    assert (his[0]["home"], again[0]["home"]) == (["his"], ["again", "mine"])
    assert [path.stat().st_mode & 0o777 for path in principals.glob("1*") if path.is_dir()] == [0o700] * 2


def leak(place: str) -> dict[str, object]:
    """Print a secret in two writes and fail with it, or return what a rank sees of its secrets."""

    token = rt.secret("TOKEN")
    os.write(1, b"token " + token[:6].encode())
    time.sleep(0.1)  # Another read of the supervisor.
    os.write(1, token[6:].encode() + b"\n")
    directory = os.environ["SGPU_SECRETS_DIR"]
    until = time.monotonic() + 60
    while not os.path.exists(f"{place}/go") and time.monotonic() < until:
        time.sleep(0.02)
    if os.path.exists(f"{place}/fail"):
        raise ValueError(f"cannot log in with {token}")
    status = os.stat(f"{directory}/TOKEN")
    with open("/proc/mounts", encoding="utf-8") as mounts:
        kinds = {line.split()[1]: line.split()[2] for line in mounts}
    return {
        "files": sorted(os.listdir(directory)),
        "mode": oct(status.st_mode & 0o7777),
        "is_own": status.st_uid == os.getuid(),
        "kind": kinds[directory],
        "variables": [name for name, value in os.environ.items() if token in value],
        "token": token,
    }


leaking = distributed(
    gpus=1, gpu_type="H100", remote=True, quiet=True, env="live", secrets={"TOKEN": "MY_TOKEN", "FILE": None}
)(by_value(leak))


@pytest.mark.slow
def test_27_secrets_in_a_sandbox_exist_in_its_memory_only_and_are_masked_in_output_and_exceptions(
    admin: Connection, home: Path
) -> None:
    isolate(admin, "sandbox")
    for name, value in (("TOKEN", b"hunter2-hunter2"), ("FILE", b"correct-horse")):
        admin.ask("PUT", f"/secrets/{name}", SecretRequest(value=value), answer=SecretView)
    with tempfile.TemporaryDirectory(dir="/usr/local/share") as place:  # A sandbox shows this directory.
        os.chmod(place, 0o755)
        run = leaking.submit(place)
        log = Home(home).attempt(run.id, 1) / "logs" / "0.stdout"
        wait_for(lambda: log.exists() and log.read_bytes().endswith(b"\n"), "the rank has printed its secret")
        assert not list(Path("/dev/shm").glob("sgpu-secrets-*")), "the node keeps no copy"
        Path(place, "go").touch()
        [seen] = run.results()
        Path(place, "fail").touch()
        failing = leaking.submit(place)
        with pytest.raises(ValueError, match=r"in with \*{15}") as failed:
            failing.results()
    assert seen.pop("token") == "hunter2-hunter2", "a result stays as it is"
    assert seen == {
        "files": ["FILE", "TOKEN"],
        "mode": "0o400",
        "is_own": True,
        "kind": "tmpfs",
        "variables": ["MY_TOKEN"],
    }
    assert log.read_bytes() == b"token [secret TOKEN]\n"
    assert "hunter2" not in "".join(traceback.format_exception(failed.value))
    receipt = run.receipt()
    assert (receipt.redacted, failing.receipt().redacted["TOKEN"] > 1) == ({"TOKEN": 1}, True)
    assert any("rank 0 contains" in note for note in receipt.notes)
    for path in (home / "runs").rglob("*"):
        if path.is_file() and not path.is_symlink() and "results" not in path.parts:
            assert b"hunter2" not in path.read_bytes(), path


ACCOUNT = (1_899_997_000, 1_899_997_001, 1_899_997_002)
"""Uid, primary group and another group of an account that only the server of one test knows."""
WITH_ACCOUNTS = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'for name in passwd group; do mount --bind "$0/$name" /etc/$name; done; exec "$@"',
)


def account() -> dict[str, object]:
    """Return what a rank is and sees of its account, and leave a file in its home directory and its results."""
    with open(os.path.expanduser("~/left"), "w", encoding="utf-8") as file:
        file.write("by a rank")
    return {
        "ids": (os.getuid(), os.getgid(), os.getgroups()),
        "home": (os.environ["HOME"], os.environ["USER"], sorted(os.listdir(os.path.expanduser("~")))),
        "secret": rt.secret("TOKEN"),
    }


use_account = distributed(gpus=2, gpu_type="H100", remote=True, quiet=True, env="live", secrets=["TOKEN"])(
    by_value(account)
)


@pytest.fixture
def with_accounts(home: Path, principals: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """Yield a connection of the first administrator of a server whose machine has an account "ana"."""
    uid, gid, group = ACCOUNT
    own = principals / "homes" / "ana"
    own.mkdir(parents=True)
    os.chown(own, uid, gid)
    own.chmod(0o700)
    users = f"{Path('/etc/passwd').read_text()}ana:x:{uid}:{gid}::{own}:/bin/bash\n"
    (principals / "passwd").write_text(users)
    (principals / "group").write_text(f"{Path('/etc/group').read_text()}lab:x:{group}:ana\ndisk27:x:27:ana\n")
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:4")
    monkeypatch.setenv("SERVERLESS_GPU_ACCOUNTS", "same-name")
    server = ServerProcess(home, around=(*WITH_ACCOUNTS, str(principals)))
    server.start()
    profile = find_profile(home, {})
    try:
        with contextlib.closing(Connection(profile.url, profile.token)) as connection:
            yield connection
    finally:
        cancel_all(home)
        server.kill(signal.SIGTERM)
        end_node(home)


@pytest.mark.slow
def test_27_a_principal_uses_the_account_of_its_name_and_without_one_no_uid_at_all(
    with_accounts: Connection, home: Path, principals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(with_accounts, "sandbox")
    uid, gid, group = ACCOUNT
    with acting_as(with_accounts, "ana", monkeypatch) as mine:
        mine.ask("PUT", "/secrets/TOKEN", SecretRequest(value=b"hunter2"), answer=SecretView)
        found = use_account.distributed()
    own = principals / "homes" / "ana"
    assert found == [{"ids": (uid, gid, [group]), "home": (str(own), "ana", ["left"]), "secret": "hunter2"}] * 2
    assert (own / "left").stat().st_uid == uid
    with acting_as(with_accounts, "bob", monkeypatch):
        run = identify.submit("his")
        ending = Home(home).attempt(run.id, 1) / "stopped.json"
        wait_for(lambda: ending.exists() and b"no account of this name" in ending.read_bytes(), "the node refused it")
        run.cancel()
    assert not (principals / "uids.json").exists()


def end_by(number: int) -> str:
    """End this rank by a signal, if a number is given."""
    if number:
        os.kill(os.getpid(), number)
    return "returned"


ending = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(end_by))


@pytest.mark.slow
def test_27_the_run_after_one_that_was_killed_starts_cold_in_another_interpreter(admin: Connection) -> None:
    isolate(admin, "sandbox")
    assert ending.distributed(0) == ["returned"]
    with pytest.raises(ServerlessGpuError):
        ending.distributed(9)
    run = ending.submit(0)
    assert run.results() == ["returned"]
    receipt = run.receipt()
    assert (receipt.warm, receipt.warm_reason) == (False, golden("node.zygote_policy.signal"))


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


# --- exhaustion: rows F02, F03 and F12 in sandboxes -------------------------------------------------------------------


def stay_until(path: str) -> str:
    """Print a line, then wait for a file."""

    print("a neighbour", flush=True)
    until = time.monotonic() + 120
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.02)
    return "unaffected"


def grow() -> int:
    """Use more and more memory."""

    held = []
    while True:
        held.append(bytearray(16 << 20))


def explode() -> int:
    """Fork more and more processes."""

    children = 0
    for _ in range(2_000):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
    return children


staying, exploding = one_gpu(by_value(stay_until)), one_gpu(by_value(explode))
growing = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live", memory="256MiB")(by_value(grow))
growing_without_limit = one_gpu(by_value(grow))


@contextlib.contextmanager
def neighbour(home: Path) -> Iterator[None]:
    """Have a run of the administrator beside those of a test, which must end as if it were alone."""
    with tempfile.TemporaryDirectory(dir="/usr/local/share") as place:  # A sandbox shows this directory.
        os.chmod(place, 0o755)
        run = staying.submit(f"{place}/go")
        log = Home(home).attempt(run.id, 1) / "logs" / "0.stdout"
        wait_for(lambda: log.exists() and b"neighbour" in log.read_bytes(), "the neighbour runs")
        try:
            yield
        finally:
            Path(place, "go").touch()
        assert run.results(60) == ["unaffected"]
        assert run.receipt(60).isolation == "sandbox"


def move(pids: Iterable[str], group: Path) -> None:
    """Move processes into a control group."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / "cgroup.procs").write_text(pid)


@pytest.fixture
def few_tasks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an attempt of this home have few processes."""
    monkeypatch.setenv("SERVERLESS_GPU_TASKS_MAX", "60")


@pytest.mark.slow
def test_F02_and_F12_a_rank_that_exhausts_memory_or_processes_in_a_sandbox_harms_its_own_run_only(
    few_tasks: None, admin: Connection, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(admin, "sandbox")
    with neighbour(home), acting_as(admin, "mallory", monkeypatch):
        run = growing.submit()
        with pytest.raises(OutOfMemory, match=r"limit 268\.4 MB, peak 26\d\.\d MB") as ended:
            run.results(60)
        assert (ended.value.reason, run.receipt(60).reason) == ("host_oom", "host_oom")
        bomb = exploding.submit()
        with pytest.raises(BlockingIOError):
            bomb.results(60)
        assert identify.distributed("after")[0]["processes"] == 3, (
            "the next run starts, and nothing of the bomb is left"
        )


@pytest.mark.slow
def test_F03_where_memory_runs_out_a_rank_in_a_sandbox_is_the_victim_and_nobody_else(
    admin: Connection, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(admin, "sandbox")
    with small_memory(1 << 30) as group, neighbour(home), acting_as(admin, "mallory", monkeypatch):
        ours = {line.partition(":")[0] for line in processes_of(home)}
        move(ours, group)
        run = growing_without_limit.submit()
        with pytest.raises(OutOfMemory):
            run.results(60)
        assert run.receipt(60).reason == "host_oom"
        status = agent_status(home)
        assert status is not None and str(status.pid) in ours, "the agent lives"
        assert identify.distributed("after")[0]["processes"] == 3
        move(Path(group, "cgroup.procs").read_text().split(), group.parent)
