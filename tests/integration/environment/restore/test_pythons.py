"""Which interpreter of a machine stands in for the one that was captured."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.restore import interpreters
from serverless_gpu.environment.restore.interpreters import ask, candidates, find_python, keep, recall, trusted
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.made_environments import base_python, interpreter
from tests.support.golden import golden


def wrapper(path: Path, *, version: str = "", abi: str = "", log: Path | None = None) -> Path:
    """Make a program that says of itself what we want it to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    here = interpreter()
    answer = [here.implementation, version or here.version, abi or here.abi, here.platform, "cpython-311", str(path)]
    lines = ["#!/bin/sh", f"echo asked >> {log}" if log else "", f"echo '{msgspec.json.encode(answer).decode()}'", ""]
    path.write_text("\n".join(lines))
    path.chmod(0o755)
    return path


def test_our_own_interpreter_is_found_without_its_environment() -> None:
    found = find_python(interpreter(), environ={})
    assert (os.path.realpath(found.path), found.note) == (os.path.realpath(base_python()), "")
    assert found.tag == sys.implementation.cache_tag


def test_the_exact_version_is_preferred_and_another_patch_is_noted(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(interpreter(), version=f"{interpreter().minor}.99")
    near = wrapper(tmp_path / "near" / "python")
    exact = wrapper(tmp_path / "exact" / "python", version=wanted.version)
    assert find_python(wanted, [str(near), str(exact)], {}).path == str(exact)
    found = find_python(wanted, [str(near)], {})
    assert (found.path, found.note) == (
        str(near),
        golden("environment.pythons.python-stands", version=interpreter().version, version_2=wanted.version),
    )


def test_another_abi_does_not_fit_and_is_named(tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(interpreter(), abi="cpython-311d-x86_64-linux-gnu")
    other = wrapper(tmp_path / "python")
    with pytest.raises(EnvironmentUnsupported) as caught:
        find_python(wanted, [str(other)], {})
    assert golden("environment.pythons.cpython-311d-x86", other=other) in caught.value.message
    assert caught.value.hint == golden("environment.pythons.install-example-uv", minor=interpreter().minor)
    fitting = wrapper(tmp_path / "fitting", abi=wanted.abi)
    assert find_python(wanted, [str(other), str(fitting)], {}).path == str(fitting)


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
    found = interpreters.minors(environ)
    assert found[0] == "3.4" and found[-2:] == ("3.98", "3.99")
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in found
    assert not {"3.97", "3.96"} & set(found)
    assert not log.exists()


def test_an_interpreter_is_asked_once_until_it_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    python = wrapper(tmp_path / "python", log=log)
    assert ask(str(python)) == ask(str(python)) is not None
    assert log.read_text() == "asked\n"
    wrapper(python, version="3.1.0", log=log)
    changed = ask(str(python))
    assert changed is not None and changed.version == "3.1.0"


@pytest.mark.parametrize(
    "text", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nonsense\n", "#!/bin/sh\necho '[1, 2]'\n", "x"]
)
def test_what_is_no_interpreter_is_passed_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "python"
    path.write_text(text)
    path.chmod(0o755)
    assert ask(str(path)) is None
    assert find_python(interpreter(), [str(path)], {}).path != str(path)


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


def test_an_interpreter_is_asked_once_in_a_boot_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, kept = tmp_path / "log", tmp_path / "kept"
    program = str(wrapper(tmp_path / "python", log=log))
    answer = ask(program)
    keep(kept, "this boot")

    def ask_elsewhere(boot: str) -> object:
        monkeypatch.setattr(interpreters, "_answers", {})  # another process
        recall(kept, boot)
        return ask(program)

    assert (ask_elsewhere("this boot"), log.read_text()) == (answer, "asked\n")
    assert (ask_elsewhere("the next boot"), log.read_text()) == (answer, "asked\n" * 2)
    os.utime(program, ns=(1, 1))
    assert (ask_elsewhere("this boot"), log.read_text()) == (answer, "asked\n" * 3)
