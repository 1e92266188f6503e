"""The spawner of an account with subordinate ids: its start, its ids, its end, and what prevents it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from serverless_gpu.errors import IsolationUnavailable, ServerlessGpuError
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.isolation import subordinates
from serverless_gpu.node.isolation.principals import PLACE
from serverless_gpu.node.spawner import client, namespace_process, process
from tests.support.local.observe import processes_of, wait_for
from tests.support.remote.account_machine import REPOSITORY
from tests.support.remote.subordinate_machine import GIDS_FIRST, NAME, UID, UIDS, become_account, files

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the account of the test"),
    pytest.mark.skipif(shutil.which("newuidmap") is None, reason="the package uidmap is not installed"),
]


@pytest.fixture
def home() -> Iterator[Path]:
    """Yield the home directory of the account."""
    with tempfile.TemporaryDirectory(prefix="sg-account-", dir="/tmp") as found:
        os.chown(found, UID, UID)
        yield Path(found)
        place = Path(found, ".local/share/serverless-gpu/principals")
        for line in processes_of(place):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        wait_for(lambda: not processes_of(place), "the user namespace has ended")
        shutil.rmtree(f"/tmp/serverless_gpu-{UID}", ignore_errors=True)


def as_account(home: Path, work: Callable[[], object], texts: Mapping[str, str] | None = None) -> Any:
    """Return the result of a function that a process of the account calls."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as at, open(reading, "rb") as reader:
        pid = os.fork()
        if pid == 0:
            try:
                view = View(UID, at, str(home), sys.executable, [str(REPOSITORY)], [])
                become_account(view, files(home) | dict(texts or {}))
                os.environ["HOME"] = str(home)
                answer = work()
            except (OSError, AssertionError, ServerlessGpuError) as error:  # The parent fails with the text.
                answer = repr(error)
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        answer = json.loads(reader.read())
        os.waitpid(pid, 0)
    return answer


def principal_of(owner: str, node_home: Path) -> list[object]:
    """Return the uid of a principal, and uid and gid of a file that the spawner has given to it."""
    node_home.mkdir(exist_ok=True)
    spawner = client.find_spawner(os.environ)
    principal = spawner.principal(owner, node_home)
    directory = node_home / f"of-{owner}"
    directory.mkdir()
    (directory / "call").touch()
    spawner.give(principal.uid, str(directory / "call"), writable=False)
    own, call = os.stat(principal.home), os.stat(directory / "call")
    spawner.give(principal.uid, str(directory), writable=True)
    given = os.stat(directory).st_uid
    spawner.take(principal.uid, str(directory))
    return [principal.uid, own.st_uid, own.st_gid, call.st_uid, call.st_gid, given, os.stat(directory).st_uid]


def test_all_homes_of_an_account_share_one_spawner_whose_uids_are_those_of_the_machine(home: Path) -> None:
    gid = GIDS_FIRST + (1024 - len(UIDS))
    ana = [UIDS[0], UIDS[0], gid, UID, gid, UIDS[0], UID]
    assert as_account(home, lambda: principal_of("ana", home / "one")) == ana
    assert as_account(home, lambda: principal_of("bo", home / "two")) == [
        *(UIDS[1], UIDS[1], gid + 1, UID, gid + 1, UIDS[1], UID),
    ]
    place = home / ".local/share/serverless-gpu/principals"
    wait_for(lambda: len(processes_of(place)) == 1, "one process is left, and no worker of an ended client")
    assert "namespace_process" in processes_of(place)[0]


def stacks(node_home: Path) -> list[str]:
    """Return the stack of a principal's process in the namespace, and the one of this process."""
    node_home.mkdir()
    spawner = client.find_spawner(os.environ)
    uid = spawner.principal("ana", node_home).uid
    file = os.memfd_create(inside.STACK_FILE)
    os.write(file, b"a stack")
    ready, started = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            _ours, theirs = socket.socketpair()
            namespace_process._enter(subordinates.find_ids(os.environ), theirs)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.set_inheritable(file, True)
            os.execvp("sleep", ["sleep", "60"])  # Ranks also belong to a program that started in the namespace.
        os._exit(1)
    os.close(started)
    os.read(ready, 1)  # The program has started.
    found: list[str] = []
    for each in (pid, os.getpid()):
        fd = spawner.open_stack(each, file)
        found.append(os.pread(fd, 100, 0).decode())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return found


def test_the_spawner_opens_the_stack_of_a_principals_process(home: Path) -> None:
    assert as_account(home, lambda: stacks(home / "one")) == ["a stack", "a stack"]


def test_27_a_missing_line_in_subgid_leaves_the_level_none_with_the_remedy(home: Path) -> None:
    level, problem = as_account(home, lambda: client.find_spawner(os.environ).measure(), {"subgid": ""})
    assert (level, "/etc/subgid" in problem, "--add-subgids" in problem) == ("none", True, True)


def refusal(environ: Mapping[str, str]) -> str:
    """Return why a spawner does not start in an environment."""
    try:
        namespace_process.connect({"HOME": os.environ["HOME"], **environ}).close()
    except IsolationUnavailable as error:
        return error.message
    return ""


def test_27_a_map_that_newuidmap_refuses_is_named_with_its_reason(home: Path) -> None:
    programs = home / "bin"
    programs.mkdir()
    for name in subordinates.PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\necho {name}: not allowed today >&2\nexit 1\n")
        (programs / name).chmod(0o4755)
    path = f"{programs}:{os.environ['PATH']}"
    others = {"subgid": f"{NAME}:{GIDS_FIRST + 1}:1024\n"}  # No namespace of another test has this map.
    found = as_account(home, lambda: refusal({"PATH": path}), others)
    assert str(found).endswith(": not allowed today")


def test_27_a_place_where_the_account_cannot_write_is_named(home: Path) -> None:
    found = as_account(home, lambda: refusal({"PATH": os.environ["PATH"], PLACE: "/etc/principals"}))
    assert "/etc/principals" in str(found)


def test_a_spawner_without_clients_ends_unless_a_client_connects(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "IDLE_S", 0.01)
    path = tmp_path / "spawner.sock"
    account = process.AgentAccount("root", 0, 0)
    with process.listen(path, account) as listener:
        with namespace_process._locked(path):
            assert not namespace_process._leave(listener, path), "a client is connecting"
        with namespace_process.connected(path):
            assert not namespace_process._leave(listener, path), "a client has connected"
            listener.accept()[0].close()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):
                process.serve(listener, account, {}, leave=lambda: namespace_process._leave(listener, path))
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not path.exists()


def test_the_facts_of_this_machine_name_programs_without_the_setuid_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in subordinates.PROGRAMS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "subuid").write_text(f"{os.geteuid()}:200000:65536\n")
    monkeypatch.setattr(subordinates, "SUBUID", tmp_path / "subuid")
    found = subordinates.look_up({"PATH": str(tmp_path)})
    assert found.powerless_programs == tuple(str(tmp_path / name) for name in subordinates.PROGRAMS)
    assert (found.missing_programs, found.uid_ranges) == ((), (range(200_000, 265_536),))
    assert subordinates.look_up({"PATH": str(tmp_path / "none")}).missing_programs == subordinates.PROGRAMS
