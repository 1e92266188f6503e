"""Each measure of a sandbox refuses something: without the measure, an attempt of the canary is possible."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.canary import ATTEMPTS, NETWORK, SANDBOX, USER
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.node.canary.examination import OBSERVED, trials
from serverless_gpu.node.canary.inspection import process_limit
from serverless_gpu.node.canary.runs import json_lines, program_of
from serverless_gpu.node.canary.targets import MEMORY_BYTES
from serverless_gpu.node.isolation.egress import NodeEgress
from serverless_gpu.node.isolation.machine_egress import measure
from serverless_gpu.node.isolation.principals import PLACE, RANGE
from serverless_gpu.node.processes.process_tree import MemoryWatch, end_cgroup, find_cgroup_root, remove_cgroup
from serverless_gpu.node.spawner.verbs import RootSpawner
from tests.support.node.canary_sandbox import UID, Ended, Place, attempt_in_sandbox, targets_of_a_victim

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sandboxes")

_NO_FILTER = "seal._filter_calls = lambda: None"
_ONE_PROCESS_TREE = """
mounts.CLONE_NEWPID = 0
sandbox.fork_init = os.fork
mount, mounted = mounts.mount, []
def mount_once(kind, at, flags, options=""):
    if kind != "proc" or not mounted:  # A user namespace mounts /proc only for its own pid namespace.
        mounted.extend([at] if kind == "proc" else [])
        mount(kind, at, flags, options)
mounts.mount = mount_once
"""
_NO_USER_NAMESPACE = """
def keep(member, processes, pid, view):
    member.recv(1)
    member.sendall(b"m")
    sandbox._exit_like(pid)
def become(view, keeper):
    mounts.unshare(sandbox._OWN_VIEW | mounts.CLONE_NEWPID)
    keeper.sendall(b"n")
    keeper.recv(1)
    linux.keep_capabilities()
    os.setresgid(view.uid, view.uid, view.uid)
    os.setresuid(view.uid, view.uid, view.uid)
    seal.set_capabilities(sandbox.KEPT)
def hold():  # Without the limit of user namespaces, which would apply to the whole machine.
    mounts.mount("proc", "/proc", 0)
    zygote = os.fork()
    if zygote:
        linux.leave_descriptors()
        os.waitpid(zygote, 0)
        os._exit(0)
sandbox._keep, sandbox._become, sandbox._hold = keep, become, hold
"""
_NO_NAMESPACE_LIMIT = """
class System:
    "The module os, without the write of the limit of user namespaces."
    def __getattr__(self, name):
        return getattr(os, name)
    def write(self, fd, data):
        return 1 if data == b"0" else os.write(fd, data)
sandbox.os = System()
"""
_ALL_OF_SYS = """
show = sandbox.PrivateRoot.mount
def show_all(self, source, at, attributes, *, recursive=True):
    show(self, source, at, attributes)
