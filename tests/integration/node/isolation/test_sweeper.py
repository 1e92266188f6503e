"""What the sweeper finds of real uids: processes, files, shared memory and queues; and when a uid gets free again."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue, IsolationUnavailable
from serverless_gpu.node.isolation import remains
from serverless_gpu.node.isolation.principals import PLACE, RANGE, PrincipalMap, Principals
from serverless_gpu.node.isolation.remains import RemainKind
from serverless_gpu.node.isolation.survey import posix_queues, survey
from serverless_gpu.node.isolation.sweeper import forget, note_finding, read_findings, sweep
from tests.support.golden import golden
from tests.support.node.served_spawner import with_capabilities

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

FIRST = 1_899_999_000


def leave(uid: int, shared: Path, queue: str) -> list[int]:
    """Leave files and objects of all kinds behind as a uid. Return the numbers of the SysV objects."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            (shared / "own" / "below").mkdir(parents=True)
            (shared / "own" / "below" / "file").touch()
            (shared / "open" / "nested").mkdir()
            libc, librt = ctypes.CDLL(None), ctypes.CDLL("librt.so.1")
            assert librt.mq_open(f"/{queue}".encode(), os.O_RDWR | os.O_CREAT, 0o600, None) >= 0
            made = (libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600))
            os.write(writing, " ".join(map(str, made)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading, encoding="ascii") as answer:
        return [int(word) for word in answer.read().split()]


class Place:
    """A map of principals, and a directory that all users can write."""

    def __init__(self, directory: Path) -> None:
        self.environ = {PLACE: str(directory / "principals"), RANGE: f"{FIRST}-{FIRST + 2}"}
        self.known = PrincipalMap(self.environ)
        self.home = directory / "home"
        self.shared = directory / "shared"
        self.home.mkdir()
        for path in (self.shared, self.shared / "open"):
            path.mkdir()
            path.chmod(0o1777)
        self.queue = f"sgpu-test-{os.getpid()}"
        self.objects: list[int] = []

    def principals(self) -> Principals:
        return Principals(self.environ)

    def found(self, uid: int) -> set[RemainKind]:
        return {each.kind for each in survey((uid,), [str(self.shared)]).found}

    def close(self) -> None:
        libc = ctypes.CDLL(None)
        for call, number in zip((libc.shmctl, libc.semctl, libc.msgctl), self.objects, strict=False):
            call(number, 0, *((0,) if call is libc.semctl else (None,)))
        if any(name == self.queue for name, _, _ in posix_queues()):
            posix_queues(self.queue)


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="sg-sweep-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o711)
        made = Place(Path(directory))
        yield made
        made.close()


def test_27_the_sweeper_removes_what_an_ended_attempt_left_and_reports_the_rest(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = place.principals().of("ana of s", place.home).uid
    place.objects = leave(uid, place.shared, place.queue)
    things = {
        *(RemainKind.FILE, RemainKind.SHARED_MEMORY, RemainKind.SEMAPHORES, RemainKind.MESSAGES),
        RemainKind.POSIX_QUEUE,
    }
    assert place.found(uid) == things
    young = sweep(place.known, [str(place.shared)])
    assert (young.removed, young.reported, young.unknown) == ((), (), ())

    monkeypatch.setattr(remains, "LEFT_S", -60.0)
    with subprocess.Popen(["sleep", "60"], user=uid, group=uid) as process:
        try:
            busy = sweep(place.known, [str(place.shared)])
        finally:
            process.kill()
    assert busy.removed == () and busy.reported == (golden("node.sweeper.process", pid=process.pid, uid=uid),)
    done = sweep(place.known, [str(place.shared)])
    assert len(done.removed) == 5 and done.reported == (
        golden("node.sweeper.nested", path=f"{place.shared}/open/nested", uid=uid),
    )
    assert place.found(uid) == {RemainKind.FILE} and not (place.shared / "own").exists()
    assert read_findings(place.known.place) == done


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_27_the_capabilities_of_a_spawner_suffice_for_a_sweep(place: Place) -> None:
    uid = place.principals().of("ana of s", place.home).uid
    place.objects = leave(uid, place.shared, place.queue)
    program = (
        "import os\n"
        "from serverless_gpu.node.isolation import principals, remains, sweeper\n"
        "remains.LEFT_S = -60.0\n"
        f"print(len(sweeper.sweep(principals.PrincipalMap(os.environ), [{str(place.shared)!r}]).removed))"
    )
    words = [*with_capabilities(), sys.executable, "-c", program]
    environ = {**os.environ, **place.environ}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True, env=environ)
    assert (done.stdout.strip(), place.found(uid)) == ("5", {RemainKind.FILE})


def test_27_a_uid_gets_free_only_after_nothing_remains_and_goes_to_no_one_before(place: Place) -> None:
    ana = place.principals().of("ana of s", place.home)
    Path(ana.home, "notes").write_text("mine")
    attempt = place.home / "runs" / "run" / "1" / "results"
    attempt.mkdir(parents=True)
    os.chown(attempt, ana.uid, ana.uid)
    shared = [str(place.shared)]
    with pytest.raises(InvalidValue, match="names 0 principals"):
        forget(place.known, "bob", delete_home=True, shared=shared)
    with pytest.raises(IsolationUnavailable, match="something remains: attempt"):
        forget(place.known, "ana", delete_home=True, shared=shared)
    attempt.rmdir()
    with pytest.raises(IsolationUnavailable, match="--delete-home"):
        forget(place.known, "ana", delete_home=False, shared=shared)
    with subprocess.Popen(["sleep", "60"], user=ana.uid, group=ana.uid) as process:
        try:
            with pytest.raises(IsolationUnavailable, match=r"process \d+ \(sleep\)"):
                forget(place.known, "ana", delete_home=True, shared=shared)
        finally:
            process.kill()
    assert Path(ana.home, "notes").exists()
    assert forget(place.known, "ana", delete_home=True, shared=shared) == "ana of s"
    assert not Path(ana.home).exists() and place.known.read() == {}

    # Something of the uid appears afterwards, so another principal gets another uid.
    with subprocess.Popen(["sleep", "60"], user=ana.uid, group=ana.uid) as process:
        try:
            assert place.principals().of("bob of s", place.home).uid == ana.uid + 1
        finally:
            process.kill()
    assert place.principals().of("carol of s", place.home).uid == ana.uid


def test_a_home_without_an_entry_in_the_map_keeps_its_uid_from_others(place: Place) -> None:
    place.principals().of("ana of s", place.home)
    (place.known.place / "uids.json").unlink()
    assert place.principals().of("bob of s", place.home).uid == FIRST + 1


def test_a_finding_of_the_agent_stays_for_a_day(place: Place) -> None:
    note_finding(place.known, "a process was left")
    assert sweep(place.known, [str(place.shared)]).sentences() == ("a process was left",)
    (old,) = read_findings(place.known.place).noted
    path = place.known.place / "findings.json"
    path.write_bytes(
        msgspec.json.encode({"noted": [{"at_ns": old.at_ns - 2 * 86_400 * 10**9, "sentence": old.sentence}]})
    )
    assert sweep(place.known, [str(place.shared)]).sentences() == ()


def test_a_place_with_too_many_files_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serverless_gpu.node.isolation.survey._ENTRIES_MAX", 0)
    found = survey((FIRST,), [str(place.shared)])
    assert [text.partition(" ")[0] for text in found.unknown] == [str(place.shared)]
