"""What a caller is told before anything starts."""

from __future__ import annotations

import asyncio
import errno
import functools
import importlib
import linecache
import os
import pickle
import resource
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from serverless_gpu.client.launch import preflight
from serverless_gpu.client.runs.outcome import without_own_frames
from serverless_gpu.errors import ArgumentMismatch, NotDistributable, NotPicklable, StorageError
from serverless_gpu.node.inside import call, payload
from tests.support.golden import golden

# --- the function -----------------------------------------------------------------------------------------------------


def plain(x: int = 0) -> int:
    return x


async def coroutine() -> None:
    await asyncio.sleep(0)


async def async_generator() -> AsyncIterator[int]:
    yield 1


def generator() -> Iterator[int]:
    yield 1


class Callables:
    def method(self) -> None: ...

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    async def async_method(self) -> None: ...

    def __call__(self) -> None: ...


class AsyncCallable:
    async def __call__(self) -> None: ...


class InheritedAsyncCallable(AsyncCallable):
    pass


@pytest.mark.parametrize(
    "function",
    [
        plain,
        lambda: None,
        functools.partial(plain, 1),
        Callables,
        Callables(),
        Callables().method,
        Callables.static,
        Callables.__dict__["static"],
        Callables.of_class,
        len,
        np.sum,
    ],
)
def test_callables_of_every_kind_are_taken(function: object) -> None:
    preflight.check_function(function)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (7, "'int' objects cannot run on ranks: they are not callable"),
        (Callables.__dict__["of_class"], "below @classmethod"),
        (coroutine, "coroutine is an async function"),
        (functools.partial(functools.partial(coroutine)), "coroutine is an async function"),
        (Callables().async_method, "Callables.async_method is an async function"),
        (AsyncCallable(), "AsyncCallable is an async function"),
        (InheritedAsyncCallable(), "async function"),
        (generator, "generator is a generator function"),
        (async_generator, "async_generator is a generator function"),
    ],
)
def test_what_ranks_cannot_run_is_refused(function: object, words: str) -> None:
    with pytest.raises(NotDistributable) as caught:
        preflight.check_function(function)
    assert words in str(caught.value)
    assert function == 7 or "\nhint: " in str(caught.value)


# --- the arguments ----------------------------------------------------------------------------------------------------


def neither(x: object) -> None: ...


def train(rank: int, world_size: int, lr: float, *, epochs: int, device: str = "cuda") -> None: ...


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {"lr": 0.1, "epochs": 1}), ((0, 2, 0.1), {"epochs": 1}), ((), {"rank": 1, "lr": 1.0, "epochs": 1})],
)
def test_arguments_that_fit_are_taken(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    preflight.bind_arguments(train, args, kwargs)
    preflight.bind_arguments(dict, (), {"anything": 1})


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, ["missing lr, epochs"]),
        ((), {"lr": 1.0, "epoch": 3}, ["missing epochs; unexpected epoch", "hint: did you mean epochs?"]),
        ((0.1,), {"epochs": 1}, ["missing lr", "hint: rank got a positional argument"]),
        ((0, 2, 0.1, 5), {"epochs": 1}, ["1 positional argument(s) too many"]),
        ((0, 2, 0.1), {"epochs": 1, "lr": 1.0}, ["lr given twice"]),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    args: tuple[object, ...], kwargs: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ArgumentMismatch) as caught:
        preflight.bind_arguments(train, args, kwargs)
    signature = "train(rank: 'int', world_size: 'int', lr: 'float', *, epochs: 'int', device: 'str' = 'cuda')"
    assert signature in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, TypeError)


# --- what cannot travel -----------------------------------------------------------------------------------------------


class Config:
    def __init__(self, handle: object) -> None:
        self.size = 3
        self.handle = handle


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


def explained(function: Callable[..., object], *args: object, **kwargs: object) -> str:
    with pytest.raises((TypeError, pickle.PicklingError, ValueError)) as caught:
        payload.dumps((function, args, kwargs))
    return preflight.explain_unpicklable(function, args, kwargs, caught.value)


