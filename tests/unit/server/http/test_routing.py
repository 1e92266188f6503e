"""How a route gets its parameters: parts of the path by name, services by their class."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.server.billing.price_service import PriceService
from serverless_gpu.server.composition import guarded
from serverless_gpu.server.core.caller import ANONYMOUS
from serverless_gpu.server.http.routing import ANY_CALLER, Call, Route, Routes
from serverless_gpu.wire.access import TeamView
from tests.support.server.listening import NoDatabase
from tests.support.server.made import made_services


class Greeter:
    """A service."""


extra = Routes("extra")


@extra.get("/greetings/{name}", needs=ANY_CALLER)
def greet(call: Call, greeter: Greeter, name: str) -> TeamView:
    return TeamView(name=name, members=())


def route() -> Route:
    (found,) = extra.all
    return found


def test_a_parameter_is_a_part_of_the_path_by_its_name_and_else_a_service_by_its_class() -> None:
    assert (route().parts, route().services) == ({"name": str}, {"greeter": Greeter})
    greeter = Greeter()
    assert route().bound({Greeter: greeter}).arguments == {"greeter": greeter}


def test_a_route_that_names_a_class_without_a_provider_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"GET /greetings/\{name\} needs Greeter"):
        route().bound({str: "hello"})


def test_the_application_is_not_made_without_a_service_that_a_route_names() -> None:
    clock = SystemClock()
    services = made_services(NoDatabase(), Path("/nonexistent"), clock=clock)
    provided = {kind: service for kind, service in services.by_type.items() if kind is not PriceService}
    with pytest.raises(RuntimeError, match=r"/prices needs PriceService"):
        guarded(
            provided,
            hub=services.hub,
            clock=clock,
            measures=services.measures,
            hosts=(),
            authenticate=lambda _token: ANONYMOUS,
            reach=lambda _who, _need: "none",
        )