sandbox.PrivateRoot.mount = show_all
"""
_KEEP_CAPABILITIES = """
reduce = seal.set_capabilities
seal.set_capabilities = lambda wanted: reduce(wanted) if wanted else None
"""


class Removal(NamedTuple):
    """How to remove a measure, and the attempts that are possible without it."""

    source: str
    possible: set[str]
    place: Place = "rank"
    uid: int | None = None


REMOVALS = {
    "own uid": Removal("", {"core-pattern", "kernel-setting", "become-root"}, uid=0),
    "user namespace": Removal(_NO_USER_NAMESPACE, {"swap", "mount-devices", "mount-cgroups"}, place="zygote"),
    "pid namespace": Removal(_ONE_PROCESS_TREE, {"rank-arguments", "slow-rank", "leave-process"}),
    "IPC namespace": Removal(
        "sandbox._OWN_VIEW &= ~mounts.CLONE_NEWIPC",
        {"shared-memory", "semaphore", "message-queue", "posix-message-queue", "leave-shared-memory"},
    ),
    "private root": Removal(
        "mounts.pivot_root = lambda root: None", {"public-file", "service-socket", "other-device", "read-cgroup"}
    ),
    "private /tmp": Removal(
        'in_root("/tmp"); without_mount("/tmp")', {"public-tmp-file", "public-socket", "fill-tmp", "leave-file"}
    ),
    "private /dev/shm": Removal(
        'in_root("/dev/shm"); without_mount("/dev/shm")', {"shared-memory-file", "fill-shared-memory", "leave-segment"}
    ),
    "private /dev": Removal('in_root("/dev")', {"other-device"}),
    "mounts below /sys": Removal(_ALL_OF_SYS, {"read-cgroup"}),
    "seccomp filter": Removal(_NO_FILTER, {"io-uring", "key-ring"}),
    "Landlock scope": Removal("linux.enter_scopes = lambda scopes: None", {"abstract-socket"}),
    "no capabilities": Removal(_KEEP_CAPABILITIES, {"capabilities", "host-name"}),
    "sealed stem": Removal("seal.set_dumpable = lambda *, value: None", {"trace-stem"}),
    "no_new_privs": Removal("seal.forbid_new_privileges = lambda: None", {"setuid-program"}, place="account"),
}
SECOND_LINES = {
    "Landlock scope of signals": (
        Removal(_ONE_PROCESS_TREE, {"signal-rank"}),
        "linux.enter_scopes = lambda scopes: None",
    ),
    "limit of user namespaces": (Removal(_NO_FILTER, {"user-namespace", "user-namespace-clone3"}), _NO_NAMESPACE_LIMIT),
    "own keyring": (Removal(_NO_FILTER, {"session-key"}), "seal.leave_keyring = lambda: None"),
}
"""Measures that refuse an attempt only if another measure fails first."""
_WITHOUT_RUN = {*OBSERVED, "exhaust-memory"}
"""Attempts on limits that the supervisor sets for a run."""
_NAMES = [each.name for each in ATTEMPTS if each.group != NETWORK and each.name not in _WITHOUT_RUN]
RIGHTS_OF_A_ZYGOTE = {
    *("capabilities", "host-name", "mount-namespace", "network-namespace", "mount-by-descriptor"),
    *("io-uring", "key-ring"),
}
"""Attempts that succeed as code of a zygote, which holds capabilities in the user namespace of its principal."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Yield targets on this machine, and a victim with the uid of the sandbox."""
    with targets_of_a_victim(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="module")
def complete(targets: dict[str, object]) -> Ended:
    """Return the outcomes of all attempts in a complete sandbox."""
    return attempt_in_sandbox(targets, _NAMES)


@pytest.fixture(scope="module")
def of_zygote(targets: dict[str, object]) -> Ended:
    """Return the outcomes of all attempts as code of a zygote. The sandbox would wait for a process that it leaves."""
    return attempt_in_sandbox(targets, [name for name in _NAMES if name != "leave-process"], place="zygote")


def test_a_complete_sandbox_refuses_each_attempt(complete: Ended) -> None:
    claimed = {each.name for each in ATTEMPTS if SANDBOX in each.refused_at}
    assert complete.errors == ""
    assert complete.possible & claimed == set()


def test_27_an_own_uid_alone_refuses_all_that_the_level_user_claims(targets: dict[str, object]) -> None:
    found = attempt_in_sandbox(targets, _NAMES, place="account", uid=UID + 2)
    claimed = {each.name for each in ATTEMPTS if USER in each.refused_at}
    assert found.possible & claimed <= {"leave-process"}, "only a supervisor ends processes that a run leaves"


def test_27_the_code_of_a_zygote_reaches_nothing_outside_of_its_user_namespace(of_zygote: Ended) -> None:
    claimed = {each.name for each in ATTEMPTS if SANDBOX in each.refused_at}
    assert of_zygote.errors == ""
    assert of_zygote.possible & claimed == RIGHTS_OF_A_ZYGOTE


