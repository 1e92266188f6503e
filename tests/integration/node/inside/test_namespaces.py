"""Overlays in a mount namespace of one process: as whoever runs the tests, and as somebody without any rights.

What is entered cannot be left, so every test enters in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.inside import namespaces
from tests.support.golden import golden
from tests.support.odd_environments import refusing, without

NOBODY = 65534

pytestmark = pytest.mark.skipif(namespaces.probe_mounts() != "", reason="this machine cannot mount overlays")

# Loads the module from a directory, as the runtime does; nothing of ours is importable there.
PREAMBLE = """
import json, os, sys
place = sys.argv[1]
sys.path.insert(0, place)
from inside import namespaces
def mount(at, *layers):
    return {"at": os.path.join(place, at), "layers": list(layers), "directory": place}
def refused(*wanted):
    try:
        namespaces.enter_mounts(wanted)
    except OSError as error:
        return str(error)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a directory that every user can reach, with three layers and a place to mount at."""
    directory = Path(tempfile.mkdtemp(prefix="sg-mounts-"))
    directory.chmod(0o755)
    for layer in "abc":
        (directory / layer / "shared").mkdir(parents=True)
        (directory / layer / "shared" / layer).write_text(layer)
        (directory / layer / "which").write_text(layer)
    (directory / "view").mkdir()
    yield directory
    shutil.rmtree(directory)


def run(code: str, place: Path, *, uid: int | None = None, before: tuple[str, ...] = ()) -> str:
    python = sys.executable
    prefix = list(before)
    if uid is not None:
        python = shutil.which("python3", path="/usr/bin") or python
        prefix = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
    shutil.copytree(
        Path(str(namespaces.__file__)).parent, place / "inside", ignore=shutil.ignore_patterns("__pycache__")
    )
    command = [*prefix, python, "-I", "-B", "-c", PREAMBLE + code, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def users() -> list[int | None]:
    can_change = os.geteuid() == 0 and shutil.which("setpriv") and shutil.which("python3", path="/usr/bin")
    return [None, NOBODY] if can_change else [None]


@pytest.mark.parametrize("uid", users())
def test_layers_are_seen_as_one_by_this_process_only(place: Path, uid: int | None) -> None:
    code = """
namespaces.enter_mounts([mount("view", "b", "a", "c")])
print(json.dumps([sorted(os.listdir(place + "/view/shared")), open(place + "/view/which").read(), os.getuid()]))
"""
    assert json.loads(run(code, place, uid=uid)) == [["a", "b", "c"], "b", os.getuid() if uid is None else uid]
    assert os.listdir(place / "view") == []


@pytest.mark.parametrize("uid", users())
def test_nothing_can_be_written_and_no_rights_are_won(place: Path, uid: int | None) -> None:
    code = """
before = os.getcwd()
namespaces.enter_mounts([mount("view", "a", "b")])
assert os.getcwd() == before
try:
    open(place + "/view/new", "w")
except OSError as error:
    print(error.errno)
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(int(status["CapEff"], 16) if os.getuid() else 0, int(status["CapPrm"], 16) if os.getuid() else 0)
print(status["NoNewPrivs"].strip())
"""
    erofs, capabilities, no_new_privileges = run(code, place, uid=uid).splitlines()
    assert (erofs, capabilities, no_new_privileges) == ("30", "0 0", "0")


@pytest.mark.parametrize("uid", users())
def test_a_child_mounts_another_environment_over_the_same_place(place: Path, uid: int | None) -> None:
    code = """
