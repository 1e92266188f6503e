"""Programs rendered for the user's interpreter: golden text, and paths that would like to break it."""

from __future__ import annotations

import ast
import os
import re
import shlex
from pathlib import Path

import pytest

from serverless_gpu.node.attempt.submission import air_program
from serverless_gpu.node.base.protocol import Context
from serverless_gpu.node.inside.protocol import VERSION
from serverless_gpu.node.processes.spawn import INSIDE, zygote_program
from tests.support.golden import golden

HOSTILE = {
    "quote": "/tmp/it's",
    "double quote": '/tmp/a "b"',
    "three double quotes": '/tmp/a"""b',
    "three quotes": "/tmp/a'''b",
    "code": '/tmp/"""\nraise SystemExit(1)\n"""',
    "space": "/tmp/a b",
    "newline": "/tmp/a\nb",
    "tab": "/tmp/a\tb",
    "backslash": "/tmp/a\\b",
    "backslash that is an escape": "/tmp/a\\x",
    "backslash and name": "/tmp/\\N",
    "backslash at the end": "/tmp/a\\",
    "braces": "/tmp/{0}{a}{{",
    "percent": "/tmp/%s%d",
    "umlaut": "/tmp/ä☃",
    "not utf-8": os.fsdecode(b"/tmp/\xff\xfe"),
    "carriage return": "/tmp/a\rb",
}
hostile = pytest.mark.parametrize("path", HOSTILE.values(), ids=HOSTILE)


def context(**fields: object) -> Context:
    given: dict[str, object] = {
        "python": "/usr/bin/python3",
        "flags": (),
        "environ": {"SECRET": "value"},
        "cwd": "/work",
        "umask": 0o22,
        "argv": ("train.py", "--lr", "3e-4"),
        "sys_path": ("/work", "/usr/lib/python3.11"),
        **fields,
    }
    return Context(**given)  # type: ignore[arg-type]  # a bag of fields for tests


LOAD = f"""\
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_sgpu_inside", '{INSIDE}/__init__.py', \
submodule_search_locations=['{INSIDE}'])
runtime = sys.modules["_sgpu_inside"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runtime)
"""


def test_the_zygote_program() -> None:
    assert zygote_program(7, ["numpy", "torch"]) == golden(
        "node.entrypoint.sgpu-inside-import", LOAD=LOAD, VERSION=VERSION
    )


def test_the_readable_program() -> None:
    text = air_program(directory=Path("/home/r/1"), run_id="r", fence=1, world_size=2, context=context())
    assert text == golden("node.entrypoint.run-attempt-every", LOAD=LOAD)


def test_no_value_of_a_variable_is_written_down() -> None:
    made = context(environ={"TOKEN": "s3cr3t"})
    assert "s3cr3t" not in air_program(directory=Path("/x"), run_id="r", fence=1, world_size=1, context=made)


@pytest.mark.parametrize("umask", [0, 0o77, 0o777])
def test_every_umask_is_a_number(umask: int) -> None:
    text = air_program(directory=Path("/x"), run_id="r", fence=1, world_size=1, context=context(umask=umask))
    found = re.search(r"os\.umask\((.*)\)", text)
    assert found is not None and ast.literal_eval(found[1]) == umask


def compiled(text: str) -> ast.Module:
    """Parse as an interpreter would read the file, without a warning."""
    return ast.parse(text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def literals(module: ast.Module) -> list[object]:
    return [node.value for node in ast.walk(module) if isinstance(node, ast.Constant)]


@hostile
def test_a_hostile_working_directory_argument_or_path_is_only_text(path: str) -> None:
    made = context(cwd=path, argv=(path, "--x=" + path), sys_path=(path,))
    text = air_program(directory=Path("/x"), run_id="r", fence=1, world_size=1, context=made)
    values = literals(ast.parse(text))
    assert values.count(path) == 3
    assert "--x=" + path in values


@hostile
def test_a_hostile_run_directory_is_only_text(path: str) -> None:
    text = air_program(directory=Path(path), run_id="r", fence=1, world_size=1, context=context())
    module = compiled(text)
    names = [type(node).__name__ for node in module.body]
    assert names[0] == "Expr" and "Raise" not in names
    context_lines, load = ["Expr", "Expr", "Assign", "Assign"], ["Import", "Assign", "Assign", "Expr"]
    assert names == ["Expr", "Import", "Import", *context_lines, *load, "ImportFrom", "If"]


@hostile
def test_a_hostile_run_directory_can_be_loaded_from_its_file(path: str, tmp_path: Path) -> None:
    """Written to a file as the client writes it, and compiled from its bytes as Python does."""
    text = air_program(directory=Path(path), run_id="r", fence=1, world_size=1, context=context())
    file = tmp_path / "_air.py"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    module = compile(file.read_bytes(), str(file), "exec", ast.PyCF_ONLY_AST)
    assert isinstance(module, ast.Module)
    assert path in literals(module)


def test_the_command_can_be_copied_where_the_path_has_a_space() -> None:
    text = air_program(directory=Path("/a b"), run_id="r", fence=1, world_size=3, context=context())
    line = next(line for line in text.splitlines() if line.strip().startswith("torchrun"))
    assert shlex.split(line) == ["torchrun", "--nproc-per-node=3", "/a b/_air.py"]


@hostile
def test_a_hostile_install_directory_starts_a_zygote_all_the_same(path: str) -> None:
    module = ast.parse(zygote_program(5, [path], Path(path)))
    values = literals(module)
    assert values.count(path) == 2
    assert str(Path(path) / "__init__.py") in values
