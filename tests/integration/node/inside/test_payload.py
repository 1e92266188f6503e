"""Payload files: what comes back is what went in, between processes that know the runtime by different names."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import pytest

from serverless_gpu.node.inside import payload
from tests.support.golden import golden
from tests.support.node.rank_process import INSIDE, run_rank, run_script


def test_there_is_one_bundled_cloudpickle_and_it_is_not_the_users() -> None:
    bundled = sys.modules["_sgpu_cloudpickle"]
    assert bundled.__file__ == str(INSIDE / "vendor" / "cloudpickle.py")
    data = payload.dumps(lambda: 1)
    assert b"_sgpu_cloudpickle" in data and b"cloudpickle.cloudpickle" not in data
    answer = run_rank("print(sys.modules['_sgpu_cloudpickle'].__name__, 'cloudpickle' in sys.modules)")
    assert answer.split() == ["_sgpu_cloudpickle", "False"]


def test_a_payload_made_here_loads_in_a_rank_and_back(tmp_path: Path) -> None:
    offset = 5
    source, target = tmp_path / "in.pkl", tmp_path / "out.pkl"
    payload.dump({"f": lambda x: x + offset, "a": np.arange(3000)}, str(source))
    run_rank(
        "v = payload.load(sys.argv[2]); v['a'][0] = v['f'](10); v['g'] = lambda: v['a'][0] + 1;"
        "payload.dump(v, sys.argv[3])",
        source,
        target,
    )
    loaded = payload.load(str(target))
    assert isinstance(loaded, dict)
    assert loaded["a"][0] == 15 and loaded["g"]() == 16 and loaded["f"](1) == 6


MAIN_CLASS = """
import subprocess, sys
from serverless_gpu.node.inside import payload
from tests.support.node.rank_process import run_rank
from enum import Enum

VERSION = "the caller's"

class Config:
    made = 0
    def __init__(self, size): self.size = size
    def version(self): return VERSION

class Colour(Enum):
    RED = 1

method, mark = Config.version, object()
directory = sys.argv[1]
payload.dump((Config, Colour, Config(1)), directory + "/in.pkl")
Config.mark = mark  # set after the class left: coming back must not undo it
run_rank('''
cls, colour, value = payload.load(sys.argv[2])
cls.made = 99
payload.dump([value, cls(2), colour.RED, cls], sys.argv[3])
''', directory + "/in.pkl", directory + "/out.pkl")
first, second, red, cls = payload.load(directory + "/out.pkl")
assert cls is Config and type(first) is Config and type(second) is Config
assert red is Colour.RED
assert Config.version is method and Config.mark is mark and Config.made == 0
VERSION = "changed since"
assert (second.size, second.version()) == (2, "changed since")
print("good")
"""


def test_a_returned_instance_leaves_the_callers_own_class_untouched(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{MAIN_CLASS}"
    assert run_script(script, tmp_path) == "good\n"


SLOTS = """
import sys
from dataclasses import dataclass
from typing import NamedTuple
from serverless_gpu.node.inside import payload
from tests.support.node.rank_process import run_rank

@dataclass(slots=True)
class Config:
    size: int

class Hidden:
    __slots__ = ("__value", "__dict__")
    def __init__(self, value): self.__value = value; self.other = 2
    def value(self): return self.__value

class Shape(NamedTuple):  # its class is made by another one, which allows no slots
    rows: int = 1
    def double(self): return Shape(2 * self.rows)

directory = sys.argv[1]
payload.dump((Config, Hidden(1), Shape()), directory + "/in.pkl")
run_rank('''
cls, hidden, shape = payload.load(sys.argv[2])
assert shape.double() == (2,)
assert not hasattr(cls(1), "__dict__") and hidden.value() == 1 and hidden.__dict__ == {"other": 2}
payload.dump([cls(3), hidden], sys.argv[3])
''', directory + "/in.pkl", directory + "/out.pkl")
config, hidden = payload.load(directory + "/out.pkl")
assert config == Config(3) and (hidden.value(), hidden.other) == (1, 2)
print("good")
"""


def test_23_a_class_with_slots_has_them_in_the_rank_and_its_instances_come_back(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{SLOTS}"
    assert run_script(script, tmp_path) == "good\n"


CACHES = """
import sys
from functools import cache, cached_property, lru_cache
from serverless_gpu.node.inside import payload
from tests.support.node.rank_process import run_rank

@lru_cache(maxsize=7)
def load(name):
    return [name]

@cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Model:
    @cached_property
    def size(self):
        return fibonacci(60)

    @staticmethod
    @cache
    def name(): return "model"

directory = sys.argv[1]
load("a")
payload.dump((load, fibonacci, Model()), directory + "/in.pkl")
run_rank('''
load, fibonacci, model = payload.load(sys.argv[2])
assert load("a") is load("a") and load.cache_info()[:3] == (1, 1, 7), load.cache_info()
assert model.size == fibonacci(60) == 1548008755920 and vars(model) == {"size": model.size} and model.name() == "model"
payload.dump([model, load], sys.argv[3])
''', directory + "/in.pkl", directory + "/out.pkl")
model, load = payload.load(directory + "/out.pkl")
assert type(model) is Model and model.size == 1548008755920 and load("b") == ["b"]
import tokenize
assert payload.loads(payload.dumps(tokenize._compile)) is tokenize._compile  # of a module: by reference
print("good")
"""


def test_23_functions_and_properties_with_a_cache_travel(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(Path.cwd())!r})\n{CACHES}"
    assert run_script(script, tmp_path) == "good\n"


def test_a_class_made_in_a_rank_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.pkl"
    run_rank(
        "class Made:\n    def twice(self): return self.value * 2\n"
        "made = Made(); made.value = 21; payload.dump([made, Made], sys.argv[2])",
        path,
    )
    loaded = payload.load(str(path))
    assert isinstance(loaded, list)
    assert loaded[0].twice() == 42 and type(loaded[0]) is loaded[1]


@pytest.fixture
def user_module(tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "by_value_module.py").write_text("def answer():\n    return 42\n")
    sys.path.insert(0, str(tmp_path / "code"))
    try:
        yield importlib.import_module("by_value_module")
    finally:
        sys.path.remove(str(tmp_path / "code"))
        sys.modules.pop("by_value_module", None)


def test_what_the_user_registered_by_value_travels_by_value(user_module: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "f.pkl"
    code = "print(payload.load(sys.argv[2])())"
    payload.dump(user_module.answer, str(path))
    with pytest.raises(AssertionError, match=re.escape(golden("node.payload.module-named-value"))):
        run_rank(code, path)
    cloudpickle.register_pickle_by_value(user_module)
    try:
        assert payload.is_by_value(user_module.answer)
        payload.dump(user_module.answer, str(path))
        assert run_rank(code, path) == "42\n"
    finally:
        cloudpickle.unregister_pickle_by_value(user_module)
    assert not payload.is_by_value(user_module.answer)


@pytest.fixture
def torch() -> ModuleType:
    """Import torch only where a test wants it: it takes a second, and need not be installed."""
    return importlib.import_module("torch")


@pytest.mark.torch
@pytest.mark.slow
def test_a_tensor_travels_from_a_rank(torch: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "out.pkl"
    run_rank("import torch; payload.dump([torch.arange(5000), torch.empty(0)], sys.argv[2])", path)
    loaded = payload.load(str(path))
    assert isinstance(loaded, list)
    assert torch.equal(loaded[0], torch.arange(5000)) and loaded[1].shape == (0,)
