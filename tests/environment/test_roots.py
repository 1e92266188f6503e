"""Everything a `sys.path` can hold: what becomes a root, what is mapped into one, what is refused by name."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import Row, Snapshot
from serverless_gpu.environment.progress import nobody
from serverless_gpu.environment.rules import check_rows, check_snapshot
from serverless_gpu.environment.scanning import Recogniser, Scan
from serverless_gpu.errors import EnvironmentUnsupported
from tests.environment.laid_out import LaidOut
from tests.environment.wheels import Venv, Wheel, build_wheel, describe_in

pytestmark = pytest.mark.slow

TOOL = Wheel(name="tool", files={"tool/__init__.py": "value = 1\n"})
SYSTEM_PYTHON = Path("/usr/bin/python3")
DEBIAN = Path("/usr/lib/python3/dist-packages")


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def scan(venv: Venv, cwd: Path | None = None, path: str | Path = "") -> Scan:
    found = Recogniser(venv.prefix.parent / "index").scan(venv.describe(cwd, PYTHONPATH=str(path)), nobody)
    check(found)
    return found


def check(found: Scan) -> None:
    """Check that a restore would take it."""
    check_snapshot(found.snapshot)
    for source in found.sources.values():
        check_rows(source.rows)


def rows(found: Scan, number: int, kind: str, name: str = "") -> dict[str, Row]:
    (member,) = (one for one in found.snapshot.roots[number].members if (one.kind, one.name) == (kind, name))
    return {row.path: row for row in found.sources[member.address].rows}


def names(snapshot: Snapshot, number: int) -> list[str]:
    return [f"{member.kind} {member.name}".strip() for member in snapshot.roots[number].members]


def write(directory: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        at = directory / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
    return directory


def write_record(venv: Venv, change: dict[str, str | None]) -> None:
    """Change lines of the tool's RECORD, by path; None removes one. Its time stays, as an installer's would."""
    record = next(venv.site.glob("tool-*/RECORD"))
    kept = [line for line in record.read_text().splitlines() if line.partition(",")[0] not in change]
    record.write_text("\n".join([*kept, *(line for line in change.values() if line)]) + "\n")


def claim(path: str, content: bytes, size: int | None = None) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content) if size is None else size}"


# --- RECORD -----------------------------------------------------------------------------------------------------------


def test_a_lying_record_is_believed_until_a_capture_corrects_it(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    true = rows(scan(venv), 0, "distribution", "tool")
    write_record(venv, {"tool/__init__.py": claim("tool/__init__.py", b"value = 2\n")})
    recogniser, description = Recogniser(tmp_path / "other"), venv.describe()
    found = recogniser.scan(description, nobody)
    (address,) = found.sources
    assert {row.path: row for row in found.sources[address].rows} != true
    right = msgspec.structs.replace(found.sources[address], rows=tuple(true.values()))

    recogniser.remember(Scan(snapshot=found.snapshot, sources={"right": right}))

    again = Recogniser(tmp_path / "other").scan(description, nobody)
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
    venv.install_with_pip(*wheels)

    found = scan(venv)

    last = (venv.site / "which.py").read_text()
    for name in ("aa", "bb"):
        mine = rows(found, 0, "distribution", name)
        assert {"site/shared.py", "site/tests/__init__.py"} <= mine.keys()
        assert ("site/which.py" in mine) == (name == last)
    assert names(found.snapshot, 0) == ["distribution aa", "distribution bb"]


def test_record_paths_that_lead_out_of_the_prefix_are_not_followed(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    write_record(venv, {"a": f"{secret},,", "b": "../../../../secret.txt,,", "c": "../../../../../etc/passwd,,"})

    found = scan(venv)

    assert not any("secret" in file or "passwd" in file for source in found.sources.values() for file in source.files)


# --- what belongs to an environment -----------------------------------------------------------------------------------


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
        snapshots.append(scan(venv).snapshot.address)

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
        f"{venv.site}/out_directory: it is a link to {outside}, out of {venv.site}, and not to a file",
        f"{venv.site}/dangling: it is a link to nothing, and that is not captured",
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

    control = "holds 'site/new\\nline': its name has control characters, or is not UTF-8\nhint: rename or remove it"
    said = {
        "fifo": "/pipe cannot be captured: it is a device, a socket or a FIFO\nhint: remove it",
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
        f"{project}/pipe: it is a device, a socket or a FIFO",
        f"'{project}/new\\nline': its name has control characters, or bytes that are not UTF-8",
    )


def test_a_file_that_cannot_be_read_is_named(venv: Venv, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (venv.site / "closed.py").write_text("")
    (venv.site / "closed.py").chmod(0)

    with pytest.raises(EnvironmentUnsupported, match=r"cannot read .*closed\.py: Permission denied"):
        scan(venv)


# --- other directories on sys.path ------------------------------------------------------------------------------------


def test_the_system_s_packages_are_a_root_of_their_own(tmp_path: Path) -> None:
    venv = Venv(tmp_path / "venv", "--system-site-packages")
    config = venv.prefix / "pyvenv.cfg"
    assert "include-system-site-packages = true" in config.read_text()

    description = venv.describe()
    found = Recogniser(tmp_path / "index").scan(description, nobody)

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

    found = recogniser.scan(description, nobody)

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
    assert recogniser.scan(description, nobody).snapshot.address == found.snapshot.address


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
    found = Recogniser(tmp_path / "index").scan(description, nobody)

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
    assert (generated.path, generated.text) == ("site/paths.pth", "{{sgpu:1}}\ninner\n# a comment\n")
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


def test_conda_is_refused_by_name(venv: Venv) -> None:
    (venv.prefix / "conda-meta").mkdir()

    with pytest.raises(EnvironmentUnsupported) as caught:
        scan(venv)

    assert str(caught.value) == (
        f"{venv.prefix} is a conda environment, which cannot be captured: conda rewrites files it installs\n"
        f"hint: make a virtual environment on top of it: {venv.prefix}/bin/python -m venv .venv"
    )


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

    found = Recogniser(tmp_path / "index").scan(venv.describe(cwd=home, HOME=str(home)), nobody)

    assert list(rows(found, 1, "code", "home")) == ["site/package/__init__.py", "site/train.py"]
    root = Recogniser(tmp_path / "index").scan(venv.describe(cwd=Path("/")), nobody)
    assert sum(member.files for one in root.snapshot.roots[1:] for member in one.members) < 1000


# --- editable installs ------------------------------------------------------------------------------------------------


def editable(venv: Venv, project: Path, files: dict[str, str], *extra: str) -> None:
    """Install a project as an installer of editable wheels does: a dist-info, and files that name its directory."""
    lines = [claim(path, text.encode()) for path, text in files.items()]
    info = venv.site / "tool-1.0.dist-info"
    info.mkdir()
    texts = {"METADATA": "Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n", "INSTALLER": "uv"}
    texts["direct_url.json"] = json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}})
    texts["entry_points.txt"] = "[console_scripts]\ntool = tool:main\n"
    for name, text in texts.items():
        (info / name).write_text(text)
        lines.append(claim(f"{info.name}/{name}", text.encode()))
    for path, text in files.items():
        (venv.site / path).write_text(text)
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n")


USE = "import importlib.metadata as m, tool, sys; print(m.version('tool'), tool.value, tool.__file__)"


def test_an_editable_install_by_a_plain_path(venv: Venv, tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"src/tool/__init__.py": "value = 7\n"})
    editable(venv, project, {"_tool.pth": f"{project}/src\n"})

    found = scan(venv)

    assert names(found.snapshot, 0) == ["distribution tool"]
    assert "site/_tool.pth" not in rows(found, 0, "distribution", "tool")
    assert [(file.path, file.text) for file in found.snapshot.roots[0].generated] == [
        ("site/_tool.pth", "{{sgpu:1}}\n")
    ]
    laid_out = LaidOut(found, tmp_path / "tree")
    shutil.rmtree(project)
    assert laid_out.run(USE) == f"1.0 7 {laid_out.sites[1]}/tool/__init__.py\n"
    assert set(found.snapshot.facts.notes[0]) == {
        "site/tool-1.0.dist-info/INSTALLER",
        "site/tool-1.0.dist-info/direct_url.json",
    }


def test_an_editable_install_by_a_finder(venv: Venv, tmp_path: Path) -> None:
    # As setuptools writes it, shortened: MAPPING names packages, and the .pth line installs the finder.
    project = write(tmp_path / "project", {"tool/__init__.py": "value = 8\n", "setup.py": ""})
    finder = f"""
