"""Editable installs of all kinds: the source is code, metadata stays importable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.environment.laid_out import LaidOut
from tests.support.environment.scans import claim, names, rows, scan, write
from tests.support.environment.wheels import Venv
from tests.support.golden import golden

pytestmark = pytest.mark.slow


@pytest.fixture
def venv(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


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
    assert golden("environment.editable.mapping-dict-str") in generated.text
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
