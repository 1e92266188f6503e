"""Calls handlers of the JSON API in the name of a page's reader, with the API's access checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from serverless_gpu.errors import NotAllowed
from serverless_gpu.model import access_control
from serverless_gpu.server.http.routing import ANY_CALLER, PUBLIC, Call, Need, Route

T = TypeVar("T")


class ApiCalls:
    """Finds and calls the API's handlers."""

    def __init__(self) -> None:
        self._routes: dict[Callable[..., Any], Route] = {}

    def bind(self, routes: Sequence[Route]) -> None:
        """Set the routes, which are bound to their services."""
        self._routes = {route.handler: route for route in routes}

    def ask(self, call: Call, handler: Callable[..., T], **arguments: Any) -> T:
        """Call a handler of the API for the reader of a page.

        Args:
            call: the request for the page.
            handler: function that a module of the API declares as a route.
            arguments: `query`, `body` and the parts of the path. An omitted query has its defaults.

        Raises:
            NotAllowed: the reader's role has no access to the resource.
        """
        route = self._routes[handler]
        reach = reach_of(call, route.needs)
        if reach == access_control.AccessReach.NONE:
            verb = "change" if route.needs.write else "see"
            raise NotAllowed(f"{call.who.name} may not {verb} {route.needs.noun}")
        asked = Call(route, call.who, reach, clock=call.clock, measures=call.measures)
        asked.headers = call.headers
        if route.query is not None:
            arguments.setdefault("query", route.query())
        return handler(asked, **route.arguments, **arguments)


def reach_of(call: Call, needs: Need) -> str:
    """Return the reach of a page's reader on a resource."""
    if needs in (ANY_CALLER, PUBLIC):
        return access_control.AccessReach.OWN
    return access_control.reach(call.who.role, needs.noun, write=needs.write, scopes=call.who.scopes).value