class RemoteFunction:
    """Ray's wrapper of a task, as far as it is looked at."""

    __module__ = "ray.remote_function"

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self) -> None: ...


class ActorClass:
    """Ray's wrapper of an actor: the user's class is a base of the wrapper's."""

    __module__ = "ray.actor"

    def __call__(self) -> None: ...


class WrappedActor(ActorClass):
    __ray_actor_class__ = Callables


@pytest.mark.parametrize(("wrapper", "name"), [(RemoteFunction(plain), "plain"), (WrappedActor(), "Callables")])
def test_what_ray_starts_is_no_driver(wrapper: object, name: str) -> None:
    with pytest.raises(NotDistributable, match=golden("client.preflight.task-actor-ray", name=name)) as caught:
        preflight.check_function(wrapper)
    assert "@ray.remote" in caught.value.hint


def test_F54_a_lock_in_a_closure() -> None:
    lock, other = threading.Lock(), 5

    def train() -> None:
        with lock:
            print(other)

    assert explained(train) == golden("client.preflight.closure-variable-lock")


def test_F54_a_generator_among_the_arguments() -> None:
    assert explained(plain, (n for n in range(3))) == "argument `x` -> generator"
    assert explained(plain, x=[1, {"a": [2, (n for n in range(3))]}]) == golden("client.preflight.argument-item-key")


def test_F54_an_open_file_in_an_attribute(tmp_path: Path) -> None:
    with open(tmp_path / "out.txt", "w") as text, open(tmp_path / "out.txt", "rb") as binary:
        assert explained(plain, Config(text)) == golden("client.preflight.argument-attribute-handle", tmp_path=tmp_path)
        assert explained(plain, x=Slotted(Config(binary))) == golden(
            "client.preflight.argument-attribute-inner", tmp_path=tmp_path
        )


def in_main(source: str) -> dict[str, Callable[..., object]]:
    """Names that `source` defines as a notebook would."""
    namespace: dict[str, Callable[..., object]] = {"__name__": "__main__"}  # type: ignore[dict-item]  # a module's name
    exec(source, namespace)
    return namespace


def test_F54_a_global_behind_a_helper_that_calls_back() -> None:
    names = in_main(
        "import threading\n"
        "LOCK = threading.Lock()\n"
        "def helper(n): return train(n - 1) if n else LOCK\n"
        "def train(n): return helper(n)\n"
    )
    assert explained(names["train"], 1) == golden("client.preflight.global-helper-train")


def test_F54_who_only_refers_back_to_the_culprits_owner_is_not_blamed() -> None:
    names = in_main(
        "import threading\nLOCK = threading.Lock()\ndef innocent(): return train\ndef train(): return innocent, LOCK\n"
    )
    assert explained(names["train"]) == golden("client.preflight.global-lock-train")


def test_F54_defaults_partials_methods_and_classes() -> None:
    lock = threading.Lock()

    def with_default(x: object = lock, *, y: object = 1) -> None: ...

    def with_keyword_default(*, y: object = lock) -> None: ...

    assert explained(with_default) == golden("client.preflight.default-default-thread")
    assert explained(with_keyword_default) == golden("client.preflight.default-keyword-default")
    assert explained(functools.partial(neither, x=lock)) == golden("client.preflight.partial-partial-argument")
    assert explained(Config(lock).__getattribute__, "size").endswith("attribute `handle` -> _thread.lock")
    held = in_main("import threading\nclass Held:\n    lock = threading.Lock()\n    def run(self): pass\n")["Held"]
    assert golden("client.preflight.attribute-lock-class") in explained(plain, held)


def test_F54_the_search_in_a_long_list_is_short() -> None:
    values: list[object] = list(range(200_000))
    values[123_456] = threading.Lock()
    assert explained(plain, values) == golden("client.preflight.argument-item-123456")


def test_F54_a_loop_of_objects_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    loop.append({"lock": threading.Lock(), "up": loop})
    assert explained(plain, loop) == golden("client.preflight.argument-item-key-lock")


