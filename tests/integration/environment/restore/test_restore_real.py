"""A virtual environment as pip makes it, captured and restored under another path: what Python sees is the same.

The same questions are asked in the original and in the restored environment; paths in the original's answers are
translated as the runtime translates them (`moved`). The original is hidden while the restored one answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serverless_gpu.environment.capture.snapshot_capture import scan_and_capture
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.export import ExportRequest, export
from serverless_gpu.environment.restore.restore import RestoredTree, RestoreMethod, restore
from serverless_gpu.environment.restore.tree_plan import moved
from serverless_gpu.environment.scan.description import read_description
from serverless_gpu.environment.scan.interpreter import describe_other
from serverless_gpu.environment.scan.scan import Recogniser
from serverless_gpu.environment.stores.blobs import StoreBlobs
from tests.support.environment.made_environments import Counting, base_python
from tests.support.environment.restored_process import MODES, run

pytestmark = pytest.mark.slow

QUESTIONS = """
import sys, sysconfig
import alpha, alpha.sub, beta, early, edited, pip, targeted
from importlib import metadata, resources
def files(name):
    return sorted(str(f) for f in metadata.files(name) if "__pycache__" not in str(f))
answer = {
    "modules": [m.__file__ for m in (alpha, alpha.sub, beta, early, edited, pip, targeted)],
    "versions": sorted((d.metadata["Name"], d.version) for d in metadata.distributions()),
    "points": sorted((p.name, p.value, p.group) for d in metadata.distributions() for p in d.entry_points),
    "files": {name: files(name) for name in ("alpha", "beta", "pip")},
    "data": resources.files("alpha").joinpath("data.txt").read_text(),
    "share": open(sys.prefix + "/share/alpha/readme.txt").read(),
    "paths": [p for p in sys.path if p and not p.startswith(sys.base_prefix + "/lib")],
    "purelib": sysconfig.get_path("purelib"),
    "prefix": sys.prefix,
    "marked": sys.marked_by_pth,
    "installers": [metadata.distribution(name).read_text("INSTALLER") for name in ("alpha", "beta")],
}
"""
SCRIPTS = ("alpha", "alpha-gui", "alpha-script")


def wheel(directory: Path, name: str, files: Mapping[str, str], points: str = "") -> Path:
    """Write a wheel; a wheel is a zip with its own list of contents."""
    info = f"{name}-1.0.dist-info"
    contents = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": points} if points else {}),
    }
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in contents.items()}
    lines = [
        f"{path},sha256={base64.urlsafe_b64encode(digests[path]).rstrip(b'=').decode()},{len(text.encode())}"
        for path, text in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    path = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in contents.items():
            archive.writestr(member, text)
    return path


class Original(NamedTuple):
    """The captured environment, the store it is in, and what it answered."""

    home: Path
    hidden: Path
    snapshot: Snapshot
    blobs: StoreBlobs
    answers: Any


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    home = tmp_path_factory.mktemp("original") / "home"
    (home / "work").mkdir(parents=True)
    make_environment(home)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PYTHONPATH"] = str(home / "early")
    python = str(home / "env/bin/python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", variables["PYTHONPATH"])
        patch.chdir(home / "work")
        description = read_description(describe_other(python))
    blobs = StoreBlobs(Counting())
    snapshot = scan_and_capture(description, Recogniser(home / "index"), blobs, level=1).snapshot
    answers = ask(python, home / "work", variables)
    hidden = home.with_name("hidden")
    home.rename(hidden)
    return Original(home, hidden, snapshot, blobs, answers)


def ask(python: str, directory: Path, variables: Mapping[str, str]) -> Any:
    """Return what an interpreter answers."""
    code = f"{QUESTIONS}\nimport json; print(json.dumps(answer))"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=False, cwd=directory, env=variables, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def make_environment(home: Path) -> None:
    subprocess.run([base_python(), "-m", "venv", str(home / "env")], check=True)
    alpha = wheel(
        home,
        "alpha",
        {
            "alpha/__init__.py": "def main():\n    print('alpha runs')\n",
            "alpha/sub.py": "",
            "alpha/data.txt": "data",
            "alpha-1.0.data/data/share/alpha/readme.txt": "read me",
            "alpha-1.0.data/scripts/alpha-script": "#!python\nimport alpha\nalpha.main()\n",
        },
        "[console_scripts]\nalpha = alpha:main\n[gui_scripts]\nalpha-gui = alpha:main\n[plugins]\np = alpha:main\n",
    )
    beta = wheel(home, "beta", {"beta.py": "", "beta-marks.pth": "import sys; sys.marked_by_pth = 1\n"})
    targeted = wheel(home, "targeted", {"targeted/__init__.py": ""})
    pip = [str(home / "env/bin/python"), "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(alpha), str(beta)], check=True)
    subprocess.run([*pip, "--target", str(home / "target"), str(targeted)], check=True)
    for module, directory in (("edited", home / "project/src"), ("early", home / "early")):
        (directory / module).mkdir(parents=True)
        (directory / module / "__init__.py").write_text("")
    site = next((home / "env/lib").glob("python*/site-packages"))
    (site / "__editable__.edited-0.1.pth").write_text(f"{home}/project/src\n")
    (site / "target.pth").write_text(f"{home}/target\n")


def translated(original: Original, tree: str) -> Any:
    """Return the original's answers with its paths as they are in a tree."""
    answers = dict(original.answers)
    for key in ("modules", "paths"):
        answers[key] = [moved(original.snapshot, tree, path) for path in answers[key]]
    for key in ("purelib", "prefix"):
        answers[key] = moved(original.snapshot, tree, answers[key])
    return answers


@pytest.mark.parametrize("mode", MODES)
def test_python_sees_in_a_restored_environment_what_it_saw(original: Original, tmp_path: Path, mode: str) -> None:
    cache = UnitCache(tmp_path / "environments")
    restored = restore(
        original.snapshot.address,
        original.blobs,
        cache,
        way=RestoreMethod(mode="links" if mode == "links" else "overlay"),
    )
    code = f"{QUESTIONS}\nimport json; print(json.dumps(answer))"
    said = json.loads(run(restored, "python", "-c", code, environ={"PYTHONPATH": ":".join(restored.before)}))
    expected = translated(original, restored.tree)
    assert differences(said, expected) == {}
    check_programs(restored)


def differences(said: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (said[key], expected[key]) for key in expected if said[key] != expected[key]}


def check_programs(restored: RestoredTree) -> None:
    for script in SCRIPTS:
        assert run(restored, script) == "alpha runs"
    listed = {entry["name"] for entry in json.loads(run(restored, "pip", "list", "--format=json"))}
    assert {"alpha", "beta", "pip"} <= listed
    assert "No broken requirements" in run(restored, "pip", "check")
    shown = run(restored, "pip", "show", "--files", "alpha")
    assert "../../../share/alpha/readme.txt" in shown and f"Location: {restored.tree}" in shown


def test_python_sees_in_an_exported_environment_what_it_saw(original: Original, tmp_path: Path) -> None:
    cache = UnitCache(tmp_path / "environments")
    exported = export(original.snapshot.address, original.blobs, cache, ExportRequest(target=tmp_path / "my env"))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert differences(ask(exported.python, tmp_path, variables), translated(original, exported.tree)) == {}
    done = subprocess.run([f"{exported.tree}/bin/pip", "list"], capture_output=True, text=True, check=True, cwd="/")
    assert "alpha" in done.stdout
