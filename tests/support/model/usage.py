"""Helpers of the tests of usage that other tests use as well."""

from __future__ import annotations

import msgspec


class Account(msgspec.Struct, frozen=True, kw_only=True):
    owner: str = "alice"
    team: str = "search"
    pool: str = "lab"
    reserved: bool = False
    policy: str = "nightly"
    gpu_type: str = "H100"
    name: str = "train"
    workload: str = "function"
    environment: str = "e1"
    currency: str = "USD"
    tags: dict[str, str] = {}