class RefusesToBePickled:
    def __reduce__(self) -> tuple[object, ...]:
        raise ValueError("not me")

    def __repr__(self) -> str:
        raise ValueError("nor my repr")


def test_F54_user_code_that_raises_while_it_is_walked() -> None:
    assert explained(plain, RefusesToBePickled()).endswith("RefusesToBePickled")
    key = {RefusesToBePickled(): 1}
    assert explained(plain, key).endswith("a key -> " + f"{__name__}.RefusesToBePickled")


def test_F54_pack_refuses_before_anything_is_written(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklable) as caught:
        preflight.pack(str(tmp_path / "call.pkl"), plain, [lock], {})
    assert "argument `x` -> _thread.lock" in str(caught.value)
    assert golden("client.preflight.typeerror-cannot-pickle") in str(caught.value)
    assert isinstance(caught.value.__cause__, TypeError)
    assert list(tmp_path.iterdir()) == []


def test_F54_an_os_error_of_the_users_own_is_not_a_full_disk(tmp_path: Path) -> None:
    class Reads:
        def __reduce__(self) -> tuple[object, ...]:
            raise OSError(errno.ENOSPC, "inside the user's __reduce__")

    with pytest.raises(NotPicklable, match="Reads"):
        preflight.pack(str(tmp_path / "call.pkl"), plain, [Reads()], {})


# --- what is large ----------------------------------------------------------------------------------------------------


def test_F59_a_large_captured_global_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linecache, "cache", {})  # sources of code that other tests generated would travel, too
    names = in_main(
        "DATA = [float(n) for n in range(1_500_000)]\nSMALL = list(range(10))\n"
        "def helper(): return DATA\ndef train(x, table): return helper(), SMALL\n"
    )
    table = np.zeros(300_000)
    packed = preflight.pack(str(tmp_path / "call.pkl"), names["train"], [bytes(100_000)], {"table": table})
    assert packed.size_bytes == (tmp_path / "call.pkl").stat().st_size > 13_000_000
    assert packed.warning is not None
    first, hint = packed.warning.split("\n")
    assert first.startswith("every rank loads the 16.0 MB that this call to train carries; largest: global `helper` of")
    largest = first.partition("largest: ")[2].split(", ")
    assert largest[0].startswith("global `helper` of `train` -> global `DATA` of `helper`: list 13.")
    assert largest[1:] == [
        golden("client.preflight.argument-table-numpy"),
        golden("client.preflight.argument-bytes-100"),
    ]
    assert hint.startswith("hint: load large data inside the function")


def test_F59_a_small_call_has_no_warning(tmp_path: Path) -> None:
    assert preflight.pack(str(tmp_path / "call.pkl"), plain, [3], {}).warning is None


def test_F59_the_attribute_that_holds_the_bytes_is_named() -> None:
    config = Config({"weights": bytes(5_000_000), "note": "x"})
    path, size = preflight.largest_captured(plain, [config], {})[0]
    assert path == golden("client.preflight.argument-attribute-handle-key")
    assert 5_000_000 <= size < 5_010_000


@pytest.mark.parametrize(
    "value",
    [
        [float(n) for n in range(100_000)],
        {n: float(n) for n in range(50_000)},
        [[n, str(n)] for n in range(30_000)],
        [Config(n) for n in range(20_000)],
        np.array([{"a": n} for n in range(1000)]),
        "é" * 1_000_000,
        {frozenset([n]) for n in range(3000)},
        bytearray(1_000_000),
    ],
    ids=lambda value: type(value).__name__,
)
def test_F59_estimates_are_near_the_payload(value: object) -> None:
    [estimated] = [size for path, size in preflight.largest_captured(plain, [value], {}) if "`x`" in path]
    exact = payload.measure(value)
    assert exact / 4 < estimated < exact * 4


