"""What processes of ours get of a caller's variables: all that decides what a capture or a restore finds."""

from __future__ import annotations

import os
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from serverless_gpu.environment.documents import Interpreter
from serverless_gpu.environment.restore.interpreters import candidates
from serverless_gpu.environment.scan import interpreter
from serverless_gpu.environment.scan.gitignore import outer_ignoring
from serverless_gpu.node.processes import spawn
from serverless_gpu.node.processes.spawn import (
    PRELOAD,
    clean_variables,
    preload,
    separating_variables,
    startup_variables,
)

PYTHON = Interpreter(implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux")


def test_a_clean_process_leaves_out_what_the_caller_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "config" / "git").mkdir(parents=True)
    (tmp_path / "config" / "git" / "ignore").write_text("*.dat\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    for variables in (dict(os.environ), clean_variables(os.environ)):
        for name in ("XDG_CONFIG_HOME", *variables):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert outer_ignoring(str(tmp_path / "project"))[0].by_git("a.dat")


@pytest.mark.parametrize("name", ["XDG_DATA_HOME", "UV_PYTHON_INSTALL_DIR", "PYENV_ROOT"])
def test_a_clean_process_looks_for_interpreters_where_the_caller_would(tmp_path: Path, name: str) -> None:
    below = {"XDG_DATA_HOME": "uv/python/", "UV_PYTHON_INSTALL_DIR": "", "PYENV_ROOT": "versions/"}[name]
    version = "3.11.7" if name == "PYENV_ROOT" else "cpython-3.11.7-linux-x86_64-gnu"
    python = tmp_path / f"{below}{version}" / "bin" / "python3.11"
    python.parent.mkdir(parents=True)
    python.touch()

    assert str(python) in candidates(PYTHON, (), clean_variables({name: str(tmp_path)}))


def test_both_lists_of_startup_variables_are_one() -> None:
    # Two, because the description of an interpreter stands alone and a caller's import must not pay for it.
    assert spawn.STARTUP_PREFIXES == interpreter.STARTUP_PREFIXES


def test_a_clean_process_finds_packages_and_single_modules_wherever_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> ModuleSpec | None:
        if name == "msgspec":
            package = tmp_path / "one" / name
            return spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
        if name == "psutil":
            package = tmp_path / "two" / name
            return spec_from_file_location(name, package / "__init__.py", submodule_search_locations=[str(package)])
        return spec_from_file_location(name, tmp_path / "three" / f"{name}.py") if name == "pynvml" else None

    monkeypatch.setattr("importlib.util.find_spec", found)
    assert spawn.search_path()[1:] == [str(tmp_path / place) for place in ("one", "two", "three")]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, PRELOAD),
        ("", PRELOAD),
        ("numpy", ("numpy",)),
        ("torch, numpy", ("numpy", "torch")),
        ("antigravity", PRELOAD),
    ],
)
def test_zygotes_import_what_the_agent_was_told(wanted: str | None, found: tuple[str, ...]) -> None:
    assert preload({} if wanted is None else {"SERVERLESS_GPU_PRELOAD": wanted}) == found


@pytest.mark.parametrize(
    ("environ", "kept"),
    [
        ({"LANG": "de_DE.ISO-8859-1"}, {"LC_ALL": "de_DE.ISO-8859-1"}),
        ({"LANG": "de_DE.ISO-8859-1", "LC_CTYPE": "C.UTF-8"}, {}),
        ({"LANG": "C.utf8", "LC_ALL": "ja_JP.EUC-JP@x"}, {"LC_ALL": "ja_JP.EUC-JP@x"}),
        ({"LC_ALL": "", "LANG": "C"}, {}),
        ({"TZ": "Asia/Tokyo", "LC_NUMERIC": "de_DE.ISO-8859-1"}, {}),
    ],
)
def test_23A6_a_locale_whose_encoding_is_not_utf8_decides_how_an_interpreter_starts(
    environ: dict[str, str], kept: dict[str, str]
) -> None:
    assert startup_variables(environ) == kept


def test_23B10_what_libraries_set_themselves_separates_no_callers() -> None:
    set_by_libraries = {
        "KMP_DUPLICATE_LIB_OK": "True",
        "KMP_INIT_AT_FORK": "FALSE",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_me",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    own = {"OMP_NUM_THREADS": "2", "KMP_AFFINITY": "none"}
    assert separating_variables({**own, **set_by_libraries}) == own
    assert startup_variables(set_by_libraries) == set_by_libraries, "an interpreter of the caller's starts with them"
    changed = {"KMP_INIT_AT_FORK": "TRUE", "KMP_DUPLICATE_LIB_OK": "0"}
    assert separating_variables(changed) == changed
