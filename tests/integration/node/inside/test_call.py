"""The call file: what travels by name, what by value, and what a rank gets of it."""

from __future__ import annotations

import functools
import importlib
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from serverless_gpu.node.inside import call
from tests.support.golden import golden
from tests.support.node.rank_process import run_rank, run_script

MODULE = """
import functools, os, threading

lock = threading.Lock()  # would not travel by value

class Wrapper:
    def __init__(self, function):
        functools.update_wrapper(self, function)
    def __call__(self, *args, **kwargs):
        raise AssertionError("the wrapper was called")

def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return ["logged", *function(*args)]
    return inner

# What `distributed` is in the caller, and what it may be in a rank: nothing.
distributed = Wrapper if os.environ.get("ROLE") != "rank" else (lambda function: function)

def plain(*args):
    with lock:
        return ["plain", *args]

@distributed
def wrapped(*args):
    with lock:
        return ["wrapped", *args]

@distributed
@logged
def twice(*args):
    return ["twice", *args]

class Trainer:
    @staticmethod
    def static(*args):
        return ["static", *args]

def make():
    def local(*args):
        return ["local", *args]
    return local

replaced = plain

def shadowed(*args):
    return ["first"]

first = shadowed

def shadowed(*args):
    return ["second"]
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "call_project.py").write_text(MODULE)
    sys.path.insert(0, str(tmp_path / "project"))
    try:
        yield importlib.import_module("call_project")
    finally:
        sys.path.remove(str(tmp_path / "project"))
        sys.modules.pop("call_project", None)


def dump(path: Path, function: Callable[..., object], *args: object, **kwargs: object) -> Path:
    call.dump_call(str(path), function=function, args=args, kwargs=kwargs, sources={})
    return path


RUN = "c = call.load_call(sys.argv[2]); print(*c.function(*c.args, **c.kwargs))"


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("plain", "plain 1 2"),
        ("wrapped.__wrapped__", "wrapped 1 2"),
        ("twice.__wrapped__", "logged twice 1 2"),
        ("twice.__wrapped__.__wrapped__", "twice 1 2"),
        ("Trainer.static", "static 1 2"),
        ("replaced", "plain 1 2"),
    ],
)
@pytest.mark.parametrize("role", ["caller", "rank"])
def test_a_function_of_a_module_travels_by_name(
    module: ModuleType, name: str, printed: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function: object = module
    for part in name.split("."):
        function = getattr(function, part)
    assert callable(function)
    path = dump(tmp_path / "call.pkl", function, 1, 2)
    assert b"co_code" not in path.read_bytes() and path.stat().st_size < 500
    # The decorator wraps in the caller; whether it also does in the rank must not matter.
    monkeypatch.setenv("ROLE", role)
    assert run_rank(RUN, path, path=tmp_path / "project").strip() == printed


@pytest.mark.parametrize("name", ["make", "first"])
def test_a_name_that_does_not_lead_back_means_by_value(module: ModuleType, name: str, tmp_path: Path) -> None:
    function = module.make() if name == "make" else module.first
    path = dump(tmp_path / "call.pkl", function, 1)
    assert run_rank(RUN, path).strip() == {"make": "local 1", "first": "first"}[name]


def test_a_module_that_the_rank_cannot_import_is_named(module: ModuleType, tmp_path: Path) -> None:
    path = dump(tmp_path / "call.pkl", module.plain)
    with pytest.raises(AssertionError, match=re.escape(golden("node.call.module-named-call"))):
        run_rank(RUN, path)


def test_a_function_that_is_gone_in_the_rank_is_named(module: ModuleType, tmp_path: Path) -> None:
    path = dump(tmp_path / "call.pkl", module.wrapped.__wrapped__)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "call_project.py").write_text("plain = 1")
    with pytest.raises(AssertionError, match=golden("node.call.call-project-other")):
        run_rank(RUN, path, path=tmp_path / "other")
    (tmp_path / "other" / "call_project.py").write_text("def wrapped(): pass")
    path = dump(tmp_path / "call.pkl", module.twice.__wrapped__)
    with pytest.raises(AssertionError, match=re.escape(golden("node.call.function-twice"))):
        run_rank(RUN, path, path=tmp_path / "other")


def test_partials_methods_and_instances_travel(module: ModuleType, tmp_path: Path) -> None:
    class Adder:
        def __init__(self, base: int) -> None:
            self.base = base

        def add(self, other: int) -> list[int]:
            return [self.base + other]

        __call__ = add

    for function in (functools.partial(Adder(3).add, 4), functools.partial(Adder(3), 4)):
        assert run_rank(RUN, dump(tmp_path / "call.pkl", function)).strip() == "7"
    partial = functools.partial(module.plain, 1)
    assert run_rank(RUN, dump(tmp_path / "call.pkl", partial), path=tmp_path / "project").strip() == "plain 1"


MAIN = """
import sys
from serverless_gpu.node.inside import call

class Point:
    def __init__(self, x): self.x = x

SCALE = 10

def helper(point): return point.x * SCALE

def train(point, *, extra): return [helper(point), extra.x, type(point) is type(extra) is Point]

