"""Sections of the surface: import paths, signatures, exceptions, values, the cell magic and variables."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import serverless_gpu
from serverless_gpu import errors
from tests.e2e.stable import commands, places, shapes
from tests.support.paths import REPOSITORY

Sections = dict[str, dict[str, str]]

MODULES = (
    "serverless_gpu",
    "serverless_gpu.compute",
    "serverless_gpu.errors",
    "serverless_gpu.launcher",
    "serverless_gpu.ray",
    "serverless_gpu.replay",
    "serverless_gpu.runtime",
    "serverless_gpu.testing",
    "serverless_gpu.testing.mlflow",
    "serverless_gpu.testing.stores",
)
"""Import paths that the documentation names."""

_VARIABLE = re.compile(r"(SERVERLESS_GPU|SGPU)_[A-Z][A-Z0-9_]*[A-Z0-9]")
_MADE_FOR_USERS = ("serverless_gpu.DistributedFunction", "serverless_gpu.Run", "serverless_gpu.Session")
_SPECIAL = ("__call__", "__enter__", "__exit__", "__get__", "__iter__", "__len__", "__getitem__", "_repr_html_")


def sections() -> Sections:
    """Return what users write in Python, and the variables they set."""
    documented = "".join(page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs").rglob("*.md"))
    found: Sections = {}
    for name in MODULES:
        found.update(_module(name))
    for kind in places.VALUES:
        found.update(_class(f"returned {kind.__name__}", kind))
    found["cell magic %%distributed"] = _magic()
    found["variables"] = {name: "used" for name in sorted(set(_variables())) if name in documented}
    return found


def exceptions() -> list[type[errors.ServerlessGpuError]]:
    """Return every public exception class, the base first."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [cls for cls in classes if issubclass(cls, errors.ServerlessGpuError)]


def _module(name: str) -> Sections:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", None) or [key for key in _own(module) if not key.startswith("_")]
    found: Sections = {f"module {name}": {}}
    for key in sorted(public):
        value = getattr(module, key)
        found[f"module {name}"][key] = _sort(value)
        if inspect.isclass(value):
            found.update(_class(f"{name}.{key}", value))
        elif callable(value):
            found.update(_function(f"{name}.{key}", value))
    if name == "serverless_gpu":
        for hook in ("__version__", "load_ipython_extension"):
            found[f"module {name}"][hook] = _sort(getattr(module, hook))
    return found


def _own(module: types.ModuleType) -> Iterator[str]:
    for key, value in vars(module).items():
        if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module.__name__:
            yield key


def _sort(value: object) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    if inspect.ismodule(value):
        return "module"
    return "function" if callable(value) else "value"


def _class(name: str, cls: type) -> Sections:
    if issubclass(cls, enum.Enum):
        return {name: {member: repr(value.value) for member, value in cls.__members__.items()}}
    if hasattr(cls, "__struct_fields__"):
        lines = {at: line for at, line in shapes.of_type(cls).items() if at}
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        lines = {field: f"item {number}" for number, field in enumerate(cls._fields)}
    elif issubclass(cls, errors.ServerlessGpuError):
        lines = _exception(cls)
    else:
        lines = {"(bases)": _bases(cls), **dict.fromkeys(sorted(_attributes(cls)), "attribute")}
    found: Sections = {name: lines}
    for key in sorted({key for base in cls.__mro__ if _is_ours(base) for key in vars(base)}):
        if key.startswith("_") and key not in (*_SPECIAL, "__init__"):
            continue
        value = inspect.getattr_static(cls, key)
        if key == "__init__" and (issubclass(cls, errors.ServerlessGpuError) or name in _MADE_FOR_USERS):
            continue  # `_exception` has the arguments of the former
        if isinstance(value, property):
            lines[key] = "property"
        elif isinstance(value, staticmethod | classmethod | types.FunctionType):
            lines[key] = "method"
            found.update(_function(f"{name}.{key}", getattr(cls, key)))
    return found


def _attributes(cls: type) -> Iterator[str]:
    """Yield the public attributes that methods of a class, or of a base of it that is ours, set."""
    for base in filter(_is_ours, cls.__mro__):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store) or node.attr.startswith("_"):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith("serverless_gpu")


def _bases(cls: type) -> str:
    """Return the names of bases that users can catch or check: ours and Python's, in order."""
    return " ".join(base.__name__ for base in cls.__mro__[1:] if base not in (object, typing.Generic)) or "object"


def _exception(cls: type[errors.ServerlessGpuError]) -> dict[str, str]:
    raised = cls()
    lines = {
        "(bases)": _bases(cls),
        "(exit code)": str(commands.exit_code(raised)),
        "code": repr(cls.code),
        "status": repr(cls.status),
        "retryable": repr(cls.retryable),
    }
    annotated = {key for base in cls.__mro__ if _is_ours(base) for key in getattr(base, "__annotations__", ())}
    for key in sorted({*vars(raised), *annotated} - {"code", "status", "retryable"}):
        lines[key] = "attribute" if key == "message" else f"attribute, {getattr(raised, key)!r}"
    for key, line in _parameters(cls).items():
        lines[f"({key})"] = line
    return lines


def _function(name: str, function: Any) -> Sections:
    return {f"{name}()": _parameters(function)}


def _parameters(function: Any) -> dict[str, str]:
    lines: dict[str, str] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.name in ("self", "cls") and number == 0:
            lines["self"] = "first"
            continue
        kind = parameter.kind
        if kind is parameter.VAR_POSITIONAL:
            lines[f"*{parameter.name}"] = "any"
        elif kind is parameter.VAR_KEYWORD:
            lines.update(_options(function, parameter.name))
        else:
            place = "by name" if kind is parameter.KEYWORD_ONLY else f"place {number}"
            default = parameter.default
            value = "required" if default is parameter.empty else f"default {_shown(default)}"
            lines[parameter.name] = f"{place}, {value}"
    return lines


def _options(function: Any, name: str) -> dict[str, str]:
    """Return the names behind ``**options``, where a `TypedDict` says them."""
    annotation = inspect.get_annotations(function).get(name, "")
    if not str(annotation).startswith("Unpack"):
        return {f"**{name}": "any"}
    hint = typing.get_type_hints(function)[name]
    options = typing.get_args(hint)[0]
    return {key: "option by name" for key in sorted(options.__annotations__)}


def _shown(default: object) -> str:
    text = repr(default)
    return type(default).__name__ if " at 0x" in text else text


def _magic() -> dict[str, str]:
    """Return the options of the magic, as its help in a notebook lists them."""
    registered: dict[str, Any] = {}

    class Shell:
        def register_magic_function(self, func: Any, magic_kind: str, magic_name: str) -> None:
            registered[f"{magic_kind} {magic_name}"] = func

    hook: Any = getattr(serverless_gpu, "load_ipython_extension")  # noqa: B009  # type checkers do not know it
    hook(Shell())
    text = registered["cell distributed"].__doc__
    options = re.findall(r"^ +(-{1,2}[a-z][a-z-]*(?: NAME)?) {2,}(.+)$", text, re.M)
    assert len(options) > 10, text
    return dict(options)


def _variables() -> Iterator[str]:
    """Yield the names of variables that the package's source has as whole strings, or in its documented settings."""
    for path in sorted(Path(serverless_gpu.__path__[0]).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value):
                yield node.value
