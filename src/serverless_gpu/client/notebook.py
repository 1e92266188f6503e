"""Implements the `%%distributed` cell magic, which `%load_ext serverless_gpu` registers.

    %%distributed --gpus 2 --gpu-type CPU -o results
    import torch.distributed as dist        every rank runs the cell with the notebook variables that it uses
    dist.init_process_group("gloo")
    rank * 10                               the cell's result is the list of these values: [0, 10]

Variables of the cell exist only in the ranks. Any error stops the notebook at the cell. Tracebacks omit the frames of
IPython and of serverless-gpu.

The `%%distributed` magic splits the cell's code into parts that pickle accepts:

    text ─▶ statements · last expression · required notebook names ─▶ `distributed_cell(…)` in each rank

The cell magic determines the required names statement by statement. The cell magic does not send names that the cell
always binds before their first use (`model = …`, imports, loop variables). The notebook's value of a rebound name may
be large or impossible to pickle. If the cell magic cannot determine where the cell binds a name, the magic sends the
name's value. The cell magic refuses invalid Python and notebook syntax (`%magic`, `!command`, top-level `await`). The
error message quotes the invalid line.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import dis
import keyword
import linecache
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import NamedTuple, Protocol

from serverless_gpu.client.decorator import distributed
from serverless_gpu.client.launch.launch import prewarm, should_prewarm
from serverless_gpu.client.launch.remedies import explain
from serverless_gpu.client.runs.outcome import RemoteTraceback
from serverless_gpu.errors import InvalidOption, NoSuitableNode, NotPicklable, UsageError
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.inside.call import distributed_cell
from serverless_gpu.units import parse_duration_s

# Names of parameters that `distributed_cell` passes to each rank.
GIVEN = frozenset({"rank", "world_size"})
# Names that IPython defines and whose values pickle refuses. Ranks define `exit` and `quit` themselves.
_SHELL = frozenset({"get_ipython", "exit", "quit"})
# Names that Python reads for a class or an annotation. Each rank defines `__name__` and `__annotations__` itself.
_OF_ANY_MODULE = {"__name__", "__annotations__"}
_SHELL_LINE = re.compile(r"\s*(?:[%!]|[\w, ]+=\s*[%!]|[\w.]*\?{1,2}\s*$)")
_NOW = {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME"}
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Compiler(Protocol):
    """The attributes of IPython's compiler that the cell magic uses."""

    flags: int


class Shell(Protocol):
    """The attributes of IPython's shell that the cell magic uses."""

    user_ns: dict[str, object]
    execution_count: int
    history_manager: object
    compile: Compiler

    def register_magic_function(self, func: Callable[..., object], magic_kind: str, magic_name: str) -> None:
        """Register a function as an IPython magic."""


def load_ipython_extension(ipython: Shell) -> None:
    """Register `%%distributed`. Register the cell magic when IPython runs `%load_ext serverless_gpu`."""

    def magic(line: str, cell: str) -> object:
        return run_magic(ipython, line, cell)

    magic.__doc__ = _HELP
    ipython.register_magic_function(magic, "cell", "distributed")
    if should_prewarm("__main__"):
        prewarm(RunSpec())


def run_magic(shell: Shell, line: str, cell: str) -> list[object] | None:
    """Run a notebook cell on every rank.

    Return each rank's value, or None if the cell has no value to show.
    """
    with _shown_briefly():
        options, output = parse_line(line)
        # Newer IPython versions increment the cell number before running a cell. Older IPython versions increment the
        # cell number after the cell has run.
        history = getattr(shell.history_manager, "input_hist_raw", [])
        stored = len(history) > 1 and history[-1].rstrip().endswith(cell.rstrip())
        name = f"<%%distributed In[{len(history) - 1 if stored else shell.execution_count}]>"
        code = compile_cell(f"%%distributed {line}", cell, shell.user_ns, name=name, flags=shell.compile.flags)
        decorate = distributed(**options)  # type: ignore[arg-type]  # distributed() checks the options
        try:
            results = decorate(distributed_cell).distributed(*code)  # type: ignore[call-arg]  # the rank fills in rank and world_size
        except NotPicklable as error:
            raise NotPicklable(_cell_frames(error.message), hint=error.hint) from None
        except NoSuitableNode as error:
            explain(error, "command line")
            raise
    if output:
        shell.user_ns[output] = results
    silent = ends_silently(cell) or all(value is None for value in results)
    return None if silent else results


# --- magic options ----------------------------------------------------------------------------------------------------


def _seconds(text: str) -> object:
    """Return a number of seconds, or unchanged text with a unit for `distributed` to parse."""
    try:
        return float(text)
    except ValueError:
        parse_duration_s(text)
        return text


