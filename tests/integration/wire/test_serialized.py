"""Values are read from bytes in any thread: nobody sees a struct that another thread is making ready."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import msgspec
import pytest

from serverless_gpu.json_codec import decoder, from_builtins, from_json, from_msgpack
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

SOURCE = REPOSITORY / "src" / "serverless_gpu"
FIRST_USES = """
import sys, threading
import msgspec
from serverless_gpu.json_codec import from_builtins, from_json, from_msgpack

sys.setswitchinterval(1e-6)
ROUNDS = 300

def made():
    class Leaf(msgspec.Struct): a: int; b: str; c: list[int]
    class Branch(msgspec.Struct): x: Leaf; y: tuple[Leaf, ...]; z: dict[str, Leaf]
    class Tree(msgspec.Struct): m: Branch; n: tuple[Branch, ...]; o: Leaf | None
    return Leaf, Branch, Tree

leaf = {"a": 1, "b": "", "c": [1]}
branch = {"x": leaf, "y": [leaf], "z": {"k": leaf}}
values = (leaf, branch, {"m": branch, "n": [branch], "o": None})
for _ in range(ROUNDS):
    kinds, together = made(), threading.Barrier(6)
    def use(number):
        value, kind = values[number % 3], kinds[number % 3]
        together.wait()
        match number // 2:
            case 0: from_json(msgspec.json.encode(value), kind)
            case 1: from_msgpack(msgspec.msgpack.encode(value), kind)
            case _: from_builtins(value, kind)
    crowd = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in crowd: thread.start()
    for thread in crowd: thread.join()
"""


class _Pair(msgspec.Struct, frozen=True):
    one: int
    two: str


def test_first_uses_in_several_threads_at_once_do_not_end_the_process() -> None:
    """With msgspec alone this process is ended by SIGSEGV, in nearly every try."""
    ended = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_values_are_what_msgspec_would_make_of_them() -> None:
    pair = _Pair(1, "2")
    assert from_json(b'{"one": 1, "two": "2"}', _Pair) == pair
    assert from_msgpack(msgspec.msgpack.encode(pair), _Pair) == pair
    assert from_builtins({"one": "1", "two": "2"}, _Pair, strict=False) == pair
    assert from_json("[1, 2]", tuple[int, ...]) == (1, 2)
    assert decoder(_Pair) is decoder(_Pair)


def test_what_is_no_such_value_is_said_as_msgspec_says_it() -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(golden("wire.serialized.expected-int-got"))):
        from_json(b'{"one": "1", "two": "2"}', _Pair)
    with pytest.raises(msgspec.DecodeError):
        from_msgpack(b"\xc1", _Pair)


def test_nothing_is_decoded_as_a_type_but_there() -> None:
    """`msgspec.json.decode(..., type=...)` anywhere else would be a first use in some thread."""
    found = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if path.name != "json_codec.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _is_typed_decoding(node)
    ]
    assert found == []


def _is_typed_decoding(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    has_type = any(keyword.arg == "type" for keyword in call.keywords)
    return name == "msgspec.convert" or (has_type and name in ("msgspec.json.decode", "msgspec.msgpack.decode"))
