"""The code of README, quickstart and examples passes type checkers as a reader's editor has them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

from tests.support.docs.pages import scripts
from tests.support.paths import REPOSITORY

PAGES = ("README.md", "docs/quickstart.md")

_PYRIGHT = {
    "typeCheckingMode": "standard",
    "extraPaths": [str(REPOSITORY / "src")],
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    "reportPossiblyUnboundVariable": False,  # a loop that may have no turn: those of training
    "reportPrivateImportUsage": False,  # torch names its public functions in modules without __all__
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return what a reader would have in files: scripts of pages, examples, the notebook's cells in one."""
    folder = tmp_path_factory.mktemp("typed")
    sources = {
        f"{Path(page).stem.lower()}_{script.line}.py": script.text
        for page in PAGES
        for script in scripts(page, (REPOSITORY / page).read_text(encoding="utf-8"))
        if not script.notebook
    }
    sources |= {path.name: path.read_text(encoding="utf-8") for path in (REPOSITORY / "examples").glob("*.py")}
    cells = json.loads((REPOSITORY / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    sources["notebook.py"] = "\n\n".join(map(_as_code, code))
    for name, text in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(folder.glob("*.py"))


def _as_code(cell: str) -> str:
    """Return a cell as a type checker reads it; of a magic's, what it leaves: a list under the name after -o."""
    if not cell.startswith("%"):
        return cell
    output = re.search(r" -o (\w+)$", cell.partition("\n")[0])
    return f"{output[1]}: list[int] = []" if output else ""


def test_23B4_mypy_finds_nothing_in_the_examples(files: list[Path], tmp_path: Path) -> None:
    config = tmp_path / "mypy.ini"
    # torch and others count as untyped: mypy reads torch for half a minute.
    options = f"mypy_path = {REPOSITORY / 'src'}\nno_site_packages = true\nignore_missing_imports = true\n"
    config.write_text(f"[mypy]\n{options}follow_imports = silent\n")
    out, err, code = api.run(["--config-file", str(config), "--cache-dir", str(tmp_path / "cache"), *map(str, files)])
    assert (code, err) == (0, ""), out


@pytest.mark.long
def test_23B4_pyright_finds_nothing_in_the_examples(files: list[Path]) -> None:
    folder = files[0].parent
    (folder / "pyrightconfig.json").write_text(json.dumps(_PYRIGHT))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "basedpyright",
            "--project",
            str(folder),
            "--pythonpath",
            str(Path(sys.executable).resolve()),  # not of the virtual environment: pyright reads torch for 15 s
            "--outputjson",
        ],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    found = [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']}"
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    ]
    assert not found, "\n".join(found)
