"""Helpers of the tests of walk that other tests use as well."""

from __future__ import annotations

from serverless_gpu.ambient import new_run_id
from serverless_gpu.server.http.routing import Route
from serverless_gpu.wire.base import API


def path_of(route: Route) -> str:
    path = route.path
    for name, kind in route.parts.items():
        value = "7" if kind is int else new_run_id()
        path = path.replace("{" + name + "}", value).replace("{" + name + ":path}", value)
    return API + path