# Options of `distributed`, with a parser for each value. None denotes an option without a value.
VALUES: dict[str, tuple[Callable[[str], object], str] | None] = {
    "gpus": (int, "a whole number"),
    "gpu_type": (str, "a name"),
    "timeout": (_seconds, "a duration such as 90, 5m or 2h"),
    "grace": (_seconds, "a duration such as 90, 5m or 2h"),
    "hang_timeout": (_seconds, "a duration such as 90, 5m or 2h"),
    "idle_timeout": (_seconds, "a duration such as 90, 5m or 2h"),
    "cpus": (int, "a whole number"),
    "memory": (str, "bytes, such as 64GiB"),
    "ranks_log": (
        lambda text: text if text == "all" else [int(rank) for rank in text.split(",")],
        "all, or ranks such as 0,3",
    ),
    "tags": (
        lambda text: dict(pair.split("=", 1) for pair in text.split(",")),
        "pairs such as team=search,job=nightly",
    ),
    "on_interrupt": (str, "cancel or detach"),
    "init": (str, "nccl or gloo"),
    "policy": (str, "a name"),
    "pool": (str, "a name"),
    "team": (str, "a name"),
    "priority": (str, "a name"),
    "retries": (int, "a whole number"),
    "env": (str, "a name"),
    "secrets": (lambda text: text.split(","), "names such as A,B"),
    "quiet": None,
    "ignore_busy": None,
    "same_node": None,
    "resume": None,
    "retry_on_infra": None,
    "remote": None,
    "wait": None,
}


def parse_line(line: str) -> tuple[dict[str, object], str]:
    """Return the options in a magic's line, and the variable name after ``-o`` or ""."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidOption(f"the line of %%distributed is invalid: {error}") from None
    options: dict[str, object] = {}
    output = ""
    while words:
        word, joined, value = words.pop(0).partition("=")
        if word in ("-o", "--output"):
            output = _value(word, value if joined else words)
            if not output.isidentifier() or keyword.iskeyword(output):
                raise InvalidOption(f"{word} needs the name of a variable, not {output!r}")
            continue
        name = _option(word)
        kind = VALUES[name]
        if kind is None:
            if joined:
                raise InvalidOption(f"{word} takes no value")
            options[name] = True
            continue
        text = _value(word, value if joined else words)
        try:
            options[name] = kind[0](text)
        except ValueError:
            raise InvalidOption(f"{word} needs {kind[1]}, not {text!r}") from None
    return options, output


def _option(word: str) -> str:
    spelled = {f"--{name.replace('_', '-')}": name for name in VALUES}
    written = word.replace("_", "-")
    if written in spelled:
        return spelled[written]
    near = difflib.get_close_matches(written, spelled, n=1, cutoff=0.8)
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise InvalidOption(
        f"%%distributed has no option {word!r}{guess}", hint="valid options: " + ", ".join(["-o NAME", *spelled])
    )


def _value(word: str, rest: str | list[str]) -> str:
    if isinstance(rest, str):
        return rest
    if not rest or rest[0].startswith("--"):
        raise InvalidOption(f"{word} needs a value")
    return rest.pop(0)


_HELP = f"""Run the cell on every rank. The result is a list with each rank's value of the last expression.

    %%distributed --gpus 8 --gpu-type H100 --ranks-log all -o results

The cell can use the notebook's variables and functions, and `rank` and `world_size`.
Variables of the cell exist only in the ranks.

    -o NAME              also put the list of results into a variable
    {
    chr(10)
    .join(f"    --{name.replace('_', '-'):<18} {kind[1] if kind else 'a switch'}" for name, kind in VALUES.items())
    .strip()
}

Each option has the same meaning as for `distributed`.
"""


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown_briefly() -> Iterator[None]:
    """Make IPython show an error without the frames of IPython and serverless-gpu."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        text = _error_text(error)
        with contextlib.suppress(Exception):  # A user's exception class may refuse new attributes.
            object.__setattr__(error, "_render_traceback_", lambda: text.splitlines())
        raise


def _cell_frames(message: str) -> str:
    """Replace `distributed_cell` in an error message with a reference to the notebook cell."""
    for ours, theirs in (
        ("the call to distributed_cell", "the cell"),
        ("argument `notebook` -> ", ""),
        (" of `cell`", ""),
    ):
        message = message.replace(ours, theirs)
    return message


