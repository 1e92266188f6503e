"""The ways of use of `tests/e2e/local/test_usages.py`, through a server: the same code, the same outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.client import decorator
from serverless_gpu.client.launch.launch import launch
from serverless_gpu.errors import RunCancelled
from serverless_gpu.model.spec import RunSpec
from tests.support.local import usages
from tests.support.local.observe import wait_for


@pytest.fixture(autouse=True)
def through_the_server(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every call of the test go through the server, as if its decorator said so."""

    def launch_there(
        function: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        spec: RunSpec,
        **others: Any,
    ) -> object:
        spec = msgspec.structs.replace(spec, remote=True, environment="auto")
        return launch(function, args, kwargs, spec, **others)

    monkeypatch.setattr(decorator, "launch", launch_there)


@pytest.mark.long
def test_usage_1_starter(capsys: pytest.CaptureFixture[str]) -> None:
    usages.usage_1_starter(capsys)


@pytest.mark.long
def test_usage_2_ddp_with_keywords_and_module_level_helpers() -> None:
    usages.usage_2_ddp_with_keywords_and_module_level_helpers()


@pytest.mark.long
def test_usage_3_fsdp_with_a_default_from_a_constant_and_a_checkpoint(tmp_path: Path) -> None:
    usages.usage_3_fsdp_with_a_default_from_a_constant_and_a_checkpoint(tmp_path)


def test_usage_4_everything_imported_inside_and_the_result_ignored(tmp_path: Path) -> None:
    usages.usage_4_everything_imported_inside_and_the_result_ignored(tmp_path)


def test_usage_5_objects_captured_from_the_notebook() -> None:
    usages.usage_5_objects_captured_from_the_notebook()


@pytest.mark.long
def test_usage_6_a_config_object_that_the_function_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    usages.usage_6_a_config_object_that_the_function_changes(monkeypatch)


def test_without_arguments_every_gpu_is_used() -> None:
    usages.without_arguments_every_gpu_is_used()


def test_the_negative_corpus_gets_a_clear_type_error() -> None:
    usages.the_negative_corpus_gets_a_clear_type_error()


def test_what_no_node_has_waits_and_says_so() -> None:
    run = decorator.distributed(gpus=2, gpu_type="a10", wait=True)(len).submit("x")
    try:
        why = "no node has A10; the nodes have 8 H100"  # once the node has joined
        wait_for(
            lambda: run.waiting_for().startswith(f"{why}; the run waits for a suitable node until "),
            "it says what it waits for",
        )
    finally:
        run.cancel()
    with pytest.raises(RunCancelled):
        run.results()
