"""The code of a `%%distributed` cell, taken apart so that it can travel.

    text ─▶ statements · last expression · the notebook's names they need ─▶ `distributed_cell(…)` in each rank

The names are found statement by statement. A name that the cell surely binds before it reads it (`model = …`, an
import, a loop variable) does not travel: the notebook's value may be large, or unable to. Undecided names travel. What
is not Python, and what only a notebook can do (`%magic`, `!command`, top-level `await`), is refused with its line.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import NamedTuple

from serverless_gpu.errors import UsageError

# What `distributed_cell` gives each rank.
GIVEN = frozenset({"rank", "world_size"})

# The notebook's own machinery: it cannot travel, and ranks have an `exit` and a `quit` of their own.
_SHELL = frozenset({"get_ipython", "exit", "quit"})

# Python itself reads these where a class or an annotation stands, and each rank has its own.
_OF_ANY_MODULE = {"__name__", "__annotations__"}
_SHELL_LINE = re.compile(r"\s*(?:[%!]|[\w, ]+=\s*[%!]|[\w.]*\?{1,2}\s*$)")
_NOW = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME"}
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Cell(NamedTuple):
    """Arguments of `distributed_cell`."""

    body: CodeType
    last: CodeType | None
    notebook: FunctionType


def compile_cell(first_line: str, text: str, namespace: dict[str, object], *, name: str, flags: int = 0) -> Cell:
    """Return a cell's code and names.

    `first_line` has the magic and counts as the notebook's line 1; `name` names the cell in tracebacks; `flags` are the
    notebook's compiler flags. A UsageError says why ranks cannot run it.
    """
    lines = [first_line, *text.splitlines()]
    linecache.cache[name] = (len(text), None, [f"{line}\n" for line in lines], name)
    tree = _parse(text, flags)
    ast.increment_lineno(tree)
    needed = sorted(names_needed(tree.body) & namespace.keys() - GIVEN - _SHELL)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        expression = tree.body.pop()
        assert isinstance(expression, ast.Expr)
        last = _compile(ast.Expression(expression.value), name, flags)
    return Cell(_compile(tree, name, flags), last, _referring(needed, namespace))


def ends_silently(text: str) -> bool:
    """Return whether a cell ends with a semicolon, which suppresses its value."""
    code = [line.partition("#")[0].rstrip() for line in text.splitlines()]
    return next((line for line in reversed(code) if line), "").endswith(";")


def names_needed(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that code needs from outside, some more where that cannot be decided."""
    needed: set[str] = set()
    _walk(statements, set(), needed)
    return needed


# --- refusing ---------------------------------------------------------------------------------------------------------


def _parse(text: str, flags: int) -> ast.Module:
    try:
        tree = compile(text, "<cell>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        compile(text, "<cell>", "exec", flags, dont_inherit=True)  # `return` outside a function is found only here
    except SyntaxError as error:
        raise _refusal(text, error) from None
    except ValueError as error:  # a null byte
        raise UsageError(f"the cell is not Python: {error}") from None
    assert isinstance(tree, ast.Module)
    return tree


def _refusal(text: str, error: SyntaxError) -> UsageError:
    lines = text.splitlines()
    number = min(max(error.lineno or 1, 1), max(len(lines), 1))
    line = lines[number - 1] if lines else ""
    where = f"line {number + 1} of the cell"
    if _SHELL_LINE.match(line):
        hint = "put %magics, !commands and ? into a cell of their own, without %%distributed"
        return UsageError(f"{where} is for the notebook, not for ranks: {line.strip()}", hint=hint)
    if "await" in str(error.msg) or "asynchronous" in str(error.msg) or "'async " in str(error.msg):
        hint = "write an async function in the cell and run it with asyncio.run(...)"
        return UsageError(f"{where}: ranks do not await at the top level: {line.strip()}", hint=hint)
    if "'return' outside function" in str(error.msg) or "'yield" in str(error.msg):
        hint = "end the cell with an expression: its value is each rank's result"
        return UsageError(f"{where}: a cell cannot return or yield: {line.strip()}", hint=hint)
    return UsageError(f"{where} is not Python: {error.msg}: {line.strip()}")


# --- names ------------------------------------------------------------------------------------------------------------


def _walk(statements: Iterable[ast.stmt], bound: set[str], needed: set[str]) -> None:
    """Add names that statements read to `needed` unless `bound`, and surely bound names to `bound`."""
    for statement in statements:
        match statement:
            case ast.For():
                needed |= _read(statement.iter) - bound
                inside = bound | _bound(statement.target, needed, bound)
                _branches([statement.body], inside, needed)
                _branches([statement.orelse], bound, needed)
            case ast.While():
                needed |= _read(statement.test) - bound
                _branches([statement.body, statement.orelse], bound, needed)
            case ast.If():
                needed |= _read(statement.test) - bound
                bound |= _branches([statement.body, statement.orelse], bound, needed)
            case ast.With():
                for item in statement.items:
                    needed |= _read(item.context_expr) - bound
                    if item.optional_vars is not None:
                        bound |= _bound(item.optional_vars, needed, bound)
                _walk(statement.body, bound, needed)
            case _:
                code = _code(statement)
                reads = _reads(code)
                if isinstance(statement, _DEFINITIONS):
                    # Its body may use its name once that is bound; a base or a decorator reads it before.
                    reads = reads - ({statement.name} - {name for how, name in _operations(code) if how in _NOW})
                needed |= reads - bound
                if isinstance(statement, (*_SIMPLE, *_DEFINITIONS)):
                    bound |= _stores(code)


def _branches(branches: list[list[ast.stmt]], bound: set[str], needed: set[str]) -> set[str]:
    """Walk alternative branches; return the names that all of them bind."""
    after = []
    for branch in branches:
        own = set(bound)
        _walk(branch, own, needed)
        after.append(own)
    return set.intersection(*after)


def _bound(target: ast.expr, needed: set[str], bound: set[str]) -> set[str]:
    """Return the names that a target binds; names it reads (`for rows[i] in …`) are needed."""
    code = _code(ast.Assign([target], ast.Constant(0)))
    needed |= _reads(code) - bound
    return _stores(code)


def _read(expression: ast.expr) -> set[str]:
    return _reads(_code(ast.Expr(expression)))


def _code(statement: ast.stmt) -> CodeType:
    module = ast.fix_missing_locations(ast.Module([statement], []))
    return _compile(module, "<cell>", 0)


def _reads(code: CodeType) -> set[str]:
    read = {name for operation, name in _operations(code) if operation in _NOW or operation == "LOAD_GLOBAL"}
    return read - _OF_ANY_MODULE


def _stores(code: CodeType) -> set[str]:
    return {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("STORE_NAME", "STORE_GLOBAL")}


def _operations(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield names and their operations, in this code and in nested definitions."""
    for step in dis.get_instructions(code):
        if step.opname.endswith(("_NAME", "_GLOBAL", "_GLOBALS")):
            yield step.opname, str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _operations(constant)


# --- compiling --------------------------------------------------------------------------------------------------------


def _compile(tree: ast.Module | ast.Expression, name: str, flags: int) -> CodeType:
    mode = "eval" if isinstance(tree, ast.Expression) else "exec"
    code = compile(tree, name, mode, flags, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _referring(names: Iterable[str], namespace: Mapping[str, object]) -> FunctionType:
    """Return a function that refers to these globals and is never called, so that pickling takes them."""
    code = compile(f"lambda: [{', '.join(names)}]", "<names>", "eval", dont_inherit=True)
    inner = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    assert isinstance(namespace, dict)
    return FunctionType(inner, namespace, "cell")
