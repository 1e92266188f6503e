"""Extras of the package, and the page that lists them."""

from __future__ import annotations

import re
import tomllib

from tests.support.paths import REPOSITORY

OF_DEVELOPMENT = {"demo", "examples", "programs", "dev", "bench", "site"}


def extras() -> dict[str, list[str]]:
    """Return the optional dependencies of the package."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def test_23B13_the_extra_all_has_every_extra_of_users() -> None:
    found = extras()
    (requirement,) = found["all"]
    match = re.fullmatch(r"serverless-gpu\[(.+)\]", requirement)
    assert match is not None
    assert set(match[1].split(",")) == set(found) - OF_DEVELOPMENT - {"all"}


def test_23B13_the_page_lists_the_extras() -> None:
    page = (REPOSITORY / "docs" / "how-to" / "installing.md").read_text(encoding="utf-8")
    table = page.partition("| extra |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(extras()) - OF_DEVELOPMENT
