"""Calls in environments like those that people have: containers, file systems and kernels that refuse something.

The caller, and with it agent, supervisor and ranks, runs behind what `tests.support.odd_environments` puts before it.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import serverless_gpu
from serverless_gpu.client.launch import preflight
from serverless_gpu.environment.service import capture_error
from serverless_gpu.errors import StorageError
from serverless_gpu.node.base.home import Home, find_home
from serverless_gpu.server.core.disk_space import NO_INODES, full_reason, space_problem
from serverless_gpu.testing import agent_status, stop_agent
from tests.support.golden import golden
from tests.support.local.observe import run_script
from tests.support.local.small_environment import Dialogue, SmallEnvironment
from tests.support.odd_environments import read_only_root, refusing, without
from tests.support.small_disks import small_disk

WORK = """
def value():
    import toy
    return toy.VALUE

def compiled():
    import msgspec._core
    return msgspec._core.__file__
"""


@pytest.fixture
def small(own: Path, tmp_path: Path) -> SmallEnvironment:
    """Return an environment and a project of the test's own; the home is in SERVERLESS_GPU_HOME."""
    environment = SmallEnvironment(tmp_path / "here")
    environment.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    environment.write("work.py", WORK)
    return environment


CALL = """
from serverless_gpu import distributed
from serverless_gpu.errors import ServerlessGpuError

def work(rank: int = 0):
    return rank

if __name__ == "__main__":
    try:
        print(distributed(gpus=1, gpu_type="CPU", quiet=True)(work).distributed())
    except ServerlessGpuError as error:
        print(type(error).__name__, error, sep=": ")
"""


def call(directory: Path, *before: str) -> str:
    """Have a script call a function, behind a prefix; return what it prints."""
    script = directory / "call.py"
    script.write_text(CALL)
    return run_script(script, before=before).stdout


