"""The code of a cell: which names of the notebook it needs, its last value, its own line numbers, what is refused."""

from __future__ import annotations
import __future__

import ast
import linecache
import sys
import types
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import cast

import pytest

from serverless_gpu.client.notebook import Cell, compile_cell, ends_silently, names_needed
from serverless_gpu.errors import UsageError
from serverless_gpu.node.inside import payload
from serverless_gpu.node.inside.call import distributed_cell
from tests.support.golden import golden

NAME = "<%%distributed In[7]>"


@pytest.fixture(autouse=True)
def main_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Yield a `__main__` of the test's own, as each rank has."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield module
    linecache.cache.pop(NAME, None)


def run(text: str, namespace: dict[str, object] | None = None, flags: int = 0) -> object:
    """Run a cell as rank 1 of 2."""
    cell = compile_cell("%%distributed", text, namespace if namespace is not None else {}, name=NAME, flags=flags)
    return distributed_cell(*cell, rank=1, world_size=2)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("x = lr * 2", {"lr"}),
        ("lr = lr * 2", {"lr"}),
        ("lr += 1", {"lr"}),
        ("model = build()\nmodel(x)", {"build", "x"}),
        ("model: object\nmodel", {"object", "model"}),
        ("a.b = c[0]", {"a", "c"}),
        ("del z", {"z"}),
        ("import os.path, json as j\nfrom a import b\nos, j, b", set()),
        ("def f(n):\n    return f(n - step)", {"step"}),
        ("def f(model=model):\n    return model", {"model"}),
        ("@wrap\ndef f(): ...", {"wrap"}),
        ("class A(A): ...", {"A"}),
        ("class A:\n    def m(self):\n        return A", set()),
        ("class A:\n    size = size", {"size"}),
        ("def g():\n    global n\n    n += 1", {"n"}),
        ("[x * k for x in xs]", {"k", "xs"}),
        ("k = [k * x for x in xs]", {"k", "xs"}),
        ("lambda y: y + u", {"u"}),
        ("for i, batch in enumerate(data):\n    last = batch\n    last + i", {"data", "enumerate"}),
        ("for i in r: pass\nelse: j\ni", {"r", "j", "i"}),
        ("for rows[i] in data: rows", {"rows", "i", "data"}),
        ("if a:\n    m = 1\nm", {"a", "m"}),
        ("if a:\n    m = 1\nelse:\n    m = 2\nm", {"a"}),
        ("if a:\n    m = 1\n    m", {"a"}),
        ("while go:\n    v = 1\n    v\nv", {"go", "v"}),
        ("with open(p) as f, g(f) as h: text = f.read()\nh, text", {"open", "p", "g"}),
        ("try:\n    import q\nexcept E:\n    q = None\nq", {"E", "q"}),
        ("match v:\n    case {'k': w}: w\nw", {"v", "w"}),
        ("from m import *\nf(1)", {"f"}),
        ("a, (_, *b) = pair\na, _, b", {"pair"}),
    ],
)
def test_names_that_are_needed(text: str, needed: set[str]) -> None:
    assert names_needed(ast.parse(text).body) == needed


def test_only_what_is_needed_travels() -> None:
    lr, unused, model = [0.1], object(), object()
    namespace: dict[str, object] = {"lr": lr, "unused": unused, "model": model, "rank": "mine", "__name__": "__main__"}
    _, _, notebook = compile_cell("%%distributed", "model = lr\nmodel, rank, max", namespace, name=NAME)
    assert payload.referenced_globals(notebook) == {"lr": lr}
    assert notebook.__globals__ is namespace  # shared with the notebook's functions when it travels


def test_a_cell_goes_there_and_back_and_its_functions_share_its_names() -> None:
    namespace: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec("def step():\n    return scale + offset\noffset = 1", namespace)
    cell = compile_cell("%%distributed", "scale = rank * 10\nstep()", namespace, name=NAME)
    there = Cell(*cast("tuple[CodeType, CodeType | None, FunctionType]", payload.loads(payload.dumps(tuple(cell)))))
    assert distributed_cell(*there, rank=3, world_size=4) == 31
    assert "scale" not in namespace