@pytest.mark.parametrize("name", REMOVALS)
def test_27_without_a_measure_an_attempt_is_possible(
    name: str, targets: dict[str, object], complete: Ended, of_zygote: Ended
) -> None:
    source, expected, place, uid = REMOVALS[name]
    before = {"rank": complete, "zygote": of_zygote}.get(place) or attempt_in_sandbox(
        targets, sorted(expected), place=place
    )
    assert {each for each in expected if before.outcomes[each].outcome != "refused"} == set(), before
    keys = {} if uid is None else {"uid": uid}
    found = attempt_in_sandbox(targets, sorted(expected), removal=source, place=place, **keys)
    assert found.possible == expected, found


@pytest.mark.parametrize("name", SECOND_LINES)
def test_27_a_second_line_refuses_if_the_first_is_gone(name: str, targets: dict[str, object]) -> None:
    (first, expected, _, _), second = SECOND_LINES[name]
    assert attempt_in_sandbox(targets, sorted(expected), removal=first).possible == set()
    assert attempt_in_sandbox(targets, sorted(expected), removal=f"{first}\n{second}").possible == expected


def test_27_a_sandbox_without_no_new_privs_does_not_start(targets: dict[str, object]) -> None:
    found = attempt_in_sandbox(targets, ["setuid-program"], removal="seal.forbid_new_privileges = lambda: None")
    assert found.outcomes == {}
    assert "PermissionError" in found.errors


def test_27_without_network_rules_a_port_of_the_node_is_open(targets: dict[str, object], tmp_path: Path) -> None:
    environ = {**os.environ, PLACE: str(tmp_path), RANGE: f"{UID}-{UID}"}
    if problem := measure(environ):
        pytest.skip(problem)
    names = ["node-port", "server-port"]
    here = {**targets, "server_port": targets["node_port"]}
    assert attempt_in_sandbox(here, names).possible == {*names}
    egress = NodeEgress(tmp_path, environ, SystemClock(), RootSpawner(environ), server_url=str, say=print)
    try:
        assert egress.require(EgressPolicy()) == ""
        found = attempt_in_sandbox(here, names)
        assert {each.outcome for each in found.outcomes.values()} == {"refused"}, found
    finally:
        egress.leave()


def test_27_the_cgroup_of_an_attempt_limits_its_processes() -> None:
    root = find_cgroup_root(f"serverless_gpu-canary-{os.getpid()}", os.environ)
    made = root.make()
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert process_limit(process.pid).outcome == "possible"
            for path in made:
                (path / "cgroup.procs").write_text(str(process.pid))
            assert process_limit(process.pid).outcome == "refused"
        finally:
            process.kill()
            process.wait()
            for path in made:
                end_cgroup(path)
                remove_cgroup(path)
            root.close()


@pytest.mark.parametrize(("limit", "outcome"), [(MEMORY_BYTES, "refused"), (None, "possible")])
def test_27_the_memory_limit_of_an_attempt_ends_what_uses_more(limit: int | None, outcome: str) -> None:
    command = program_of("runner", f'{{"memory_bytes": {MEMORY_BYTES}, "only": ["exhaust-memory"]}}')
    with subprocess.Popen(
        ["/bin/sh", "-c", 'read -r line; exec "$@"', "sh", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        watch = MemoryWatch(None, process.pid, limit)
        try:
            if watch.note:
                pytest.skip(watch.note)
            output, _ = process.communicate(b"go\n", timeout=30)
        finally:
            process.kill()
            process.wait()
            watch.close()
    assert trials(json_lines(output.decode()))["exhaust-memory"].outcome == outcome


def test_the_targets_leave_nothing_behind(tmp_path: Path) -> None:
    with targets_of_a_victim(tmp_path) as found:
        paths = [Path(str(found[name])) for name in ("node_file", "public_file", "tmp_file", "segment")]
        paths += [Path(str(found["public_socket"])), Path(str(found["service_socket"]))]
        assert all(path.exists() for path in paths)
    assert [path for path in paths if path.exists()] == []
