"""The description of the API is what the routes do, and says everything somebody needs to call them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from scripts import openapi
from serverless_gpu.server.composition import api_routes
from serverless_gpu.server.http import openapi as openapi_module
from serverless_gpu.server.http.auth_middleware import PUBLIC_ROUTES
from serverless_gpu.wire.base import API


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return openapi_module.document(api_routes())


def test_the_page_is_what_the_routes_say() -> None:
    assert openapi.PAGE.read_text(encoding="utf-8") == openapi.text(), "run `make docs`"


def test_every_route_is_described_with_its_parameters_its_answers_and_a_sentence(document: dict[str, Any]) -> None:
    for route in api_routes():
        said = document["paths"][API + route.path.replace(":path}", "}")][route.method.lower()]
        assert said["summary"].endswith("."), route
        assert {"default"} < set(said["responses"]), route
        in_path = {one["name"] for one in said["parameters"] if one["in"] == "path"}
        assert in_path == {name.partition(":")[0] for name in re.findall(r"{(.*?)}", route.path)}, route
        assert ("requestBody" in said) == (route.body is not None), route


def test_what_needs_no_token_is_what_the_gate_lets_in(document: dict[str, Any]) -> None:
    found = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, said in methods.items()
        if not said["security"]
    }
    assert found == PUBLIC_ROUTES


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert name in document["components"]["schemas"]


def test_names_of_operations_are_unique(document: dict[str, Any]) -> None:
    names = [said["operationId"] for methods in document["paths"].values() for said in methods.values()]
    assert len(names) == len(set(names))
