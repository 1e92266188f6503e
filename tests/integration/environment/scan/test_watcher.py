"""C3: the watches on a library find every change that a full look finds, or they are not had at all."""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from serverless_gpu.environment.scan import watcher
from serverless_gpu.environment.scan.watcher import Inotify, mounts_about
from serverless_gpu.environment.watch_process import LOOKS_MAX, WatchBackoff
from tests.support.environment.libraries import Library, write_in_place
from tests.support.golden import golden
from tests.support.small_disks import small_disk


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    made = Library(tmp_path)
    yield made
    made.close()


@pytest.fixture
def mapping() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def link_and_write(library: Library) -> None:
    os.link(library.real / "b.py", library.outside / "b.py")
    write_in_place(library.outside / "b.py")


def rename_over(library: Library) -> None:
    new = library.outside / "new.py"
    new.write_text("one = 3\n")
    new.replace(library.real / "a" / "one.py")


def replace_directory(library: Library) -> None:
    (library.real / "a" / "deep").rename(library.outside / "deep")
    (library.real / "a" / "deep").mkdir()
    (library.real / "a" / "deep" / "two.py").write_text("two = 3\n")


def switch_link(library: Library) -> None:
    (library.outside / "next").symlink_to("other")
    (library.outside / "next").replace(library.outside / "current")


def replace_link(library: Library) -> None:
    (library.outside / "next").symlink_to(library.outside / "other" / "three.py")
    (library.outside / "next").replace(library.real / "three.py")


