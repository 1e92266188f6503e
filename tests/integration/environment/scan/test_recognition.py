"""What sees what: each way to change an environment, and which look at it finds the change."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.scan import recognition
from serverless_gpu.environment.scan import scan as scan_module
from serverless_gpu.environment.scan.changes import Change
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.index import UNKNOWN, known_mtime
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.testing import FakeClock
from tests.support.environment.scans import wait_for_ticks
from tests.support.environment.wheels import Venv, Wheel, build_wheel, run
from tests.support.golden import golden

ALPHA = Wheel(name="alpha", files={"alpha/__init__.py": "value = 1\n", "alpha/data.txt": "data\n"})
ALPHA_2 = Wheel(name="alpha", version="2.0", files={"alpha/__init__.py": "value = 2\n", "alpha/more.py": ""})
BETA = Wheel(name="beta", files={"beta/__init__.py": "0", "beta/deep/er/file.py": "x = 1\n"})


class Place:
    """An environment that was captured: a venv by uv with alpha and beta, and a project."""

    def __init__(self, directory: Path) -> None:
        self.wheels = directory / "wheels"
        self.alpha, self.alpha_2, self.beta = (build_wheel(self.wheels, one) for one in (ALPHA, ALPHA_2, BETA))
        self.cache = directory / "cache"
        self.venv = Venv(directory / "venv")
        self.venv.install_with_uv(self.alpha, self.beta, cache=self.cache, link_mode="hardlink")
        self.alpha_module = self.venv.site / "alpha" / "__init__.py"
        self.project = directory / "project"
        self.late = directory / "late"
        (self.project / "package").mkdir(parents=True)
        (self.project / "train.py").write_text("import package\n")
        (self.project / ".gitignore").write_text("*.log\n")
        self.finder = self.venv.site / "__editable___tool_finder.py"  # both name the project: they are generated
        self.finder.write_text(f"MAPPING = {{'tool': '{self.project}/package'}}\n")
        self.link = self.venv.site / "link.pth"
        self.link.write_text(f"{self.project}\n")
        self.index = directory / "index"
        self.target = directory / "deps"
        self.venv.install_with_uv(self.beta, cache=self.cache, target=self.target)
        self.linked = directory / "outside.py"  # as uv's links into its cache
        shutil.copyfile(self.venv.site / "beta" / "__init__.py", self.linked)
        (self.venv.site / "beta" / "__init__.py").unlink()
        (self.venv.site / "beta" / "__init__.py").symlink_to(self.linked)
        self.recogniser = Recogniser(self.index)
        self.description = self.describe()

    def describe(self) -> Description:
        return self.venv.describe(cwd=self.project, PYTHONPATH=f"{self.target}:{self.late}")

    def capture(self) -> str:
        scan = self.recogniser.scan(self.description, ignore_progress)
        self.recogniser.remember(scan)
        return scan.snapshot.address

    def look(self, recogniser: Recogniser | None = None) -> tuple[str, tuple[Change, ...]]:
        """Return what the gate says (an address, or "changed"), and what the check finds."""
        looking = recogniser or self.recogniser
        snapshot = looking.gate(self.description)
        return (snapshot.address if snapshot else "changed"), looking.check()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)


def edited(*files: str, name: str = "alpha") -> tuple[Change, ...]:
    return (Change(kind="distribution", name=name, what="edited", detail="1.0", files=files),)


def append(*files: Path) -> None:
    for file in files:
        with open(file, "a") as opened:
            opened.write("# more\n")


def write_below(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("{}")


def replace(file: Path) -> None:
    temporary = file.with_name("sed.tmp")
    temporary.write_text(file.read_text() + "# more\n")
    temporary.replace(file)


def write_mapped(file: Path) -> None:
    with open(file, "r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[0:1] = b"V"


def replace_linked(place: Place) -> None:
    before = place.linked.stat()
    other = place.linked.with_name("other.py")
    other.write_text("1")
    os.utime(other, ns=(0, before.st_mtime_ns))
    other.replace(place.linked)


def import_alpha(place: Place) -> None:
    place.venv.run("import alpha, beta.deep.er.file")
    assert list(place.venv.site.rglob("*.pyc"))


def edit_unseen(file: Path) -> None:
    """Edit a file and put size and mtime back, as `rsync -a` and reproducible builds do."""
    before = file.stat()
    edited = bytearray(file.read_bytes())
    edited[-1:] = b" "
    with open(file, "r+b") as opened:
        opened.write(edited)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def close(directory: Path) -> None:
    for path in directory.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)


def link_elsewhere(place: Place) -> None:
    for file in (place.alpha_module, place.project / "train.py"):
        os.link(file, place.late.with_name(f"link-{file.name}"))


def touch(*files: Path) -> None:
    for file in files:
        os.utime(file, ns=(1, time.time_ns()))


# What happens, and what gate and check say of it; None: the gate sees it.
GATE_SEES: dict[str, Callable[[Place], object]] = {
    "sed -i": lambda place: replace(place.alpha_module),
    "a file added": lambda place: (place.venv.site / "alpha" / "new.py").write_text(""),
    "a .pth added": lambda place: (place.venv.site / "new.pth").write_text("import os\n"),
    "a file removed": lambda place: place.alpha_module.unlink(),
    "a distribution upgraded": lambda place: place.venv.install_with_uv(place.alpha_2, cache=place.cache),
    "a distribution removed": lambda place: place.venv.pip("uninstall", "--yes", "beta"),
    "a data file added to the prefix": lambda place: write_below(place.venv.prefix / "share" / "jupyter" / "k.json"),
    "a script added": lambda place: (place.venv.prefix / "bin" / "tool").write_text("#!/bin/sh\n"),
    "RECORD edited": lambda place: append(next(place.venv.site.glob("beta-*/RECORD"))),
    "a distribution added below a library": lambda place: place.venv.install_with_uv(
        place.beta, cache=place.cache, target=place.venv.site / "alpha"
    ),
    "a file added to a target directory": lambda place: (place.target / "new.py").write_text(""),
    "a .pth that names a directory edited in place": lambda place: append(place.link),
    "a finder that names a directory edited in place": lambda place: append(place.finder),
    "an editable install": lambda place: (place.venv.site / "editable.pth").write_text(f"{place.project}\n"),
    "code edited": lambda place: append(place.project / "train.py"),
    "code edited, size kept": lambda place: (place.project / "train.py").write_text("import packagE\n"),
    "code edited, size and mtime kept": lambda place: edit_unseen(place.project / "train.py"),
    "code added": lambda place: (place.project / "package" / "new.py").write_text(""),
    "code removed": lambda place: (place.project / "train.py").unlink(),
    "code made executable": lambda place: (place.project / "train.py").chmod(0o755),
    ".gitignore edited": lambda place: append(place.project / ".gitignore"),
    ".sgpuignore added": lambda place: (place.project / ".sgpuignore").write_text("train.py\n"),
    "a directory of sys.path appears": lambda place: place.late.mkdir(),
    "pyvenv.cfg edited": lambda place: append(place.venv.prefix / "pyvenv.cfg"),
    "a package's directory removed": lambda place: shutil.rmtree(place.venv.site / "beta" / "deep"),
}
CHECK_SEES: dict[str, tuple[Callable[[Place], object], tuple[Change, ...]]] = {
    "edited in place": (lambda place: append(place.alpha_module), edited("alpha/__init__.py")),
    "edited in place, size kept": (
        lambda place: place.alpha_module.write_text("value = 7\n"),
        edited("alpha/__init__.py"),
    ),
    "edited in place, size and mtime kept": (
        lambda place: edit_unseen(place.alpha_module),
        edited("alpha/__init__.py"),
    ),
    "edited through mmap": (lambda place: write_mapped(place.alpha_module), edited("alpha/__init__.py")),
    "chmod +x": (lambda place: place.alpha_module.chmod(0o755), edited("alpha/__init__.py")),
    "two files": (
        lambda place: append(place.alpha_module, place.venv.site / "alpha" / "data.txt"),
        edited("alpha/__init__.py", "alpha/data.txt"),
    ),
    "edited in the directory of another environment": (
        lambda place: append(_second_venv(place) / "beta" / "deep" / "er" / "file.py"),
        edited("beta/deep/er/file.py", name="beta"),
    ),
    "replaced where a link leads, size and mtime kept": (
        lambda place: replace_linked(place),
        edited("beta/__init__.py", name="beta"),
    ),
    "edited in a target directory": (
        lambda place: append(place.target / "beta" / "__init__.py"),
        edited("beta/__init__.py", name="beta"),
    ),
}
NOTHING: dict[str, Callable[[Place], object]] = {
    "nothing": lambda place: None,
    "a finder written again as it was": lambda place: place.finder.write_text(place.finder.read_text()),
    "a first import writes bytecode": lambda place: import_alpha(place),
    "another environment from the same cache": lambda place: _second_venv(place),
    "chmod of what does not count": lambda place: close(place.venv.site),
    "another link to files": lambda place: link_elsewhere(place),
    "touch": lambda place: touch(place.alpha_module, place.project / "train.py", place.venv.site),
    "code written again as it was": lambda place: (place.project / "train.py").write_text("import package\n"),
    "an ignored file": lambda place: (place.project / "run.log").write_text("1\n"),
    "a run wrote bytecode of the project": lambda place: place.venv.run("import train", cwd=place.project),
    "something in the top of the prefix": lambda place: (place.venv.prefix / ".installed").write_text(""),
    "a new directory outside": lambda place: place.late.with_name("unrelated").mkdir(),
}


def _second_venv(place: Place) -> Path:
    other = Venv(place.venv.prefix.with_name("other"))
    other.install_with_uv(place.alpha, place.beta, cache=place.cache, link_mode="hardlink")
    return other.site


@pytest.mark.slow
@pytest.mark.parametrize("happens", GATE_SEES)
def test_the_gate_sees(place: Place, happens: str) -> None:
    before = place.capture()
    assert place.look() == (before, ())
    GATE_SEES[happens](place)

    assert place.look() == ("changed", ())
    place.description = place.describe()
    assert (place.capture() == before) == (
        happens in ("RECORD edited", "pyvenv.cfg edited", golden("environment.recognition.directory-sys-path"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("happens", CHECK_SEES)
def test_the_check_sees(place: Place, happens: str) -> None:
    before = place.capture()
    happen, expected = CHECK_SEES[happens]
    happen(place)

    assert place.look() == (before, expected)
    assert place.capture() != before
    assert place.look()[1] == ()


@pytest.mark.slow
@pytest.mark.parametrize("happens", NOTHING)
def test_no_change_is(place: Place, happens: str) -> None:
    before = place.capture()
    assert place.look() == (before, ())
    NOTHING[happens](place)

    assert place.look() == (before, ())
    assert place.look(Recogniser(place.index)) == (before, ())
    assert place.capture() == before


@pytest.mark.slow
def test_a_generated_file_edited_during_the_capture_is_seen(place: Place) -> None:
    scan = place.recogniser.scan(place.description, ignore_progress)
    append(place.finder)
    place.recogniser.remember(scan)

    assert place.look() == ("changed", ())


@pytest.mark.slow
def test_a_capture_beside_a_gate_is_not_mixed_with_what_the_gate_saw(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place.capture()
    import_alpha(place)  # so that the gate sees more than was remembered, and writes it down
    recognise = recognition.recognise
    captured: list[str] = []

    def recognise_slowly(*arguments: Any, **options: Any) -> Any:
        found = recognise(*arguments, **options)
        if not captured:
            append(place.alpha_module)
            captured.append(Place.capture(place))
        return found

    monkeypatch.setattr(scan_module, "recognise", recognise_slowly)
    slow = Recogniser(place.index)
    assert slow.gate(place.description) is not None

    assert captured != [before]
    assert slow.check() == edited()
    assert place.look(Recogniser(place.index)) == (captured[0], ())


@pytest.mark.slow
def test_a_check_is_of_what_the_gate_said(place: Place) -> None:
    before = place.capture()
    looking = Recogniser(place.index)
    assert looking.gate(place.description) is not None
    append(place.alpha_module)
    assert place.capture() != before
    assert looking.check() == edited()

    looking = Recogniser(place.index)
    assert looking.gate(place.description) is not None
    place.capture()
    assert looking.check() == (), "remembered anew, and the same"

    append(place.project / "train.py")
    place.capture()
    append(place.project / "train.py")
    assert [change.sentence() for change in looking.check()] == ["the environment changed"]


@pytest.mark.slow
def test_other_patterns_of_the_user_make_it_another_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.capture()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place.late))
    assert place.look() == ("changed", ())
    monkeypatch.undo()
    assert place.look() == (before, ())


@pytest.mark.slow
def test_what_a_look_cleared_is_not_looked_at_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.capture()
    import_alpha(place)
    wait_for_ticks()
    assert place.look() == (before, ())
    touch(place.alpha_module)
    link_elsewhere(place)
    wait_for_ticks()
    assert place.look() == (before, ())

    def refuse(*arguments: object) -> object:
        raise AssertionError("something is looked at again")

    monkeypatch.setattr(recognition, "look", refuse)
    monkeypatch.setattr(recognition, "list_code", refuse)
    monkeypatch.setattr(recognition, "digest_file", refuse)
    assert place.look(Recogniser(place.index)) == (before, ())


def test_an_mtime_of_the_last_tick_is_unknown() -> None:
    now = FakeClock().wall_ns() + 123_456_789

    assert known_mtime(now - 30_000_000, now) == now - 30_000_000
    assert known_mtime(now - 10_000_000, now) == UNKNOWN
    assert known_mtime(now + 10**9, now) == UNKNOWN
    seconds = now - now % 10**9
    assert known_mtime(seconds - 10**9, now) == UNKNOWN
    assert known_mtime(seconds - 3 * 10**9, now) == seconds - 3 * 10**9


@pytest.mark.slow
def test_a_second_edit_in_the_tick_of_the_first_is_found(place: Place) -> None:
    # The file system's clock has not moved on between the look and the edit: size, mtime and inode stay as they were.
    clock = FakeClock(wall_ns=time.time_ns())
    place.recogniser = Recogniser(place.index, clock)
    os.utime(place.alpha_module, ns=(0, clock.wall_ns()))
    os.utime(place.project / "train.py", ns=(0, clock.wall_ns()))
    before = place.capture()
    assert place.look() == (before, ())
    place.alpha_module.write_text("value = 7\n")
    os.utime(place.alpha_module, ns=(0, clock.wall_ns()))

    assert place.look() == (before, edited("alpha/__init__.py"))
    (place.project / "train.py").write_text("import packagE\n")
    os.utime(place.project / "train.py", ns=(0, clock.wall_ns()))
    assert place.look() == ("changed", ())


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["torn", "flipped", "empty", "old"])
def test_an_index_that_cannot_be_read_was_never_written(place: Place, damage: str) -> None:
    before = place.capture()
    (file,) = place.index.glob("*.index")
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = content[:500] + bytes([content[500] ^ 1]) + content[501:]
    damaged = {"torn": content[:middle], "flipped": flipped, "empty": b"", "old": b"sgpu-index-0" + content[12:]}
    file.write_bytes(damaged[damage])

    gated, checked = place.look()

    if damage == "torn" and gated == before:  # its first part is whole; nothing says what the files were
        assert [change.what for change in checked] == ["changed"]
    else:
        assert (gated, checked) == ("changed", ())
    assert place.capture() == before
    assert place.look() == (before, ())


@pytest.mark.slow
def test_two_workers_find_what_one_finds(place: Place) -> None:
    before = place.capture()
    append(place.alpha_module)
    append(place.target / "beta" / "deep" / "er" / "file.py")
    # In a process of its own: this one may have threads, and then it is not forked.
    program = f"""
import msgspec, sys
from pathlib import Path
from serverless_gpu.environment.scan import recognition, scan
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.scan import Recogniser
assert recognition.is_single_threaded()
recognition._FORK_FROM_FILES = 1
recogniser = Recogniser(Path({str(place.index)!r}))
snapshot = recogniser.gate(msgspec.json.decode(sys.argv[1], type=Description))
print(snapshot.address, *(change.sentence() for change in recogniser.check()), sep="\\n")
"""
    out = run([sys.executable, "-c", program, _json(place.description)])

    assert out.splitlines() == [
        before,
        golden("environment.recognition.alpha-alpha-init"),
        golden("environment.recognition.beta-beta-deep"),
    ]


def _json(description: Description) -> str:
    return msgspec.json.encode(description).decode()