def test_the_value_is_that_of_a_last_expression() -> None:
    assert run("x = 2\nx + rank") == 3
    assert run("x = 2") is None
    assert run("x = 2\nif x: x") is None
    assert run("") is None
    assert run("# nothing") is None
    assert run("world_size") == 2


def test_names_of_the_cell_are_found_in_the_main_module(main_module: types.ModuleType) -> None:
    run("class Point: ...", {"__name__": "__main__"})
    assert main_module.Point.__name__ == "Point"
    with pytest.raises(AttributeError, match=golden("client.cells.module-main-attribute")):
        _ = main_module.Line


def test_lines_are_counted_with_the_magics_own() -> None:
    cell = compile_cell("%%distributed --gpus 2", "a = 1\nraise KeyError(a)", {}, name=NAME)
    with pytest.raises(KeyError) as raised:
        distributed_cell(*cell, rank=0, world_size=1)
    assert raised.traceback[-1].lineno == 2  # counted from 0
    assert linecache.getline(NAME, 1) == "%%distributed --gpus 2\n"
    assert linecache.getline(NAME, 3) == "raise KeyError(a)\n"


def test_the_notebooks_future_statements_hold() -> None:
    flags = __future__.annotations.compiler_flag
    assert run("def f(x: nowhere): ...\nf.__annotations__", flags=flags) == {"x": "nowhere"}
    assert run("from __future__ import annotations\ndef f(x: nowhere): ...\nf.__annotations__") == {"x": "nowhere"}


@pytest.mark.parametrize(
    ("text", "silent"),
    [("1;", True), ("1;  # why", True), ("1;\n\n# end", True), ("1", False), ("a = 1; b", False), ("", False)],
)
def test_a_semicolon_at_the_end_asks_for_silence(text: str, silent: bool) -> None:
    assert ends_silently(text) is silent


SHELL_HINT = "hint: move %magics, !commands and ? to a cell without %%distributed"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n%time f()", f"line 3 of the cell is notebook syntax, which ranks cannot run: %time f()\n{SHELL_HINT}"),
        ("!ls -l", f"line 2 of the cell is notebook syntax, which ranks cannot run: !ls -l\n{SHELL_HINT}"),
        ("a = !ls", f"line 2 of the cell is notebook syntax, which ranks cannot run: a = !ls\n{SHELL_HINT}"),
        ("os.path?", f"line 2 of the cell is notebook syntax, which ranks cannot run: os.path?\n{SHELL_HINT}"),
        (
            "async with x: pass",
            "line 2 of the cell: ranks cannot await at the top level: async with x: pass\n"
            "hint: write an async function in the cell and run it with asyncio.run(...)",
        ),
        (
            "x = await y",
            "line 2 of the cell: ranks cannot await at the top level: x = await y\n"
            "hint: write an async function in the cell and run it with asyncio.run(...)",
        ),
        (
            "if x:\n    return 1",
            "line 3 of the cell: a cell cannot return or yield: return 1\n"
            "hint: end the cell with an expression, whose value becomes each rank's result",
        ),
        (
            "yield 1",
            "line 2 of the cell: a cell cannot return or yield: yield 1\n"
            "hint: end the cell with an expression, whose value becomes each rank's result",
        ),
        ("x = = 1", "line 2 of the cell is not valid Python: invalid syntax: x = = 1"),
        ("x = (", "line 2 of the cell is not valid Python: '(' was never closed: x = ("),
    ],
)
def test_what_cannot_run_on_ranks_is_refused_with_its_line(text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(text)
    assert str(refused.value) == told


def test_a_null_byte_is_refused() -> None:
    with pytest.raises(UsageError, match=golden("client.cells.cell-python-null")):
        run("x = '\0'")
