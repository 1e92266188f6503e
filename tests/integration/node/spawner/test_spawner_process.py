"""The spawner's process, with real uids: what it does for its account, and what it refuses."""

from __future__ import annotations

import concurrent.futures
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import InvalidValue, IsolationUnavailable, StorageError
from serverless_gpu.node.isolation import SPAWNER, remains, sweeper
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.isolation.principals import PLACE, RANGE
from serverless_gpu.node.processes.spawn import CallerInterpreter
from serverless_gpu.node.spawner import process, sweeper_process
from serverless_gpu.node.spawner.client import SpawnerClient
from serverless_gpu.node.spawner.verbs import RootSpawner, ZygoteOrder
from tests.support.node.served_spawner import ACCOUNT, served

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run the spawner")

_FIRST = 1_900_040_000 + os.getpid() % 1_000 * 10  # Tests in other processes use other uids.
UIDS = range(_FIRST, _FIRST + 10)
UID = UIDS[0]


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="sg-spawner-", dir="/var/tmp") as found:
        os.chmod(found, 0o755)
        yield Path(found)


@pytest.fixture
def client(place: Path) -> Iterator[SpawnerClient]:
    """Yield a client of a spawner that serves `ACCOUNT`."""
    (place / "home").mkdir()
    os.chown(place / "home", ACCOUNT.uid, ACCOUNT.gid)
    environ = {PLACE: str(place / "principals"), RANGE: f"{UIDS[0]}-{UIDS[-1]}"}
    with served(place / "spawner.sock", environ) as made:
        yield made


def own(path: Path, uid: int = ACCOUNT.uid) -> Path:
    """Make a directory of a uid, with a file, a link and a file with a further hard link."""
    path.mkdir()
    (path / "file").write_text("text")
    (path / "linked").write_text("text")
    os.link(path / "linked", path.parent / f"{path.name}-elsewhere")
    (path / "link").symlink_to("/etc/passwd")
    for each in (path, *path.iterdir()):
        os.chown(each, uid, uid, follow_symlinks=False)
    return path


def test_the_socket_belongs_to_the_account_and_has_one_spawner(place: Path) -> None:
    path = place / "spawner.sock"
    listener = process.listen(path, ACCOUNT)
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, ACCOUNT.gid, 0o660)
    with pytest.raises(StorageError, match="another spawner listens"):
        process.listen(path, ACCOUNT)
    listener.close()
    process.listen(path, ACCOUNT).close()  # A socket file of an ended spawner is no obstacle.


@pytest.mark.parametrize("name", ["root", "0", "no-such-account", "4000000000"])
def test_the_account_of_an_agent_is_known_and_not_root(name: str) -> None:
    with pytest.raises(InvalidValue):
        process.find_account(name)


def test_files_go_to_a_principal_and_come_back(client: SpawnerClient, place: Path) -> None:
    directory = own(place / "results")
    client.give(UID, str(directory), writable=True)
    assert (directory.stat().st_uid, directory.stat().st_gid) == (UID, ACCOUNT.gid)
    assert (directory / "file").stat().st_uid == UID
    assert (directory / "linked").stat().st_uid == ACCOUNT.uid, "a file with a further name could lie elsewhere"
    (directory / "new").mkdir(mode=0o500)
    os.chown(directory / "new", UID, UID)
    client.take(UID, str(directory))
    assert {path.lstat().st_uid for path in (directory, *directory.rglob("*"))} == {ACCOUNT.uid}
    assert (directory / "new").stat().st_mode & 0o700 == 0o700, "the account can remove what is in it"
    assert Path("/etc/passwd").stat().st_uid == 0


def test_a_readable_file_stays_the_file_of_the_account(client: SpawnerClient, place: Path) -> None:
    file = own(place / "attempt") / "file"
    client.give(UID, str(file), writable=False)
    status = file.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (ACCOUNT.uid, UID, 0o440)


@pytest.mark.parametrize("uid", [0, ACCOUNT.uid, 1_900_070_000])
def test_the_spawner_gives_no_file_to_another_account(client: SpawnerClient, place: Path, uid: int) -> None:
    directory = own(place / "results")
    for verb in (client.take, lambda uid, path: client.give(uid, path, writable=True)):
        with pytest.raises(IsolationUnavailable, match="to no principal"):
            verb(uid, str(directory))


def test_the_spawner_gives_no_file_of_root(client: SpawnerClient, place: Path) -> None:
    directory = own(place / "of-root", uid=0)
    with pytest.raises(IsolationUnavailable, match="account"):
        client.give(UID, str(directory), writable=True)
    with pytest.raises(IsolationUnavailable, match="account"):
        client.give(UID, "/etc/shadow", writable=False)


def test_the_spawner_mounts_nothing_for_a_process_of_no_principal(client: SpawnerClient) -> None:
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(IsolationUnavailable, match="to no principal"):
        client.show(pidfd, [Graft("/etc/shadow", "/run/sgpu/call.pkl")])
    os.close(pidfd)
    with pytest.raises(IsolationUnavailable, match="to no principal"):
        client.open_stack(os.getpid(), 0)


def test_27_the_spawner_copies_no_secrets_for_another_principal_or_of_root(client: SpawnerClient, place: Path) -> None:
    own(place / "secrets")
    with subprocess.Popen(["sleep", "60"], user=UID) as stem:
        pidfd = os.pidfd_open(stem.pid)
        try:
            with pytest.raises(IsolationUnavailable, match=f"to uid {UIDS[1]}"):
                client.show(pidfd, [Graft(str(place / "secrets"), "/mnt", owner=UIDS[1])])
            with pytest.raises(OSError, match="symbolic links: 'link'"):
                client.show(pidfd, [Graft(str(place / "secrets"), "/mnt", owner=UID)])
        finally:
            os.close(pidfd)
            stem.kill()


