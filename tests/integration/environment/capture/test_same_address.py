"""The same wheels have the same addresses, whoever installed them, wherever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serverless_gpu.environment.documents import Snapshot, ignore_progress
from serverless_gpu.environment.scan.scan import Recogniser, Scan
from tests.support.environment.wheels import PIP_OPTIONS, Venv, Wheel, build_wheel, run

ALPHA = Wheel(
    name="alpha-tools",
    files={"alpha/__init__.py": "value = 1\n", "alpha/data/table.csv": "a,b\n", "alpha.libs/libx.so.1": b"\x7fELF"},
    entry_points="[console_scripts]\nalpha = alpha:main\n\n[other.group]\nx = alpha\n",
    data={
        "scripts/alpha-script": "#!python\nimport alpha\n",
        "scripts/alpha-shell": "#!/bin/sh\necho alpha\n",
        "data/share/alpha/note.txt": "shared\n",
    },
    executable=frozenset({"alpha_tools-1.0.data/scripts/alpha-shell"}),
)
BETA = Wheel(name="Beta", version="2.1", files={"space/beta/__init__.py": "", "beta_top.py": "import space.beta\n"})
GAMMA = Wheel(name="gamma", files={"space/gamma/__init__.py": "x = 1\n"})


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("wheels")
    return [build_wheel(directory, wheel) for wheel in (ALPHA, BETA, GAMMA)]


def scan(venv: Venv, index: Path, path: str = "") -> Scan:
    return Recogniser(index).scan(venv.describe(PYTHONPATH=path), ignore_progress)


def units(snapshot: Snapshot, root: int = 0) -> dict[str, str]:
    return {f"{member.kind} {member.name}": member.address for member in snapshot.roots[root].members}


@pytest.mark.slow
def test_pip_and_uv_give_equal_units_in_equal_roots_under_two_prefixes(tmp_path: Path, wheels: list[Path]) -> None:
    by_pip, by_uv = Venv(tmp_path / "one"), Venv(tmp_path / "another place" / "two", by_uv=True)
    by_pip.install_with_pip(*wheels)
    by_uv.install_with_uv(*wheels, cache=tmp_path / "cache")

    first, second = scan(by_pip, tmp_path / "i"), scan(by_uv, tmp_path / "i")

    assert units(first.snapshot) == units(second.snapshot)
    assert [member.name for member in first.snapshot.roots[0].members] == ["alpha-tools", "beta", "gamma"]
    assert first.snapshot.roots == second.snapshot.roots
    assert first.snapshot.address != second.snapshot.address, "its paths mean something else (decision 0021)"
    rows = {row.path: row for row in first.sources[units(first.snapshot)["distribution alpha-tools"]].rows}
    assert set(rows) == {
        "prefix/bin/alpha-script",
        "prefix/bin/alpha-shell",
        "prefix/share/alpha/note.txt",
        "site/alpha.libs/libx.so.1",
        "site/alpha/__init__.py",
        "site/alpha/data/table.csv",
        "site/alpha_tools-1.0.dist-info/METADATA",
        "site/alpha_tools-1.0.dist-info/WHEEL",
        "site/alpha_tools-1.0.dist-info/entry_points.txt",
    }
    assert rows["prefix/bin/alpha-shell"].kind == "x"
    assert first.snapshot.roots[0].members[0].modules == ("alpha",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "link_mode", ["hardlink", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("symlink", "copy"))]
)
def test_every_link_mode_of_uv_gives_the_units_of_pip(tmp_path: Path, wheels: list[Path], link_mode: str) -> None:
    by_pip, by_uv = Venv(tmp_path / "pip"), Venv(tmp_path / "uv")
    by_pip.install_with_pip(*wheels)
    by_uv.install_with_uv(*wheels, cache=tmp_path / "cache", link_mode=link_mode)

    assert scan(by_uv, tmp_path / "i").snapshot.roots == scan(by_pip, tmp_path / "i").snapshot.roots


@pytest.mark.slow
@pytest.mark.parametrize("installer", ["uv", pytest.param("pip", marks=pytest.mark.long)])
def test_a_target_directory_has_the_units_of_an_environment(tmp_path: Path, wheels: list[Path], installer: str) -> None:
    venv, empty, target = Venv(tmp_path / "venv"), Venv(tmp_path / "empty"), tmp_path / "deps"
    venv.install_with_pip(*wheels)
    if installer == "pip":
        run([sys.executable, "-m", "pip", "install", *PIP_OPTIONS, "--no-deps", "--target", target, *wheels])
    else:
        empty.install_with_uv(*wheels, cache=tmp_path / "cache", target=target)

    found = scan(empty, tmp_path / "i", path=str(target)).snapshot

    assert units(found, 1) == units(scan(venv, tmp_path / "i").snapshot)
    assert (found.roots[1].kind, found.roots[1].before) == ("library", True)
    assert found.facts.originals[1] == str(target)
