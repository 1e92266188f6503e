"""Payload files: what comes back is what went in, between processes that know the runtime by different names."""

from __future__ import annotations

import errno
import gc
import importlib.util
import json
import logging
import os
import pickle
import re
import sys
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import pytest

from serverless_gpu.node.inside import payload
from tests.support.golden import golden
from tests.support.node.rank_process import INSIDE, run_rank, run_script


def through_file(value: object, directory: Path) -> object:
    path = str(directory / "value.pkl")
    payload.dump(value, path)
    return payload.load(path)


def header_of(path: Path) -> dict[str, object]:
    magic, line = path.read_bytes().split(b"\n", 2)[:2]
    assert magic == b"SGPU\x01"
    fields = json.loads(line)
    assert isinstance(fields, dict)
    return fields


def change_header(path: Path, **changes: object) -> None:
    magic, line, rest = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join([magic, json.dumps({**json.loads(line), **changes}).encode(), rest]))


@pytest.mark.parametrize(
    "value",
    [None, 7, "text ✓", b"x" * 200_000, [1, [2.5, {"a": (None, True)}]], {1, 2}, bytearray(b"y" * 100_000)],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_come_back(value: object, tmp_path: Path) -> None:
    assert through_file(value, tmp_path) == value
    assert payload.loads(payload.dumps(value)) == value


def test_the_returned_size_is_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    size = payload.dump([np.arange(5000), "x" * 10_000, np.arange(70_000.0)], str(path))
    assert size == path.stat().st_size
    assert size - 200 < payload.measure([np.arange(5000), "x" * 10_000, np.arange(70_000.0)]) <= size


def test_large_arrays_are_aligned_buffers_and_small_ones_are_not(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    large, small = np.arange(10_001, dtype=np.uint8), np.arange(10)
    payload.dump([large, small, large[: 5000 * 2]], str(path))
    assert header_of(path)["buffers"] == [10_001, 10_000]
    loaded = payload.load(str(path))
    assert isinstance(loaded, list)
    for array, original in zip(loaded, [large, small, large[: 5000 * 2]], strict=True):
        np.testing.assert_array_equal(array, original)
    assert loaded[0].ctypes.data % 64 == loaded[2].ctypes.data % 64 == 0


def test_loaded_arrays_are_writable_and_private(tmp_path: Path) -> None:
    path = str(tmp_path / "value.pkl")
    payload.dump(np.zeros(100_000), path)
    first, second = payload.load(path), payload.load(path)
    assert isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
    first[:] = 1
    os.unlink(path)
    assert first.sum() == 100_000 and second.sum() == 0
    again = payload.loads(payload.dumps(np.zeros(100_000)))
    assert isinstance(again, np.ndarray) and again.flags.writeable


def test_arrays_of_every_layout_come_back(tmp_path: Path) -> None:
    base = np.arange(40_000).reshape(200, 200)
    read_only = base.copy()
    read_only.flags.writeable = False
    arrays = [base, base.T, base[::2, ::3], np.asfortranarray(base), read_only, base[:0], np.array([{"a": 1}, None])]
    loaded = through_file(arrays, tmp_path)
    assert isinstance(loaded, list)
    for array, original in zip(loaded, arrays, strict=True):
        np.testing.assert_array_equal(array, original)
    assert [array.flags.writeable for array in loaded[:5]] == [True, True, True, True, False]


def test_more_buffers_than_one_writev_takes(tmp_path: Path) -> None:
    arrays = [np.full(1100, index) for index in range(1500)]
    loaded = through_file(arrays, tmp_path)
    assert isinstance(loaded, list) and len(loaded) == 1500
    assert all((array == index).all() for index, array in enumerate(loaded))


def test_F52_over_the_limit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    value = [np.zeros(2_000_000, dtype=np.uint8), "x" * 100_000]
    with pytest.raises(payload.PayloadTooLarge) as caught:
        payload.dump(value, str(tmp_path / "value.pkl"), limit=1_000_000)
    assert 2_100_000 <= caught.value.size < 2_101_000 and caught.value.limit == 1_000_000
    assert list(tmp_path.iterdir()) == []
    assert payload.dump(value, str(tmp_path / "value.pkl"), limit=2_200_000) < 2_200_000
    with pytest.raises(payload.PayloadTooLarge):
        payload.dumps("x" * 1000, limit=1000)


def test_F52_a_value_over_the_limit_is_not_collected_in_memory(tmp_path: Path) -> None:
    value = [os.urandom(50_000) for _ in range(400)]  # 20 MB
    tracemalloc.start()
    try:
        with pytest.raises(payload.PayloadTooLarge):
            payload.dump([dict(enumerate(value)), [str(n) for n in range(10)]], str(tmp_path / "v"), limit=100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_F58_another_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    payload.dump("value", str(path))
    assert header_of(path)["python"] == list(sys.version_info[:2])
    change_header(path, python=[3, 99])
    with pytest.raises(payload.PayloadMismatch, match=golden("unit.payload.made-python-99")):
        payload.load(str(path))


def test_F58_another_cloudpickle_is_refused_but_not_another_patch(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    payload.dump("value", str(path))
    change_header(path, cloudpickle="3.1.99")
    assert payload.load(str(path)) == "value"
    change_header(path, cloudpickle="3.2.0")
    with pytest.raises(payload.PayloadMismatch, match=re.escape(golden("unit.payload.made-cloudpickle-rank"))):
        payload.load(str(path))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    payload.dump(np.arange(10_000), str(path))
    whole = path.read_bytes()
    for damaged in (b"", b"not a payload", whole[:6] + b"{}\n", whole[:6] + b"[\n", whole[:-1], whole + b"x"):
        path.write_bytes(damaged)
        with pytest.raises(payload.PayloadDamaged, match=r"value\.pkl"):
            payload.load(str(path))


def test_a_failed_write_leaves_no_file_and_no_change(tmp_path: Path) -> None:
    target = tmp_path / "value.pkl"
    target.mkdir()  # a file cannot be renamed over a directory
    with pytest.raises(payload.PayloadNotWritten) as caught:
        payload.dump("value", str(target))
    assert issubclass(payload.PayloadNotWritten, OSError) and caught.value.errno == errno.EISDIR
    assert list(tmp_path.iterdir()) == [target]
    with pytest.raises(payload.PayloadNotWritten, match="No such file"):
        payload.dump("value", str(tmp_path / "missing" / "value.pkl"))


def test_a_value_that_fails_to_pickle_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="generator"):
        payload.dump((n for n in range(3)), str(tmp_path / "value.pkl"))
    assert list(tmp_path.iterdir()) == []


def test_F55_deep_nesting_is_a_pickling_error_and_not_a_crash() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises((pickle.PicklingError, RecursionError), match="recursion"):
        payload.dumps(deep)
    while deep:  # taken apart by hand: freeing it at once is as deep
        deep = deep[0] if isinstance(deep[0], list) else []


def test_the_file_is_private(tmp_path: Path) -> None:
    payload.dump("value", str(tmp_path / "value.pkl"))
    assert (tmp_path / "value.pkl").stat().st_mode & 0o777 == 0o600


def test_nothing_loaded_is_kept_alive_by_the_loader(tmp_path: Path) -> None:
    class Local:
        pass

    gc.disable()  # what only a collector frees would stay for long in a process that makes little garbage
    try:
        reference = weakref.ref(payload.loads(payload.dumps(Local())))
        assert reference() is None
    finally:
        gc.enable()


# --- two processes ----------------------------------------------------------------------------------------------------


def test_there_is_one_bundled_cloudpickle_and_it_is_not_the_users() -> None:
    bundled = sys.modules["_sgpu_cloudpickle"]
    assert bundled.__file__ == str(INSIDE / "vendor" / "cloudpickle.py")
    data = payload.dumps(lambda: 1)
    assert b"_sgpu_cloudpickle" in data and b"cloudpickle.cloudpickle" not in data
    answer = run_rank("print(sys.modules['_sgpu_cloudpickle'].__name__, 'cloudpickle' in sys.modules)")
    assert answer.split() == ["_sgpu_cloudpickle", "False"]


def test_the_bundled_file_is_the_published_one() -> None:
    published = Path(cloudpickle.__file__).with_name("cloudpickle.py")
    assert cloudpickle.__version__ == "3.1.2"
    assert (INSIDE / "vendor" / "cloudpickle.py").read_bytes() == published.read_bytes()


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
from tests.unit.rank_process import run_rank
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
from tests.unit.rank_process import run_rank

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
from tests.unit.rank_process import run_rank

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


def test_two_loads_of_one_class_give_one_class() -> None:
    class Shade(Enum):
        DARK = 1

    first, second = payload.loads(payload.dumps(Shade)), payload.loads(payload.dumps(Shade.DARK))
    assert first is Shade and second is Shade.DARK


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
    with pytest.raises(AssertionError, match=re.escape(golden("unit.payload.module-named-value"))):
        run_rank(code, path)
    cloudpickle.register_pickle_by_value(user_module)
    try:
        assert payload.is_by_value(user_module.answer)
        payload.dump(user_module.answer, str(path))
        assert run_rank(code, path) == "42\n"
    finally:
        cloudpickle.unregister_pickle_by_value(user_module)
    assert not payload.is_by_value(user_module.answer)


def test_portable_functions_are_the_same_for_both_names() -> None:
    spec = importlib.util.spec_from_file_location("_second_payload", INSIDE / "payload.py")
    assert spec is not None and spec.loader is not None
    second = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(second)
    assert second._untyped_storage is payload._untyped_storage
    assert second.loads(payload.dumps(logging.getLogger("x"))) is logging.getLogger("x")


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> ModuleType:
    """Import torch only where a test wants it: it takes a second, and need not be installed."""
    return importlib.import_module("torch")


@pytest.mark.torch
def test_tensors_of_every_kind_come_back(torch: ModuleType, tmp_path: Path) -> None:
    base = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
    tensors = [
        base,
        base.t(),
        base[::2, 3:],
        torch.empty(0),
        torch.tensor(3.5),
        torch.arange(20_000, dtype=torch.bfloat16),
        torch.arange(20_000).to(torch.uint16),
        torch.zeros(9000, dtype=torch.float8_e4m3fn),
        torch.ones(9000, dtype=torch.bool),
        torch.complex(base, base).conj(),
    ]
    loaded = through_file(tensors, tmp_path)
    assert isinstance(loaded, list)
    for tensor, original in zip(loaded, tensors, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (original.dtype, original.shape, original.stride())
        assert torch.equal(tensor.to(torch.complex64), original.to(torch.complex64))


@pytest.mark.torch
def test_tensors_go_out_of_band_and_views_share(torch: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    base = torch.zeros(50_000)
    payload.dump({"base": base, "view": base[10:20], "untyped": base.untyped_storage(), "other": base.int()}, str(path))
    assert header_of(path)["buffers"] == [200_000, 200_000]
    loaded = payload.load(str(path))
    assert isinstance(loaded, dict)
    loaded["base"][12] = 7
    assert loaded["view"][2] == 7 and loaded["other"].sum() == 0
    assert loaded["untyped"].data_ptr() == loaded["base"].data_ptr()
    assert loaded["base"].data_ptr() % 64 == 0


@pytest.mark.torch
def test_parameters_modules_and_gradients_come_back(torch: ModuleType, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 1))
    model[1].weight = model[1].weight
    leaf = torch.zeros(3, requires_grad=True)
    loaded = through_file({"model": model, "leaf": leaf, "parameter": model[0].weight}, tmp_path)
    assert isinstance(loaded, dict)
    assert loaded["leaf"].requires_grad and isinstance(loaded["parameter"], torch.nn.Parameter)
    assert loaded["parameter"] is loaded["model"][0].weight
    data = torch.rand(4, 100)
    assert torch.equal(loaded["model"](data), model(data))
    torch.optim.SGD(loaded["model"].parameters(), lr=0.1).zero_grad()
    loaded["model"](data).sum().backward()
    assert loaded["parameter"].grad is not None


@pytest.mark.torch
def test_other_tensor_kinds_fall_back_to_torch(torch: ModuleType, tmp_path: Path) -> None:
    named_type: Callable[..., object] = type("Named", (torch.Tensor,), {})
    sparse = torch.eye(100).to_sparse()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that quantised and compressed tensors are going away
        quantised = torch.quantize_per_tensor(torch.rand(5000), 0.1, 0, torch.qint8)
        compressed = torch.eye(100).to_sparse_csr()
        named = torch.rand(5000).as_subclass(named_type)
        vars(named)["label"] = "mine"
        meta = torch.empty(5000, device="meta")
        values = [sparse, quantised, compressed, named, meta, torch.float16, torch.device("cpu")]
        loaded = through_file(values, tmp_path)
        assert isinstance(loaded, list)
        assert torch.equal(loaded[0].to_dense(), sparse.to_dense())
        assert torch.equal(loaded[1].dequantize(), quantised.dequantize())
        assert torch.equal(loaded[2].to_dense(), compressed.to_dense())
        assert type(loaded[3]) is named_type and loaded[3].label == "mine" and torch.equal(loaded[3], named)
        assert loaded[4].is_meta and loaded[4].shape == (5000,)
        assert loaded[5] is torch.float16


@pytest.mark.torch
def test_a_loaded_tensor_can_move_to_shared_memory(torch: ModuleType, tmp_path: Path) -> None:
    loaded = through_file(torch.arange(5000), tmp_path)
    assert isinstance(loaded, torch.Tensor)
    loaded.share_memory_()
    assert loaded.is_shared() and torch.equal(loaded, torch.arange(5000))


class Fresh:
    """Owns nothing: its tensor is made while it is pickled, and nobody else holds it."""

    def __reduce__(self) -> tuple[object, ...]:
        torch = importlib.import_module("torch")
        return dict, ([("tensor", torch.full((1_000_000,), 3.0))],)


@pytest.mark.torch
def test_a_tensor_made_while_pickling_lives_until_it_is_written(torch: ModuleType, tmp_path: Path) -> None:
    loaded = through_file([Fresh() for _ in range(5)], tmp_path)
    assert isinstance(loaded, list)
    assert all((entry["tensor"] == 3.0).all() for entry in loaded)


@pytest.mark.torch
@pytest.mark.slow
def test_a_tensor_travels_from_a_rank(torch: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "out.pkl"
    run_rank("import torch; payload.dump([torch.arange(5000), torch.empty(0)], sys.argv[2])", path)
    loaded = payload.load(str(path))
    assert isinstance(loaded, list)
    assert torch.equal(loaded[0], torch.arange(5000)) and loaded[1].shape == (0,)
