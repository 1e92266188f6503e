"""The parts of an interpreter that a sandbox shows."""

from __future__ import annotations

from pathlib import Path

from serverless_gpu.node.inside.sandbox import interpreter_parts


def test_an_interpreter_below_the_root_directory_shows_no_settings_of_the_machine() -> None:
    assert "/etc" not in interpreter_parts("/bin/python3")


def test_the_installation_is_shown_part_by_part_and_never_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").touch()
    found = interpreter_parts(str(tmp_path / "bin" / "python3"))
    assert {str(tmp_path / "lib"), str(tmp_path / "bin" / "python3"), str(tmp_path / "pyvenv.cfg")} <= set(found)
    assert str(tmp_path) not in found


def test_a_virtual_environment_shows_its_base_installation_too(tmp_path: Path) -> None:
    base, venv = tmp_path / "base", tmp_path / "venv"
    for place in (base, venv):
        (place / "bin").mkdir(parents=True)
    (base / "bin" / "python3").touch()
    (venv / "bin" / "python").symlink_to(base / "bin" / "python3")
    found = interpreter_parts(str(venv / "bin" / "python"))
    assert {str(base / "lib"), str(venv / "lib")} <= set(found)