def sgpu(*arguments: str, before: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run a command of `sgpu` behind a prefix."""
    command = [*before, sys.executable, "-m", "serverless_gpu.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


RECEIPT = "[run := snapshot(work.value), run.results(60), run.receipt(60).environment, run.receipt(60).warm][1:]"


def test_23C1_root_of_a_container_has_its_environment_mounted(small: SmallEnvironment) -> None:
    small.before = without("sys_admin")
    caller = Dialogue(small, "work")
    try:
        values, environment, _ = eval(caller.ask(RECEIPT))
        assert (values, "links" in environment) == (["one"], False), environment
        small.install("toy", "2.0", {"toy/__init__.py": "VALUE = 'two'\n"})
        values, environment, warm = eval(caller.ask(RECEIPT))  # in the same zygote, whose stem mounts over it
        assert (values, "links" in environment, warm) == (["two"], False, True), environment
    finally:
        caller.close()


@pytest.mark.long
def test_23C1_where_every_way_is_refused_links_are_used_and_the_receipt_says_why(small: SmallEnvironment) -> None:
    small.before = (*without("all"), *refusing("no-namespaces"))
    caller = Dialogue(small, "work")
    try:
        values, environment, _ = eval(caller.ask(RECEIPT))
        assert values == ["one"]
        assert golden("local.odd_environments.links-mounts-mount") in environment
    finally:
        caller.close()


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ("no-flock", "Function not implemented"),
        pytest.param("no-lock-server", "No locks available", marks=pytest.mark.long),
    ],
)
def test_23C3_a_home_without_file_locks_is_named_before_anything_starts(
    own: Path, tmp_path: Path, refused: str, reason: str
) -> None:
    said = f"{own} cannot be used: its file system refuses file locks (flock: {reason})"
    assert call(tmp_path, *refusing(refused)).splitlines()[0] == f"StorageError: {said}"
    assert agent_status(own) is None and not list((own / "runs").iterdir())
    started = sgpu("up", "--port", "0", before=refusing(refused))
    assert started.stderr.startswith(f"sgpu: {own}/server.lock cannot be used: its file system refuses file locks")
    assert started.returncode == 1
    report = sgpu("doctor", "--limit", "3", before=refusing(refused)).stdout
    assert golden("local.odd_environments.failed-locks-file", own=own, reason=reason) in report


def test_23C3_places_for_backups_and_copies_of_the_audit_are_named(own: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from serverless_gpu.cli.access import audit\n"
        "from serverless_gpu.server.operations import backup; from serverless_gpu.errors import StorageError\n"
        "for way in (backup._alone, audit.open_copy):\n"
        "    try:\n        with way(Path(sys.argv.pop())): pass\n"
        "    except StorageError as error: print(error)"
    )
    command = [*refusing("no-flock"), sys.executable, "-c", code, str(tmp_path / "audit"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    refused = "cannot be used: its file system refuses file locks (flock: Function not implemented)"
    hint = "hint: pass a path on a local disk"
    expected = [f"{tmp_path} {refused}", hint, f"{tmp_path / 'audit'} {refused}", hint]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.long
def test_23C10_a_server_names_the_home_in_which_sqlite_cannot_lock(own: Path) -> None:
    started = sgpu("up", "--port", "0", before=refusing("no-record-locks"))
    assert started.returncode == 1
    assert started.stderr.splitlines()[0] == golden("local.odd_environments.sgpu-server-database", own=own)
    report = sgpu("doctor", "--limit", "3", before=refusing("no-record-locks")).stdout
    assert golden("local.odd_environments.warning-locks-file", own=own) in report


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ("no-pidfd", "Function not implemented"),
        pytest.param("no-pidfd-allowed", "Operation not permitted", marks=pytest.mark.long),
    ],
)
def test_23C4_a_kernel_without_pidfd_is_refused_before_anything_starts(
    own: Path, tmp_path: Path, refused: str, reason: str
) -> None:
    sentence = f"Linux {os.uname().release} refuses pidfd_open here: {reason}"
    first, second = call(tmp_path, *refusing(refused)).splitlines()
    assert first == golden("local.odd_environments.hardwareerror-machine-cannot", sentence=sentence)
    assert second.startswith("hint: use Linux 5.3 or newer, and in a container a runtime whose seccomp profile")
    assert agent_status(own) is None and not list((own / "runs").iterdir())
    assert (
        golden("local.odd_environments.failed-kernel-run", sentence=sentence)
        in sgpu("doctor", "--limit", "3", before=refusing(refused)).stdout
    )


@pytest.fixture
def noexec(own: Path) -> Iterator[Path]:
    """Yield the home, on a file system from which nothing can be executed."""
    with small_disk("256m", at=own, options="mode=0700,noexec"):
        yield own
        stop_agent(own)


def test_23C6_a_mounted_environment_works_in_a_home_without_execution(noexec: Path, small: SmallEnvironment) -> None:
    caller = Dialogue(small, "work")
    try:
        assert "environments" in eval(caller.ask("call(work.compiled)"))
    finally:
        caller.close()


@pytest.mark.long
def test_23C6_links_in_a_home_without_execution_are_refused_with_the_flag(
    noexec: Path, small: SmallEnvironment
) -> None:
    small.before = (*without("all"), *refusing("no-namespaces"))
    caller = Dialogue(small, "work")
    try:
        said = caller.ask("call(work.compiled)")
        assert golden("local.odd_environments.environments-lies-file", noexec=noexec) in said
        assert golden("local.odd_environments.mounts-mount-namespace") in said
        assert golden("local.odd_environments.hint-set-serverless") in said
        report = sgpu("doctor", "--limit", "3", before=small.before).stdout
        assert golden("local.odd_environments.failed-home-filesystem", noexec=noexec) in report
    finally:
        caller.close()


@pytest.mark.long
def test_23C7_a_server_starts_in_a_home_without_hard_links(own: Path) -> None:
    command = [*refusing("no-hard-links"), sys.executable, "-m", "serverless_gpu.cli", "up", "--port", "0", "--no-node"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("serverless-gpu "), process.communicate(timeout=60)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert (own / "server" / "key").stat().st_mode & 0o777 == 0o600


def test_23C7_secrets_of_a_run_need_symbolic_links_and_say_so(own: Path) -> None:
    code = (
        "import sys, pathlib; from serverless_gpu.node.attempt import secret_files\n"
        "secret_files.write(pathlib.Path(sys.argv[1]), {})"
    )
    command = [*refusing("no-symlinks"), sys.executable, "-c", code, str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.stderr.splitlines()[-2:] == [
        golden("local.odd_environments.serverless-gpu-errors", own=own),
        golden("local.odd_environments.hint-set-serverless-gpu"),
    ]


@pytest.mark.parametrize(
    "before", [(), pytest.param((*without("all"), *refusing("no-namespaces")), marks=pytest.mark.long)]
)
def test_23C7_a_snapshot_is_restored_without_hard_links(small: SmallEnvironment, before: tuple[str, ...]) -> None:
    small.before = (*before, *refusing("no-hard-links"))
    caller = Dialogue(small, "work")
    try:
        values, environment, _ = eval(caller.ask(RECEIPT))
        assert values == ["one"]
        assert (golden("local.odd_environments.files-copied-linked") in environment) == bool(before)
    finally:
        caller.close()


def test_23C7_a_home_without_symbolic_links_is_named_and_not_called_full(own: Path, small: SmallEnvironment) -> None:
    small.before = refusing("no-symlinks")
    caller = Dialogue(small, "work")
    try:
        said = caller.ask("call(work.value)")
        assert said.startswith(
            f"RunError: the environment could not be restored: environments cannot be restored to {own}/environments: "
            "its file system has no symbolic links (Operation not permitted)"
        )
        assert golden("local.odd_environments.file-system-them") in said
    finally:
        caller.close()


@pytest.mark.long
def test_23C5_a_snapshot_is_taken_and_used_without_any_temporary_directory(
    own: Path, small: SmallEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_SOCKETS", str(own / "s"))
    small.before = read_only_root(own)
    caller = Dialogue(small, "work")
    try:
        values, environment, _ = eval(caller.ask(RECEIPT))
        assert (values, "links" in environment) == (["one"], False)
    finally:
        caller.close()
        stop_agent(own)
    report = sgpu("doctor", "--limit", "3", before=small.before).stdout
    assert golden("local.odd_environments.failed-temporary-files") in report


def test_23C5_where_nothing_can_be_written_one_line_says_so_and_what_helps(own: Path, tmp_path: Path) -> None:
    nowhere = read_only_root()
    said = call(tmp_path, *nowhere)
    assert said.startswith(f"StorageError: neither {own} (Read-only file system) nor /tmp/serverless_gpu-home-")
    assert golden("local.odd_environments.container-read-only") in said
    report = sgpu("doctor", "--limit", "3", before=nowhere).stdout.splitlines()
    assert sum(golden("local.odd_environments.can-written") in line for line in report) == 1
    assert [line for line in report if golden("local.odd_environments.home-look") in line and "agent" in line] == [
        golden("local.odd_environments.unknown-agent-cgroups")
    ]


def test_22B2_a_server_whose_home_is_read_only_is_refused_and_none_starts_elsewhere(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where there is room for another home
    said = sgpu("up", "--port", "0", "--no-node", "--no-mlflow", before=read_only_root(tmp_path))
    assert (said.returncode, said.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert said.stderr.startswith(f"sgpu: {own} cannot be written to (Read-only file system), and a server stores its ")


def test_23C5_a_home_that_can_be_written_beside_a_read_only_tmp_names_the_sockets(own: Path, tmp_path: Path) -> None:
    said = call(tmp_path, *read_only_root(own))
    assert said.splitlines() == [
        golden("local.odd_environments.storageerror-cannot-make", getuid=os.getuid(), name=Home(own).sockets().name),
        golden("local.odd_environments.hint-set-serverless-gpu-2"),
    ]


def use_up_inodes(directory: Path) -> None:
    """Make files until the disk of a directory can hold no more of them."""
    with contextlib.suppress(OSError):
        for number in itertools.count():
            (directory / f"used-{number}").touch()


@pytest.fixture
def few_files(own: Path) -> Iterator[Path]:
    """Yield the home, on a disk that can hold 40 files and has much room."""
    with small_disk("256m", at=own, options="mode=0700,nr_inodes=40"):
        yield own
        stop_agent(own)


def test_23C9_a_disk_without_inodes_is_not_called_full(few_files: Path, tmp_path: Path) -> None:
    for name in ("runs", "locks", "checkpoints"):
        (few_files / name).mkdir()
    use_up_inodes(few_files)
    first, second = call(tmp_path).splitlines()
    assert first.startswith(f"StorageError: no inodes left for {few_files}/")
    assert first.endswith(": its disk has space, but cannot store one more file")
    assert second.startswith(
        "hint: delete files on that disk (`sgpu clean` removes old runs, `sgpu env gc` environments)"
    )
    report = sgpu("doctor", "--limit", "3", before=()).stdout
    assert golden("local.odd_environments.failed-disk-space", few_files=few_files) in report


def test_23C9_a_store_without_inodes_is_not_called_full(few_files: Path, small: SmallEnvironment) -> None:
    caller = Dialogue(small, "work")
    try:
        said = caller.ask("call(work.value)")
        assert golden("local.odd_environments.storageerror-inodes-left") in said and "free some space" not in said, said
    finally:
        caller.close()


def test_23C9_a_home_that_cannot_be_made_for_want_of_inodes_says_so(few_files: Path, tmp_path: Path) -> None:
    use_up_inodes(few_files)
    home = find_home({"SERVERLESS_GPU_HOME": str(few_files), "TMPDIR": str(tmp_path)})
    assert home.note.startswith(f"{few_files} cannot be written to (No inodes left on device)")


def test_23C9_calls_captures_and_the_server_name_the_inodes_of_their_disk(few_files: Path) -> None:
    few_files.joinpath("there").touch()
    use_up_inodes(few_files)
    with pytest.raises(StorageError, match=golden("local.odd_environments.inodes-left-call", few_files=few_files)):
        preflight.pack(str(few_files / "call.pkl"), len, ("x",), {})
    refused = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(few_files / "index"))
    assert (
        golden("local.odd_environments.inodes-left") in str(capture_error(refused))
        and "free some space" not in capture_error(refused).hint
    )
    assert (
        space_problem(few_files) == golden("local.odd_environments.server-disk", NO_INODES=NO_INODES)
        and full_reason(few_files, refused) == NO_INODES
    )


def copied_python(directory: Path) -> Path:
    """Copy this Python, without what is installed for it; return the program."""
    program = Path(os.path.realpath(sys.executable))
    library = Path(sysconfig.get_path("stdlib"))
    left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__", "idlelib", "config-*")
    shutil.copytree(library, directory / "lib" / library.name, ignore=left_out, symlinks=True)
    (directory / "lib" / library.name / "site-packages").mkdir()
    (directory / "bin").mkdir()
    shutil.copy2(program, directory / "bin" / program.name)
    return directory / "bin" / program.name


@pytest.mark.long
def test_23C8_the_standard_library_is_there_where_its_python_lies_in_the_project(own: Path, tmp_path: Path) -> None:
    """Beside it a directory `site`, as a built web page has it: a name of the standard library's."""
    python = copied_python(tmp_path / "here" / "project" / "python")
    small = SmallEnvironment(tmp_path / "here", python=str(python))
    (small.project / "site").mkdir()
    (small.project / "site" / "index.html").write_text("")
    small.write("work.py", "def where():\n    import site, wave\n    return [wave.__file__, site.__file__]\n")
    caller = Dialogue(small, "work")
    try:
        library = python.parents[1] / "lib" / Path(sysconfig.get_path("stdlib")).name
        expected = [str(library / "wave.py"), str(library / "site.py")]
        for is_warm in (False, True):
            asked = "[run := snapshot(work.where), run.results(60)[0], run.receipt(60).warm][1:]"
            assert eval(caller.ask(asked)) == [expected, is_warm]
    finally:
        caller.close()


DECORATED = """
from serverless_gpu import distributed

@distributed(gpus=1, gpu_type="CPU")
def work():
    return 1

print("decorated", work())
"""


def test_23C10_decorating_needs_no_thread(own: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DECORATED)
    done = run_script(script, environ={"SERVERLESS_GPU_PREWARM": "1"}, before=refusing("no-threads"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "decorated 1\n", "")


def test_23C10_a_capture_and_the_doctor_name_the_limit_of_threads(own: Path, small: SmallEnvironment) -> None:
    small.before = refusing("no-threads")
    limit = "no thread can be started: the limit of processes and threads is reached"
    caller = Dialogue(small, "work")
    try:
        assert caller.ask("call(work.value)").startswith(f"HardwareError: {limit} | hint: raise the limit: `ulimit -u`")
    finally:
        caller.close()
    done = sgpu("doctor", "--limit", "3", before=refusing("no-threads"))
    assert limit in done.stdout and "Traceback" not in done.stderr


def test_23C10_a_server_names_the_limit_of_threads(own: Path) -> None:
    started = sgpu("up", "--port", "0", "--no-node", before=refusing("no-threads"))
    first, second = started.stderr.splitlines()
    assert started.returncode == 1
    assert first == golden("local.odd_environments.sgpu-thread-can")
    assert second.startswith("hint: raise the limit: `ulimit -u`")


def test_23C10_the_product_inside_an_archive_is_refused_with_one_sentence(own: Path, tmp_path: Path) -> None:
    archive = tmp_path / "product.zip"
    package = Path(serverless_gpu.__file__).parent
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("__init__.py", "version.py"):
            file.write(package / name, f"serverless_gpu/{name}")
    code = f"import sys; sys.path.insert(0, {str(archive)!r}); import serverless_gpu"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: serverless_gpu cannot run from an archive ({archive}/serverless_gpu): "
    )