@pytest.mark.torch
def test_F59_tensors_weigh_what_their_storage_weighs() -> None:
    torch = importlib.import_module("torch")  # late: it takes a second, and need not be installed
    view = torch.zeros(1_000_000)[:10]
    assert preflight.largest_captured(plain, [view], {}) == [("argument `x`: torch.Tensor", 4_000_000)]
    sparse = torch.eye(10).to_sparse()
    assert preflight.largest_captured(plain, [sparse], {})[0][1] > 0


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_packed_call_is_the_call(tmp_path: Path) -> None:
    packed = preflight.pack(str(tmp_path / "call.pkl"), plain, (1,), {"x": 2})
    assert packed == (os.path.getsize(tmp_path / "call.pkl"), None)
    loaded = call.load_call(str(tmp_path / "call.pkl"))
    assert (loaded.function.__name__, loaded.args, loaded.kwargs) == ("plain", (1,), {"x": 2})


def test_F59_later_changes_to_an_argument_do_not_reach_the_rank(tmp_path: Path) -> None:
    argument = [1, np.zeros(10_000)]
    preflight.pack(str(tmp_path / "call.pkl"), plain, [argument], {})
    argument[1][:] = 1  # type: ignore[index]  # an array
    loaded = call.load_call(str(tmp_path / "call.pkl")).args[0]
    assert isinstance(loaded, list) and loaded[1].sum() == 0


def test_a_disk_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written") as caught:
        preflight.pack(str(tmp_path / "missing" / "call.pkl"), plain, [], {})
    assert "SERVERLESS_GPU_HOME" in caught.value.hint and caught.value.__suppress_context__, "no traceback of ours"


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))  # the kernel's own way to refuse a write in the middle
    try:
        with pytest.raises(StorageError):
            preflight.pack(str(tmp_path / "call.pkl"), plain, [bytes(20_000_000)], {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_lines_of_cells_are_collected_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk = tmp_path / "real.py"
    on_disk.write_text("pass\n")
    cells = {f"<cell {n}>": ["x" * 600_000 + "\n"] for n in range(5)}
    cells |= {"/tmp/ipykernel_0/1.py": ["def cell(): pass\n"], str(on_disk): ["pass\n"]}
    cache = {name: (1, None, lines, name) for name, lines in cells.items()}
    monkeypatch.setattr(linecache, "cache", {**cache, "<lazy>": (lambda: "",)})
    names: dict[str, Callable[..., object]] = {"__name__": "__main__"}  # type: ignore[dict-item]  # a module's name
    exec(compile("def cell(): pass\n", "/tmp/ipykernel_0/1.py", "exec"), names)
    preflight.pack(str(tmp_path / "call.pkl"), names["cell"], [], {})
    linecache.cache.clear()
    call.load_call(str(tmp_path / "call.pkl"))
    assert set(linecache.cache) == {"/tmp/ipykernel_0/1.py", "<cell 4>", "<cell 3>", "<cell 2>"}


# --- how it is shown --------------------------------------------------------------------------------------------------


class RefusesToTravel:
    def __reduce__(self) -> str:
        raise TypeError("not me")


def test_frames_of_ours_are_left_out_of_a_refusal_and_the_users_stay(tmp_path: Path) -> None:
    with pytest.raises(NotPicklable) as refused:
        preflight.pack(str(tmp_path / "call.pkl"), plain, (RefusesToTravel(),), {})
    cause = refused.value.__cause__
    assert cause is not None and len(traceback.extract_tb(cause.__traceback__)) > 1
    assert without_own_frames(refused.value) is refused.value
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["__reduce__"]


class Ends:
    """Ends the program that pickles it."""

    def __reduce__(self) -> str | tuple[object, ...]:
        raise SystemExit(3)


def test_23A7_an_argument_that_ends_whoever_pickles_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "call.pkl"
    for refuse in (lambda: preflight.pack(str(path), plain, (Ends(),), {}), check_travels):
        with pytest.raises(NotPicklable, match="SystemExit: 3") as caught:
            refuse()
        assert "argument `x`" in str(caught.value) and not path.exists()


def check_travels() -> None:
    preflight.check_travels(plain, (Ends(),), {})
