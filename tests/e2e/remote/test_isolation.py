"""Runs of several principals on one node, in sandboxes and without: what the code of one reaches of the others."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.client.remote.profile import find_profile
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.wire.access import PrincipalRequest, SecretRequest, SecretView, TokenMade
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.nodes import PoolRequest, PoolView
from tests.e2e.remote.conftest import end_node
from tests.support.golden import golden
from tests.support.local.observe import cancel_all, supervisor, wait_for
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
def acting_as(admin: Connection, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Connection]:
    """Make a user, and submit runs as this user."""
    made = admin.ask("POST", "/users", PrincipalRequest(name=name), answer=TokenMade)
    with monkeypatch.context() as patched:
        patched.setenv("SERVERLESS_GPU_SERVER", admin.url)
        patched.setenv("SERVERLESS_GPU_TOKEN", made.secret)
        with contextlib.closing(Connection(admin.url, made.secret)) as connection:
            yield connection


def hold(path: str) -> str:
    """Print a line, then wait for a file."""

    print("a line of the victim", flush=True)
    until = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < until:
        time.sleep(0.02)
    return "done"


class Targets(NamedTuple):
    """What a test has prepared for attacks, readable by every user of the machine."""

    home: str
    run: str
    supervisor: int
    file: str  # in /tmp
    segment: str  # in /dev/shm
    shared_memory: int  # identifier of a SysV segment
    socket: str  # name of an abstract socket that accepts connections


KEYCTL = {"x86_64": 250, "aarch64": 219}
UNPROVEN = {
    *("patch a supervisor", "memory of another supervisor", "variables of another supervisor"),
    *("cgroups", "make a device", "kernel log"),
}
"""Attacks without a positive control, which the kernel refuses at each level."""


@contextlib.contextmanager
def targets() -> Iterator[Targets]:
    """Prepare files, shared memory and a socket that every user of the machine can use."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        tempfile.NamedTemporaryFile(dir="/tmp") as file,
        tempfile.NamedTemporaryFile(dir="/dev/shm") as segment,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        for one in (file, segment):
            os.chmod(one.name, 0o644)
        name = f"sgpu-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.listen()
        shared = libc.shmget(0, 4096, 0o1666)
        try:
            yield Targets("", "", 0, file.name, segment.name, shared, name)
        finally:
            libc.shmctl(shared, 0, None)


def attacks(*prepared: Any) -> dict[str, str]:
    """Try what a run must not be able to do. Return the outcome by attack: "possible", or the refusal."""
    home, run, supervisor_pid, file, segment, shared_memory, name = prepared
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_long

    def read(pattern: str) -> None:
        for path in glob.glob(pattern) or [pattern]:
            with open(path, "rb") as found:
                found.read(1)

    def call(result: int) -> None:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def connect() -> None:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(f"\0{name}")

    def make_device() -> None:
        os.mknod("device", 0o20666, os.makedev(1, 8))
        os.unlink("device")

    def patch(pid: int) -> None:
        with open(f"/proc/{pid}/maps") as maps:
            place = next(line for line in maps if " rw-p " in line and "[heap]" in line)
        with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
            memory.seek(int(place.split("-")[0], 16))
            byte = memory.read(1)
            memory.seek(-1, 1)
            memory.write(byte)

    tried: dict[str, Callable[[], None]] = {
        "administrator's token": lambda: read(f"{home}/server.json"),
        "key of the server": lambda: read(f"{home}/server/key"),
        "logs of another run": lambda: read(f"{home}/runs/{run}/1/logs/*"),
        "attempt token": lambda: read(f"{home}/runs/{run}/1/remote.json"),
        "secret in memory": lambda: read("/dev/shm/sgpu-secrets-*/*"),
        "end another supervisor": lambda: os.kill(supervisor_pid, 0),
        "memory of another supervisor": lambda: read(f"/proc/{supervisor_pid}/mem"),
        "variables of another supervisor": lambda: read(f"/proc/{supervisor_pid}/environ"),
        "patch a supervisor": lambda: patch(supervisor_pid),
        "passwords of the machine": lambda: read("/etc/shadow"),
        "file in /tmp": lambda: read(file),
        "segment in /dev/shm": lambda: read(segment),
        "SysV shared memory": lambda: call(libc.shmat(shared_memory, None, 0o10000)),
        "abstract socket": connect,
        "kernel log": lambda: read("/dev/kmsg"),
        "cgroups": lambda: read("/sys/fs/cgroup/*/cgroup.procs"),
        "make a device": make_device,
        "own mount namespace": lambda: call(libc.unshare(0x20000)),
        "user namespace": lambda: call(libc.unshare(0x10000000)),
        "key ring": lambda: call(libc.syscall(KEYCTL[os.uname().machine], 0, -3, 1)),
        "io_uring": lambda: call(libc.syscall(425, 1, ctypes.create_string_buffer(256))),
        "change the root": lambda: call(libc.chroot(b"/")),
    }
    outcome = {}
    for attack, attempt in tried.items():
        try:
            attempt()
            outcome[attack] = "possible"
        except (OSError, StopIteration) as error:
            outcome[attack] = repr(error)
    return outcome


