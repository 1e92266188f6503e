"""The reference has every public name, every method of what users hold in hand, and every variable."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import serverless_gpu
from serverless_gpu import Receipt, Run, compute, launcher, ray, runtime, testing
from tests.support.paths import REPOSITORY

REFERENCE = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "src").rglob("*.py"))

# How the reference calls an object of each class that users hold in hand.
HANDLES = {"Run": "run", "DistributedFunction": "fn", "RunList": "runs", "Session": "session"}
VALUES = {"GPUType", "Receipt"}
CLASSES = {name for name in serverless_gpu.__all__ if inspect.isclass(getattr(serverless_gpu, name))} - VALUES
MODULES = {"runtime": runtime, "compute": compute, "launcher": launcher, "ray": ray, "testing": testing}


def _public(cls: type) -> list[str]:
    named = (name for name in vars(cls) if not name.startswith("_"))
    return [name for name in named if inspect.isroutine(vars(cls)[name]) or isinstance(vars(cls)[name], property)]


def _undocumented(cls: type, handle: str, text: str) -> list[str]:
    return [name for name in _public(cls) if not re.search(rf"`{handle}\.{name}\b", text)]


@pytest.mark.parametrize("name", serverless_gpu.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert re.search(rf"`(serverless_gpu\.|@)?{name}\b", REFERENCE)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_method_is_in_the_reference(name: str) -> None:
    assert _undocumented(getattr(serverless_gpu, name), HANDLES[name], REFERENCE) == []


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_every_name_of_the_importable_modules_is_in_the_reference(name: str, module: ModuleType) -> None:
    exported: list[str] = module.__all__
    assert [one for one in exported if not re.search(rf"`(\w+\.)*{one}\b", REFERENCE)] == []


def test_every_field_of_the_receipt_is_in_the_reference() -> None:
    assert [name for name in Receipt.__struct_fields__ if f"`{name}`" not in REFERENCE] == []


def test_every_variable_that_is_read_or_set_is_in_the_reference() -> None:
    used = set(re.findall(r"[\"'](S(?:ERVERLESS_)?GPU_[A-Z_]+)[\"']", SOURCE))
    assert used
    assert {name for name in used if not re.search(rf"\b{name}\b", REFERENCE)} == set()


def test_a_method_without_a_line_is_found() -> None:
    assert _undocumented(Run, "run", "`run.results()`, `run.result(rank=0)`") == sorted(
        set(_public(Run)) - {"results", "result"}, key=_public(Run).index
    )
