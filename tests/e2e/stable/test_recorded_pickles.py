"""Values that users pickled with an earlier version load with this one, and hold what they held."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

import serverless_gpu
from serverless_gpu import errors
from tests.e2e.stable import pickles
from tests.e2e.stable.conftest import DATES
from tests.e2e.stable.recording import HERE


def _recorded() -> list[Any]:
    found = []
    for date in DATES:
        text = (HERE / "recorded" / date / "pickles.json").read_text(encoding="utf-8")
        found += [pytest.param(name, one, id=f"{date} {name}") for name, one in json.loads(text).items()]
    return found


@pytest.mark.parametrize(("name", "one"), _recorded())
def test_24_6_a_recorded_pickle_loads(name: str, one: dict[str, Any]) -> None:
    value = pickles.loaded(one["pickle"])
    holds = json.loads(msgspec.json.encode(pickles.held(value)))
    assert _within(holds, one["holds"]), holds
    public: dict[str, type] = {
        "DistributedFunction": serverless_gpu.DistributedFunction,
        "GPUType": serverless_gpu.GPUType,
        "Receipt": serverless_gpu.Receipt,
    }
    if name.startswith("error "):
        assert type(value) is getattr(errors, name.removeprefix("error "))
    elif name in public:
        assert type(value) is public[name]


def test_24_6_every_public_value_has_a_recorded_pickle() -> None:
    newest = json.loads((HERE / "recorded" / DATES[-1] / "pickles.json").read_text(encoding="utf-8"))
    assert set(newest) <= set(pickles.recorded()), "a class whose values users have pickled is gone"


def _within(now: Any, then: Any) -> bool:
    """Return whether all that was there then is there now; objects may have more fields."""
    if isinstance(then, dict):
        return isinstance(now, dict) and all(key in now and _within(now[key], then[key]) for key in then)
    if isinstance(then, list):
        return isinstance(now, list) and len(now) == len(then) and all(map(_within, now, then))
    return bool(now == then)