def _error_text(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        notes = [note for note in getattr(error, "__notes__", []) if str(note) not in cause.text]
        return "\n".join([cause.text.rstrip("\n"), *map(str, notes)])
    said = "".join(traceback.format_exception_only(error)).rstrip("\n")
    return said.removeprefix(f"{type(error).__module__}.")


class Cell(NamedTuple):
    """The arguments of `distributed_cell`."""

    body: CodeType
    last: CodeType | None
    notebook: FunctionType


def compile_cell(first_line: str, text: str, namespace: dict[str, object], *, name: str, flags: int = 0) -> Cell:
    """Return a cell's compiled code, and the names that the code needs from the notebook.

    `first_line` is the cell's first line, which contains the magic. `name` is the cell's file name in tracebacks.
    `flags` are the notebook's compiler flags. Raises UsageError if ranks cannot run the cell.
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
    return Cell(_compile(tree, name, flags), last, _reference_function(needed, namespace))


def ends_silently(text: str) -> bool:
    """Return True if a cell ends with a semicolon, which suppresses the cell's value."""
    code = [line.partition("#")[0].rstrip() for line in text.splitlines()]
    return next((line for line in reversed(code) if line), "").endswith(";")


def names_needed(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that code reads as globals, including names that may be local."""
    needed: set[str] = set()
    _walk(statements, set(), needed)
    return needed


# --- refused cells ----------------------------------------------------------------------------------------------------


def _parse(text: str, flags: int) -> ast.Module:
    try:
        tree = compile(text, "<cell>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        # Only full compilation reports a `return` outside a function.
        compile(text, "<cell>", "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        raise _refusal(text, error) from None
    except ValueError as error:  # The cell's text contains a null byte.
        raise UsageError(f"the cell is not valid Python: {error}") from None
    assert isinstance(tree, ast.Module)
    return tree


def _refusal(text: str, error: SyntaxError) -> UsageError:
    lines = text.splitlines()
    number = min(max(error.lineno or 1, 1), max(len(lines), 1))
    line = lines[number - 1] if lines else ""
    where = f"line {number + 1} of the cell"
    if _SHELL_LINE.match(line):
        hint = "move %magics, !commands and ? to a cell without %%distributed"
        return UsageError(f"{where} is notebook syntax, which ranks cannot run: {line.strip()}", hint=hint)
    if "await" in str(error.msg) or "asynchronous" in str(error.msg) or "'async " in str(error.msg):
        hint = "write an async function in the cell and run it with asyncio.run(...)"
        return UsageError(f"{where}: ranks cannot await at the top level: {line.strip()}", hint=hint)
    if "'return' outside function" in str(error.msg) or "'yield" in str(error.msg):
        hint = "end the cell with an expression, whose value becomes each rank's result"
        return UsageError(f"{where}: a cell cannot return or yield: {line.strip()}", hint=hint)
    return UsageError(f"{where} is not valid Python: {error.msg}: {line.strip()}")


# --- names ------------------------------------------------------------------------------------------------------------


def _walk(statements: Iterable[ast.stmt], bound: set[str], needed: set[str]) -> None:
    """Extend `needed` with unbound names that statements read, and `bound` with names that they bind."""
    for statement in statements:
        match statement:
            case ast.For():
                needed |= _read(statement.iter) - bound
                inside = bound | _bound_names(statement.target, needed, bound)
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
                        bound |= _bound_names(item.optional_vars, needed, bound)
                _walk(statement.body, bound, needed)
            case _:
                code = _code(statement)
                reads = _reads(code)
                if isinstance(statement, _DEFINITIONS):
                    # A definition's body may use the defined name. A base class or a decorator reads the name before
                    # Python binds it.
                    reads = reads - ({statement.name} - {name for how, name in _operations(code) if how in _NOW})
                needed |= reads - bound
                if isinstance(statement, (*_SIMPLE, *_DEFINITIONS)):
                    bound |= _stores(code)


def _branches(branches: list[list[ast.stmt]], bound: set[str], needed: set[str]) -> set[str]:
    """Analyse alternative branches. Return the names that all branches of a statement bind."""
    after = []
    for branch in branches:
        own = set(bound)
        _walk(branch, own, needed)
        after.append(own)
    return set.intersection(*after)


def _bound_names(target: ast.expr, needed: set[str], bound: set[str]) -> set[str]:
    """Return the names that an assignment target binds.

    Add the names that the target reads to the needed names.
    """
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
    """Yield each name in a code object and its nested code objects, with the name's bytecode operation."""
    for step in dis.get_instructions(code):
        if step.opname.endswith(("_NAME", "_GLOBAL", "_GLOBALS")):
            yield step.opname, str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _operations(constant)


# --- compilation ------------------------------------------------------------------------------------------------------


def _compile(tree: ast.Module | ast.Expression, name: str, flags: int) -> CodeType:
    mode = "eval" if isinstance(tree, ast.Expression) else "exec"
    code = compile(tree, name, mode, flags, dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _reference_function(names: Iterable[str], namespace: Mapping[str, object]) -> FunctionType:
    """Return a function that refers to the given globals, so that pickle includes the globals.

    No code calls the returned function.
    """
    code = compile(f"lambda: [{', '.join(names)}]", "<names>", "eval", dont_inherit=True)
    inner = next(constant for constant in code.co_consts if isinstance(constant, CodeType))
    assert isinstance(namespace, dict)
    return FunctionType(inner, namespace, "cell")
