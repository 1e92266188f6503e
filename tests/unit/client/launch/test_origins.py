"""Which modules a caller says the files of: those in its own directories that something further down has, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from serverless_gpu.client.caller_context import origins

LIBRARY = os.path.dirname(os.__file__)


def found(names: set[str]) -> dict[str, str]:
    """Return what is said about some names."""
    return {name: file for name, file in origins().items() if name in names}


@pytest.mark.parametrize("relative", [False, True], ids=["absolute", "working directory"])
def test_a_file_that_comes_later_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["" if relative else str(tmp_path), *sys.path])
    names = {"nntplib", "only_here"}  # of the standard library, and loaded by nobody; of nobody
    assert found(names) == {}
    (tmp_path / "nntplib.py").touch()
    (tmp_path / "only_here.py").touch()
    assert found(names) == {"nntplib": str(tmp_path / "nntplib.py")}


def test_what_is_loaded_is_said_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("selectors", "time", "os", "runpy"):  # loaded from a file; not in any file; both; frozen
        (tmp_path / f"{name}.py").touch()
    monkeypatch.delitem(sys.modules, "runpy", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert found({"selectors", "time", "os"}) == {name: f"{LIBRARY}/{name}.py" for name in ("os", "selectors")}
    assert found({"runpy"}).get("runpy", "").startswith(str(tmp_path)) is False


def test_packages_of_another_environment_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = tmp_path / "mine" / "site-packages", tmp_path / "theirs" / "site-packages"
    for place in (mine, theirs):
        (place / "twice_here").mkdir(parents=True)
        (place / "twice_here" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(mine), str(theirs)])
    assert found({"twice_here"}) == {}, "both are installed: every interpreter of this environment has the same"
    monkeypatch.setattr(sys, "path", [str(theirs), *sys.path])
    assert found({"twice_here"}) == {"twice_here": str(theirs / "twice_here" / "__init__.py")}


def test_places_that_are_no_directories_have_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    places = [str(tmp_path / "file"), str(tmp_path / "absent"), tmp_path]
    before = origins()
    monkeypatch.setattr(sys, "path", [*places, *sys.path])
    assert origins() == before