def identity(name: str) -> dict[str, object]:
    """Return what a rank is and sees, and leave a file in the home directory."""
    with open(os.path.expanduser(f"~/{name}"), "w", encoding="utf-8") as file:
        file.write(name)
    with open("/proc/self/status", encoding="utf-8") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status if ":\t" in line)
    return {
        "uid": os.getuid(),
        "capabilities": {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")},
        "no_new_privs": fields["NoNewPrivs"],
        "seccomp": fields["Seccomp"],
        "processes": sum(entry.isdigit() for entry in os.listdir("/proc")),
        "home": sorted(os.listdir(os.path.expanduser("~"))),
    }


hold_remote = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live", secrets=["TOKEN"])(
    by_value(hold)
)
attack = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(attacks))
identify = distributed(gpus=2, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(identity))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["none", "sandbox"])
def test_a_member_reads_no_token_key_secret_or_log_and_ends_no_supervisor_in_a_sandbox(
    admin: Connection, home: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    isolate(admin, level)
    admin.ask("PUT", "/secrets/TOKEN", SecretRequest(value=b"hunter2-hunter2"), answer=SecretView)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place, targets() as found:
        victim = hold_remote.submit(f"{place}/go")
        wait_for(lambda: Home(home).attempt(victim.id, 1).joinpath("logs").exists(), "the victim has logs")
        wait_for(lambda: list(Path("/dev/shm").glob("sgpu-secrets-*/TOKEN")), "the victim has its secret")
        watched = supervisor(home, victim.id)
        with acting_as(admin, "mallory", monkeypatch):
            outcome = attack.distributed(*found._replace(home=str(home), run=victim.id, supervisor=watched.pid))[0]
        victim.cancel()
    assert isinstance(outcome, dict)
    refused = {name: text for name, text in outcome.items() if text != "possible"}
    if level == "none":
        # An attack that succeeds where runs share a uid can show what a sandbox refuses. Zygotes of principals have
        # user namespaces at every level, so only files decide about the memory of a supervisor.
        assert refused.keys() <= UNPROVEN, {name: refused[name] for name in refused.keys() - UNPROVEN}
    else:
        assert refused.keys() == outcome.keys(), outcome


@pytest.mark.slow
def test_each_principal_has_a_uid_a_home_and_processes_of_its_own_in_a_sandbox(
    admin: Connection, principals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(admin, "sandbox")
    mine = identify.distributed("mine")
    with acting_as(admin, "bob", monkeypatch):
        his = identify.distributed("his")
    again = identify.distributed("again")
    assert [one["uid"] for one in (*mine, *again)] == [mine[0]["uid"]] * 4
    assert his[0]["uid"] != mine[0]["uid"]
    for one in (*mine, *his, *again):
        assert (one["capabilities"], one["no_new_privs"], one["seccomp"]) == ({"0" * 16}, "1", "2")
        assert one["processes"] == 3, "the stem and two ranks"
    assert (his[0]["home"], again[0]["home"]) == (["his"], ["again", "mine"])
    assert [path.stat().st_mode & 0o777 for path in principals.glob("1*") if path.is_dir()] == [0o700] * 2


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

    def link() -> None:
        os.unlink("/run/sgpu/results/0.pkl")
        os.symlink(target, "/run/sgpu/results/0.pkl")

    atexit.register(link)
    return "returned"


misuse = distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, env="live")(by_value(misuse_results))


@pytest.mark.slow
def test_a_link_in_place_of_a_result_sends_no_file_of_the_node(admin: Connection, tmp_path: Path) -> None:
    isolate(admin, "sandbox")
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
def test_a_run_in_a_sandbox_reads_its_stop_reason_and_resumes_from_its_checkpoint(
    admin: Connection, home: Path
) -> None:
    isolate(admin, "sandbox")
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
