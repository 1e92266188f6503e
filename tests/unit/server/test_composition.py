"""Services are given by name what their constructors ask for, which mypy does not see: this test compares the types."""

from __future__ import annotations

import inspect
import typing

import pytest

from serverless_gpu.server.composition import ServerResources, Services, kinds

SERVICES = {name: kind for name, kind in kinds(Services).items() if name not in kinds(ServerResources)}
PASSED_IN = {("principals", "budgets_changed")}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_given_parts_of_the_types_that_it_asks_for(name: str) -> None:
    given = typing.get_type_hints(Services)
    for argument, asked in inspect.signature(SERVICES[name], eval_str=True).parameters.items():
        if (name, argument) not in PASSED_IN:
            kind = asked.annotation
            assert given[argument] == kind or issubclass(given[argument], kind), argument


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_built_after_what_it_asks_for(name: str) -> None:
    order = list(SERVICES)
    asked = [argument for argument in inspect.signature(SERVICES[name]).parameters if argument in SERVICES]
    assert all(order.index(argument) < order.index(name) for argument in asked)