def switch_top(library: Library) -> None:
    venv = library.site.parents[2]
    (venv.parent / "copy" / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (venv.parent / "next").symlink_to("copy")
    (venv.parent / "next").replace(venv)


def rename_above(library: Library) -> None:
    library.real.parents[1].rename(library.outside / "gone")


def restore_time(library: Library) -> None:
    before = (library.real / "b.py").stat()
    write_in_place(library.real / "b.py")
    os.utime(library.real / "b.py", ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = {
    "written in place": lambda library: write_in_place(library.real / "b.py"),
    "written in place, its time put back": restore_time,
    "written by another hard link": lambda library: write_in_place(library.other_name),
    "hard-linked later, and written by that name": link_and_write,
    "truncated": lambda library: os.truncate(library.real / "b.py", 1),
    "made executable": lambda library: (library.real / "b.py").chmod(0o755),
    "renamed over": rename_over,
    "removed": lambda library: (library.real / "b.py").unlink(),
    "new file": lambda library: (library.real / "new.py").touch(),
    "new directory": lambda library: (library.real / "new").mkdir(),
    "directory replaced": replace_directory,
    "link to a file replaced": replace_link,
    "target of a link written": lambda library: write_in_place(library.outside / "linked" / "three.py"),
    "link in the path of a link's target switched": switch_link,
    "link in the path of the library switched": switch_top,
    "directory above the library renamed": rename_above,
}


@pytest.mark.parametrize("change", CHANGES)
def test_22C3_watches_report_what_a_full_look_finds(library: Library, change: str) -> None:
    watches = library.watch()
    assert watches.ask() == watches.ask() == ""
    CHANGES[change](library)
    assert watches.ask()
    assert library.is_changed(), "the change is one"


@pytest.mark.parametrize("change", [switch_top, rename_above])
def test_22C3_another_directory_in_the_place_of_the_library_shows_by_itself(
    tmp_path: Path, change: Callable[[Library], None]
) -> None:
    plain = Library(tmp_path, links=False)  # whose stat would show it as well
    watches = plain.watch()
    change(plain)
    assert "was replaced" in watches.ask() or "No such file" in watches.ask()
    plain.close()


def test_22C3_reads_bytecode_and_other_directories_are_no_change(library: Library) -> None:
    watches = library.watch()
    for path in library.real.rglob("*.py"):
        path.read_bytes()
    (library.real / "a" / "__pycache__").mkdir()
    (library.real / "a" / "__pycache__" / "one.cpython-311.pyc").touch()
    (library.real / "old.pyc").touch()
    (library.outside / "new.py").touch()
    assert watches.ask() == watches.ask() == ""
    assert not library.is_changed()


@pytest.mark.parametrize("flushed", [True, False])
def test_22C3_a_write_through_a_mapping_shows_although_no_event_tells_of_it(
    library: Library, mapping: ExitStack, flushed: bool
) -> None:
    watches = library.watch()
    opened = mapping.enter_context((library.real / "a" / "data.bin").open("r+b"))
    mapped = mapping.enter_context(mmap.mmap(opened.fileno(), 0))
    assert watches.ask() == "", "opened is not written"
    mapped[0:1] = b"1"
    if flushed:
        mapped.flush()
    assert watches.ask() == golden("environment.watcher.file-another-size")
    assert library.is_changed()


def test_22C3_a_mapping_from_before_the_watches_shows_when_it_ends(library: Library) -> None:
    """Until then only a first write to a page moves the file's times: `watcher.py` says so."""
    with (library.real / "a" / "data.bin").open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        watches = library.watch()
        mapped[0:1] = b"1"
    assert "was changed" in watches.ask()


def test_22C3_more_events_than_the_queue_holds_count_as_a_change(library: Library) -> None:
    watches = library.watch()
    queue = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    files = [library.real / "a" / "__pycache__" / "x", library.real / "old.pyc", library.real / "older.pyc"]
    for number in range(queue + 1):  # none of them counts, were it not for the queue
        files[1 + number % 2].touch() if number < 2 else files[1 + number % 2].chmod(0o600)
    assert "queue" in watches.ask()


def test_22C3_more_opened_files_than_are_compared_count_as_a_change(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = library.watch()
    monkeypatch.setattr(watcher, "COMPARED_MAX", 2)
    (library.real / "a" / "one.py").read_bytes()
    assert watches.ask() == ""
    (library.real / "b.py").read_bytes()
    assert watches.ask() == golden("environment.watcher.more-files-opened")


def test_22C3_a_mount_over_a_directory_of_the_library_shows(library: Library) -> None:
    watches = library.watch()
    with small_disk("1m", at=library.real / "a" / "deep"):
        assert watches.ask() == golden("environment.watcher.something-mounted-unmounted")
        assert library.is_changed()
        assert golden("environment.watcher.another-file-system", real=library.real) in library.refusal()


@pytest.mark.parametrize(
    "kind",
    [0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997, 0x794C7630],
    ids=["nfs", "cifs", "smb2", "fuse", "9p", "overlay"],
)
def test_22C3_file_systems_that_change_unseen_are_not_watched(
    library: Library, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setattr(watcher, "file_system", lambda path: kind)
    assert golden("environment.watcher.file-system-type", kind=kind) in library.refusal()


def test_22C3_watches_are_left_for_others(library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library.watch()
    (tmp_path / "limit").write_text("10\n")
    monkeypatch.setattr(watcher, "WATCHES_LIMIT", str(tmp_path / "limit"))
    assert re.fullmatch(r"\d+ watches exceed 50% of fs.inotify.max_user_watches \(10\)", library.refusal())


@pytest.mark.parametrize(
    ("method", "code", "says"),
    [("_watch", errno.ENOSPC, "max_user_watches"), ("__init__", errno.EMFILE, "max_user_instances")],
)
def test_22C3_used_up_watches_and_queues_are_named(
    library: Library, monkeypatch: pytest.MonkeyPatch, method: str, code: int, says: str
) -> None:
    library.watch()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Inotify, method, refuse)
    assert says in library.refusal()


def test_22C3_what_changed_since_the_capture_is_not_the_baseline(library: Library) -> None:
    write_in_place(library.real / "b.py")
    assert library.refusal() == golden("environment.watcher.environment-changed-meanwhile")


def test_22C3_what_changes_while_the_watches_are_placed_is_not_the_baseline(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.watch()
    check = library.recogniser.check

    def check_and_write() -> object:
        found = check()
        write_in_place(library.other_name)
        return found

    monkeypatch.setattr(library.recogniser, "check", check_and_write)
    assert library.refusal() == golden("environment.watcher.environment-changed-meanwhile-file")


def test_22C3_too_many_links_to_other_places_are_not_watched(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.watch()
    monkeypatch.setattr(watcher, "COMPARED_MAX", 0)
    assert golden("environment.watcher.links-other-places") in library.refusal()


def test_22C3_a_mount_concerns_what_lies_above_and_below_it() -> None:
    def line(point: str) -> str:
        return f"29 1 8:1 / {point} rw - ext4 /dev/vda rw"

    lines = [line(point) for point in ("/", "/v", r"/v/a\040b", r"/v/a\040b/c", "/v/a", "/w")]
    assert mounts_about(["/v/a b"], "\n".join(lines)) == frozenset(lines[:4])


def test_22C3_watches_of_no_use_are_placed_less_and_less_often() -> None:
    patience = WatchBackoff()
    pauses = []
    for _ in range(6):
        looks = 0
        while not patience.is_due():
            looks += 1
        pauses.append(looks)
        patience.count(0)
    assert pauses == [0, 1, 3, 7, LOOKS_MAX, LOOKS_MAX]
    patience.count(1)
    assert patience.is_due()
