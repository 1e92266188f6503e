"""Which interpreter of a machine stands in for the one that was captured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from serverless_gpu.environment.restore import pythons
from serverless_gpu.environment.restore.pythons import candidates, find_python, trusted
from tests.support.environment.made_environments import base_python, interpreter
from tests.support.environment.pythons import wrapper


def test_our_own_interpreter_is_found_without_its_environment() -> None:
    found = find_python(interpreter(), environ={})
    assert (os.path.realpath(found.path), found.note) == (os.path.realpath(base_python()), "")
    assert found.tag == sys.implementation.cache_tag


def test_places_are_looked_at_in_order(tmp_path: Path) -> None:
    minor, name = interpreter().minor, f"python{interpreter().minor}"
    places = [
        f"uv/cpython-{minor}.4-linux-x86_64-gnu/bin/{name}",
        f"uv/cpython-{minor}.1-linux-x86_64-gnu/bin/{name}",
        f"pyenv/versions/{minor}.3/bin/{name}",
    ]
    for place in places:
        wrapper(tmp_path / place)
    environ = {
        "PATH": f"{tmp_path}/one::relative:{tmp_path}/two",
        "UV_PYTHON_INSTALL_DIR": f"{tmp_path}/uv",
        "PYENV_ROOT": f"{tmp_path}/pyenv",
    }
    assert list(candidates(interpreter(), ["/hint"], environ)) == [
        "/hint",
        base_python(),
        f"{tmp_path}/one/{name}",
        f"{tmp_path}/two/{name}",
        f"/usr/bin/{name}",
        f"/usr/local/bin/{name}",
        *(f"{tmp_path}/{place}" for place in places),
    ]


def test_F58_the_versions_that_would_be_found_are_listed_without_running_any(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for name in ("bin/python3.4", "uv/cpython-3.99.1/bin/python3.99", "pyenv/versions/3.98.0/bin/python3.98"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        wrapper(path, log=log)
    (tmp_path / "bin/python3.97").write_text("not executable")
    (tmp_path / "bin/python3.96-config").touch(0o700)
    environ = {
        "PATH": f"relative:{tmp_path}/bin",
        "UV_PYTHON_INSTALL_DIR": str(tmp_path / "uv"),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
    }
    found = pythons.minors(environ)
    assert found[0] == "3.4" and found[-2:] == ("3.98", "3.99")
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in found
    assert not {"3.97", "3.96"} & set(found)
    assert not log.exists()


def test_a_path_that_a_snapshot_names_is_trusted_where_nobody_else_can_write(tmp_path: Path) -> None:
    python = wrapper(tmp_path / "bin" / "python3.11")
    assert trusted(str(python))
    assert not trusted(str(wrapper(tmp_path / "bin" / "reboot")))
    assert not trusted("python3.11")
    assert not trusted(str(tmp_path / "none" / "python3.11"))
    assert not trusted("")
    python.chmod(0o777)
    assert not trusted(str(python))
    python.chmod(0o755)
    python.parent.chmod(0o777)
    assert not trusted(str(python))
