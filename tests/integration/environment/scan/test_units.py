"""RECORD and what belongs to an environment: which files make which unit, and which are believed without being read."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.scan.scan import Recogniser, Scan
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.laid_out import LaidOut
from tests.support.environment.scans import claim, names, rows, scan, write, write_record
from tests.support.environment.wheels import Venv, Wheel, build_wheel
from tests.support.golden import golden

pytestmark = pytest.mark.slow

TOOL = Wheel(name="tool", files={"tool/__init__.py": "value = 1\n"})


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def test_a_lying_record_is_believed_until_a_capture_corrects_it(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    true = rows(scan(venv), 0, "distribution", "tool")
    write_record(venv, {"tool/__init__.py": claim("tool/__init__.py", b"value = 2\n")})
    recogniser, description = Recogniser(tmp_path / "other"), venv.describe()
    found = recogniser.scan(description, ignore_progress)
    (address,) = found.sources
    assert {row.path: row for row in found.sources[address].rows} != true
    right = msgspec.structs.replace(found.sources[address], rows=tuple(true.values()))

    recogniser.remember(Scan(snapshot=found.snapshot, sources={"right": right}))

    again = Recogniser(tmp_path / "other").scan(description, ignore_progress)
    assert rows(again, 0, "distribution", "tool") == true


@pytest.mark.parametrize("why", ["size", "no digest", "installer", "later", "md5"])
def test_a_record_that_may_be_wrong_is_not_believed(venv: Venv, tmp_path: Path, why: str) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    true = rows(scan(venv), 0, "distribution", "tool")
    path, wrong = "tool/__init__.py", b"value = 2\n"
    lines = {"size": claim(path, wrong, 99), "no digest": f"{path},,10", "md5": f"{path},md5=AAAA,10"}
    write_record(venv, {path: lines.get(why, claim(path, wrong))})
    if why == "installer":
        next(venv.site.glob("tool-*/INSTALLER")).write_text("debian\n")
    if why == "later":
        record = next(venv.site.glob("tool-*/RECORD"))
        os.utime(record, ns=(0, (venv.site / path).stat().st_mtime_ns - 3 * 10**9))

    assert rows(scan(venv), 0, "distribution", "tool") == true


def test_missing_rows_are_unowned_and_missing_files_are_nobodys(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    write_record(venv, {"tool/__init__.py": None, "tool/gone.py": claim("tool/gone.py", b"x")})

    found = scan(venv)

    assert list(rows(found, 0, "unowned")) == ["site/tool/__init__.py"]
    assert "site/tool/gone.py" not in rows(found, 0, "distribution", "tool")


def test_files_of_two_distributions_are_in_each_that_is_right_about_them(venv: Venv, tmp_path: Path) -> None:
    same = {"tests/__init__.py": "", "shared.py": "one"}
    wheels = [build_wheel(tmp_path, Wheel(name=name, files={**same, "which.py": name})) for name in ("aa", "bb")]
    for wheel in wheels:
        venv.install_with_pip(wheel)

    found = scan(venv)

    assert (venv.site / "which.py").read_text() == "bb"
    for name in ("aa", "bb"):
        mine = rows(found, 0, "distribution", name)
        assert {"site/shared.py", "site/tests/__init__.py"} <= mine.keys()
        assert ("site/which.py" in mine) == (name == "bb")
    assert names(found.snapshot, 0) == ["distribution aa", "distribution bb"]


def test_record_paths_that_lead_out_of_the_prefix_are_not_followed(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    write_record(venv, {"a": f"{secret},,", "b": "../../../../secret.txt,,", "c": "../../../../../etc/passwd,,"})

    found = scan(venv)

    assert not any("secret" in file or "passwd" in file for source in found.sources.values() for file in source.files)


def test_scripts_and_unowned_files_of_an_environment(venv: Venv, tmp_path: Path) -> None:
    wheel = Wheel(name="tool", files={"tool.py": ""}, entry_points="[gui_scripts]\ntool-gui = tool:main\n")
    venv.install_with_pip(build_wheel(tmp_path, wheel))
    bin_directory = venv.prefix / "bin"
    (bin_directory / "mine").write_text(f"#!{venv.python} -u\nimport tool\n")
    (bin_directory / "mine").chmod(0o755)
    long = f"#!/bin/sh\n'''exec' \"{venv.python}\" \"$0\" \"$@\"\n' '''\nimport tool\n"
    (bin_directory / "long").write_text(long)
    (bin_directory / "shell").write_text("#!/bin/sh\n# python\n")
    write(venv.prefix, {"share/jupyter/kernel.json": "{}", "etc/conf": "x", "README": ""})
    write(venv.site, {"loose.py": "", "tool/__pycache__/x.pyc": ""})
    write(venv.prefix / "lib", {"libx.so": "", "python3.9/x": ""})

    found = scan(venv)

    unowned = rows(found, 0, "unowned")
    scripts = ["prefix/bin/long", "prefix/bin/mine", "prefix/bin/shell"]
    data = ["prefix/etc/conf", "prefix/lib/libx.so", "prefix/share/jupyter/kernel.json"]
    assert list(unowned) == [*scripts, *data, "site/loose.py"]
    source = next(one for one in found.sources.values() if one.rows[0].path == "prefix/bin/long")
    assert source.texts == {0: b"#!python\nimport tool\n", 1: b"#!python\nimport tool\n"}
    assert unowned["prefix/bin/mine"].sha256 == hashlib.sha256(b"#!python\nimport tool\n").digest()
    assert unowned["prefix/bin/mine"].kind == "x"
    assert found.snapshot.facts.left_out == ()


def test_the_same_script_under_two_prefixes_is_one_unit(tmp_path: Path) -> None:
    snapshots = []
    for name in ("one", "two"):
        venv = Venv(tmp_path / name / "venv")
        (venv.prefix / "bin" / "mine").write_text(f"#!{venv.python}\nprint()\n")
        snapshots.append(scan(venv).snapshot.roots)

    assert snapshots[0] == snapshots[1]


def test_links_stay_links_where_they_lead_to_something_in_their_unit(venv: Venv, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"file.txt": "outside\n"})
    write(venv.site, {"real.txt": "real\n", "sub/deep.txt": "deep\n", "one.pyc": ""})
    links = {
        "relative": "sub/deep.txt",
        "absolute": str(venv.site / "real.txt"),
        "directory": "sub",
        "chain": "relative",
        "out": str(outside / "file.txt"),
        "out_directory": str(outside),
        "dangling": "nothing",
        "sub/up": "../real.txt",
        "to_bytecode": "one.pyc",
    }
    for name, target in links.items():
        (venv.site / name).symlink_to(target)

    found = scan(venv)

    unowned = {path.removeprefix("site/"): row for path, row in rows(found, 0, "unowned").items()}
    targets = {name: row.target for name, row in unowned.items() if row.kind == "l"}
    assert targets == {
        "relative": "sub/deep.txt",
        "absolute": "real.txt",
        "directory": "sub",
        "chain": "relative",
        "sub/up": "../real.txt",
    }
    assert unowned["out"].sha256 == hashlib.sha256(b"outside\n").digest()
    assert found.snapshot.facts.left_out == (
        golden("environment.units.out-directory-link", site=venv.site, outside=outside),
        golden("environment.units.dangling-link-nothing", site=venv.site),
    )
    laid_out = LaidOut(found, tmp_path / "tree")
    assert (laid_out.sites[0] / "absolute").read_text() == "real\n"


@pytest.mark.parametrize("what", ["fifo", "control", "bytes"])
def test_what_cannot_travel_is_refused_by_name(venv: Venv, what: str) -> None:
    name = {"fifo": "pipe", "control": "new\nline", "bytes": os.fsdecode(b"caf\xe9")}[what]
    if what == "fifo":
        os.mkfifo(venv.site / name)
    else:
        (venv.site / name).write_text("")

    with pytest.raises(EnvironmentUnsupported) as caught:
        scan(venv)

    control = (
        "contains 'site/new\\nline': this name has control characters, or is not UTF-8\n"
        "hint: rename or remove this file"
    )
    said = {
        "fifo": "/pipe cannot be captured: the path is a device, a socket or a FIFO\nhint: remove it",
        "control": f" {control}",
        "bytes": f" {control}".replace("new\\nline", "caf\\udce9"),
    }
    assert str(caught.value) == f"{venv.site}{said[what]}"


def test_the_same_in_a_project_is_left_out_and_said(venv: Venv, tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"train.py": ""})
    os.mkfifo(project / "pipe")
    (project / "new\nline").write_text("")

    found = scan(venv, cwd=project)

    assert list(rows(found, 1, "code", "project")) == ["site/train.py"]
    assert found.snapshot.facts.left_out == (
        golden("environment.units.pipe-device-socket", project=project),
        golden("environment.units.new-nline-name", project=project),
    )


def test_a_file_that_cannot_be_read_is_named(venv: Venv, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (venv.site / "closed.py").write_text("")
    (venv.site / "closed.py").chmod(0)

    with pytest.raises(EnvironmentUnsupported, match=golden("environment.units.cannot-read-closed")):
        scan(venv)


def test_what_was_loaded_is_told_by_root(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    project = write(tmp_path / "project", {"train.py": "", "other.py": ""})
    description = venv.describe(cwd=project)
    loaded = (str(venv.site / "tool" / "__init__.py"), str(project / "train.py"), os.__file__)

    found = Recogniser(tmp_path / "index").scan(msgspec.structs.replace(description, loaded=loaded), ignore_progress)

    assert found.snapshot.facts.loaded == (("site/tool/__init__.py",), ("site/train.py",))


def test_previous_is_the_unit_that_was_captured_before(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    recogniser, description = Recogniser(tmp_path / "index"), venv.describe()
    first = recogniser.scan(description, ignore_progress)
    recogniser.remember(first)
    (venv.site / "tool" / "__init__.py").write_text("value = 123456\n")

    second = recogniser.scan(description, ignore_progress)

    (old,), (new,) = first.sources, second.sources
    assert (second.sources[new].previous, first.sources[old].previous) == (old, "")