import sys
from importlib.util import spec_from_file_location
MAPPING: dict[str, str] = {{'tool': '{project}/tool'}}
NAMESPACES: dict[str, list[str]] = {{}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")
def install():
    sys.meta_path.append(Finder)
"""
    pth = "import __editable___tool_1_0_finder; __editable___tool_1_0_finder.install()"
    editable(venv, project, {"__editable__.tool-1.0.pth": pth, "__editable___tool_1_0_finder.py": finder})

    found = scan(venv)

    root = found.snapshot.roots[1]
    assert (root.kind, root.on_path, found.snapshot.facts.originals[1]) == ("code", False, str(project))
    assert "site/__editable__.tool-1.0.pth" in rows(found, 0, "distribution", "tool")
    (generated,) = found.snapshot.roots[0].generated
    assert "MAPPING: dict[str, str] = {'tool': '{{sgpu:1}}/tool'}" in generated.text
    laid_out = LaidOut(found, tmp_path / "tree")
    shutil.rmtree(project)
    assert laid_out.run(USE) == f"1.0 8 {laid_out.sites[1]}/tool/__init__.py\n"


def test_an_editable_install_by_an_egg_link(venv: Venv, tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"tool/__init__.py": "value = 9\n", ".gitignore": "*.egg-info\n"})
    info = project / "tool.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tool\nVersion: 1.0\n")
    (venv.site / "tool.egg-link").write_text(f"{project}\n.")
    (venv.site / "easy-install.pth").write_text(f"{project}\n")

    found = scan(venv)

    assert [(file.path, file.text) for file in found.snapshot.roots[0].generated] == [
        ("site/easy-install.pth", "{{sgpu:1}}\n"),
        ("site/tool.egg-link", "{{sgpu:1}}\n."),
    ]
    laid_out = LaidOut(found, tmp_path / "tree")
    shutil.rmtree(project)
    assert laid_out.run(USE) == f"1.0 9 {laid_out.sites[1]}/tool/__init__.py\n"


def test_an_editable_install_of_the_project_one_stands_in(venv: Venv, tmp_path: Path) -> None:
    project = write(tmp_path / "project", {"src/tool/__init__.py": "value = 7\n", "train.py": ""})
    editable(venv, project, {"_tool.pth": f"{project}/src\n"})

    found = scan(venv, cwd=project)

    assert found.snapshot.facts.originals == (str(venv.site), str(project))
    assert found.snapshot.roots[0].generated[0].text == "{{sgpu:1}}/src\n"
    assert LaidOut(found, tmp_path / "tree").run(USE).startswith("1.0 7 ")


def test_what_was_loaded_is_told_by_root(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    project = write(tmp_path / "project", {"train.py": "", "other.py": ""})
    description = venv.describe(cwd=project)
    loaded = (str(venv.site / "tool" / "__init__.py"), str(project / "train.py"), os.__file__)

    found = Recogniser(tmp_path / "index").scan(msgspec.structs.replace(description, loaded=loaded), nobody)

    assert found.snapshot.facts.loaded == (("site/tool/__init__.py",), ("site/train.py",))


def test_previous_is_the_unit_that_was_captured_before(venv: Venv, tmp_path: Path) -> None:
    venv.install_with_pip(build_wheel(tmp_path, TOOL))
    recogniser, description = Recogniser(tmp_path / "index"), venv.describe()
    first = recogniser.scan(description, nobody)
    recogniser.remember(first)
    (venv.site / "tool" / "__init__.py").write_text("value = 123456\n")

    second = recogniser.scan(description, nobody)

    (old,), (new,) = first.sources, second.sources
    assert (second.sources[new].previous, first.sources[old].previous) == (old, "")
