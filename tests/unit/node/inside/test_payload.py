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
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import pytest

from serverless_gpu.node.inside import payload
from tests.support.golden import golden
from tests.support.node.rank_process import INSIDE


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
    with pytest.raises(payload.PayloadMismatch, match=golden("node.payload.made-python-99")):
        payload.load(str(path))


def test_F58_another_cloudpickle_is_refused_but_not_another_patch(tmp_path: Path) -> None:
    path = tmp_path / "value.pkl"
    payload.dump("value", str(path))
    change_header(path, cloudpickle="3.1.99")
    assert payload.load(str(path)) == "value"
    change_header(path, cloudpickle="3.2.0")
    with pytest.raises(payload.PayloadMismatch, match=re.escape(golden("node.payload.made-cloudpickle-rank"))):
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


def test_the_bundled_file_is_the_published_one() -> None:
    published = Path(cloudpickle.__file__).with_name("cloudpickle.py")
    assert cloudpickle.__version__ == "3.1.2"
    assert (INSIDE / "vendor" / "cloudpickle.py").read_bytes() == published.read_bytes()


def test_two_loads_of_one_class_give_one_class() -> None:
    class Shade(Enum):
        DARK = 1

    first, second = payload.loads(payload.dumps(Shade)), payload.loads(payload.dumps(Shade.DARK))
    assert first is Shade and second is Shade.DARK


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
