"""Pages about money, secrets and environments in a browser: forms, confirmations, and findings of axe-core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from serverless_gpu.wire.access import SecretList
from tests.support.server.served import Served
from tests.support.web.browser import reader
from tests.support.web.filled import Filling
from tests.support.web.money import filled_with_money


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with filled_with_money(tmp_path_factory.mktemp("home"), 3, Filling(runs=60, nodes=2)) as running:
        yield running


def serious(page: Page) -> list[str]:
    found: dict[str, Any] = Axe().run(page).response
    return [
        f"{problem['id']}: {problem['nodes'][0]['html'][:160]}"
        for problem in found["violations"]
        if problem["impact"] in ("serious", "critical")
    ]


def subpages(page: Page) -> list[str]:
    """Return pages that the navigation does not list."""
    page.goto("/ui/environments")
    found = [str(link.get_attribute("href")) for link in page.locator("td a").all()]
    address = [path.rpartition("/")[2] for path in found]
    return [
        "/ui/usage?by=name",
        "/ui/usage?by=tag:project&team=vision&measure=time",
        "/ui/budgets/budget-0001",
        f"/ui/environments/{address[0]}",
        f"/ui/environments/diff?old={address[0]}&new={address[1]}",
        "/ui/audit/verification",
        "/ui/prices?all=true",
    ]


def test_pages_of_one_object_have_no_serious_finding_and_fit_a_phone(chromium: Browser, server: Served) -> None:
    problems: list[str] = []
    with reader(chromium, server, width=400) as page:
        for path in subpages(page):
            page.goto(path)
            problems += [f"{path}: {one}" for one in serious(page)]
            if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
                problems.append(f"{path}: too wide")
    assert problems == []


def test_a_secret_is_read_from_a_file_and_deleted_after_its_name_is_typed(
    chromium: Browser, server: Served, tmp_path: Path
) -> None:
    def names() -> set[str]:
        found: SecretList = server.connection().ask("GET", "/secrets", answer=SecretList)
        return {one.name for one in found.secrets}

    file = tmp_path / "token.txt"
    file.write_bytes(b"from a file\n")
    with reader(chromium, server) as page:
        page.goto("/ui/secrets")
        page.get_by_label("Name").fill("FROM_FILE")
        page.locator("input[type=file]").set_input_files(str(file))
        page.locator("textarea[name=value]").evaluate(
            "area => new Promise(done => { const look = () => area.value ? done() : setTimeout(look, 10); look(); })"
        )
        assert page.locator("textarea[name=value]").input_value() == "from a file\n\n"
        page.get_by_role("button", name="Set secret").click()
        page.wait_for_selector("td:text('FROM_FILE')")
        assert "FROM_FILE" in names()
        page.get_by_role("button", name="Delete FROM_FILE").click()
        dialog = page.locator("dialog")
        assert dialog.locator("button.danger").is_disabled()
        dialog.get_by_role("textbox").fill("FROM_FILE")
        dialog.locator("button.danger").click()
        page.wait_for_selector("td:text('FROM_FILE')", state="detached")
    assert "FROM_FILE" not in names()


def test_an_open_page_of_budgets_follows_a_change(chromium: Browser, server: Served) -> None:
    with reader(chromium, server) as page:
        page.goto("/ui/budgets")
        page.wait_for_selector("#connection.live")
        with reader(chromium, server) as another:
            another.goto("/ui/budgets")
            another.get_by_label("Name", exact=True).fill("later")
            another.get_by_label("Limit", exact=True).fill("5")
            another.get_by_role("button", name="Create budget").click()
            another.wait_for_url("**/ui/budgets/later")
        page.wait_for_selector("#budgets a:text('later')")
