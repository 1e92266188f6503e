"""Profiles of hypothesis: a short one that always asks the same, and the one of `make fuzz`, which asks on."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_QUIET = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile("short", max_examples=60, deadline=None, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("long", max_examples=3_000, deadline=None, suppress_health_check=_QUIET)

_NAME = settings.get_current_profile_name()
ASKED = settings.get_profile("short" if _NAME == "default" else _NAME)
"""How often tests here ask; `--hypothesis-profile` says otherwise."""
