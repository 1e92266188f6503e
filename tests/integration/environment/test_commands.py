"""`sgpu env` as a person uses it, on small environments: show, fingerprint, capture, restore, diff, gc."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from serverless_gpu.cli import program
from serverless_gpu.environment.compression import compress
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import EnvironmentCorrupt, EnvironmentMissing, InvalidValue, ServerlessGpuError
from serverless_gpu.node.base.home import Home
from tests.support.environment.venvs import INSTALLED_S, install, make_venv, site_packages
from tests.support.golden import golden
from tests.support.local.observe import wait_for

COMMAND = (sys.executable, "-m", "serverless_gpu.cli", "env")


class Place:
    """A project with a virtual environment beside it, and a home."""

    def __init__(self, home: Path, directory: Path) -> None:
        self.home = home
        self.prefix = directory / "venv"
        self.project = directory / "project"
        self.python = make_venv(self.prefix)
        self.project.mkdir()
        (self.project / "train.py").write_text("import demo\n")
        install(self.prefix, "demo", "1.0", {"demo/__init__.py": b"answer = 42\n", "demo/more.py": b"more = 1\n"})

    @property
    def site(self) -> Path:
        """Return its site-packages."""
        return site_packages(self.prefix)

    def run(self, *arguments: str, code: int = 0) -> Result:
        """Run a command in the project's directory; an error of ours is raised."""
        with_python = [] if arguments[0] == "gc" or "--python" in arguments else ["--python", str(self.prefix)]
        result = CliRunner().invoke(
            program.sgpu, ["env", *arguments, *with_python], catch_exceptions=False, prog_name="sgpu"
        )
        assert result.exit_code == code, result.output
        return result

    def lines(self, *arguments: str, code: int = 0) -> list[str]:
        """Return what a command printed on stdout."""
        return self.run(*arguments, code=code).stdout.splitlines()

    def capture(self) -> str:
        """Capture it; return the address."""
        return self.lines("capture")[-1]


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a project with one distribution installed; this process is in its directory."""
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    made = Place(home, tmp_path)
    monkeypatch.chdir(made.project)
    return made


# --- show ------------------------------------------------------------------------------------------------------------


def test_show_names_units_unowned_files_pth_files_and_what_was_left_out(place: Place) -> None:
    (place.site / "alone.py").write_text("")
    (place.site / "start.pth").write_text("import sys; sys.started = True\n")
    (place.project / ".sgpuignore").write_text("data/\n")
    (place.project / "data").mkdir()
    (place.project / "data" / "large.bin").write_bytes(bytes(1000))
    text = place.run("show").stdout
    assert golden("environment.commands.distribution-captured-now") in text
    assert "  demo 1.0  " in text
    assert golden("environment.commands.files-distribution") in text and "alone.py" in text
    assert golden("environment.commands.start-pth-runs") in text
    assert "  code of project  " in text and "large.bin" not in text


def test_show_for_machines(place: Place) -> None:
    shown = json.loads(place.run("show", "--json").stdout)
    own = shown["roots"][0]
    assert (shown["known"], own["kind"], own["directory"]) == (False, "own", str(place.site))
    assert [(m["name"], m["version"]) for m in own["members"] if m["kind"] == "distribution"] == [("demo", "1.0")]


def test_show_of_a_captured_one_by_the_beginning_of_its_address(place: Place) -> None:
    address = place.capture()
    lines = place.lines("show", address[:8], "--all")
    assert lines[0] == f"environment  {address}" and "; captured 20" in lines[1]
    assert json.loads(place.run("show", address, "--json").stdout)["address"] == address
    assert place.run("show").stdout.splitlines()[0] == f"environment  {address}"


# --- fingerprint and diff ---------------------------------------------------------------------------------------------


def test_the_fingerprint_says_whether_it_was_known_and_what_changed(place: Place) -> None:
    first = place.lines("fingerprint")
    assert first[1] == golden("environment.commands.known-never-captured")
    address = place.capture()
    known = place.lines("fingerprint")
    assert first[0] == known[0] == address
    assert known[1].startswith("known: the environment is unchanged since it was captured 20")
    assert (
        known[2].startswith("took: asking the interpreter ") and ", gate " in known[2] and ", every file " in known[2]
    )
    (place.site / "demo" / "more.py").write_text("more = 2\n")
    changed = json.loads(place.run("fingerprint", "--json").stdout)
    assert (changed["known"], changed["last"]) == (False, address) and changed["address"] != address
    assert [change["files"] for change in changed["changes"]] == [["demo/more.py"]]


def test_a_file_edited_by_hand_is_named_by_diff(place: Place) -> None:
    place.capture()
    assert place.lines("diff") == ["nothing differs"]
    (place.site / "demo" / "more.py").write_text("more = 2\n")
    assert place.lines("diff", code=1) == [golden("environment.commands.demo-demo-more")]


def test_an_edit_a_moment_after_the_installation_is_seen_though_the_size_is_the_same(place: Place) -> None:
    place.capture()
    (place.site / "demo" / "more.py").write_text("more = 2\n")
    os.utime(place.site / "demo" / "more.py", (INSTALLED_S + 1, INSTALLED_S + 1))
    assert place.lines("diff", code=1) == [golden("environment.commands.demo-demo-more")]


def test_diff_names_packages_with_both_versions_and_code(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    old = place.capture()
    install(place.prefix, "demo", "2.0", {"demo/__init__.py": b"answer = 43\n"})
    install(place.prefix, "other", "1.0", {"other.py": b""})
    (place.project / "train.py").write_text("import demo, other\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = [
        "demo 1.0 → 2.0",
        "other 1.0 added",
        "train.py changed",
        "start-up variable OMP_NUM_THREADS is newly set",
    ]
    assert place.lines("diff", code=1) == said
    assert place.lines("diff", old[:6], code=1) == said
    new = place.capture()
    assert place.lines("diff") == ["nothing differs"]
    assert place.lines("diff", old, new, code=1) == said
    assert json.loads(place.run("diff", new, old, "--json", code=1).stdout)["variables_removed"] == ["OMP_NUM_THREADS"]


def test_diff_without_a_capture_says_what_to_do_and_has_a_code_of_its_own(place: Place) -> None:
    result = place.run("diff", code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("sgpu: this environment has no capture to compare with")
    assert golden("environment.commands.hint-sgpu-env") in result.stderr


# --- capture and restore ----------------------------------------------------------------------------------------------


def test_capture_says_what_was_new_and_sent_and_then_nothing_is(place: Place) -> None:
    lines = place.lines("capture")
    assert lines[0].startswith("captured ") and " files, in " in lines[0]
    assert lines[1].startswith("new: ") and "demo 1.0" in lines[1] and "code of project" in lines[1]
    assert lines[2].startswith("sent: ") and lines[2].endswith(f" to file://{Home(place.home).environments}/store")
    again = place.lines("capture")
    assert again[1:] == [
        golden("environment.commands.new-nothing-store"),
        golden("environment.commands.sent", split=lines[2].split()[-1]),
        lines[3],
    ]


def test_capture_for_machines_into_another_store(place: Place, tmp_path: Path) -> None:
    said = json.loads(place.run("capture", "--store", str(tmp_path / "store"), "--json").stdout)
    assert said["store"] == f"file://{tmp_path}/store" and said["sent_bytes"] > 0
    assert (tmp_path / "store" / "snapshots" / said["address"]).exists() or list((tmp_path / "store").rglob("*"))
    shown = json.loads(place.run("show", said["address"], "--store", str(tmp_path / "store"), "--json").stdout)
    assert shown["size_bytes"] == said["size_bytes"]


def test_restore_makes_a_tree_and_names_the_command_that_uses_it(place: Place, tmp_path: Path) -> None:
    address = place.capture()
    there = tmp_path / "there it is"
    lines = place.lines("restore", address[:10], str(there), "--python", sys.executable)
    assert lines[-1] == f"use it: '{there}/bin/python'"
    program = "import demo, train, sys; print(demo.answer, demo.__file__, train.__file__, sys.prefix)"
    done = subprocess.run(
        [there / "bin" / "python", "-c", program], cwd="/", capture_output=True, text=True, check=True
    )
    answer, *paths = done.stdout.replace(str(there), "THERE").split()
    assert answer == "42" and all(path.startswith("THERE") for path in paths)


def test_restore_into_a_directory_with_something_in_it_is_refused(place: Place, tmp_path: Path) -> None:
    address = place.capture()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").touch()
    with pytest.raises(InvalidValue, match="not empty"):
        place.run("restore", address, str(tmp_path / "there"), "--python", sys.executable)
    assert os.listdir(tmp_path / "there") == ["mine"]


def test_copies_can_be_edited_and_links_cannot(place: Place, tmp_path: Path) -> None:
    address = place.capture()
    for name, more in (("linked", ()), ("copied", ("--copies",))):
        place.run("restore", address, str(tmp_path / name), "--python", sys.executable, *more)
    linked, copied = (next((tmp_path / name).rglob("demo/more.py")).stat() for name in ("linked", "copied"))
    assert linked.st_nlink > 1 and not linked.st_mode & 0o222
    assert copied.st_nlink == 1 and copied.st_mode & 0o200


def test_22A5_capture_repairs_a_unit_that_points_at_other_bytes(place: Place) -> None:
    address = place.capture()
    store = open_store(place.home / "environments" / "store", {})
    blobs = StoreBlobs(store)
    demo = next(m for m in blobs.read_snapshot(address).roots[0].members if m.name == "demo")
    unit = blobs.read_unit(demo.address)
    content = b"x" * unit.blocks[0].size
    pack = blobs.write_pack(compress(content))
    block = msgspec.structs.replace(unit.blocks[0], offset=0, length=len(compress(content)))
    blobs.write_unit(msgspec.structs.replace(unit, packs=(pack,), blocks=(block,)))
    assert golden("environment.commands.new-nothing-store") in place.lines("capture")
    first, *lines = place.lines("capture", "--repair")
    assert first == golden("environment.commands.damaged-store-sent", address=demo.address[:12])
    assert lines[1].startswith("new: demo 1.0") and lines[-1] == address
    assert blobs.read_unit(demo.address) == unit
    assert place.lines("capture", "--repair")[0] == golden("environment.commands.damaged-store-sent-again")
    assert json.loads(place.run("capture", "--repair", "--json").stdout)["repaired"] == []


@pytest.mark.parametrize("kind", ["snapshots", "units", "packs"])
def test_F29_F42_what_is_altered_in_the_store_is_sent_again_by_the_next_capture(
    place: Place, tmp_path: Path, kind: str
) -> None:
    address = place.capture()
    for path in (place.home / "environments" / "store" / kind).rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(EnvironmentCorrupt) as caught:
        place.run("restore", address, str(tmp_path / "there"), "--python", sys.executable)
    assert "`sgpu env capture`" in caught.value.hint
    assert place.capture() == address
    place.run("restore", address, str(tmp_path / "there"), "--python", sys.executable)


@pytest.mark.parametrize("arguments", [("show", "abcd1234"), ("restore", "abcd1234", "x"), ("show", "f" * 64)])
def test_an_address_that_is_not_there_is_named_with_the_store(place: Place, arguments: tuple[str, ...]) -> None:
    with pytest.raises(EnvironmentMissing, match=golden("environment.commands.store-file")) as caught:
        place.run(*arguments, "--python", sys.executable)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["nonsense", "ab", ""])
def test_what_is_no_address_is_said(place: Place, text: str) -> None:
    with pytest.raises(ServerlessGpuError, match=re.escape(golden("environment.commands.address-snapshot"))):
        place.run("show", text)


# --- gc -------------------------------------------------------------------------------------------------------------


def test_gc_condemns_and_later_deletes_what_nothing_needs(place: Place) -> None:
    old = place.capture()
    assert "  condemned: nothing" in place.lines("gc")
    now = ("--keep", "0s", "--grace", "0s", "--force")
    assert any(line.startswith("  would condemn: 1 snapshot, ") for line in place.lines("gc", *now, "--dry-run"))
    assert place.lines("show", old)
    assert json.loads(place.run("gc", *now, "--json").stdout)["condemned"]["snapshots"] == 1
    lines = place.lines("gc", *now)
    assert any(line.startswith("  deleted: 1 snapshot, ") for line in lines) and "  needed: nothing" in lines
    with pytest.raises(EnvironmentMissing):
        place.run("show", old)
    assert place.capture() == old


def test_gc_leaves_what_is_used_now(place: Place) -> None:
    address = place.capture()
    cache = UnitCache(Home(place.home).environments)
    holding = cache.hold(address)
    cache.register(StoreBlobs(open_store(Home(place.home).environments / "store", {})).read_snapshot(address))
    try:
        for _ in range(3):
            place.run("gc", "--keep", "0s", "--grace", "0s", "--force", "--cache", "0")
        assert place.lines("show", address)
    finally:
        os.close(holding)


def test_gc_shrinks_what_was_unpacked_here(place: Place, tmp_path: Path) -> None:
    place.run("restore", place.capture(), str(tmp_path / "there"), "--python", sys.executable)
    assert json.loads(place.run("gc", "--json").stdout)["cache_units"] > 0
    assert place.lines("gc", "--cache", "0", "--dry-run")[-1].startswith("unit cache of this node: 2 units, ")
    assert place.lines("gc", "--cache", "0")[-1].startswith("unit cache of this node: 0 units, 0 B; ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--keep", "soon"), "--keep: 'soon' is not a duration"),
        (("--grace", "1"), "--grace: '1' is not a duration"),
        (("--grace", "5h"), "--grace 5h is shorter than the maximum capture time"),
        (("--cache", "big"), "--cache: 'big' is not a size"),
        (("--store", "https://x"), "'https://x' is not a valid store URL"),
    ],
)
def test_gc_says_which_value_is_wrong(place: Place, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(said)):
        place.run("gc", *arguments)


# --- which interpreter ------------------------------------------------------------------------------------------------


def test_an_interpreter_or_its_venv_can_be_named(place: Place) -> None:
    assert place.lines("show", "--python", str(place.python)) == place.lines("show", "--python", str(place.prefix))


def test_an_interpreter_that_is_not_there_is_said(place: Place, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=golden("environment.commands.interpreter-gone", tmp_path=tmp_path)):
        place.run("show", "--python", str(tmp_path / "gone"))


def test_what_is_no_interpreter_is_said(place: Place) -> None:
    with pytest.raises(ServerlessGpuError, match=re.escape(golden("environment.commands.bin-false-cannot"))):
        place.run("fingerprint", "--python", "/bin/false")


def test_another_active_environment_is_mentioned(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(place.prefix))
    monkeypatch.setattr(sys, "executable", str(place.python))
    result = CliRunner().invoke(program.sgpu, ["env", "fingerprint"], catch_exceptions=False)
    said = f"sgpu: using sgpu's own environment {sys.prefix}. For the active environment, add --python {place.prefix}\n"
    assert result.stderr.startswith(said)


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_capture_is_one_line_shows_nothing_and_is_resumed(place: Place) -> None:
    install(place.prefix, "large", "1.0", {f"large/{n}.bin": os.urandom(8_000_000) for n in range(40)})
    capturing = subprocess.Popen(
        [*COMMAND, "capture", "--python", str(place.prefix)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    packs = Home(place.home).environments / "store" / "packs"
    wait_for(lambda: packs.exists() and any(path.is_file() for path in packs.rglob("*")), "a pack was stored")
    os.killpg(capturing.pid, signal.SIGINT)
    out, err = capturing.communicate(timeout=60)
    assert (capturing.returncode, out) == (130, "")
    assert [line for line in err.splitlines() if not line.startswith("capturing: ")] == [
        golden("environment.commands.sgpu-interrupted-sent")
    ]
    snapshots = Home(place.home).environments / "store" / "snapshots"
    assert not [path for path in snapshots.rglob("*") if path.is_file()]
    stored = sum(path.stat().st_size for path in packs.rglob("*") if path.is_file())
    sent = json.loads(place.run("capture", "--json").stdout)["sent_bytes"]
    assert sent <= 320_000_000 - stored + 40_000_000
