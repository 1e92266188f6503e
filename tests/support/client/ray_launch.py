"""Helpers of the tests of ray launch that other tests use as well."""

from __future__ import annotations

from pathlib import Path


def make_ray_package(directory: Path, *, real: bool = True) -> str:
    """Make a package `ray` and return the path of its module."""
    package = directory / "ray"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if real:
        (package / "_raylet.so").touch()
    return str(package / "__init__.py")
