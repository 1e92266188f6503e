"""Arguments as texts: short, cheap, and without anything that looks like a secret."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serverless_gpu.model.arguments import (
    ARGUMENTS_MAX,
    CHARACTERS_MAX,
    COMMAND_CHARACTERS_MAX,
    argument_texts,
    command_text,
    is_secret_name,
    is_secret_value,
)


class Colour(enum.Enum):
    RED = 1


class Rude(dict[object, object]):
    """What a class of the user's may do."""

    def __repr__(self) -> str:
        raise RuntimeError("nobody asks me")

    __str__ = __repr__

    def items(self) -> object:  # type: ignore[override]  # that is the point
        raise RuntimeError("nobody asks me")


class Loud(str):
    def __str__(self) -> str:
        raise RuntimeError("nobody asks me")


@dataclasses.dataclass
class Config:
    lr: float = 1e-3
    api_key: str = "k"
    optimiser: dict[str, object] = dataclasses.field(default_factory=lambda: {"name": "adam", "betas": (0.9, 0.95)})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3e-4, "0.0003"),
        (True, "True"),
        (None, "None"),
        ("adam", "adam"),
        (Loud("adam"), "adam"),
        (12, "12"),
        (10**6000, "a number of 19932 bits"),
        (1j, "1j"),
        (b"abc", "3 bytes"),
        (Colour.RED, "Colour.RED"),
        (Path("/data"), "/data"),
        ([1, 2, 3], "[1, 2, 3]"),
        (("a", None), "[a, None]"),
        (list(range(100)), "list of 100"),
        ([object()], "list of 1"),
        (np.float32(2.5), "2.5"),
        (np.zeros((3, 4)), "numpy.ndarray (3, 4)"),
        (dict, "builtins.dict"),
        (object(), "builtins.object"),  # whatever it would say of itself,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_told_shortly(value: object, text: str) -> None:
    assert argument_texts({"x": value}) == {"x": text}


@pytest.mark.parametrize(
    "made",
    [dict, collections.OrderedDict, Rude, lambda **held: argparse.Namespace(**held), types.SimpleNamespace],
)
def test_what_has_names_for_its_parts_is_told_part_by_part(made: Callable[..., object]) -> None:
    assert argument_texts({"config": made(lr=0.1, depth=2)}) == {"config.lr": "0.1", "config.depth": "2"}


def test_dataclasses_are_told_by_field_and_dictionaries_in_them_too() -> None:
    assert argument_texts({"config": Config()}) == {
        "config.lr": "0.001",
        "config.optimiser.name": "adam",
        "config.optimiser.betas": "[0.9, 0.95]",
    }


def test_rank_and_world_size_are_not_the_callers() -> None:
    assert argument_texts({"rank": 0, "world_size": 2, "ranks": 3}) == {"ranks": "3"}


@pytest.mark.parametrize(
    "name",
    ["api_key", "hfToken", "HF_TOKEN", "auth", "dbPassword", "awsSecretAccessKey", "wandb_apikey", "token", "pw"],
)
def test_what_is_called_like_a_secret_is_left_out(name: str) -> None:
    assert is_secret_name(name)
    assert argument_texts({name: "x", "config": {name: "x"}}) == {}


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "num_key_value_heads", "author", "monkey", "keyboard", ""])
def test_what_only_resembles_one_is_not(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:word@host/x",
        "postgresql://me:word@db/x",
        "https://host/file?X-Amz-Signature=abc",
        "hf_abcdefghijklmnop",
        "sk-abcdefghijklmnopqrstuvwxyz",
        "sgpu_0123456789abcdef",
        "AKIAABCDEFGHIJKLMNOP",
        "-----BEGIN PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.x",
    ],
)
def test_what_reads_like_a_secret_is_left_out_also_in_a_list(text: str) -> None:
    assert is_secret_value(text)
    assert argument_texts({"x": text, "y": ["a", text], "z": {"w": text}}) == {}


@pytest.mark.parametrize("text", ["https://host/path", "s3://bucket/a@b", "meta-llama/Llama-3.1-8B", "skyline", "a?b"])
def test_what_is_only_text_is_not(text: str) -> None:
    assert argument_texts({"x": text}) == {"x": text}


def test_there_is_a_bound_for_everything() -> None:
    assert len(argument_texts({f"x{number}": number for number in range(1_000)})) == ARGUMENTS_MAX
    assert len(argument_texts({"x": "a" * 10_000})["x"]) == CHARACTERS_MAX
    deep: dict[str, object] = {"x": 1}
    for _ in range(10_000):
        deep = {"in": deep}
    assert argument_texts({"deep": deep}) == {}
    itself: dict[str, object] = {}
    itself["it"] = itself
    assert argument_texts({"x": itself}) == {}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("python", "t2.py", "diff"), "python t2.py diff"),
        (("bash", "-c", "echo $HOME; ls"), "bash -c 'echo $HOME; ls'"),
        (("run", "--lr=0.1", "--max-tokens", "512"), "run --lr=0.1 --max-tokens 512"),
        (("run", "--api-key", "abc", "x"), "run --api-key … x"),
        (("run", "--password=abc", "--token", "--dry"), "run --password=… --token --dry"),
        (("env", "WANDB_API_KEY=abc", "python"), "env WANDB_API_KEY=… python"),
        (("run", "https://ada:pw@host/x"), "run …"),
        ((), ""),
    ],
)
def test_a_command_is_told_as_a_shell_would_take_it_without_what_looks_like_a_secret(
    argv: tuple[str, ...], text: str
) -> None:
    assert command_text(argv) == text


def test_a_long_command_is_cut() -> None:
    assert len(command_text(["x" * 100] * 1_000)) == COMMAND_CHARACTERS_MAX
    assert command_text(["a\udc80b"]) == "'a?b'"


def test_texts_can_be_sent_whatever_bytes_they_come_from() -> None:
    assert argument_texts({"x": "a\udc80b"}) == {"x": "a?b"}