def test_27_the_spawner_limits_the_devices_of_cgroups_of_its_account_only(client: SpawnerClient, place: Path) -> None:
    with pytest.raises(IsolationUnavailable, match="file or directory"):
        client.limit_devices("/sys/fs/cgroup", [])
    with pytest.raises(IsolationUnavailable, match="of an accelerator"):
        client.limit_devices(str(own(place / "cgroup")), ["/dev/kmsg"])


def test_the_spawner_starts_no_interpreter_that_others_cannot_execute(client: SpawnerClient, place: Path) -> None:
    python = place / "python3"
    python.touch(mode=0o700)
    order = ZygoteOrder("ana", "sandbox", CallerInterpreter(str(python), (), {}), [], [])
    with pytest.raises(IsolationUnavailable, match="for every user"):
        client.start_zygote(order, channel_fd=0, log=1)


def test_a_principal_keeps_its_uid(client: SpawnerClient, place: Path) -> None:
    first, second = client.principal("ana", place / "home"), client.principal("bo", place / "home")
    assert (first.uid, second.uid) == (UIDS[0], UIDS[1])
    assert client.principal("ana", place / "home") == first


def test_an_invalid_request_is_answered_and_the_connection_stays(client: SpawnerClient, place: Path) -> None:
    client.principal("ana", place / "home")
    (channel,) = client._idle
    channel.send(b'{"verb": "become_root"}')
    received = channel.receive()
    assert received is not None
    assert b"know this request" in received[0]
    assert client.principal("ana", place / "home").uid == UID


def test_another_user_gets_no_answer(client: SpawnerClient, place: Path) -> None:
    (place / "spawner.sock").chmod(0o666)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setresuid(1, 1, 1)
            client.principal("ana", place / "home")
        except IsolationUnavailable:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_missing_spawner_is_told_with_its_remedy(place: Path) -> None:
    missing = SpawnerClient(place / "spawner.sock")
    with pytest.raises(IsolationUnavailable, match="does not answer") as told:
        missing.principal("ana", place)
    assert told.value.hint is not None
    assert "sgpu node spawner" in told.value.hint
    assert missing.measure().level == "none"


def test_only_the_file_of_a_stack_is_opened(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="of a stack"):
        RootSpawner({}).open_stack(os.getpid(), fd)
    other = os.memfd_create("other")
    with pytest.raises(OSError, match="of a stack"):
        RootSpawner({}).open_stack(os.getpid(), other)
    os.close(fd)
    os.close(other)


def leave_behind(place: Path, uid: int) -> Path:
    """Make a file of a uid in a directory that all users can write."""
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "left").touch()
    os.chown(shared / "left", uid, uid)
    return shared / "left"


@pytest.fixture
def left(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that a principal left, for a spawner that starts afterwards."""
    file = leave_behind(place, UID)
    monkeypatch.setattr(remains, "LEFT_S", -60.0)
    monkeypatch.setattr(sweeper.sweep, "__defaults__", ((str(file.parent),),))
    return file


def test_27_the_spawner_sweeps_the_node_for_its_account(
    left: Path, client: SpawnerClient, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    client.principal("ana", place / "home")
    for name, value in ((PLACE, place / "principals"), (SPAWNER, place / "spawner.sock")):
        monkeypatch.setenv(name, str(value))
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(ACCOUNT.gid, ACCOUNT.gid, ACCOUNT.gid)
            os.setresuid(ACCOUNT.uid, ACCOUNT.uid, ACCOUNT.uid)
            sweeper_process.main()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert str(left) in capfd.readouterr().out
    assert not left.exists()
    note = "a process was ended"
    found = client.findings(note)
    assert (found.principals, found.findings.sentences()) == (1, (note,))
    assert len(found.findings.removed) == 1
    with pytest.raises(IsolationUnavailable, match="one line"):
        client.findings("two\nlines")


def test_27_the_account_sweeps_by_command_and_frees_no_uid(
    left: Path, client: SpawnerClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.principal("ana", place / "home")
    monkeypatch.setattr(os, "geteuid", lambda: ACCOUNT.uid)
    monkeypatch.setenv(PLACE, str(place / "principals"))
    words = ["node", "sweep", "--json"]
    assert CliRunner().invoke(sgpu, words).exit_code == 1
    monkeypatch.setenv(SPAWNER, str(place / "spawner.sock"))
    done = CliRunner().invoke(sgpu, words)
    assert (done.exit_code, left.exists()) == (0, False)
    assert str(left) in done.output
    assert CliRunner().invoke(sgpu, [*words, "--forget", "ana"]).exit_code == 1


def test_27_the_spawner_measures_the_memory_of_principals_only(client: SpawnerClient) -> None:
    with subprocess.Popen(["sleep", "60"], user=UID) as process:
        try:
            assert client.memory_of([process.pid]) > 0
            with pytest.raises(IsolationUnavailable, match="to no principal"):
                client.memory_of([process.pid, os.getpid()])
            with pytest.raises(IsolationUnavailable, match="at most"):
                client.memory_of([process.pid] * 2_000)
        finally:
            process.kill()
    assert client.memory_of([process.pid]) == 0, "the process has ended"


def test_threads_of_a_client_get_their_own_answers(client: SpawnerClient, place: Path) -> None:
    owners = [f"user{number}" for number in range(len(UIDS))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda owner: client.principal(owner, place / "home").owner, owners))
    assert found == owners
    assert 1 <= len(client._idle) <= 4