namespaces.enter_mounts([mount("view", "a", "b")])
pid = os.fork()
if pid == 0:
    namespaces.enter_mounts([mount("view", "c", "a")])
    print("child", open(place + "/view/which").read(), sorted(os.listdir(place + "/view/shared")), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print("parent", open(place + "/view/which").read(), sorted(os.listdir(place + "/view/shared")))
"""
    assert run(code, place, uid=uid).splitlines() == [golden("node.mounts.child"), golden("node.mounts.parent")]


@pytest.mark.parametrize("uid", users())
def test_one_mount_lies_in_another_and_an_executed_program_sees_both(place: Path, uid: int | None) -> None:
    code = """
namespaces.enter_mounts([mount("view", "a", "b"), mount("view/shared", "c", "a")])
os.execv("/bin/cat", ["cat", place + "/view/shared/which", place + "/view/which"])
"""
    assert run(code, place, uid=uid) == "ca"


def test_480_layers_fit_and_names_that_do_not_are_refused_before_anything_changes(place: Path) -> None:
    for number in range(480):
        (place / str(number)).mkdir()
        (place / str(number) / f"file{number}").touch()
    code = """
print(refused(mount("view", *["long name of a layer"] * 300)))
print(os.readlink("/proc/self/ns/mnt") == os.readlink("/proc/%d/ns/mnt" % os.getppid()))
namespaces.enter_mounts([mount("view", *map(str, range(480)))])
print(len(os.listdir(place + "/view")))
"""
    refusal, same_namespace, seen = run(code, place).splitlines()
    assert golden("node.mounts.names-300-layers") in refusal
    assert (same_namespace, seen) == ("True", "480")


def test_a_layer_that_is_gone_is_named_with_its_place(place: Path) -> None:
    answer = run('print(refused(mount("view", "a", "gone")))', place)
    assert answer == golden("node.mounts.errno-cannot-mounted", place=place)


@pytest.mark.parametrize("layers", [[], ["a"], ["a", ""], ["a", "b:c"], ["a", "b,upperdir=c"]])
def test_what_is_no_list_of_layers_is_refused(place: Path, layers: list[str]) -> None:
    with pytest.raises(OSError, match=re.escape(golden("node.mounts.layers-overlay"))):
        namespaces.enter_mounts([{"at": str(place / "view"), "layers": layers, "directory": str(place)}])


def test_a_probe_leaves_nothing_and_says_why_not(place: Path) -> None:
    assert namespaces.probe_mounts(str(place)) == ""
    assert sorted(os.listdir(place)) == ["a", "b", "c", "view"]
    assert namespaces.probe_mounts(str(place / "none")).startswith(f"cannot create a directory in {place}/none")


CONTAINER = ("sys_admin",), ("sys_admin", "net_raw", "sys_chroot", "mknod")


@pytest.mark.parametrize("lost", CONTAINER)
def test_23C1_root_without_the_right_to_mount_mounts_in_a_user_namespace(place: Path, lost: tuple[str, ...]) -> None:
    """Every file keeps its owner and root its rights over them: a single id in the map would make them nobody's."""
    (place / "theirs").write_text("private")
    (place / "theirs").chmod(0o600)
    os.chown(place / "theirs", NOBODY, NOBODY)
    code = """
print(namespaces.probe_mounts() or "can", flush=True)
namespaces.enter_mounts([mount("view", "a", "b")])
pid = os.fork()
if pid == 0:  # a stem, in the environment of its zygote
    namespaces.enter_mounts([mount("view", "c", "a")])
    seen = os.stat(place + "/theirs")
    print(open(place + "/view/which").read(), open(place + "/theirs").read(), seen.st_uid, os.getuid(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""
    assert run(code, place, before=without(*lost)).splitlines() == ["can", f"c private {NOBODY} 0"]


def test_23C1_who_can_have_no_namespace_says_which_steps_were_refused(place: Path) -> None:
    refused = "a mount namespace cannot be made: Operation not permitted; with a user namespace: "
    nothing = run("print(namespaces.probe_mounts())", place, before=without("all"))
    assert nothing == golden("node.mounts.ids-user-namespace", refused=refused)
    shutil.rmtree(place / "inside")
    docker = run("print(namespaces.probe_mounts())", place, before=(*without("sys_admin"), *refusing("no-namespaces")))
    assert docker == golden("node.mounts.user-namespace-cannot", refused=refused)