size = call.dump_call(sys.argv[1], function=train, args=[Point(1)], kwargs={"extra": Point(2)}, sources={})
print(size)
"""


def test_main_travels_by_value_with_one_class_for_function_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "call.pkl"
    assert run_script(MAIN, path).strip() == str(path.stat().st_size)
    assert run_rank(RUN, path).strip() == "10 2 True"


CELL = ["def broken(value):\n", "    # a comment of the cell\n", "    return 1 / value\n"]

SHOW = """
import inspect, traceback
c = call.load_call(sys.argv[2])
try:
    c.function(*c.args)
except ZeroDivisionError:
    print(traceback.format_exc())
print(inspect.getsource(c.function))
"""


@pytest.mark.parametrize("name", ["<ipython-input-3-abc>", "/tmp/ipykernel_1/567.py", "<stdin>"])
def test_source_lines_of_a_cell_reach_the_rank(name: str, tmp_path: Path) -> None:
    namespace: dict[str, Callable[..., object]] = {"__name__": "__main__"}  # type: ignore[dict-item]  # a module's name
    exec(compile("".join(CELL), name, "exec"), namespace)
    path = tmp_path / "call.pkl"
    call.dump_call(str(path), function=namespace["broken"], args=[0], kwargs={}, sources={name: CELL})
    shown = run_rank(SHOW, path)
    assert golden("node.call.file-line-broken", name=name) in shown
    assert shown.endswith("".join(CELL) + "\n")


def test_load_call_fills_the_line_cache(tmp_path: Path) -> None:
    path = tmp_path / "call.pkl"
    name = "<a cell of this test>"
    call.dump_call(str(path), function=len, args=["abc"], kwargs={}, sources={name: CELL})
    try:
        assert call.load_call(str(path)) == call.RankCall(len, ("abc",), {})
        assert linecache.cache[name] == (sum(map(len, CELL)), None, CELL, name)
    finally:
        linecache.cache.pop(name, None)


# --- rank and world_size ----------------------------------------------------------------------------------------------


def both(rank: int, world_size: int, *, lr: float = 0.1) -> object:
    return rank, world_size, lr


def keyword_only(x: int, *, rank: int = -1) -> object:
    return x, rank


def positional_only(rank: int, /) -> object:
    return rank


def neither(x: int) -> object:
    return x


def anything(*args: object, **kwargs: object) -> object:
    return args, kwargs


@functools.wraps(both)
def wrapper_of_both(*args: object, **kwargs: object) -> object:
    return args, kwargs


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "filled"),
    [
        (both, (), {}, {"rank": 3, "world_size": 8}),
        (both, (), {"lr": 1.0}, {"lr": 1.0, "rank": 3, "world_size": 8}),
        (both, (), {"rank": 0}, {"rank": 0, "world_size": 8}),
        (both, (5,), {}, {"world_size": 8}),
        (both, (5, 6), {}, {}),
        (both, (), {"unknown": 1}, {"unknown": 1, "rank": 3, "world_size": 8}),
        (keyword_only, (1,), {}, {"rank": 3}),
        (positional_only, (), {}, {}),
        (neither, (1,), {}, {}),
        (anything, (), {}, {}),
        (wrapper_of_both, (), {}, {"rank": 3, "world_size": 8}),
        (functools.partial(both, 5), (), {}, {"world_size": 8}),
        (functools.partial(both, rank=5), (), {}, {"world_size": 8}),
        (dict, (), {}, {}),
    ],
)
def test_rank_and_world_size_are_filled_in_where_they_were_not_given(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], filled: dict[str, object]
) -> None:
    before = dict(kwargs)
    assert call.fill_rank(function, args, kwargs, 3, 8) == filled
    assert kwargs == before


CLASSES = """
{future}
import dataclasses, sys, threading, typing
from typing import ClassVar, Dict
from serverless_gpu.node.inside import call

WIDTH = 3
UNUSED = lock = threading.Lock()  # cannot travel
given = "of the module"

def build(flag):
    class Plain:
        width = WIDTH
        lock = width
        again = lock
        if flag:
            given = "of the class"
        chosen = given
        class Inner:
            deep = [WIDTH for _ in range(1)]
        def method(self, x: Dict[str, int]) -> Dict[str, int]:
            return x
    @dataclasses.dataclass
    class Data:
        many: Dict[str, int] = dataclasses.field(default_factory=dict)
        kind: ClassVar[int] = WIDTH
    hints = typing.get_type_hints(Data, globals())
    return Plain.width, Plain.again, Plain.chosen, Plain.Inner.deep, Plain().method({{}}), Data(), hints["many"]

call.dump_call(sys.argv[1], function=build, args=(False,), kwargs={{}}, sources={{}})
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations"])
def test_23A3_names_in_the_body_of_a_class_inside_the_function_travel(future: str, tmp_path: Path) -> None:
    path = tmp_path / "call.pkl"
    run_script(CLASSES.format(future=future), path)
    said = run_rank(
        """
import types
found = call.load_call(sys.argv[2])
sys.modules["__main__"] = types.SimpleNamespace(**found.function.__globals__)
print(found.function(*found.args))
""",
        path,
    )
    data = "build.<locals>.Data(many={})"
    assert said == golden("node.call.module-typing-dict", data=data)
