"""Everything a `sys.path` can hold: what becomes a root, what is mapped into one, what is refused by name."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest

from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.laid_out import LaidOut
from tests.support.environment.scans import check, names, rows, scan, write
from tests.support.environment.wheels import Venv, Wheel, build_wheel, describe_in
from tests.support.golden import golden

pytestmark = pytest.mark.slow

TOOL = Wheel(name="tool", files={"tool/__init__.py": "value = 1\n"})
SYSTEM_PYTHON = Path("/usr/bin/python3")
DEBIAN = Path("/usr/lib/python3/dist-packages")


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def test_the_system_s_packages_are_a_root_of_their_own(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", "--system-site-packages")
    config = venv.prefix / "pyvenv.cfg"
    assert "include-system-site-packages = true" in config.read_text()

    description = venv.describe()
    found = Recogniser(tmp_path / "index").scan(description, ignore_progress)

    check(found)
    kinds = dict(zip(found.snapshot.facts.originals, (root.kind for root in found.snapshot.roots), strict=True))
    system = [path for path in description.sys_path if path.endswith("-packages") and path != str(venv.site)]
    assert system
    assert {kinds[path] for path in system if any(Path(path).iterdir())} <= {"library"}
    assert kinds[str(venv.site)] == "own"


@pytest.mark.skipif(not (DEBIAN.is_dir() and SYSTEM_PYTHON.exists()), reason="no Debian or Ubuntu")
def test_the_packages_of_debian_are_read_once(tmp_path: Path) -> None:
    description = describe_in(SYSTEM_PYTHON)
    recogniser = Recogniser(tmp_path)

    found = recogniser.scan(description, ignore_progress)

    check(found)
    number = found.snapshot.facts.originals.index(str(DEBIAN))
    root = found.snapshot.roots[number]
    assert root.kind == "library"
    unowned = rows(found, number, "unowned")
    for info in DEBIAN.glob("*.egg-info"):
        paths = [f"site/{info.name}/PKG-INFO" if info.is_dir() else f"site/{info.name}"]
        assert not info.is_dir() or not (info / "PKG-INFO").exists() or set(paths) <= unowned.keys()
    for source in found.sources.values():
        content = [row for row in source.rows if row.has_content]
        for row, file in zip(content, source.files, strict=True):
            number_of = source.rows.index(row)
            data = source.texts.get(number_of) or Path(file).read_bytes()
            assert hashlib.sha256(data).digest() == row.sha256, file
    assert not any(path.startswith("prefix/share") for path in unowned)
    recogniser.remember(found)
    assert recogniser.scan(description, ignore_progress).snapshot.address == found.snapshot.address


def test_the_user_s_packages_are_a_root_and_nothing_else_of_their_prefix(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", "--system-site-packages")
    user_base = tmp_path / "user"
    site = user_base / "lib" / venv.site.parent.name / "site-packages"
    wheel = Wheel(name="tool", files={"tool.py": ""}, data={"scripts/t.sh": "#!/bin/sh\n", "data/share/t/x": "x"})
    other = Venv(tmp_path / "other")
    other.install_with_pip(build_wheel(tmp_path, wheel))
    shutil.copytree(other.site, site)
    for directory in ("bin", "share"):
        if (other.prefix / directory).exists():
            shutil.copytree(other.prefix / directory, user_base / directory, symlinks=True)
    write(user_base, {"share/own.txt": "", "bin/own": "#!/bin/sh\n"})

    description = venv.describe(PYTHONUSERBASE=str(user_base))
    found = Recogniser(tmp_path / "index").scan(description, ignore_progress)

    check(found)
    number = found.snapshot.facts.originals.index(str(site))
    assert names(found.snapshot, number) == ["distribution tool"]
    assert {"prefix/bin/t.sh", "prefix/share/t/x", "site/tool.py"} <= rows(found, number, "distribution", "tool").keys()


def test_namespace_packages_over_distributions_and_roots(venv: Venv, tmp_path: Path) -> None:
    wheels = [build_wheel(tmp_path, Wheel(name=name, files={f"space/{name}.py": ""})) for name in ("aa", "bb", "cc")]
    venv.install_with_pip(*wheels[:2])
    venv.install_with_uv(wheels[2], cache=tmp_path / "cache", target=tmp_path / "deps")
    write(tmp_path / "project", {"space/own.py": ""})

    found = scan(venv, cwd=tmp_path / "project", path=tmp_path / "deps")

    laid_out = LaidOut(found, tmp_path / "tree")
    assert laid_out.run("import space.aa, space.bb, space.cc, space.own; print(len(space.__path__))") == "3\n"
    assert [root.kind for root in found.snapshot.roots] == ["own", "code", "library"]
    assert [root.before for root in found.snapshot.roots] == [False, True, True]
    assert [member.modules for member in found.snapshot.roots[0].members] == [("space",), ("space",)]


def test_pth_files_with_directories_elsewhere(venv: Venv, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"far.py": "where = 'far'\n"})
    write(venv.site / "inner", {"near.py": "where = 'near'\n"})
    (venv.site / "paths.pth").write_text(f"{tmp_path}/elsewhere\n{tmp_path}/missing\ninner\n# a comment\n")
    (venv.site / "plain.pth").write_text("inner\nimport os\n")

    found = scan(venv)

    (generated,) = found.snapshot.roots[0].generated
    assert (generated.path, generated.text) == ("site/paths.pth", golden("environment.roots.inner-comment"))
    assert list(rows(found, 0, "unowned")) == ["site/inner/near.py", "site/plain.pth"]
    assert found.snapshot.facts.originals == (str(venv.site), str(tmp_path / "elsewhere"))
    laid_out = LaidOut(found, tmp_path / "tree")
    shutil.rmtree(tmp_path / "elsewhere")
    assert laid_out.run("import far, near; print(far.where, near.where)") == "far near\n"


def test_archives_on_the_path(venv: Venv, tmp_path: Path) -> None:
    for name, directory in (("one", tmp_path / "lib"), ("two", tmp_path / "lib"), ("three", venv.site)):
        directory.mkdir(exist_ok=True)
        with zipfile.ZipFile(directory / f"{name}.egg", "w") as archive:
            archive.writestr(f"{name}.py", f"value = '{name}'\n")
    (venv.site / "easy-install.pth").write_text(f"{tmp_path}/lib/two.egg\n./three.egg\n")

    found = scan(venv, path=tmp_path / "lib" / "one.egg")

    assert [(root.kind, root.before, len(root.members)) for root in found.snapshot.roots] == [
        ("own", False, 1),
        ("library", True, 1),
        ("library", False, 1),
    ]
    generated = {file.path: file.text for file in found.snapshot.roots[0].generated}
    assert generated == {
        "site/_sgpu_archive_2.pth": "{{sgpu:2}}/two.egg\n",
        "site/easy-install.pth": "./three.egg\n",
    }
    assert LaidOut(found, tmp_path / "tree").run("import two, three; print(two.value, three.value)") == "two three\n"


def test_23C10_conda_is_refused_by_name(venv: Venv) -> None:
    (venv.prefix / "conda-meta").mkdir()

    with pytest.raises(EnvironmentUnsupported) as caught:
        scan(venv)

    assert str(caught.value) == golden("environment.roots.conda-environment-cannot", prefix=venv.prefix)


def test_missing_directories_and_the_current_one(venv: Venv, tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"train.py": "", "deps/x.py": ""})
    found = scan(venv, cwd=project, path=f"{tmp_path}/missing:{project}/deps:{project}")

    assert found.snapshot.facts.originals == (str(venv.site), str(project))
    assert sorted(rows(found, 1, "code", "project")) == ["site/deps/x.py", "site/train.py"]


def test_a_library_below_a_project_is_a_root_of_its_own(venv: Venv, tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"train.py": ""})
    venv.install_with_uv(build_wheel(tmp_path, TOOL), cache=tmp_path / "cache", target=project / "deps")

    found = scan(venv, cwd=project, path=project / "deps")

    assert [(root.kind, names(found.snapshot, number)) for number, root in enumerate(found.snapshot.roots)] == [
        ("own", []),
        ("code", ["code project"]),
        ("library", ["distribution tool"]),
    ]
    assert list(rows(found, 1, "code", "project")) == ["site/train.py"]


def test_a_script_in_the_home_directory_does_not_walk_it(venv: Venv, tmp_path: Path) -> None:
    home = write(tmp_path / "home", {"train.py": "", "notes.txt": "", "big/data.py": ""})
    write(home, {"package/__init__.py": ""})

    found = Recogniser(tmp_path / "index").scan(venv.describe(cwd=home, HOME=str(home)), ignore_progress)

    assert list(rows(found, 1, "code", "home")) == ["site/package/__init__.py", "site/train.py"]


def test_what_somebody_left_in_a_temporary_directory_makes_it_no_package_of_the_root(
    venv: Venv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = write(tmp_path / "home", {"train.py": "", "scratch/__init__.py": "", "scratch/pytest-0/data.bin": "x" * 99})
    monkeypatch.setattr(tempfile, "tempdir", str(home / "scratch"))

    found = Recogniser(tmp_path / "index").scan(venv.describe(cwd=home, HOME=str(home)), ignore_progress)

    assert list(rows(found, 1, "code", "home")) == ["site/train.py"]
